"""How long a step takes, at published rates. No torch.

No run of ours is behind these numbers; a plan's hours are as good as they are.
"""
from types import SimpleNamespace

from common.size import text

# Published, from SkyRL's full fine-tuning on 8 x 8 B200 at step 1 (1,536 answers of 4,460 tokens): generation 410 s with
# 192 requests in an engine (fewer at once are faster each), forward 320 s, updates 1,550 s
ANSWER, PROMPT = 4460, 150        # mean tokens; the prompt's are assumed
GLM5P3 = SimpleNamespace(
    request=11,                   # tokens/s of one request: 4,460 / 410
    score=345,                    # tokens/s of one GPU: 1,536 x 4,610 / 64 / 320
    update=71,                    # tokens/s of one GPU: 1,536 x 4,610 / 64 / 1,550
    adapter=71,                   # the same of LoRA, which makes no weight gradients: not published, so as slow
    sync=0.62e9 / 13)             # bytes/s of an adapter: 0.62 GB in 13 s (#2195, Trajectory field report): handling, not wire
# Flash: only whole steps are published, 15 to 21 minutes of full fine-tuning on 8 x 8 B200, ~40 of LoRA on 2 x 8 B300, both of
# 1,536 answers. Their length is assumed to be 4,460 too, and 18 minutes less publish and moves to divide as GLM-5.3's step does;
# what generating and scoring leaves of LoRA's 40 are its updates
FLASH = SimpleNamespace(request=24, score=770, update=160, adapter=290, sync=3.9 * 2 ** 30 / 29)      # an adapter: 29 s
COPY_BYTES_PER_S = 25e9           # host to GPU or back, all cards of a node at once. Assumed
WEIGHTS_BYTES_PER_S = 599 * 2 ** 30 / 45      # all weights to each node's sampler: Flash's in ~45 s, published
MERGED_BYTES_PER_S = 599 * 2 ** 30 / 112      # the same with an adapter merged into them: ~112 s, published


def of(c):
    return FLASH if "linear_num_heads" in text(c) else GLM5P3


def tokens(cfg):
    """Of an answer."""
    return min(ANSWER, cfg.max_response_tokens)


def sample(c, cfg, answers):
    """Seconds to generate so many answers, in rounds of as many as the engines take at once."""
    return max(1, answers / (cfg.engines * cfg.max_num_seqs)) * tokens(cfg) / of(c).request


def step(c, cfg, weights, lora):
    """{what: seconds} of one step without its publish, `cfg`: a recipe's Config; `move` is the sampler's weights to the host and
    back and the trainer's to the GPU. weights: bytes on a GPU."""
    answers, v = cfg.prompts_per_step * cfg.group_size, of(c)
    each = answers * (tokens(cfg) + PROMPT) / cfg.trainer_ranks
    return {"sample": sample(c, cfg, answers), "score": each / v.score, "update": each / (v.adapter if lora else v.update),
            "move": 3 * weights / COPY_BYTES_PER_S}
