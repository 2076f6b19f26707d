"""What the preparers share: a file or a pinned commit of the Hub, read in batches; prompt styles; fingerprints; the file written.

Fingerprints are 16 hex digits: the start of the sha256 of a sorted list as JSON. `content` is that of the [problem, answer]
pairs, so it does not depend on the file's form, its order or the prompt style; `answers` is that of the answers as integers.
"""
import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from common.cli import Stop
from data import dataset

BATCH = 1 << 16                   # rows; DAPO's raw file decodes to 40 MB a batch
FULL = (errno.ENOSPC, errno.EDQUOT)

# (before, after) the problem. answer-line is the text of DAPO's published files, boxed that of Qwen2.5-Math.
STYLES = {
    "answer-line": ("Solve the following math problem step by step. The last line of your response should be of the form Answer: "
                    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n",
                    '\n\nRemember to put your answer on its own line after "Answer:".'),
    "boxed": ("", "\nPlease reason step by step, and put your final answer within \\boxed{}."),
    "plain": ("", ""),
}
Style = Literal["answer-line", "boxed", "plain"]
# slime's and open-r1's copies put "\boxed{$Answer}" into DAPO's sentence; other copies leave the sentence out
INSTRUCTION = re.compile("|".join((
    r"\A\s*Solve the following math problem step by step\.(?: The last line of your response should be of the form Answer: "
    r".{1,40} where \$Answer is the answer to the problem\.)?\s*",
    r'\s*Remember to put your answer on its own line after "Answer:"\.\s*\Z',
    r"\s*Please reason step by step, and put your final answer within \\boxed\{\}\.\s*\Z")))


class Hub(NamedTuple):
    """A data set of the Hub at a commit, and where the file lies in it."""
    id: str
    config: str
    split: str
    revision: str
    file: str

    def __str__(self):
        return f"{self.id}@{self.revision}"


class Source(NamedTuple):
    name: str                     # the beginning of every row's `source`: ID@COMMIT, or FILE sha256:...
    schema: Any                   # pyarrow.Schema
    batches: Callable[[list[str]], Iterator]    # columns -> pyarrow tables of at most BATCH rows


def ask(problem, style):
    before, after = STYLES[style]
    return [{"role": "user", "content": before + problem + after}]


def problem_of(text):
    """`text` without the instruction of any style."""
    return INSTRUCTION.sub("", text)


def fingerprint(values):
    return hashlib.sha256(json.dumps(sorted(values)).encode()).hexdigest()[:16]


def fingerprints(rows):
    """(content, answers) of rows whose answers are integers."""
    return (fingerprint([problem_of(row["prompt"][-1]["content"]), row["answer"]] for row in rows),
            fingerprint(int(row["answer"]) for row in rows))


def pinned(name, found, known, accept):
    """What the content with the fingerprint `found` is called: by `known` {fingerprint: name}, or accepted by hand. Else Stop."""
    if found not in (*known, accept):
        told = ", ".join(f"{key} {what}" for key, what in known.items())
        raise Stop(f"{name}: texts and answers have the fingerprint {found}, none of those known ({told}); "
                   f"if these texts are meant, say --accept {found}")
    return known.get(found, "accepted by --accept")


def read(path, revision, hub):
    """The Source in the file `path`; without one that of `hub`, at its own commit unless `revision` names another."""
    if path is None:
        return _hub(hub._replace(revision=revision or hub.revision))
    if revision is not None:
        raise Stop("--from reads a file, --revision a commit of the Hub: give one of the two")
    path = Path(path)
    try:
        with open(path, "rb") as f:
            is_parquet = f.read(4) == b"PAR1"
            f.seek(0)
            digest = hashlib.file_digest(f, "sha256").hexdigest()
        return (_parquet if is_parquet else _json_lines)(path, f"{path.name} sha256:{digest}")
    except OSError as error:
        raise Stop(f"{path} cannot be read: {error.strerror or str(error).splitlines()[0]}") from None


def _hub(hub):
    if not re.fullmatch("[0-9a-f]{40}", hub.revision):
        raise Stop(f"--revision {hub.revision}: not a commit of 40 hex digits, and a branch or tag can move")
    import datasets
    import httpx  # the Hub's client, some of whose errors come through
    way_out = (f"download https://huggingface.co/datasets/{hub.id}/resolve/{hub.revision}/{hub.file} where there is a network "
               "and use --from FILE")
    try:
        data = datasets.load_dataset(hub.id, hub.config, split=hub.split, revision=hub.revision)
    except (OSError, ValueError, httpx.HTTPError, datasets.exceptions.DatasetsError) as error:
        while error.__cause__:
            error = error.__cause__
        if getattr(error, "errno", None) in FULL:
            raise error from None
        raise Stop(f"{hub} cannot be loaded ({(str(error) or repr(error)).splitlines()[0].rstrip('.')}): {way_out}") from None
    # without a network, `datasets` takes whatever commit its cache holds
    if other := [f["filename"] for f in data.cache_files if hub.revision not in f["filename"]]:
        raise Stop(f"{hub} is not in the cache, and in its place `datasets` took {other[0]}: {way_out}")
    return Source(str(hub), data.features.arrow_schema,
                  lambda columns: data.select_columns(columns).with_format("arrow").iter(BATCH))


def _parquet(path, name):
    import pyarrow as pa
    import pyarrow.parquet

    def batches(columns):
        try:
            for batch in file.iter_batches(BATCH, columns=columns):
                yield pa.Table.from_batches([batch])
        except (pa.ArrowException, OSError) as error:
            raise Stop(f"{path} cannot be read: {str(error).splitlines()[0]}") from None

    try:
        file = pa.parquet.ParquetFile(path)
    except pa.ArrowException as error:
        raise Stop(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}") from None
    return Source(name, file.schema_arrow, batches)


def _json_lines(path, name):
    import pyarrow as pa
    rows, number = [], 0
    try:
        with open(path, encoding="utf-8") as f:
            for line in f:
                number += 1
                if line.strip():
                    rows.append({**json.loads(line)})             # TypeError for a list or a number
    except (ValueError, TypeError):
        raise Stop(f"{path} is neither parquet nor JSON lines: line {max(number, 1)} is no JSON object") from None
    if not rows:
        raise Stop(f"{path} has no rows")
    try:
        table = pa.Table.from_pylist(rows)
    except pa.ArrowException as error:
        raise Stop(f"{path}: the values of a column differ in kind ({str(error).splitlines()[0]})") from None
    return Source(name, table.schema, lambda columns: iter([table.select(columns)]))


def columns(source, *layouts):
    """The first of `layouts` (tuples of column names) that `source` has in full."""
    for layout in layouts:
        if set(layout) <= set(source.schema.names):
            return list(layout)
    wanted = " or ".join(", ".join(layout) for layout in layouts)
    raise Stop(f"{source.name} lacks columns: needed are {wanted}, it has {', '.join(source.schema.names)}")


def save(out, rows):
    """Write `rows` to the parquet file `out` and tell their fingerprints; a file that already holds them is left as it is."""
    dataset.check(f"what was to become {out}", rows)
    content, answers = fingerprints(rows)
    if not Path(out).exists():
        try:
            dataset.write(out, rows)
        except OSError as error:
            raise Stop(f"{out} cannot be written: {os.strerror(error.errno) if error.errno else error}") from None
    elif not _holds(out, rows):
        raise Stop(f"{out} exists and holds something else: remove it, or use another --out")
    print(f"{out}: {len(rows):,} rows, fingerprints: content {content}, answers {answers}")


def _holds(path, rows):
    try:
        old = dataset.load(path)
    except Stop:
        return False
    return [{key: row[key] for key in ("id", "prompt", "answer", "source")} for row in old] == rows
