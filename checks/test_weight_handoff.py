"""All weights from a real trainer rank to a real vLLM engine, in one process: each kind of tensor arrives, a version is whole or
the engine answers nothing, and the five-step check drives it as it does adapters."""
import os

import numpy as np
import pytest
import torch

from common.trainer import TrainerRank, mpu  # isort: skip - first, it prepares megatron-core for the CPU

from checks import logprob_parity
from checks.local import Local, memory
from common import bundle, sync, weights
from common.batch import merge
from common.cli import Stop
from common.sampler import SamplerEngine
from data import arithmetic

DTYPE, FP8 = os.environ.get("DTYPE", "float32"), os.environ.get("FP8", "none")          # FP8: the sampler's, as in the recipes
CUDA = torch.cuda.is_available()
# In bf16 rounding leaves 0.002-0.004 (H200), a third of what the smallest change, of the correction bias, makes.
MEAN, MAX, LEAST, FACTOR = {"float32": (2e-6, 5e-5, 4e-5, 10), "bfloat16": (0.06, 1, 0.008, 2.5)}[DTYPE]
LAYER = r"layers\.\d+\."
FAMILIES = {
    "embedding": "embed_tokens", "head": "lm_head", "final norm": "norm",
    "layer norms": LAYER + "(input|post_attention)_layernorm",
    "latent norms": LAYER + r"self_attn\.(q|kv)_a_layernorm", "attention": LAYER + r"self_attn\.(q_a|q_b|kv_a|kv_b|o)_proj.*",
    "indexer": LAYER + r"self_attn\.indexer\..*", "router": LAYER + r"mlp\.gate\.weight",
    "correction bias": LAYER + r"mlp\.gate\.e_score_correction_bias", "dense": LAYER + r"mlp\.(gate|up|down)_proj",
    "shared expert": LAYER + r"mlp\.shared_experts\..*", "routed gate": LAYER + r"mlp\.experts\.gate_proj",
    "routed up": LAYER + r"mlp\.experts\.up_proj", "routed down": LAYER + r"mlp\.experts\.down_proj", "all": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights")
    # bf16: smaller weights, or the rounding of a random model alone exceeds the tolerance that real ones keep
    widths = arithmetic.CUDA_WIDTHS if CUDA else {} if DTYPE == "float32" else {"initializer_range": 0.02}
    arithmetic.prepare(path, dtype=DTYPE, **widths)
    return path / "start"


@pytest.fixture(scope="module")
def engine(folder):
    room, batch = (4096, 1024) if CUDA else (192, 64)
    kernels = {"linear_backend": "triton", "moe_backend": "triton"} if FP8 == "fp8_per_block" else {}
    return SamplerEngine(folder, dtype=DTYPE, max_model_len=room, max_num_seqs=16, max_num_batched_tokens=batch, weights=True,
                         gpu_memory_utilization=0.4,
                         vllm_args=None if FP8 == "none" else {"load_format": "dummy", "quantization": FP8, **kernels})


@pytest.fixture(scope="module")
def trainer(folder, tmp_path_factory):
    rank = TrainerRank(0, 1, folder, dtype=DTYPE, lr=1e-3, bucket_bytes=2_000_000 if CUDA else 500_000)
    rank.load(tmp_path_factory.mktemp("rendezvous") / "file")
    yield rank
    mpu.destroy_model_parallel()


@pytest.fixture(scope="module")
def batch():
    """Sequences and how many of their tokens are prompt; the last is longer than index_topk, so the indexer selects."""
    g = np.random.default_rng(3)
    lengths = (30, 50, 2700 if CUDA else 120)
    tokens = [g.integers(9, arithmetic.VOCABULARY, n).astype(np.int32) for n in lengths]
    return {"tokens": tokens, "n_prompt": [4, 21, lengths[2] - 40]}


def publish(trainer, engine):
    return sync.publish(Local(trainer), Local(engine), engine.version + 1)


def both(trainer, engine, batch):
    """Log-probabilities of all answers' tokens: the trainer's and the sampler's."""
    mine, theirs = merge([trainer.logprobs(batch)], len(batch["tokens"])), engine.score(batch["tokens"], batch["n_prompt"])
    return np.concatenate(mine), np.concatenate(theirs)


def gap(trainer, engine, batch):
    mine, theirs = both(trainer, engine, batch)
    return np.abs(mine - theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sampler_goes_the_trainers_way(trainer, engine, batch, family):
    """In FP8 too, where their distance says little."""
    publish(trainer, engine)
    mine, theirs = both(trainer, engine, batch)
    trainer.perturb(20, seed=1, only=FAMILIES[family])
    changed, stale = both(trainer, engine, batch)
    publish(trainer, engine)
    followed = engine.score(batch["tokens"], batch["n_prompt"])
    trainer.restore_adapter()
    step = changed - mine

    def way(after):
        return float((after - theirs) @ step / (step @ step))
    assert abs(way(stale)) < 0.1, f"told nothing, it goes {way(stale):.2f} of the trainer's way"
    found, moved = way(np.concatenate(followed)), np.abs(step).mean()
    print(f"{family}: {found:.2f} of the trainer's way, {moved:.2g} nats")
    room = 0.01 if DTYPE == "float32" else 0.5 if moved > 0.02 else 0.9               # few tokens make a small change
    assert abs(found - 1) < room, f"{family}: {found:.2f} of the trainer's way of {moved:.2g} nats"


@pytest.mark.skipif(FP8 != "none", reason="what FP8 rounds away is more than what the smallest change makes")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_change_of_each_kind_shows_until_it_is_published(trainer, engine, batch, family):
    told = publish(trainer, engine)
    assert told["bytes"] > 2 * trainer.bucket_bytes, "several buckets"
    assert gap(trainer, engine, batch).mean() <= MEAN
    before = trainer.fingerprint()
    trainer.perturb(20, seed=1, only=FAMILIES[family])
    stale = gap(trainer, engine, batch)
    changed = publish(trainer, engine)
    agree = gap(trainer, engine, batch)
    trainer.restore_adapter()
    assert trainer.fingerprint() == before, "turned back bit for bit"
    assert stale.mean() > max(LEAST, FACTOR * agree.mean()), f"the change moves {stale.mean():.1e}, left {agree.mean():.1e}"
    assert agree.mean() <= MEAN and agree.max() <= MAX, f"{family}: {agree.mean():.1e}, {agree.max():.1e}"
    moved = {k for k, v in changed["checksums"].items() if told["checksums"][k] != v}
    assert moved if family != "all" else len(moved) == len(told["checksums"])


def test_what_arrives_is_what_transformers_would_load(trainer, engine, folder):
    """Names and values: the saved checkpoint's tensors, with the checksums that the sampler was told."""
    from safetensors.torch import load_file

    from common.checksum import checksums
    told = publish(trainer, engine)["checksums"]
    stored = {k.removeprefix("model."): t for f in folder.glob("*.safetensors") for k, t in load_file(f).items()}
    assert told == dict(zip(stored, checksums(list(stored.values()))))


def test_five_steps_pass_and_leave_everything_as_it_was(trainer, engine):
    publish(trainer, engine)
    before, prompts = trainer.fingerprint(), [np.random.default_rng(i).integers(9, 30, 12).tolist() for i in range(4)]
    report = logprob_parity.five_steps(Local(trainer), Local(engine), prompts, dtype=DTYPE, max_tokens=24, version=engine.version,
                                       sampler_fp8=FP8)
    trainer.onload()
    assert report["passed"], report["why"]
    assert trainer.fingerprint() == before and report["tensors"] > 100


def broken_buckets(monkeypatch, change):
    """The trainer's buckets, passed through `change` (number of the bucket, tensors) -> tensors."""
    real = weights.buckets

    def buckets(*args):
        for i, (part, last) in enumerate(real(*args)):
            yield change(i, part), last
    monkeypatch.setattr(weights, "buckets", buckets)


def lose(i, part):
    return {k: t for k, t in part.items() if k != "layers.1.mlp.experts.3.up_proj.weight"}


def misshape(i, part):
    return {k: t[:-1] if k == "layers.1.self_attn.o_proj.weight" else t for k, t in part.items()}


def invent(i, part):
    return {**part, "layers.0.self_attn.rotary.weight": torch.zeros(8)} if i == 1 else part


def repeat(i, part):
    return {**part, "norm.weight": torch.ones(512 if CUDA else 128)}


def die(i, part):
    if i == 2:
        raise Stop("the trainer stopped")
    return part


@pytest.mark.parametrize("change, sentence", [(lose, "1 tensors never arrived: model.layers.1.mlp.experts.3.up_proj.weight"),
                                              (misshape, r"layers.1.self_attn.o_proj.weight of shape \(\d+, \d+\) does not fit"),
                                              (invent, "layers.0.self_attn.rotary.weight of shape .* does not fit"),
                                              (repeat, "norm.weight twice"),
                                              (die, "the trainer stopped")])
def test_a_version_that_is_not_whole_is_never_answered_with(trainer, engine, batch, monkeypatch, change, sentence):
    publish(trainer, engine)
    version = engine.version
    trainer.perturb(20, seed=1)
    broken_buckets(monkeypatch, change)
    with pytest.raises(Stop, match=sentence):
        publish(trainer, engine)
    assert engine.version == version
    with pytest.raises(Stop, match="this sampler stopped serving"):
        engine.score(batch["tokens"], batch["n_prompt"])
    monkeypatch.undo()
    publish(trainer, engine)                                     # a whole version heals it
    assert engine.version == version + 1
    agree = gap(trainer, engine, batch)
    trainer.restore_adapter()
    assert agree.mean() <= MEAN and agree.max() <= MAX, f"{agree.mean():.1e}, {agree.max():.1e}"


def test_weights_on_the_host_are_published_saved_and_come_back(trainer, engine, batch, monkeypatch, tmp_path):
    """What a GPU's trainer does between updates; here the host is the device, too."""
    if not CUDA:
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: t.clone())
    trainer.perturb(20, seed=2)
    mine, before = merge([trainer.logprobs(batch)], len(batch["tokens"])), trainer.fingerprint()
    trainer._park()
    held = [b.param_data.untyped_storage().nbytes() + b.grad_data.untyped_storage().nbytes() for b in trainer._buffers()]
    assert held == [0] * len(held) and held, "the device holds neither weights nor gradients"
    assert trainer.fingerprint() == before
    publish(trainer, engine)
    theirs = engine.score(batch["tokens"], batch["n_prompt"])
    trainer.save(tmp_path / "parked")
    trainer.onload()
    trainer.save(tmp_path / "there")
    one, other = (tmp_path / name / "ranks" / "00000.safetensors" for name in ("parked", "there"))
    assert one.read_bytes() == other.read_bytes(), "a checkpoint is the same from either place"
    assert trainer.fingerprint() == before
    assert all(np.array_equal(a, b) for a, b in zip(mine, merge([trainer.logprobs(batch)], len(batch["tokens"]))))
    assert np.abs(np.concatenate(mine) - np.concatenate(theirs)).mean() <= MEAN
    trainer.restore_adapter()
    for _ in range(2):                                           # and updates go on from there
        trainer._park()
        trainer.onload()
        told = trainer.update({**batch, "weight": [1 / 100] * 3}, lambda logp, entropy, mb: (-(mb["weight"] * logp).sum(), {}))
    assert told["grad_norm"] > 0 and trainer.fingerprint() != before
    publish(trainer, engine)
    assert gap(trainer, engine, batch).mean() <= MEAN


def test_adapters_and_weights_do_not_mix(trainer, engine):
    publish(trainer, engine)
    tensors = {"layers.0.self_attn.o_proj.lora_A": torch.zeros(8, 8)}
    header, _ = bundle.pack(tensors, version=engine.version + 1, base=engine.base, rank=8)
    with pytest.raises(Stop, match="brings adapter, this sampler was started for weights"):
        engine.stage(header.to_json(), {})
    with pytest.raises(Stop, match="is not newer than version"):
        sync.publish(Local(trainer), Local(engine), engine.version)
    publish(trainer, engine)


@pytest.mark.parametrize("experts", ["shared", "each"])
def test_a_merged_adapter_is_what_the_trainer_computes(trainer, engine, folder, batch, tmp_path, experts):
    """Another trainer, frozen weights and an adapter, whose hand-off brings the sum."""
    from common import lora
    mpu.destroy_model_parallel()
    merging = TrainerRank(0, 1, folder, dtype=DTYPE, lora_rank=8, lora_alpha=16, lora_targets=lora.TARGETS, experts=experts,
                          bucket_bytes=500_000, merge=True)
    merging.load(tmp_path / "rendezvous")
    publish(merging, engine)
    assert gap(merging, engine, batch).mean() <= MEAN, "lora_B is zero at the start"
    prompts = [t[:n].tolist() for t, n in zip(batch["tokens"][:2], batch["n_prompt"])]
    report = logprob_parity.five_steps(Local(merging), Local(engine), prompts, dtype=DTYPE, max_tokens=24, version=engine.version)
    merging.onload()
    assert report["passed"], report["why"]
    merging.perturb(1.0)
    assert gap(merging, engine, batch).mean() > LEAST, "the sampler was not told"
    publish(merging, engine)
    found = gap(merging, engine, batch)
    assert found.mean() <= 2 * MEAN and found.max() <= MAX, f"{found.mean():.1e}, {found.max():.1e}"


def test_30_publishes_leave_no_memory_behind(trainer, engine):
    for i in range(40):
        if i == 10:
            before = memory()
        told = publish(trainer, engine)
    assert memory() - before < 5 * told["bytes"], "a sixth of the versions"
