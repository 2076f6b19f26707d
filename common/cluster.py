"""Ray: start or join it, place the actors, which are called as groups (group.py). An actor is a plain class with a few verbs."""
import contextlib
import os
import signal
import time
import uuid

from common.cli import Stop
from common.group import GPUS, Group, Host

# Actors ask Ray for no GPU and choose their own (see start): Ray must not hide the GPUs from them.
OWN_DEVICES = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
# torch's watchdog ends a process some minutes after a peer of any of its groups is lost: the trainer, when an engine dies. A call
# that hangs is ended by its limit (group.py).
NO_WATCHDOG = {"TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}


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


def _interrupt(*_, times=[]):                                        # noqa: B006
    times.append(time.monotonic())
    if len(times) == 1 or times[-1] - times[-2] > 5:                 # Slurm sends it to the job's script too, which passes it on
        raise KeyboardInterrupt


@contextlib.contextmanager
def trainer_turn(trainer, sampler):
    """The trainer has the GPUs, the sampler sleeps: full-size weights of both do not fit. Outside, the sampler has them."""
    sampler.sleep()
    trainer.onload()
    try:
        yield
    finally:                                                          # the check goes on after some failures
        trainer.offload()
        sampler.wake()


def nodes(n, gpus_per_node, seconds=120):
    """A placement group of `n` nodes, a bundle with all GPUs for each; Stop if the cluster does not have them in time. Where Ray
    has one machine alone, that takes the place of several nodes if it has GPUs for all of them."""
    import ray
    from ray.util.placement_group import placement_group
    bundle = {"CPU": 1, **({"GPU": gpus_per_node} if gpus_per_node else {})}
    one = len([node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0) >= min(gpus_per_node, 1)]) == 1
    group = placement_group([bundle] * n, strategy="PACK" if n == 1 or one else "STRICT_SPREAD")
    if not group.wait(seconds):
        have = [f"{node['NodeManagerAddress']}: {int(node['Resources'].get('GPU', 0))} GPUs"
                for node in ray.nodes() if node["Alive"]]
        raise Stop(f"{n} nodes with {gpus_per_node} free GPUs each were not there within {seconds} s; "
                   f"the cluster has {'; '.join(have)}")
    return group


def meeting(trainer, folder):
    """Where the trainer's ranks meet, for `load`: on one machine in a file, so that nothing listens on the network; it stays,
    because NCCL reads it again whenever a group of ranks talks for the first time. On several at an address of rank 0."""
    import ray
    if len([node for node in ray.nodes() if node["Alive"]]) > 1:
        return trainer.address()[0]
    return str((folder / f"rendezvous-{uuid.uuid4().hex}").absolute())


def release(place):
    """Give a placement group's GPUs back."""
    from ray.util.placement_group import remove_placement_group
    remove_placement_group(place)


def start(where, name, place, arguments, on=None, env=None, gpus=0, limits=None, restarts=0):
    """Start one actor for each dict in `arguments`, spread evenly over the nodes of `place`, or over those that `on` numbers;
    call `ready()` on the group before its verbs.

    where: "module:Class", built in the actor with the dict as keyword arguments. gpus: how many of its node's GPUs an actor sees,
    the first actor there the first ones of those that the node was given (gpus.py). Trainer ranks and sampler engines share
    cards, so Ray's own bookkeeping (one owner a GPU) is left out: an actor takes its node's bundle and chooses its GPUs itself.
    env: environment variables of the actors' processes. limits, restarts: as in Group; "start" is the limit of `ready`."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    host, on = ray.remote(Host), on or range(len(place.bundle_specs))
    per_node = -(-len(arguments) // len(on))
    machine = ray.util.placement_group_table(place)["bundles_to_node_id"]

    def make(i):
        variables = {"PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}", **OWN_DEVICES, **NO_WATCHDOG,
                     **(env or {})}
        bundle = on[i // per_node]
        variables |= {"RUN_NODE": str(bundle)} if machine[bundle] in [machine[b] for b in machine if b != bundle] else {}
        if gpus:                                             # after those of the bundles before it on the same machine
            first = sum(int(place.bundle_specs[b]["GPU"]) for b in range(bundle) if machine[b] == machine[bundle])
            first += i % per_node * gpus
            variables |= {GPUS: ",".join(str(first + g) for g in range(gpus))}
        there = PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=bundle)
        actor = host.options(num_cpus=0, scheduling_strategy=there, runtime_env={"env_vars": variables}).remote()
        return actor, actor.who.remote(), actor.build.remote(where, arguments[i])
    return Group(name, make, len(arguments), limits, restarts)
