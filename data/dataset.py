"""Problems as a parquet file, and the order in which training sees them.

One row is {id: str, prompt: [{role, content}], answer: str, source: str, prompt_sha256: str}, for example
{"id": "sum-17", "prompt": [{"role": "user", "content": "3+4"}], "answer": "7", "source": "arithmetic", "prompt_sha256": "..."}.
"""
import hashlib
import os
import random
from pathlib import Path

from common.cli import Stop

COLUMNS = ("id", "prompt", "answer", "source", "prompt_sha256")


def prompt_sha256(prompt):
    """Hex sha256 of the contents of a prompt's messages, joined by newlines."""
    return hashlib.sha256("\n".join(message["content"] for message in prompt).encode()).hexdigest()


def load(path, columns=COLUMNS):
    """The rows of a parquet file as dicts. A file may lack source (then it is its own) and prompt_sha256 (then it is computed).
    Raises Stop for a missing file or column, no rows, equal ids, an empty answer, or a prompt that is not the one its hash was
    taken from."""
    import pyarrow
    import pyarrow.parquet
    if not Path(path).is_file():
        raise Stop(f"no data file {path}")
    try:
        schema = pyarrow.parquet.read_schema(path)
        missing = [c for c in columns if c not in schema.names and c not in ("source", "prompt_sha256")]
        if missing:
            raise Stop(f"{path} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; it has {', '.join(schema.names)}"
                       + _preparer(path, schema))
        rows = pyarrow.parquet.read_table(path, columns=[c for c in columns if c in schema.names]).to_pylist()
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError) as error:
        with open(path, "rb") as f:
            hint = "; JSON lines go through data/prepare_gsm8k.py or data/prepare_aime.py" * (f.read(1) == b"{")
        raise Stop(f"{path} cannot be read as parquet: {str(error).splitlines()[0].rstrip('.')}{hint}") from None
    check(path, rows)
    for row in rows:
        if "source" in columns:
            row.setdefault("source", Path(path).name)
        if "prompt_sha256" in columns and "prompt_sha256" not in row:
            row["prompt_sha256"] = prompt_sha256(row["prompt"])
    return rows


def _preparer(path, schema):
    """What to do with a file that is a data set's own, not yet prepared."""
    names = {name.lower() for name in schema.names}
    if {"question", "answer"} <= names:
        script = "prepare_gsm8k.py"
    elif {"problem", "answer"} <= names or "raw_problem" in str(schema):
        script = "prepare_aime.py"
    elif {"prompt", "reward_model"} <= names:
        script = "prepare_dapo_math.py"
    else:
        return ""
    return f": a published file as it is; prepare it with python data/{script} --from {path}"


def check(path, rows):
    """Stop for rows that cannot be trained on: what `load` promises. `path` is for the sentence."""
    if not rows:
        raise Stop(f"{path} has no rows")
    seen = set()
    for i, row in enumerate(rows):
        if "id" in row and (row["id"] in seen or seen.add(row["id"])):
            raise Stop(f"{path} has the id {row['id']!r} twice (second time in row {i})")
        if "answer" in row and row["answer"] in (None, ""):
            raise Stop(f"{path}: row {i} (id {row.get('id')!r}) has no answer")
        if "prompt" in row and not row["prompt"]:
            raise Stop(f"{path}: row {i} (id {row.get('id')!r}) has no prompt")
        if "prompt" in row and not (isinstance(row["prompt"], list) and all(
                isinstance(m, dict) and {"role", "content"} <= {k for k, v in m.items() if isinstance(v, str)}
                for m in row["prompt"])):
            raise Stop(f"{path}: the prompt of row {i} (id {row.get('id')!r}) is not a list of messages with role and content")
        if "prompt" in row and "prompt_sha256" in row and prompt_sha256(row["prompt"]) != row["prompt_sha256"]:
            raise Stop(f"{path}: the prompt of row {i} (id {row.get('id')!r}) does not have the hash recorded in prompt_sha256")


def write(path, rows):
    """Write rows (dicts with COLUMNS; prompt_sha256 is filled in where absent) to a parquet file, all or nothing."""
    import pyarrow as pa
    import pyarrow.parquet
    text, message = pa.string(), pa.struct([("role", pa.string()), ("content", pa.string())])
    schema = pa.schema([("id", text), ("prompt", pa.list_(message)), ("answer", text), ("source", text), ("prompt_sha256", text)])
    rows = [{"prompt_sha256": prompt_sha256(row["prompt"]), **row} for row in rows]
    temporary = Path(path).with_name(f".{Path(path).name}.{os.getpid()}")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    try:
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows, schema=schema), temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def encode(tok, prompt):
    """Token ids of a prompt (list of {role, content}), open for the assistant's answer."""
    text = tok.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return tok.encode(text, add_special_tokens=False)


class Cursor:
    """Which prompts a step trains on: each epoch is a fresh shuffle, cut into whole steps; what is left over waits for the next
    shuffle, and no prompt comes twice in a step. A pure function of (seed, step): a resumed run sees what it would have seen."""

    def __init__(self, n, prompts_per_step, seed):
        if not 0 < prompts_per_step <= n:
            raise Stop(f"a step of {prompts_per_step} prompts cannot be drawn from {n} rows of data")
        self.n, self.prompts_per_step, self.seed = n, prompts_per_step, seed

    def indices(self, step):
        """Row numbers of the prompts of `step` (counted from 0)."""
        epoch, part = divmod(step, self.n // self.prompts_per_step)
        order = list(range(self.n))
        random.Random(f"{self.seed}/{epoch}").shuffle(order)          # seeded by text: the same order on every Python and machine
        return order[part * self.prompts_per_step:(part + 1) * self.prompts_per_step]
