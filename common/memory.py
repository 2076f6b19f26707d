"""What a GPU holds of GLM-5.3 or Flash in a layout, and the host's and the disk's share: arithmetic, no torch.

`c` is config.json as a dict. Everything is in bytes, GIB = 2^30. What was measured and what is assumed is said at each constant;
checks/plan_memory.py compares with a GPU.
"""
import math
from types import SimpleNamespace

from common import size, speed
from common.activations import activations
from common.size import adapter_on_gpu, kinds, linears, on_gpu, parameters, single_on_gpu, text, weight_bytes

GIB = 2 ** 30
CONTEXT = 3 * GIB        # of one process on a GPU: CUDA context, NCCL's buffers, the allocator's waste. Assumed, not measured
VISITOR = GIB / 2        # of a process that only reads another's memory there. Assumed, not measured
GRAPHS = 14 * GIB / 51   # one batch size that vLLM captures: 14 GiB for the 51 up to 512 (SkyRL's notes); they survive its sleep
SPARE = 0.05             # of a card that a plan leaves free: known peaks lie mostly within 5 % of the formulas (checks/test_plan)
STATES = 3               # of a request, at most: vLLM's prefix cache holds two beside the running one (mamba_cache_mode 'align')


# -- trainer ---------------------------------------------------------------------------------------------------------

def trainer(c, *, tp, ep, pp=1, dp=1, world=0, lora=None, offload=None, **micro):
    """{what: bytes} of a trainer rank during an update. lora: arguments of adapter_on_gpu (rank, targets, experts), None trains
    all weights: bf16 weights, float32 gradients, masters and Adam's two moments, the last three divided over the ranks with the
    same slice. offload: where the optimizer is on the host, 'masters' (they stay on the GPU) or 'all' (precision-aware)."""
    outside, routed = on_gpu(c, tp, ep, pp)
    world = world or dp * tp * pp
    copies = max(1, world // (ep * pp))                      # ranks with the same experts
    found = {"weights": weight_bytes(c, tp, ep, pp)}
    if lora:
        mine, own = adapter_on_gpu(c, **lora, tp=tp, ep=ep, pp=pp)
        found |= {"adapter": 4 * mine, "gradients": 4 * mine, "optimizer": 8 * ((mine - own) / dp + own / copies)}
    else:
        each = {None: 12, "masters": 4, "all": 0}[offload]
        own = 4 * single_on_gpu(c, tp, pp) / dp if each else 0                # float32 parameters are their own masters
        found |= {"gradients": 4 * (outside + routed), "optimizer": each * (outside / dp + routed / copies) - own}
    now = activations(c, tp=tp, ep=ep, pp=pp, full=not lora, **micro)
    if lora and micro.get("recompute", "none") != "full":    # the adapter as the forward pass rounds it
        kept = lora if micro.get("recompute", "none") == "none" else dict(
            lora, experts=None, targets=[t for t in lora["targets"] if t not in ("gate_proj", "up_proj", "down_proj")])
        now["activations"] += 2 * adapter_on_gpu(c, **kept, tp=tp, ep=ep, pp=pp)[0]
    drop = min(("logits", "one layer's backward pass"), key=now.get)          # they are not there at the same time
    return {**found, **{k: v for k, v in now.items() if k != drop}, "context": CONTEXT}


# -- sampler ---------------------------------------------------------------------------------------------------------

def sampler_weights(c, tp, fp8=False):
    """Weights of a vLLM rank, expert parallel over its tp ranks, no MTP layer. fp8: linear layers and experts in blocks of 128 x
    128 with a float32 scale; embedding, head, router, norms, the indexer's key and head weights stay bf16, and attention keeps
    kv_b_proj in bf16 too."""
    if not fp8:
        return weight_bytes(c, tp, tp)
    outside, routed = on_gpu(c, tp, tp)
    c = text(c)
    if "linear_num_heads" in c:                               # its attention stays bf16
        mlp = {k: v for k, v in linears(c).items() if k.startswith(("dense", "shared"))}
        narrow = sum(i * o * n / tp for i, o, n, _ in mlp.values())
        return 2 * (outside - narrow + single_on_gpu(c, tp)) + (narrow + routed) * (1 + 4 / 128 ** 2)
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
    layers, dense, _, indexers, kda = kinds(c)
    h, index = c["hidden_size"], c["index_n_heads"] * c["index_head_dim"]
    mine += rank * (h + c["n_routed_experts"]) * (layers - dense)                                        # router
    mine += rank * (c["q_lora_rank"] + index) * indexers
    if kda:                                                   # three convolutions
        wide = c["linear_num_heads"] * c["linear_head_dim"]
        mine += 3 * rank * (c["linear_conv_kernel_dim"] + wide / tp) * kda
    else:                                                     # Flash's index keys and head weights have none
        mine += rank * (2 * h + c["index_head_dim"] + c["index_n_heads"]) * indexers
    return 2 * n * mine


def kv_per_token(c):
    """KV cache of one token, whole on every rank: the latent and the rotary key in bf16, and the indexer's key (Flash: one for a
    pool of tokens) in FP8 with a float32 scale."""
    c = text(c)
    _, _, mla, indexers, _ = kinds(c)
    return 2 * (c["kv_lora_rank"] + c["qk_rope_head_dim"]) * mla + (c["index_head_dim"] + 4) * indexers / c.get("index_kpool", 1)


def state(c, tp):
    """What a request holds in the KV cache of a rank whatever its length: for each linear attention layer the last inputs of the
    convolutions, bf16, and the state, float32 (vLLM 0.32.0: MambaStateShapeCalculator.kda_state_shape), STATES times. The
    rounding of blocks to a common size is not counted."""
    c = text(c)
    kda = kinds(c)[4]
    if not kda:
        return 0
    heads, d = c["linear_num_heads"] / tp, c["linear_head_dim"]
    return STATES * kda * (2 * 3 * heads * d * (c["linear_conv_kernel_dim"] - 1) + 4 * heads * d * d)


def answers_in(cache, c, tp, longest):
    """How many answers of full length a KV cache of so many bytes holds."""
    return cache / (longest * kv_per_token(c) + state(c, tp))


def graphs(max_num_seqs):
    """vLLM's CUDA graphs: of 1, 2, 4 requests, multiples of 8 below 256 and of 16 from there, up to 2 x max_num_seqs and 512."""
    top = min(2 * max_num_seqs, 512)
    return GRAPHS * sum(n <= top for n in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)))


def sampler(c, *, tp, card, utilization, max_num_seqs, batched, rank=0, fp8=False):
    """{what: bytes} of an awake vLLM rank; `KV cache` is what is left of utilization x card and may be negative. batched: tokens
    of one forward pass; the inputs and outputs of their experts are counted as its working memory."""
    t = text(c)
    work = 2 * batched * t["num_experts_per_tok"] * (2 * t["hidden_size"] + 3 * t["moe_intermediate_size"])
    if "linear_num_heads" in t:                               # FlashKDA's two buffers of states; the streams of two layers
        work += 8 * max_num_seqs * t["linear_num_heads"] / tp * t["linear_head_dim"] ** 2
        work += 4 * batched * t["hc_mult"] * t["hidden_size"]
    parts = {"weights": sampler_weights(c, tp, fp8), "adapter slots": slots(c, rank, tp) if rank else 0,
             "CUDA graphs": graphs(max_num_seqs), "working memory": work, "context": CONTEXT}
    return {**parts, "KV cache": utilization * card - sum(parts.values())}


def merged_sync(c, *, tp, ep, sampler_tp, fp8, captured, adapter=0):
    """{what: bytes} on a GPU while whole weights go to an awake sampler without a KV cache, as in SkyRL's full fine-tuning and
    merged LoRA: both copies, one MoE layer's experts unsharded in the sender and in vLLM's reload. captured: largest batch with a
    CUDA graph; adapter: its parameters on the GPU, each with gradient and master in float32."""
    p, (layers, dense, *_) = parameters(c), kinds(text(c))
    layer = 2 * p["routed experts"] / (layers - dense)
    return {"trainer's weights": weight_bytes(c, tp, ep), "sampler's weights": sampler_weights(c, sampler_tp, fp8),
            "a gathered layer": layer, "a layer in reload": layer, "CUDA graphs": graphs(captured // 2),
            "adapter": 12 * adapter, "context": CONTEXT}


# -- the rest of the machine -----------------------------------------------------------------------------------------

def pinned(c, ep):
    """By how much page-locked memory grows: torch rounds a tensor's up to a power of two, and nearly all of the weights are in
    stacks of a rank's experts, whose bytes are a power of two times 3 (GLM-5.3: 4 / 3) or 9 (Flash: 16 / 9)."""
    c = text(c)
    stack = 2 * c["n_routed_experts"] // ep * c["hidden_size"] * c["moe_intermediate_size"]
    return 2 ** math.ceil(math.log2(stack)) / stack


def host(c, *, gpus, tp, ep, pp, sampler_tp, rank):
    """Page-locked bytes of a node while the sampler sleeps: its weights and slots, and the trainer's copy of its frozen weights,
    which stays on the host for good."""
    sampler = sampler_weights(c, sampler_tp) + slots(c, rank, sampler_tp)
    return gpus * (pinned(c, ep) * weight_bytes(c, tp, ep, pp) + pinned(c, sampler_tp) * sampler)


def adapter_of(cfg):
    """The arguments of size.adapter in a recipe's Config."""
    return dict(rank=cfg.lora_rank, targets=cfg.lora_targets, experts=cfg.lora_experts,
                expert_rank=getattr(cfg, "lora_expert_rank", None))


def colocated(c, cfg, problems=30):
    """A LoRA run whose trainer and sampler take turns on the same GPUs, unless the sampler has nodes of its own; cfg: a recipe's
    Config. In what it returns `update`, `sampling` and `sampler` are {part: bytes} of a GPU, the first two with what the resting
    one leaves there, and a publish."""
    longest, card = cfg.max_prompt_tokens + cfg.max_response_tokens, cfg.gpu_memory_gib * GIB
    lora = adapter_of(cfg)
    unique, public, tensors, _ = size.adapter(c, **lora)
    train = trainer(c, tp=cfg.tp, ep=cfg.ep, pp=cfg.pp, dp=cfg.dp, lora=lora, recompute=cfg.recompute, chunk=cfg.logprob_chunk,
                    tokens=max(cfg.max_tokens_per_micro_batch, longest), longest=longest)
    sample = sampler(c, tp=cfg.sampler_tp, card=card, utilization=cfg.gpu_memory_utilization, max_num_seqs=cfg.max_num_seqs,
                     batched=max(longest + 1, 2048), rank=cfg.lora_rank)
    seconds = speed.step(c, cfg, sample["weights"], lora=True)
    seconds["publish"] = 2 * unique / speed.of(c).sync
    evals, answers = 1 + -(-cfg.steps // cfg.eval_every), answers_in(sample["KV cache"], c, cfg.sampler_tp, longest)
    evaluation = speed.sample(c, cfg, problems * cfg.eval_samples)
    m = SimpleNamespace(
        update=train | {f"sampler's {k}": sample[k] for k in ("CUDA graphs", "context")},
        sampling=sample | {"trainer's adapter and optimizer": sum(train[k] for k in ("adapter", "gradients", "optimizer")),
                           "trainer's context": train["context"], "adapter gathered and packed": 4 * unique},
        sampler=sample | {"KV cache": longest * kv_per_token(c) + state(c, cfg.sampler_tp)},          # of one longest answer
        card=(1 - SPARE) * card, engine=cfg.gpu_memory_utilization * card, publish=None, sent=unique, adapter=unique,
        tensors=tensors,
        kv_tokens=answers * longest, kv_answers=answers, state=state(c, cfg.sampler_tp),
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
        lora = adapter_of(cfg)
    else:
        offload = {(True, True): "all", (True, False): "masters"}.get((cfg.optimizer_offload > 0, cfg.precision_aware))
    train = trainer(c, tp=cfg.tp, ep=cfg.ep, pp=cfg.pp, dp=cfg.dp, lora=lora, offload=offload, recompute=cfg.recompute,
                    chunk=cfg.logprob_chunk, tokens=max(cfg.max_tokens_per_micro_batch, longest), longest=longest)
    sample = sampler(c, tp=cfg.sampler_tp, card=card, utilization=cfg.gpu_memory_utilization, max_num_seqs=cfg.max_num_seqs,
                     batched=max(longest + 1, 2048), fp8=cfg.sampler_fp8 != "none")
    parts, (layers, dense, *_), count = parameters(c), kinds(text(c)), sum(parameters(c).values())
    resting = {"trainer's optimizer": train["optimizer"] + (train["adapter"] + train["gradients"] if lora else 0),
               "trainer's context": train["context"]}
    seconds = speed.step(c, cfg, sample["weights"], lora=bool(lora))
    seconds["publish"] = 2 * count / (speed.MERGED_BYTES_PER_S if lora else speed.WEIGHTS_BYTES_PER_S)
    evals, answers = 1 + -(-cfg.steps // cfg.eval_every), answers_in(sample["KV cache"], c, cfg.sampler_tp, longest)
    evaluation = speed.sample(c, cfg, problems * cfg.eval_samples)
    # megatron-core's optimizer on the host: master, two moments and a page-locked gradient in float32
    optimizer = (12 + 4 * pinned(c, cfg.ep)) * count * cfg.optimizer_offload / cfg.nodes if offload else 0
    m = SimpleNamespace(
        update=train | {f"sampler's {k}": sample[k] for k in ("CUDA graphs", "context")}, sampling=sample | resting,
        publish=sample | resting | {"buckets": 3 * cfg.bucket_gib * GIB,
                                    "a layer in reload": 2 * parts["routed experts"] / (layers - dense),
                                    # on the node's first GPU, from which all ranks of an engine read
                                    "contexts of other ranks": (cfg.sampler_tp - 1) * VISITOR},
        sampler=sample | {"KV cache": longest * kv_per_token(c) + state(c, cfg.sampler_tp)},          # of one longest answer
        card=(1 - SPARE) * card, engine=cfg.gpu_memory_utilization * card, sent=count, tensors=None,
        kv_tokens=answers * longest, kv_answers=answers, state=state(c, cfg.sampler_tp),
        host=optimizer + cfg.gpus_per_node * (pinned(c, cfg.ep) * weight_bytes(c, cfg.tp, cfg.ep, cfg.pp)
                                              + pinned(c, cfg.sampler_tp) * sample["weights"]),
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
