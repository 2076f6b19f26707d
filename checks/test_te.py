"""Transformer Engine's layers against torch's on one GPU: logprobs, gradient, a step, with adapters and without, FP8 products.
Each backend in a process of its own, because megatron-core chooses by what can be imported."""
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).resolve()
HAVE_TE = importlib.util.find_spec("transformer_engine") is not None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAVE_TE, reason="needs Transformer Engine")]
# widths that its kernels take; index_topk 256, so that the two longest sequences are sparse
WIDTHS = dict(vocab_size=1024, hidden_size=512, intermediate_size=1024, moe_intermediate_size=256, num_hidden_layers=5,
              num_attention_heads=8, num_key_value_heads=8, q_lora_rank=256, kv_lora_rank=128, qk_rope_head_dim=64,
              qk_nope_head_dim=192, v_head_dim=256, n_routed_experts=16, num_experts_per_tok=4, index_head_dim=128,
              index_topk=256, index_topk_freq=2, first_k_dense_replace=1)


def measure(folder, out, backend, dtype, experts):
    from common.trainer import TrainerRank, lora  # isort: skip
    adapter = {} if experts == "full" else dict(lora_rank=32, lora_alpha=32, experts=experts, lora_targets=[
        t for t in lora.TARGETS if t != "kv_b_proj"])
    fp8 = "blockwise" if backend == "te-fp8" else None
    rank = TrainerRank(0, 1, folder, dtype=dtype, te=backend != "torch", fp8=fp8, lr=1e-3, **adapter)
    rank.load(out + ".meeting")
    rank.perturb(0.02) if adapter else None
    g = np.random.default_rng(0)
    tokens = [g.integers(3, 1000, n).astype(np.int32) for n in (37, 200, 256, 700, 900)]
    batch = {"tokens": tokens, "n_prompt": [4] * len(tokens), "weight": [1e-3] * len(tokens)}

    def scored():
        return np.concatenate([x for _, x in sorted(rank.logprobs(batch))])
    before = scored()
    told = rank.update(batch, lambda logp, entropy, mb: (-(mb["weight"] * logp).sum(), {}))
    np.savez(out, before=before, after=scored(), grad=told["grad_norm"])


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(backend, dtype, experts) -> its numbers."""
    from checks import tiny
    folder, held = tmp_path_factory.mktemp("te"), {}
    import torch
    tiny.checkpoint(folder / "model", dtype=torch.bfloat16, shard="1GB", **WIDTHS)

    def get(*case):
        if case not in held:
            out = str(folder / "-".join(case)) + ".npz"
            subprocess.run([sys.executable, HERE, folder / "model", out, *case], check=True, timeout=300,
                           env={**os.environ, "PYTHONPATH": f"{HERE.parent.parent}:{os.environ.get('PYTHONPATH', '')}"})
            held[case] = np.load(out)
        return held[case]
    return get


@pytest.mark.parametrize("experts", ["full", "shared", "each"])
@pytest.mark.parametrize("backend", ["te", "te-fp8"])
def test_as_far_from_float32_as_torch(measured, backend, experts):
    """Random weights and routing amplify every rounding, so torch's bf16 is the measure. FP8 in blocks has 3 bits for 7."""
    cases = (("torch", "float32"), ("torch", "bfloat16"), (backend, "bfloat16"))
    exact, torch, found = (measured(*case, experts) for case in cases)
    room = 1.5 if backend == "te" else 5
    for which in ("before", "after"):
        off = {name: np.abs(x[which] - exact[which]).mean() for name, x in (("torch", torch), ("found", found))}
        assert 0 < off["found"] < room * off["torch"], f"{which}: {off}"
    assert abs(found["grad"] / exact["grad"] - 1) < 0.02


if __name__ == "__main__":
    measure(*sys.argv[1:])
