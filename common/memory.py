"""What a GPU holds of GLM-5.3 in a layout, the host's and the disk's share, and how long a step takes: arithmetic, no torch.

`c` is config.json as a dict. Everything is in bytes, GIB = 2^30. What was measured and what is assumed is said at each constant;
checks/plan_memory.py compares with a GPU.
"""
import math
from types import SimpleNamespace

from common import size
from common.size import adapter_on_gpu, kinds, linears, on_gpu, parameters, text

GIB = 2 ** 30
CONTEXT = 3 * GIB        # of one process on a GPU: CUDA context, NCCL's buffers, the allocator's waste. Assumed, not measured
VISITOR = GIB / 2        # of a process that only reads another's memory there. Assumed, not measured
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
WEIGHTS_BYTES_PER_S = 599 * GIB / 45      # all weights to each node's sampler: Flash's in 45 s, published
SYNC_BYTES_PER_S = 0.62e9 / 13    # an adapter of 0.62 GB in 13 s (#2195, Trajectory field report): handling, not wire


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
    128 with a float32 scale; embedding, head, router, norms, the indexer's key and head weights stay bf16, and attention keeps
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


def sample_seconds(answers, engines, max_num_seqs, cap=ANSWER):
    return max(1, answers / (engines * max_num_seqs)) * min(ANSWER, cap) / REQUEST_TOKENS_PER_S


def step_seconds(*, answers, engines, max_num_seqs, gpus, weights, bundle, cap=ANSWER):
    """{what: seconds} of one step at the rates above; `move` is the sampler's weights to the host and back and the trainer's to
    the GPU. weights: bytes on a GPU; bundle: bytes of the adapter that is published; cap: tokens of the longest answer."""
    tokens = answers * (min(ANSWER, cap) + PROMPT) / gpus
    return {"sample": sample_seconds(answers, engines, max_num_seqs, cap), "score": tokens / SCORE_TOKENS_PER_S,
            "update": tokens / UPDATE_TOKENS_PER_S, "move": 3 * weights / COPY_BYTES_PER_S, "publish": bundle / SYNC_BYTES_PER_S}


def colocated(c, cfg, problems=30):
    """A LoRA run whose trainer and sampler take turns on the same GPUs, unless the sampler has nodes of its own; cfg: a recipe's
    Config. In what it returns `update`, `sampling` and `sampler` are {part: bytes} of a GPU, the first two with what the resting
    one leaves there, and a publish."""
    longest, card = cfg.max_prompt_tokens + cfg.max_response_tokens, cfg.gpu_memory_gib * GIB
    lora = dict(rank=cfg.lora_rank, targets=cfg.lora_targets, experts=cfg.lora_experts)
    unique, public, tensors, _ = size.adapter(c, **lora)
    train = trainer(c, tp=cfg.tp, ep=cfg.ep, pp=cfg.pp, dp=cfg.dp, lora=lora, recompute=cfg.recompute, chunk=cfg.logprob_chunk,
                    tokens=max(cfg.max_tokens_per_micro_batch, longest), longest=longest)
    sample = sampler(c, tp=cfg.sampler_tp, card=card, utilization=cfg.gpu_memory_utilization, max_num_seqs=cfg.max_num_seqs,
                     batched=max(longest + 1, 2048), rank=cfg.lora_rank)
    seconds = step_seconds(answers=cfg.prompts_per_step * cfg.group_size, engines=cfg.engines, max_num_seqs=cfg.max_num_seqs,
                           gpus=cfg.trainer_ranks, weights=sample["weights"], bundle=2 * unique, cap=cfg.max_response_tokens)
    evals = 1 + -(-cfg.steps // cfg.eval_every)
    evaluation = sample_seconds(problems * cfg.eval_samples, cfg.engines, cfg.max_num_seqs, cfg.max_response_tokens)
    m = SimpleNamespace(
        update=train | {f"sampler's {k}": sample[k] for k in ("CUDA graphs", "context")},
        sampling=sample | {"trainer's adapter and optimizer": sum(train[k] for k in ("adapter", "gradients", "optimizer")),
                           "trainer's context": train["context"], "adapter gathered and packed": 4 * unique},
        sampler=sample | {"KV cache": longest * kv_per_token(c)},                         # with room for one longest answer
        card=(1 - SPARE) * card, engine=cfg.gpu_memory_utilization * card, publish=None, sent=unique, adapter=unique,
        tensors=tensors,
        kv_tokens=sample["KV cache"] / kv_per_token(c), kv_answers=sample["KV cache"] / kv_per_token(c) / longest,
        host=host(c, gpus=cfg.gpus_per_node, tp=cfg.tp, ep=cfg.ep, pp=cfg.pp, sampler_tp=cfg.sampler_tp, rank=cfg.lora_rank),
        # every rank's parameters, masters and two moments; one checkpoint more while the newest is written
        checkpoints=(cfg.keep + 1) * cfg.trainer_ranks * (train["adapter"] + 1.5 * train["optimizer"]), export=4 * public,
        seconds=seconds, evals=evals, problems=problems, hours=(cfg.steps * sum(seconds.values()) + evals * evaluation) / 3600)
    return _apart(m, cfg, train, sample, 2 * unique) if cfg.sampler_nodes else m


def whole(c, cfg, problems=30):
    """A run that hands over all weights, trained or with an adapter merged into them; trainer and sampler take turns on the same
    GPUs. As `colocated`, with `publish`: the sampler awake, the trainer's weights on the host, buckets on their way and one MoE
    layer, not divided, waiting in vLLM's reload. problems: in an evaluation."""
    longest, card = cfg.max_prompt_tokens + cfg.max_response_tokens, cfg.gpu_memory_gib * GIB
    lora = offload = None
    if hasattr(cfg, "lora_rank"):
        lora = dict(rank=cfg.lora_rank, targets=cfg.lora_targets, experts=cfg.lora_experts)
    else:
        offload = {(True, True): "all", (True, False): "masters"}.get((cfg.optimizer_offload > 0, cfg.precision_aware))
    train = trainer(c, tp=cfg.tp, ep=cfg.ep, pp=cfg.pp, dp=cfg.dp, lora=lora, offload=offload, recompute=cfg.recompute,
                    chunk=cfg.logprob_chunk, tokens=max(cfg.max_tokens_per_micro_batch, longest), longest=longest)
    sample = sampler(c, tp=cfg.sampler_tp, card=card, utilization=cfg.gpu_memory_utilization, max_num_seqs=cfg.max_num_seqs,
                     batched=max(longest + 1, 2048), fp8=cfg.sampler_fp8 != "none")
    parts, (layers, dense, *_), count = parameters(c), kinds(text(c)), sum(parameters(c).values())
    resting = {"trainer's optimizer": train["optimizer"] + (train["adapter"] + train["gradients"] if lora else 0),
               "trainer's context": train["context"]}
    seconds = step_seconds(answers=cfg.prompts_per_step * cfg.group_size, engines=cfg.engines, max_num_seqs=cfg.max_num_seqs,
                           gpus=cfg.trainer_ranks, weights=sample["weights"], bundle=0, cap=cfg.max_response_tokens)
    seconds["publish"] = 2 * count / WEIGHTS_BYTES_PER_S
    evals = 1 + -(-cfg.steps // cfg.eval_every)
    evaluation = sample_seconds(problems * cfg.eval_samples, cfg.engines, cfg.max_num_seqs, cfg.max_response_tokens)
    # megatron-core's optimizer on the host: master, two moments and a page-locked gradient in float32
    optimizer = (12 + 4 * PINNED) * count * cfg.optimizer_offload / cfg.nodes if offload else 0
    m = SimpleNamespace(
        update=train | {f"sampler's {k}": sample[k] for k in ("CUDA graphs", "context")}, sampling=sample | resting,
        publish=sample | resting | {"buckets": 3 * cfg.bucket_gib * GIB,
                                    "a layer in reload": 2 * parts["routed experts"] / (layers - dense),
                                    # on the node's first GPU, from which all ranks of an engine read
                                    "contexts of other ranks": (cfg.sampler_tp - 1) * VISITOR},
        sampler=sample | {"KV cache": longest * kv_per_token(c)},                         # with room for one longest answer
        card=(1 - SPARE) * card, engine=cfg.gpu_memory_utilization * card, sent=count, tensors=None,
        kv_tokens=sample["KV cache"] / kv_per_token(c), kv_answers=sample["KV cache"] / kv_per_token(c) / longest,
        host=PINNED * cfg.gpus_per_node * (2 * sum(on_gpu(c, cfg.tp, cfg.ep, cfg.pp)) + sample["weights"]) + optimizer,
        # bf16 weights, float32 masters and two moments; of an adapter every rank's parameters, masters and moments
        checkpoints=(cfg.keep + 1) * (cfg.save_every > 0) * (
            cfg.trainer_ranks * (train["adapter"] + 1.5 * train["optimizer"]) if lora else 14 * count),
        export=4 * size.adapter(c, **lora)[1] if lora else 2 * count, adapter=size.adapter(c, **lora)[0] if lora else 0,
        seconds=seconds, evals=evals, problems=problems,
        hours=(cfg.steps * sum(seconds.values()) + evals * evaluation) / 3600)
    return _apart(m, cfg, train, sample, 2 * cfg.bucket_gib * GIB, optimizer) if cfg.sampler_nodes else m


def _apart(m, cfg, train, sample, arriving, host=0):
    """`m` for a sampler with nodes of its own: neither rests on the other's GPUs or sleeps on its host."""
    m.update, m.sampling, m.host = train, sample | {"what arrives": arriving}, host
    m.publish = m.publish and {k: v for k, v in m.publish.items() if not k.startswith(("trainer's", "contexts of"))}
    m.hours -= cfg.steps * m.seconds.pop("move") / 3600
    return m


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
