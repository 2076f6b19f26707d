"""What a tensor is called: megatron-core's name <-> the checkpoint's, for GLM-5.3 and GLM-5.3-Flash.

Outside of the trainer a tensor has its neutral name, the checkpoint's without `model.` (Flash: `model.language_model.`):
layers.3.self_attn.o_proj.weight, embed_tokens.weight, lm_head.weight.
"""
import re

from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

TOP = {"embedding.word_embeddings.weight": "embed_tokens.weight", "output_layer.weight": "lm_head.weight",
       "decoder.final_layernorm.weight": "norm.weight"}
MODULES = {
    "input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj", "self_attention.q_layernorm": "self_attn.q_a_layernorm",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj", "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm", "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
    "self_attention.linear_proj": "self_attn.o_proj",
    "self_attention.core_attention.indexer.linear_wq_b": "self_attn.indexer.wq_b",
    "self_attention.core_attention.indexer.linear_wk": "self_attn.indexer.wk",
    "self_attention.core_attention.indexer.k_norm": "self_attn.indexer.k_norm",
    "self_attention.core_attention.indexer.linear_weights_proj": "self_attn.indexer.weights_proj",
    "mlp.router": "mlp.gate",
    # Flash's linear attention, whose modules have the checkpoint's names
    **{f"self_attention.{n}": f"self_attn.{n}" for n in (
        "q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj", "o_norm", "o_proj")},
}
PARAMETERS = {                                                     # those that are no module's weight
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    **{f"self_attention.{n}": f"self_attn.{n}" for n in ("A_log", "dt_bias")},
    **{f"self_attention.{n}_conv1d": f"self_attn.{n}_conv1d.weight" for n in "qkv"},
    **{f"self_attention.core_attention.indexer.{n}": f"self_attn.indexer.{n}"
       for n in ("index_kpool_compress_ape", "index_kpool_compress_gate")},
    **{f"{block}_hc.{n}": f"hc_{block}_{n}" for block in ("attn", "ffn") for n in ("fn", "base", "scale")},
}
EXPERT = re.compile(r"mlp\.experts\.linear_fc([12])\.weight(\d+)$")


def prefix(cfg):
    return "model.language_model." if hasattr(cfg, "flash") else "model."


def neutral(name):
    """The neutral name of a checkpoint's tensor."""
    return name.removeprefix("model.").removeprefix("language_model.")


def untouched(name, cfg):
    """Whether a tensor of a checkpoint is left unread, and copied on saving: multi-token prediction, Flash's vision tower."""
    return name.startswith((f"{prefix(cfg)}layers.{cfg.num_layers}.", *["model.visual."] * hasattr(cfg, "flash")))


def hf_names(name, cfg, ep_rank=None):
    """The checkpoint's tensors behind a local mcore tensor (one, or gate and up), and whether it belongs to a routed expert (of
    this rank or of expert parallel rank `ep_rank`)."""
    if name in TOP:
        return [TOP[name] if name == "output_layer.weight" else prefix(cfg) + TOP[name]], False
    _, _, layer, rest = name.split(".", 3)
    root = f"{prefix(cfg)}layers.{int(layer) + get_transformer_layer_offset(cfg)}."
    if found := EXPERT.match(rest):
        ep_rank = mpu.get_expert_model_parallel_rank() if ep_rank is None else ep_rank
        expert = int(found[2]) + ep_rank * (cfg.num_moe_experts // cfg.expert_model_parallel_size)
        return [f"{root}mlp.experts.{expert}.{p}_proj.weight" for p in (("gate", "up") if found[1] == "1" else ("down",))], True
    if rest in PARAMETERS:
        return [root + PARAMETERS[rest]], False
    module, _, leaf = rest.rpartition(".")
    if module.startswith("mlp.") and module.endswith("linear_fc1"):
        return [root + module[:-len("linear_fc1")] + f"{p}_proj.weight" for p in ("gate", "up")], False
    if module.startswith("mlp.") and module.endswith("linear_fc2"):
        return [root + module[:-len("linear_fc2")] + "down_proj.weight"], False
    return [f"{root}{MODULES[module]}.{leaf}"], False
