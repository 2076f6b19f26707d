"""How fast does the trainer learn at GLM-5.3's true width on one GPU? Tokens a second, share of the card's matrix peak, memory.

python checks/train_speed.py                        # LoRA: 1 dense + 2 MoE layers of 256 experts, 65,536 packed tokens
python checks/train_speed.py --mode full --moe-layers 1 --experts 32      # full fine-tuning: with float32 gradients and Adam
python checks/train_speed.py --shape tiny --tokens 4096                   # the script itself, anywhere

One measurement is the recipe's own `update`: forward, backward, optimizer step. Its floating-point operations are counted from
the config (`flops`), the peak is measured beside it on one large bf16 matrix product. Weights are random: speed does not
depend on them, but the experts' load does a little.
"""
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli  # noqa: E402

MIX = ((1024, 8), (2048, 4), (4096, 4), (8192, 4))      # (tokens of a sequence, how many) in 65,536: an eighth to a half each


@dataclasses.dataclass
class Config:
    shape: str = "glm5p3"            # or tiny
    mode: str = "lora"               # lora (rank 32, shared by the experts) or full
    moe_layers: int = 2
    experts: int = 256               # routed experts of a layer; 8 are used for each token whatever their number
    tokens: int = 65536
    micro_batch: int = 16384         # tokens
    recompute: str = "none"          # none or full
    vocabulary: int = 154880
    backend: str = "torch"           # torch, te (Transformer Engine) or te-fp8 (its block-scaled FP8 products)
    rounds: int = 3
    profile: bool = False            # also the ten kernels that take longest
    out: str = ""                    # write the result there as JSON


def flops(hf, lengths, n_response, mode):
    """Floating-point operations of one update: 2 for each weight that a token meets in the forward pass, twice that for the
    backward pass (once with frozen weights: only the gradient of the input), attention over the tokens that it may see."""
    h, heads = hf.hidden_size, hf.num_attention_heads
    attention = h * hf.q_lora_rank + hf.q_lora_rank * heads * hf.qk_head_dim + h * (hf.kv_lora_rank + hf.qk_rope_head_dim) \
        + hf.kv_lora_rank * heads * (hf.qk_nope_head_dim + hf.v_head_dim) + heads * hf.v_head_dim * h
    dense = 3 * h * hf.intermediate_size
    moe = 3 * h * hf.moe_intermediate_size * (hf.num_experts_per_tok + hf.n_shared_experts) + h * hf.n_routed_experts
    n_dense = hf.first_k_dense_replace
    linear = hf.num_hidden_layers * attention + n_dense * dense + (hf.num_hidden_layers - n_dense) * moe
    seen = sum(sum(min(t, hf.index_topk) for t in range(1, n + 1)) for n in lengths)
    core = hf.num_hidden_layers * heads * (hf.qk_head_dim + hf.v_head_dim) * seen * 2
    pairs = sum(n * (n + 1) // 2 for n in lengths if n > hf.index_topk)
    full = sum(t == "full" for t in hf.indexer_types)
    indexer = full * (hf.index_n_heads * hf.index_head_dim * pairs + sum(n for n in lengths if n > hf.index_topk)
                      * (hf.q_lora_rank * hf.index_n_heads * hf.index_head_dim + h * (hf.index_head_dim + hf.index_n_heads))) * 2
    head = n_response * h * hf.vocab_size * 2
    backward = 1 if mode == "lora" else 2
    return (sum(lengths) * linear * 2) * (1 + backward) + core * 3 + indexer + head * (1 + backward)


def matrix_peak(n=8192, rounds=20):
    """FLOP/s of a bf16 matrix product on random data."""
    import torch
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        a @ b
    torch.cuda.synchronize()
    return 2 * n ** 3 * rounds / (time.perf_counter() - start)


def likelihood(logp, entropy, mb):
    return -(mb["weight"] * logp).sum(), {}


def main():
    cfg = cli.parse(Config, doc=__doc__)
    if cfg.mode not in ("lora", "full") or cfg.shape not in ("glm5p3", "tiny"):
        raise cli.Stop(f"--mode is {cfg.mode!r} (lora or full), --shape {cfg.shape!r} (glm5p3 or tiny)")
    if cfg.backend not in ("torch", "te", "te-fp8"):
        raise cli.Stop(f"--backend is {cfg.backend!r}: torch, te or te-fp8")
    import numpy as np
    import torch

    from checks import tiny
    from common import trainer
    cuda = torch.cuda.is_available()
    if cfg.shape == "glm5p3" and not cuda:
        raise cli.Stop("--shape glm5p3 needs a GPU; --shape tiny does not")
    from transformers import GlmMoeDsaConfig
    shared = dict(num_hidden_layers=1 + cfg.moe_layers, first_k_dense_replace=1, index_topk_freq=4, index_skip_topk_offset=3)
    hf = tiny.config(**shared, index_topk=256) if cfg.shape == "tiny" else GlmMoeDsaConfig(
        **shared, n_routed_experts=cfg.experts, vocab_size=cfg.vocabulary, topk_method="noaux_tc", scoring_func="sigmoid",
        indexer_rope_interleave=True, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    folder = Path(tempfile.mkdtemp(prefix="train-speed-"))
    hf.save_pretrained(folder)
    trainer.weights.load = lambda model, *_: None             # random weights; a checkpoint of this width would take the disk
    lora = dict(lora_rank=32, lora_alpha=32, experts="shared", lora_targets=[t for t in trainer.lora.TARGETS if t != "kv_b_proj"])
    rank = trainer.TrainerRank(0, 1, folder, dtype="bfloat16" if cuda else "float32", max_tokens=cfg.micro_batch,
                               recompute=cfg.recompute, te=cfg.backend != "torch",
                               fp8="blockwise" if cfg.backend == "te-fp8" else None, **(lora if cfg.mode == "lora" else {}))
    rank.load(str(folder / "rendezvous"))
    scale = cfg.tokens / sum(n * k for n, k in MIX)
    lengths = [max(8, int(n * min(1, scale))) for n, k in MIX for _ in range(max(1, int(k * max(1, scale))))]
    rng = np.random.default_rng(0)
    n_prompt = [min(256, n // 4) for n in lengths]
    tokens = sum(lengths)
    batch = {"tokens": [rng.integers(3, hf.vocab_size, n).astype(np.int32) for n in lengths], "n_prompt": n_prompt,
             "weight": [1 / tokens] * len(lengths)}
    work = flops(hf, lengths, tokens - sum(n_prompt), cfg.mode)
    parameters = sum(p.numel() for p in rank.model.parameters())
    result = {**dataclasses.asdict(cfg), "tokens": tokens, "sequences": len(lengths), "parameters": parameters,
              "trainable": sum(p.numel() for _, p in rank.trainable), "tflop": work / 1e12, "versions": cli.versions()}
    print(json.dumps({k: v for k, v in result.items() if k != "versions"}), flush=True)

    def timed(action):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        start = time.perf_counter()
        action()
        if cuda:
            torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() if cuda else 0
        return time.perf_counter() - start, peak, peak - before

    timed(lambda: rank.update(batch, likelihood))             # kernels are chosen and compiled
    seconds, peaks, _ = zip(*(timed(lambda: rank.update(batch, likelihood)) for _ in range(cfg.rounds)))
    scoring, _, extra = timed(lambda: rank.logprobs(batch))
    median = statistics.median(seconds)
    result |= {"update_s": seconds, "tokens_per_s": tokens / median, "tflops": work / median / 1e12, "peak_bytes": max(peaks),
               "logprobs_s": scoring, "logprobs_tokens_per_s": tokens / scoring, "logprobs_extra_bytes": extra}
    if cuda:
        result["matrix_peak_tflops"] = matrix_peak() / 1e12
        result["share_of_peak"] = result["tflops"] / result["matrix_peak_tflops"]
    if cfg.profile:
        result["profile"] = profiled(lambda: rank.update(batch, likelihood))
    print(json.dumps({k: v for k, v in result.items() if k not in ("versions", "profile")}, indent=1), flush=True)
    if cfg.out:
        cli.write_atomic(cfg.out, json.dumps(result, indent=1) + "\n")
    torch.distributed.destroy_process_group()
    return 0


def profiled(action):
    """[(kernel or operator, seconds, share)] of the ten that take longest in one run."""
    import torch
    from torch.profiler import ProfilerActivity, profile
    cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as prof:
        action()
        if cuda:
            torch.cuda.synchronize()
    events = prof.key_averages()
    key = "self_device_time_total" if cuda else "self_cpu_time_total"
    total = sum(getattr(e, key) for e in events)
    rows = [(e.key[:90], getattr(e, key) / 1e6, getattr(e, key) / total, e.count)
            for e in sorted(events, key=lambda e: -getattr(e, key))[:16] if not e.key.startswith("ProfilerStep")]
    head = ("kernel or operator", "seconds", "%", "calls")
    print(cli.table([(n, s, 100 * share, c) for n, s, share, c in rows], head), flush=True)
    return rows


if __name__ == "__main__":
    cli.run_main(main)
