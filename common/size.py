"""How large GLM-5.3 and GLM-5.3-Flash are, what a GPU of a layout holds of them, how long a step takes: arithmetic, no torch.

`c` is config.json as a dict (GLM5P3, FLASH where there is none yet). Counts are parameters, everything else is bytes; GIB = 2^30.
What was measured and what is assumed is said at each constant; checks/plan_memory.py compares with a GPU.
"""
import json
import math
from pathlib import Path

from common.flags import Stop

GIB = 2 ** 30
GLM5P3 = dict(
    model_type="glm_moe_dsa", vocab_size=154880, hidden_size=6144, intermediate_size=12288, moe_intermediate_size=2048,
    num_hidden_layers=78, first_k_dense_replace=3, num_attention_heads=64, q_lora_rank=2048, kv_lora_rank=512,
    qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, n_routed_experts=256, num_experts_per_tok=8, n_shared_experts=1,
    index_n_heads=32, index_head_dim=128, index_topk=2048, index_topk_freq=4, index_skip_topk_offset=3)
FLASH = dict(
    model_type="glm5_next", vocab_size=154880, hidden_size=4096, intermediate_size=12288, moe_intermediate_size=2048,
    num_hidden_layers=45, first_k_dense_replace=3, num_attention_heads=64, q_lora_rank=1536, kv_lora_rank=512,
    qk_nope_head_dim=256, qk_rope_head_dim=0, v_head_dim=256, n_routed_experts=288, num_experts_per_tok=8, n_shared_experts=1,
    index_n_heads=32, index_head_dim=128, index_topk=2048, index_kpool=4, linear_num_heads=64, linear_head_dim=128,
    linear_conv_kernel_dim=4, hc_mult=4)

CONTEXT = 3 * GIB        # of one process on a GPU: CUDA context, NCCL's buffers, the allocator's waste. Assumed, not measured
GRAPHS = 14 * GIB / 51   # one batch size that vLLM captures: 14 GiB for the 51 up to 512 (SkyRL's notes); they survive its sleep
SPARE = 0.05             # of a card that a plan leaves free: known peaks lie mostly within 5 % of the formulas (checks/test_plan)
PINNED = 4 / 3           # torch rounds page-locked memory up to a power of two; nearly all of GLM-5.3's tensors are 3 x 2^n bytes
BUSIEST = 2              # tokens of the busiest expert parallel rank over the mean. Assumed
# Speed: published, from SkyRL's full fine-tuning on 8 x 8 B200 at step 1 (1,536 answers of 4,460 tokens): generation 410 s with
# 192 requests in an engine (fewer at once are faster each), forward 320 s, updates 1,550 s
ANSWER, PROMPT = 4460, 150        # mean tokens; the prompt's are assumed
REQUEST_TOKENS_PER_S = 11         # of one request: 4,460 / 410
SCORE_TOKENS_PER_S = 345          # of one GPU: 1,536 x 4,610 / 64 / 320
UPDATE_TOKENS_PER_S = 71          # of one GPU: 1,536 x 4,610 / 64 / 1,550; LoRA makes no weight gradients
COPY_BYTES_PER_S = 25e9           # host to GPU or back, all cards of a node at once. Assumed
SYNC_BYTES_PER_S = 0.62e9 / 13    # an adapter of 0.62 GB in 13 s (#2195, Trajectory field report): handling, not wire


# -- parameters ------------------------------------------------------------------------------------------------------

def text(c):
    """The language model's part of a config; Flash keeps it apart from the vision tower's, which is not counted here (0.46B)."""
    return c.get("text_config", c)


def selects(c):
    """For each layer whether it selects tokens with an indexer of its own; GLM-5.3's others reuse a selection. None: no attention
    over selected tokens (Flash's linear attention)."""
    n = range(c["num_hidden_layers"])
    if "linear_num_heads" in c:
        linear = [t == "linear_attention" for t in c["layer_types"]] if c.get("layer_types") else [i % 4 != 3 for i in n]
        return [None if one else True for one in linear]
    if c.get("indexer_types"):
        return [t == "full" for t in c["indexer_types"]]
    freq, offset = c.get("index_topk_freq", 1), c.get("index_skip_topk_offset", 2)
    return [max(i - offset + 1, 0) % freq == 0 for i in n]


def kinds(c):
    """(layers, dense ones, layers with latent attention, of these with an indexer of their own, linear attention layers)."""
    n, select = c["num_hidden_layers"], selects(c)
    dense = c["mlp_layer_types"].count("dense") if c.get("mlp_layer_types") else c["first_k_dense_replace"]
    return n, dense, n - select.count(None), select.count(True), select.count(None)


def linears(c):
    """{part.leaf: (in, out, layers, split)} of the linear layers that take adapters, but the routed experts; split: how tensor
    parallelism cuts the weight ('column', 'row', or 'whole' on each rank)."""
    layers, dense, mla, _, kda = kinds(c)
    h, heads, rope = c["hidden_size"], c["num_attention_heads"], c["qk_rope_head_dim"]
    q, kv = c["q_lora_rank"], c["kv_lora_rank"]
    found = {"attention.q_a_proj": (h, q, mla, "whole"), "attention.kv_a_proj_with_mqa": (h, kv + rope, mla, "whole"),
             "attention.q_b_proj": (q, heads * (c["qk_nope_head_dim"] + rope), mla, "column"),
             "attention.kv_b_proj": (kv, heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), mla, "column"),
             "attention.o_proj": (heads * c["v_head_dim"], h, mla, "row")}
    if kda:
        wide, d = c["linear_num_heads"] * c["linear_head_dim"], c["linear_head_dim"]
        found |= {f"linear attention.{x}_proj": (h, wide, kda, "column") for x in "qkv"}
        found |= {f"linear attention.{x}_a_proj": (h, d, kda, "whole") for x in "fg"}
        found |= {f"linear attention.{x}_b_proj": (d, wide, kda, "column") for x in "fg"}
        found |= {"linear attention.b_proj": (h, c["linear_num_heads"], kda, "column"),
                  "linear attention.o_proj": (wide, h, kda, "row")}
    for part, wide, n in (("dense MLP", c["intermediate_size"], dense),
                          ("shared experts", c["moe_intermediate_size"] * c["n_shared_experts"], layers - dense)):
        found |= {f"{part}.{x}_proj": (h, wide, n, "column") for x in ("gate", "up")}
        found[f"{part}.down_proj"] = (wide, h, n, "row")
    return found


def parameters(c, mtp=False):
    """{part: parameters}; the router's correction bias is a buffer and not counted. mtp: also the multi-token-prediction layer of
    the checkpoint, which neither trainer nor sampler loads here: one more MoE layer, a projection [2 h, h] and three norms."""
    c = text(c)
    (layers, dense, mla, indexers, kda), h = kinds(c), c["hidden_size"]
    expert = 3 * h * c["moe_intermediate_size"]
    count = {"embedding": c["vocab_size"] * h, "attention": 0, **({"linear attention": 0} if kda else {})}
    for name, (fan_in, fan_out, n, _) in linears(c).items():
        part = name.partition(".")[0]
        count[part] = count.get(part, 0) + fan_in * fan_out * n
    pool, d = c.get("index_kpool", 0), c["index_head_dim"]
    index = c["q_lora_rank"] * c["index_n_heads"] * d + h * d + 2 * d + h * c["index_n_heads"] + (pool * d + d * h if pool else 0)
    norms = 2 * h * layers + (c["q_lora_rank"] + c["kv_lora_rank"]) * mla + h
    count |= {"indexer": index * indexers, "router": h * c["n_routed_experts"] * (layers - dense),
              "routed experts": expert * c["n_routed_experts"] * (layers - dense), "norms": norms, "head": c["vocab_size"] * h}
    if kda:
        heads, d = c["linear_num_heads"], c["linear_head_dim"]
        count["linear attention"] += kda * (3 * heads * d * c["linear_conv_kernel_dim"] + heads * d + heads + d)
        n = c["hc_mult"]
        count["hyper-connections"] = 2 * layers * ((2 + n) * n * n * h + (2 + n) * n + 3)
    if mtp:
        attention = sum(i * o for name, (i, o, *_) in linears(c).items() if name.startswith("attention"))
        mlp = expert * (c["n_routed_experts"] + c["n_shared_experts"]) + h * c["n_routed_experts"]
        count["MTP layer"] = attention + index + mlp + 2 * h + c["q_lora_rank"] + c["kv_lora_rank"] + 2 * h * h + 3 * h
    return count


def on_gpu(c, tp, ep, pp=1):
    """(parameters outside the routed experts, in the routed experts) on the fullest rank. What tensor parallelism does not split
    (the latent down projections, indexer, router, norms) lies whole on each rank."""
    c = text(c)
    p, (layers, dense, *_) = parameters(c), kinds(c)
    split = sum(i * o * n for i, o, n, how in linears(c).values() if how != "whole")
    body = sum(p.values()) - p["embedding"] - p["head"] - p["routed experts"]
    stage, moe = math.ceil(layers / pp), layers - dense
    ends = p["embedding"] + (p["head"] if pp == 1 else 0)
    return (split / tp + body - split) * stage / layers + ends / tp, p["routed experts"] / ep * min(stage, moe) / moe


def adapter(c, rank, targets, experts, expert_rank=None):
    """A LoRA adapter as (unique parameters, under public names, unique tensors, public tensors). experts: 'shared' (one for all
    routed experts of a layer), 'each' or None; public names repeat a shared one for every expert. Gate and up have an A each."""
    c = text(c)
    layers, dense, *_ = kinds(c)
    chosen = [v for name, v in linears(c).items() if name.rpartition(".")[2] in targets]
    unique, tensors = sum(rank * (i + o) * n for i, o, n, _ in chosen), sum(2 * n for _, _, n, _ in chosen)
    pairs = len({"gate_proj", "up_proj", "down_proj"} & set(targets)) * (layers - dense) if experts else 0
    one, e = pairs * (expert_rank or rank) * (c["hidden_size"] + c["moe_intermediate_size"]), c["n_routed_experts"]
    own = e if experts == "each" else 1
    return unique + one * own, unique + one * e, tensors + 2 * pairs * own, tensors + 2 * pairs * e


def adapter_on_gpu(c, rank, targets, experts, tp, ep, pp=1):
    """(parameters of the adapter on one rank, as common/lora.py splits it; those of them that belong to one expert each)."""
    c = text(c)
    layers, dense, *_ = kinds(c)
    cut = {"whole": (1, 1), "column": (1, tp), "row": (tp, 1)}
    local = sum(rank * (i / cut[how][0] + o / cut[how][1]) * n for name, (i, o, n, how) in linears(c).items()
                if name.rpartition(".")[2] in targets)
    one = len({"gate_proj", "up_proj", "down_proj"} & set(targets)) * rank * (c["hidden_size"] + c["moe_intermediate_size"])
    routed = one * (layers - dense) * {"each": c["n_routed_experts"] / ep, "shared": 1}.get(experts, 0)
    share = math.ceil(layers / pp) / layers
    return (local + routed) * share, routed * share if experts == "each" else 0


def layout_problems(c, tp, ep, pp):
    """Sentences on what of the model a trainer layout does not divide, as common/glm5p3.py will say it."""
    c = text(c)
    n, found = c["num_hidden_layers"], []
    for what, count, by, ranks in (
            ("attention heads", c["num_attention_heads"], "TP", tp), ("vocabulary rows", c["vocab_size"], "TP", tp),
            ("routed experts", c["n_routed_experts"], "EP", ep), ("layers", n, "PP", pp)):
        if count % ranks:
            found.append(f"{count:,} {what} do not divide over {by} {ranks}")
    for first in range(n // pp, n, n // pp) if not n % pp else ():
        if not selects(c)[first]:
            found.append(f"with PP {pp} a stage would start on layer {first}, which reuses an earlier layer's token selection")
    return found


# -- trainer ---------------------------------------------------------------------------------------------------------

def saved(c, full=False):
    """Bytes a token that the forward pass of one layer keeps for the backward pass, bf16, not split: {attention, of it inside the
    core attention, dense MLP, MoE, of it in the routed experts}. Counted from common/ and megatron-core's torch layers and tested
    against autograd. full: training all weights also keeps the input of every weight."""
    c = text(c)
    assert "linear_num_heads" not in c, "only GLM-5.3's layers are counted, not Flash's"
    h, f, k, e, q, kv = (c[n] for n in ("hidden_size", "moe_intermediate_size", "num_experts_per_tok", "n_routed_experts",
                                        "q_lora_rank", "kv_lora_rank"))
    heads, rope, v = c["num_attention_heads"], c["qk_rope_head_dim"], c["v_head_dim"]
    core = 2 * heads * (2 * max(c["qk_nope_head_dim"] + rope, v) + 3 * v) + 4 * heads      # q, k, v, out twice, log of the sum
    norm = 6 * h + (2 * h if full else 0)                    # the input in float32, the output
    attention = norm + 6 * q + 4 * kv + 8 * rope + core + 2 * heads * v + (2 * q + 4 * kv if full else 0)
    routed = k * (2 * h + 10 * f)
    return {"attention": attention, "core": core, "dense": norm + 10 * c["intermediate_size"],
            "moe": norm + routed + 10 * f * c["n_shared_experts"] + 8 * e + 40 * k, "routed": routed}


def activations(c, *, tokens, longest, tp=1, ep=1, pp=1, recompute="none", chunk=2048, full=False):
    """{what: bytes} on a GPU during an update, beside weights and optimizer: what the layers keep for the backward pass, the
    masks of sequences longer than index_topk, the head's logits, one layer's backward pass (the last two not at the same time).
    tokens: of a micro-batch; longest: of its sequences; recompute: none, full (every layer), selective (core attention, MoE)."""
    c = text(c)
    s, (layers, dense, _, indexers, _), h = saved(c, full), kinds(c), c["hidden_size"]
    stage, vocabulary, load = math.ceil(layers / pp), c["vocab_size"] / tp, BUSIEST if ep > 1 else 1
    s["moe"], s["routed"] = s["moe"] + (load - 1) * s["routed"], s["routed"] * load
    # gradients that one layer's backward pass holds at once. An upper estimate: in what was measured the logits were larger
    work = load * c["num_experts_per_tok"] * (4 * h + 8 * c["moe_intermediate_size"])
    n_dense = min(dense, stage)
    if recompute == "none":
        kept = stage * s["attention"] + n_dense * s["dense"] + (stage - n_dense) * s["moe"]
    elif recompute == "selective":
        q_k_v = s["core"] - 4 * c["num_attention_heads"] * (c["v_head_dim"] + 1)
        kept = stage * (s["attention"] - s["core"] + q_k_v) + n_dense * s["dense"] + (stage - n_dense) * 8 * h
        work += s["moe"]
    else:
        kept, work = stage * 2 * h, work + s["attention"] + s["moe"]
    mask = tokens * longest if longest > c["index_topk"] else 0               # bool for each indexer; bf16 for each attention
    masks = mask * math.ceil(indexers / pp) + 2 * mask * (stage if recompute == "none" else 1)
    logits = min(chunk, tokens) * vocabulary
    head = max(18 * logits + 4 * vocabulary * h, 10 * (logits + vocabulary * h)) if full else 18 * logits
    # pipelining keeps a micro-batch for each later stage in flight
    return {"activations": kept * tokens / tp * pp, "attention masks": masks,
            "logits": head + 6 * h * tokens, "one layer's backward pass": work * tokens / tp}


def trainer(c, *, tp, ep, pp=1, dp=1, world=0, lora=None, offload=None, **micro):
    """{what: bytes} of a trainer rank during an update. lora: arguments of adapter_on_gpu (rank, targets, experts), None trains
    all weights: bf16 weights, float32 gradients, masters and Adam's two moments, the last three divided over the ranks with the
    same slice. offload: where the optimizer is on the host, 'masters' (they stay on the GPU) or 'all' (precision-aware)."""
    outside, routed = on_gpu(c, tp, ep, pp)
    world = world or dp * tp * pp
    copies = max(1, world // (ep * pp))                      # ranks with the same experts
    found = {"weights": 2 * (outside + routed)}
    if lora:
        mine, own = adapter_on_gpu(c, **lora, tp=tp, ep=ep, pp=pp)
        found |= {"adapter": 4 * mine, "gradients": 4 * mine, "optimizer": 8 * ((mine - own) / dp + own / copies)}
    else:
        each = {None: 12, "masters": 4, "all": 0}[offload]
        found |= {"gradients": 4 * (outside + routed), "optimizer": each * (outside / dp + routed / copies)}
    now = activations(c, tp=tp, ep=ep, pp=pp, full=not lora, **micro)
    if lora and micro.get("recompute", "none") == "none":
        now["activations"] += 2 * mine                       # the adapter as the forward pass rounds it
    drop = min(("logits", "one layer's backward pass"), key=now.get)          # they are not there at the same time
    return {**found, **{k: v for k, v in now.items() if k != drop}, "context": CONTEXT}


# -- sampler ---------------------------------------------------------------------------------------------------------

def sampler_weights(c, tp, fp8=False):
    """Weights of a vLLM rank, expert parallel over its tp ranks, no MTP layer. fp8: linear layers and experts in blocks of 128 x
    128 with a float32 scale; embedding, head, router, norms and two thirds of the indexer's layers stay bf16, and attention keeps
    kv_b_proj in bf16 too."""
    outside, routed = on_gpu(c, tp, tp)
    if not fp8:
        return 2 * (outside + routed)
    c = text(c)
    narrow = sum(i * o * n / (1 if how == "whole" else tp) for i, o, n, how in linears(c).values())
    narrow += c["q_lora_rank"] * c["index_n_heads"] * c["index_head_dim"] * kinds(c)[3]
    kv_b = math.prod(linears(c)["attention.kv_b_proj"][:3]) / tp
    return 2 * (outside - narrow) + (narrow + routed) * (1 + 4 / 128 ** 2) + 2 * kv_b


def slots(c, rank, tp, n=2):
    """vLLM's adapter slots on one rank (0.32.0, lora/layers): every linear layer, also those that no adapter uses, and every
    routed expert has its own, whatever the experts share. They belong to the weights: sleep moves them to the host."""
    c = text(c)
    leaves = {name.rpartition(".")[2] for name in linears(c)}
    mine, _ = adapter_on_gpu(c, rank, leaves, "each", tp, tp)
    layers, dense, _, indexers, _ = kinds(c)
    h, index = c["hidden_size"], c["index_n_heads"] * c["index_head_dim"]
    mine += rank * (h + c["n_routed_experts"]) * (layers - dense)                                        # router
    mine += rank * (c["q_lora_rank"] + index + 2 * h + c["index_head_dim"] + c["index_n_heads"]) * indexers
    return 2 * n * mine


def kv_per_token(c):
    """KV cache of one token, whole on every rank: the latent and the rotary key in bf16, and the indexer's key in FP8 with a
    float32 scale. GLM-5.3 only: Flash's linear attention has a state for each request."""
    c = text(c)
    _, _, mla, indexers, _ = kinds(c)
    return 2 * (c["kv_lora_rank"] + c["qk_rope_head_dim"]) * mla + (c["index_head_dim"] + 4) * indexers


def graphs(max_num_seqs):
    """vLLM's CUDA graphs: of 1, 2, 4 requests, multiples of 8 below 256 and of 16 from there, up to 2 x max_num_seqs and 512."""
    top = min(2 * max_num_seqs, 512)
    return GRAPHS * sum(n <= top for n in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)))


def sampler(c, *, tp, card, utilization, max_num_seqs, batched, rank=0, fp8=False):
    """{what: bytes} of an awake vLLM rank; `KV cache` is what is left of utilization x card and may be negative. batched: tokens
    of one forward pass; the inputs and outputs of their experts are counted as its working memory."""
    t = text(c)
    work = 2 * batched * t["num_experts_per_tok"] * (2 * t["hidden_size"] + 3 * t["moe_intermediate_size"])
    parts = {"weights": sampler_weights(c, tp, fp8), "adapter slots": slots(c, rank, tp) if rank else 0,
             "CUDA graphs": graphs(max_num_seqs), "working memory": work, "context": CONTEXT}
    return {**parts, "KV cache": utilization * card - sum(parts.values())}


def merged_sync(c, *, tp, ep, sampler_tp, fp8, captured, adapter=0):
    """{what: bytes} on a GPU while whole weights go to an awake sampler without a KV cache, as in SkyRL's full fine-tuning and
    merged LoRA: both copies, one MoE layer's experts unsharded in the sender and in vLLM's reload. captured: largest batch with a
    CUDA graph; adapter: its parameters on the GPU, each with gradient and master in float32."""
    p, (layers, dense, *_) = parameters(c), kinds(text(c))
    layer = 2 * p["routed experts"] / (layers - dense)
    return {"trainer's weights": 2 * sum(on_gpu(c, tp, ep)), "sampler's weights": sampler_weights(c, sampler_tp, fp8),
            "a gathered layer": layer, "a layer in reload": layer, "CUDA graphs": graphs(captured // 2),
            "adapter": 12 * adapter, "context": CONTEXT}


# -- the rest of the machine -----------------------------------------------------------------------------------------

def host(c, *, gpus, tp, ep, pp, sampler_tp, rank):
    """Page-locked bytes of a node while the sampler sleeps: its weights and slots, and the trainer's copy of its frozen weights,
    which stays on the host for good."""
    return PINNED * gpus * (2 * sum(on_gpu(c, tp, ep, pp)) + sampler_weights(c, sampler_tp) + slots(c, rank, sampler_tp))


def sample_seconds(answers, engines, max_num_seqs):
    return max(1, answers / (engines * max_num_seqs)) * ANSWER / REQUEST_TOKENS_PER_S


def step_seconds(*, answers, engines, max_num_seqs, gpus, weights, bundle):
    """{what: seconds} of one step at the rates above; `move` is the sampler's weights to the host and back and the trainer's to
    the GPU. weights: bytes on a GPU; bundle: bytes of the adapter that is published."""
    tokens = answers * (ANSWER + PROMPT) / gpus
    return {"sample": sample_seconds(answers, engines, max_num_seqs), "score": tokens / SCORE_TOKENS_PER_S,
            "update": tokens / UPDATE_TOKENS_PER_S, "move": 3 * weights / COPY_BYTES_PER_S, "publish": bundle / SYNC_BYTES_PER_S}


def too_large(what, parts, room):
    """A sentence when the parts need more than `room`, naming the three largest, else None."""
    total, largest = sum(parts.values()), sorted(parts, key=parts.get)[:-4:-1]
    if total > room:
        named = ", ".join(f"{k} {parts[k] / GIB:.0f}" for k in largest)
        rest = (total - sum(parts[k] for k in largest)) / GIB
        return f"{what} takes {total / GIB:.0f} GiB a GPU of {room / GIB:.0f} that it may take: {named}, all else {rest:.0f}"


def listed(parts):
    """What a GPU holds, as text: the sum and the parts of at least 0.05 GiB."""
    named = ", ".join(f"{k} {v / GIB:.1f}" for k, v in parts.items() if abs(v) >= 0.05 * GIB)
    return f"{sum(parts.values()) / GIB:.0f} GiB: {named}"


def read(folder):
    """config.json of a checkpoint folder, or GLM-5.3's as published where there is no such folder yet. Raises Stop."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        return GLM5P3
    try:
        c = json.loads(file.read_text())
        parameters(c)
    except (ValueError, AttributeError, TypeError) as error:
        raise Stop(f"{file} is no JSON object of a model: {error}") from None
    except KeyError as error:
        raise Stop(f"{file} has no {error}, which the sizes are counted from") from None
    if c.get("quantization_config"):
        raise Stop(f"{folder} is a quantized checkpoint (config.json has quantization_config): give the bfloat16 one")
    return c


def missing(folder):
    """What a checkpoint folder lacks, as a sentence, or None: every file that its index names must be there, whole."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return None if (folder / "model.safetensors").is_file() else f"{folder} has neither {index.name} nor model.safetensors"
    try:
        named = json.loads(index.read_text())
        files, total = sorted(set(named["weight_map"].values())), named.get("metadata", {}).get("total_size", 0)
    except (ValueError, KeyError, AttributeError, TypeError):
        return f"{index} is not an index of safetensors files"
    if lost := [f for f in files if not (folder / f).is_file()]:
        return f"{folder} lacks {len(lost)} of the {len(files)} files that {index.name} names: {', '.join(lost[:3])}" \
            + " ..." * (len(lost) > 3)
    have = sum((folder / f).stat().st_size for f in files)
    return f"{folder} holds {have:,} of the {total:,} bytes that {index.name} promises" if have < total else None
