"""GLM-5.3-Flash in vLLM 0.32.0: what its class lacks for adapters and exact routing, and what a reload of weights leaves behind.

The names of fused projections, the router's dtype and `refresh` are the CPU class's too and are tested there.
Retired when vLLM's Glm5NextForConditionalGeneration names its fused projections in packed_modules_mapping, routes in float32, and
its layers forget what they derived from weights that are reloaded.
"""
import torch
from vllm import ModelRegistry
from vllm.model_executor.models.utils import WeightsMapper
from vllm.models.glm5next.common import model

from common import all_reduce
from common.cli import Stop

# vLLM's projection: the checkpoint's, in the order in which it concatenates them. vLLM's class knows the first of them only, and
# refuses adapters on the others' parts.
PACKED = {"gate_up_proj": ["gate_proj", "up_proj"], "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
          "in_proj_qkvbfg_a": ["q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"]}
# adapters of f_a_proj and f_b_proj under transformers' names for them
FORGET_GATE = WeightsMapper(orig_to_new_substr={".forget_gate.": "."})


def float32_router(vllm_config):
    """transformers and the trainer compute router scores in float32; vLLM does so for GLM-5.3, and for Flash if it is told to."""
    vllm_config.model_config.hf_text_config.moe_router_dtype = "float32"


class Glm5NextForConditionalGeneration(model.Glm5NextForConditionalGeneration):
    packed_modules_mapping = PACKED
    hf_to_vllm_mapper = model.Glm5NextForConditionalGeneration.hf_to_vllm_mapper | FORGET_GATE

    def __init__(self, *, vllm_config, prefix=""):
        float32_router(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)


class Worker(all_reduce.Worker):
    """Every worker process has the class above before it builds the model."""

    def __init__(self, *args, **kwargs):
        ModelRegistry.models.pop("Glm5NextForConditionalGeneration", None)
        ModelRegistry.register_model("Glm5NextForConditionalGeneration", Glm5NextForConditionalGeneration)
        super().__init__(*args, **kwargs)


def whole_blocks(vllm_config):
    """Stop if a prompt would come in pieces that end anywhere: vLLM's indexer loses a pool of keys that two of them share."""
    cache, most = vllm_config.cache_config, vllm_config.scheduler_config.max_num_batched_tokens
    if cache.mamba_cache_mode == "align" and cache.block_size > most:
        tp = vllm_config.parallel_config.tensor_parallel_size
        raise Stop(f"vLLM's cache blocks hold {cache.block_size} tokens (linear attention at tensor parallel size {tp}), "
                   f"a batch {most}: it takes a larger size, or room for longer answers")


@torch.inference_mode()                      # vLLM made these tensors at such a pass, and lets only such a one change them
def refresh(llm):
    """Compute again, in place, what vLLM derives from weights at the first pass and keeps: after a reload it would stay that of
    the old weights, in captured graphs too."""
    for module in llm.modules():
        if getattr(module, "_merged_conv_weight", None) is not None:
            parts = [conv.weight.flatten(1) for conv in (module.q_conv1d, module.k_conv1d, module.v_conv1d)]
            module._merged_conv_weight.copy_(torch.cat(parts))
        if getattr(module, "_wp_fp32", None) is not None:
            module._wp_fp32.copy_(module.wk_weights_proj.weight[module.head_dim:].t())
