"""GLM-5.3-Flash (`glm5_next`, its text part) as a megatron-core GPTModel, with the signatures of common/glm5p3.py.

What GLM-5.3 lacks: four residual streams mixed by hyper-connections, linear attention in three of four layers (common/kda.py),
latent attention without rotation in the others, whose indexer picks pools of four tokens, and a clamp in every SwiGLU.
"""
import importlib.util

import torch
import torch.nn.functional as F
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexer, _compute_index_scores
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from . import attention, glm5p3
from .cli import Stop
from .cpu import device
from .kda import KDA

HAVE_FLA = importlib.util.find_spec("fla") is not None


def mcore_config(hf, *, tp=1, pp=1, ep=1, etp=1, dtype=torch.float32, te=False, kda_kernels=None, **over):
    """MLATransformerConfig of the config's text part `hf`, as in common/glm5p3.py, with `flash` (hf) and `kda_kernels` beside
    megatron-core's fields. kda_kernels: 'torch' or 'fla' (flash-linear-attention, on CUDA); None: fla where there are both. Stop
    with the reason for what this model cannot do."""
    cuda, cp = torch.cuda.is_available(), over.get("context_parallel_size", 1)
    kernels = kda_kernels or ("fla" if cuda and HAVE_FLA else "torch")
    if te:
        raise Stop("te is True, but linear attention, hyper-connections and the clamp of GLM-5.3-Flash are built of torch's "
                   "layers alone; so there is no FP8 training of it either")
    if etp > 1:
        raise Stop(f"expert tensor parallel size {etp}: the grouped experts of GLM-5.3-Flash are not split, only 1 is built")
    if cp > 1:
        raise Stop(f"context parallel size {cp}: linear attention carries its state from token to token, only 1 is built")
    if over.get("sequence_parallel") is False and tp > 1:
        raise Stop(f"tensor parallel size {tp} without sequence parallel: linear attention is built for both together")
    if hf.linear_num_heads % tp:
        raise Stop(f"{hf.linear_num_heads} linear attention heads do not divide over tensor parallel size {tp}")
    if other := set(over.get("recompute_modules") or ()) - {"core_attn", "moe"}:
        raise Stop(f"recompute_modules has {min(other)!r}, but layers with hyper-connections recompute core_attn and moe alone")
    if kernels not in ("torch", "fla"):
        raise Stop(f"kda_kernels is {kernels!r}, but must be 'torch' or 'fla'")
    if kernels == "fla" and not (cuda and HAVE_FLA):
        lack = "flash-linear-attention is not installed" if cuda else "there is no CUDA device"
        raise Stop(f"kda_kernels is 'fla', but {lack}")
    cfg = glm5p3.mcore_config(hf, tp=tp, pp=pp, ep=ep, etp=etp, dtype=dtype, te=False,
                              **{"activation_func_clamp_value": hf.swiglu_limit, **over})
    cfg.flash, cfg.kda_kernels = hf, kernels
    return cfg


class HyperConnection(torch.nn.Module):
    """Manifold-constrained hyper-connection around a block (arXiv 2512.24880; transformers' Glm5NextTextHyperConnection): reads
    one input out of n residual streams [s, b, n, h] and says how to write the block's output back. Parameters and mixing are
    float32, as in vLLM; streams and the sum that is written have the model's dtype."""

    def __init__(self, config):
        super().__init__()
        hf = config.flash
        self.n, self.steps, self.eps, self.norm_eps = hf.hc_mult, hf.hc_sinkhorn_iters, hf.hc_eps, config.layernorm_epsilon
        many = (2 + self.n) * self.n
        for name, shape in (("fn", (many, self.n * config.hidden_size)), ("base", (many,)), ("scale", (3,))):
            p = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=device()))
            p.sequence_parallel = config.sequence_parallel
            self.register_parameter(name, p)

    def read(self, streams):
        """(the block's input [s, b, h], post [s, b, n], mix [s, b, n, n]); rows and columns of mix sum to 1."""
        n, x = self.n, streams.flatten(2).to(self.fn.dtype)
        w = F.linear(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.norm_eps), self.fn)
        pre, post, mix = (scale * part + base for scale, part, base in zip(
            self.scale, w.split([n, n, n * n], -1), self.base.split([n, n, n * n])))
        mix = mix.unflatten(-1, (n, n)).softmax(-1) + self.eps
        mix = mix / (mix.sum(-2, keepdim=True) + self.eps)
        for _ in range(self.steps - 1):                            # Sinkhorn and Knopp
            mix = mix / (mix.sum(-1, keepdim=True) + self.eps)
            mix = mix / (mix.sum(-2, keepdim=True) + self.eps)
        read = ((pre.sigmoid() + self.eps).unsqueeze(-1) * streams).sum(2)
        return read.to(streams.dtype), 2 * post.sigmoid(), mix

    @staticmethod
    def write(streams, post, mix, y):
        """The streams after the block gave y [s, b, h]."""
        return post.to(y.dtype).unsqueeze(-1) * y.unsqueeze(2) + mix.to(y.dtype).mT @ streams


class Layer(TransformerLayer):
    """A layer with residual streams. Between layers and pipeline stages they are one tensor [s, b, n * h]; the first layer makes
    n copies of the embedding, the last hands on their mean [s, b, h]."""

    def __init__(self, config, *args, **kw):
        super().__init__(config, *args, **kw)
        self.attn_hc, self.ffn_hc = HyperConnection(config), HyperConnection(config)

    def forward(self, hidden_states, attention_mask=None, packed_seq_params=None, **_):
        n = self.config.flash.hc_mult
        streams = (hidden_states.repeat(1, 1, n) if self.layer_number == 1 else hidden_states).unflatten(-1, (n, -1))
        x, post, mix = self.attn_hc.read(streams)
        y, _ = self.self_attention(self.input_layernorm(x), attention_mask, packed_seq_params=packed_seq_params)
        streams = HyperConnection.write(streams, post, mix, y)
        x, post, mix = self.ffn_hc.read(streams)
        y, _ = self.mlp(self.pre_mlp_layernorm(x))
        streams = HyperConnection.write(streams, post, mix, y)
        return (streams.mean(2) if self.layer_number == self.config.num_layers else streams.flatten(2)), None


class Float32Linear(glm5p3.Replicated):
    """The index heads' weights are float32 products, as in vLLM: rounded to bfloat16 they change which of two near pools wins."""

    def forward(self, x):
        return F.linear(x.float(), self.weight.float()), None


class PoolIndexer(DSAIndexer):
    """mcore's indexer with what weighs the keys of a pool: `ape` for the place in the pool, float32 as in vLLM, `gate` for x."""

    def __init__(self, config, *args, **kw):
        super().__init__(config, *args, **kw)
        hf = config.flash

        def whole(dtype, *shape):
            p = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device()))
            p.average_gradients_across_tp_domain = True            # as mcore marks the indexer's others: no rank has a gradient
            return p
        self.index_kpool_compress_ape = whole(torch.float32, hf.index_kpool, hf.index_head_dim)
        self.index_kpool_compress_gate = whole(config.params_dtype, hf.index_head_dim, hf.hidden_size)


class PoolAttention(attention.SparseAttention):
    """Selects whole pools of consecutive tokens, counted from each document's first: a query chooses among those that end at or
    before it, and always sees its own unfinished pool."""

    def _project(self, x, qr, psp):
        """As for GLM-5.3, with the pool gate [t, b, d] beside the keys in the last dimension."""
        q, k, w = super()._project(x, qr, psp)
        return q, torch.cat([k, F.linear(x, self.indexer.index_kpool_compress_gate)], -1), w

    def _pools(self, packed):
        """Keys of the complete pools [pools, b, d] from keys and gates [t, b, 2 d]: a mean weighted for each channel, summed in
        float32 and rounded once."""
        ape = self.indexer.index_kpool_compress_ape
        k, gate = packed[:len(packed) // len(ape) * len(ape)].unflatten(0, (-1, len(ape))).float().chunk(2, -1)
        return ((gate + ape[:, None]).softmax(1) * k).sum(1).to(packed.dtype)

    def _select(self, q, w, packed, a, b):
        pools, size, t = self._pools(packed[a:b]), self.config.flash.index_kpool, b - a
        pick, key = torch.zeros(q.size(1), t, t, dtype=torch.bool, device=q.device), torch.arange(t, device=q.device)
        block = max(1, attention.SCORES // (q.size(1) * q.size(2) * len(pools)))
        for start in range(0, t, block):
            at = key[start:start + block, None]
            ended, n = (at + 1) // size, min(t, start + block) // size              # pools that a query sees; the last one
            score = _compute_index_scores(q[a:b][start:start + block], w[a:b][start:start + block], pools[:n])
            later = torch.arange(n, device=q.device) >= ended
            top = score.masked_fill_(later, float("-inf")).topk(min(self.index_topk // size, n), -1).indices
            chosen = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, top, True) & ~later
            seen = pick[:, start:start + block]
            seen[..., :n * size] = chosen.repeat_interleave(size, -1)
            seen |= (key >= ended * size) & (key <= at)
        return pick


def layer_specs(cfg):
    """(backend, one spec for each layer of the whole model): GLM-5.3's, with this model's layer and attention."""
    backend, found = glm5p3.layer_specs(cfg, te=False)
    for kind, spec in zip(cfg.flash.layer_types, found):
        spec.module = Layer
        if kind == "linear_attention":
            spec.submodules.self_attention = ModuleSpec(KDA)
        else:
            core = spec.submodules.self_attention.submodules.core_attention
            core.module, core.submodules.indexer.module = PoolAttention, PoolIndexer
            core.submodules.indexer.submodules.linear_weights_proj = Float32Linear
    return backend, found


def build(cfg, vocab, te=False):
    """This rank's part of the GPTModel, as `common.glm5p3.build` gives it."""
    assert not te, "mcore_config has refused te"
    return glm5p3.gpt(cfg, vocab, *layer_specs(cfg))
