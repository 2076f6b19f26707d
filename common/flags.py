"""A dataclass as command-line flags, its comments as the help text. Standard library only, so that `--help` answers at once."""
import ast
import dataclasses
import difflib
import io
import math
import sys
import textwrap
import tokenize
import types
import typing
from pathlib import Path


class Stop(Exception):
    """A mistake of the user or of the surroundings, told in one sentence; the process ends with `code` and no traceback."""

    def __init__(self, sentence, code=1):
        super().__init__(sentence)
        self.code = code


def parse(Config, presets=None, doc="", argv=None):
    """An instance of the dataclass `Config` from the command line (`argv` defaults to sys.argv[1:]).

    Every field is a flag: `--group-size 8`, `--group_size=8`, `--flag`, `--no-flag`, tuples as `a,b`, `none` for Optional.
    A field named like a word of Python ends with an underscore that its flag lacks: `from_` is `--from`.
    `presets` maps a flag (`--rehearse`) to the values it sets; flags given explicitly win over it, in any order.
    Raises Stop for an unknown flag (naming the nearest), a missing or an ill-typed value."""
    presets, argv = presets or {}, list(sys.argv[1:] if argv is None else argv)
    hints, given, chosen = typing.get_type_hints(Config), {}, []
    names = [f.name for f in dataclasses.fields(Config) if f.init]
    for preset, values in presets.items():
        assert set(values) <= set(names), f"preset {preset} sets {set(values) - set(names)}, which {Config.__name__} lacks"
    while argv:
        flag, eq, value = argv.pop(0).partition("=")
        name = flag[2:].replace("-", "_")
        name += "_" * (f"{name}_" in names)
        if flag in ("-h", "--help"):
            print(usage(Config, presets, doc))
            raise SystemExit(0)
        if not flag.startswith("--"):
            raise Stop(f"unexpected argument {flag + eq + value!r}: options look like {_flag(names[0])} VALUE")
        negated = name.startswith("no_") and hints.get(name[3:]) is bool and name not in names
        name = name[3:] if negated else name
        if name not in names and name not in presets:
            near = difflib.get_close_matches(name, [*names, *presets, "help"], n=1, cutoff=0.5)
            raise Stop(f"unknown option {flag}: " + (f"the nearest one is {_flag(near[0])}" if near else "--help lists them all"))
        if hints.get(name, bool) is bool:
            if negated and eq:
                raise Stop(f"{flag} takes no value")
            if not eq and argv and argv[0].lower() in ("true", "false"):
                raise Stop(f"{flag} takes no value: --{name.replace('_', '-')} or --no-{name.replace('_', '-')}")
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


def _flag(name):
    return "--" + name.removesuffix("_").replace("_", "-")


def _type_name(kind):
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)


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
        if kind is float and not math.isfinite(float(text)):
            raise Stop(f"{flag}: {text!r} is not a finite number")
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
    for p in presets:
        sets = [f"{k} {v}" if v != "" else f"{k} made by itself" for k, v in presets[p].items()]
        lines += textwrap.wrap(f"{_flag(p)} sets " + ", ".join(sets), 128, subsequent_indent="  ")
    hints = typing.get_type_hints(Config)
    for f in dataclasses.fields(Config):
        heading, text = comments[f.name]
        if heading != group:
            group = heading
            lines += ["", *([heading] if heading else [])]
        value = f.default if f.default is not dataclasses.MISSING else f.default_factory()
        value = ",".join(map(str, value)) if isinstance(value, tuple) else value
        if typing.get_origin(hints[f.name]) is typing.Literal:
            text = " or ".join(map(str, typing.get_args(hints[f.name]))) + (f": {text}" if text else "")
        lines.append(f"  {_flag(f.name)} {value}".ljust(38) + f" {text}".rstrip())
    return "\n".join(lines)
