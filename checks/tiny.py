"""Tiny random checkpoints of GLM-5.3 and GLM-5.3-Flash for the tests, with every structural feature of the real ones, and their
logprobs from transformers."""
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Glm5NextConfig,
    Glm5NextForConditionalGeneration,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
)

# the real model on the right where a size matters for the structure
DEFAULTS = dict(
    vocab_size=256, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=4,     # 78 layers
    num_attention_heads=4, num_key_value_heads=4, q_lora_rank=48, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=24,
    v_head_dim=24, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, routed_scaling_factor=2.5,      # 256 experts, 8
    first_k_dense_replace=1,                                                                                       # 3
    index_topk=2048, index_n_heads=32, index_head_dim=32, index_topk_freq=1, index_skip_topk_offset=2,       # freq 4, offset 3
    max_position_embeddings=4096, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    scoring_func="sigmoid", topk_method="noaux_tc", indexer_rope_interleave=True)                            # vLLM reads these
# 32 index heads: with few, ReLU scores tie at zero and the top-k of two implementations differs by its tie-breaking
SPARSE = dict(num_hidden_layers=6, first_k_dense_replace=2, index_topk=16, index_topk_freq=2, index_skip_topk_offset=2)   # ffsfsf

FLASH = dict(
    vocab_size=264, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=4,     # 45 layers
    num_attention_heads=4, num_key_value_heads=4, q_lora_rank=48, kv_lora_rank=32, qk_rope_head_dim=0, qk_nope_head_dim=24,
    v_head_dim=24, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, routed_scaling_factor=2.5,      # 288 experts, 8
    first_k_dense_replace=1, swiglu_limit=0.8,                                   # 3; 10: here it cuts many of the random values
    index_topk=2048, index_n_heads=32, index_head_dim=32, index_kpool=4, index_kpool_always_select_tail=True,
    linear_num_heads=4, linear_head_dim=16, linear_conv_kernel_dim=4, linear_lower_bound=-5.0,                     # 64 x 128
    hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, max_position_embeddings=4096, rms_norm_eps=1e-5,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    mhc=True, topk_method="noaux_tc", scoring_func="sigmoid", mla_use_nope=True, indexer_rope_interleave=True,
    moe_layer_freq=1, num_nextn_predict_layers=0)                                        # from mhc on vLLM alone reads them
# by default layers 3, 7, 11, ... are indexed; after 20 rounds of Sinkhorn and Knopp one more or less would not show
FLASH_SPARSE = dict(index_topk=16, hc_sinkhorn_iters=3, layer_types=["linear_attention", "indexed_attention"] * 2)
FLASH_VISION = dict(depth=1, hidden_size=32, num_heads=2, image_size=28, patch_size=14, out_hidden_size=64, intermediate_size=32,
                    projection_intermediate_size=32)
# parameters that a bfloat16 checkpoint keeps in float32, as transformers' names end
FLOAT32 = ("e_score_correction_bias", "A_log", "dt_bias", "conv1d.weight", "_hc.fn", "_hc.base", "_hc.scale", "compress_ape")


def config(**over):
    return GlmMoeDsaConfig(**{**DEFAULTS, **over})


def flash_config(**over):
    """over: of the text part. Image and video tokens are the last of the vocabulary, which `sequences` does not draw."""
    text = {**FLASH, **over}
    n, dense = text["num_hidden_layers"], text["first_k_dense_replace"]
    text.setdefault("mlp_layer_types", ["dense"] * dense + ["sparse"] * (n - dense))
    kinds = ("image_start", "image", "image_end", "video_start", "video", "video_end")
    ids = {f"{kind}_token_id": text["vocab_size"] - 8 + i for i, kind in enumerate(kinds)}
    return Glm5NextConfig(text_config=text, vision_config=FLASH_VISION, tie_word_embeddings=False, **ids)


def checkpoint(folder, seed=0, dtype=torch.float32, shard="200KB", **over):
    """Write a checkpoint of several files with random weights (norms near 1, a correction bias that changes routing); returns its
    config."""
    return _write(GlmMoeDsaForCausalLM, config(**over), folder, seed, dtype, shard)


def flash_checkpoint(folder, seed=0, dtype=torch.float32, shard="200KB", **over):
    """The same of GLM-5.3-Flash, with a vision tower; over: of the config's text part."""
    return _write(Glm5NextForConditionalGeneration, flash_config(**over), folder, seed, dtype, shard)


def _write(kind, hf, folder, seed, dtype, shard):
    model = kind._from_config(hf, dtype=torch.float32)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=g)
            if kind is Glm5NextForConditionalGeneration and name.endswith(("embed_tokens.weight", "lm_head.weight")):
                p.copy_(noise if "embed" in name else 0.5 * noise / p.shape[-1] ** 0.5)      # else rounding shows as 4e-5 later
            elif name.endswith("dt_bias"):
                p.copy_(0.5 * noise - 2)                                 # decays of 5 to 90 % a token: the state reaches back
            elif name.endswith(("A_log", "_hc.base", "compress_ape")):
                p.copy_(0.3 * noise)
            elif name.endswith("_hc.scale"):
                p.copy_(0.5 + 0.2 * noise)
            else:
                p.copy_(1 + 0.1 * noise if p.ndim == 1 else noise / p.shape[-1] ** 0.5)
        for name, b in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                b.copy_(0.1 * torch.randn(b.shape, generator=g))
    keep = {n: t.data.clone() for n, t in (*model.named_parameters(), *model.named_buffers()) if n.endswith(FLOAT32)}
    model.to(dtype)
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if name in keep:
            t.data = keep[name]
    for part in (model.config, model.config.get_text_config()):
        part.dtype = dtype
    model.save_pretrained(folder, max_shard_size=shard)
    return model.config


def sequences(lengths, seed=1, vocab=256):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (n,), generator=g) for n in lengths]


def hf_model(folder, dtype=torch.float32):
    """transformers' model with the a_layernorm eps of the config, as vLLM and this repository have it (transformers hard-codes
    1e-6 in GLM-5.3)."""
    flash = AutoConfig.from_pretrained(folder).model_type == "glm5_next"
    kind = AutoModelForImageTextToText if flash else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    for name, module in model.named_modules():
        if name.endswith("a_layernorm"):
            module.variance_epsilon = model.config.get_text_config().rms_norm_eps
    return model


def hf_logprobs(model, seqs):
    """Logprobs of every token but the first of each sequence, one after the other: [sum(len - 1)]."""
    with torch.no_grad():
        rows = [model(input_ids=s[None]).logits[0, :-1].float().log_softmax(-1) for s in seqs]
    return torch.cat([r.gather(-1, s[1:, None])[:, 0] for r, s in zip(rows, seqs)])
