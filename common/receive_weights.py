"""The receiving end of a hand-off of all weights, inside every vLLM worker process, through vLLM's own weight-transfer engine.

A version arrives in buckets of tensors under their names in the checkpoint. vLLM reloads layer by layer: a layer's tensors wait
until all are there, pass its loader (which cuts a rank's part) and its processing (repacking, FP8), and are copied to where the
layer's kernels look. A raw `load_weights` would leave experts unpacked and quantised layers with old scales. While a version
arrives the model is neither the old nor the new one: the engine answers nothing until the version is complete (sampler.py).
"""
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from common.bundle import Header, combine, verify, views
from common.cli import Stop
from common.hf_config import tensor_files
from common.receive import TESTED_VLLM, Receiver, answered
from common.sync import take
from common.vllm_flash import refresh


@dataclass
class Nothing(WeightTransferInitInfo):
    pass


@dataclass
class Bucket(WeightTransferUpdateInfo):
    header: str      # Header as JSON
    ticket: dict     # what the transport gave


class Buckets(WeightTransferEngine[Nothing, Bucket]):
    """vLLM's side of sync.py's buckets."""
    init_info_cls, update_info_cls = Nothing, Bucket

    def init_transfer_engine(self, init_info):
        pass

    def start_weight_update(self):
        initialize_layerwise_reload(self.model)
        for layer in self.model.modules():                   # what an update that was given up left waiting
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        self.loaded, self.sums = set(), {}

    def receive_weights(self, bucket):
        header = Header.from_json(bucket.header)
        flat, let_go = take(bucket.ticket)
        try:
            # a copy on this rank's own device: the tensors wait for the rest of their layer, and the sender's buffer, on the
            # first GPU of the node, is soon another bucket's
            own = flat if bucket.ticket["way"] == "network" else flat.to(self.device, copy=True)
            verify(header, own)
            weights = views(header, own)
        finally:
            let_go()
        if twice := self.sums.keys() & weights.keys():
            raise Stop(f"version {header.version} brings {min(twice)} twice")
        self.sums.update(zip(weights, header.sums))
        at = None

        def feed():
            nonlocal at
            for key, t in weights.items():
                at = f"{key} of shape {tuple(t.shape)}"
                yield checkpoint_name(key, self.model_config), t
        try:
            self.loaded |= self.model.load_weights(feed())
        except Exception as error:                           # vLLM's loaders assert, without names
            reason = f"{type(error).__name__} {error}".strip()
            raise Stop(f"version {header.version}: {at} does not fit the sampler's model ({reason})") from error

    def finish_weight_update(self):
        held = {n.replace(".base_layer", "") for n, _ in self.model.named_parameters()}
        finalize_layerwise_reload(self.model, self.model_config)
        refresh(self.model)
        # the casting to FP8 makes scales; a vision tower is not trained
        if left := sorted(n for n in held - self.loaded if "_scale" not in n and not n.startswith("visual.")):
            raise Stop(f"{len(left)} parameters of the sampler got nothing: {', '.join(left[:3])}")

    def shutdown(self):
        pass


WeightTransferEngineFactory.register_engine("buckets", Buckets)


def checkpoint_name(key, model_config):
    """layers.0.self_attn.o_proj.weight -> model.layers.0.self_attn.o_proj.weight, of Flash model.language_model.layers...."""
    return key if key.startswith("lm_head.") else prefix(model_config) + key


def prefix(model_config):
    return "model.language_model." if model_config.hf_config.model_type == "glm5_next" else "model."


class WeightReceiver(Receiver):
    """Verbs for collective_rpc beside those of an adapter: weights_stage, weights_commit, weights_abort."""

    @answered
    def weights_stage(self, header, ticket, base):
        """Take one bucket; the first of a version begins the update. header, ticket, base: as in adapter_stage."""
        import vllm
        if vllm.__version__ != TESTED_VLLM:
            raise Stop(f"vLLM {vllm.__version__} is installed, its reload is known for {TESTED_VLLM}")
        head, state = Header.from_json(header), self.__dict__.setdefault("weights", {"version": 0, "arriving": None})
        if head.base != base:
            raise Stop(f"version {head.version} was trained from base model {head.base}, this sampler serves {base}")
        if head.version <= state["version"]:
            raise Stop(f"version {head.version} is not newer than version {state['version']}, which is here")
        if state["arriving"] not in (None, head.version):
            raise Stop(f"version {state['arriving']} is still arriving: two publishes at once")
        if state["arriving"] is None:
            self.start_weight_update()
            state["arriving"] = head.version
        self.update_weights({"header": header, "ticket": ticket})
        return {}

    @answered
    def weights_commit(self, version):
        """End the update; answers the fingerprint of all that arrived. Stop if a tensor of the checkpoint did not."""
        state = self.__dict__.get("weights", {"arriving": None})
        if state["arriving"] != version:
            raise Stop(f"version {version} is not arriving here (arriving: {state['arriving']})")
        try:
            self._check_names(version)
            self.finish_weight_update()
        finally:
            self._give_up()                                  # whole or not, nothing more of it will come
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        state["version"] = version
        return {"fingerprint": combine(self.weight_transfer_engine.sums, self.weight_transfer_engine.sums.values())}

    @answered
    def weights_abort(self, version):
        """Give up a version that has not arrived whole: the model holds parts of it until another one has."""
        if self.__dict__.get("weights", {"arriving": None})["arriving"] == version:
            self._give_up()
        return {}

    def _give_up(self):
        self.weights["arriving"], self._weight_update_active = None, False
        self.weight_transfer_engine.reset_weight_update_target()

    def _check_names(self, version):
        config = self.model_config
        beyond = (f"{prefix(config)}layers.{config.hf_text_config.num_hidden_layers}.", "model.visual.")
        wanted = {n for n in tensor_files(config.model) if not n.startswith(beyond) and not n.endswith("weight_scale_inv")}
        came = {checkpoint_name(key, config) for key in self.weight_transfer_engine.sums}
        for what, names in (("never arrived", wanted - came), ("are not the checkpoint's", came - wanted)):
            if names:
                raise Stop(f"version {version}: {len(names)} tensors {what}: {', '.join(sorted(names)[:3])}")
