"""Grade the samples of evaluations again, without GPU or vLLM: python eval/regrade.py FILE.jsonl... [--write] [--show 20]

FILE is the samples.jsonl of an evaluation, the eval/step-N.jsonl of a recipe's run, or a folder with samples.jsonl. Told are how
often each grader says right, where the strict one and DAPO's rule disagree, and where a verdict is not the one on record (the
graders have changed since, or the file has). --write puts the new verdicts into the files, and into summary.json beside them.
"""
import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli, evaluation  # noqa: E402
from eval import folder  # noqa: E402

VERDICT = ("is_correct", "extracted", "dapo_is_correct", "dapo_extracted")


@dataclasses.dataclass
class Config:
    write: bool = False                      # put the new verdicts into the files
    show: int = 20                           # samples listed of each kind


def files(argv):
    """(the arguments that are no options, as files; the options)."""
    options = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    paths = [Path(word) for word in argv[:options]]
    if late := [word for word in argv[options:] if word.endswith(".jsonl") or Path(word).is_dir()]:
        raise cli.Stop(f"files come before options: {late[0]} stands after {argv[options]}")
    return [path / folder.SAMPLES if path.is_dir() else path for path in paths], argv[options:]


def again(old):
    """The line with both graders' verdicts of now."""
    return evaluation.line(old, old["in_think"], old["sample"], old["seed"], old["text"], old["n_tokens"], old["finish_reason"])


def regrade(path, cfg):
    """Grade one file again; tell what is found."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    counts = dict.fromkeys(("samples", "strict", "dapo", "strict, on record", "dapo, on record", "not decided"), 0)
    listed = {"the graders disagree": [], "not the verdict on record": []}
    try:
        with open(part if cfg.write else os.devnull, "w") as f:
            for old in evaluation.read(path):
                new = again(old)
                if new["reason"] in ("took too long", "failed"):            # says something of this machine: the record stands
                    new, counts["not decided"] = old, counts["not decided"] + 1
                f.write(json.dumps({**old, **new}) + "\n")
                for name, found in zip(counts, (1, new["is_correct"], new["dapo_is_correct"], old["is_correct"],
                                                old["dapo_is_correct"])):
                    counts[name] += found
                row = (new["id"], new["sample"], new["extracted"], new["dapo_extracted"], repr(new["text"][-80:]))
                if new["is_correct"] != new["dapo_is_correct"]:
                    listed["the graders disagree"].append(row)
                if changed := [key for key in VERDICT if new[key] != old[key]]:
                    told = ", ".join(f"{key} {old[key]} -> {new[key]}" for key in changed)
                    listed["not the verdict on record"].append((*row[:2], told, "", row[4]))
            f.flush()
            os.fsync(f.fileno()) if cfg.write else None
        if cfg.write:
            os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    print(f"{path}\n" + cli.table(list(counts.items())))
    for name, rows in listed.items():
        print(f"{name}: {len(rows)} of {counts['samples']}")
        if rows[:cfg.show]:
            print(cli.table(rows[:cfg.show], ("id", "sample", "strict", "dapo", "last 80 characters")))
        if len(rows) > cfg.show:
            print(f"and {len(rows) - cfg.show} more")


def main():
    paths, options = files(sys.argv[1:])
    cfg = cli.parse(Config, doc=__doc__, argv=options)
    if not paths:
        raise cli.Stop("which file is to be graded again? python eval/regrade.py FILE.jsonl...")
    for path in paths:
        with contextlib.ExitStack() as held:
            if cfg.write and any((path.parent / name).exists() for name in (folder.PROTOCOL, folder.SUMMARY)):
                held.enter_context(folder.lock(path.parent))                # nobody may be adding samples
            regrade(path, cfg)
            if cfg.write and (path.parent / folder.SUMMARY).exists():
                folder.finish(path.parent)
    return 0


if __name__ == "__main__":
    cli.run_main(main)
