"""How fast does a new adapter reach vLLM? Several ways side by side in one run, on one GPU or two, at the model's true width.

python checks/sync_speed.py                              # GLM-5.3, 3 MoE layers: three ways, their slots, logprobs
python checks/sync_speed.py --moe-layers 1 --slots 75    # the slots of all 75 MoE layers (30 GB), without their base weights
python checks/sync_speed.py --shape flash --moe-layers 1 --slots 42     # GLM-5.3-Flash's expert shapes, one adapter per expert

Every way starts with the trainer's float32 tensors on the GPU and ends when vLLM would use the adapter for its next request:
file   the PEFT folder that `peft` and vLLM read is written and loaded (the slow way that everybody starts with)
alias  unique tensors cross by CUDA IPC, their public names are rebuilt as aliases, vLLM's own loader and packer do the rest
ours   common/sync.py and common/receive.py: unique tensors cross by CUDA IPC and are written straight into the slots, with
       checksums when they leave, when they arrive and when they lie in the slots
network   with a second GPU: ours, from there by NCCL (common/network.py); without any GPU, by gloo

The base model has random weights under which an adapter shows (vLLM's dummy ones hide it). The ways must leave bit-identical
slots; logprobs are compared with the base model's and with the engine's own noise between two installs of the same adapter.
"""
import dataclasses
import functools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from checks.local import Local  # noqa: E402
from common import cli  # noqa: E402
from common.receive import Receiver, answered  # noqa: E402

GLM5P3 = dict(hidden_size=6144, moe_intermediate_size=2048, n_routed_experts=256, intermediate_size=12288)
FLASH = dict(hidden_size=4096, moe_intermediate_size=2048, n_routed_experts=288, intermediate_size=12288)
# model widths, adapter rank, rank of the routed experts' adapters, shared or each
SHAPES = {"glm5p3": (GLM5P3, 32, 32, "shared"), "flash": (FLASH, 64, 8, "each"), "tiny": ({}, 8, 8, "shared"),
          "tiny-each": ({}, 16, 8, "each")}
FILE, ALIAS = 1001, 1002                      # vLLM's adapter ids; ours are version + 1


@dataclasses.dataclass
class Config:
    shape: str = "glm5p3"    # glm5p3 or flash; tiny and tiny-each need no GPU
    moe_layers: int = 3      # with base weights: 20 GB each at GLM-5.3's width; one dense layer comes before them
    slots: int = 0           # adapter slots for this many MoE layers; those beyond moe_layers share the last one's base weights
    rounds: int = 5          # of alias and of ours; file is done once
    file: bool = True        # also the way through a file; not with --slots, where it would write 30 GB
    out: str = ""            # write the result there as JSON


class Worker(Receiver):
    """vLLM's side: the verbs of the hand-off, the peers' way, and what is measured there."""

    @answered
    def shape_weights(self):
        """Random weights under which an adapter shows, without blowing the engine's own noise up."""
        import torch
        torch.manual_seed(0)
        for name, p in self.model_runner.model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                p.data.fill_(1)
            elif p.dtype in (torch.bfloat16, torch.float32) and p.ndim >= 2:
                for part in p.data if p.ndim == 3 else [p.data]:
                    part.normal_(0, 0.5 if "embed" in name else 0.03 if "lm_head" in name else 0.02)
        return {}

    @answered
    def grow(self, moe_layers, slots):
        """Adapter slots for layers that have no base weights: copies of the last layer's modules with slots of their own."""
        import copy

        import torch
        adapters = self.model_runner.lora_manager._adapter_manager
        last = f".layers.{moe_layers}."
        for name in [n for n in adapters.modules if last in n]:
            for layer in range(moe_layers + 1, slots + 1):
                twin = copy.copy(adapters.modules[name])
                twin._buffers = dict(twin._buffers)
                for attr in ("lora_a_stacked", "lora_b_stacked", "w13_lora_a_stacked", "w13_lora_b_stacked", "w2_lora_a_stacked",
                             "w2_lora_b_stacked"):
                    if isinstance(getattr(twin, attr, None), tuple):
                        setattr(twin, attr, tuple(torch.zeros_like(t) for t in getattr(twin, attr)))
                there = name.replace(last, f".layers.{layer}.")
                adapters.modules[there] = twin
                if name in adapters.packed_modules:
                    adapters.packed_modules[there] = [p.replace(last, f".layers.{layer}.") for p in adapters.packed_modules[name]]
        return {"slot_bytes": sum(t[0].nbytes for t in self._stacks())}

    def _stacks(self):
        for module in self.model_runner.lora_manager._adapter_manager.modules.values():
            kinds = ("w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b") if hasattr(module, "w2_lora_a_stacked") else \
                ("lora_a", "lora_b")
            for attr in kinds:
                yield from getattr(module, f"{attr}_stacked")

    @answered
    def install_alias(self, header, ticket, adapter_id, rank):
        """The peers' way: rebuild every public name as a view, then vLLM's loader and packer."""
        import torch
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        from common import bundle, peft_folder, sync
        header = bundle.Header.from_json(header)
        flat, let_go = sync.take(ticket)
        flat = flat.clone()                                   # vLLM keeps views of it; the sender's buffer must be free again
        let_go()
        manager, unique = self.model_runner.lora_manager, bundle.views(header, flat)
        helper = PEFTHelper.from_dict(dict(r=rank, lora_alpha=rank, target_modules=["x"], bias="none", peft_type="LORA"))
        names = dict(peft_folder.public(unique, self.model_config.hf_text_config.n_routed_experts))
        lora = LoRAModel.from_lora_tensors(lora_model_id=adapter_id, tensors=names, peft_helper=helper, device=str(self.device),
                                           dtype=manager.lora_config.lora_dtype)
        adapters = manager._adapter_manager
        adapters.remove_adapter(adapter_id)
        adapters.add_adapter(lora)
        adapters.activate_adapter(adapter_id)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return {}

    @answered
    def take(self, ticket):
        """Only the way: what arrives is let go of. Answers the seconds that it took here."""
        from common import sync
        start = time.perf_counter()
        sync.take(ticket)[1]()
        return {"seconds": time.perf_counter() - start}

    @answered
    def remove(self, adapter_id):
        self.model_runner.lora_manager._adapter_manager.remove_adapter(adapter_id)
        return {}

    @answered
    def unequal_slots(self, one, other):
        """Names of the slots in which two installed adapters differ in any bit."""
        import torch
        adapters = self.model_runner.lora_manager._adapter_manager
        i, j = (adapters.lora_index_to_id.index(x) for x in (one, other))
        return {"bad": [n for n, t in enumerate(self._stacks()) if not torch.equal(t[i], t[j])],
                "filled": sum(bool(t[i].any()) for t in self._stacks()), "slots": sum(1 for _ in self._stacks())}

    @answered
    def peak(self):
        """Peak bytes of this worker since the last call, above what it holds now."""
        import torch
        if not torch.cuda.is_available():
            return {"peak": 0}
        found = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return {"peak": found}


class Sender:
    """The trainer's side: float32 tensors on the GPU, offered like common/trainer.py does (scale folded in, cast, packed)."""

    def __init__(self, tensors, base, rank, experts, transport=None):
        import torch

        from common import sync
        self.tensors, self.base, self.rank, self.experts = tensors, base, rank, experts
        self.transport = transport or (sync.CudaIpc() if torch.cuda.is_available() else sync.SharedMemory())
        self.dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32

    def export(self):
        import torch
        out = {k: torch.empty_like(t, dtype=self.dtype) for k, t in self.tensors.items()}
        torch._foreach_copy_(list(out.values()), list(self.tensors.values()))
        return out

    def offer(self, version, engines):
        import torch

        from common import bundle, sync
        scaled = dict(zip(self.tensors, torch._foreach_mul(list(self.tensors.values()), 1.0)))
        header, flat = bundle.pack(scaled, version=version, base=self.base, rank=self.rank, experts=self.experts,
                                   dtype=self.dtype)
        return {"node": sync.node_name(), "fingerprint": header.fingerprint, "header": header.to_json(),
                "ticket": self.transport.offer(flat, engines)}

    def release(self, last=True, failed=False):
        self.transport.release(failed)


class Timed(Local):
    """Members whose verbs add to `spent`, {verb: seconds}."""
    def __init__(self, spent, *members):
        super().__init__(*members)
        self.spent = spent

    def each(self, verb, arguments):
        start = time.perf_counter()
        try:
            return [getattr(m, verb)(*args) for m, args in zip(self.actors, arguments)]
        finally:
            self.spent[verb] = self.spent.get(verb, 0.0) + time.perf_counter() - start

    def __getattr__(self, verb):
        if verb.startswith("_"):
            raise AttributeError(verb)
        return lambda *args: self.each(verb, [args] * len(self.actors))


def adapter(hf, layers, rank, expert_rank, experts, device):
    """{neutral key: float32 tensor} of a random adapter for one dense and `layers` MoE layers."""
    import torch
    g, out = torch.Generator(device).manual_seed(0), {}
    heads = hf.num_attention_heads
    attention = (("q_a_proj", hf.hidden_size, hf.q_lora_rank), ("q_b_proj", hf.q_lora_rank, heads * hf.qk_head_dim),
                 ("kv_a_proj_with_mqa", hf.hidden_size, hf.kv_lora_rank + hf.qk_rope_head_dim),
                 ("o_proj", heads * hf.v_head_dim, hf.hidden_size))

    def mlp(width):
        return (("gate_proj", hf.hidden_size, width), ("up_proj", hf.hidden_size, width), ("down_proj", width, hf.hidden_size))

    def add(module, fan_in, fan_out, r, n=()):
        out[f"{module}.lora_A"] = torch.randn((*n, r, fan_in), generator=g, device=device) * fan_in ** -0.5
        out[f"{module}.lora_B"] = torch.randn((*n, fan_out, r), generator=g, device=device) * 0.02
    for i in range(1 + layers):
        for leaf, fan_in, fan_out in attention:
            add(f"layers.{i}.self_attn.{leaf}", fan_in, fan_out, rank)
        for leaf, fan_in, fan_out in mlp(hf.intermediate_size if i == 0 else hf.moe_intermediate_size):
            if i == 0:
                add(f"layers.{i}.mlp.{leaf}", fan_in, fan_out, rank)
            else:
                add(f"layers.{i}.mlp.shared_experts.{leaf}", fan_in, fan_out, rank)
                n = (hf.n_routed_experts,) if experts == "each" else ()
                add(f"layers.{i}.mlp.experts.{leaf}", fan_in, fan_out, expert_rank, n)
    return out


def main():
    cfg = cli.parse(Config, doc=__doc__)
    if cfg.shape not in SHAPES:
        raise cli.Stop(f"--shape is {cfg.shape!r}: {', '.join(SHAPES)}")
    import torch

    from checks import tiny
    from common import network, peft_folder, sync
    from common.sampler import SamplerEngine
    cuda = torch.cuda.is_available()
    if cfg.shape in ("glm5p3", "flash") and not cuda:
        raise cli.Stop(f"--shape {cfg.shape} needs a GPU; --shape tiny does not")
    widths, rank, expert_rank, experts = SHAPES[cfg.shape]
    layers = max(cfg.moe_layers, cfg.slots)
    from transformers import GlmMoeDsaConfig
    common = dict(num_hidden_layers=1 + cfg.moe_layers, first_k_dense_replace=1, index_topk_freq=4, index_skip_topk_offset=3)
    if widths:
        hf = GlmMoeDsaConfig(**common, **widths, vocab_size=32768, bos_token_id=0, eos_token_id=1, pad_token_id=2,
                             topk_method="noaux_tc", scoring_func="sigmoid", indexer_rope_interleave=True, moe_layer_freq=1)
    else:
        hf = tiny.config(**common)
    hf.architectures, hf.dtype = ["GlmMoeDsaForCausalLM"], "bfloat16" if cuda else "float32"
    folder = Path(tempfile.mkdtemp(prefix="sync-speed-"))
    hf.save_pretrained(folder)
    engine = SamplerEngine(folder, dtype=hf.dtype, max_model_len=512, max_num_seqs=8, lora_rank=rank, vllm_args=dict(
        load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, enable_prefix_caching=False, enable_sleep_mode=False,
        worker_extension_cls="checks.sync_speed.Worker", max_loras=2 if cfg.slots else 4, max_cpu_loras=4,
        max_num_batched_tokens=512, kv_cache_memory_bytes=1 << 30 if cuda else 64 << 20))
    engine._rpc("shape_weights")
    slot_bytes = engine._rpc("grow", cfg.moe_layers, layers)[0]["slot_bytes"]
    tensors = adapter(hf, layers, rank, expert_rank, experts, "cuda" if cuda else "cpu")
    sender = Sender(tensors, engine.base, rank, experts)
    unique = sender.export()
    public = [t.nbytes for _, t in peft_folder.public(unique, hf.n_routed_experts)]
    result = {"shape": cfg.shape, "moe_layers": cfg.moe_layers, "slots_of_moe_layers": layers, "rank": rank,
              "expert_rank": expert_rank, "experts": experts, "unique_tensors": len(unique),
              "unique_bytes": sum(t.nbytes for t in unique.values()), "public_tensors": len(public), "public_bytes": sum(public),
              "slot_bytes": slot_bytes,
              "versions": cli.versions()}
    if cuda:
        result["copy_bytes_per_s"] = rate = copy_rate()
        result["floor_s"] = slot_bytes / rate
    print(json.dumps({k: v for k, v in result.items() if k != "versions"}), flush=True)
    seconds, peaks, ids = {}, {}, {"file": FILE, "alias": ALIAS}

    def timed(way, action):
        engine._rpc("peak")
        start = time.perf_counter()
        action()
        seconds.setdefault(way, []).append(time.perf_counter() - start)
        peaks[way] = engine._rpc("peak")[0]["peak"]
        print(f"{way}: {seconds[way][-1]:.4f} s, {peaks[way] / 1e9:.2f} GB for a while", flush=True)

    def by_file():
        peft_folder.save_peft(sender.export(), hf, rank, folder / "adapter", "base")
        engine.llm.llm_engine.add_lora(request(FILE))

    def by_alias(adapter_id=ALIAS):
        header, flat = pack_plain(sender.export(), rank, experts)
        ticket = sender.transport.offer(flat)
        engine._rpc("install_alias", header, ticket, adapter_id, rank)
        sender.release()

    def request(adapter_id):
        from vllm.lora.request import LoRARequest
        return LoRARequest(f"adapter-{adapter_id}", adapter_id, str(folder / "adapter"))

    if cfg.file and not cfg.slots and rank == expert_rank:
        timed("file", by_file)
    if rank == expert_rank:                                   # vLLM's loader takes one rank for all
        for _ in range(cfg.rounds):
            try:
                timed("alias", by_alias)
            except cli.Stop as error:                         # out of memory: the measured answer for this size
                result["alias_failed"] = str(error)
                break
        if cfg.slots:
            engine._rpc("remove", ALIAS)

    def by_publish(way, sender, first):
        rounds = [{} for _ in range(cfg.rounds)]
        for version, spent in enumerate(rounds, first):
            timed(way, functools.partial(sync.publish, Timed(spent, sender), Timed(spent, engine), version))
        result[f"{way}_verbs"] = {verb: statistics.median(spent[verb] for spent in rounds) for verb in rounds[0]}
        print(f"{way}: {result[f'{way}_verbs']}", flush=True)
        ids[way] = version + 1
        return version + 1
    ours = by_publish("ours", sender, 1)
    if not cuda or torch.cuda.device_count() > 1:             # the same from another card, or between processes by gloo
        there = "cuda:1" if cuda else "cpu"
        way = network.Network(folder / "meeting")
        remote = Sender({k: t.to(there) for k, t in tensors.items()}, engine.base, rank, experts, way)
        by_publish("network", remote, ours)
        result |= link(way, engine, there, *(1 << n for n in ((30, 33) if cuda else (22, 25))))
    if not cfg.slots:
        result |= compare(engine, request, {way: i for way, i in ids.items() if way in seconds})
    result |= {"seconds": seconds, "median": {k: statistics.median(v) for k, v in seconds.items()}, "peak_bytes": peaks}
    for way in set(seconds) - {"ours"}:
        result[f"{way}_over_ours"] = result["median"][way] / result["median"]["ours"]
    if cuda:
        result["ours_over_floor"] = result["median"]["ours"] / result["floor_s"]
    print(json.dumps({k: v for k, v in result.items() if k not in ("versions", "seconds")}, indent=1))
    if cfg.out:
        cli.write_atomic(cfg.out, json.dumps(result, indent=1) + "\n")
    return 0


def link(way, engine, device, small, large, rounds=5):
    """Buffers of two sizes alone, over the group and, on cards, by one card's copy into the other's memory. For each size the
    best round's seconds: in all, for the ticket, inside the receiver (the rest is vLLM's call). The broadcast's rate is that of
    the bytes by which the sizes differ; what it leaves of the smaller one's time does not depend on the size."""
    import torch
    found = {}
    for nbytes in (small, large):
        flat, parts = torch.zeros(nbytes, dtype=torch.uint8, device=device), []
        for _ in range(rounds):
            start = time.perf_counter()
            ticket = way.offer(flat, [engine.where()])
            offered = time.perf_counter() - start
            received = engine._rpc("take", {**ticket, "first": 1})[0]["seconds"]
            parts.append({"all": time.perf_counter() - start, "ticket": offered, "receiver": received})
            way.release()
            if flat.is_cuda:
                other = torch.empty_like(flat, device="cuda:0")
                torch.cuda.synchronize("cuda:0"), torch.cuda.synchronize(device)
                start = time.perf_counter()
                other.copy_(flat)
                torch.cuda.synchronize("cuda:0"), torch.cuda.synchronize(device)
                parts[-1]["copy"] = time.perf_counter() - start
                del other
        found[nbytes] = min(parts, key=lambda part: part["all"])
        if flat.is_cuda:
            found[nbytes]["copy"] = min(part["copy"] for part in parts)
        print(f"{nbytes:,} bytes from card to card: {found[nbytes]}", flush=True)
    extra = found[large]["all"] - found[small]["all"]
    rates = {"network_bytes_per_s": large / found[large]["all"], "broadcast_bytes_per_s": (large - small) / extra,
             "network_fixed_s": found[small]["all"] - small / (large - small) * extra}
    if "copy" in found[large]:
        rates["link_bytes_per_s"] = large / found[large]["copy"]
    return {"link": found, **rates}


def compare(engine, request, ids):
    """Slots bit for bit, and how far logprobs move: from the base model, and between installs of the same adapter."""
    import torch
    from vllm import SamplingParams
    tokens = list(range(10, 90))

    def logprobs(lora):                                       # shrinking to the rank adds up in no fixed order: vLLM's own noise
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        out = engine.llm.generate([{"prompt_token_ids": tokens}], params, lora_request=lora, use_tqdm=False)[0]
        return torch.tensor([d[t].logprob for d, t in zip(out.prompt_logprobs[1:], tokens[1:])])
    base = logprobs(None)
    found = {"moves_base_by": {way: (logprobs(request(i)) - base).abs().mean().item() for way, i in ids.items()}}
    reference = next(iter(ids))
    for way, i in ids.items():
        if way != reference:
            slots = engine._rpc("unequal_slots", ids[reference], i)[0]
            found[f"slots_{way}_unlike_{reference}"] = len(slots["bad"])
            found["slots_compared"], found["slots_filled"] = slots["slots"], slots["filled"]
            found[f"logprob_{way}_minus_{reference}"] = apart(logprobs(request(i)), logprobs(request(ids[reference])))
    found["base_asked_twice"] = apart(logprobs(None), base)
    found[f"{reference}_asked_twice"] = apart(logprobs(request(ids[reference])), logprobs(request(ids[reference])))
    return found


def apart(a, b):
    """Mean and largest absolute difference."""
    return [(a - b).abs().mean().item(), (a - b).abs().max().item()]


def pack_plain(tensors, rank, experts):
    """Like bundle.pack, without checksums: the alias way has none."""
    from common import bundle
    layout, flat = bundle.lay(tensors)
    return bundle.Header(0, "", rank, experts, flat.numel(), [], layout).to_json(), flat


def copy_rate(size=2 << 30, rounds=10):
    """Bytes a second that the card copies from one place in its memory to another."""
    import torch
    a, b = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    b.copy_(a)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        b.copy_(a)
    torch.cuda.synchronize()
    return rounds * size / (time.perf_counter() - start)


if __name__ == "__main__":
    cli.run_main(main)
