"""Clients of their own: the adapter that a run leaves, served by vLLM's OpenAI server or loaded by peft, and the whole model,
loaded by transformers, answer as the trainer does."""
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch

from common.trainer import TrainerRank, lora, mpu  # isort: skip - first, it prepares megatron-core for the CPU

from common.batch import merge
from data import arithmetic

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="starts vLLM's CPU server")]
SERVE = """
import os, runpy, sys
from common import vllm_cpu
os.environ.update(vllm_cpu.ENV, VLLM_ENABLE_V1_MULTIPROCESSING="1")
sys.argv = ["api_server", *sys.argv[1:]]
if __name__ == "__main__":
    vllm_cpu.install()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
"""
EXACT = 5e-5                                     # float32 through another program: the order of sums


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """(trainer, folder with model and adapter) of a run that changed its adapter."""
    path = tmp_path_factory.mktemp("client")
    arithmetic.prepare(path)
    rank = TrainerRank(0, 1, path / "start", lora_rank=8, lora_alpha=16, lora_targets=lora.TARGETS, experts="shared")
    rank.load(path / "rendezvous")
    rank.perturb(0.3)
    rank.export(path)
    yield rank, path
    mpu.destroy_model_parallel()


@pytest.fixture(scope="module")
def ask(left):
    """Asks the server: ask(path, body) -> JSON."""
    _, path = left
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    (path / "serve.py").write_text(SERVE)
    server = subprocess.Popen(
        [sys.executable, path / "serve.py", "--model", path / "start", "--served-model-name", "base", "--enable-lora",
         "--max-lora-rank", "8", "--max-loras", "2", "--lora-modules", f"policy={path / 'adapter'}", "--dtype", "float32",
         "--worker-cls", "common.vllm_cpu.worker.CPUWorker", "--enforce-eager", "--block-size", "32", "--max-model-len", "192",
         "--kv-cache-memory-bytes", str(64 << 20), "--max-num-seqs", "8", "--host", "127.0.0.1", "--port", str(port)],
        stdout=open(path / "server.log", "w"), stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(ROOT)})

    def ask(where, body=None):
        request = urllib.request.Request(f"http://127.0.0.1:{port}{where}", data=body and json.dumps(body).encode(),
                                         headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or "null")
    until = time.time() + 300
    while True:
        try:
            ask("/health")
            break
        except OSError:
            assert server.poll() is None and time.time() < until, (path / "server.log").read_text()[-3000:]
            time.sleep(1)
    yield ask
    server.terminate()
    server.wait(30)


def test_the_server_answers_as_the_trainer_does(left, ask):
    trainer, _ = left
    assert {m["id"] for m in ask("/v1/models")["data"]} == {"base", "policy"}
    prompts = [np.random.default_rng(i).integers(9, arithmetic.VOCABULARY, n).tolist() for i, n in enumerate((5, 17, 90))]
    for model in ("policy", "base"):
        sequences, said = [], []
        for prompt in prompts:
            body = dict(model=model, prompt=prompt, max_tokens=16, temperature=1.0, seed=1, logprobs=0, ignore_eos=True,
                        return_token_ids=True)
            choice = ask("/v1/completions", body)["choices"][0]
            sequences.append(np.array(prompt + choice["token_ids"], dtype=np.int32))
            said.append(np.array(choice["logprobs"]["token_logprobs"]))
        batch = {"tokens": sequences, "n_prompt": [len(p) for p in prompts]}
        gap = np.abs(np.concatenate(merge([trainer.logprobs(batch)], len(prompts))) - np.concatenate(said))
        if model == "policy":
            assert gap.max() < EXACT, f"{gap.max():.1e}"
        else:
            assert gap.mean() > 100 * EXACT, "without the adapter it must be another model"


def largest_gap(model, mine, tokens):
    """Between a transformers model's and the trainer's log-probabilities of all tokens but the first."""
    gaps = []
    for t, logp in zip(tokens, mine):
        ids = torch.tensor(t[None].astype(np.int64))
        with torch.no_grad():
            theirs = model(input_ids=ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
        gaps.append(np.abs(theirs.numpy() - logp).max())
    return max(gaps)


TOKENS = [np.random.default_rng(7).integers(9, arithmetic.VOCABULARY, n).astype(np.int32) for n in (9, 80)]


def test_peft_answers_as_the_trainer_does(left):
    import peft
    from transformers import AutoModelForCausalLM
    trainer, path = left
    base = AutoModelForCausalLM.from_pretrained(path / "start", dtype=torch.float32, attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(base, path / "adapter").eval()
    mine = merge([trainer.logprobs({"tokens": TOKENS, "n_prompt": [1, 1]})], 2)
    assert largest_gap(model, mine, TOKENS) < EXACT


def test_transformers_loads_the_whole_model_and_answers_as_the_trainer_does(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    mpu.destroy_model_parallel()
    arithmetic.prepare(tmp_path)
    trainer = TrainerRank(0, 1, tmp_path / "start")
    trainer.load(tmp_path / "rendezvous")
    before = merge([trainer.logprobs({"tokens": TOKENS, "n_prompt": [1, 1]})], 2)
    trainer.perturb(0.3)
    trainer.save_model(tmp_path / "model")
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32, attn_implementation="eager",
                                                       output_loading_info=True)
    assert not any(told.values()), told                       # nothing missing, unexpected or misshapen
    mine = merge([trainer.logprobs({"tokens": TOKENS, "n_prompt": [1, 1]})], 2)
    assert largest_gap(model.eval(), mine, TOKENS) < EXACT
    assert largest_gap(model, before, TOKENS) > 100 * EXACT, "it must be the changed model"
    new, old = (AutoTokenizer.from_pretrained(tmp_path / name).get_vocab() for name in ("model", "start"))
    assert new == old and len(new) > 10
