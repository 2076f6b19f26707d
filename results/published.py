"""results/published.json: numbers published by others. `load()` refuses what has no source or does not add up.

`runs` are what was trained or timed: label, model, method, steps, hardware, questions and samples (k of avg@k) of the
evaluation, caveats. `rows` are one quantity of one run each:

    run, quantity, unit      the pair (run, quantity) comes once
    by, values               what the keys of `values` are; a value is a number, [low, high], or the source's words where it
                             gives no number. by "step": a step's number, or first, later, last, every
    source                   a key of `sources`
    kind                     quoted, or derived: computed from the run's rows `of` by `formula`, one of FORMULAS
    approximate              keys of `values` that the source gives as "about"
    status, caveats          "unconfirmed" for what was seen second-hand only; sentences
"""
import json
from pathlib import Path

from common.cli import Stop

FILE = Path(__file__).resolve().parent / "published.json"
LIMITS = {"%": (0, 100), "score": (-1, 1), "fraction": (0, 1), "reward": (-2, 1)}       # any other unit: 0 or more
NEEDED, MAY = {"run", "quantity", "unit", "by", "values", "source", "kind"}, {"formula", "of", "approximate", "status", "caveats"}
RUN_NEEDED, RUN_MAY = {"label", "model", "method", "caveats"}, {"steps", "hardware", "questions", "samples"}
FORMULAS = {
    "(avg_score + 1) / 2": lambda score: 50 * (score + 1),                   # the reward is +1 or -1
    "accuracy / (1 - cut)": lambda accuracy, cut: 100 * accuracy / (100 - cut),
    "cut / (cut + finished)": lambda cut, finished: 100 * cut / (cut + finished),
    "3.6 * percent": lambda percent: 3.6 * percent,                          # of 30 questions x 12 samples
    "slow / fast": lambda slow, fast: slow / fast,
}


def load(file=FILE):
    """The whole file as a dict, `rows` also by (run, quantity) under "by_name". Raises Stop for a row that is not as above."""
    data = json.loads(Path(file).read_text())
    if set(data) != {"sources", "runs", "rows"}:
        raise Stop(f"{file} has {', '.join(sorted(data))} instead of sources, runs and rows")
    for name, run in data["runs"].items():
        keys(run, RUN_NEEDED, RUN_MAY, f"run {name}")
    data["by_name"] = {}
    for number, row in enumerate(data["rows"], 1):
        check(row, data, f"row {number} ({row.get('run')}, {row.get('quantity')})")
        if data["by_name"].setdefault((row["run"], row["quantity"]), row) is not row:
            raise Stop(f"published.json has {row['run']}, {row['quantity']} twice")
    for row in data["rows"]:
        if row["kind"] == "derived":
            recompute(row, data["by_name"])
    return data


def keys(found, needed, may, what):
    if missing := sorted(k for k in needed if found.get(k) in (None, "", {})):
        raise Stop(f"published.json: {what} lacks {', '.join(missing)}")
    if unknown := sorted(set(found) - needed - may):
        raise Stop(f"published.json: {what} has {', '.join(unknown)}, which nothing reads")


def check(row, data, what):
    keys(row, NEEDED, MAY, what)
    must = {f"source {row['source']!r} is none of the sources": row["source"] in data["sources"],
            f"run {row['run']!r} is none of the runs": row["run"] in data["runs"],
            f"kind is {row['kind']!r}, not quoted or derived": row["kind"] in ("quoted", "derived"),
            f"status is {row.get('status')!r}, not unconfirmed": row.get("status", "unconfirmed") == "unconfirmed",
            "a derived row needs formula and of, a quoted one has neither":
                (row.get("formula") in FORMULAS and bool(row.get("of"))) == (row["kind"] == "derived")
                and (row["kind"] == "derived" or not {"formula", "of"} & set(row)),
            "approximate names no value": set(row.get("approximate", ())) <= set(row["values"]),
            "an AIME-2024 row's run needs questions and samples (null where not stated)":
                "AIME" not in row["quantity"] or {"questions", "samples"} <= set(data["runs"].get(row["run"], {}))}
    for sentence, ok in must.items():
        if not ok:
            raise Stop(f"published.json: {what}: {sentence}")
    low, high = LIMITS.get(row["unit"], (0, float("inf")))
    for key, value in row["values"].items():
        if row["by"] == "step" and not (key.isdigit() or key in ("first", "later", "last", "every")):
            raise Stop(f"published.json: {what}: {key!r} is no step")
        numbers = value if isinstance(value, list) else [] if isinstance(value, str) else [value]
        ok = all(isinstance(x, int | float) and low <= x <= high for x in numbers)
        if not ok or isinstance(value, list) and (len(value) != 2 or value[0] > value[1]):
            raise Stop(f"published.json: {what}: {value} at {key} is not within {low:g} to {high:g} {row['unit']}")


def half_unit(number):
    """Half of the last digit that `number` is written with: 53.6 stands for 53.55 to 53.65."""
    return 0.5 * 10 ** -len(repr(number).partition(".")[2]) if isinstance(number, float) else 0.5


def recompute(row, by_name):
    """Refuse a derived value that its rows do not give: to its own last digit, and an interval [low, high] to that of what the
    inputs' own rounding allows."""
    for key, value in row["values"].items():
        inputs = []
        for name in row["of"]:
            quantity, _, fixed = name.partition(" @ ")
            source = by_name.get((row["run"], quantity))
            if source is None or (fixed or key) not in source["values"]:
                raise Stop(f"published.json: {row['run']}, {row['quantity']}: no {quantity} at {fixed or key} to derive it from")
            inputs.append(source["values"][fixed or key])
        formula = FORMULAS[row["formula"]]
        if isinstance(value, list):
            corners = [[]]
            for x in inputs:
                corners = [[*c, y] for c in corners for y in (x - half_unit(x), x + half_unit(x))]
            low, high = LIMITS.get(row["unit"], (0, float("inf")))
            found = [min(max(f(formula(*c) for c in corners), low), high) for f in (min, max)]
        else:
            value, found = [value], [formula(*inputs)]
        for x, y in zip(value, found):
            if abs(x - y) > half_unit(x) + 1e-9:
                raise Stop(f"published.json: {row['run']}, {row['quantity']}: {x} at {key}, but {row['formula']} gives {y:.4g}")
