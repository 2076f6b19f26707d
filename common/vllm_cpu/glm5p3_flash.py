"""Glm5NextForConditionalGeneration's text model on CPU: Kimi delta attention, k-pool indexer and hyper-connections in torch.

vLLM's decoder, router, loader and state cache around three parts that it has as Triton or CUDA kernels only (its CPU
hyper-connections want bfloat16 and leave the layer norm out). The published config.json is served as it is: the class is
registered over its architecture and takes the text part; the vision tower is not loaded. The delta rule is written here and
not shared with the trainer, so that an error in one does not hide in both; transformers judges either in its own test.
Sources: transformers models/glm5_next (the arithmetic), Kimi Linear report section 3 (the chunked form), mHC (Xie et al., 2026).
Retired when vLLM's CPU platform runs KDA and sparse attention, with LoRA.
"""
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.deepseek_v2 import DeepSeekV2FusedQkvAProjLinear
from vllm.model_executor.models.interfaces import SupportsLoRA
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.models.glm5next.common import model

from common.vllm_cpu.glm5p3 import Indexer, SparseAttention
from common.vllm_flash import FORGET_GATE, PACKED, float32_router

CHUNK = 16                                        # tokens whose mutual influence is written out; the state goes on to the next


def delta_rule(q, k, v, g, beta, state):
    """Kimi delta attention, float32: q, k, v, g (b, heads, t, d), beta (b, heads, t, 1), state (b, heads, d, d) -> output, state.

    For every token: S = diag(exp g) S; S += k (beta (v - S^T k))^T; output = S^T q. In a chunk, with G the sum of g up to a
    token, the rows u_i = beta_i (v_i - S_i^T k_i) solve u_i + beta_i sum_{j < i} (k_i exp(G_i - G_j) . k_j) u_j = beta_i (v_i -
    S_0^T (k_i exp G_i)). Only differences of G that are not positive are exponentiated. Padding has beta = g = 0."""
    t, chunk = q.shape[2], min(CHUNK, q.shape[2])
    q, k, v, g, beta = (F.pad(x, (0, 0, 0, -t % chunk)).unflatten(2, (-1, chunk)) for x in (q, k, v, g, beta))
    g = g.cumsum(3)
    later = torch.ones(chunk, chunk, dtype=torch.bool).triu(1)
    decay = (g.unsqueeze(4) - g.unsqueeze(3)).masked_fill_(later[..., None], float("-inf")).exp_()     # (..., i, j, d)
    kk, qk = ((k.unsqueeze(3) * decay) @ torch.stack([k * beta, q], -1)).unbind(-1)                    # (..., i, j)
    k_in, q_in, k_out = k * g.exp(), q * g.exp(), k * (g[:, :, :, -1:] - g).exp()
    out = []
    for n in range(q.shape[2]):
        known = beta[:, :, n] * (v[:, :, n] - k_in[:, :, n] @ state)
        u = torch.linalg.solve_triangular(kk[:, :, n], known, upper=False, unitriangular=True)
        out.append(q_in[:, :, n] @ state + qk[:, :, n] @ u)
        state = g[:, :, n, -1, :, None].exp() * state + k_out[:, :, n].mT @ u
    return torch.cat(out, 2)[:, :, :t], state


def normalised(x):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


class LinearAttention(model.Glm5NextLinearAttention):
    """vLLM's projections and gated norm; convolution and delta rule on its cache of a state for each request."""

    def __init__(self, config, vllm_config, prefix=""):
        super().__init__(config, vllm_config, prefix)
        self.o_norm.eps = config.rms_norm_eps                               # vLLM leaves it at 1e-5

    def _forward(self, qkv_proj_states, g1, beta, core_attn_out):
        """qkv_proj_states (tokens, 3 * heads * d), g1 (1, tokens, heads, d), beta (1, tokens, heads), before convolution and
        gates; writes core_attn_out (1, tokens, heads, d)."""
        meta = get_forward_context().attn_metadata
        if meta is None:                                                    # vLLM's memory profiling: no cache yet
            return core_attn_out.zero_()
        meta = meta[self.prefix]
        start = meta.non_spec_query_start_loc.long()
        new = start[1:] - start[:-1]
        for group in ((new == 1).nonzero().flatten(), (new > 1).nonzero().flatten()):      # decoding ones would pad to prompts
            if len(group):
                known = None if meta.has_initial_state is None else meta.has_initial_state[group]      # None: all are decoding
                self._advance(qkv_proj_states, g1[0], beta[0], core_attn_out[0], start[group], new[group],
                              meta.non_spec_state_indices_tensor[group].long(), known)

    def _advance(self, x, g, beta, out, first, new, slot, known):
        """Requests whose `new` tokens begin at row `first`, with their states at `slot`, from nothing where not `known`."""
        states, state = self.kv_cache                                       # inputs of the convolution, and the delta rule's
        states = states if self._conv_state_dim_first else states.transpose(-1, -2)        # (slots, channels, kernel - 1)
        past, held = states[slot], state[slot].float()
        if known is not None:                                               # a slot's former request left its state there
            past, held = past.masked_fill(~known[:, None, None], 0), held.masked_fill(~known[:, None, None, None], 0)
        at = torch.arange(int(new.max()))
        real = at < new[:, None]                                            # (requests, t)
        rows = (first[:, None] + at).where(real, first[:, None])

        x = torch.cat([past, x[rows].transpose(1, 2)], -1)                  # (requests, channels, kernel - 1 + t)
        last = new[:, None] + torch.arange(past.shape[-1])
        states[slot] = x.gather(-1, last[:, None].expand(-1, x.shape[1], -1))
        w = torch.cat([conv.weight for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])         # (channels, 1, kernel)
        y = F.silu(F.conv1d(x.to(w.dtype), w, groups=len(w))).to(x.dtype).float()
        q, k, v = y.unflatten(1, (3, -1, self.head_dim)).transpose(-1, -2).unbind(1)                   # (requests, heads, t, d)

        g = self.A_log.exp() * (g[rows].float() + self.dt_bias.view(-1, self.head_dim))                # (requests, t, heads, d)
        g = self.kda_lower_bound * g.sigmoid()
        g, beta = g * real[..., None, None], beta[rows].float().sigmoid() * real[..., None]
        o, state[slot] = delta_rule(normalised(q) * self.head_dim ** -0.5, normalised(k), v, g.transpose(1, 2),
                                    beta.transpose(1, 2).unsqueeze(-1), held)
        out[rows[real]] = o.transpose(1, 2)[real].to(out.dtype)


class PoolIndexer(Indexer):
    """The indexer over pools of keys. A query takes the topk / pool best complete pools and its own unfinished one. The cache
    keeps each token's key and pool gate; pools are formed again in every step."""
    cached_heads = 2

    def __init__(self, config, prefix):
        super().__init__(config, prefix)
        self.pool = config.index_kpool
        self.index_kpool_compress_ape = nn.Parameter(torch.empty(self.pool, self.width, dtype=torch.float32))
        self.index_kpool_compress_gate = nn.Parameter(torch.empty(self.width, config.hidden_size))

    def keys(self, x, rotation):
        k, weights = super().keys(x, rotation)
        return torch.cat([k, F.linear(x, self.index_kpool_compress_gate).unsqueeze(1)], 1), weights

    def pooled(self, held):
        """(b, 2, s, width) -> (b, s // pool, width): a pool's keys summed, weighted by each channel's softmax of its gates"""
        pools = held.shape[2] // self.pool
        keys, gates = held[:, :, :pools * self.pool].unflatten(2, (pools, self.pool)).unbind(1)
        return ((gates.float() + self.index_kpool_compress_ape).softmax(2).to(keys.dtype) * keys).sum(2)

    def picks(self, queries, weights, held, lens):
        scores = self.scores(queries[:, None], weights[:, None], self.pooled(held)).squeeze(1)         # (requests, pools)
        scores.masked_fill_(torch.arange(scores.shape[1]) >= lens // self.pool, float("-inf"))
        best = scores.topk(min(self.topk // self.pool, scores.shape[1]), -1, sorted=False).indices
        inside = torch.arange(self.pool)
        tail = lens - lens % self.pool + inside[:-1]
        picks = (best[..., None] * self.pool + inside).flatten(1)
        return torch.cat([picks, tail], 1), torch.cat([picks < lens - lens % self.pool, tail < lens], 1)

    def selected(self, queries, weights, held, causal):
        length, pool = causal.shape[1], self.pool
        complete = causal[:, pool - 1::pool]                                # (tokens, pools): a pool is there with its last token
        scores = self.scores(queries[None], weights[None], self.pooled(held[None]))[0].masked_fill(~complete, float("-inf"))
        best = scores.topk(min(self.topk // pool, scores.shape[1]), -1, sorted=False).indices
        taken = complete & torch.zeros_like(complete).scatter_(1, best, True)
        unfinished = ~complete.repeat_interleave(pool, 1)
        tokens = taken.repeat_interleave(pool, 1)
        rest = length - tokens.shape[1]                                     # the last pool may be unfinished for all
        return causal & (F.pad(tokens, (0, rest)) | F.pad(unfinished, (0, rest), value=True))


class PoolAttention(SparseAttention):
    """SparseAttention without rotation, with vLLM's fused first projection: the modules that its GPU class adapts, too."""
    indexer_class = PoolIndexer

    def make_down(self, hidden_size, q_rank, prefix):
        self.fused_qkv_a_proj = DeepSeekV2FusedQkvAProjLinear(
            hidden_size, [q_rank, self.rank], prefix=f"{prefix}.fused_qkv_a_proj")
        self.q_rank = q_rank

    def down(self, x):
        return self.fused_qkv_a_proj(x)[0].split([self.q_rank, self.rank], -1)


class DecoderLayer(model.Glm5NextDecoderLayer):
    """vLLM's layer with its hyper-connections in torch; x (tokens, streams, hidden), the mixing in float32."""

    def hc_pre(self, x, fn, scale, base, norm_weight, norm_eps):
        """-> (weights of the block's output, of the streams among themselves, the block's normalised input)"""
        n, flat = self.n, x.flatten(1).float()
        mixes = F.linear(flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.rms_norm_eps), fn)
        pre, post, comb = (m * s + b for m, s, b in zip(mixes.split([n, n, n * n], -1), scale, base.split([n, n, n * n])))
        comb = comb.view(-1, n, n).softmax(-1) + self.hc_eps
        comb = comb / (comb.sum(-2, keepdim=True) + self.hc_eps)
        for _ in range(self.mhc_sinkhorn_iterations - 1):                   # towards rows and columns that sum to 1
            comb = comb / (comb.sum(-1, keepdim=True) + self.hc_eps)
            comb = comb / (comb.sum(-2, keepdim=True) + self.hc_eps)
        y = ((pre.sigmoid() + self.hc_eps).unsqueeze(-1) * x).sum(1).to(x.dtype)
        y = F.rms_norm(y.float(), y.shape[-1:], eps=norm_eps).to(x.dtype) * norm_weight
        return self.mhc_post_mult_value * post.sigmoid(), comb, y

    def hc_post(self, x, residual, post, comb):
        return post.to(x.dtype).unsqueeze(-1) * x.unsqueeze(1) + comb.to(x.dtype).mT @ residual

    def hc_fused_post_pre(self, x, residual, post, comb, fn, scale, base, norm_weight, norm_eps):
        residual = self.hc_post(x, residual, post, comb)
        return residual, *self.hc_pre(residual, fn, scale, base, norm_weight, norm_eps)


class Glm5NextCpuForConditionalGeneration(model.Glm5NextForCausalLM, SupportsLoRA):
    """Names inside are those of the text model; the checkpoint's are mapped, for weights and for adapters."""
    packed_modules_mapping = PACKED
    hf_to_vllm_mapper = FORGET_GATE | WeightsMapper(
        orig_to_new_prefix={"model.language_model.": "model.", "model.visual.": None})

    def __init__(self, *, vllm_config, prefix=""):
        float32_router(vllm_config)
        with mock.patch.multiple(model, Glm5NextLinearAttention=LinearAttention, Glm5NextMLAAttention=PoolAttention,
                                 Glm5NextDecoderLayer=DecoderLayer):         # its decoder takes no classes
            super().__init__(vllm_config=vllm_config, prefix=prefix)

    def load_weights(self, weights):
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
