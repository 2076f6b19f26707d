"""Do the memory numbers of common/memory.py hold? A model of true width and few layers is built on one GPU and trained.

python checks/plan_memory.py                        # LoRA: 1 dense + 2 MoE layers of 256 experts, 65,536 packed tokens
python checks/plan_memory.py --mode full --moe-layers 1 --experts 32
python checks/plan_memory.py --shape flash --moe-layers 3 --recompute selective    # GLM-5.3-Flash: its fourth layer is indexed
python checks/plan_memory.py --shape tiny           # or tiny-flash: on the CPU, all but the peak

Prints predicted and measured bytes and by how many percent the prediction is off: weights, adapter, gradients and optimizer state
as their tensors' bytes; what autograd keeps of the first micro-batch's layers (not with full recomputation; without
flash-linear-attention the core of linear attention is recomputed, for the formulas count its kernels, not torch's); and the peak
of an update (torch.cuda.max_memory_allocated: without the CUDA context). A difference of more than --limit percent in any of them
ends with exit code 1.
"""
import atexit
import dataclasses
import json
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from checks.train_speed import MIX, likelihood  # noqa: E402
from common import activations, cli, memory, size  # noqa: E402

TARGETS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj")
LINEAR = ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj")


@dataclasses.dataclass
class Config:
    shape: str = "glm5p3"            # flash, tiny or tiny-flash
    mode: str = "lora"               # lora or full
    lora_rank: int = 32
    lora_experts: str = "shared"     # one adapter for all routed experts of a layer, or each
    lora_expert_rank: int = 0        # of the routed experts' adapters; 0: lora_rank
    moe_layers: int = 2              # beside one dense layer
    experts: int = 256               # routed experts of a layer
    tokens: int = 65536
    micro_batch: int = 16384         # tokens
    recompute: str = "none"          # none, selective or full
    chunk: int = 2048                # tokens whose logits exist at once
    te: bool = False                 # Transformer Engine's layers, which keep less than the formulas say
    limit: float = 5.0               # percent
    out: str = ""                    # write the result there as JSON


def held(rank):
    """{what: bytes} of a TrainerRank's tensors after an update."""
    trainable = {id(p) for _, p in rank.trainable}
    found = {"weights": sum(p.nbytes for p in rank.model.parameters() if not (rank.lora["rank"] and id(p) in trainable)),
             "gradients": sum(b.grad_data.nbytes for b in rank.ddp.buffers + rank.ddp.expert_parallel_buffers)}
    if rank.lora["rank"]:
        found["adapter"] = sum(p.nbytes for _, p in rank.trainable)
    parameters = {p.untyped_storage().data_ptr() for p in rank.model.parameters()}
    optimizer = {}                   # by storage: float32 masters of float32 parameters are the parameters themselves
    for one in getattr(rank.optimizer, "chained_optimizers", [rank.optimizer]):
        for group in one.optimizer.param_groups:
            for p in group["params"]:
                for t in (p, *(v for k, v in one.optimizer.state[p].items() if k != "step")):
                    optimizer[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    found["optimizer"] = sum(n for at, n in optimizer.items() if at not in parameters)
    return found


def kept(rank, action):
    """Bytes that autograd holds for the backward pass of the first micro-batch's layers, weights and buffers not counted, and the
    micro-batch's (tokens, longest sequence); runs `action`."""
    import torch
    own = {t.untyped_storage().data_ptr() for t in (*rank.model.parameters(), *rank.model.buffers())}
    seen, found, score = {}, [], rank._logp

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and not found:
            seen[storage.data_ptr()] = storage                # held, so that no later one gets its address
        return tensor

    def logp(hidden, micro):
        if not found:
            lengths = micro["psp"].cu_seqlens_q.diff()
            found.extend((sum(s.nbytes() for s in seen.values()), int(lengths.sum()), int(lengths.max())))
            seen.clear()
        return score(hidden, micro)
    rank._logp = logp
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        action()
    rank._logp = score
    return found


def hide_core():
    """The core of linear attention keeps its inputs alone, whatever else is recomputed."""
    from megatron.core import tensor_parallel

    from common.kda import KDA
    core = KDA._torch
    KDA._torch = lambda self, qkv, f, beta, bounds: tensor_parallel.checkpoint(
        lambda *args: core(self, *args, bounds), False, qkv, f, beta)


def shape(cfg):
    """The transformers config of --shape."""
    from checks import tiny
    layers = dict(num_hidden_layers=1 + cfg.moe_layers, first_k_dense_replace=1)
    shared = dict(layers, index_topk_freq=4, index_skip_topk_offset=3)
    if cfg.shape.startswith("tiny"):
        cfg.tokens, cfg.micro_batch, cfg.lora_rank = min(cfg.tokens, 2048), min(cfg.micro_batch, 1024), min(cfg.lora_rank, 8)
        wide = dict(hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_attention_heads=8,
                    num_key_value_heads=8, q_lora_rank=128, kv_lora_rank=64, qk_nope_head_dim=48, v_head_dim=64)
        if cfg.shape == "tiny":
            return tiny.config(**shared, **wide)
        wide |= dict(qk_nope_head_dim=64, linear_num_heads=8, linear_head_dim=64)
        kinds = ["linear_attention", "indexed_attention"] * (1 + cfg.moe_layers)
        return tiny.flash_config(**layers, **wide, layer_types=kinds[:1 + cfg.moe_layers])
    if cfg.shape == "flash":
        from transformers import Glm5NextConfig
        n = 1 + cfg.moe_layers
        sparse = dict(layers, n_routed_experts=cfg.experts, mlp_layer_types=["dense"] + ["sparse"] * cfg.moe_layers,
                      layer_types=["indexed_attention" if i % 4 == 3 else "linear_attention" for i in range(n)])
        return Glm5NextConfig(text_config={**Glm5NextConfig().text_config.to_dict(), "index_kpool": 4, **sparse},
                              vision_config=tiny.FLASH_VISION)
    from transformers import GlmMoeDsaConfig
    return GlmMoeDsaConfig(**shared, n_routed_experts=cfg.experts, topk_method="noaux_tc", scoring_func="sigmoid",
                           indexer_rope_interleave=True, bos_token_id=0, eos_token_id=1, pad_token_id=2)


def main():
    cfg = cli.parse(Config, doc=__doc__)
    if cfg.shape not in ("glm5p3", "flash", "tiny", "tiny-flash") or cfg.mode not in ("lora", "full"):
        raise cli.Stop(f"--shape is {cfg.shape!r} (glm5p3, flash, tiny or tiny-flash), --mode {cfg.mode!r} (lora or full)")
    import numpy as np
    import torch

    from common import trainer
    cuda, flash = torch.cuda.is_available(), cfg.shape.endswith("flash")
    if not cfg.shape.startswith("tiny") and not cuda:
        raise cli.Stop(f"--shape {cfg.shape} needs a GPU; --shape tiny does not")
    hf = shape(cfg)
    folder = Path(tempfile.mkdtemp(prefix="plan-memory-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    hf.save_pretrained(folder)
    trainer.weights.load = lambda model, *_: None             # random weights
    targets = TARGETS + LINEAR * flash
    expert_rank = cfg.lora_expert_rank or None
    lora = dict(rank=cfg.lora_rank, targets=targets, experts=cfg.lora_experts,
                expert_rank=expert_rank) if cfg.mode == "lora" else None
    lengths = [max(8, n * cfg.tokens // 65536) for n, k in MIX for _ in range(k)]
    layout = dict(tp=1, ep=1, lora=lora, recompute=cfg.recompute, chunk=cfg.chunk)
    rank = trainer.TrainerRank(
        0, 1, folder, dtype="bfloat16", max_tokens=cfg.micro_batch, recompute=cfg.recompute, te=cfg.te, logprob_chunk=cfg.chunk,
        **(dict(lora_rank=cfg.lora_rank, lora_alpha=32, lora_targets=targets, experts=cfg.lora_experts,
                lora_expert_rank=expert_rank) if lora else {}))
    rank.load(str(folder / "rendezvous"))
    rng, total = np.random.default_rng(0), sum(lengths)
    batch = {"tokens": [rng.integers(3, rank.hf.vocab_size, n).astype(np.int32) for n in lengths],
             "n_prompt": [min(256, n // 4) for n in lengths], "weight": [1 / total] * len(lengths)}
    hidden = flash and cfg.recompute == "none" and rank.cfg.kda_kernels == "torch"
    if hidden:
        hide_core()
    measured, tokens, longest = kept(rank, lambda: rank.update(batch, likelihood))           # and makes the optimizer's state
    predicted = memory.trainer(hf.to_dict(), **layout, tokens=tokens, longest=longest)
    if hidden:
        s = activations.saved(hf.to_dict())
        predicted["activations"] -= size.kinds(rank.hf.to_dict())[4] * (s["linear core"] - s["linear core's input"]) * tokens
    rows = [(what, predicted[what], found) for what, found in held(rank).items()]
    if cfg.recompute != "full":
        rows.append(("kept for the backward pass", predicted["activations"] + predicted["attention masks"], measured))
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        rank.update(batch, likelihood)
        predicted = memory.trainer(hf.to_dict(), **layout, tokens=cfg.micro_batch, longest=max(lengths))
        predicted.pop("context")
        rows.append(("peak of an update", sum(predicted.values()), torch.cuda.max_memory_allocated()))
    rows = [(what, round(p), m, 100 * (p / m - 1)) for what, p, m in rows]
    print(cli.table([(what, f"{p:,}", f"{m:,}", f"{off:+.2f}") for what, p, m, off in rows],
                    ("what", "predicted, bytes", "measured, bytes", "off, %")), flush=True)
    print("the peak is made of " + memory.listed(predicted) if cuda else "the peak of an update was not measured: no GPU")
    if cfg.out:
        cli.write_atomic(cfg.out, json.dumps({**dataclasses.asdict(cfg), "rows": rows, "predicted": predicted,
                                              "versions": cli.versions()}, indent=1) + "\n")
    torch.distributed.destroy_process_group()
    worst = max(rows, key=lambda row: abs(row[3]))
    if abs(worst[3]) > cfg.limit:
        raise cli.Stop(f"{worst[0]}: predicted {worst[1]:,} bytes, measured {worst[2]:,}, off by {worst[3]:+.1f} %")
    return 0


if __name__ == "__main__":
    cli.run_main(main)
