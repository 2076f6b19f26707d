"""The recipes for GLM-5.3-Flash as their users run them, on a random model: what their plans refuse, and short runs with the
five-step check, straight and killed and resumed, whose results transformers and vLLM load."""
import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checks import tiny
from checks.test_recipe import ROOT, metrics
from checks.test_replay import other_routes, reference
from checks.vllm_engine import answer, engine, gap, prompts
from checks.vllm_engine import reference as merged
from common import hf_config
from common.replay import sizes
from data import arithmetic

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the runs are on the CPU")
LORA, FULL, GSM8K = "dapo_glm5p3_flash_lora", "dapo_glm5p3_flash_fullft", "gsm8k_glm5p3_flash_lora"
SMALL = ("--model model --train-data train.parquet --eval-data test.parquet --nodes 1 --gpus-per-node 0 --sampler-tp 1 --tp 1 "
         "--ep 1 --dtype float32 --steps 4 --save-every 2 --eval-every 4 --eval-samples 1 --prompts-per-step 8 --group-size 2 "
         "--updates-per-step 1 --max-prompt-tokens 32 --max-response-tokens 16 --max-num-seqs 64 "
         "--max-tokens-per-micro-batch 1024 --wandb off").split()
OWN = {LORA: "--overlong-buffer 12 --lr 1e-3 --lora-rank 16 --lora-alpha 16 --recompute full --cpu-ranks 1".split(),
       FULL: "--overlong-buffer 12 --lr 1e-4 --recompute selective --optimizer-offload 0 --save-every 0 "
             "--bucket-gib 0.002 --cpu-ranks 1".split(),
       GSM8K: "--lr 1e-3 --recompute none --bucket-gib 0.002 --cpu-ranks 1 --sampler-nodes 1".split()}
# Of the answers of a model that nobody taught, half count as right; eight held-out problems are enough.
SCRIPT = """
import os, signal, sys, zlib
sys.path.insert(0, {root!r})
from common import cli, rewards
from recipes import {name} as recipe
grade_all, read, advantage, steps = rewards.grade_all, recipe.read, recipe.group_advantage, []

def some_right(texts, answers, in_think):
    texts = [f"</think>Answer: {{a}}" if zlib.crc32(t.encode()) % 2 else t for t, a in zip(texts, answers)]
    return grade_all(texts, answers, in_think)

def counted(rewards):
    steps.append(rewards)
    if len(steps) == {kill}:
        os.kill(os.getpid(), signal.SIGKILL)
    return advantage(rewards)
rewards.grade_all, recipe.group_advantage = some_right, counted
recipe.read = lambda path, *args: read(path, *args)[:8 if "test" in str(path) else None]
sys.argv[0] = recipe.__file__
cli.run_main(recipe.main)
"""


def run(name, *args, cwd, kill=0, timeout=300):
    """(exit code, stdout, stderr) of a recipe; kill: its process gets SIGKILL in the kill-th step."""
    script = cwd / f"{name}-{kill}.py"
    script.write_text(SCRIPT.format(root=str(ROOT), name=name, kill=kill))
    found = subprocess.run([sys.executable, "-W", "ignore", script, *map(str, args)], cwd=cwd, capture_output=True, text=True,
                           timeout=timeout)
    return found.returncode, found.stdout, found.stderr


def planned(name, *args, cwd):
    found = subprocess.run([sys.executable, ROOT / "recipes" / f"{name}.py", "--plan", *args], cwd=cwd, capture_output=True,
                           text=True, timeout=60)
    return found.returncode, found.stdout.splitlines()


@pytest.mark.parametrize("name, args, sentence", [
    (LORA, ["--lora-expert-rank", "0"], "lora_expert_rank is 0, but must be 1 to 16"),
    (LORA, ["--lora-expert-rank", "32"], "lora_expert_rank is 32, but must be 1 to 16"),
    (LORA, ["--lora-expert-rank", "2"], "lora_expert_rank is 2: with an adapter for each expert its rows must be whole 16 bytes"),
    (LORA, ["--dtype", "bfloat16", "--lora-expert-rank", "4"], "lora_expert_rank is 4: with an adapter for each expert its rows"),
    (LORA, ["--lora-targets", "o_proj,q_conv1d"], "lora_targets has 'q_conv1d', which is none of q_a_proj, "),
    (GSM8K, ["--lora-targets", "A_log"], "lora_targets has 'A_log', which is none of q_a_proj, "),
    *[(name, ["--recompute", "half"], "recompute is 'half': full, selective or none") for name in OWN],
    (FULL, ["--sampler-fp8", "fp8"], "sampler_fp8 and optimizer_offload need GPUs"),
    (FULL, ["--precision-aware"], "save_every is 5: an optimizer on the host, or a precision-aware one, cannot be saved"),
])
def test_plan_names_what_does_not_fit(tmp_path, name, args, sentence):
    code, lines = planned(name, "--rehearse", *args, cwd=tmp_path)
    assert code == 2 and lines[-1] == "plan: 1 problem" and lines[-2].startswith(f"problem: {sentence}"), lines


def test_plan_of_the_published_runs(tmp_path):
    for name, said in {LORA: ("rank 64, alpha 64; each for routed experts, rank 8", "16 ranks: TP 4 x EP 8 x PP 1, DP 4",
                              "25 steps x 4 = 100, each on 32 x 12 = 384 answers"),
                       FULL: ("bfloat16 weights, the sampler's in bfloat16", "64 ranks: TP 4 x EP 32 x PP 1, DP 16"),
                       GSM8K: ("rank 32, alpha 32, shared for routed experts", "8 ranks: TP 2 x EP 8 x PP 1, DP 4")}.items():
        code, lines = planned(name, cwd=tmp_path)
        assert code == 2 and all(any(text in line for line in lines) for text in said), lines
        fla = [line for line in lines if line == "problem: package fla is missing, the kernels of linear attention: "
               "pip install -r requirements.txt"]
        assert len(fla) == (importlib.util.find_spec("fla") is None)
    _, lines = planned(LORA, "--lora-targets", "kv_b_proj", cwd=tmp_path)
    assert "problem: lora_targets has kv_b_proj, which vLLM 0.32 on a GPU ignores while decoding: leave it out" in lines


@pytest.mark.parametrize("name", [*OWN, *(name.replace("_flash", "") for name in OWN)])
def test_the_other_models_folder_is_refused(tmp_path, name):
    flash = "flash" in name
    (tmp_path / "GLM").mkdir()
    (tmp_path / "GLM" / "config.json").write_text(json.dumps({"model_type": "glm_moe_dsa" if flash else "glm5_next"}))
    sentence = "GLM-5.3, but this recipe trains GLM-5.3-Flash: those without flash in their name train GLM-5.3" if flash else \
        "GLM-5.3-Flash, but this recipe trains GLM-5.3: recipes/*_flash_*.py train GLM-5.3-Flash"
    code, lines = planned(name, "--model", "GLM", cwd=tmp_path)
    assert code == 2 and f"problem: model folder GLM holds {sentence}" in lines, lines


# -- runs --------------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def cwd(tmp_path_factory):
    """A folder with data and a random model whose answers may end: its logit of the end of text varies more than others."""
    cwd = tmp_path_factory.mktemp("flash-runs")
    arithmetic.prepare(cwd, flash=True)
    (cwd / "start").rename(cwd / "model")
    file = cwd / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"][0] *= 3
    save_file(tensors, file, {"format": "pt"})
    return cwd


@pytest.fixture(scope="module")
def straight(cwd):
    code, _, err = run(LORA, *SMALL, *OWN[LORA], "--name", "straight", cwd=cwd)
    assert code == 0, err[-3000:]
    return cwd / "runs" / "straight"


def learned(cwd, name):
    """Of a whole run that learned something from step to step: its check and its metrics by step."""
    check, found = json.loads((cwd / "runs" / name / "check.json").read_text()), metrics(cwd, name)
    assert check["passed"] and sorted(found) == [0, 1, 2, 3, 4] and (cwd / "runs" / name / "DONE").is_file()
    assert all(found[i]["mismatch/mean"] < 3e-6 and found[i]["policy/grad_norm"] > 0 for i in (1, 2, 3, 4)), found
    return check, found


def test_lora_leaves_an_adapter_that_vllm_loads_as_transformers_does(cwd, straight):
    learned(cwd, "straight")
    tensors = load_file(straight / "adapter" / "adapter_model.safetensors")
    config = json.loads((straight / "adapter" / "adapter_config.json").read_text())
    deltas = {}
    for name, a in tensors.items():
        if name.endswith("lora_A.weight"):
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = tensors[name.replace("lora_A", "lora_B")]
            assert len(a) == b.shape[1] == (8 if ".experts." in path else 16) and config["r"] == config["lora_alpha"] == 16
            deltas[path.replace(".forget_gate.", ".")] = b @ a
    # 3 linear layers x (q k v b f_a g_a o), 1 latent x (q_a q_b kv_a o); a dense MLP, 3 shared and 3 x 8 routed experts
    assert len(deltas) == 3 * 7 + 4 + 3 * (1 + 3 + 3 * 8)
    from vllm.lora.request import LoRARequest
    with engine(str(cwd / "model"), max_lora_rank=16, enable_prefix_caching=False) as llm:
        asked = prompts(12, 21, 90)
        with_it, _ = answer(llm, asked, adapter=LoRARequest("policy", 1, str(straight / "adapter")))
    sequences = [ids for ids, _ in with_it]
    assert gap(with_it, merged(cwd / "model", sequences, deltas)) < 1e-5
    assert gap(with_it, merged(cwd / "model", sequences)) > 1e-3, "the adapter does nothing"


def test_a_killed_and_resumed_run_gives_the_same_numbers(cwd, straight):
    """Also where the weights come over the network; the check of the resume is passed with an adapter that was trained."""
    how = [*SMALL, *OWN[LORA], "--sampler-nodes", "1", "--name", "killed"]
    code, _, err = run(LORA, *how, cwd=cwd, kill=4)
    assert code == -9 and sorted(metrics(cwd, "killed")) == [0, 1, 2, 3], err[-2000:]
    code, out, err = run(LORA, *how, "--resume", cwd=cwd)
    assert code == 0 and "resumed from runs/killed/checkpoints/step-2" in out, err[-3000:]
    learned(cwd, "killed")
    a, b = metrics(cwd, "straight"), metrics(cwd, "killed")
    for step in a:
        same = [k for k in a[step] if not k.startswith("time/") and k != "policy/version"]
        assert {k: a[step][k] for k in same} == {k: b[step].get(k) for k in same}, f"step {step}"
    for file in ("adapter/adapter_model.safetensors", "eval/step-0.jsonl", "eval/step-4.jsonl"):
        assert (straight / file).read_bytes() == (cwd / "runs" / "killed" / file).read_bytes(), file


def test_full_fine_tuning_replays_routes_and_leaves_a_model_that_transformers_loads(cwd):
    code, out, err = run(FULL, *SMALL, *OWN[FULL], "--name", "full", cwd=cwd)
    assert code == 0, err[-3000:]
    check, found = learned(cwd, "full")
    for step in (1, 2, 3, 4):
        health = {k: found[step][f"routes/{k}"] for k in ("same", "overlap", "entropy_relative", "spread", "changed")}
        assert health["same"] > 0.999 and health["overlap"] > 0.999 and health["spread"] > 0.5, health
    folder = cwd / "runs" / "full" / "model-step-4"
    before, after = ({k: t for f in where.glob("*.safetensors") for k, t in load_file(f).items()}
                     for where in (cwd / "model", folder))
    assert before.keys() == after.keys() and check["tensors"] == sum(".visual." not in k for k in after)
    same = {k for k in after if torch.equal(after[k], before[k])}
    frozen = {k for k in after if ".visual." in k or k.endswith(("e_score_correction_bias", "indexer.k_norm.bias"))}
    assert same == frozen, sorted(same ^ frozen)
    for k in (k for k in after if ".indexer." in k):             # no gradient reaches it, only weight decay: 1 - 0.1 x 1e-4
        assert torch.allclose(after[k], before[k] * (1 - 1e-5) ** 4, rtol=1e-6, atol=0), k
    sequence = tiny.sequences([60])
    logp = [tiny.hf_logprobs(tiny.hf_model(where), sequence) for where in (cwd / "model", folder)]
    assert torch.isfinite(logp[1]).all() and 1e-3 < (logp[0] - logp[1]).abs().mean() < 1


def test_an_adapter_is_merged_into_the_samplers_weights(cwd):
    """And they travel over the network."""
    code, _, err = run(GSM8K, *SMALL, *OWN[GSM8K], "--name", "merged", cwd=cwd)
    assert code == 0, err[-3000:]
    check, _ = learned(cwd, "merged")
    assert check["tensors"] > 100
    tensors = load_file(cwd / "runs" / "merged" / "adapter" / "adapter_model.safetensors")
    assert sum("kv_b_proj.lora_B" in k and bool(t.any()) for k, t in tensors.items()) == 1


def test_forced_routes_are_those_of_transformers(tmp_path):
    """Routes that no router chose: log-probabilities with the same ones forced in transformers, and none is the trainer's own."""
    from common.batch import merge
    from common.trainer import TrainerRank, mpu
    tiny.flash_checkpoint(tmp_path / "model")
    lengths = (24, 5, 35, 40)
    tokens = [t.numpy().astype(np.int32) for t in tiny.sequences(lengths)]
    data, routes = {"tokens": tokens, "n_prompt": [1] * 4, "weight": [1.0] * 4}, other_routes(lengths)
    mpu.destroy_model_parallel()
    trainer = TrainerRank(0, 1, tmp_path / "model", replay=True, max_tokens=64)
    trainer.load(tmp_path / "rendezvous")
    try:
        assert sizes(hf_config.read_config(tmp_path / "model")) == dict(layers=3, k=2, experts=8)
        for forced in (routes, None):
            found = np.concatenate(merge([trainer.logprobs(data if forced is None else {**data, "routes": forced})], 4))
            theirs = np.concatenate(reference(tmp_path / "model", data, forced)[0])
            assert np.abs(found - theirs).max() < 5e-5
        same, shared, n = trainer.replayed()
        assert n == 3 * (sum(lengths) - 4) and same / n < 0.1 and 0.15 < shared / n < 0.35, (same, shared, n)
    finally:
        mpu.destroy_model_parallel()
