"""Keep a finished run: python results/record.py GROUP runs/A [runs/B ...] [--command C] [--commit HASH] [--hardware H]

results/records/GROUP/NAME then holds the run's metrics.jsonl, config.json and check.json, and record.json: command, commit,
hardware, versions and n. Texts of problems or answers are never copied. What the run itself did not write down can be given
by hand and is marked as such; a run without one of these, from a changed tree, or not finished is refused. The runs of a
group differ in nothing but seed and name. `python results/table.py` then writes the tables.
"""
import dataclasses
import itertools
import json
import os
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.cli import Stop, parse, run_main, write_atomic  # noqa: E402
from common.evaluation import t_quantile  # noqa: E402

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "records"
NEEDED = ("command", "commit", "versions", "hardware", "n")


@dataclasses.dataclass
class Config:
    # given by hand, where the run did not write it down
    command: str | None = None         # the command line, as typed
    commit: str | None = None          # the commit of the clean tree that ran
    hardware: str | None = None        # "4 x 8 B300"


def interval(values):
    """(mean, half width of the 95 % t-interval); the half width of a single value is None."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return mean, None
    s = (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
    return mean, t_quantile(0.975, len(values) - 1) * s / len(values) ** 0.5


def metrics(folder):
    """{step: {metric: value}} of folder/metrics.jsonl, steps rising; an evaluation is a line of its own there. A last line
    that is cut short (the run died, or is writing it) is left out."""
    path, steps = Path(folder) / "metrics.jsonl", {}
    if not path.is_file():
        raise Stop(f"{folder} is no run: metrics.jsonl is missing there")
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            if number < len(lines):
                raise Stop(f"{path}: line {number} of {len(lines)} is not JSON") from None
            break
        steps.setdefault(values.pop("step"), {}).update(values)
    return dict(sorted(steps.items()))


def complete(record, where):
    """Stop unless `record` says all that it takes to trace its numbers."""
    if missing := [key for key in NEEDED if not record.get(key)]:
        raise Stop(f"{where} lacks {', '.join(missing)}: its numbers cannot be traced")
    if record.get("dirty") is not (None if "commit" in record.get("by_hand", ()) else False):
        raise Stop(f"{where} was not run from a clean tree: its numbers cannot be traced")
    return record


def answers(folder, steps):
    """(answers of one evaluation, problems), counted in folder/eval and compared with what metrics.jsonl says of them."""
    n, ids = 0, set()
    for step, found in steps.items():
        if "eval/accuracy" not in found:
            continue
        path = folder / "eval" / f"step-{step}.jsonl"
        if not path.is_file():
            raise Stop(f"{folder} lacks eval/step-{step}.jsonl: n cannot be counted")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        right = sum(line["is_correct"] for line in lines)
        if not abs(right - found["eval/accuracy"] * len(lines)) <= 1e-3:
            raise Stop(f"{path}: {right} of {len(lines)} answers are right there, {found['eval/accuracy']:.2%} in metrics.jsonl")
        if n and (len(lines), {line["id"] for line in lines}) != (n, ids):
            raise Stop(f"{path} has {len(lines)} answers, the evaluation before it {n}, or to other problems")
        n, ids = len(lines), {line["id"] for line in lines}
    return n, len(ids)


def keep(folder, group, by_hand, records=RECORDS):
    """Copy what a finished run leaves into records/group/name; returns that folder."""
    folder = Path(folder)
    if not re.fullmatch(r"\w[\w.+-]*", group) or not re.fullmatch(r"\w[\w.+-]*", folder.name):
        raise Stop(f"GROUP {group!r} and the run's name {folder.name!r} become folders: letters, digits, '_', '.', '+' and '-'")
    if missing := [f for f in ("DONE", "config.json", "versions.json", "check.json") if not (folder / f).is_file()]:
        raise Stop(f"{folder} is not a finished run: {', '.join(missing)} missing")
    steps, config, versions = metrics(folder), *(json.loads((folder / f"{f}.json").read_text()) for f in ("config", "versions"))
    starts = [*versions.pop("earlier", []), versions]               # a resumed run: every start made some of the numbers
    if any(start.get("dirty") for start in starts):
        raise Stop(f"{folder} was run from a changed tree: its numbers cannot be traced")
    if len(commits := {start.get("commit") for start in starts}) > 1:
        raise Stop(f"{folder} ran at {len(commits)} commits ({', '.join(map(str, commits))}): its numbers belong to none")
    versions = starts[0]
    for key, value in by_hand.items():
        if versions.get(key) and versions[key] != value:
            raise Stop(f"{folder} says {key} {versions[key]!r}, not {value!r}")
    given = {key: value for key, value in by_hand.items() if not versions.get(key)}
    own = {key: versions.pop(key, None) for key in ("command", "commit", "hardware", "dirty")}
    if json.loads((folder / "check.json").read_text()).get("passed") is not True:
        raise Stop(f"{folder} has no five-step check that passed: its numbers may be those of two policies")
    n, problems = answers(folder, steps)
    sources = sorted(folder.glob("*.py"), key=lambda p: len(p.name))
    record = complete({"recipe": sources[0].stem if sources else None, **own, **given, "by_hand": sorted(given),
                       "n": n, "problems": problems, "versions": {k: v for k, v in versions.items() if v}}, folder)
    if "eval/accuracy" not in steps.get(config["steps"], {}):
        raise Stop(f"{folder} has no evaluation at its last step {config['steps']}")
    target = records / group / folder.name
    if target.exists():
        raise Stop(f"{target} exists: a record is not written over")
    part = target.parent / f".{os.getpid()}" / target.name          # appears whole or not at all
    part.mkdir(parents=True)
    try:
        for name in ("metrics.jsonl", "config.json", "check.json"):
            write_atomic(part / name, (folder / name).read_text().replace(f"{HERE.parent}/", ""))
        write_atomic(part / "record.json", json.dumps(record, indent=1) + "\n")
        read([part, *(other for other in target.parent.glob("[!.]*"))])
        os.rename(part, target)
    finally:
        shutil.rmtree(part.parent, ignore_errors=True)
    return target


def read(folders):
    """The records of one group as dicts: name, config, check, record, steps. Stop where one is incomplete or another run."""
    runs = []
    for folder in sorted(folders, key=lambda f: f.name):
        if missing := [f"{f}.json" for f in ("config", "check", "record") if not (folder / f"{f}.json").is_file()]:
            raise Stop(f"{folder} is no record: {', '.join(missing)} missing")
        config, check, record = (json.loads((folder / f"{f}.json").read_text()) for f in ("config", "check", "record"))
        runs.append(dict(name=folder.name, config=config, check=check, record=complete(record, folder), steps=metrics(folder)))
        first = runs[0]["config"]
        free = ("seed", "name", "wandb")
        if differs := sorted(k for k in {**first, **config} if k not in free and first.get(k) != config.get(k)):
            raise Stop(f"{folder} differs from {runs[0]['name']} in {', '.join(differs)}: another group")
        if config["seed"] in (r["config"]["seed"] for r in runs[:-1]):
            raise Stop(f"{folder} has the seed {config['seed']}, which another run of its group has")
    return runs


def groups(records=RECORDS):
    """{group: its records}."""
    return {folder.name: read(folder.glob("[!.]*")) for folder in sorted(records.glob("[!.]*"))}


def main():
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), sys.argv[1:]))
    given = dataclasses.asdict(parse(Config, doc=__doc__, argv=sys.argv[1 + len(words):]))
    if len(words) < 2:
        raise Stop("usage: python results/record.py GROUP runs/A [runs/B ...]")
    for folder in words[1:]:
        print(keep(folder, words[0], {key: value for key, value in given.items() if value}))


if __name__ == "__main__":
    run_main(main)
