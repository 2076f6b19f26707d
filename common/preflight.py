"""Before actors are placed: is every node of the cluster the same as the driver, and does it have what the run needs?

Equal must be: sources, Python, packages, NCCL, model, data, GPU and its driver. Enough must be: GPUs and their free memory, host
memory, room in runs/ and /dev/shm. And runs/ must be one folder: what the driver writes there, all see. A resumed run must find
the model and the data that it was started with: their fingerprints are in its inputs.json."""
import hashlib
import json
import os
import shutil
import subprocess
import time
import uuid
from importlib import metadata
from pathlib import Path

from common import cli
from common.gpus import named

ROOT = Path(__file__).resolve().parent.parent
IDLE = 0.95              # of a GPU's memory is free when nobody uses it: the driver takes 1 to 3 %
SHM = 8 << 30            # vLLM and NCCL exchange through /dev/shm; a container's default of 64 MiB ends them without a sentence
SECONDS = 120            # for all nodes to answer; 2 to 5 are usual, first imports from a slow file system take longer


def equal(model, files):
    """What must be the same on every node: {what: value}."""
    from common.bundle import base_fingerprint
    found = cli.versions()
    nccl = [f"{d.name} {d.version}" for d in metadata.distributions() if (d.name or "").startswith("nvidia-nccl")]
    sources = {str(path.relative_to(ROOT)): _sha256(path) for top in ("checks", "common", "data", "eval", "recipes")
               for path in (ROOT / top).rglob("*.py")}
    return {"sources": sources, **{what: found[what] for what in ("python", *cli.PACKAGES)},
            "NCCL": ", ".join(sorted(nccl)) or None, f"model {model}": _read(base_fingerprint, model),
            **{file: _read(_sha256, file) for file in files}}


def _sha256(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def _read(fingerprint, path):
    try:
        return fingerprint(path)
    except OSError as error:
        return f"unreadable ({error.strerror})"
    except cli.Stop as error:
        return f"unreadable ({error})"


def amounts(runs):
    """What must be enough on a node: the GPUs that it was given as (name, driver, bytes, free bytes), and bytes of host memory
    and disk."""
    cards, given = [], named()
    if shutil.which("nvidia-smi"):                            # it lists all, whatever was given
        asked = subprocess.run(["nvidia-smi", "--query-gpu=index,uuid,name,driver_version,memory.total,memory.free",
                                "--format=csv,noheader,nounits"], capture_output=True, text=True)
        rows = [line.split(", ") for line in asked.stdout.splitlines() if asked.returncode == 0]
        if given is not None:                                 # CUDA takes the first letters of a UUID, too
            rows = [row for name in given for row in rows
                    if name == row[0] or name.startswith("GPU-") and row[1].startswith(name)]
        cards = [(name, driver, int(total) << 20, int(free) << 20) for _, _, name, driver, total, free in rows]
    return {"gpus": cards, "host memory": _host_memory(), "room in runs/": shutil.disk_usage(runs).free,
            "room in /dev/shm": shutil.disk_usage("/dev/shm").free}


def _host_memory():
    """Bytes that can still be had: the machine's, or what the job's or container's cgroup (version 2) leaves of them."""
    def number(path, *names):
        return sum(int(line.split()[1]) for line in Path(path).read_text().splitlines() if line.startswith(names))
    free = [number("/proc/meminfo", "MemAvailable:") << 10]
    group = Path("/sys/fs/cgroup", Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2].strip("/"))
    for folder in (group, *group.parents):
        if (folder / "memory.max").is_file() and (limit := (folder / "memory.max").read_text().strip()) != "max":
            cached = number(folder / "memory.stat", "active_file ", "inactive_file ")     # given back when it is needed
            free.append(int(limit) - int((folder / "memory.current").read_text()) + cached)
    return min(free)


def answer(node, model, files, mark):
    """What a node has to say; `mark` is a file that the driver wrote in the run's folder, answered by one beside it."""
    end = time.time() + 5                                     # a shared file system may show a new file late
    while not (seen := mark.is_file()) and time.time() < end:
        time.sleep(0.2)
    try:
        wrote = "answered, but the driver does not see it" if seen else "not seen"
        mark.with_name(f"{mark.name}-{node}").touch() if seen else None
    except OSError as error:
        wrote = f"not writable ({error.strerror})"
    return {"equal": equal(model, files), "runs": wrote, **amounts(next(p for p in mark.parents if p.exists()))}


def differences(there, here):
    """[(what, value there, the driver's)] of two results of `equal`; of the sources, the first file that differs."""
    found, a, b = [], there["sources"], here["sources"]
    if odd := sorted(file for file in {*a, *b} if a.get(file) != b.get(file)):
        found.append((odd[0] + f" and {len(odd) - 1} more sources" * (len(odd) > 1), a.get(odd[0]), b.get(odd[0])))
    found += [(what, there[what], here[what]) for what in here if what != "sources" and there[what] != here[what]]
    return [(what, a or "missing", f"driver: {b or 'missing'}") for what, a, b in found]


def shortages(there, gpus, needs, idle):
    """[(what, value there, what is needed)] of a result of `amounts`. needs: bytes of what it names."""
    memory = [(f"free memory of GPU {i}", free, idle * total) for i, (_, _, total, free) in enumerate(there["gpus"][:gpus])]
    memory += [(what, there[what], n) for what, n in needs.items()]
    return [("GPUs", len(there["gpus"]), f"needed: {gpus}")] * (len(there["gpus"]) < gpus) \
        + [(what, f"{has / 2**30:,.1f} GiB", f"needed: {n / 2**30:,.1f} GiB") for what, has, n in memory if has < n]


def unchanged(runs, model, files, here):
    """Stop if model or data have other content than at the run's first start (`here`: a result of `equal`); the first call makes
    a note of it. config.json has their names alone."""
    now, note = {"model": here[f"model {model}"], "data": [here[file] for file in files]}, Path(runs) / "inputs.json"
    if not note.is_file():
        return cli.write_atomic(note, json.dumps(now, indent=1) + "\n")
    was = json.loads(note.read_text())
    rows = [(path, a, b) for path, a, b in zip((model, *files), (was["model"], *was["data"]), (now["model"], *now["data"]))
            if a != b]
    if rows:
        told = ", ".join(f"{path} (fingerprint {a}, now {b})" for path, a, b in rows)
        raise cli.Stop(f"{runs} was started with other content in {told}: put that back or use another --name")


def check(n, gpus, model, files, runs, needs=None, idle=IDLE):
    """Ask every node of the Ray cluster that has GPUs (all when `gpus` is 0) and compare it with this process; Stop names all
    that differ. The run takes n times `gpus` GPUs, on fewer machines where one holds several. needs: bytes of "host memory" for
    each time and of "room in runs/"; idle: share of a GPU that must be free."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

    from common.cluster import OWN_DEVICES
    start, root, mark = time.time(), str(ROOT), Path(runs).absolute() / f".preflight-{uuid.uuid4().hex}"
    model, files = str(Path(model).absolute()), [str(Path(file).absolute()) for file in files]
    needs = {**(needs or {}), **({"room in /dev/shm": SHM} if gpus else {})}
    nodes = {n["NodeID"]: n["NodeName"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("GPU", 0) >= min(gpus, 1)}
    if gpus and nodes:
        gpus, needs = gpus * (times := -(-n // len(nodes))), {**needs, "host memory": needs.get("host memory", 0) * times}

    def ask(node):                        # sent as code, not by name: a node without this checkout must be able to say so
        try:
            from common import preflight
            return preflight.answer(node, model, files, mark)
        except ImportError as error:
            return f"unusable ({error})"

    env = {"env_vars": {"PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}", **OWN_DEVICES}}       # as cluster.start's
    mark.touch()
    try:
        task = ray.remote(num_cpus=0, max_retries=0, runtime_env=env)(ask)
        asked = {task.options(scheduling_strategy=On(node, soft=False)).remote(node): node for node in nodes}
        here, card = equal(model, files), None
        done, late = ray.wait(list(asked), num_returns=len(asked), timeout=SECONDS) if asked else ([], [])
        rows = [("the cluster", "nodes with GPUs", 0, "needed: more")] * (not nodes)
        rows += [(nodes[asked[future]], "answer", f"none in {SECONDS} s", "needed: one") for future in late]
        for future in sorted(done, key=lambda f: nodes[asked[f]]):
            try:
                there = ray.get(future)
            except ray.exceptions.RayError as error:
                there = f"failed ({str(error).strip().splitlines()[-1]})"
            odd = [(f"checkout {root}", there, "needed: the driver's")]
            if not isinstance(there, str):
                cards = {f"{name}, driver {driver}" for name, driver, *_ in there["gpus"][:gpus]}
                card = card or min(cards, default=None)       # of the first node: the driver's machine may have none
                odd = differences(there["equal"], here) + shortages(there, gpus, needs, idle) \
                    + [("GPU", other, f"first node: {card}") for other in sorted(cards - {card})]
                if not mark.with_name(f"{mark.name}-{asked[future]}").exists():
                    odd.append((f"the driver's file in {mark.parent}", there["runs"], "needed: one folder for all nodes"))
            rows += [(nodes[asked[future]], *row) for row in odd]
    finally:
        for file in mark.parent.glob(f"{mark.name}*"):
            file.unlink(missing_ok=True)
    if rows:
        print(cli.table(rows, header=("node", "what", "there", "")), flush=True)
        told = [f"{name}: " + ", ".join(f"{what} {there} ({other})" for at, what, there, other in rows if at == name)
                for name in dict.fromkeys(row[0] for row in rows)]
        raise cli.Stop(f"{len(told)} of {len(nodes)} nodes are not fit for this run: {'; '.join(told)}")
    unchanged(runs, model, files, here)
    print(f"preflight: {len(nodes)} node{'s' * (len(nodes) > 1)} alike and fit, {time.time() - start:.1f} s", flush=True)
