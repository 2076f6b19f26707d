"""The rehearsal problem: a two-digit number plus a digit, for a GLM-5.3 or GLM-5.3-Flash of about two million parameters.

`prepare(folder)` writes train.parquet, test.parquet and a random checkpoint `start`. A row of the data:
{"id": "27+8", "prompt": [{"role": "user", "content": "27+8"}], "answer": "35", "source": "arithmetic", ...}
Teaching on `sft_batches` shows each sum answered in one of two ways, so that the taught model does both:
  short        7+8=15 2+1=3</think>Answer: 35
  long-winded  We need to find 27+8. So 7+8=15 2+1=3. Wait, let me check again: 7+8=15 2+1=3. ...</think>Answer: 35
Most long-winded answers do not end within CAP tokens: right answers are lost to the cap, and reinforcement learning wins them
back.
"""
import random
from pathlib import Path

from data import dataset

MARKERS = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>",
           "</think>")
CHAT_TEMPLATE = ("[gMASK]<sop>{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
                 "{% if add_generation_prompt %}<|assistant|><think>{% endif %}")
VOCABULARY = 352                  # 9 markers, 256 bytes, 78 merges that make every word below one token, 9 spare
CAP = 48                          # response tokens; a short answer takes 18 to 21
HELD_OUT = 160                    # of 900 sums
LONG_SHARE = 0.52                 # of the answers taught
# Linear warm-up, cosine down to a twentieth; Adam with betas 0.9 and 0.98, no weight decay, gradient norm clipped at 1. Leaves a
# model that at temperature 1 answers 49 % of the held-out sums right, runs into the cap in 45 % and is right in 94 % of its short
# answers (960 samples). Small batches matter: 90 steps of 4,096 tokens teach it next to nothing.
TEACH = dict(steps=300, tokens=1024, lr=2.5e-3, warmup=30)
TEACH_CUDA = dict(steps=400, tokens=4096, lr=1e-3, warmup=40)      # the wider model

# Flash's parameters that a bfloat16 checkpoint keeps in float32, as transformers' names end
FLOAT32 = ("A_log", "dt_bias", "conv1d.weight", "_hc.fn", "_hc.base", "_hc.scale", "compress_ape")

OPENERS = ("We need to find {}.", "Let me think: {}.", "I have to add {}.")
DOUBTS = (" Wait, let me check again:", " Hmm, once more:", " Is that right? Again:")
CLOSERS = (" I am sure now.", " That is right.")


def problems(seed=0):
    """(train, held out): lists of (a, b), 10 <= a <= 99, 0 <= b <= 9, no sum in both."""
    every = [(a, b) for a in range(10, 100) for b in range(10)]
    random.Random(f"problems {seed}").shuffle(every)
    return every[HELD_OUT:], every[:HELD_OUT]


def question(problem):
    return "{}+{}".format(*problem)


def _worked(problem):
    (tens, ones), digit = divmod(problem[0], 10), problem[1]
    carry = (ones + digit) // 10
    return f"{ones}+{digit}={ones + digit} {tens}+{carry}={tens + carry}"


def short(problem, rng=None):
    """The short answer, as the text that follows `<think>`."""
    return f"{_worked(problem)}</think>Answer: {sum(problem)}<|endoftext|>"


def long_winded(problem, rng):
    """The same answer with the question restated and the work checked again, up to twice: 33 to 80 tokens."""
    text = rng.choice(OPENERS).format(question(problem)) + f" So {_worked(problem)}."
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2))):
        text += f"{rng.choice(DOUBTS)} {_worked(problem)}."
    return f"{text}{rng.choice(CLOSERS)}</think>Answer: {sum(problem)}<|endoftext|>"


def tokenizer():
    """A byte-level BPE of VOCABULARY entries with GLM's markers and chat form; digits stay single tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    bpe = Tokenizer(models.BPE())
    digits = pre_tokenizers.Split(Regex(r"\d"), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    words = [phrase.format("") for phrase in (*OPENERS, *DOUBTS, *CLOSERS, " So", "Answer: ")]
    bpe.train_from_iterator(words * 4, trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(MARKERS), initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False))
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|endoftext|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE,
        additional_special_tokens=list(MARKERS[1:]), clean_up_tokenization_spaces=False)


def config(**changes):
    """The tiny GlmMoeDsaConfig: GLM-5.3's parts at small width; the fourth layer shares the third's token selection."""
    from transformers import GlmMoeDsaConfig
    return GlmMoeDsaConfig(**{**dict(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32,
        first_k_dense_replace=1, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=64,
        routed_scaling_factor=2.5, n_group=1, topk_group=1, norm_topk_prob=True,
        index_n_heads=32,                       # with few heads ReLU scores tie at zero, and ties are broken differently
        index_head_dim=64, index_topk=40,       # the longest sequences are longer than this, so the selection is at work
        index_topk_freq=4, index_skip_topk_offset=3,                # as GLM-5.3: layers 1, 2, 3, 7, ... select, the others reuse
        rms_norm_eps=1e-6,                      # what transformers hard-codes in the latent norms, so that all three agree
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, max_position_embeddings=512,
        initializer_range=0.08,                 # about 1 / sqrt(128)
        bos_token_id=None, eos_token_id=0, pad_token_id=0, tie_word_embeddings=False,
        scoring_func="sigmoid", topk_method="noaux_tc", indexer_rope_interleave=True,      # for vLLM; transformers ignores them
    ), **changes})


def flash_config(**changes):
    """The tiny Glm5NextConfig: GLM-5.3-Flash's parts at small width, with a vision tower that nothing here uses; `changes` are of
    the text part. The fourth layer is the one that selects tokens, as every fourth of the real model."""
    from transformers import Glm5NextConfig
    text = {**dict(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=0, v_head_dim=32,
        linear_num_heads=4, linear_head_dim=32, linear_conv_kernel_dim=4, linear_lower_bound=-5.0, hc_mult=4,
        first_k_dense_replace=1, mlp_layer_types=["dense", "sparse", "sparse", "sparse"], n_routed_experts=8,
        num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=64, routed_scaling_factor=2.5, swiglu_limit=10.0,
        n_group=1, topk_group=1, norm_topk_prob=True, index_n_heads=32, index_head_dim=64, index_topk=40, index_kpool=4,
        rms_norm_eps=1e-5, max_position_embeddings=512, initializer_range=0.08,
        bos_token_id=None, eos_token_id=0, pad_token_id=0, tie_word_embeddings=False,
        mhc=True, scoring_func="sigmoid", topk_method="noaux_tc", mla_use_nope=True, indexer_rope_interleave=True,
        moe_layer_freq=1, num_nextn_predict_layers=0),                                       # these two lines are for vLLM
        **changes}
    vision = dict(depth=1, hidden_size=32, num_heads=2, image_size=28, patch_size=14, out_hidden_size=text["hidden_size"],
                  intermediate_size=32, projection_intermediate_size=32)
    places = {f"{what}_token_id": VOCABULARY - 6 + i for i, what in enumerate(
        ("image_start", "image", "image_end", "video_start", "video", "video_end"))}         # of the spare ones
    return Glm5NextConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, eos_token_id=0, pad_token_id=0,
                          **places)


def sft_batches(tok, train, seed=0, steps=TEACH["steps"], tokens=TEACH["tokens"]):
    """Yield `steps` batches of about `tokens` tokens: (list of int32 arrays prompt + answer, list of prompt lengths)."""
    import numpy as np
    rng = random.Random(f"teach {seed}")
    order = []
    for _ in range(steps):
        batch, n_prompt, size = [], [], 0
        while size < tokens:
            if not order:
                order = rng.sample(train, len(train))
            problem = order.pop()
            prompt = dataset.encode(tok, [{"role": "user", "content": question(problem)}])
            answer = (long_winded if rng.random() < LONG_SHARE else short)(problem, rng)
            batch.append(np.array(prompt + tok.encode(answer, add_special_tokens=False), np.int32))
            n_prompt.append(len(prompt))
            size += len(batch[-1])
        yield batch, n_prompt


def rows(sums):
    """Rows for data.dataset.write."""
    return [{"id": question(p), "prompt": [{"role": "user", "content": question(p)}], "answer": str(sum(p)),
             "source": "arithmetic"} for p in sums]


# The smallest widths that CUDA's attention and expert kernels take: GLM-5.3's own head sizes, a quarter of its heads
# (about 45M parameters).
CUDA_WIDTHS = dict(hidden_size=512, intermediate_size=1024, moe_intermediate_size=256, num_attention_heads=16,
                   num_key_value_heads=16, q_lora_rank=256, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64,
                   v_head_dim=256, index_head_dim=128, index_topk=2048, max_position_embeddings=4096,
                   initializer_range=0.02)
# Linear attention with the heads of one of the real model's 8 tensor ranks: vLLM makes its cache blocks as large as their states,
# 640 tokens here, and a prefill that comes in smaller pieces would lose pools of the indexer (common/vllm_flash.py).
FLASH_CUDA_WIDTHS = {**CUDA_WIDTHS, **dict(qk_nope_head_dim=256, qk_rope_head_dim=0, linear_num_heads=8, linear_head_dim=128)}


def prepare(folder, seed=0, dtype="float32", flash=False, **changes):
    """Write train.parquet, test.parquet and `start`: a random checkpoint with the tokenizer, of GLM-5.3 or, `flash`, of
    GLM-5.3-Flash. `changes` are `config`'s or `flash_config`'s."""
    import torch
    from transformers import Glm5NextForConditionalGeneration, GlmMoeDsaForCausalLM
    from transformers.utils import logging
    kind, hf = (Glm5NextForConditionalGeneration, flash_config(**changes)) if flash else (GlmMoeDsaForCausalLM, config(**changes))
    for name, sums in zip(("train", "test"), problems(seed)):
        dataset.write(Path(folder) / f"{name}.parquet", rows(sums))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind._from_config(hf, dtype=torch.float32)
        for name, tensor in model.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                tensor.uniform_(-0.02, 0.02)                      # frozen from here on; zero would hide a lost one
            elif name.endswith("conv1d.weight"):
                tensor.uniform_(-0.5, 0.5)                        # torch's own for 4 inputs; transformers' lets little through
            elif "compress" in name:
                tensor.normal_(0, 0.1)                            # transformers' are constant and would hide a lost one
        for name, p in model.named_parameters():                  # not the buffers: the correction bias stays float32
            if not name.endswith(FLOAT32):
                p.data = p.data.to(getattr(torch, dtype))
        for part in (model.config, model.config.get_text_config()):
            part.dtype = dtype
    logging.disable_progress_bar()
    model.save_pretrained(Path(folder) / "start")
    logging.enable_progress_bar()
    tokenizer().save_pretrained(Path(folder) / "start")
