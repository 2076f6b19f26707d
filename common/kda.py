"""Kimi delta attention, the linear attention of GLM-5.3-Flash, as a megatron-core self attention.

A head has a state S [d, d], empty when a document begins. For each token, with decay exp(g) of each row and step beta:
S <- diag(exp g) S; S <- S + beta k (v - S^T k)^T; o = S^T q (Kimi Linear, arXiv 2510.26692; transformers' glm5_next). q, k and v
went through a causal convolution of 4 tokens and SiLU; q and k have unit length; g lies in (-5, 0).
"""
import copy
import os

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule

from .attention import batches, padded_rows
from .cpu import device
from .glm5p3 import Norm, Replicated

CHUNK = 16              # tokens; decays of a chunk, down to exp(-5 x 15), and their inverses are normal float32 numbers


def kda(q, k, v, g, beta):
    """o [n, heads, t, d] of n sequences from empty states: q (scaled), k, v, g [n, heads, t, d], beta [n, heads, t], float32.

    In chunks: within one, what a token adds to the state (v less what the state already answers to k) depends on the chunk's
    earlier tokens alone, through a unit triangular system; between chunks the state is carried on."""
    n, heads, t, d = q.shape
    pad = -t % CHUNK
    q, k, v, g = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, CHUNK)) for x in (q, k, v, g))       # [n, heads, chunks, CHUNK, d]
    beta = F.pad(beta, (0, pad)).unflatten(2, (-1, CHUNK))[..., None]
    g = g.cumsum(3)                                            # log decay since the chunk began
    middle = g[..., CHUNK // 2:CHUNK // 2 + 1, :].detach()     # exp(g_i - g_j) as a product, with exponents of at most 40
    since, until = (g - middle).exp(), k * (middle - g).exp()
    kk = (beta * k * since @ until.mT).tril(-1)
    qk = (q * since @ until.mT).tril()
    right = torch.cat([beta * v, beta * k * g.exp()], -1)
    own, reads = torch.linalg.solve_triangular(kk, right, upper=False, unitriangular=True).split([v.shape[-1], d], -1)
    into, out_of, end = q * g.exp(), k * (g[..., -1:, :] - g).exp(), g[..., -1, :, None].exp()
    state, out = q.new_zeros(n, heads, d, v.shape[-1]), []
    for i in range(q.shape[2]):
        new = own[:, :, i] - reads[:, :, i] @ state
        out.append(into[:, :, i] @ state + qk[:, :, i] @ new)
        state = end[:, :, i] * state + out_of[:, :, i].mT @ new
    return torch.cat(out, 2)[:, :, :t]


def decay(f, A_log, dt_bias, bound):
    """g [..., heads, d] of the forget gate's output f [..., heads, d]: bound * sigmoid(exp(A_log) * (f + dt_bias)), float32."""
    return bound * (A_log.exp()[:, None] * (f.to(A_log.dtype) + dt_bias.view(-1, f.shape[-1]))).sigmoid()


def unit(x):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


class KDA(MegatronModule):
    """Heads are split over tensor parallel ranks; f_a and g_a, which lead down to one head's width, are whole on each.

    float32 whatever the model's dtype: A_log and dt_bias, whose exponential and sigmoid set how long a state lives, and the
    convolutions; transformers (`_keep_in_fp32_modules_strict`) and vLLM hold the same ones so. kernels: 'torch' (here), or 'fla',
    flash-linear-attention's Triton kernels. With the latter bfloat16 sums are in another order, the state is float32 in both."""

    def __init__(self, config, layer_number, pg_collection=None, **_):
        super().__init__(config)
        hf, tp = config.flash, pg_collection.tp
        self.kernels, self.dim, self.bound = config.kda_kernels, hf.linear_head_dim, hf.linear_lower_bound
        self.heads, wide, h = hf.linear_num_heads // tp.size(), hf.linear_num_heads * self.dim, config.hidden_size
        inner = copy.copy(config)              # the layer gathers its input once for all six projections, and reduces their
        inner.sequence_parallel = False        # gradients once; on their own each would do both

        def column(fan_in, fan_out):
            layer = ColumnParallelLinear(fan_in, fan_out, config=inner, init_method=config.init_method, bias=False,
                                         gather_output=False, disable_grad_reduce=True, tp_group=tp)
            layer.takes_whole_input = True
            return layer

        def whole(fan_in, fan_out):                            # each rank has the gradient through its own heads: to be summed
            layer = Replicated(fan_in, fan_out, config=config, init_method=config.init_method,
                               sequence_parallel=config.sequence_parallel)
            layer.takes_whole_input = True
            return layer
        self.q_proj, self.k_proj, self.v_proj = column(h, wide), column(h, wide), column(h, wide)
        self.f_a_proj, self.f_b_proj, self.b_proj = whole(h, self.dim), column(self.dim, wide), column(h, hf.linear_num_heads)
        self.g_a_proj, self.g_b_proj = whole(h, self.dim), column(self.dim, wide)
        self.o_norm = Norm(config, self.dim, config.layernorm_epsilon)         # of this rank's heads: a part of the gradient too
        self.o_proj = RowParallelLinear(wide, h, config=config, init_method=config.output_layer_init_method, bias=False,
                                        input_is_parallel=True, skip_bias_add=True, tp_group=tp)

        def own_heads(*shape):
            p = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=device()))
            set_tensor_model_parallel_attributes(p, tp.size() > 1, 0, 1)
            return p
        for name in "qkv":
            self.register_parameter(f"{name}_conv1d", own_heads(self.heads * self.dim, 1, hf.linear_conv_kernel_dim))
        self.A_log, self.dt_bias = own_heads(self.heads), own_heads(self.heads * self.dim)

    def forward(self, x, attention_mask=None, packed_seq_params=None, **_):
        """x [t, 1, h] of a packed row, or right-padded [t, b, h] without packed_seq_params -> ([t, b, h], None)."""
        if self.config.sequence_parallel:
            x = gather_from_sequence_parallel_region(x)
        qkv = torch.cat([p(x)[0] for p in (self.q_proj, self.k_proj, self.v_proj)], -1)
        f, beta = self.f_b_proj(self.f_a_proj(x)[0])[0].unflatten(-1, (-1, self.dim)), self.b_proj(x)[0]
        core = {"torch": self._torch, "fla": self._fla}[self.kernels]
        bounds = None if packed_seq_params is None else packed_seq_params.cu_seqlens_q
        if self.training and self.config.recompute_granularity == "selective" and "core_attn" in self.config.recompute_modules:
            out = tensor_parallel.checkpoint(lambda *args: core(*args, bounds), False, qkv, f, beta)
        else:
            out = core(qkv, f, beta, bounds)
        gate = self.g_b_proj(self.g_a_proj(x)[0])[0].unflatten(-1, (-1, self.dim))
        return self.o_proj((self.o_norm(out.float()) * gate.float().sigmoid()).to(x.dtype).flatten(2))

    def _torch(self, qkv, f, beta, bounds):
        """qkv [t, b, 3 heads d] before the convolution, f [t, b, heads, d], beta [t, b, heads] -> o [t, b, heads, d]."""
        if bounds is None:
            return self._sequences(*(t.transpose(0, 1) for t in (qkv, f, beta))).transpose(0, 1)
        bounds = bounds.tolist()
        lengths = [b - a for a, b in zip(bounds, bounds[1:])]
        out = torch.zeros_like(f)
        for batch in batches(range(len(lengths)), lengths):
            rows = padded_rows(bounds, lengths, batch, qkv.device)               # [n, longest], -1 is padding, on the right
            done = self._sequences(*(t[rows.clamp(0), 0] for t in (qkv, f, beta)))
            out = out.index_copy(0, rows[rows >= 0], done[rows >= 0][:, None])
        return out

    def _sequences(self, qkv, f, beta):
        """The same with [n, t, ...]; each row of the batch is a sequence."""
        weight = torch.cat([self.q_conv1d, self.k_conv1d, self.v_conv1d])[:, 0]
        size, t = weight.shape[-1], qkv.shape[1]
        past = F.pad(qkv, (0, 0, size - 1, 0)).to(weight.dtype)
        conv = F.silu(sum(past[:, i:i + t] * weight[:, i] for i in range(size))).to(qkv.dtype)       # rounded as it is in vLLM
        q, k, v = (x.to(weight.dtype).unflatten(-1, (-1, self.dim)).transpose(1, 2) for x in conv.chunk(3, -1))
        g = decay(f, self.A_log, self.dt_bias, self.bound).transpose(1, 2)
        out = kda(unit(q) * self.dim ** -0.5, unit(k), v, g, beta.float().sigmoid().transpose(1, 2))
        return out.transpose(1, 2).to(qkv.dtype)

    def _fla(self, qkv, f, beta, bounds):
        """As `_torch`. The kernels of fla-core 0.6.0 gave its values and gradients in Triton's interpreter on the CPU (float32,
        packed: 2e-7 and 3e-6 apart); not run on a GPU."""
        if torch.cuda.get_device_capability()[0] >= 10:        # read by fla at its first import: its TileLang kernels abort there
            os.environ.setdefault("FLA_TILELANG", "0")
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.ops.kda import chunk_kda
        qkv, f, beta = (x.transpose(0, 1).contiguous() for x in (qkv, f, beta))                      # fla wants [b, t, ...]
        weight = torch.cat([self.q_conv1d, self.k_conv1d, self.v_conv1d])[:, 0]
        conv, _ = causal_conv1d(qkv, weight, activation="silu", cu_seqlens=bounds)
        q, k, v = (x.unflatten(-1, (-1, self.dim)).contiguous() for x in conv.chunk(3, -1))
        out, _ = chunk_kda(q, k, v, f, beta, A_log=self.A_log, dt_bias=self.dt_bias, use_qk_l2norm_in_kernel=True,
                           use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True, lower_bound=self.bound,
                           cu_seqlens=bounds)
        return out.transpose(0, 1)
