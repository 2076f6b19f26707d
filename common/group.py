"""Actors that are called together, and what happens when one of them dies, hangs or runs out of memory."""
import contextlib
import copy
import importlib
import os
import time

from common import gpus
from common.cli import Stop

GPUS = "RUN_GPUS"         # numbers of the GPUs for an actor, within those that its node was given


class Host:
    """The Ray actor: holds one object of a class that is imported here, so that the driver needs neither megatron-core
    nor vLLM."""

    def who(self):
        """(node's name, Ray's id of the node, process, when it began: a process number alone may come again)."""
        import psutil
        import ray
        return os.uname().nodename, ray.get_runtime_context().get_node_id(), os.getpid(), psutil.Process().create_time()

    def build(self, where, arguments):
        if GPUS in os.environ:                                # before the class, and torch with it, is imported
            gpus.take([int(i) for i in os.environ[GPUS].split(",")])
        module, _, name = where.partition(":")
        self.held = getattr(importlib.import_module(module), name)(**arguments)

    def call(self, verb, asked):
        args, kw = asked
        return getattr(self.held, verb)(*args, **kw)


class Group:
    """Actors that hold objects of one class. `group.verb(...)` calls the verb on all of them at once and returns their
    answers in order; `group.each("verb", [args, ...])` gives every actor its own arguments. An actor that died, refused
    or took longer than the verb's limit ends the call with Stop.

    Where actors do without each other (engines; not ranks, which wait for a dead one), a verb in `again` outlives a death:
    what the others answer is kept, the dead one is built anew, `again[verb]` (or None) gets it as a group of its own and
    brings it to where the others are, and only it is asked again. hint: what to do about a lost actor, told with it."""

    def __init__(self, name, make, n, limits, restarts):
        """make(i): starts actor i, returns (actor, futures of `who` and `build`). limits: {verb: seconds}, None for all
        others; restarts: how many deaths the group outlives."""
        self.name, self._make, self.limits, self.restarts = name, make, limits or {}, restarts
        self.hint, self.again, self._dead, self._numbers = "", {}, {}, list(range(n))
        self.actors, self._who, self._building = map(list, zip(*map(make, range(n))))

    def ready(self):
        """Wait until all objects are built."""
        self._gather("start", self._building)
        return self

    def __len__(self):
        return len(self.actors)

    def __getattr__(self, verb):
        if verb.startswith("_"):
            raise AttributeError(verb)

        def ask(*args, **kw):
            import ray
            shared = ray.put((args, kw))                      # once for all: a batch with its routes may have gigabytes
            return self._ask(verb, [shared] * len(self.actors))
        return ask

    def each(self, verb, arguments):
        if len(arguments) != len(self.actors):
            raise ValueError(f"{len(arguments)} sets of arguments for {len(self.actors)} actors of {self.name}")
        return self._ask(verb, [(args, {}) for args in arguments])

    def _ask(self, verb, calls):
        import ray
        futures = [actor.call.remote(verb, call) for actor, call in zip(self.actors, calls)]
        while self._gather(verb, futures):
            new = self.restart()
            if self.again[verb]:
                self.again[verb](self.only(new))
            for i in new:
                futures[i] = self.actors[i].call.remote(verb, calls[i])
        return ray.get(futures)

    def _gather(self, verb, futures):
        """Wait for all. Whether any died, where the verb can be asked again; else whatever goes wrong first is raised."""
        import ray
        left, limit = list(futures), self.limits.get(verb, self.limits.get(None))
        until = limit and time.monotonic() + limit
        while left:                       # look at whichever ends first: a dead rank must not hide behind one that waits for it
            done, left = ray.wait(left, num_returns=1, timeout=until and max(0, until - time.monotonic()))
            if not done:
                raise self._hung(verb, limit, [futures.index(f) for f in left])
            try:
                ray.get(done[0])
            except ray.exceptions.RayError as error:
                if not self._died(futures.index(done[0]), verb, error):
                    self._refused(verb, futures, done[0], left, error)
                elif verb not in self.again:
                    raise Stop(f"{self._dead[futures.index(done[0])]}{self._advice()}") from error
        return bool(self._dead) and verb in self.again

    def _died(self, i, verb, error):
        """Whether the error is the end of actor i or of the engine in it; then it is noted for `restart`."""
        import ray
        cause = getattr(error, "cause", None)
        if not isinstance(error, ray.exceptions.RayActorError) and type(cause).__name__ != "EngineDeadError":
            return False
        why = str(cause or error).strip().splitlines()[0 if cause else -1].strip()
        if "Worker exit type: SYSTEM_ERROR" in why:           # Ray adds a paragraph on what may have been the cause
            why = "its process crashed or was killed, as Linux does where memory runs out"
        self._dead[i] = f"{self._called(i)} died during {verb} ({why})"
        return True

    def _refused(self, verb, futures, ref, left, error):
        import ray
        if told := _sentence(error.cause if isinstance(error, ray.exceptions.RayTaskError) else None):
            raise Stop(f"{self.name} {self._numbers[futures.index(ref)]}, {verb}: {told}") from error
        for other in ray.wait(left, num_returns=len(left), timeout=10)[0] if left else ():
            try:                          # a rank whose peer died fails too, and may say so first
                ray.get(other)
            except ray.exceptions.RayError as death:
                if self._died(futures.index(other), verb, death):
                    raise Stop(f"{self._dead[futures.index(other)]}{self._advice()}") from error
        raise error

    def _hung(self, verb, limit, waiting):
        """Kill those that have not answered; a Stop that names the one that stands still before those that only wait for it."""
        import ray
        states = dict.fromkeys(waiting, "its node does not answer")
        ends = {_end_there(*self._where(i)[1:]): i for i in waiting if self._where(i)[1]}
        for ref in ray.wait(list(ends), num_returns=len(ends), timeout=60)[0] if ends else ():
            with contextlib.suppress(ray.exceptions.RayError):                # the node is gone
                states[ends[ref]] = ray.get(ref)
        first, *others = sorted(waiting, key=lambda i: (states[i] in ("running", "sleeping"), i))
        too = f"; killed with it: {', '.join(f'{self._numbers[i]} ({states[i]})' for i in others)}" if others else ""
        return Stop(f"{self._called(first)} did not answer {verb} within {limit:g} s and was killed (its process: "
                    f"{states[first]}){too}{self._advice()}")

    def restart(self):
        """Build the actors anew that died since, with the arguments and in the place that they had; the others go on. Returns
        their indices, none if nobody died. Stop for one death more than `restarts`, or if a node is gone."""
        import ray
        dead, self._dead = self._dead, {}
        for i, told in dead.items():
            if not self.restarts:
                raise Stop(f"{told}, and no restart is left{self._advice()}")
            if self._where(i)[1] not in {node["NodeID"] for node in ray.nodes() if node["Alive"]}:
                raise Stop(f"{told}, its node is gone{self._advice()}")
            self.restarts -= 1
            print(f"{told}: started again, {self.restarts} restarts are left", flush=True)
            ray.kill(self.actors[i])      # of an actor whose engine died
            self.actors[i], self._who[i], self._building[i] = self._make(self._numbers[i])
        self.only(dead).ready()
        return sorted(dead)

    def only(self, indices):
        """Some of the actors, as a group; a death among them ends its call."""
        part = copy.copy(self)
        part.again, part.restarts, part._dead = {}, 0, {}
        part.actors, part._who, part._building, part._numbers = (
            [every[i] for i in indices] for every in (self.actors, self._who, self._building, self._numbers))
        return part

    def _where(self, i):
        """What actor i's `who` answered, unless it never came up."""
        import ray
        try:
            return ray.get(self._who[i], timeout=5)
        except ray.exceptions.RayError:
            return "a node", None

    def _called(self, i):
        return f"{self.name} {self._numbers[i]} on {self._where(i)[0]}"

    def _advice(self):
        return f": {self.hint}" if self.hint else ""

    def stop(self):
        import ray
        for actor in self.actors:
            ray.kill(actor)


def _end_there(node, pid, began):
    """A future of `_end` on a node: ray.kill asks the process itself, which a stopped one does not hear."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    on = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(_end).options(num_cpus=0, scheduling_strategy=on).remote(pid, began)


def _end(pid, began):
    """What a process of this node is doing (stopped, disk-sleep, running, ...), then its end and its children's."""
    import psutil
    try:
        process = psutil.Process(pid)
        if process.create_time() != began:
            return "gone"
        state = process.status()
        for one in (*process.children(recursive=True), process):
            one.kill()
    except psutil.NoSuchProcess:
        return "gone"
    return state


OUT_OF_MEMORY = ("out of memory", "allocate memory", "No available memory", "Free memory on device", "Available memory on node",
                 "cache is needed, which is larger")


def _sentence(cause):
    """An error that says enough without its traceback, as one line: Stop, or a lack of memory; else None. By name and text: the
    driver does without torch, and vLLM wraps what its engine's process says."""
    text = str(cause).strip()
    if isinstance(cause, Stop):
        return text.splitlines()[0]
    if "Engine core initialization failed" in text:
        return "vLLM's engine did not start; its output says why (a lack of memory: gpu_memory_utilization, max_num_seqs)"
    if type(cause).__name__ in ("OutOfMemoryError", "MemoryError") or any(words in text for words in OUT_OF_MEMORY):
        lines = [line for line in text.splitlines() if any(words in line for words in OUT_OF_MEMORY)] or text.splitlines()[:1]
        return f"out of memory{': ' + lines[0].strip() if lines else ''}"
    return None
