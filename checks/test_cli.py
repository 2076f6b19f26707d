"""Flags, presets and help; errors as sentences; the run folder, its metrics and what a resume may change."""
import dataclasses
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Literal

import pytest

from common import cli
from common.cli import Run, Stop, parse


@dataclass
class Config:
    """Not a # comment."""
    # model
    model: str = "a#b"                 # folder of the checkpoint
    rank: int | None = 32              # width of the adapter;
                                       # none: all weights
    layers: tuple[int, ...] = (1, 2)   # counted from 0
    betas: tuple[float, float] = (0.9, 0.999)
    # optimiser
    # and its schedule
    lr: float = 1e-5                   # reached after warm-up  # 40 updates
    group_size: int = 16
    experts: Literal["shared", "each"] = "shared"
    check: bool = True
    steps: int = 20
    rehearse: bool = False


PRESETS = {"rehearse": {"lr": 3e-3, "group_size": 8, "rehearse": True}, "quick": {"steps": 2}}


def flags(*argv):
    return parse(Config, PRESETS, "", argv)


def test_defaults_and_forms():
    assert flags() == Config()
    for text in ("--group-size 8", "--group_size 8", "--group-size=8", "--group_size=8", "--group-size=4 --group-size 8"):
        assert flags(*text.split()) == Config(group_size=8)
    assert flags("--layers", "3,4,5", "--betas=0.8,0.9").layers == (3, 4, 5)
    assert flags("--layers=").layers == ()
    assert flags("--rank", "none").rank is None and flags("--rank", "4").rank == 4
    assert flags("--lr", "-1e-3").lr == -1e-3
    assert flags("--no-check").check is False and flags("--check=false").check is False
    assert flags("--no-check", "--check").check is True
    assert flags("--model=x=y").model == "x=y"
    assert flags("--experts", "each").experts == "each"


@dataclass
class Words:
    from_: str = "the Hub"             # a file
    year: Literal[2024, 2025] = 2024


def test_word_of_python_as_a_flag(capsys):
    assert parse(Words, argv=["--from", "a.jsonl"]) == Words("a.jsonl") == parse(Words, argv=["--from=a.jsonl"])
    with pytest.raises(Stop, match="unknown option --form: the nearest one is --from$"):
        parse(Words, argv=["--form", "a"])
    with pytest.raises(SystemExit):
        parse(Words, argv=["--help"])
    out = capsys.readouterr().out
    assert "\n  --from the Hub " in out and "\n  --year 2024 " in out and "2024 or 2025" in out
    with pytest.raises(Stop, match="--year: '2023' is not one of 2024, 2025"):
        parse(Words, argv=["--year", "2023"])


def test_presets_come_before_explicit_flags():
    assert flags("--rehearse") == Config(lr=3e-3, group_size=8, rehearse=True)
    assert flags("--group-size", "4", "--rehearse").group_size == 4
    assert flags("--rehearse", "--no-rehearse") == Config()
    assert flags("--quick", "--rehearse") == Config(lr=3e-3, group_size=8, rehearse=True, steps=2)
    with pytest.raises(AssertionError, match="lrr"):
        parse(Config, {"bad": {"lrr": 1}}, "", [])


@pytest.mark.parametrize("argv, sentence", [
    (["--group-sizes", "8"], "unknown option --group-sizes: the nearest one is --group-size"),
    (["--reherse"], "unknown option --reherse: the nearest one is --rehearse"),
    (["--zzz"], "unknown option --zzz: --help lists them all"),
    (["--check", "false"], "--check takes no value: --check or --no-check"),
    (["--group-size", "8.5"], "--group-size: '8.5' is not of type int"),
    (["--group-size"], "--group-size needs a value of type int"),
    (["--group-size", "--check"], "--group-size needs a value of type int"),
    (["--lr", "fast"], "--lr: 'fast' is not of type float"),
    (["--lr", "nan"], "--lr: 'nan' is not a finite number"),
    (["--betas", "0.9,1e400"], "--betas: '1e400' is not a finite number"),
    (["--layers", "1,b"], "--layers: 'b' is not of type int"),
    (["--betas", "0.9"], "--betas: '0.9' is not of type tuple[float, float]"),
    (["--check=maybe"], "--check: 'maybe' is not of type bool"),
    (["--no-check=1"], "--no-check takes no value"),
    (["--no-steps"], "unknown option --no-steps"),
    (["--experts", "some"], "--experts: 'some' is not one of shared, each"),
    (["steps=3"], "unexpected argument 'steps=3'"),
    (["-x"], "unexpected argument '-x'"),
])
def test_mistakes_are_one_sentence(argv, sentence):
    with pytest.raises(Stop) as error:
        flags(*argv)
    assert str(error.value).startswith(sentence) and "\n" not in str(error.value)


def test_help_shows_comments_groups_and_defaults(capsys):
    with pytest.raises(SystemExit) as exit:
        parse(Config, PRESETS, "Doc of the recipe.", ["--help"])
    shown = capsys.readouterr().out
    assert exit.value.code == 0
    lines = [line.strip() for line in shown.splitlines()]
    assert lines[0] == "Doc of the recipe." and {"model", "optimiser and its schedule"} < set(lines)
    assert any(line.split(maxsplit=2) == ["--rank", "32", "width of the adapter; none: all weights"] for line in lines)
    assert any(line.split(maxsplit=2) == ["--lr", "1e-05", "reached after warm-up  # 40 updates"] for line in lines)
    assert any(line.startswith("--layers 1,2") for line in lines)
    assert "--rehearse sets lr 0.003, group_size 8, rehearse True" in lines
    assert shown.index("a#b") < shown.index("optimiser")
    assert all(f"--{f.name.replace('_', '-')} " in shown for f in dataclasses.fields(Config))


def test_help_needs_no_heavy_import():
    code = ("import sys, time; t = time.process_time(); import common.cli, data.dataset; spent = time.process_time() - t\n"
            "print(spent, sorted(set(sys.modules) & set('torch vllm transformers ray wandb numpy pyarrow tqdm'.split())))")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    spent, loaded = out.split(maxsplit=1)
    assert loaded.strip() == "[]"
    assert float(spent) < 0.2          # CPU seconds; 0.03 measured


SCRIPT = """
import os, sys
from common.cli import Stop, run_main
def stop(): raise Stop("no such model")
def plan(): raise Stop("plan: 3 problems", code=2)
def two(): return 2
def good(): pass
def interrupt(): raise KeyboardInterrupt
def full(): open("/dev/full", "w").write("x" * 100000)
def bug(): [][1]
run_main(globals()[sys.argv[1]])
"""


@pytest.mark.parametrize("name, code, sentence", [
    ("stop", 1, "no such model\n"), ("plan", 2, "plan: 3 problems\n"), ("two", 2, ""), ("good", 0, ""),
    ("interrupt", 1, "interrupted: "), ("bug", 1, "Traceback"),
    ("full", 1, "a file cannot be written: No space left on device\n")])
def test_run_main(name, code, sentence):
    done = subprocess.run([sys.executable, "-c", SCRIPT, name], capture_output=True, text=True)
    assert done.returncode == code and done.stderr.startswith(sentence)
    assert name == "bug" or done.stderr.count("\n") <= 1


def test_stop_inside_ray_errors():
    """As ray wraps it: a task's error carries the cause, an actor's failed __init__ only the text."""
    import pickle

    from ray.exceptions import ActorDiedError, RayTaskError
    stop = pickle.loads(pickle.dumps(Stop("bad folder x", code=2)))
    task = RayTaskError("load", "Traceback ...\ncommon.flags.Stop: bad folder x", stop)
    for error in (task, task.as_instanceof_cause()):
        assert cli._sentence(error) == ("bad folder x", 2)
    assert cli._sentence(RayTaskError("load", "Traceback ...\nKeyError: 1", KeyError(1))) is None
    task._actor_id = "ab"
    assert cli._sentence(ActorDiedError(task)) == ("bad folder x", 1)


# ---------------------------------------------------------------- run folder

@pytest.fixture
def recipe(tmp_path, monkeypatch):
    source = tmp_path / "recipe.py"
    source.write_text("first = 1\n")
    monkeypatch.setattr(sys, "argv", [str(source)])
    return source


def start(tmp_path, resume=False, **changes):
    return Run(Config(**changes), "a", resume=resume, wandb="off", root=tmp_path / "runs")


def test_folder_holds_what_the_run_was(tmp_path, recipe):
    run = start(tmp_path, lr=0.5)
    assert json.loads((run.folder / "config.json").read_text())["lr"] == 0.5
    assert (run.folder / "recipe.py").read_text() == "first = 1\n"
    versions = json.loads((run.folder / "versions.json").read_text())
    assert versions["torch"] and versions["megatron-core"] and versions["transformers"] and versions["python"].startswith("3.12")
    run.finish({"accuracy": 1.0})
    assert json.loads((run.folder / "DONE").read_text()) == {"accuracy": 1.0}


def test_existing_folder_is_never_written_over(tmp_path, recipe):
    run = start(tmp_path)
    run.log(1, {"reward": 1.0})
    with pytest.raises(Stop, match=r"runs/a exists: use --resume or another --name"):
        start(tmp_path)
    assert (run.folder / "metrics.jsonl").read_text() == '{"step": 1, "reward": 1.0}\n'
    with pytest.raises(Stop, match="holds no run to resume"):
        Run(Config(), "b", resume=True, wandb="off", root=tmp_path / "runs")
    assert not (tmp_path / "runs" / "b").exists()


def test_resume_refuses_another_config(tmp_path, recipe):
    start(tmp_path)
    with pytest.raises(Stop, match=r"another config \(rank 32 -> 8, lr 1e-05 -> 0.5\)"):
        start(tmp_path, resume=True, lr=0.5, rank=8)
    resumed = start(tmp_path, resume=True, steps=40)
    assert json.loads((resumed.folder / "config.json").read_text())["steps"] == 40


def test_resume_says_what_changes_and_refuses_another_script(tmp_path, recipe, monkeypatch, capsys):
    start(tmp_path, steps=20)
    start(tmp_path, resume=True, steps=20)
    assert capsys.readouterr().out == ""
    start(tmp_path, resume=True, steps=40)
    assert capsys.readouterr().out == f"{tmp_path}/runs/a goes on with steps 20 -> 40\n"
    other = recipe.with_name("recipes.py")
    other.write_text("")
    monkeypatch.setattr(sys, "argv", [str(other)])
    with pytest.raises(Stop, match="runs/a was started by recipe.py: recipes.py does not go on with it, give it another --name"):
        start(tmp_path, resume=True, steps=40)


def test_a_disk_that_is_full_at_the_start_leaves_the_name_free(tmp_path, recipe, monkeypatch):
    def full(source, folder, **_):
        raise OSError(28, "No space left on device", str(source), None, str(folder))
    monkeypatch.setattr(cli.shutil, "copyfile", full)
    with pytest.raises(OSError) as error:
        start(tmp_path)
    assert not list((tmp_path / "runs").iterdir())
    assert cli._sentence(error.value) == (f"{tmp_path}/runs/a/recipe.py cannot be written: No space left on device", 1)


@pytest.mark.parametrize("file", ["config.json", "versions.json"])
def test_resume_of_a_damaged_folder_is_one_sentence(tmp_path, recipe, file):
    path = start(tmp_path).folder / file
    path.write_text('{"steps": 3, "lr')
    with pytest.raises(Stop, match=f"runs/a/{file} is damaged, it is not JSON: Unterminated string"):
        start(tmp_path, resume=True)
    assert path.read_text() == '{"steps": 3, "lr'


def test_resume_keeps_both_sources(tmp_path, recipe):
    start(tmp_path)
    start(tmp_path, resume=True)
    assert len(list((tmp_path / "runs" / "a").glob("recipe*.py"))) == 1
    recipe.write_text("second = 2\n")
    start(tmp_path, resume=True)
    start(tmp_path, resume=True)
    assert sorted(p.name for p in (tmp_path / "runs" / "a").glob("recipe*.py")) == ["recipe.2.py", "recipe.py"]


def test_rewind_drops_later_steps_and_a_torn_line(tmp_path, recipe):
    import numpy as np
    run = start(tmp_path)
    for step in range(5):
        run.log(step, {"reward": np.float32(step) / 2})
    with open(run.folder / "metrics.jsonl", "a") as f:
        f.write('{"step": 1, "rew')                                   # the process died while writing
    with pytest.raises(Stop, match="belongs to a run that is still going on"):
        start(tmp_path, resume=True)
    run._lock.close()                                                  # as its death does
    resumed = start(tmp_path, resume=True)
    resumed.rewind(3)
    resumed.log(3, {"reward": 9.0})
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["reward"]) for line in lines] == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 9.0)]


def test_write_is_all_or_nothing(tmp_path, recipe, monkeypatch):
    run = start(tmp_path)
    run.write_json("state.json", {"step": 1})
    with pytest.raises(TypeError):
        run.write_json("state.json", {"step": object()})
    monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError):
        run.write_json("state.json", {"step": 2})
    assert json.loads((run.folder / "state.json").read_text()) == {"step": 1}
    assert not [p.name for p in run.folder.iterdir() if p.name.startswith(".")]


def test_wandb_offline_keeps_its_id(tmp_path, recipe, monkeypatch):
    """With a stand-in: what is sent, and that a resumed run goes on under the same id."""
    import types
    seen = []
    run = types.SimpleNamespace(define_metric=lambda *a, **k: None, log=seen.append, finish=lambda: None)
    fake = types.SimpleNamespace(init=lambda **k: seen.append(k) or run, Settings=lambda **k: k)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for resume in (False, True):
        r = Run(Config(), "a", resume=resume, wandb="offline", root=tmp_path / "runs")
        r.log(1, {"reward": 0.5})
        r.finish()
    assert seen[0]["id"] == seen[2]["id"] and seen[0]["mode"] == "offline" and seen[1] == {"step": 1, "reward": 0.5}


def test_wandb_missing_is_said(tmp_path, recipe, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    Run(Config(), "a", wandb="offline", root=tmp_path / "runs")
    assert capsys.readouterr().out.count("wandb is not installed") == 1
    with pytest.raises(Stop, match="--wandb online needs the package wandb"):
        Run(Config(), "b", wandb="online", root=tmp_path / "runs")


def test_line_table_progress(tmp_path, recipe, capsys):
    start(tmp_path).line(3, reward=0.25, tokens=12, lr=1e-5, note="x")
    assert capsys.readouterr().out == "step    3  reward 0.250  tokens 12  lr 1e-05  note x\n"
    assert cli.table([("a", 1, "x"), ("bcd", 22.5, "")], header=("name", "n", "t")) == "name     n  t\na        1  x\nbcd   22.5"
    assert cli.table([]) == ""
    clock = time.perf_counter()
    assert list(cli.progress(range(3), desc="x")) == [0, 1, 2] and time.perf_counter() - clock < 1
