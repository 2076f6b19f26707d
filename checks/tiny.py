"""Tiny random GLM-5.3 checkpoints for the tests, with every structural feature of the real one, and their logprobs from
transformers."""
import torch
from transformers import AutoModelForCausalLM, GlmMoeDsaConfig, GlmMoeDsaForCausalLM

# real GLM-5.3 on the right where a size matters for the structure
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


def config(**over):
    return GlmMoeDsaConfig(**{**DEFAULTS, **over})


def checkpoint(folder, seed=0, dtype=torch.float32, shard="200KB", **over):
    """Write a checkpoint of several files with random weights (norms near 1, a correction bias that changes routing); returns its
    config."""
    hf = config(**over)
    model = GlmMoeDsaForCausalLM._from_config(hf, dtype=torch.float32)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=g)
            p.copy_(1 + 0.1 * noise if p.ndim == 1 else noise / p.shape[-1] ** 0.5)
        biases = [b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
        for b in biases:
            b.copy_(0.1 * torch.randn(b.shape, generator=g))
    keep = [b.clone() for b in biases]
    model.to(dtype)
    for n, b in model.named_buffers():
        if n.endswith("e_score_correction_bias"):
            b.data = keep.pop(0)                                         # float32 in every checkpoint
    model.save_pretrained(folder, max_shard_size=shard)
    return model.config


def sequences(lengths, seed=1, vocab=256):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (n,), generator=g) for n in lengths]


def hf_model(folder, dtype=torch.float32):
    """transformers' model with the a_layernorm eps of the config, as vLLM and this repository have it (transformers hard-codes
    1e-6)."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    for name, module in model.named_modules():
        if name.endswith("a_layernorm"):
            module.variance_epsilon = model.config.rms_norm_eps
    return model


def hf_logprobs(model, seqs):
    """Logprobs of every token but the first of each sequence, one after the other: [sum(len - 1)]."""
    with torch.no_grad():
        rows = [model(input_ids=s[None]).logits[0, :-1].float().log_softmax(-1) for s in seqs]
    return torch.cat([r.gather(-1, s[1:, None])[:, 0] for r, s in zip(rows, seqs)])
