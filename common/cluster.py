"""Ray: start or join it, place the actors, call them as groups. An actor is a plain class with a few verbs."""
import contextlib
import importlib
import os
import signal

from common.cli import Stop

# Actors ask Ray for no GPU and choose their own (see start): Ray must not hide the GPUs from them.
OWN_DEVICES = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


class Host:
    """The Ray actor: holds one object of a class that is imported here, so that the driver needs neither megatron-core
    nor vLLM."""

    def build(self, where, arguments):
        module, _, name = where.partition(":")
        self.held = getattr(importlib.import_module(module), name)(**arguments)

    def call(self, verb, args, kw):
        return getattr(self.held, verb)(*args, **kw)


class Group:
    """Actors that hold objects of one class. `group.verb(...)` calls the verb on all of them at once and returns their
    answers in order; `group.each("verb", [args, ...])` gives every actor its own arguments. An actor that died or
    refused ends the call with Stop."""

    def __init__(self, name, actors, starting):
        self.name, self.actors, self._starting = name, actors, starting

    def ready(self):
        """Wait until all objects are built."""
        self._gather("start", self._starting)
        return self

    def __len__(self):
        return len(self.actors)

    def __getattr__(self, verb):
        if verb.startswith("_"):
            raise AttributeError(verb)
        return lambda *args, **kw: self._gather(verb, [a.call.remote(verb, args, kw) for a in self.actors])

    def each(self, verb, arguments):
        if len(arguments) != len(self.actors):
            raise ValueError(f"{len(arguments)} sets of arguments for {len(self.actors)} actors of {self.name}")
        return self._gather(verb, [a.call.remote(verb, args, {}) for a, args in zip(self.actors, arguments)])

    def _gather(self, verb, futures):
        import ray
        left = list(futures)
        while left:                       # look at whichever ends first: a dead rank must not hide behind one that waits for it
            done, left = ray.wait(left, num_returns=1)
            try:
                ray.get(done[0])
            except ray.exceptions.RayActorError as error:
                raise Stop(f"{self.name} {futures.index(done[0])} died during {verb} ({_reason(error)})") from error
            except ray.exceptions.RayTaskError as error:
                # torch.OutOfMemoryError by its name: the driver does without torch
                if isinstance(error.cause, Stop) or type(error.cause).__name__ == "OutOfMemoryError":
                    raise Stop(f"{self.name} {futures.index(done[0])}, {verb}: {str(error.cause).splitlines()[0]}") from error
                for other in ray.wait(left, num_returns=len(left), timeout=10)[0] if left else ():
                    try:                  # a rank whose peer died fails too, and may say so first
                        ray.get(other)
                    except ray.exceptions.RayActorError as death:
                        raise Stop(f"{self.name} {futures.index(other)} died during {verb} ({_reason(death)})") from error
                    except ray.exceptions.RayTaskError:
                        pass
                raise
        return ray.get(futures)

    def stop(self):
        import ray
        for actor in self.actors:
            ray.kill(actor)


def _reason(error):
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def connect(local, object_store_gb=1):
    """Join the cluster that RAY_ADDRESS names, or start Ray on this machine alone (`local`: in any case); Ray's ports ask for
    its token. SIGTERM (Slurm, Kubernetes) then ends the run like Ctrl-C."""
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")        # the first actor's error is told; not the others' after it
    import ray
    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS") and not local:
        try:
            ray.init(log_to_driver=True)
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise Stop(f"no Ray cluster answers at RAY_ADDRESS={os.environ['RAY_ADDRESS']}: {reason}") from error
    else:
        os.environ.pop("RAY_ADDRESS", None)
        # Ray starts a worker for each CPU that it is told of, needed or not; the actors ask for none
        ray.init("local", _node_ip_address="127.0.0.1", include_dashboard=False, log_to_driver=False, configure_logging=False,
                 num_cpus=2, object_store_memory=int(object_store_gb * 2**30))
    signal.signal(signal.SIGTERM, _interrupt)                        # after ray.init, which sets one that aborts


def _interrupt(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)                    # Slurm sends it to the job's script too, which passes it on
    raise KeyboardInterrupt


@contextlib.contextmanager
def trainer_turn(trainer, sampler):
    """The trainer has the GPUs, the sampler sleeps: full-size weights of both do not fit. Outside, the sampler has them."""
    sampler.sleep()
    trainer.onload()
    yield
    trainer.offload()
    sampler.wake()


def nodes(n, gpus_per_node, seconds=120):
    """A placement group with one bundle a node, each with all of its GPUs; Stop if the cluster does not have them in time."""
    import ray
    from ray.util.placement_group import placement_group
    bundle = {"CPU": 1, **({"GPU": gpus_per_node} if gpus_per_node else {})}
    group = placement_group([bundle] * n, strategy="STRICT_SPREAD" if n > 1 else "PACK")
    if not group.wait(seconds):
        have = [f"{node['NodeManagerAddress']}: {int(node['Resources'].get('GPU', 0))} GPUs"
                for node in ray.nodes() if node["Alive"]]
        raise Stop(f"{n} nodes with {gpus_per_node} free GPUs each were not there within {seconds} s; "
                   f"the cluster has {'; '.join(have)}")
    return group


def release(place):
    """Give a placement group's GPUs back."""
    from ray.util.placement_group import remove_placement_group
    remove_placement_group(place)


def start(where, name, place, arguments, env=None, gpus=None):
    """Start one actor for each dict in `arguments`, spread evenly over the nodes of `place`; call `ready()` on the
    group before its verbs.

    where: "module:Class", built in the actor with the dict as keyword arguments. gpus: for each actor the GPUs it sees
    ("3" or "0,1,2,3"), or None without a GPU. Trainer ranks and sampler engines share cards, so Ray's own bookkeeping
    (one owner a GPU) is left out: an actor takes its node's bundle, and CUDA_VISIBLE_DEVICES says the rest. env:
    environment variables of the actors' processes."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    host, actors, per_node = ray.remote(Host), [], -(-len(arguments) // len(place.bundle_specs))
    for i in range(len(arguments)):
        variables = {"PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}", **OWN_DEVICES, **(env or {})}
        if gpus:
            variables |= {"CUDA_VISIBLE_DEVICES": gpus[i]}
        on = PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=i // per_node)
        actors.append(host.options(num_cpus=0, scheduling_strategy=on, runtime_env={"env_vars": variables}).remote())
    return Group(name, actors, [a.build.remote(where, kw) for a, kw in zip(actors, arguments)])
