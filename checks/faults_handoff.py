"""Faults of the adapter, for checks/faults.py: on its way from trainer to sampler, and in the two forwards.

A fault is a function of the bench (faults.Bench) that returns a context manager, which patches what runs as near as can be to
where the bug that it stands for was or would be.
"""
import contextlib
import re
from unittest import mock

import torch

from checks.local import Local
from common import bundle, lora, sync
from common.receive import Receiver
from common.sampler import SamplerEngine
from common.trainer import TrainerRank

SCALE = 2.0                              # alpha / rank of the bench's adapters
EXPERTS = 8                              # of a layer
BESIDE = "not in the check, which sends none: base requests beside an adapter's"


@contextlib.contextmanager
def many(patches):
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


# -- the hand-off ----------------------------------------------------------------------------------------------------

def exported(change):
    """The trainer's adapter, changed on its way out: {neutral key: tensor} -> the same."""
    real = lora.export
    return lambda b: mock.patch.object(lora, "export", lambda *args: change(dict(real(*args))))


def scaled(factor, part=".lora_B"):
    return exported(lambda ts: {k: t * factor if part in k and k.endswith("lora_B") else t for k, t in ts.items()})


def renamed(pattern, names):
    return exported(lambda ts: {k: ts[re.sub(pattern, lambda m: names[m[0]], k)] for k in ts})


def stale(part):
    """Tensors whose key matches `part` stay as they were first exported."""
    def fault(b):
        first = {}

        def change(tensors):
            first.update({k: t for k, t in tensors.items() if re.search(part, k) and k not in first})
            return {**tensors, **first}
        return exported(change)(b)
    return fault


def one_expert_stale(b):
    first = {}

    def change(tensors):
        key = "layers.2.mlp.experts.down_proj.lora_B"
        first.setdefault(key, tensors[key][:1])
        return {**tensors, key: torch.cat([first[key], tensors[key][1:]])}
    return exported(change)(b)


def transposed(tensors):
    square = [k.removesuffix(".lora_A") for k in tensors if k.endswith("o_proj.lora_A")]
    return {**tensors, **{f"{k}.lora_A": tensors[f"{k}.lora_B"].T.contiguous() for k in square},
            **{f"{k}.lora_B": tensors[f"{k}.lora_A"].T.contiguous() for k in square}}


def nothing_published(b):
    def publish(trainer, sampler, version):
        return {**b.told, "version": version, "fingerprint": trainer.fingerprint()[0]}
    return mock.patch.object(sync, "publish", publish)


def not_installed(b):
    """The slot of the changed adapter is written and read back, and requests go on naming the version before."""
    real, changed = SamplerEngine.commit, b.engine.version + 2

    def commit(self, version):
        request = self.request
        answer = real(self, version)
        self.request = request if version == changed else self.request
        return answer
    return mock.patch.object(SamplerEngine, "commit", commit)


def stale_cache(name="policy", reset=False):
    """The adapter keeps its name and path over versions, and the prefix cache is not emptied (huggingface/trl#6344)."""
    def fault(b):
        from vllm.lora.request import LoRARequest
        real = SamplerEngine.commit

        def commit(self, version):
            empty = self.llm.reset_prefix_cache if reset else lambda: True
            with mock.patch.object(self.llm, "reset_prefix_cache", empty):
                answer = real(self, version)
            self.request = LoRARequest(name.format(version), version + 1, f"memory://{name.format(version)}")
            return answer
        return mock.patch.object(SamplerEngine, "commit", commit)
    return fault


def damaged(b):
    real = sync.SharedMemory.offer

    def offer(self, flat, engines):
        flat[1000] ^= 1
        return real(self, flat, engines)
    return mock.patch.object(sync.SharedMemory, "offer", offer)


def copy_lost(b):
    real = Receiver.adapter_stage

    def stage(self, *args):
        answer = real(self, *args)
        self.adapter_staged[2].reader.tensors[0].zero_()
        return answer
    return mock.patch.object(Receiver, "adapter_stage", stage)


def old_version(b):
    real = bundle.pack
    return mock.patch.object(bundle, "pack", lambda tensors, **how: real(tensors, **{**how, "version": 1}))


@contextlib.contextmanager
def replicas_differ(b):
    """Two data-parallel replicas whose adapters are no longer one."""
    other, real = next(t for t in b.trainers.values() if t is not b.trainer), sync._stage
    with mock.patch.object(sync, "_stage", lambda trainer, *rest: real(Local(b.trainer, other), *rest)):
        try:
            yield
        finally:
            other.release()


def other_base(b):
    return mock.patch.object(b.trainer, "base", "0123456789abcdef")


def told_early(b):
    """The sampler's slots are the trainer's own storage."""
    real = TrainerRank.perturb

    def perturb(self, std, seed=0, only=None):
        real(self, std, seed, only)
        tensors = lora.export(self.model, self.cfg, self.dtype)
        header, flat = bundle.pack(tensors, version=0, base=self.base, rank=8, experts="each")
        places = b.worker._places(b.worker.model_runner.lora_manager._adapter_manager, header, bundle.unpack(header, flat),
                                  b.worker.adapter_versions[b.engine.version])
        for _, source, _, region in places:
            region.copy_(source)
    return mock.patch.object(TrainerRank, "perturb", perturb)


def not_taken_back(b):
    real = TrainerRank.restore_adapter

    def restore(self):
        left = dict(self.trainable)["decoder.layers.1.self_attention.linear_proj.lora.b"]
        kept = left.detach().clone()
        real(self)
        left.data.copy_(kept)
    return mock.patch.object(TrainerRank, "restore_adapter", restore)


# -- adapters in the two forwards ------------------------------------------------------------------------------------

def kv_b_ignored(chosen):
    """vLLM's MLA attention projects with the kv_b_proj from before its adapter (vllm#48974). Here only the new tokens of the
    `chosen` requests lack it, there the cached ones too: this is the smaller error. chosen(new tokens, tokens before): a bool for
    each request of a batch."""
    from vllm.forward_context import get_forward_context

    def patch(attn):
        proj = attn.kv_b_proj

        def forward(x):
            y, bias = type(proj).forward(proj, x)
            meta = get_forward_context().attn_metadata
            meta = meta[attn.attn.layer_name] if isinstance(meta, dict) else meta
            new = meta.query_start_loc.diff()
            off = chosen(new, meta.seq_lens[:len(new)] - new).repeat_interleave(new)
            y[:len(off)][off] = proj.base_layer(x)[0][:len(off)][off]
            return y, bias
        return mock.patch.object(proj, "forward", forward)
    return lambda b: many(patch(layer.self_attn) for layer in b.layers)


def without_hooks(where):
    """Adapters of the trainer that are exported and not in its forward."""
    return lambda b: many(mock.patch.object(m, "_forward_hooks", {}) for name, m in b.trainer.model.named_modules()
                          if hasattr(m, "lora") and where in name)


def merged(dtype):
    """The trainer multiplies by W + B A rounded to `dtype`, so what is below half a step of W is lost; W stays as it is."""
    def hook(module, args, output):
        a, b = module.lora.a.chunk(len(module.lora.b)), module.lora.b * module.lora.scale
        w = module.weight.to(dtype).float()
        kept = (w + torch.cat([y @ x for x, y in zip(a, b)])).to(dtype).float() - w
        return output[0] + torch.nn.functional.linear(args[0], kept.to(args[0].dtype)), output[1]
    return lambda b: many(mock.patch.object(m, "_forward_hooks", {0: hook}) for m in b.trainer.model.modules()
                          if hasattr(m, "lora") and not m.lora.each)


def last_slot(b):
    """vLLM's CPU kernels index the slots with a base request's -1."""
    from common.vllm_cpu.experts import LoRA
    real = LoRA.update_metadata

    def update(self, *args, **kwargs):
        real(self, *args, **kwargs)
        slots = self.token_lora_indices % 2
        if any(mask is not None for _, mask in self.in_batch):
            self.in_batch = [(s, (slots == s).unsqueeze(1)) for s in slots.unique().tolist()]
    return mock.patch.object(LoRA, "update_metadata", update)


# name, where it must be found (the check's first row that fails, or what a guard says), what puts it in[, which trainer]
PREFILL, DECODE = "step 5, agree again, prefill", "step 5, agree again, decode"
FAULTS = [
    ("a publish does nothing", PREFILL, nothing_published),
    ("a version is answered for and not installed", PREFILL, not_installed),
    ("one tensor of the adapter is dropped", "guard: 1 modules would keep no adapter",
     exported(lambda ts: {k: t for k, t in ts.items() if k != "layers.2.self_attn.q_b_proj.lora_B"})),
    ("all tensors of one kind are dropped", PREFILL, exported(lambda ts: {k: t for k, t in ts.items() if ".q_b_proj." not in k})),
    ("one bit of one tensor is turned on the way", "guard: arrived damaged: .* does not have its sender's checksum", damaged),
    ("one copy into the sampler's slot is lost", "guard: 1 of 1 sampler ranks hold", copy_lost),
    ("an old version is published again", "guard: version 1 is not newer than version", old_version),
    ("the adapter of another base model", "guard: adapts base model 0123456789abcdef, this sampler serves", other_base),
    ("two trainer replicas hold different adapters", "guard: the trainer's 2 replicas hold different weights", replicas_differ),
    ("one layer of four stays stale", PREFILL, stale(r"layers\.3\.")),
    ("one tensor stays stale: a layer's q_a_proj lora_B", PREFILL, stale(r"layers\.3\.self_attn\.q_a_proj\.lora_B")),
    ("one expert of one layer stays stale: its down_proj lora_B", PREFILL, one_expert_stale),
    ("lora_A stays stale, lora_B is published", PREFILL, stale("lora_A")),
    ("lora_B stays stale, lora_A is published", PREFILL, stale("lora_B")),
    ("gate and up exchanged", PREFILL, renamed(r"gate(?=_proj)|up(?=_proj)", {"gate": "up", "up": "gate"})),
    ("experts 0 and 1 exchanged", PREFILL,
     exported(lambda ts: {k: t[[1, 0, *range(2, len(t))]] if t.ndim == 3 else t for k, t in ts.items()})),
    ("layers 2 and 3 exchanged", PREFILL, renamed(r"(?<=layers\.)[23]", {"2": "3", "3": "2"})),
    ("lora_A and lora_B of a square layer transposed", PREFILL, exported(transposed)),
    ("alpha / rank counted twice", PREFILL, scaled(SCALE)),
    ("alpha / rank not counted", PREFILL, scaled(1 / SCALE)),
    ("alpha / sqrt(rank) for alpha / rank", PREFILL, scaled(8 ** 0.5)),
    ("the adapter subtracted", PREFILL, scaled(-1)),
    ("each expert scales the storage that all share", PREFILL, scaled(SCALE ** (EXPERTS - 1), ".mlp.experts."), "shared"),
    ("the prefix cache of the version before is used", DECODE, stale_cache()),
    ("the sampler shares the trainer's storage", "step 3, stale, must disagree", told_early),
    ("one tensor is not taken back after the check", "step 6, taken back, sampler", not_taken_back),
    ("sampler: kv_b_proj adapter ignored in decode", DECODE, kv_b_ignored(lambda new, seen: (new == 1) & (seen > 0))),
    ("sampler: kv_b_proj adapter ignored in cached prefill", PREFILL, kv_b_ignored(lambda new, seen: (new > 1) & (seen > 0))),
    ("trainer: no adapter in its forward", "step 2, change, trainer alone", without_hooks("")),
    ("trainer: kv_b_proj adapter not in its forward", PREFILL, without_hooks("linear_kv_up_proj")),
    ("trainer: adapter merged into bf16 weights", PREFILL, merged(torch.bfloat16)),
    ("base requests take the last adapter slot", BESIDE, last_slot),
]

# the same patches without their fault: the check must pass, or it is not the fault that it finds
CONTROLS = [
    ("every tensor passed on", exported(lambda tensors: tensors)),
    ("one name for all versions, the cache emptied", stale_cache(reset=True)),
    ("the cache not emptied, a name for each version", stale_cache("policy-v{}")),
    ("kv_b_proj projected apart, with its adapter", kv_b_ignored(lambda new, seen: new < 0)),
    ("adapter merged into float32 weights", merged(torch.float32)),
]
