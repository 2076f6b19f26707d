"""The recipe's algorithm, against values worked out by hand and a float64 reference."""
import math

import numpy as np
import pytest
import torch

from recipes import dapo_glm5p3_lora as recipe

LOSS = recipe.make_policy_loss(clip_low=0.2, clip_high=0.28, dual_clip=10.0, is_cap=2.0)


def one(ratio, adv, off=0.0, weight=1.0):
    """(loss, its derivative by logp_new, metrics) for one token. off: logp_old - logp_rollout."""
    logp = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    mb = {k: torch.tensor([v], dtype=torch.float64) for k, v in
          {"weight": weight, "adv": adv, "logp_old": -1.0, "logp_rollout": -1.0 - off}.items()}
    loss, metrics = LOSS(logp, torch.zeros(1), mb)
    loss.backward()
    return loss.item(), logp.grad.item(), metrics


@pytest.mark.parametrize("ratio, adv, loss, slope", [
    (1.0, 1.0, -1.0, -1.0),                    # on policy: the policy gradient
    (1.0, -0.5, 0.5, 0.5),
    (1.27, 1.0, -1.27, -1.27),                 # still below 1 + clip_high
    (1.5, 1.0, -1.28, 0.0),                    # clipped from above: no more to win
    (0.5, 1.0, -0.5, -0.5),                    # a good token that became rare is pulled back
    (0.7, -1.0, 0.8, 0.0),                     # a bad token is pushed down to 1 - clip_low and no further
    (0.85, -1.0, 0.85, 0.85),
    (5.0, -1.0, 5.0, 5.0),                     # a bad token that became likely is pushed down hard
    (20.0, -1.0, 10.0, 0.0),                   # up to the dual clip: loss 10 x |advantage|
    (20.0, -0.5, 5.0, 0.0),
    (20.0, 1.0, -1.28, 0.0),
])
def test_clipped_loss_by_hand(ratio, adv, loss, slope):
    found = one(ratio, adv)
    assert found[0] == pytest.approx(loss) and found[1] == pytest.approx(slope)


@pytest.mark.parametrize("off, factor", [(0.0, 1.0), (math.log(1.5), 1.5), (math.log(2.5), 2.0), (-1.0, math.exp(-1.0))])
def test_truncated_importance_weight_multiplies_loss_and_gradient(off, factor):
    loss, slope, metrics = one(1.1, 1.0, off)
    assert loss == pytest.approx(-1.1 * factor) and slope == pytest.approx(-1.1 * factor)
    assert metrics["tis_capped"].item() == (1.0 if factor == 2.0 else 0.0)


def test_masked_tokens_count_for_nothing():
    assert one(5.0, -1.0, weight=0.0)[:2] == (0.0, 0.0)


def test_token_mean_over_the_whole_mini_batch():
    """Two answers of 1 and 9 tokens: every token weighs 1/10, so the long one weighs nine times the short one."""
    weight = torch.full((10,), 0.1, dtype=torch.float64)
    adv = torch.tensor([1.0] + [-1.0] * 9, dtype=torch.float64)
    logp = torch.zeros(10, dtype=torch.float64, requires_grad=True)
    loss, metrics = LOSS(logp, torch.ones(10), {"weight": weight, "adv": adv, "logp_old": logp.detach(),
                                                "logp_rollout": logp.detach()})
    loss.backward()
    assert loss.item() == pytest.approx(0.8) and logp.grad.tolist() == pytest.approx([-0.1] + [0.1] * 9)
    assert metrics["entropy"].item() == pytest.approx(1.0) and metrics["clip"].item() == 0


def test_group_advantage():
    reward = np.array([[1.0, 1.0, -1.0, -1.0], [1.0, 1.0, 1.0, 1.0], [1.0, -1.0, -1.0, -2.0]])
    adv = recipe.group_advantage(reward)
    # the standard deviation of +-1 with n - 1: 1.1547
    assert adv[0] == pytest.approx([0.8660247, 0.8660247, -0.8660247, -0.8660247], abs=2e-6)
    assert (adv[1] == 0).all(), "a group without differences teaches nothing"
    assert adv[2].sum() == pytest.approx(0, abs=1e-6)
    assert adv[2, 3] == pytest.approx((-2 + 0.75) / np.std(reward[2], ddof=1), abs=1e-5)


def test_seeds_differ_between_steps_prompts_and_answers():
    seeds = {recipe.seed_of(f"0 {step}", str(i), g) for step in range(1, 21) for i in range(128) for g in range(16)}
    assert len(seeds) > 20 * 128 * 16 - 8 and max(seeds) < 2**32, "as rare as chance"
    assert recipe.seed_of("0 1", "7", 2) == 228700756


def test_mismatch_by_hand():
    old, rollout = [np.array([-1.0, -2.0]), np.array([-3.0])], [np.array([-1.0, -1.9]), np.array([-3.3])]
    found = recipe.mismatch(old, rollout)
    assert found["mean"] == pytest.approx(0.4 / 3) and found["max"] == pytest.approx(0.3)
    assert found["worst_answer"] == pytest.approx(0.3)
    k3 = (0 + math.exp(-0.1) - 1 + 0.1 + math.exp(0.3) - 1 - 0.3) / 3
    assert found["k3"] == pytest.approx(k3)
    assert recipe.mismatch([np.float32([-1e-7])], [np.float32([0])])["k3"] == pytest.approx(5e-15, rel=1e-2), "no cancellation"
