"""One trainer rank in this process: what an update sums, in which order fields reach the loss, checkpoints, and what is
refused."""
import numpy as np
import pytest
import torch

from common.trainer import TrainerRank, mpu  # isort: skip - first, it prepares megatron-core for the CPU

from common.batch import deal, merge, micro_count
from common.cli import Stop
from data import arithmetic


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("trainer")
    arithmetic.prepare(path)
    return path / "start"


@pytest.fixture()
def make(folder, tmp_path):
    def build(**kw):
        if mpu.model_parallel_is_initialized():
            mpu.destroy_model_parallel()
        targets = ("q_b_proj", "gate_proj", "up_proj", "down_proj")
        rank = TrainerRank(0, 1, folder, **{**dict(lora_rank=8, lora_alpha=8, lora_targets=targets, experts="shared",
                                                   lr=1e-2), **kw})
        rank.load(tmp_path / "rendezvous")
        return rank
    yield build
    mpu.destroy_model_parallel()


def batch(n=7, seed=0):
    g = np.random.default_rng(seed)
    n_prompt = g.integers(2, 9, n)
    response = g.integers(1, 70, n)                            # some beyond index_topk
    tokens = [g.integers(9, arithmetic.VOCABULARY, a + b).astype(np.int32) for a, b in zip(n_prompt, response)]
    return {"tokens": tokens, "n_prompt": n_prompt.tolist(), "adv": g.normal(size=n).tolist(),
            "index": [np.arange(b) + 1000.0 * i for i, b in enumerate(response)], "weight": [1 / response.sum()] * n}


def weighted(logp, entropy, mb):
    metrics = {"entropy": (mb["weight"] * entropy).sum(), "tokens": mb["weight"].count_nonzero()}
    return -(mb["weight"] * mb["adv"] * logp).sum(), metrics


def test_an_update_is_the_same_sum_however_the_batch_is_cut(make):
    found = [make(max_tokens=m).update(batch(), weighted) for m in (10_000, 100, 60)]
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=2e-5)
    assert found[0]["tokens"] == sum(len(x) for x in batch()["index"])


@pytest.mark.parametrize("adapter", [True, False])
def test_recomputation_changes_nothing(make, adapter):
    kw = {} if adapter else dict(lora_rank=0, lora_targets=(), experts=None)
    found = []
    for recompute in ("none", "full", "selective"):
        trainer = make(recompute=recompute, **kw)
        told = [trainer.update(batch(seed=i), weighted) for i in range(2)]
        found.append((told, trainer.fingerprint()))
    assert found[0] == found[1] == found[2] and found[0][0][1]["grad_norm"] > 0


def test_a_loss_without_gradient_is_refused(make):
    with pytest.raises(Stop, match="the loss does not depend on any trained weight"):
        make().update(batch(), lambda logp, entropy, mb: (logp.detach().sum(), {}))


def test_fields_arrive_beside_the_token_they_belong_to(make):
    trainer, data, seen = make(max_tokens=100), batch(), {}

    def loss(logp, entropy, mb):
        for where, value in zip(mb["index"].tolist(), logp.tolist()):
            seen[where] = value
        return logp.sum() * 0, {}
    scored = merge([trainer.logprobs(data)], 7)
    trainer.update(data, loss)
    assert len(seen) == sum(map(len, scored))
    for i, logp in enumerate(scored):
        np.testing.assert_allclose(logp, [seen[1000.0 * i + t] for t in range(len(logp))], atol=2e-6)


def test_logprobs_are_those_of_transformers(make, folder):
    from transformers import AutoModelForCausalLM
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    data = batch()
    for tokens, n, logp in zip(data["tokens"], data["n_prompt"], merge([make().logprobs(data)], 7)):
        ids = torch.tensor(tokens[None].astype(np.int64))
        with torch.no_grad():
            want = reference(input_ids=ids).logits.log_softmax(-1)[0, n - 1:-1].gather(-1, ids[0, n:, None])[:, 0]
        assert np.abs(want.numpy() - logp).max() < 1e-5


def test_warm_up_is_linear_and_a_given_rate_wins(make):
    trainer = make(lr=0.4, warmup_updates=4)
    rates = [trainer.update(batch(), weighted)["lr"] for _ in range(5)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4]) and trainer.update(batch(), weighted, 0.05)["lr"] == 0.05


def test_one_step_is_adamw_on_the_clipped_gradient(make):
    """Against torch's AdamW in float64, for the first update from A as it is and B = 0, with weight decay."""
    trainer = make(lr=0.01, weight_decay=0.1, clip_grad=0.5, betas=(0.9, 0.999))
    before = {n: p.detach().double().clone() for n, p in trainer.trainable}
    grads = {}
    step = trainer.optimizer.step

    def spy():
        grads.update({n: p.main_grad.double().clone() for n, p in trainer.trainable})
        return step()
    trainer.optimizer.step = spy
    norm = trainer.update(batch(), weighted)["grad_norm"]
    total = float(torch.stack([g.norm() for g in grads.values()]).norm())
    assert norm == pytest.approx(total, rel=1e-5)
    for n, p in trainer.trainable:
        g = grads[n] * min(1.0, 0.5 / (total + 1e-6))
        want = before[n] * (1 - 0.01 * 0.1) - 0.01 * g / (g.abs() + 1e-8)      # both moments are g and g^2 after bias correction
        torch.testing.assert_close(p.detach().double(), want, atol=2e-5, rtol=1e-4)


def test_a_checkpoint_continues_bit_for_bit(make, tmp_path):
    trainer = make()
    for i in range(2):
        trainer.update(batch(seed=i), weighted)
    trainer.save(tmp_path / "ck")
    straight = [trainer.update(batch(seed=i), weighted) for i in (2, 3)]
    again = make()
    again.restore(tmp_path / "ck")
    assert again.fingerprint() != make().fingerprint()
    assert [again.update(batch(seed=i), weighted) for i in (2, 3)] == straight and again.fingerprint() == trainer.fingerprint()


def test_a_checkpoint_of_another_shape_or_layout_is_refused(make, tmp_path):
    make().save(tmp_path / "ck")
    with pytest.raises(Stop, match="has shape .* the model wants"):
        make(lora_rank=4).restore(tmp_path / "ck")
    other = make()
    other.layout["tp"] = 2
    with pytest.raises(Stop, match="resume with the same layout"):
        other.restore(tmp_path / "ck")
    with pytest.raises(Stop, match="has no part for trainer rank 0"):
        other.restore(tmp_path)


def test_a_gradient_that_is_not_finite_changes_nothing(make):
    trainer = make()
    before = trainer.fingerprint()
    with pytest.raises(Stop, match="update 1 has a gradient that is not finite"):
        trainer.update({**batch(), "weight": [float("nan")] * 7}, weighted)
    assert trainer.fingerprint() == before and trainer.updates == 0


def test_perturb_is_undone_bit_for_bit(make):
    trainer = make()
    trainer.update(batch(), weighted)
    before = [p.detach().clone() for _, p in trainer.trainable]
    trainer.perturb(0.3, 1)
    trainer.perturb(0.3, 2)
    assert not all(torch.equal(a, p) for a, (_, p) in zip(before, trainer.trainable))
    trainer.restore_adapter()
    assert all(torch.equal(a, p) for a, (_, p) in zip(before, trainer.trainable))


def test_fields_of_the_wrong_length_and_layouts_that_do_not_divide(make, folder):
    data = batch()
    data["index"][0] = data["index"][0][:-1]
    with pytest.raises(Stop, match="field 'index' has"):
        make().update(data, weighted)
    mpu.destroy_model_parallel()
    with pytest.raises(Stop, match="1 trainer ranks do not divide into TP 2 x PP 1 x EP 1"):
        TrainerRank(0, 1, folder, tp=2).load("unused")


def test_dealing_covers_everything_and_balances():
    g = np.random.default_rng(0)
    lengths = g.integers(1, 1000, 200).tolist()
    hands = deal(lengths, 7)
    assert sorted(i for h in hands for i in h) == list(range(200))
    loads = [sum(lengths[i] for i in h) for h in hands]
    assert max(loads) - min(loads) < 0.02 * max(loads)
    n = micro_count(lengths, 3000)
    assert all(sum(lengths[i] for i in h) <= 3000 for h in deal(lengths, n)) and n <= 1.1 * sum(lengths) / 3000 + 1
    assert micro_count([5000, 10], 100) == 2
