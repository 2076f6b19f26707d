"""GLM-5.3-Flash in a trainer rank: updates, recomputation, checkpoints, replayed routes, and what it hands on."""
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from common.trainer import TrainerRank, mpu  # isort: skip - first, it prepares megatron-core for the CPU

from checks import tiny
from common import lora, weights
from common.batch import merge
from common.cli import Stop

ADAPTER = dict(lora_rank=16, lora_alpha=24, lora_targets=lora.FLASH_TARGETS, experts="each", lora_expert_rank=8)
FULL = dict(lora_rank=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("flash") / "model"
    tiny.flash_checkpoint(path, **tiny.FLASH_SPARSE)
    return path


@pytest.fixture()
def make(folder, tmp_path):
    def build(**kw):
        if mpu.model_parallel_is_initialized():
            mpu.destroy_model_parallel()
        rank = TrainerRank(0, 1, folder, **{"lr": 1e-2, **kw})
        made = rank.load(tmp_path / "rendezvous")
        assert made["kernels"] == {"layers": "torch", "linear attention": "torch"}
        return rank
    yield build
    mpu.destroy_model_parallel()


def batch(seed=0):
    g = np.random.default_rng(seed)
    n_prompt, response = g.integers(2, 9, 6), np.array([1, 7, 60, 31, 12, 40])
    tokens = [g.integers(9, 250, a + b).astype(np.int32) for a, b in zip(n_prompt, response)]
    return {"tokens": tokens, "n_prompt": n_prompt.tolist(), "adv": g.normal(size=6).tolist(), "weight": [1 / response.sum()] * 6}


def weighted(logp, entropy, mb):
    return -(mb["weight"] * mb["adv"] * (logp + 0.1 * entropy)).sum(), {"tokens": mb["weight"].count_nonzero()}


def keep_gradients(trainer):
    grads, step = [], trainer.optimizer.step

    def spy():
        grads.extend(p.main_grad.clone() for _, p in trainer.trainable)
        return step()
    trainer.optimizer.step = spy
    return grads


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", [ADAPTER, FULL], ids=["adapter", "full"])
def test_recomputation_changes_nothing(make, how, dtype):
    """Not a bit of any gradient or weight after two updates."""
    found = []
    for recompute in ("none", "full", "selective"):
        trainer = make(recompute=recompute, dtype=dtype, **how)
        grads = keep_gradients(trainer)
        told = [trainer.update(batch(seed=i), weighted) for i in range(2)]
        found.append((told, trainer.fingerprint(), grads))
    for told, fingerprint, grads in found[1:]:
        assert told == found[0][0] and fingerprint == found[0][1] and told[1]["grad_norm"] > 0
        assert all(torch.equal(a, b) for a, b in zip(grads, found[0][2]))


def test_logprobs_and_an_update_are_the_same_however_the_batch_is_cut(make, folder):
    found = [make(max_tokens=m, **FULL).update(batch(), weighted) for m in (10_000, 70)]
    assert found[1] == pytest.approx(found[0], rel=3e-5)
    hf, data = tiny.hf_model(folder), batch()
    for tokens, n, logp in zip(data["tokens"], data["n_prompt"], merge([make(**FULL).logprobs(data)], 6)):
        want = tiny.hf_logprobs(hf, [torch.from_numpy(tokens.astype(np.int64))])[n - 1:]
        assert np.abs(want.numpy() - logp).max() < 1e-5


def test_float32_parameters_of_a_bfloat16_model_are_trained_and_handed_on(make, folder):
    """In bfloat16 half a percent is the smallest step; these move by 1e-4 of themselves, and reach the sampler as float32."""
    trainer = make(dtype="bfloat16", lr=1e-4, **FULL)
    before = {k: t.clone() for part, _ in weights.buckets(trainer.model, trainer.cfg, 1 << 30) for k, t in part.items()}
    trainer.update(batch(), weighted)
    after = {k: t for part, _ in weights.buckets(trainer.model, trainer.cfg, 1 << 30) for k, t in part.items()}
    single = [k for k, t in after.items() if t.dtype == torch.float32 and not k.endswith(("correction_bias", "compress_ape"))]
    assert len(single) == 2 * 5 + 4 * 6
    for k in single:
        assert before[k].dtype == torch.float32 and 0 < (after[k] - before[k]).abs().max() < 3e-4, k
    assert trainer.fingerprint() == trainer.fingerprint()


@pytest.mark.parametrize("how", [ADAPTER, FULL], ids=["adapter", "full"])
def test_a_checkpoint_continues_bit_for_bit(make, tmp_path, how):
    trainer = make(dtype="bfloat16", **how)
    trainer.update(batch(seed=0), weighted)
    trainer.save(tmp_path / "ck")
    straight = [trainer.update(batch(seed=i), weighted) for i in (1, 2)]
    again = make(dtype="bfloat16", **how)
    again.restore(tmp_path / "ck")
    assert [again.update(batch(seed=i), weighted) for i in (1, 2)] == straight and again.fingerprint() == trainer.fingerprint()


@pytest.mark.parametrize("how", [ADAPTER, FULL], ids=["adapter", "full"])
def test_perturb_is_undone_bit_for_bit(make, how):
    trainer = make(**how)
    start, before = trainer.fingerprint(), merge([trainer.logprobs(batch())], 6)
    trainer.perturb(0.3, 1, r"layers\.0\.self_attn\.(q_proj|f_a_proj|q_conv1d)|layers\.1\.mlp\.experts\.\w+_proj")
    moved = merge([trainer.logprobs(batch())], 6)
    assert trainer.fingerprint() != start and max(np.abs(a - b).max() for a, b in zip(before, moved)) > 1e-4
    trainer.restore_adapter()
    assert trainer.fingerprint() == start


def test_adapter_and_merged_model_are_one(make, folder, tmp_path):
    trainer = make(merge=True, **ADAPTER)
    trainer.update(batch(), weighted)
    trainer.export(tmp_path)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], max(config["rank_pattern"].values())) == (16, 8) and len(lora.load_peft(tmp_path / "adapter")) > 50
    merged = {k: t for part, _ in weights.buckets(trainer.model, trainer.cfg, 1 << 30, merge=True) for k, t in part.items()}
    tensors = {k: t for f in folder.glob("*.safetensors") for k, t in load_file(f).items()}
    adapter, changed = lora.load_peft(tmp_path / "adapter"), 0
    for key, t in merged.items():
        base = tensors[key if key == "lm_head.weight" else f"model.language_model.{key}"]
        path, _, expert = key.removesuffix(".weight"), None, None
        if ".experts." in path:
            head, _, tail = path.partition(".experts.")
            expert, _, leaf = tail.partition(".")
            path = f"{head}.experts.{leaf}"
        a, b = adapter.get(f"{path}.lora_A"), adapter.get(f"{path}.lora_B")
        if a is None:
            assert torch.equal(t, base), key
            continue
        a, b = (a[int(expert)], b[int(expert)]) if expert else (a, b)
        torch.testing.assert_close(t.double(), base.double() + b.double() @ a.double(), rtol=1e-6, atol=1e-6)
        changed += 1
    assert changed > 80


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_routes_are_replayed(make, recompute):
    """Routes of the model's own choice change nothing; others do, and the trainer counts how many were its own."""
    trainer, data = make(replay=True, recompute=recompute, **ADAPTER), batch()
    seen = []
    for forced in trainer.replaying:
        def watch(*args, plain=forced.get_replay_topk, column=forced.column, **kw):
            found = plain(*args, **kw)
            seen.append((column, found[1].clone()))
            return found
        forced.get_replay_topk = watch
    told = {}
    for i in range(6):
        seen.clear()
        trainer.logprobs({k: v[i:i + 1] for k, v in data.items()})
        told[i] = torch.stack([t for _, t in sorted(seen, key=lambda x: x[0])], 1)[:-1].numpy().astype(np.uint8)
    before, plain = merge([trainer.logprobs(data)], 6), trainer.update(data, weighted)["grad_norm"]
    again = make(replay=True, recompute=recompute, **ADAPTER)
    routes = [told[i] for i in range(6)]
    same = merge([again.logprobs({**data, "routes": routes})], 6)
    assert max(np.abs(a - b).max() for a, b in zip(before, same)) < 5e-6
    kept, share, n = again.replayed()
    assert n == 3 * sum(len(t) - 1 for t in data["tokens"]) and kept == n == pytest.approx(share)
    assert again.update({**data, "routes": routes}, weighted)["grad_norm"] == pytest.approx(plain, rel=1e-5)
    other = merge([again.logprobs({**data, "routes": [(r + 1) % 8 for r in routes]})], 6)
    assert max(np.abs(a - b).max() for a, b in zip(before, other)) > 0.05


def test_trace_gives_the_streams_mean(make, folder):
    tokens = batch()["tokens"][2]
    found = make(**FULL).trace(tokens)
    hf, states = tiny.hf_model(folder), []
    for layer in hf.model.language_model.layers:
        layer.register_forward_hook(lambda module, args, out: states.append(out[0][0].mean(1)))
    with torch.no_grad():
        hf(input_ids=torch.from_numpy(tokens.astype(np.int64))[None])
    project = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)) / 4
    assert sorted(found) == [0, 1, 2, 3]
    for i, state in enumerate(states):
        assert (torch.tensor(found[i]) - state @ project).abs().max() < 1e-4


def test_what_flash_cannot_do_is_a_sentence(make, folder, monkeypatch):
    with pytest.raises(Stop, match="te is True, but linear attention"):
        make(te=True)
    with pytest.raises(Stop, match="kda_kernels is 'fla', but there is no CUDA device"):
        make(kda_kernels="fla")
    with pytest.raises(Stop, match="LoRA target wk is no linear layer of GLM-5.3-Flash"):
        make(**{**ADAPTER, "lora_targets": ("wk",)})
