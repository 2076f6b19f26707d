"""What the layers keep for the backward pass: bytes a token, counted from common/ and megatron-core's torch layers. No torch.

checks/test_plan.py and test_plan_flash.py compare with autograd on the CPU. The core of Flash's linear attention is that of
flash-linear-attention (`chunk_kda`, `causal_conv1d`), counted from the source of fla-core 0.6.0, not measured on a GPU. torch's
kernels keep more: of one layer only with `selective` or `full` recomputation.
"""
import math

from common.size import kinds, text

BUSIEST = 2              # tokens of the busiest expert parallel rank over the mean. Assumed
KDA_BACKWARD = 59        # bytes for each channel of linear attention that chunk_kda_bwd holds at once, counted likewise


def saved(c, full=False):
    """Bytes a token that the forward pass of one layer keeps for the backward pass, bf16, not split: {attention, of it inside the
    core attention, of this what goes in; dense MLP; MoE, of it in the routed experts}; of Flash also {linear attention, of it in
    its core, what goes in; what each tensor parallel rank has whole; streams: hyper-connections}. full: training all weights also
    keeps the input of every weight."""
    c = text(c)
    h, f, k, e, q, kv = (c[n] for n in ("hidden_size", "moe_intermediate_size", "num_experts_per_tok", "n_routed_experts",
                                        "q_lora_rank", "kv_lora_rank"))
    heads, rope, v = c["num_attention_heads"], c["qk_rope_head_dim"], c["v_head_dim"]
    flash = "linear_num_heads" in c
    clamp = 2 if flash else 0                                # copies that the clamp of a SwiGLU makes: of gate, routed also of up
    core = 2 * heads * (2 * max(c["qk_nope_head_dim"] + rope, v) + 3 * v) + 4 * heads      # q, k, v, out twice, log of the sum
    norm = 6 * h + (2 * h if full else 0)                    # the input in float32, the output
    attention = norm + 6 * q + 4 * kv + 8 * rope + core + 2 * heads * v + (2 * q + 4 * kv if full else 0)
    routed = k * (2 * h + (10 + 2 * clamp) * f)
    found = {"attention": attention, "core": core, "core's input": core - 4 * heads * (v + 1),
             "dense": norm + (10 + clamp) * c["intermediate_size"],
             "moe": norm + routed + (10 + clamp) * f * c["n_shared_experts"] + 8 * e + 40 * k, "routed": routed}
    return found | (flash_saved(c, full) if flash else {})


def flash_saved(c, full):
    h, n, heads, d = c["hidden_size"], c["hc_mult"], c["linear_num_heads"], c["linear_head_dim"]
    wide, chunk, sinkhorn = heads * d, 64, 2 * c.get("hc_sinkhorn_iters", 20) - 1          # 20 is transformers' default
    into = 8 * wide + 2 * heads                              # q, k, v before the convolution, forget gate, step
    # and after it, q and k with unit length and their lengths; two triangles of a chunk; the step in float32
    core = into + 6 * wide + heads * (2 * 2 * chunk + 8 + 4)
    # the core's output and its norm in float32, the sigmoid of the gate, o_proj's input; the norm before its weight
    after = 14 * wide + 4 * heads + (4 * wide if full else 0)
    # of each of two: the streams, their float32 copy, the block's output; the sums of Sinkhorn's rows and columns
    one = 6 * n * h + 2 * h + (sinkhorn + 2) * 4 * n * n + sinkhorn * 4 * n + 16 * n + 2 * n * n + 8 * n
    return {"linear attention": 4 * h + (2 * h if full else 0) + core + after, "linear core": core, "linear core's input": into,
            "whole": 2 * h + (4 * d if full else 0),         # the input, gathered for all projections
            "streams": 2 * (one + (4 * n * h + 4 * n * (2 + n) if full else 0))}


def activations(c, *, tokens, longest, tp=1, ep=1, pp=1, recompute="none", chunk=2048, full=False):
    """{what: bytes} on a GPU during an update, beside weights and optimizer: what the layers keep for the backward pass, the
    masks of sequences longer than index_topk, the head's logits, one layer's backward pass (the last two not at the same time).
    tokens: of a micro-batch; longest: of its sequences; recompute: none, full (every layer), selective (core attention, MoE)."""
    c = text(c)
    s, (layers, dense, mla, indexers, kda), h = saved(c, full), kinds(c), c["hidden_size"]
    stage, vocabulary, load = math.ceil(layers / pp), c["vocab_size"] / tp, BUSIEST if ep > 1 else 1
    mla, linear, n_dense, n = math.ceil(mla / pp), math.ceil(kda / pp), min(dense, stage), c.get("hc_mult", 1)
    s["moe"], s["routed"] = s["moe"] + (load - 1) * s["routed"], s["routed"] * load
    lin, lin_core, lin_into, whole, streams = (s.get(k, 0) for k in (
        "linear attention", "linear core", "linear core's input", "whole", "streams"))
    lin += whole * tp                                        # is divided by it below
    # gradients that one layer's backward pass holds at once. An upper estimate: in what was measured the logits were larger
    moe = load * c["num_experts_per_tok"] * (4 * h + 8 * c["moe_intermediate_size"])
    kda_work = KDA_BACKWARD * c["linear_num_heads"] * c["linear_head_dim"] if kda else 0
    if recompute == "none":
        kept = mla * s["attention"] + linear * lin + n_dense * s["dense"] + (stage - n_dense) * s["moe"] + stage * streams
        kept -= 0 if full else streams / 2                   # the first layer's adapters need no gradient of a frozen embedding
        work = max(moe, kda_work)
    elif recompute == "selective":
        kept = mla * (s["attention"] - s["core"] + s["core's input"]) + linear * (lin - lin_core + lin_into)
        kept += n_dense * s["dense"] + (stage - n_dense) * 8 * h + stage * streams
        work = max(moe + s["moe"], kda_work + lin_core - lin_into)
    else:
        kept, work = stage * 2 * n * h, max(moe, kda_work) + max(s["attention"], lin) + s["moe"] + streams
    work += 4 * n * h if kda else 0                          # gradients of the streams around it
    mask = tokens * longest if longest > c["index_topk"] else 0               # bool for each indexer; bf16 for each attention
    masks = mask * (1 if kda else math.ceil(indexers / pp)) + 2 * mask * (mla if recompute == "none" else 1)
    logits = min(chunk, tokens) * vocabulary
    head = max(18 * logits + 4 * vocabulary * h, 10 * (logits + vocabulary * h)) if full else 18 * logits
    # pipelining keeps a micro-batch for each later stage in flight
    return {"activations": kept * tokens / tp * pp, "attention masks": masks,
            "logits": head + 6 * h * tokens, "one layer's backward pass": work * tokens / tp}
