"""Is B better than A? python eval/compare.py A B [--other-prompts]

A and B are the samples.jsonl of evaluations, folders that hold one, or a recipe's eval/step-N.jsonl. They must have the same
problems, gold answers, prompts and sampling settings. Told are both summaries, the paired difference of avg@k with two 95 %
intervals (on these problems; on problems like them) and what follows from them (common/evaluation.py, compare).
"""
import dataclasses
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli, evaluation  # noqa: E402
from eval import folder  # noqa: E402
from eval.regrade import files  # noqa: E402

SETTINGS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@dataclasses.dataclass
class Config:
    other_prompts: bool = False              # compare although the prompts differ


def settings(path):
    """The sampling settings of a file, from protocol.json beside it or the config of the recipe's run; {} without either."""
    if (path.parent / folder.PROTOCOL).exists():
        found = json.loads((path.parent / folder.PROTOCOL).read_text())["protocol"]
        return {key: found[key] for key in SETTINGS}
    run = path.parent.parent / "config.json"
    if path.parent.name == "eval" and run.exists():
        found = json.loads(run.read_text())
        return {"max_tokens": found["max_response_tokens"], "temperature": 1.0, "top_p": found["eval_top_p"]}
    return {}


def main():
    paths, options = files(sys.argv[1:])
    cfg = cli.parse(Config, doc=__doc__, argv=options)
    if len(paths) != 2:
        raise cli.Stop(f"two evaluations are compared, and {len(paths)} are named: python eval/compare.py A B")
    a, b = map(settings, paths)
    if other := [key for key in SETTINGS if key in a and key in b and a[key] != b[key]]:
        raise cli.Stop(f"A was drawn with {other[0]} {a[other[0]]} and B with {b[other[0]]}: that is no comparison of models")
    lines = [[{**one, "text": ""} for one in evaluation.read(path)] for path in paths]         # texts are large and not needed
    found = evaluation.compare(*lines, cfg.other_prompts)
    rows = [dict(evaluation.shown(evaluation.summary(of))) for of in lines]
    print(f"A  {paths[0]}\nB  {paths[1]}\n")
    print(cli.table([(name, *(row.get(name, "") for row in rows)) for name in {**rows[0], **rows[1]}], ("", "A", "B")))
    for path, known in zip(paths, (a, b)):
        if not known:
            print(f"note: nothing beside {path} says how it was sampled, so the settings were not compared")
    print(f"\nB - A  {100 * found['difference']:+.1f} points of avg@k")
    for kind, name in (("fixed", "on these problems"), ("across", "on problems like them")):
        if x := found[kind]:
            print(f"       {100 * x['low']:+.1f} to {100 * x['high']:+.1f}  {name}, 95 % interval; "
                  f"a true difference of {100 * x['smallest']:.1f} would be told with {evaluation.POWER:.0%} power")
        else:
            print(f"       no interval {name}")
    print(f"\n{found['sentence']}")
    return 0


if __name__ == "__main__":
    cli.run_main(main)
