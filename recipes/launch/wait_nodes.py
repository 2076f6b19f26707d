"""Wait until the Ray cluster at RAY_ADDRESS is the given hosts with so many GPUs each, no fewer and no more:

python recipes/launch/wait_nodes.py SECONDS GPUS HOST [HOST ...]      (node.sh starts each host's Ray with --node-name HOST)
"""
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from common.cli import Stop, run_main  # noqa: E402


def wrong(gpus, hosts, found):
    """What keeps `found` ({host: GPUs}) from being `hosts` with `gpus` each: a list of clauses."""
    missing = [host for host in hosts if host not in found]
    return ([f"{len(missing)} of {len(hosts)} hosts are missing: {', '.join(missing)}"] if missing else []) \
        + [f"{host} has {n} GPUs, not {gpus}" for host, n in sorted(found.items()) if host in hosts and n != gpus] \
        + [f"{host} is not one of this job's hosts" for host in sorted(found) if host not in hosts]


def main():
    import ray
    seconds, gpus, hosts = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    end = time.time() + seconds
    while not ray.is_initialized():
        try:
            ray.init(log_to_driver=False, configure_logging=False)
        except (ConnectionError, RuntimeError) as error:      # the head answers before it knows its first host
            if time.time() > end:
                raise Stop(f"no Ray cluster answers within {seconds:g} s: {str(error).splitlines()[0]}") from error
            time.sleep(0.5)
    while clauses := wrong(gpus, hosts, {n["NodeName"]: int(n["Resources"].get("GPU", 0)) for n in ray.nodes() if n["Alive"]}):
        if time.time() > end:
            raise Stop(f"the Ray cluster is not complete: {'; '.join(clauses)}")
        time.sleep(0.5)
    print(f"Ray: {len(hosts)} hosts x {gpus} GPUs", flush=True)


if __name__ == "__main__":
    run_main(main)
