"""The published numbers against values written here by hand, what is refused as a record, the tables and the pictures."""
import hashlib
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common.cli import Stop
from results import plot, published, record, table

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "results" / "README.md").read_text()


# -- published.json --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("run, quantity, values", [
    ("trajectory-glm", "AIME-2024 accuracy", {"0": 57, "20": 81}),
    ("trajectory-flash", "AIME-2024 accuracy", {"0": 54, "20": 83}),
    ("trajectory-flash", "AIME-2024 cut at the cap", {"0": 46.11, "20": 6}),
    ("trajectory-flash", "AIME-2024 length", {"0": 5217, "20": 2424}),
    ("trajectory-flash", "AIME-2024 answers cut, of 360", {"0": 166}),
    ("feedback", "feedback on one handoff question", {"training cycle": 150, "after start-up": 5.24}),
    ("sync-report", "adapter sync", {"through files": 390, "in memory": 13}),
    ("sync-report", "adapter sync, faster by", {"in memory": 29.4}),
    ("sync-2195", "adapter sync", {"file, full public adapter": 254.7, "#2195, compact file": 91.2,
                                   "#2196, NCCL group, first": 17.6, "#2196, NCCL group, each update": 8.9}),
    ("bz2t3wg9", "AIME-2024 accuracy", {"0": 55.8, "5": 76.1, "10": 80.3, "15": 83.1, "20": 84.4}),
    ("z9wad610", "AIME-2024 accuracy", {"0": 54.4, "5": 62.2, "10": 51.7, "15": 48.3}),
    ("x7lm538i", "AIME-2024 accuracy", {"0": 52.8, "5": 54.7, "10": 43.3}),
    ("1o4x7v31", "AIME-2024 accuracy", {"0": 52.5, "5": 56.7}),
    ("bz2t3wg9", "AIME-2024 cut at the cap", {"0": 44.4, "20": 14.2}),
    ("flash-fullft", "AIME-2024 avg_score", {"0": 0.072, "10": 0.494, "25": 0.672, "30": 0.711}),
    ("flash-fullft", "AIME-2024 accuracy", {"0": 53.6, "10": 74.7, "25": 83.6, "30": 85.6}),
    ("flash-lora", "AIME-2024 accuracy", {"0": 53.6, "25": 78}),
    ("eywye3sd", "GSM8K score", {"0": 0.82, "5": 0.93}),
    ("throughput", "time, step", {"b0": 2045, "b1": 1985, "b2": 1517, "b3": 1211, "b6": 1144, "f1": 1200}),
    ("miles-flash", "training reward", {"0": 0.675, "1": 0.867, "2": 0.75, "3": 0.492, "4": 0.817})])
def test_published_values(run, quantity, values):
    assert published.load()["by_name"][run, quantity]["values"] == values


def test_published_k_and_marks():
    data = published.load()
    assert {run: data["runs"][run]["samples"] for run in ("trajectory-glm", "trajectory-flash", "bz2t3wg9")} == {
        "trajectory-glm": None, "trajectory-flash": 12, "bz2t3wg9": 12}
    assert {row.get("status") for row in data["rows"] if row["run"] == "sync-2195"} == {"unconfirmed"}
    for run in ("trajectory-glm", "trajectory-flash"):
        assert "no seeds or error bars, and only the two ends are public" in data["runs"][run]["caveats"]


def test_derived_by_hand():
    """accuracy = (avg_score + 1) / 2. Of finished answers: 53.5..54.5 % right and 46.105..46.115 % cut are 99.3 % or more,
    82.5..83.5 % and 5.5..6.5 % are 87.3 to 89.3 %."""
    data = published.load()["by_name"]
    score, accuracy = (data["flash-fullft", f"AIME-2024 {q}"]["values"] for q in ("avg_score", "accuracy"))
    assert all(abs(2 * accuracy[step] / 100 - 1 - score[step]) <= 0.001 + 1e-9 for step in score)
    assert data["trajectory-flash", "AIME-2024 accuracy of finished"]["values"] == {"0": [99.3, 100], "20": [87.3, 89.3]}
    assert round(53.5 / (100 - 46.105) * 100, 1) == 99.3
    assert (round(8250 / 94.5, 1), round(8350 / 93.5, 1)) == (87.3, 89.3)


def changed(**values):
    return lambda row: row.update(values)


@pytest.mark.parametrize("quantity, change, sentence", [
    ("AIME-2024 accuracy", lambda row: row.pop("source"), "lacks source"),
    ("AIME-2024 accuracy", changed(source=""), "lacks source"),
    ("AIME-2024 accuracy", changed(source="hearsay"), "'hearsay' is none of the sources"),
    ("AIME-2024 accuracy", changed(run="mine"), "'mine' is none of the runs"),
    ("AIME-2024 accuracy", changed(values={"0": 54, "20": 101}), "101 at 20 is not within 0 to 100 %"),
    ("AIME-2024 accuracy", changed(values={"0": -1}), "-1 at 0 is not within 0 to 100 %"),
    ("AIME-2024 accuracy", changed(values={"0": [60, 50]}), "not within"),
    ("AIME-2024 accuracy", changed(values={"0": None}), "None at 0"),
    ("AIME-2024 accuracy", changed(values={"start": 5}), "'start' is no step"),
    ("AIME-2024 accuracy", changed(values={}), "lacks values"),
    ("AIME-2024 accuracy", changed(kind="derived"), "needs formula and of"),
    ("AIME-2024 accuracy", changed(kind="guessed"), "kind is 'guessed'"),
    ("AIME-2024 accuracy", changed(status="sure"), "status is 'sure'"),
    ("AIME-2024 accuracy", changed(approximate=["5"]), "approximate names no value"),
    ("AIME-2024 accuracy", changed(note="x"), "has note, which nothing reads"),
    ("AIME-2024 length", changed(quantity="AIME-2024 accuracy"), "twice"),
    ("AIME-2024 answers cut, of 360", changed(values={"0": 167}), "167 at 0, but 3.6 [*] percent gives 166"),
    ("AIME-2024 accuracy of finished", changed(values={"20": [87.3, 88.9]}), "88.9 at 20, but .* gives 89.3"),
    ("AIME-2024 accuracy of finished", changed(of=["AIME-2024 score"]), "no AIME-2024 score at 0")])
def test_published_refused(tmp_path, quantity, change, sentence):
    data = json.loads(published.FILE.read_text())
    change(next(row for row in data["rows"] if (row["run"], row["quantity"]) == ("trajectory-flash", quantity)))
    (tmp_path / "published.json").write_text(json.dumps(data))
    with pytest.raises(Stop, match=sentence):
        published.load(tmp_path / "published.json")


def test_published_derived_from_avg_score_is_recomputed(tmp_path):
    text = published.FILE.read_text()
    (tmp_path / "published.json").write_text(text.replace('{"0": 53.6, "25": 78}', '{"0": 53.6, "25": 79}'))
    with pytest.raises(Stop, match=r"flash-lora, AIME-2024 accuracy: 79 at 25, but \(avg_score \+ 1\) / 2 gives 78.05"):
        published.load(tmp_path / "published.json")


# -- records ---------------------------------------------------------------------------------------------------------

def test_t_interval():
    """Of 1, 2, 3: s = 1, t(2) = 4.303, 4.303 / sqrt(3) = 2.484. Of 5, 7: s = sqrt 2, t(1) = 12.706."""
    assert record.interval([1, 2, 3]) == (2, pytest.approx(2.484, abs=5e-4))
    assert record.interval([5.0, 7.0]) == (6, pytest.approx(12.706, abs=1e-3))
    assert record.interval([-1, 1] * 15 + [0])[1] == pytest.approx(2.0423 / 31 ** 0.5, abs=1e-4)       # s = 1, t(30)
    assert record.interval([4]) == (4, None)


VERSIONS = {"python": "3.12.1", "torch": "2.13.0", "vllm": None, "commit": "a" * 40, "dirty": False, "hardware": "one GPU",
            "command": "python recipes/small.py --rehearse"}


@pytest.fixture
def finished(tmp_path):
    """A finished run of 2 steps: 2 problems x 2 answers, evaluated at 0 and 2."""
    folder = tmp_path / "runs" / "a"
    (folder / "eval").mkdir(parents=True)
    lines = []
    for step, right, cut in ((0, 2, 2), (2, 3, 1)):
        answers = [{"id": f"p{i // 2}", "text": "a secret answer", "is_correct": i >= 4 - right} for i in range(4)]
        (folder / "eval" / f"step-{step}.jsonl").write_text("".join(json.dumps(a) + "\n" for a in answers))
        if step:
            lines.append({"step": step, "reward/mean": 0.25, "reward/accuracy": 0.5, "rollout/capped": 0.3,
                          "rollout/tokens": 11.0, "policy/entropy": 0.1, "policy/clip": 0.0, "mismatch/mean": 1e-7,
                          "mismatch/max": 1e-5, "time/sample_s": 60.0})
        lines.append({"step": step, "eval/accuracy": right / 4, "eval/stderr": 0.1, "eval/capped": cut / 4,
                      "eval/accuracy_finished": 1.0, "eval/tokens": 11.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.json").write_text(json.dumps({"seed": 0, "name": "a", "steps": 2, "dtype": "float32", "rehearse": True,
                                                    "eval_samples": 2, "model": f"{ROOT}/.cache/model"}))
    (folder / "check.json").write_text(json.dumps({"passed": True, "rows": []}))
    (folder / "versions.json").write_text(json.dumps(VERSIONS))
    (folder / "small.py").write_text("")
    (folder / "DONE").write_text("{}")
    return folder


def edit(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_keep(finished, tmp_path):
    target = record.keep(finished, "tiny", {}, tmp_path / "records")
    assert sorted(f.name for f in target.iterdir()) == ["check.json", "config.json", "metrics.jsonl", "record.json"]
    kept = json.loads((target / "record.json").read_text())
    assert kept == {"recipe": "small", "command": VERSIONS["command"], "commit": "a" * 40, "hardware": "one GPU", "dirty": False,
                    "by_hand": [], "n": 4, "problems": 2, "versions": {"python": "3.12.1", "torch": "2.13.0"}}
    everything = "".join(f.read_text() for f in target.iterdir())
    assert "secret" not in everything and str(ROOT) not in everything
    assert (target / "metrics.jsonl").read_text() == (finished / "metrics.jsonl").read_text()
    with pytest.raises(Stop, match="a record is not written over"):
        record.keep(finished, "tiny", {}, tmp_path / "records")


@pytest.mark.parametrize("key", ["command", "commit", "hardware"])
def test_keep_refuses_what_cannot_be_traced(finished, tmp_path, key):
    edit(finished / "versions.json", **{key: None})
    with pytest.raises(Stop, match=f"runs/a lacks {key}: its numbers cannot be traced"):
        record.keep(finished, "tiny", {}, tmp_path / "records")
    assert not list(tmp_path.glob("records/*/*"))


def test_keep_refuses_without_versions_or_n(finished, tmp_path):
    (finished / "eval" / "step-2.jsonl").unlink()
    with pytest.raises(Stop, match="step-2.jsonl: n cannot be counted"):
        record.keep(finished, "tiny", {}, tmp_path / "records")
    (finished / "versions.json").write_text(json.dumps({k: VERSIONS[k] for k in ("commit", "dirty", "hardware", "command")}))
    (finished / "metrics.jsonl").write_text('{"step": 2, "reward/mean": 0.5}\n')
    with pytest.raises(Stop, match="lacks versions, n"):
        record.keep(finished, "tiny", {}, tmp_path / "records")
    (finished / "versions.json").unlink()
    with pytest.raises(Stop, match="versions.json missing"):
        record.keep(finished, "tiny", {}, tmp_path / "records")


def test_keep_refuses_a_changed_tree(finished, tmp_path):
    edit(finished / "versions.json", dirty=True)
    for by_hand in ({}, {"commit": "a" * 40}):
        with pytest.raises(Stop, match="changed tree"):
            record.keep(finished, "tiny", by_hand, tmp_path / "records")
    edit(finished / "versions.json", dirty=None)
    with pytest.raises(Stop, match="not run from a clean tree"):
        record.keep(finished, "tiny", {}, tmp_path / "records")


def test_keep_refuses_what_proves_nothing(finished, tmp_path):
    edit(finished / "check.json", passed=False)
    with pytest.raises(Stop, match="no five-step check that passed"):
        record.keep(finished, "tiny", {}, tmp_path / "records")
    edit(finished / "check.json", passed=True)
    with pytest.raises(Stop, match="GROUP '../esc'"):
        record.keep(finished, "../esc", {}, tmp_path / "records")
    lines = (finished / "metrics.jsonl").read_text()
    first = next(json.loads(line) for line in lines.splitlines() if "eval/accuracy" in line)
    (finished / "metrics.jsonl").write_text(lines.replace(f'"eval/accuracy": {json.dumps(first["eval/accuracy"])}',
                                                          '"eval/accuracy": NaN'))
    with pytest.raises(Stop, match="answers are right there, nan"):
        record.keep(finished, "tiny", {}, tmp_path / "records")


def test_keep_looks_at_every_start_of_a_resumed_run(finished, tmp_path):
    """The numbers until the resume are the first start's."""
    first = {**VERSIONS, "command": "python recipes/small.py --first"}
    edit(finished / "versions.json", earlier=[{**first, "dirty": True}])
    with pytest.raises(Stop, match="changed tree"):
        record.keep(finished, "tiny", {}, tmp_path / "records")
    edit(finished / "versions.json", earlier=[{**first, "commit": "c" * 40}])
    with pytest.raises(Stop, match="ran at 2 commits"):
        record.keep(finished, "tiny", {}, tmp_path / "records")
    edit(finished / "versions.json", earlier=[first])
    kept = json.loads((record.keep(finished, "tiny", {}, tmp_path / "records") / "record.json").read_text())
    assert kept["command"] == "python recipes/small.py --first"


def test_keep_marks_what_was_given_by_hand(finished, tmp_path):
    edit(finished / "versions.json", commit=None, dirty=None, hardware=None)
    with pytest.raises(Stop, match="says command 'python recipes/small.py --rehearse', not 'python x.py'"):
        record.keep(finished, "tiny", {"command": "python x.py"}, tmp_path / "records")
    target = record.keep(finished, "tiny", {"commit": "b" * 40, "hardware": "4 x 8 B300"}, tmp_path / "records")
    kept = json.loads((target / "record.json").read_text())
    assert (kept["by_hand"], kept["commit"], kept["hardware"], kept["dirty"]) == (
        ["commit", "hardware"], "b" * 40, "4 x 8 B300", None)
    assert any("noted by hand" in line for line in table.ours(record.read([target])))


def test_keep_refuses_unfinished_or_inconsistent(finished, tmp_path):
    def refused(sentence):
        with pytest.raises(Stop, match=sentence):
            record.keep(finished, "tiny", {}, tmp_path / "records")
    good = (finished / "metrics.jsonl").read_text()
    (finished / "metrics.jsonl").write_text(good.replace('"eval/accuracy": 0.75', '"eval/accuracy": 0.8'))
    refused("3 of 4 answers are right there, 80.00% in metrics.jsonl")
    (finished / "metrics.jsonl").write_text("".join(good.splitlines(keepends=True)[:-1]))
    refused("no evaluation at its last step 2")
    (finished / "metrics.jsonl").write_text(good)
    (finished / "DONE").unlink()
    refused("not a finished run: DONE missing")


def test_group_is_one_configuration(finished, tmp_path):
    record.keep(finished, "tiny", {}, tmp_path / "records")
    second = finished.rename(finished.with_name("b"))
    with pytest.raises(Stop, match="has the seed 0, which another run"):
        record.keep(second, "tiny", {}, tmp_path / "records")
    edit(second / "config.json", seed=1, name="b", dtype="bfloat16")
    with pytest.raises(Stop, match="differs from a in dtype"):
        record.keep(second, "tiny", {}, tmp_path / "records")
    edit(second / "config.json", dtype="float32")
    record.keep(second, "tiny", {}, tmp_path / "records")
    assert sorted(f.name for f in (tmp_path / "records" / "tiny").iterdir()) == ["a", "b"]
    runs = record.groups(tmp_path / "records")["tiny"]
    assert [r["config"]["seed"] for r in runs] == [0, 1]
    assert table.ours(runs)[2] == "| accuracy, % | 50.0 ± 0.0 | 75.0 ± 0.0 | +25.0 ± 0.0 |"


@pytest.mark.parametrize("key", record.NEEDED)
def test_incomplete_record_is_not_read(finished, tmp_path, key):
    target = record.keep(finished, "tiny", {}, tmp_path / "records")
    edit(target / "record.json", **{key: None})
    with pytest.raises(Stop, match=f"a lacks {key}: its numbers cannot be traced"):
        record.groups(tmp_path / "records")


def test_record_command(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["record.py", "tiny"])
    with pytest.raises(Stop, match="usage"):
        record.main()
    monkeypatch.setattr(sys, "argv", ["record.py", "tiny", str(finished), "--hardwar", "x"])
    with pytest.raises(Stop, match="the nearest one is --hardware"):
        record.main()


# -- tables ----------------------------------------------------------------------------------------------------------

def test_page_is_up_to_date(tmp_path, monkeypatch):
    assert table.filled(PAGE, table.blocks()) == PAGE, "run python results/table.py"
    copy = tmp_path / "README.md"
    copy.write_text(PAGE.replace("57 → 81", "57 → 82"))
    monkeypatch.setattr(table, "PAGE", copy)
    monkeypatch.setattr(sys, "argv", ["table.py", "--check"])
    with pytest.raises(Stop, match="not what its data say"):
        table.main()
    assert "57 → 82" in copy.read_text()
    monkeypatch.setattr(sys, "argv", ["table.py"])
    table.main()
    assert copy.read_text() == PAGE
    with pytest.raises(Stop, match="not the same: lora"):
        table.filled(PAGE.replace("lora: begin", "lora: start"), table.blocks())


@pytest.mark.parametrize("line", [
    "| Trajectory, GLM-5.3, rank 32 | 20 | 57 → 81 | – | – | – | 30 x ? | Trajectory field report |",
    "| **ours, GLM-5.3** | not run |",
    "| SkyRL, GLM-5.3, MXFP8, R3 | 55.8 | 76.1 | 80.3 | 83.1 | 84.4 |",
    "| SkyRL, Flash, R3 | *53.6* |  | *74.7* |  |  | *83.6* | *85.6* |",
    "| accuracy, % | 53.8 ± 6.2 | 97.1 ± 2.4 | 99.9 ± 0.4 | 99.6 ± 0.4 | 99.7 ± 0.8 | +45.9 ± 5.9 |",
    "| accuracy, % | 70.9 | 98.8 | 100.0 | 100.0 | 100.0 | +29.1 |"])
def test_page_shows(line):
    assert line in PAGE


def test_page_shows_every_published_row():
    data = published.load()
    for row in data["rows"]:
        for key in row["values"]:
            assert table.value(row, key) in PAGE, (row["run"], row["quantity"], key)
        assert data["sources"][row["source"]] in PAGE, row["source"]
    lora, full = (PAGE.split(f"<!-- {name}: begin -->")[1].split("<!--")[0] for name in ("lora", "full fine-tuning"))
    assert "Trajectory" in lora and "SkyRL, GLM-5.3" not in lora and "Trajectory" not in full


def test_full_size_run_takes_the_place_of_not_run(finished, tmp_path):
    edit(finished / "config.json", rehearse=False, lora_rank=32)
    record.keep(finished, "aime", {}, tmp_path / "records")
    lora, full = (table.summary(published.load(), record.groups(tmp_path / "records"), method)
                  for method in ("LoRA", "full fine-tuning"))
    assert ("| **ours, aime** | 2 | 50.0 → 75.0 | 50.0 → 25.0 | 11.5 → 11.5 | 100.0 → 100.0 | 2 x 2 | 1 seed, "
            "commit aaaaaaaaaa, one GPU |") in lora
    assert sum("not run" in line for line in lora) == 1 and sum("not run" in line for line in full) == 2


# -- pictures --------------------------------------------------------------------------------------------------------

def ink(png):
    """Share of the pixels that are not the page's colour, and the picture's size."""
    pixels = np.array(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)
    return (np.abs(pixels - pixels[0, 0]).sum(2) > 60).mean(), pixels.shape[:2]


def test_plot_of_runs(finished, tmp_path, monkeypatch):
    def draw(*argv):
        monkeypatch.setattr(sys, "argv", ["plot.py", *map(str, argv)])
        plot.main()
        return (tmp_path / "a.png").read_bytes()
    out = ("--out", tmp_path / "a.png")
    whole = draw(finished, *out)
    assert whole.startswith(b"\x89PNG") and 0.01 < ink(whole)[0] < 0.3 and len(whole) < 150_000
    assert draw(finished, *out) == whole
    with open(finished / "metrics.jsonl", "a") as f:                  # as a run that was killed leaves it
        f.write('{"step": 3, "reward/me')
    assert draw(finished, *out) == whole
    with open(finished / "metrics.jsonl", "a") as f:
        f.write('an": 0.5, "reward/accuracy": 0.75}\n')
    assert draw(finished, *out) != whole
    drawn = draw(finished, *out)
    draw(finished)
    assert (finished / "plot.png").read_bytes() == drawn
    assert draw(finished, ROOT / "results" / "records" / "rehearsal-h200" / "seed-0", *out) != whole
    (finished / "metrics.jsonl").write_text('{"step": 0, "time/eval_s": 1}\n')
    before = (tmp_path / "a.png").read_bytes()
    for argv, sentence in (((finished, *out), "nothing to draw"), ((tmp_path, *out), "metrics.jsonl is missing"),
                           ((finished, tmp_path), "go together"), (out, "go together"),
                           ((finished, "--out", "a.pdf"), "no .png file"),
                           ((finished, "--out", tmp_path / "none" / "a.png"), "no .png file in a folder that exists")):
        with pytest.raises(Stop, match=sentence):
            draw(*argv)
    (finished / "metrics.jsonl").write_text('{"step": 0\n{"step": 1}\n')
    with pytest.raises(Stop, match="line 1 of 2 is not JSON"):
        draw(finished, *out)
    assert (tmp_path / "a.png").read_bytes() == before


@pytest.mark.parametrize("name", ["published-light", "published-dark", "rehearsal-light", "rehearsal-dark"])
def test_pictures_of_the_page(name):
    """Drawn from the data as they are now; small; 1,440 pixels wide for 900; not blank; shown on the page."""
    path = ROOT / "results" / f"{name}.png"
    assert Image.open(path).text["Source"] == plot.fingerprint(), "run python results/plot.py"
    share, (_, width) = ink(path.read_bytes())
    assert path.stat().st_size < 150_000 and width == 1440 and 0.01 < share < 0.4
    assert f'"{name}.png"' in PAGE


def test_measured_numbers_are_as_recorded():
    """The metrics of the recorded runs, to the byte."""
    names = [f"rehearsal-cpu/seed-{s}" for s in (0, 1, 2)] + ["rehearsal-h200/seed-0"]
    found = [hashlib.sha256((record.RECORDS / n / "metrics.jsonl").read_bytes()).hexdigest()[:12] for n in names]
    assert found == ["661201f36003", "8d915d393c48", "1a9d54c447f2", "d78c236d21b1"]
