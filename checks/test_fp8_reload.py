"""A sampler that starts empty and casts what arrives to FP8, by vLLM's dummy loader and our reload: values and places."""
from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.quantization import _ONLINE_SHORTHANDS
from vllm.distributed import parallel_state
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization.online import fp8
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_processing, record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from common.cli import Stop
from common.receive_weights import Buckets

CONFIG = SimpleNamespace(dtype=torch.bfloat16)


class Model(torch.nn.Module):
    """A layer that is cast and one that is not; names and loading as vLLM's models have them."""

    def __init__(self, quantization):
        super().__init__()
        self.proj = ReplicatedLinear(256, 192, bias=False, quant_config=quantization, params_dtype=torch.bfloat16)
        self.gate = torch.nn.Linear(256, 192, bias=False, dtype=torch.bfloat16)

    def load_weights(self, weights):
        held = dict(self.named_parameters())
        return {name for name, w in weights if not getattr(held[name], "weight_loader", default_weight_loader)(held[name], w)}


class Kernel:
    """In the place of the GPU's: the layer's weight times its scale."""

    def process_weights_after_loading(self, layer):
        pass

    def apply_weights(self, layer, x, bias=None):
        return x @ dequantized(layer).T


def dequantized(layer):
    if hasattr(layer, "weight_scale_inv"):
        scale = layer.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)[:192]
        return (layer.weight.float() * scale).bfloat16()
    return (layer.weight.T.float() * layer.weight_scale).bfloat16()


@pytest.fixture(params=["fp8_per_block", "fp8_per_tensor"])
def engine(request, monkeypatch):
    """vLLM's side of a hand-off, started with load_format dummy, and its model."""
    monkeypatch.setattr(fp8, "get_current_vllm_config", lambda: SimpleNamespace(model_config=CONFIG))
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(rank_in_group=0, world_size=1))
    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda **_: Kernel())
    monkeypatch.setattr(fp8, "per_block_cast_to_fp8", fp8.per_block_cast_to_fp8._torchdynamo_orig_callable)      # not compiled
    monkeypatch.setattr(fp8.ops, "scaled_fp8_quant", lambda w, scale: ((w.float() / scale).to(torch.float8_e4m3fn), scale))
    with set_current_vllm_config(VllmConfig()):
        model = Model(OnlineQuantizationConfig(_ONLINE_SHORTHANDS[request.param]))
        record_metadata_for_reloading(model)
        DummyModelLoader(SimpleNamespace(model_loader_extra_config=None, load_format="dummy")).load_weights(model, CONFIG)
        finalize_layerwise_processing(model, CONFIG)
        held = object.__new__(Buckets)
        held.model, held.model_config = model, CONFIG
        yield held, model


def places(model):
    return {name: (t.data_ptr(), t.dtype, t.shape) for name, t in model.named_parameters()}


def test_each_version_is_cast_where_the_kernels_look(engine):
    held, model = engine
    before = places(model)
    assert model.proj.weight.dtype == torch.float8_e4m3fn and any("_scale" in name for name in before)
    for i in range(3):
        sent = {f"{name}.weight": (10 ** i * torch.randn(192, 256)).bfloat16() for name in ("proj", "gate")}
        held.start_weight_update()
        held.loaded |= model.load_weights(sent.items())
        held.finish_weight_update()
        assert places(model) == before, "captured graphs read what was there when they were captured"
        assert torch.equal(model.gate.weight, sent["gate.weight"])
        left = (dequantized(model.proj).float() - sent["proj.weight"].float()).abs().max() / sent["proj.weight"].abs().max()
        assert 0.02 < left < 0.04, "three bits after the point: half of a sixteenth to an eighth"
        # what vLLM's attention absorbs of kv_b_proj, after each reload
        assert torch.equal(get_and_maybe_dequant_weights(model.proj, torch.bfloat16), dequantized(model.proj))


def test_a_layer_that_got_nothing_is_named_and_its_scale_is_not(engine):
    held, model = engine
    held.start_weight_update()
    held.loaded |= model.load_weights([("gate.weight", torch.ones(192, 256, dtype=torch.bfloat16))])
    with pytest.raises(Stop, match="1 parameters of the sampler got nothing: proj.weight$"):
        held.finish_weight_update()
