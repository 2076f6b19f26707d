"""The 30 problems of AIME 2024 or 2025 as a data file: what runs are evaluated on, and what is kept out of training.

python data/prepare_aime.py --year 2024                                # from the Hub: data/aime_2024.parquet
python data/prepare_aime.py --year 2024 --from aime-2024.parquet       # from a file: parquet or JSON lines, columns as below
python data/prepare_aime.py --year 2025

Read are the columns of BytedTsinghua-SIA/AIME-2024 (extra_info.raw_problem, reward_model.ground_truth), those of
HuggingFaceH4/aime_2024 and MathArena/aime_2025 (problem, answer), of Maxwell-Jia/AIME_2024 (Problem, Answer), of
opencompass/AIME2025 (question, answer; its two files joined), and slime's (prompt, label). Copies of a problem must be identical.
The answers must be the year's. The texts must be those of a known copy, because public copies differ in wording and so do the
scores: another copy needs --accept.
"""
import collections
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli  # noqa: E402
from common.rewards import integer  # noqa: E402
from data import source  # noqa: E402

HUBS = {
    2024: source.Hub("BytedTsinghua-SIA/AIME-2024", "default", "train", "aa49075e24ad594b79fdf0bdcefa735c2181be67",
                     "data/aime-2024.parquet"),
    2025: source.Hub("MathArena/aime_2025", "default", "train", "c94da77eb22bbd6439e62a323bec18493a421302",
                     "data/train-00000-of-00001.parquet"),
}
ANSWERS = {2024: "6809c5cf89d17fa1", 2025: "d3753a86e1806531"}
CONTENT = {
    2024: {"58a8a67793461063": "BytedTsinghua-SIA/AIME-2024", "a93d5df8c8257431": "HuggingFaceH4/aime_2024"},
    2025: {"4d0e3bb0a2f9a428": "MathArena/aime_2025"},
}
LAYOUTS = (("extra_info", "reward_model"), ("problem", "answer"), ("Problem", "Answer"), ("question", "answer"),
           ("prompt", "label"))
# what tells a problem's number, in HuggingFaceH4's url and Maxwell-Jia's ID: 2024_AIME_II_Problems/Problem_4, 2024-II-4
NUMBER = re.compile(r"(20\d\d)[-_](?:AIME_)?(II?)[-_](?:Problems/Problem_)?(\d+)\Z")


@dataclasses.dataclass
class Config:
    year: Literal[2024, 2025] = 2024
    style: source.Style = "answer-line"   # of the prompt: answer-line (DAPO's), boxed or plain (the problem alone)
    out: str | None = None                # none: data/aime_YEAR.parquet
    from_: str | None = None              # a file in place of the Hub
    revision: str | None = None           # another commit of the Hub
    accept: str | None = None             # fingerprint of a copy with other texts than the known ones


def problem_and_answer(row, layout):
    """(problem text, answer as published) of a row in one of LAYOUTS."""
    if layout[0] == "extra_info":
        return row["extra_info"]["raw_problem"], row["reward_model"]["ground_truth"]
    problem, answer = (row[name] for name in layout)
    if layout[0] == "prompt":
        problem = source.problem_of(problem[-1]["content"] if isinstance(problem, list) else problem)
    return problem, answer


def number_of(row, position):
    """I-5 or II-12 where the source tells, otherwise its own index or the row's place."""
    if found := NUMBER.search(str(row.get("ID") or row.get("url") or "")):
        return f"{found[2]}-{found[3]}"
    for index in ((row.get("extra_info") or {}).get("index"), row.get("problem_idx")):
        if index is not None:
            return index
    return position


def without_copies(name, rows):
    """The distinct rows in the order in which they come first, when every one comes equally often."""
    keys = [json.dumps({k: v for k, v in row.items() if k != "__index_level_0__"}, sort_keys=True, default=str) for row in rows]
    copies = collections.Counter(keys)
    if len(set(copies.values())) != 1:
        raise cli.Stop(f"{name}: its {len(rows)} rows are not copies of each other: {len(copies)} distinct ones come "
                       f"{min(copies.values())} to {max(copies.values())} times")
    first = dict(zip(reversed(keys), reversed(rows)))
    return [first[key] for key in copies]


def main():
    cfg = cli.parse(Config, doc=__doc__)
    given = source.read(cfg.from_, cfg.revision, HUBS[cfg.year])
    layout = source.columns(given, *LAYOUTS)
    if layout[0] == "extra_info" and "raw_problem" not in str(given.schema.field("extra_info").type):
        raise cli.Stop(f"{given.name}: extra_info has no raw_problem; DAPO-Math's file is prepare_dapo_math.py's")
    raw = [row for batch in given.batches(given.schema.names) for row in batch.to_pylist()]
    distinct = without_copies(given.name, raw)
    rows = []
    for i, row in enumerate(distinct):
        problem, answer = problem_and_answer(row, layout)
        number = number_of(row, i)
        if not (problem or "").strip():
            raise cli.Stop(f"{given.name}: problem {number} has no text")
        value = integer(str(answer).removesuffix(r"^\circ"))          # opencompass/AIME2025 writes one answer in degrees
        if value is None or not 0 <= int(value) <= 999:
            raise cli.Stop(f"{given.name}: the answer {str(answer)[:40]!r} of problem {number} is no integer from 0 to 999")
        rows.append({"id": f"aime-{cfg.year}-{number}", "prompt": source.ask(problem, cfg.style), "answer": value,
                     "source": f"{given.name} {cfg.style}"})
    if len(rows) != 30:
        raise cli.Stop(f"{given.name} has {len(rows)} distinct rows; AIME {cfg.year} has 30 problems")
    content, answers = source.fingerprints(rows)
    if answers != ANSWERS[cfg.year]:
        raise cli.Stop(f"{given.name}: the answers' fingerprint is {answers}, that of AIME {cfg.year} {ANSWERS[cfg.year]}")
    name = source.pinned(given.name, content, CONTENT[cfg.year], cfg.accept)
    print(f"{given.name}: 30 problems x {len(raw) // 30}, {name}")
    source.save(cfg.out or f"data/aime_{cfg.year}.parquet", rows)


if __name__ == "__main__":
    cli.run_main(main)
