"""Faults of the two models, of tokens and their log-probabilities, and of a checkpoint's config.json, for checks/faults.py. As in
faults_handoff.py, a fault is a function of the bench that returns a context manager.
"""
import contextlib
import dataclasses
import json
import os
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import torch

import common.trainer
from checks.faults_handoff import many
from common.sampler import SamplerEngine

# -- the model -------------------------------------------------------------------------------------------------------

def halves(x, rotation):
    """Rotation of the first against the second half of a head, not of neighbours."""
    first, second = x.float().chunk(2, -1)
    turned = torch.complex(first, second) * rotation
    return torch.cat([turned.real, turned.imag], -1).to(x.dtype)


def rotary_kernel(x, rotation):
    """vLLM's own CPU kernel on a slice like q[..., nope:]: it takes (tokens, heads, width) for (rows, width), and so turns the
    heads of the first tokens by the angles of all, and no others."""
    from vllm import _custom_ops as ops
    table = torch.cat([rotation.real, rotation.imag], -1)[:, 0].to(x.dtype)
    ops.rotary_embedding(torch.arange(len(x)), x, None, rotation.shape[-1] * 2, table, False)
    return x


def rotary_kernel_on_rows(x, rotation):
    return rotary_kernel(x.flatten(1).clone(), rotation).view(x.shape)


def rotated(how):
    from common.vllm_cpu import glm5p3
    return lambda b: mock.patch.object(glm5p3, "rotate", how)


def indexer_rotates_halves(b):
    from common.vllm_cpu.glm5p3 import Indexer
    return mock.patch.object(Indexer, "rotated", lambda self, x, rotation: torch.cat(
        [halves(x[..., :self.rope_width], rotation), x[..., self.rope_width:]], -1))


def routed(of=lambda layer: layer.router, **changes):
    """Attributes of the sampler's routers, or of another part of its expert layers."""
    return lambda b: many(mock.patch.object(of(layer.mlp.experts.base_layer), key, value) for layer in b.layers
                          if hasattr(layer.mlp, "experts") for key, value in changes.items())


@contextlib.contextmanager
def changed(*tensors_and_factors):
    """Tensors multiplied in place, then put back."""
    old = [(t, t.detach().clone()) for t, _ in tensors_and_factors]
    with torch.no_grad():
        try:
            for t, factor in tensors_and_factors:
                t.mul_(factor)
            yield
        finally:
            for t, before in old:
                t.copy_(before)


def no_correction_bias(b):
    return changed(*((layer.mlp.gate.e_score_correction_bias, 0) for layer in b.layers if hasattr(layer.mlp, "experts")))


def small_latents(b, factor=10 ** -2.5):
    """Both sides with latents of variance about 1e-5, where the epsilon of the norm after them matters."""
    norms = [n for layer in b.layers for n in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm)]
    norms += [n for layer in b.trainer.model.decoder.layers
              for n in (layer.self_attention.q_layernorm, layer.self_attention.kv_layernorm)]
    return many(mock.patch.object(n, "forward", lambda x, real=n.forward: real(x * factor)) for n in norms)


def latent_eps(b):
    return many(mock.patch.object(norm, "variance_epsilon", 1e-5) for layer in b.layers
                for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm))


def latent_eps_small(b):
    return many([small_latents(b), latent_eps(b)])


def wrong_layer_shared(b):
    core = b.trainer.model.decoder.layers[3].self_attention.core_attention
    return mock.patch.object(core, "source_layer", core.source_layer - 1)


def topk_short(b):
    cores = [layer.self_attention.core_attention for layer in b.trainer.model.decoder.layers]
    return many(mock.patch.object(core, "index_topk", core.index_topk - 1) for core in cores)


def reloaded(b):
    """New expert weights in both sides, 2 % larger."""
    layers = [layer.mlp.experts.base_layer.routed_experts.w13_weight for layer in b.layers if hasattr(layer.mlp, "experts")]
    layers += [layer.mlp.experts.linear_fc1.weight for layer in b.trainer.model.decoder.layers if hasattr(layer.mlp, "experts")]
    return changed(*((w, 1.02) for w in layers))


def packed_once(b):
    """The sampler goes on with the expert weights that it packed at its start."""
    from common.vllm_cpu.experts import Experts
    weights = [layer.mlp.experts.base_layer.routed_experts.w13_weight for layer in b.layers if hasattr(layer.mlp, "experts")]
    packed, real = {w.data_ptr(): w.detach().clone() for w in weights}, Experts.apply

    def apply(self, *, w1, **rest):
        return real(self, w1=packed[w1.data_ptr()], **rest)
    return many([reloaded(b), mock.patch.object(Experts, "apply", apply)])


# -- tokens and their log-probabilities ------------------------------------------------------------------------------

def sampled(temperature=1.0, top_p=1.0):
    """An evaluation's sampling parameters in the training's rollouts: the log-probabilities are those of that distribution."""
    real = SamplerEngine.generate
    return lambda b: mock.patch.object(SamplerEngine, "generate",
                                       lambda self, prompts, seeds, n: real(self, prompts, seeds, n, temperature, top_p))


def micro_batches(change):
    real = common.trainer.pack
    return lambda b: mock.patch.object(common.trainer, "pack", lambda *args: change(real(*args)))


def one_off(micro):
    return {**micro, "rows": (micro["rows"] + 1).clamp(max=micro["ids"].shape[1] - 1)}


def one_sequence(micro):
    n = micro["ids"].shape[1]
    cu = torch.tensor([0, n], dtype=torch.int32)
    return {**micro, "psp": dataclasses.replace(micro["psp"], cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=n, max_seqlen_kv=n)}


def cut_answers(*fields):
    """Answers without their last entry, as the engine gives them."""
    def fault(b):
        real = b.engine.llm.generate

        def generate(*args, **kw):
            outs = real(*args, **kw)
            for one in (out.outputs[0] for out in outs):
                for field in fields:
                    setattr(one, field, getattr(one, field) and getattr(one, field)[:-1])
            return outs
        return mock.patch.object(b.engine.llm, "generate", generate)
    return fault


def tokens_off(b):
    """Answers whose tokens are moved by one place, their log-probabilities not."""
    real = SamplerEngine.generate
    return mock.patch.object(SamplerEngine, "generate", lambda *args: [
        {**a, "tokens": np.roll(a["tokens"], 1)} for a in real(*args)])


def unsteady(b):
    """One token's answer differs from call to call."""
    real, noise = SamplerEngine.score, np.random.default_rng(0)

    def score(self, tokens, n_prompt):
        found = real(self, tokens, n_prompt)
        found[0][0] += noise.uniform(2e-4, 8e-4)
        return found
    return mock.patch.object(SamplerEngine, "score", score)


# -- before an engine starts -----------------------------------------------------------------------------------------

def served(dtype="float32", drop=(), **changes):
    """A sampler started on the checkpoint with another config.json or another dtype."""
    @contextlib.contextmanager
    def fault(b):
        with tempfile.TemporaryDirectory() as folder:
            for file in b.folder.iterdir():
                os.symlink(file, Path(folder, file.name))
            config = {**json.loads((b.folder / "config.json").read_text()), **changes}
            Path(folder, "config.json").unlink()
            Path(folder, "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in drop}))
            SamplerEngine(folder, dtype=dtype, max_model_len=64, max_num_seqs=2, lora_rank=8)
            yield
    return fault


PREFILL, DECODE, UNSEEN = "step 1, agree, prefill", "step 1, agree, decode", "not caught"
FAULTS = [
    ("rotation of halves for neighbours", PREFILL, rotated(halves)),
    ("rotation of halves in the indexer alone", PREFILL, indexer_rotates_halves),
    ("vLLM's CPU rotary kernel on a slice of each head", PREFILL, rotated(rotary_kernel)),
    ("router correction bias is zero", PREFILL, no_correction_bias),
    ("router: softmax without correction bias", PREFILL, routed(scoring_func="softmax", e_score_correction_bias=None)),
    ("routed_scaling_factor missing", PREFILL, routed(lambda layer: layer, routed_scaling_factor=1.0)),
    ("norm_topk_prob off", PREFILL, routed(renormalize=False)),
    ("latent norms with eps 1e-5 for 1e-6, latents of variance 1e-5", PREFILL, latent_eps_small),
    ("latent norms with eps 1e-5 for 1e-6, latents of variance 1", PREFILL, latent_eps),
    ("index sharing off by one layer", PREFILL, wrong_layer_shared),
    ("index_topk one too small", PREFILL, topk_short),
    ("expert weights not packed again after a reload", PREFILL, packed_once),
    ("answers sampled and scored at temperature 0.8", DECODE, sampled(temperature=0.8)),
    ("answers sampled and scored at top-p 0.9", DECODE, sampled(top_p=0.9)),
    ("log-probabilities one token off", PREFILL, micro_batches(one_off)),
    ("packed sequences see each other", PREFILL, micro_batches(one_sequence)),
    ("the last log-probability is missing", "guard: tokens came with", cut_answers("logprobs")),
    ("the last token and its log-probability are cut off", "guard: its end was lost", cut_answers("token_ids", "logprobs")),
    ("tokens one place off their log-probabilities", DECODE, tokens_off),
    ("one token's answer changes from call to call", "step 1, sampler, asked twice", unsteady),
    ("a float32 checkpoint served in bf16", "guard: is a float32 checkpoint and would be rounded to bfloat16",
     served("bfloat16")),
    ("config.json lacks scoring_func and topk_method", "guard: scoring_func is missing",
     served(drop=("scoring_func", "topk_method"))),
    ("config.json lacks indexer_rope_interleave", "guard: indexer_rope_interleave is missing",
     served(drop=("indexer_rope_interleave",))),
    ("config.json with norm_topk_prob false", "guard: norm_topk_prob is false, but only true is built",
     served(norm_topk_prob=False)),
    ("config.json shares indices one layer earlier", "guard: but index_topk_freq 4, index_skip_topk_offset 2 says",
     served(index_skip_topk_offset=2)),
]

CONTROLS = [
    ("vLLM's CPU rotary kernel on rows of all heads", rotated(rotary_kernel_on_rows)),
    ("latents of variance 1e-5", small_latents),
    ("new expert weights in both sides", reloaded),
    ("answers sampled at temperature 1 and top-p 1", sampled()),
    ("answers passed on whole", cut_answers()),
    ("micro-batches passed on as they are", micro_batches(lambda micro: micro)),
]
