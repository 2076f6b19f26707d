"""The recipe of full fine-tuning as its users run it: what its plan says, and in rehearsal straight and resumed."""
import json
import os
import subprocess
import sys

import pytest

from checks.test_recipe import ROOT, SMALL, metrics, one_sentence
from common import size

RECIPE = ROOT / "recipes" / "dapo_glm5p3_fullft.py"


def run(*args, cwd, env=None, timeout=600):
    found = subprocess.run([sys.executable, RECIPE, *map(str, args)], cwd=cwd, capture_output=True, text=True, timeout=timeout,
                           env={**os.environ, **(env or {})})
    return found.returncode, found.stdout, found.stderr


@pytest.fixture()
def planned(tmp_path):
    """The plan of the published run with some options: its lines. The model is a config alone."""
    (tmp_path / "GLM").mkdir()
    (tmp_path / "GLM" / "config.json").write_text(json.dumps(size.GLM5P3))
    return lambda *args: run("--plan", "--model", "GLM", *args, cwd=tmp_path, env={"RAY_ADDRESS": "auto"})[1].splitlines()


def test_plan_of_the_published_run(planned):
    lines = planned()
    assert any("64 ranks: TP 8 x EP 64 x PP 1, DP 8" in line for line in lines)
    for said in ("each on 32 x 12 = 384 answers", "743.4B parameters, all trained", "1,487 GB, 1 GiB at a time, to each node",
                 "about 40 = sample"):
        assert any(said in line for line in lines), said
    wrong = [line for line in lines if line.startswith("problem")]
    assert not any("GiB a GPU" in line for line in wrong), "the published layout fits 8 x 8 B200"
    assert any("Transformer Engine is missing" in line for line in wrong)


@pytest.mark.parametrize("args, sentence", [
    (["--gpu-memory-gib", "139"], "the sampler takes .* GiB a GPU of 104"),
    (["--sampler-fp8", "none"], "the sampler takes .*weights 176"),
    (["--no-precision-aware", "--optimizer-offload", "0"], "an update takes .*optimizer"),
    (["--train-fp8", "fp4"], "train_fp8 is 'fp4'"), (["--optimizer-offload", "2"], "optimizer_offload is 2"),
    (["--recompute", "some"], "recompute is 'some': full, selective or none")])
def test_plan_names_what_does_not_fit(planned, args, sentence):
    import re
    assert any(re.search(f"problem: .*{sentence}", line) for line in planned(*args))


def test_fp8_without_gpus_is_refused(tmp_path):
    code, out, _ = run("--rehearse", "--plan", "--sampler-fp8", "fp8", cwd=tmp_path)
    assert code == 2 and "train_fp8, sampler_fp8 and optimizer_offload need GPUs" in out


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("fullft")
    code, out, err = run(*SMALL, "--name", "straight", cwd=cwd)
    assert code == 0, err[-3000:]
    return cwd, out


def test_a_run_changes_and_leaves_the_whole_model(straight):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    cwd, out = straight
    folder = cwd / "runs" / "straight"
    check, found = json.loads((folder / "check.json").read_text()), metrics(cwd, "straight")
    assert check["passed"] and check["tensors"] > 100 and "five-step check: passed" in out
    assert all(found[i]["mismatch/mean"] < 1e-5 for i in range(1, 5)), "each step's weights reached the sampler"
    start = json.loads((folder / "config.json").read_text())
    before = {k: t for f in (ROOT / ".cache").glob("arithmetic-*/model/*.safetensors") for k, t in load_file(f).items()}
    after = {k: t for f in (folder / "model-step-4").glob("*.safetensors") for k, t in load_file(f).items()}
    assert after.keys() == before.keys() and start["lr"] == 5e-5
    same = [k for k in after if torch.equal(after[k], before[k])]
    assert all("indexer" in k or k.endswith("e_score_correction_bias") for k in same), same      # no gradient reaches those
    model = AutoModelForCausalLM.from_pretrained(folder / "model-step-4", dtype=torch.float32)
    counted = sum(t.numel() for k, t in after.items() if not k.endswith("e_score_correction_bias"))
    assert sum(p.numel() for p in model.parameters()) == counted


def test_a_resumed_run_gives_the_same_curve_and_model(straight):
    cwd, _ = straight
    two = [*SMALL, "--name", "two"]
    two[two.index("--steps") + 1] = "2"
    code, _, err = run(*two, cwd=cwd)
    assert code == 0, err[-2000:]
    code, _, err = run(*SMALL, "--name", "two", "--resume", cwd=cwd)
    assert code == 0, err[-2000:]
    a, b = metrics(cwd, "straight"), metrics(cwd, "two")
    same = [k for k in a[4] if not k.startswith("time/") and k != "policy/version"]
    for step in (1, 3, 4):
        assert {k: a[step].get(k) for k in same} == {k: b[step].get(k) for k in same}, f"step {step}"
    for one in (cwd / "runs" / "straight" / "model-step-4").glob("*.safetensors"):
        assert one.read_bytes() == (cwd / "runs" / "two" / "model-step-4" / one.name).read_bytes()


def test_a_checkpoint_that_was_never_written_is_one_sentence(straight):
    cwd, _ = straight
    code, out, err = run(*SMALL, "--name", "never", "--resume", cwd=cwd)
    assert code in (1, 2) and "holds no run to resume" in (one_sentence(err) if err.strip() else out)
