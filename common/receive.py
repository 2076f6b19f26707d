"""The receiving end of the hand-off, inside every vLLM worker process: a bundle goes straight into vLLM's adapter slots.

`Receiver` is mixed into vLLM's worker (`worker_extension_cls`). A version is staged into a slot that nobody uses, and
becomes servable by registering it; no file, no per-expert names, and each slot is written once: a tensor shared by all
experts of a layer broadcasts. Adapter id = version + 1 (vLLM's ids start at 1), so an id never means two things, and
neither does a prefix-cache block. Methods answer {"error": sentence} instead of raising, because an exception loses its
type on the way out of a worker process.
"""
import functools

import numpy as np
import torch

from common.bundle import Header, combine, pick, verify, views
from common.checksum import Reader, checksums
from common.cli import Stop
from common.scatter import Scatter
from common.sync import take
from common.trace import Trace

copy = torch._foreach_copy_                 # one call for thousands of copies
TESTED_VLLM = "0.32.0"                      # the slot layout below is internal to vLLM
SILENT = {"mlp.gate": "vLLM accepts a router adapter and never applies it",
          **{f"self_attn.{x}_conv1d": "vLLM reads a convolution's weight without its adapter" for x in "qkv"}}


def answered(method):
    @functools.wraps(method)
    def call(self, *args):
        try:
            return method(self, *args)
        except Exception as error:          # noqa: BLE001 - whatever happens here must reach the driver as a sentence
            return {"error": str(error) if isinstance(error, Stop) else f"{type(error).__name__}: {error}"}
    return call


class Receiver:
    """Verbs for collective_rpc: adapter_stage, adapter_commit, adapter_abort, trace_start, trace_stop."""

    @answered
    def adapter_stage(self, header, ticket, base):
        """Verify a bundle, map every tensor to a module, and write them all into a free slot, which is not served yet.

        header: Header as JSON; ticket: what the transport gave; base: fingerprint of the model that this engine serves."""
        import vllm
        if vllm.__version__ != TESTED_VLLM:
            raise Stop(f"vLLM {vllm.__version__} is installed, adapter slots are known for {TESTED_VLLM}")
        header, adapters = Header.from_json(header), self.model_runner.lora_manager._adapter_manager
        if header.base != base:
            raise Stop(f"version {header.version} adapts base model {header.base}, this sampler serves {base}")
        self.__dict__.setdefault("adapter_versions", {})
        self.__dict__.setdefault("adapter_plans", {})
        if self.adapter_versions and header.version <= max(self.adapter_versions):
            raise Stop(f"version {header.version} is not newer than version {max(self.adapter_versions)}, which is here")
        if self.__dict__.get("adapter_staged"):
            raise Stop(f"version {self.adapter_staged[0].version} is staged here and neither committed nor aborted: "
                       "two publishes at once")
        slot = self._free_slot(adapters)
        flat, let_go = take(ticket)
        try:
            verify(header, flat)
            flat = flat.to(self.device)                      # an offer lies on the node's first GPU
            plan = self._plan(adapters, header, flat, slot)
            plan.write(flat, pick, copy)                     # broadcasts over the experts of a layer
            wanted = dict(zip(plan.slices, checksums(pick(flat, plan.slices.values()))))
        finally:
            let_go()                                         # waits for the copies: then the sender may reuse its buffer
        self.adapter_staged = (header, slot, plan, wanted)
        return {"version": header.version, "slot": slot}

    @answered
    def adapter_commit(self, version):
        """Serve the staged version; answers the fingerprint of what the slots hold, read back from them."""
        from vllm.lora.lora_model import LoRAModel
        header, slot, plan, wanted = self.__dict__.pop("adapter_staged", None) or (None,) * 4
        if header is None or header.version != version:
            raise Stop(f"version {version} is not staged here (staged: {header and header.version})")
        adapters = self.model_runner.lora_manager._adapter_manager
        adapters._registered_adapters[version + 1] = LoRAModel(version + 1, header.rank, {})
        adapters._active_adapters[version + 1] = None
        adapters.lora_index_to_id[slot] = version + 1
        self.adapter_versions[version] = slot
        held, found = np.array(header.sums)[plan.entries], plan.reader()
        right, sizes = held.copy(), [len(parts) for parts in found]
        # A tensor-parallel rank holds a slice: it vouches for the whole tensor by holding exactly what vLLM cuts from it.
        right[list(wanted)] = list(wanted.values())
        if not (np.concatenate(found) == np.repeat(right, sizes)).all():
            held = np.array([whole if (parts == one).all() else parts.sum() for whole, one, parts in zip(held, right, found)])
        return {"version": version, "slot": slot, "fingerprint": combine(plan.keys, held.tolist())}

    @answered
    def adapter_abort(self, version):
        """Forget a staged version; its slot counts as free again."""
        if self.__dict__.get("adapter_staged") and self.adapter_staged[0].version == version:
            del self.adapter_staged
        return {"versions": sorted(self.__dict__.get("adapter_versions", {}))}

    @answered
    def trace_start(self):
        """Watch the layers: `trace_stop` answers {layer: projections of the residual stream after it}."""
        from vllm.distributed import tensor_model_parallel_all_reduce
        model = self.model_runner.model
        layers = dict(enumerate(getattr(model, "language_model", model).model.layers))

        def stream(output):
            if len(output) == 2:                             # added later: this rank's part of the output, and the residual
                return tensor_model_parallel_all_reduce(output[0]) + output[1]
            x, residual, post, comb = output                 # Flash: its streams are mixed in the next layer; here, their mean
            return x if post is None else layers[0].hc_post(x, residual, post, comb).mean(1)
        self.tracing = Trace(layers, stream)
        return {}

    @answered
    def trace_stop(self):
        return {"layers": self.__dict__.pop("tracing").stop()}

    def _free_slot(self, adapters):
        """A slot that no version holds, or the oldest version's; never the newest one's, which is being served."""
        held = {slot: v for v, slot in self.adapter_versions.items()}
        free = [i for i in range(adapters.lora_slots) if i not in held and adapters.lora_index_to_id[i] is None]
        if free:
            self.adapter_plans.pop(free[0], None)            # somebody else may have written there meanwhile
            return free[0]
        old = sorted(self.adapter_versions)[:-1]
        if not old:
            raise Stop(f"no adapter slot is free: max_loras is {adapters.lora_slots}, and {adapters.lora_index_to_id} are taken")
        slot = self.adapter_versions.pop(old[0])
        adapters.remove_adapter(old[0] + 1)
        adapters.lora_index_to_id[slot] = None
        return slot

    def _plan(self, adapters, header, flat, slot):
        """What to copy where for this layout and slot: worked out at its first version, which clears the rest of it too."""
        same = (header.layout, header.rank, header.experts)
        if self.adapter_plans.get(slot, (None,))[0] != same:
            self.adapter_plans.pop(slot, None)               # the slot is about to change
            self.adapter_plans[slot] = same, Plan(header, flat, self._places(adapters, header, views(header, flat), slot))
        return self.adapter_plans[slot][1]

    def _places(self, adapters, header, tensors, slot):
        """Yield (whole slot tensor, source, key, region to write) for every tensor; modules without one are zeroed.
        Raises Stop if a tensor has no module, or a module of an adapted kind gets no tensor."""
        kinds = {kind(k).rpartition(".")[0] for k in tensors}              # mlp.experts.gate_proj, ...
        left, unfilled = dict(tensors), []

        def pair(path):
            """lora_A and lora_B of an HF module path, or None where this bundle does not adapt that kind of module."""
            if kind(path) not in kinds:
                return None
            got = left.pop(f"{path}.lora_A", None), left.pop(f"{path}.lora_B", None)
            if None in got:
                unfilled.append(path)
                return None
            if got[0].shape[-2] != got[1].shape[-1]:
                raise Stop(f"{path}.lora_A has shape {tuple(got[0].shape)} and lora_B {tuple(got[1].shape)}: their ranks differ")
            return got

        for name, module in adapters.modules.items():
            path = from_vllm(name)
            if path.endswith(".experts"):
                yield from self._expert_places(module, path, pair, header, slot)
                continue
            parts = [from_vllm(p) for p in adapters.packed_modules.get(name, [name])]
            pairs = [pair(p) for p in parts]
            if not any(pairs):
                module.reset_lora(slot)
                continue
            for p in parts:
                if kind(p) in SILENT:
                    raise Stop(f"{p} cannot be adapted: {SILENT[kind(p)]}")
                if p.endswith(".kv_b_proj") and self.model_config.use_mla:
                    raise Stop(f"{p} cannot be adapted: vLLM {TESTED_VLLM}'s MLA attention uses the unadapted weight "
                               "in decode and cached prefill")
            a, b = ([p and p[i] for p in pairs] for i in (0, 1))
            if module.tp_size > 1:
                single = len(module.lora_a_stacked) == 1 and name not in adapters.packed_modules
                whole = b
                a = [module.slice_lora_a(a[0])] if single else module.slice_lora_a(a)
                b = [module.slice_lora_b(b[0])] if single else module.slice_lora_b(b)
                for i in getattr(module.base_layer, "replicated_shard_ids", ()):         # vLLM would cut Flash's f_a and g_a, too
                    b[i] = whole[i]
            for i, p in enumerate(parts):
                dest_a, dest_b = module.lora_a_stacked[i][slot, 0], module.lora_b_stacked[i][slot, 0]
                if a[i] is None:
                    dest_a.zero_(), dest_b.zero_()
                    continue
                yield dest_a, a[i], f"{p}.lora_A", dest_a[:a[i].shape[-2]]
                yield dest_b, b[i], f"{p}.lora_B", dest_b[:, :b[i].shape[-1]]
        if left:
            some = ", ".join(sorted(left)[:3])
            raise Stop(f"{len(left)} of {len(tensors)} tensors match no module of this sampler: {some}")
        if unfilled:
            some = ", ".join(sorted(unfilled)[:3])
            raise Stop(f"{len(unfilled)} modules would keep no adapter, their tensors are missing: {some}")

    def _expert_places(self, module, path, pair, header, slot):
        triple = {p: pair(f"{path}.{p}_proj") for p in ("gate", "up", "down")}
        if not all(triple.values()):
            module.reset_lora(slot)
        if not any(triple.values()):
            return
        if module.w13_lora_a_stacked[0].shape[1] != module.local_num_experts:
            raise Stop("vLLM's enable_moe_shared_loras has another meaning than one adapter for all experts: "
                       "start the sampler without it")
        module.adapter_enabled[slot] = 1
        first = module.ep_rank * module.local_num_experts
        places = {"gate": (module.w13_lora_a_stacked[0], module.w13_lora_b_stacked[0], module._slice_w13_a, module._slice_w13_b),
                  "up": (module.w13_lora_a_stacked[1], module.w13_lora_b_stacked[1], module._slice_w13_a, module._slice_w13_b),
                  "down": (module.w2_lora_a_stacked[0], module.w2_lora_b_stacked[0], module._slice_w2_a, module._slice_w2_b)}
        for p, (stack_a, stack_b, slice_a, slice_b) in places.items():
            if triple[p] is None:
                continue
            a, b = triple[p]
            if header.experts == "each":
                if a.shape[0] != module.global_num_experts:
                    raise Stop(f"{path}.{p}_proj has adapters for {a.shape[0]} experts, "
                               f"the model has {module.global_num_experts}")
                a, b = (slice_(t[first:first + module.local_num_experts]) for t, slice_ in ((a, slice_a), (b, slice_b)))
            else:
                a, b = slice_a(a[None])[0], slice_b(b[None])[0]
            yield stack_a[slot], a, f"{path}.{p}_proj.lora_A", stack_a[slot][:, :a.shape[-2]]
            yield stack_b[slot], b, f"{path}.{p}_proj.lora_B", stack_b[slot][:, :, :b.shape[-1]]


class Plan:
    """Where a layout's tensors lie in a buffer, and the regions of one slot that take them."""

    def __init__(self, header, flat, places):
        self.keys, self.slices, regions, sources, parts = [], {}, [], [], []
        shapes, start = {e.key: e.shape for e in header.entries}, flat.data_ptr()
        number = {key: i for i, key in enumerate(shapes)}
        for dest, source, key, region in places:
            if dest.shape != region.shape:                   # a slot larger than the rank: the rest must keep no older adapter
                dest.zero_()
            if region.shape[-source.ndim:] != source.shape:
                raise Stop(f"{key} has shape {tuple(source.shape)}, its slot takes {tuple(region.shape)}")
            if not start <= source.data_ptr() < start + flat.numel():
                raise Stop(f"vLLM {TESTED_VLLM} copied {key} to slice it: the hand-off reads slices in place")
            if tuple(source.shape) != shapes[key]:
                self.slices[len(self.keys)] = source.dtype, (tuple(source.shape), source.stride(), source.storage_offset())
            self.keys.append(key)
            # a tensor shared by the experts lies in the slot once for each
            parts.append(len(region) if region.ndim > source.ndim else 1)
            regions.append(region)
            sources.append(source)
        self.entries = [number[key] for key in self.keys]    # of the header
        self.write, self.reader = Scatter(regions, sources, flat), Reader(regions, parts)


def from_vllm(name):
    """vLLM's name of a module -> ours: model.layers.0.mlp, language_model.model.layers.0.mlp -> layers.0.mlp"""
    return name.removeprefix("language_model.").removeprefix("model.")


def kind(path):
    """layers.5.mlp.experts.gate_proj -> mlp.experts.gate_proj"""
    return ".".join(path.split(".")[2:])
