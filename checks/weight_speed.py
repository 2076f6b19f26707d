"""How fast do all weights reach vLLM? A real trainer rank hands them to a real engine by sync.publish, at GLM-5.3's true width.

python checks/weight_speed.py                          # bf16, 1 dense + 1 MoE layer of 32 experts (3.7B parameters), one GPU
python checks/weight_speed.py --fp8 fp8_per_block      # the sampler casts them to FP8 as they arrive
python checks/weight_speed.py --merge                  # a LoRA adapter: handed over as it is, then merged into all weights
python checks/weight_speed.py --shape tiny --bucket-gib 0.0002     # the script itself, anywhere

The ways, each published once (kernels are compiled) and `rounds` times more:
adapter   with --merge: the adapter alone, as sync_speed.py's `ours`, to an engine with adapter slots (in bf16, whatever --fp8 is)
card      by CUDA IPC, the trainer's weights on the GPU that the engine uses, too
host      the same with the trainer's weights parked on the host, from where it reads them: the recipes' order where trainer and
          sampler take turns on their GPUs
network   with a second GPU: the engine is there, weights come by NCCL (common/network.py); without any GPU, by gloo

A publish is split into `offer` (the trainer gathers, merges, packs and sums each bucket), `stage` (the engine copies, checks and
loads it; kernels may still run when it answers) and `commit` (the rest of vLLM's reload, and waiting for it). sync.publish itself
compares the fingerprints of what left and what arrived. Before each publish the trainer's weights are changed; the engine's
log-probabilities must move, far beyond those of the same version asked twice, and their gap to the trainer's is reported: random
weights amplify every rounding, so it is no limit for real ones. The base folder has a config and an index with the names that
transformers gives the tensors, and no weights: the trainer's are random, the engine's dummies.
"""
import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from checks.local import free_worker  # noqa: E402
from checks.sync_speed import GLM5P3, Timed, apart  # noqa: E402
from common import cli, size, speed  # noqa: E402

LEFT_OUT = ("GLM-5.3's bytes at this run's seconds a byte: all of them pass one sending GPU of a node and each GPU of an engine, "
            "one bucket after the other. Left out: gathering every tensor from 64 trainer ranks of 8 nodes before it is packed; "
            "8 ranks of an engine that read one card's buffer at once; that routed experts, more and smaller tensors, are a "
            "smaller share of the bytes here. Counted too much: a rank of 8 loads an eighth of the experts, this one all.")
STEPS = ("offer", "stage", "commit")
idle = []                                                     # engines that are done with


@dataclasses.dataclass
class Config:
    shape: str = "glm5p3"            # or tiny
    moe_layers: int = 1              # one dense layer comes before them
    experts: int = 32                # routed experts of a layer; GLM-5.3 has 256
    vocabulary: int = 154880
    merge: bool = False              # the trainer has an adapter (rank 32, shared by the experts), which is merged on its way
    fp8: str = "none"                # the sampler's weights: fp8_per_block, fp8 (per tensor) or none
    kernels: str = "auto"            # vLLM's linear and expert kernels: with fp8_per_block auto compiles CUDA for minutes; triton
    bucket_gib: float = 1.0          # of weights that travel at a time
    rounds: int = 3                  # of each way, after a first one
    out: str = ""                    # write the result there as JSON, after each way


class Clocked(Timed):
    """Also counts: {verb: calls}."""
    def __init__(self, spent, calls, *members):
        super().__init__(spent, *members)
        self.calls = calls

    def each(self, verb, arguments):
        self.calls[verb] = self.calls.get(verb, 0) + 1
        return super().each(verb, arguments)


def tensor_names(hf):
    """The names of a checkpoint's tensors, from transformers' model; a layer's experts are one tensor there."""
    import torch
    from transformers import GlmMoeDsaForCausalLM
    with torch.device("meta"):
        model = GlmMoeDsaForCausalLM(hf)
    for name in model.state_dict():
        layer, _, kind = name.partition(".experts.")
        if not kind:
            yield name
        for leaf in {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.get(kind, ()):
            yield from (f"{layer}.experts.{e}.{leaf}_proj.weight" for e in range(hf.n_routed_experts))


@contextlib.contextmanager
def on_card(number):
    """The engine's process starts with this card as its only one. This process has seen its own cards long ago."""
    import torch
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda.is_available():
        os.environ["CUDA_VISIBLE_DEVICES"] = (before or ",".join(map(str, range(torch.cuda.device_count())))).split(",")[number]
    try:
        yield
    finally:
        if torch.cuda.is_available():
            os.environ.pop("CUDA_VISIBLE_DEVICES") if before is None else os.environ.update(CUDA_VISIBLE_DEVICES=before)


@contextlib.contextmanager
def engine(folder, hf, card=0, adapter=0, fp8="none", kernels="auto"):
    """A SamplerEngine for all weights, or for adapters of this rank on random weights, ended on the way out."""
    import torch

    from common.sampler import SamplerEngine
    cuda, start = torch.cuda.is_available(), time.perf_counter()
    args = dict(load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, enable_prefix_caching=False,
                enable_sleep_mode=False, kv_cache_memory_bytes=1 << 30 if cuda else 64 << 20, max_num_batched_tokens=512,
                worker_extension_cls="checks.sync_speed.Worker" if adapter else "checks.weight_worker.Worker")
    if fp8 != "none":
        args |= dict(quantization=fp8, linear_backend=kernels, moe_backend=kernels)
    with on_card(card):
        # a small share, because the trainer is there: the KV cache has its own size
        sampler = SamplerEngine(folder, dtype=hf.dtype, max_model_len=512, max_num_seqs=8, lora_rank=adapter, weights=not adapter,
                                gpu_memory_utilization=0.2, vllm_args=args)
    try:
        if adapter:
            sampler._rpc("shape_weights")
        print(f"engine on card {card}: up in {time.perf_counter() - start:.0f} s", flush=True)
        yield sampler
    finally:
        if cuda:
            sampler.llm.llm_engine.engine_core.shutdown()
        else:
            idle.append(sampler.llm)                          # in this process: its end would take the trainer's groups with it
            free_worker()


def measure(way, rank, sampler, batch, versions, rounds):
    """A way's row of the result: seconds and their split, sizes, peaks above what is held, what the engine answers."""
    import numpy as np
    import torch

    from common import sync
    from common.batch import merge
    cuda = torch.cuda.is_available()
    seconds, splits, answers, peaks, row = [], [], [], {"trainer": 0, "engine": 0}, {}

    def scores():
        return torch.from_numpy(np.concatenate(sampler.score(batch["tokens"], batch["n_prompt"])))
    for i in range(1 + rounds):
        rank.restore_adapter()
        rank.perturb(1.0, seed=i)                             # of all weights, 1 % change their sign
        try:
            if way == "host":
                start = time.perf_counter()
                rank.offload()
                row["park_s"] = time.perf_counter() - start
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
            sampler._rpc("peak")
            spent, calls, start = {}, {}, time.perf_counter()
            told = sync.publish(Clocked(spent, calls, rank), Clocked(spent, {}, sampler), next(versions))
            seconds.append(time.perf_counter() - start)
            splits.append({step: spent[step] for step in STEPS})
            peaks["engine"] = max(peaks["engine"], sampler._rpc("peak")[0]["peak"])
            if cuda:
                peaks["trainer"] = max(peaks["trainer"], torch.cuda.max_memory_allocated() - held)
        finally:
            if way == "host":
                rank.onload()
        answers.append(scores())
        print(f"{way}: {seconds[-1]:.4f} s for {told['bytes'] / 1e9:.3f} GB, "
              + ", ".join(f"{step} {s:.4f}" for step, s in splits[-1].items()), flush=True)
    moved = [apart(old, new)[0] for old, new in itertools.pairwise(answers)]
    median = statistics.median(seconds[1:])
    row |= {"bytes": told["bytes"], "tensors": told["tensors"], "buckets": calls["offer"], "first_s": seconds[0],
            "first_split_s": splits[0], "seconds": seconds[1:], "median_s": median, "s_per_GB": median / told["bytes"] * 1e9,
            "split_s": {step: statistics.median(s[step] for s in splits[1:]) for step in STEPS},
            "peak_bytes": peaks if cuda else None, "trainer_holds_bytes": held if cuda else None, "moved": moved,
            "asked_twice": apart(scores(), answers[-1])}
    if way != "adapter":                                      # that engine has another base model
        mine = np.concatenate(merge([rank.logprobs(batch)], len(batch["tokens"])))
        row["gap_to_trainer"] = apart(answers[-1], torch.from_numpy(mine))
    print(f"{way}: " + json.dumps(row, indent=1), flush=True)
    return row


def shows(row):
    """Stop unless every new version changed what the engine answers."""
    moved, noise = min(row["moved"]), row["asked_twice"][0]
    if not moved > 3 * noise:
        raise cli.Stop(f"a new version moves the engine's log-probabilities by {moved:.2g}, the same one asked twice by "
                       f"{noise:.2g}: nothing was published")


def whole_model(row, merged):
    """A row's rates for all of GLM-5.3's weights."""
    parts = size.parameters(size.GLM5P3)
    parameters = sum(parts.values())
    split = {step: s * 2 * parameters / row["bytes"] for step, s in row["split_s"].items()}
    published = speed.MERGED_BYTES_PER_S if merged else speed.WEIGHTS_BYTES_PER_S
    return {"parameters": parameters, "bytes": 2 * parameters, "routed_experts_share": parts["routed experts"] / parameters,
            "split_s": split, "seconds": sum(split.values()), "the_plan_says_s": 2 * parameters / published, "how": LEFT_OUT}


def main():
    cfg = cli.parse(Config, doc=__doc__)
    if cfg.shape not in ("glm5p3", "tiny") or cfg.fp8 not in ("none", "fp8", "fp8_per_block"):
        raise cli.Stop(f"--shape is {cfg.shape!r} (glm5p3 or tiny), --fp8 {cfg.fp8!r} (fp8_per_block, fp8 or none)")
    if cfg.kernels not in ("auto", "triton") or cfg.kernels != "auto" and cfg.fp8 == "none":
        raise cli.Stop(f"--kernels is {cfg.kernels!r} (auto or triton), chosen for a sampler in FP8: --fp8 is {cfg.fp8}")
    if cfg.rounds < 1 or cfg.bucket_gib <= 0:
        raise cli.Stop(f"--rounds is {cfg.rounds} (at least 1), --bucket-gib {cfg.bucket_gib} (more than 0)")
    import numpy as np
    import torch

    from checks import tiny
    from common import hf_config, network, trainer
    cuda = torch.cuda.is_available()
    if not cuda and (cfg.shape == "glm5p3" or cfg.fp8 != "none"):
        raise cli.Stop(f"--shape {cfg.shape} --fp8 {cfg.fp8} needs a GPU; --shape tiny does not, without --fp8")
    from transformers import GlmMoeDsaConfig
    shared = dict(num_hidden_layers=1 + cfg.moe_layers, first_k_dense_replace=1, index_topk_freq=4, index_skip_topk_offset=3)
    hf = tiny.config(**shared) if cfg.shape == "tiny" else GlmMoeDsaConfig(
        **shared, **{**GLM5P3, "n_routed_experts": cfg.experts}, vocab_size=cfg.vocabulary, bos_token_id=0, eos_token_id=1,
        pad_token_id=2, topk_method="noaux_tc", scoring_func="sigmoid", indexer_rope_interleave=True, moe_layer_freq=1)
    hf.architectures, hf.dtype = ["GlmMoeDsaForCausalLM"], "bfloat16" if cuda else "float32"
    folder = Path(tempfile.mkdtemp(prefix="weight-speed-"))
    hf.save_pretrained(folder)
    (folder / hf_config.INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensor_names(hf), "none.safetensors")}))
    trainer.weights.load = lambda model, *_: None             # random weights; a checkpoint of this width would take the disk
    targets = [t for t in trainer.lora.TARGETS if t != "kv_b_proj"]                  # vLLM's attention cannot adapt that
    lora = dict(lora_rank=8 if cfg.shape == "tiny" else 32, lora_alpha=32, experts="shared", lora_targets=targets)
    rank = trainer.TrainerRank(0, 1, folder, dtype="bfloat16" if cuda else "float32", bucket_bytes=int(cfg.bucket_gib * 2**30),
                               **(lora if cfg.merge else {}))
    rank.load(str(folder / "rendezvous"))
    rng = np.random.default_rng(0)
    batch = {"tokens": [rng.integers(3, hf.vocab_size, n).astype(np.int32) for n in (100, 300)], "n_prompt": [4, 20]}
    result = {**dataclasses.asdict(cfg), "dtype": hf.dtype, "parameters": sum(p.numel() for p in rank.model.parameters()),
              "routed_experts": 3 * hf.hidden_size * hf.moe_intermediate_size * hf.n_routed_experts * cfg.moe_layers,
              "trainable": sum(p.numel() for _, p in rank.trainable), "ways": {}, "failed": {}, "versions": cli.versions()}
    print(json.dumps({k: v for k, v in result.items() if k != "versions"}), flush=True)
    versions = itertools.count(1)

    def measured(sampler, *ways):
        for way in ways:
            with noted(way):
                result["ways"][way] = row = measure(way, rank, sampler, batch, versions, cfg.rounds)
                if way != "adapter" and cfg.shape == "glm5p3":
                    row["whole_model"] = whole_model(row, cfg.merge)
                    print(f"{way}, all of GLM-5.3: {json.dumps(row['whole_model'])}", flush=True)
                shows(row)

    @contextlib.contextmanager
    def noted(what):
        """A failure takes no other way's result with it."""
        try:
            yield
        except Exception as error:                            # noqa: BLE001 - whatever vLLM raises
            traceback.print_exc()
            result["failed"][what] = f"{type(error).__name__}: {error}"
        if cfg.out:
            cli.write_atomic(cfg.out, json.dumps(result, indent=1) + "\n")

    if cfg.merge:
        with noted("adapter's engine"), engine(folder, hf, adapter=lora["lora_rank"]) as sampler:
            measured(sampler, "adapter")
        rank.merge = True
    with noted("engine"), engine(folder, hf, fp8=cfg.fp8, kernels=cfg.kernels) as sampler:
        measured(sampler, "card", "host")
    if not cuda or torch.cuda.device_count() > 1:
        rank.apart, rank.transport = True, network.Network(folder / "meeting", limit_s=60)
        with noted("network's engine"), engine(folder, hf, card=1, fp8=cfg.fp8, kernels=cfg.kernels) as sampler:
            measured(sampler, "network")
    if adapter := result["ways"].get("adapter"):
        result["merged_over_adapter"] = {way: r["median_s"] / adapter["median_s"] for way, r in result["ways"].items()}
        print(f"times the adapter alone: {json.dumps(result['merged_over_adapter'])}", flush=True)
    rows = [(way, r["bytes"] / 1e9, r["buckets"], r["first_s"], r["median_s"], *r["split_s"].values(), r["s_per_GB"])
            for way, r in result["ways"].items()]
    if rows:
        print(cli.table(rows, ("way", "GB", "buckets", "first s", "s", *STEPS, "s/GB")), flush=True)
    if cfg.out:
        cli.write_atomic(cfg.out, json.dumps(result, indent=1) + "\n")
    if cuda:                                                  # else the engines end the group with their own
        torch.distributed.destroy_process_group()
    if result["failed"]:
        raise cli.Stop("; ".join(f"{what} failed: {why}" for what, why in result["failed"].items()))
    return 0


if __name__ == "__main__":
    cli.run_main(main)
