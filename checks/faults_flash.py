"""Faults of GLM-5.3-Flash's own parts, for checks/faults.py --flash: linear attention, pools, hyper-connections, clamp and router
of the sampler, adapters of fused projections, and weights that arrive and are not used. As in faults_handoff.py, a fault is a
function of the bench that returns a context manager.
"""
import contextlib
import json
import os
import re
import tempfile
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from checks.faults_handoff import exported, many, renamed, without_hooks
from checks.faults_model import UNSEEN, changed, micro_batches, one_sequence
from common import receive, weights
from common.receive_weights import WeightReceiver
from common.sampler import SamplerEngine

MODEL = dict(swiglu_limit=1.0)           # of the bench's model, 10 in the real one: cuts a third of a small random model's values


def varied(folder):
    """Give a checkpoint random values where transformers starts with zeros, which have no sign to turn and no effect to lose."""
    file = Path(folder) / "model.safetensors"
    tensors, g = load_file(file), torch.Generator().manual_seed(0)
    for name, t in tensors.items():
        if re.search(r"A_log$|hc_(attn|ffn)_base$", name):
            t.copy_(0.3 * torch.randn(t.shape, generator=g))
    save_file(tensors, file, {"format": "pt"})


def flash():
    """The sampler's classes, which import vLLM's inner ones."""
    from common.vllm_cpu import glm5p3_flash
    return glm5p3_flash


# -- the model -------------------------------------------------------------------------------------------------------

def no_clamp_in_experts(b):
    from common.vllm_cpu.experts import Experts
    real = Experts.apply

    def apply(self, **how):
        with mock.patch.object(self.quant_config, "gemm1_clamp_limit", None):
            return real(self, **how)
    return mock.patch.object(Experts, "apply", apply)


def no_clamp_elsewhere(b):
    """In the dense MLP and the shared experts."""
    mlps = [getattr(layer.mlp, "shared_experts", layer.mlp) for layer in b.layers]
    return many(mock.patch.object(mlp.act_fn, "forward", lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]) for mlp in mlps)


def advance(before=lambda self, known: known, after=lambda self, slot: None):
    """The sampler's linear attention with other arguments, or another state left behind."""
    def fault(b):
        real = flash().LinearAttention._advance

        def step(self, x, g, beta, out, first, new, slot, known):
            real(self, x, g, beta, out, first, new, slot, before(self, known))
            after(self, slot)
        return mock.patch.object(flash().LinearAttention, "_advance", step)
    return fault


def not_reset(self, known):
    return known if known is None else torch.ones_like(known)


def rounded_state(self, slot):
    state = self.kv_cache[1]
    state[slot] = state[slot].bfloat16().to(state.dtype)


def lost_convolution(self, slot):
    """The inputs that the convolution needs of the tokens before are not carried on."""
    self.kv_cache[0][slot] = 0


def linear_attention(**parts):
    return lambda b: many(mock.patch.object(flash(), name, value) for name, value in parts.items())


@contextlib.contextmanager
def turned_taps(b):
    """The convolutions' taps in the order of a correlation, and back."""
    def turn():
        for conv in (getattr(layer.self_attn, f"{x}_conv1d") for layer in b.layers[:3] for x in "qkv"):
            conv.weight.data.copy_(conv.weight.data.flip(-1))
    turn()
    try:
        yield
    finally:
        turn()


def indexer(b):
    return b.layers[3].self_attn.indexer


def no_tail(b):
    """Of its unfinished pool a query sees itself alone."""
    kind = flash().PoolIndexer
    selected, picks = kind.selected, kind.picks

    def prefill(self, queries, weights, held, causal):
        found, complete = selected(self, queries, weights, held, causal), causal[:, self.pool - 1::self.pool]
        done = F.pad(complete.repeat_interleave(self.pool, 1), (0, causal.shape[1]))[:, :causal.shape[1]]
        own = causal & ~F.pad(causal, (0, 1))[:, 1:]                   # the last token that is seen is the query's own
        return found & (done | own)

    def decode(self, queries, weights, held, lens):
        at, real = picks(self, queries, weights, held, lens)
        return at, real & ((at < lens - lens % self.pool) | (at == lens - 1))
    return many([mock.patch.object(kind, "selected", prefill), mock.patch.object(kind, "picks", decode)])


def pools_moved(b):
    """Pools begin with a sequence's second token."""
    real = flash().PoolIndexer.pooled
    return mock.patch.object(flash().PoolIndexer, "pooled", lambda self, held: real(self, held.roll(-1, 2)))


def plain_mean(b):
    return mock.patch.object(flash().PoolIndexer, "pooled", lambda self, held: held[
        :, 0, :held.shape[2] // self.pool * self.pool].unflatten(1, (-1, self.pool)).mean(2))


def streams(**changes):
    return lambda b: many(mock.patch.object(layer, key, value) for layer in b.layers for key, value in changes.items())


def mixed_across(b):
    """The streams' mixing matrix is not transposed."""
    def post(self, x, residual, post, comb):
        return post.to(x.dtype).unsqueeze(-1) * x.unsqueeze(1) + comb.to(x.dtype) @ residual
    return mock.patch.object(flash().DecoderLayer, "hc_post", post)


def rounded_router(b):
    """What the router answers is rounded, as vLLM has it where nobody asks for float32."""
    gates = [layer.mlp.gate for layer in b.layers if hasattr(layer.mlp, "gate")]
    return many(mock.patch.object(gate, "forward", lambda x, real=gate.forward: (real(x)[0].bfloat16().float(), None))
                for gate in gates)


# -- adapters --------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def old_rows(b):
    """Slots held experts' adapters of a larger rank, and a new one's rows are written without clearing the rest."""
    real = receive.Receiver._places

    def places(self, *args):
        for dest, source, key, region in real(self, *args):
            yield region if ".mlp.experts." in key else dest, source, key, region
    for layer in b.layers[1:]:
        experts = layer.mlp.experts
        for stack in (*experts.w13_lora_a_stacked, *experts.w2_lora_a_stacked):
            stack[:, :, b.expert_rank:].normal_(0, 0.1)
        for stack in (*experts.w13_lora_b_stacked, *experts.w2_lora_b_stacked):
            stack[..., b.expert_rank:].normal_(0, 0.1)
    b.worker.adapter_plans.clear()
    try:
        with mock.patch.object(receive.Receiver, "_places", places):
            yield
    finally:
        b.worker.adapter_plans.clear()               # worked out anew they clear a slot's rest


def every_slice_cut(b):
    """vLLM cuts every part of its fused projection for a tensor parallel rank, f_a and g_a too: here, their first half stays."""
    def half(tensors):
        for k in [k for k in tensors if re.search(r"\.[fg]_a_proj\.lora_B$", k)]:
            kept, lost = tensors[k].chunk(2)
            tensors[k] = torch.cat([kept, torch.zeros_like(lost)])
        return tensors
    return exported(half)(b)


# -- all weights -----------------------------------------------------------------------------------------------------

def kept(pattern, count, never=False):
    """Weights that arrive, are answered for, and do not reach the tensor that the sampler computes with. never: not from the
    first version on, so that it holds what vLLM fills in where recipes start it without weights (load_format dummy)."""
    def fault(b):
        real = WeightReceiver.weights_commit
        old = {p: p.detach().clone() for n, p in b.worker.model_runner.model.named_parameters() if re.search(pattern, n)}
        assert len(old) == count, len(old)
        for i, t in enumerate(old.values() if never else ()):
            t.uniform_(-1e-3, 1e-3, generator=torch.Generator().manual_seed(i))

        def commit(self, version):
            answer = real(self, version)
            with torch.no_grad():
                for p, before in old.items():
                    p.copy_(before)
            return answer
        return mock.patch.object(WeightReceiver, "weights_commit", commit)
    return fault


def sent(change):
    """The trainer's weights, changed on their way out, bucket by bucket."""
    real = weights.buckets

    def buckets(*args):
        for part, last in real(*args):
            yield change(dict(part)), last
    return lambda b: mock.patch.object(weights, "buckets", buckets)


def sent_stale(pattern):
    def fault(b):
        first = {}

        def change(part):
            for k, t in part.items():
                if re.search(pattern, k):
                    first.setdefault(k, t.clone())
            return {k: first.get(k, t) for k, t in part.items()}
        return sent(change)(b)
    return fault


# -- before an engine starts -----------------------------------------------------------------------------------------

def served(drop=(), args=None, **changes):
    """A sampler started on the checkpoint with another text_config, or with other arguments of vLLM's."""
    @contextlib.contextmanager
    def fault(b):
        with tempfile.TemporaryDirectory() as folder:
            for file in b.folder.iterdir():
                os.symlink(file, Path(folder, file.name))
            config = json.loads((b.folder / "config.json").read_text())
            config["text_config"] = {k: v for k, v in {**config["text_config"], **changes}.items() if k not in drop}
            Path(folder, "config.json").unlink()
            Path(folder, "config.json").write_text(json.dumps(config))
            SamplerEngine(folder, dtype=b.dtype, max_model_len=64, max_num_seqs=2, lora_rank=8, vllm_args=args)
            yield
    return fault


PREFILL, AGAIN = "step 1, agree, prefill", "step 5, agree again, prefill"
FAULTS = [
    ("clamp missing in the routed experts", PREFILL, no_clamp_in_experts),
    ("clamp missing in the dense MLP and the shared experts", PREFILL, no_clamp_elsewhere),
    ("linear attention's state is not reset between requests", PREFILL, advance(not_reset)),
    ("linear attention's state is carried in bf16", PREFILL, advance(after=rounded_state)),
    ("the convolution forgets the tokens before a decoded one", PREFILL, advance(after=lost_convolution)),
    ("linear attention: keys and queries not normalised", PREFILL, linear_attention(normalised=lambda x: x)),
    ("linear attention: the convolution's taps turned round", PREFILL, turned_taps),
    ("packed sequences share linear attention's state", PREFILL, micro_batches(one_sequence)),
    ("pools: the weights by place (ape) are zero", PREFILL, lambda b: changed((indexer(b).index_kpool_compress_ape, 0))),
    ("pools: a plain mean of the keys", PREFILL, plain_mean),
    ("pools: one token off", PREFILL, pools_moved),
    ("pools: the unfinished one is not attended to", PREFILL, no_tail),
    ("pools: index_topk pools for index_topk tokens", PREFILL, lambda b: mock.patch.object(
        indexer(b), "topk", indexer(b).topk * indexer(b).pool)),
    ("hyper-connections: the mixing not transposed", PREFILL, mixed_across),
    ("hyper-connections: one Sinkhorn iteration for 20", PREFILL, streams(mhc_sinkhorn_iterations=1)),
    ("hyper-connections: 19 Sinkhorn iterations for 20", UNSEEN, streams(mhc_sinkhorn_iterations=19)),
    ("router scores in bf16", PREFILL, rounded_router),
    ("adapter: f_a_proj and g_a_proj exchanged", AGAIN, renamed(r"f_a(?=_proj)|g_a(?=_proj)", {"f_a": "g_a", "g_a": "f_a"})),
    ("adapter: q_proj and k_proj exchanged", AGAIN, renamed(r"(?<=\.)[qk](?=_proj)", {"q": "k", "k": "q"})),
    ("adapter: f_a_proj and g_a_proj cut like the others by tensor parallelism", AGAIN, every_slice_cut),
    ("adapter: b_proj not in the trainer's forward", AGAIN, without_hooks("self_attention.b_proj")),
    ("adapter: experts keep rows of an older, larger rank", PREFILL, old_rows),
    ("config.json lacks mhc", "guard: mhc is missing and must be true", served(drop=("mhc",))),
    ("config.json lacks mla_use_nope", "guard: mla_use_nope is missing and must be true", served(drop=("mla_use_nope",))),
    ("config.json: an unfinished pool is not always selected", "guard: index_kpool_always_select_tail is false, but only",
     served(index_kpool_always_select_tail=False)),
    ("prefixes are cached, states of linear attention are not", "guard: with enable_prefix_caching=False",
     served(args={"enable_prefix_caching": True})),
]
PARTS = {"ape": ("index_kpool_compress_ape", 1), "the pools' gate": ("index_kpool_compress_gate", 1),
         "convolutions": ("conv1d", 9), "A_log": ("A_log", 3), "dt_bias": ("dt_bias", 3),
         "hyper-connections' scales": ("hc_.*_scale", 8), "hyper-connections' base": ("hc_.*_base", 8)}
WHOLE = [
    *((f"all weights: {name}: no version reaches the sampler's tensor", PREFILL, kept(*which, never=True))
      for name, which in PARTS.items()),
    # of ape few signs are turned, and the same pools are chosen
    *((f"all weights: {name}: the changed version does not", UNSEEN if name == "ape" else AGAIN, kept(*which))
      for name, which in PARTS.items()),
    ("all weights: ape is sent as before", "guard: 1 tensors were published as before the change", sent_stale("compress_ape")),
    ("all weights: one layer's A_log is sent as before", AGAIN, sent_stale(r"layers\.1\..*A_log")),
    ("all weights: ape is not sent", "guard: 1 tensors never arrived",
     sent(lambda part: {k: t for k, t in part.items() if "compress_ape" not in k})),
]
CONTROLS = [("the state left as it is", advance()), ("a state that is carried in its own float32", advance(
    after=lambda self, slot: self.kv_cache[1][slot].float()))]
