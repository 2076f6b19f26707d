"""The recipe as its users run it: a subprocess. Plans and bad inputs first (no engine), then runs in rehearsal:
straight, killed, resumed."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common import evaluation
from results import record

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "dapo_glm5p3_lora.py"
SMALL = ["--rehearse", "--steps", "4", "--prompts-per-step", "8", "--group-size", "4", "--save-every", "2",
         "--eval-every", "4", "--wandb", "off"]


def run(*args, cwd, script=RECIPE, timeout=600):
    """(exit code, stdout, stderr) of the recipe."""
    found = subprocess.run([sys.executable, script, *map(str, args)], cwd=cwd, capture_output=True, text=True, timeout=timeout)
    return found.returncode, found.stdout, found.stderr


def one_sentence(err):
    lines = [line for line in err.splitlines() if line.strip()]
    return lines[-1] if lines and "Traceback" not in err else pytest.fail(f"not one sentence:\n{err[-2000:]}")


def test_help_and_plan_need_no_torch(tmp_path):
    code = f"import sys; sys.argv = ['x', '--plan', '--rehearse']; sys.path.insert(0, {str(ROOT)!r})\n" \
           "from recipes import dapo_glm5p3_lora as r\nassert r.main() == 0\n" \
           "assert not {'torch', 'vllm', 'ray', 'transformers', 'megatron'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    code, out, _ = run("--help", cwd=tmp_path)
    assert code == 0 and "--group-size 16" in out and "answers per prompt" in out


def test_plan_of_the_published_run(tmp_path):
    code, out, _ = run("--plan", cwd=tmp_path)
    lines = out.splitlines()
    assert code == 2 and lines[-1] == "plan: 4 problems" and not list(tmp_path.iterdir())
    assert any("128 prompts x 16 = 2,048" in line for line in lines)
    assert any("32 ranks: TP 8 x EP 8 x PP 1, DP 4" in line for line in lines)
    assert any("32 GPUs are needed, RAY_ADDRESS names no cluster" in line for line in lines)
    assert any("20 steps x 4 = 80, each on 32 x 16 = 512 answers" in line for line in lines)
    for missing in ("no model folder zai-org/GLM-5.3-BF16", "no data file data/dapo_math.parquet",
                    "no data file data/aime_2024.parquet"):
        assert any(missing in line for line in lines)


@pytest.mark.parametrize("args, sentence", [
    (["--updates-per-step", "3"], "32 prompts do not divide into 3 updates"),
    (["--tp", "4"], "2 trainer ranks do not divide into TP 4 x PP 1"),
    (["--ep", "3"], "2 ranks of a pipeline stage do not divide into EP 3"),
    (["--lora-rank", "12"], "vLLM has no slots for LoRA rank 12"),
    (["--overlong-buffer", "999"], "overlong_buffer 999 is not within 1..48"),
    (["--lora-experts", "some"], "lora_experts is 'some'"),
    (["--temperature", "0.5"], "temperature is 0.5"),
    (["--lora-targets", "o_proj,zz"], "lora_targets has 'zz'"),
    (["--wandb", "on"], "wandb is 'on'"),
    (["--recompute", "half"], "recompute is 'half'"),
    (["--lr", "-1"], "lr is -1.0"),
    (["--group-size", "1"], "group_size is 1"),
    (["--tp", "0"], "tp is 0, but must be at least 1"),
    (["--sampler-nodes", "-1"], "sampler_nodes is -1, but must not be negative"),
    (["--name", "../x"], "name is '../x'"),
])
def test_plan_names_what_does_not_fit(tmp_path, args, sentence):
    code, out, _ = run("--rehearse", "--plan", *args, cwd=tmp_path)
    assert code == 2 and f"problem: {sentence}" in out and out.splitlines()[-1] == "plan: 1 problem"


@pytest.mark.parametrize("args, sentence", [
    (["--groupsize", "8"], "unknown option --groupsize: the nearest one is --group-size"),
    (["--steps", "many"], "--steps"),
    (["--rehearse", "--resume", "--name", "never"], "runs/never holds no run to resume"),
])
def test_bad_options_are_one_sentence(tmp_path, args, sentence):
    code, out, err = run(*args, cwd=tmp_path)
    assert code in (1, 2) and sentence in (one_sentence(err) if err.strip() else out)


def prepared(tmp_path):
    """A small real run's inputs: the rehearsal's data and a random model."""
    from data import arithmetic
    arithmetic.prepare(tmp_path)
    (tmp_path / "start").rename(tmp_path / "model")
    return ["--model", "model", "--train-data", "train.parquet", "--eval-data", "test.parquet", "--nodes", "1",
            "--gpus-per-node", "0", "--tp", "1", "--ep", "1", "--sampler-tp", "1", "--dtype", "float32", "--lora-rank", "8",
            "--prompts-per-step", "8", "--group-size", "2", "--updates-per-step", "1", "--max-prompt-tokens", "32",
            "--max-response-tokens", "8", "--overlong-buffer", "4", "--wandb", "off", "--recompute", "none"]


@pytest.mark.parametrize("case", ["not glm", "a missing tensor", "a missing column", "a missing key in config.json"])
def test_bad_checkpoints_and_data_are_one_sentence(tmp_path, case):
    args = prepared(tmp_path)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    if case == "not glm":
        (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "model_type": "qwen3"}))
        want = "model_type is 'qwen3'"
    elif case == "a missing key in config.json":
        (tmp_path / "model" / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "scoring_func"}))
        want = "scoring_func is missing"
    elif case == "a missing tensor":
        from safetensors.torch import load_file, save_file
        file = next((tmp_path / "model").glob("*.safetensors"))
        tensors = load_file(file)
        del tensors["model.layers.2.self_attn.q_b_proj.weight"]
        save_file(tensors, file, {"format": "pt"})
        want = "model.layers.2.self_attn.q_b_proj.weight"
    else:
        import pyarrow.parquet
        table = pyarrow.parquet.read_table(tmp_path / "train.parquet")
        pyarrow.parquet.write_table(table.drop_columns(["answer"]), tmp_path / "train.parquet")
        want = "lacks the column answer"
    code, _, err = run(*args, cwd=tmp_path)
    assert code == 1 and want in one_sentence(err), err[-1500:]


KILL = """
import os, signal, sys
sys.path.insert(0, {root!r})
from common import cli, cluster, sync
from recipes import dapo_glm5p3_lora as recipe
gather, stage, generated, staged = cluster.Group._gather, sync._stage, [], []

def kill(sampler, i):
    os.kill(sampler._where(i)[2], signal.SIGKILL)

def gathered(self, verb, futures):
    if verb == "generate" and self.again:            # after the check: the evaluation before step 1, then steps 1, 2, ...
        generated.append(verb)
        if len(generated) in (1, 3):
            kill(self, len(generated) // 2)
    return gather(self, verb, futures)

def killed(trainer, sampler, version, headers):
    stage(trainer, sampler, version, headers)
    staged.append(version)
    if len(staged) == 8:                             # three of the check, two for the new engines, three steps
        kill(sampler, 1)                             # staged everywhere, committed nowhere
cluster.Group._gather, sync._stage = gathered, killed
sys.argv = [{recipe!r}, *{args!r}]
cli.run_main(recipe.main)
"""


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("runs")
    code, out, err = run(*SMALL, "--name", "straight", cwd=cwd)
    assert code == 0, err[-3000:]
    return cwd, out


def metrics(cwd, name):
    """{step: all that was logged for it}; an evaluation is a line of its own."""
    found = {}
    for line in (cwd / "runs" / name / "metrics.jsonl").read_text().splitlines():
        found.setdefault(json.loads(line)["step"], {}).update(json.loads(line))
    return found


def test_a_run_leaves_what_its_user_expects(straight):
    cwd, out = straight
    folder = cwd / "runs" / "straight"
    assert {"config.json", "versions.json", "check.json", "metrics.jsonl", "DONE", "adapter", "checkpoints", "eval",
            RECIPE.name} <= set(os.listdir(folder))
    assert (folder / RECIPE.name).read_bytes() == RECIPE.read_bytes()
    assert json.loads((folder / "check.json").read_text())["passed"] and "five-step check: passed" in out
    assert sorted(os.listdir(folder / "checkpoints")) == ["step-2", "step-4"]
    assert len([line for line in out.splitlines() if line.startswith("step    ") and "reward" in line]) == 4
    found = metrics(cwd, "straight")
    assert sorted(found) == [0, 1, 2, 3, 4] and found[4]["mismatch/mean"] < 1e-5
    assert "eval/accuracy" in found[4] and "eval/accuracy" in found[0]
    assert not list(Path("/dev/shm").glob("policy-*")) and not list(folder.glob("rendezvous-*"))
    said = evaluation.summary(evaluation.read(folder / "eval" / "step-4.jsonl"))
    assert said["samples"] == 2 and all(found[4][f"eval/{k}"] == said[k] for k in ("accuracy", "capped", "tokens"))


def test_a_run_can_be_recorded(straight, tmp_path):
    cwd, _ = straight
    folder = tmp_path / "straight"
    shutil.copytree(cwd / "runs" / "straight", folder, ignore=shutil.ignore_patterns("checkpoints", "adapter"))
    versions = json.loads((folder / "versions.json").read_text())
    (folder / "versions.json").write_text(json.dumps({**versions, "commit": "0" * 40, "dirty": False}))     # also before a commit
    kept = record.read([record.keep(folder, "group", {}, records=tmp_path / "records")])[0]["record"]
    assert kept["n"] == 320 and kept["problems"] == 160 and not kept["by_hand"]
    assert kept["command"].endswith("--name straight") and "cores" in kept["hardware"] and kept["recipe"] == RECIPE.stem


def test_engines_that_die_alone_are_replaced_and_nothing_else_changes(straight):
    """Killed while it samples an evaluation, while it samples a step, and between stage and commit: the run goes on, and with the
    same numbers. Its weights come over the network, where every new engine makes a new group, the others' through /dev/shm."""
    cwd, _ = straight
    script = cwd / "kill.py"
    script.write_text(KILL.format(root=str(ROOT), recipe=str(RECIPE), args=[*SMALL, "--sampler-nodes", "1", "--name", "killed"]))
    code, out, err = run(cwd=cwd, script=script)
    assert code == 0, err[-3000:]
    told = [line for line in out.splitlines() if "restarts are left" in line]
    assert [line.partition(" (")[0].replace(os.uname().nodename, "NODE") for line in told] == [
        "sampler engine 0 on NODE died during generate", "sampler engine 1 on NODE died during generate",
        "sampler engine 1 on NODE died during commit"] and "0 restarts are left" in told[-1]
    a, b = metrics(cwd, "straight"), metrics(cwd, "killed")
    # the third cost a version: the engine that lived had committed the one which the other lost
    assert [b[step]["policy/version"] - a[step]["policy/version"] for step in (1, 2, 3, 4)] == [0, 0, 1, 1]
    same = {step: [k for k in a[step] if not k.startswith("time/") and k != "policy/version"] for step in a}
    assert sorted(a) == sorted(b) == [0, 1, 2, 3, 4]
    for step in a:
        assert {k: a[step][k] for k in same[step]} == {k: b[step][k] for k in same[step]}, f"step {step}"
    for file in ("adapter/adapter_model.safetensors", "eval/step-0.jsonl", "eval/step-4.jsonl"):
        one, other = (cwd / "runs" / name / file for name in ("straight", "killed"))
        assert one.read_bytes() == other.read_bytes(), file


DRIFT = """
import sys
sys.path.insert(0, {root!r})
from common import cli
from recipes import dapo_glm5p3_lora as recipe
sys.argv = [{recipe!r}, *{args!r}]
real, found = recipe.mismatch, iter([1e-4, 0.0, 1e-4, 2e-4, 5e-4])
recipe.mismatch = lambda *logp: {{**real(*logp), "mean": next(found)}}     # the copies drift apart after step 2
cli.run_main(recipe.main)
"""


def test_a_run_whose_copies_drift_apart_saves_and_stops(tmp_path):
    """Not by one step above the band, but by three in a row; then --resume goes on from there."""
    script = tmp_path / "drift.py"
    args = [*SMALL, "--steps", "6", "--save-every", "6", "--name", "drifting"]
    script.write_text(DRIFT.format(root=str(ROOT), recipe=str(RECIPE), args=args))
    code, _, err = run(cwd=tmp_path, script=script)
    assert code == 1 and "drift apart: mismatch/mean was 0.0001, 0.0002, 0.0005 in the last 3 steps" in one_sentence(err)
    assert os.listdir(tmp_path / "runs" / "drifting" / "checkpoints") == ["step-5"]
    code, out, err = run(*args, "--resume", cwd=tmp_path)
    assert code == 0 and "resumed from runs/drifting/checkpoints/step-5" in out, err[-2000:]


def test_a_finished_or_changed_run_is_not_resumed_blindly(straight):
    cwd, _ = straight
    code, out, err = run(*SMALL, "--name", "straight", cwd=cwd)
    assert code == 2 and "runs/straight exists" in out
    code, _, err = run(*SMALL, "--name", "straight", "--resume", "--lr", "0.5", cwd=cwd)
    assert code == 1 and "lr" in one_sentence(err)
