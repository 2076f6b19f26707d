"""A run that is killed at every point of its life ends as one that nobody touched: the same numbers to the last bit.

A chain kills the same run again and again, each time further on, and each time --resume goes on from what it finds. The points
are hooks of the test's own: a script that wraps a function of the driver, or a verb of the actors, and sends a signal to the
driver's process or to an actor's when that is called for the n-th time.
"""
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common import evaluation
from data.dataset import Cursor

ROOT = Path(__file__).resolve().parent.parent
# one rank, one engine: most of a run is its start
ARGS = ["--rehearse", "--cpu-ranks", "1", "--steps", "3", "--prompts-per-step", "4", "--group-size", "2",
        "--updates-per-step", "2", "--eval-samples", "1", "--eval-every", "3", "--save-every", "1", "--keep", "1",
        "--wandb", "off", "--engine-restarts", "0"]

# point: [what is called, the how-manieth time it is, who gets the signal, before or after (of a verb: while it runs), after the
# check (of a verb), signal]
SCRIPT = """
import json, os, shutil, signal, sys, time
sys.path.insert(0, {root!r})
from checks import logprob_parity
from common import checkpoint, cli, cluster, rewards, sync
from recipes import dapo_glm5p3_lora as recipe

points, groups, seen, checked = json.loads(sys.argv.pop(1)), {{}}, {{}}, []
sys.argv[0] = recipe.__file__

def reached(name, when, arg=""):
    for what, n, who, at, number in points:
        of, _, part = what.partition(" ")                # "shutil.rmtree .step-1": only calls with that in their argument
        if of == name and at == when and part in str(arg):
            seen[what, who] = seen.get((what, who), 0) + 1
            if seen[what, who] == n:
                group, _, i = who.partition(" ")
                os.kill(groups[group]._where(int(i))[2] if i else os.getpid(), number)
                time.sleep(0.5)

def hook(owner, name):
    real = getattr(owner, name)
    def hooked(*args, **kw):
        whole = f"{{owner.__name__}}.{{name}}".removeprefix("common.").replace("recipes.dapo_glm5p3_lora", "recipe")
        reached(whole, "before", args[0] if args else "")
        found = real(*args, **kw)
        reached(whole, "after", args[0] if args else "")
        return found
    setattr(owner, name, hooked)

start, gather, read, check = cluster.start, cluster.Group._gather, recipe.read, logprob_parity.five_steps

def registered(where, name, *args, **kw):
    groups[name.split()[0]] = group = start(where, name, *args, **kw)
    return group

def verb(self, name, futures):
    reached(f"{{self.name.split()[0]}}.{{name}}", "after the check" if checked else "earlier")
    return gather(self, name, futures)

def five_steps(*args, **kw):
    found = check(*args, **kw)
    checked.append(True)
    return found

cluster.start, cluster.Group._gather, logprob_parity.five_steps = registered, verb, five_steps
recipe.read = lambda path, *args: read(path, *args)[:8 if "test" in str(path) else None]
for owner, name in ((sync, "_stage"), (rewards, "grade_all"), (checkpoint, "_sync"), (shutil, "rmtree"), (cli.Run, "log"),
                    (cli.Run, "finish"), (cli, "versions"), (recipe, "publish"), (recipe, "group_advantage")):
    hook(owner, name)
cli.run_main(recipe.main)
"""
NINE, STOPPED = 9, 19
LOST = "its process crashed or was killed, as Linux does where memory runs out"
DRIVER, RANK, ENGINE = "driver", "trainer 0", "sampler 0"

# (point, what the run says; None where its driver was killed and it says nothing, more options); in the order of a run's life
FAST = [
    (["rewards.grade_all", 2, DRIVER, "before", NINE], None, []),                        # grading step 1: nothing is saved yet
    (["trainer.update", 2, RANK, "after the check", NINE], "trainer rank 0 on {node} died during update", []),     # within step 1
    (["checkpoint._sync", 3, DRIVER, "before", NINE], None, []),                         # step 2's checkpoint, before the rename
    (["sampler.generate", 1, ENGINE, "after the check", NINE], f"died during generate ({LOST}), and no restart is left: "
     "--resume goes on", []),                                                            # sampling step 2
]
EVERY = [
    (["cli.versions", 1, DRIVER, "before", NINE], None, []),
    (["trainer.load", 1, DRIVER, "earlier", NINE], None, []),
    (["trainer.offload", 1, RANK, "earlier", NINE], "trainer rank 0 on {node} died during offload", []),
    (["sync._stage", 2, DRIVER, "after", NINE], None, []),                               # the check's second publish
    (["sampler.score", 2, ENGINE, "earlier", NINE], "sampler engine 0 on {node} died during score", []),
    (["sampler.generate", 1, DRIVER, "after the check", NINE], None, []),                # evaluation before step 1
    (["Run.log", 1, DRIVER, "before", NINE], None, []),                                  # its answers are there, not its metrics
    (["sampler.generate", 2, DRIVER, "after the check", NINE], None, []),                # sampling step 1
    (["trainer.logprobs", 1, DRIVER, "after the check", NINE], None, []),
    (["trainer.update", 1, RANK, "after the check", STOPPED], "trainer rank 0 on {node} did not answer update within 15 s and "
     "was killed (its process: stopped): --resume goes on", ["--update-limit-s", "15"]),
    (["checkpoint._sync", 2, DRIVER, "before", NINE], None, []),                         # step 1's checkpoint, after the rename
    (["sync._stage", 4, DRIVER, "after", NINE], None, []),                               # step 2, between stage and commit
    (["Run.log", 1, DRIVER, "after", NINE], None, []),                                   # step 2 is logged, not saved
    (["trainer.save", 1, RANK, "after the check", NINE], "trainer rank 0 on {node} died during save", []),
    (["shutil.rmtree .step-1", 1, DRIVER, "before", NINE], None, []),                    # step 2 is saved, step 1 half deleted
    (["recipe.publish", 1, DRIVER, "before", NINE], None, []),                           # step 3 is learned, not published
    (["sampler.generate", 2, DRIVER, "after the check", NINE], None, []),                # the last evaluation
    (["trainer.export", 1, DRIVER, "after the check", NINE], None, []),
    (["Run.finish", 1, DRIVER, "before", NINE], None, []),
]


def run(cwd, name, point=None, *more):
    """(exit code, stdout, stderr)"""
    script = cwd / "run.py"
    script.write_text(SCRIPT.format(root=str(ROOT)))
    found = subprocess.run([sys.executable, script, json.dumps([point] if point else []), *ARGS, "--name", name, *more], cwd=cwd,
                           capture_output=True, text=True, timeout=600)
    return found.returncode, found.stdout, found.stderr


def left(cwd):
    """Processes that work in a folder: a run's and what it started, but for two of Ray's own that see its end by the minute."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            name = (proc / "cmdline").read_text().strip("\0")
            if os.readlink(proc / "cwd").startswith(str(cwd)) and name and not name.endswith("Agent"):
                found.append((proc.name, name[:60]))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("kill")
    code, _, err = run(cwd, "untouched")
    assert code == 0, err[-3000:]
    return cwd


def same_run(cwd, name):
    """Every number but times, every answer of an evaluation, every prompt once, and the adapter, to the last bit."""
    def lines(name):
        text = (cwd / "runs" / name / "metrics.jsonl").read_text()
        return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in text.splitlines()]
    one, other = cwd / "runs" / "untouched", cwd / "runs" / name
    assert lines(name) == lines("untouched")
    assert [(line["step"], "eval/accuracy" in line) for line in lines(name)] == [(0, True), (1, False), (2, False), (3, False),
                                                                                (3, True)]
    for step in (0, 3):
        answers, wanted = (list(evaluation.read(folder / "eval" / f"step-{step}.jsonl")) for folder in (other, one))
        assert answers == wanted and len({answer["id"] for answer in answers}) == len(answers) == 8
    for file in ("adapter/adapter_model.safetensors", "checkpoints/step-3/ranks/00000.safetensors",
                 "checkpoints/step-3/state.json"):
        assert (one / file).read_bytes() == (other / file).read_bytes(), file
    assert (other / "DONE").exists() and os.listdir(other / "checkpoints") == ["step-3"]
    assert not list(other.glob("rendezvous-*"))


def chain(cwd, name, points):
    for i, (point, says, more) in enumerate(points):
        began = time.time()
        code, out, err = run(cwd, name, point, *more, *(["--resume"] if i else []))
        where = f"{point}:\n{out[-1500:]}\n{err[-2000:]}"
        if says is None:
            assert code == -9, where
        else:
            lines = [line for line in err.splitlines() if line.strip() and "(raylet)" not in line]
            assert code == 1 and "Traceback" not in err and says.format(node=os.uname().nodename) in lines[-1], where
            assert "--resume goes on" in lines[-1] or "generate" in point[0] or "offload" in point[0], where
        until = time.time() + 60
        while left(cwd) and time.time() < until:
            time.sleep(0.2)
        assert not left(cwd), f"{point} leaves processes behind: {left(cwd)}"
        print(f"{' '.join(map(str, point))}: {time.time() - began:.0f} s", flush=True)
    code, out, err = run(cwd, name, None, "--resume")
    assert code == 0, err[-3000:]
    same_run(cwd, name)
    return out


def test_killed_and_resumed_it_ends_as_if_nobody_had_touched_it(untouched):
    assert "resumed from runs/fast/checkpoints/step-1" in chain(untouched, "fast", FAST)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_every_point_of_its_life_it_ends_the_same(untouched):
    chain(untouched, "every", EVERY)


@pytest.mark.slow
def test_a_disk_that_is_full_ends_the_run_in_a_sentence_and_it_goes_on_once_there_is_room(untouched):
    small = untouched / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("a small disk of its own needs the right to mount")
    try:
        code, _, err = run(small, "full")                    # room for one checkpoint of 1.2 MB
        told = [line for line in err.splitlines() if line.strip()][-1]
        assert code == 1 and "Traceback" not in err and "trainer rank 0, save: " in told, err[-3000:]
        assert "No space left on device" in told and "the checkpoints before it are whole" in told
        assert os.listdir(small / "runs" / "full" / "checkpoints") == ["step-1"]
        subprocess.run(["mount", "-o", "remount,size=16m", small], check=True)
        code, out, err = run(small, "full", None, "--resume")
        assert code == 0 and "resumed from runs/full/checkpoints/step-1" in out, err[-3000:]
        shutil.copytree(small / "runs" / "full", untouched / "runs" / "full")
    finally:
        subprocess.run(["umount", "--lazy", small], check=True)
    same_run(untouched, "full")


def test_no_prompt_is_lost_or_comes_twice():
    """The prompts of a step are a function of seed and step alone: a resumed run asks what the dead one would have asked."""
    straight = [Cursor(740, 4, 0).indices(step) for step in range(185)]
    assert straight == [Cursor(740, 4, 0).indices(step) for step in range(185)]
    assert sorted(i for step in straight for i in step) == list(range(740))


WANDB = """
import dataclasses, json, os, signal, sys
sys.path.insert(0, {root!r})
from common import cli

@dataclasses.dataclass
class Config:
    steps: int = 2

resume = sys.argv.pop() == "resume"
run = cli.Run(Config(), "a", resume=resume, wandb="offline")
kept = run.rewind(1) if resume else None
run.log(1, {{"reward": 0.5}})
os.kill(os.getpid(), signal.SIGKILL) if not resume else run.finish()
print(run._wandb.id, kept)
"""


def test_wandb_goes_on_under_its_id_without_a_network(tmp_path):
    """wandb itself, killed, then resumed: two folders for `wandb sync`, one run."""
    script, nowhere = tmp_path / "run.py", {k: "http://127.0.0.1:9" for k in ("HTTP_PROXY", "HTTPS_PROXY", "https_proxy")}
    script.write_text(WANDB.format(root=str(ROOT)))
    for how, code in (("new", -9), ("resume", 0)):
        found = subprocess.run([sys.executable, script, how], cwd=tmp_path, capture_output=True, text=True, timeout=120,
                               env={**os.environ, **nowhere})
        assert found.returncode == code, found.stderr[-2000:]
    name = (tmp_path / "runs" / "a" / "wandb_id").read_text()
    folders = [p.name for p in (tmp_path / "runs" / "a" / "wandb").glob("offline-run-*")]
    assert found.stdout.split()[-2:] == [name, "[]"] and len(folders) == 2 and all(f"-{name}" in f for f in folders)
    assert len((tmp_path / "runs" / "a" / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_run_killed_at_its_first_breath_leaves_its_name_free(tmp_path):
    """Its folder appears with the config in it: before that there is none, after that --resume takes it."""
    code = f"""
import dataclasses, os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from common import cli
Config = dataclasses.make_dataclass("Config", [("steps", int, 2)])
def killed(*a):
    os.kill(os.getpid(), signal.SIGKILL)
how = sys.argv.pop()
if how == "early":
    os.rename = killed
if how == "late":
    cli.versions = killed
cli.Run(Config(), "a", resume=how == "resume", wandb="off").finish()
"""
    def go(how):
        return subprocess.run([sys.executable, "-c", code, how], cwd=tmp_path, capture_output=True, timeout=60).returncode
    assert go("early") == -9 and not (tmp_path / "runs" / "a").exists()
    assert go("late") == -9 and (tmp_path / "runs" / "a" / "config.json").exists()
    assert go("resume") == 0 and (tmp_path / "runs" / "a" / "DONE").exists()
