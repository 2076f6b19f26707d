"""GSM8K as a data file: 7,473 problems to train on or 1,319 to test with. The grader wants integers, and all answers are.

python data/prepare_gsm8k.py                                           # from the Hub: data/gsm8k_train.parquet
python data/prepare_gsm8k.py --split test --from test.jsonl            # from a file: parquet or JSON lines with question, answer

An answer is what follows "#### " in the solution, without its thousands commas. SkyRL's and verl's prompt asks for "#### 72",
which the grader of common/rewards.py does not read: the styles here ask for what it reads.
"""
import dataclasses
import sys
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli  # noqa: E402
from common.rewards import integer  # noqa: E402
from data import source  # noqa: E402

COMMIT = "740312add88f781978c0658806c59bc2815b9866"
ROWS = {"train": 7473, "test": 1319}
# the Hub's rows and those of openai/grade-school-math's jsonl files (sha256 17f347dc..., 3730d312...) are the same
CONTENT = {"train": {"590c8cee7aa54929": "openai/gsm8k train"}, "test": {"679f50aa36753f39": "openai/gsm8k test"}}


@dataclasses.dataclass
class Config:
    split: Literal["train", "test"] = "train"
    style: source.Style = "answer-line"   # of the prompt: answer-line, boxed or plain (the problem alone)
    out: str | None = None                # none: data/gsm8k_SPLIT.parquet
    from_: str | None = None              # a file in place of the Hub
    revision: str | None = None           # another commit of the Hub
    accept: str | None = None             # fingerprint of other rows than the published ones


def main():
    cfg = cli.parse(Config, doc=__doc__)
    hub = source.Hub("openai/gsm8k", "main", cfg.split, COMMIT, f"main/{cfg.split}-00000-of-00001.parquet")
    given = source.read(cfg.from_, cfg.revision, hub)
    columns = source.columns(given, ("question", "answer"))
    raw = [row for batch in given.batches(columns) for row in batch.to_pylist()]
    if len(raw) != ROWS[cfg.split] and not cfg.accept:
        raise cli.Stop(f"{given.name} has {len(raw):,} rows; the {cfg.split} split of GSM8K has {ROWS[cfg.split]:,}")
    rows = []
    for i, row in enumerate(raw):
        if not str(row["question"] or "").strip():
            raise cli.Stop(f"{given.name}: row {i} has no question")
        gold = str(row["answer"]).rpartition("#### ")[2]
        if "####" not in str(row["answer"]) or integer(gold) is None:
            raise cli.Stop(f'{given.name}: the answer of row {i} does not end in "#### " and an integer but in {gold[-40:]!r}')
        rows.append({"id": f"gsm8k-{cfg.split}-{i}", "prompt": source.ask(row["question"], cfg.style), "answer": integer(gold),
                     "source": f"{given.name} {cfg.style}"})
    name = source.pinned(given.name, source.fingerprints(rows)[0], CONTENT[cfg.split], cfg.accept)
    print(f"{given.name}: {len(rows):,} rows, {name}")
    source.save(cfg.out or f"data/gsm8k_{cfg.split}.parquet", rows)


if __name__ == "__main__":
    cli.run_main(main)
