"""The five-step check on stand-ins: who has the GPUs when, and what it says of policies that are wrong in known ways."""
import json
from pathlib import Path

import numpy as np
import pytest

from checks import localise
from checks.local import Local
from checks.logprob_parity import TOLERANCE, five_steps
from common import sync


class World:
    """Trainer and sampler of a policy whose log-probabilities are -1 - w * x, w being the adapter; only one may be awake."""

    def __init__(self, **faults):
        self.w, self.kept, self.served, self.awake, self.faults = 0.0, None, 0.0, "sampler", faults

    def sleep(self):
        assert self.awake == "sampler"
        self.awake = None

    def onload(self):
        assert self.awake is None
        self.awake = "trainer"

    def offload(self):
        assert self.awake == "trainer"
        self.awake = None

    def wake(self):
        assert self.awake is None
        self.awake = "sampler"

    def logp(self, tokens, n_prompt, w):
        return [(-1.0 - w * np.asarray(t[n:]) / 50).astype(np.float32) for t, n in zip(tokens, n_prompt)]

    def logprobs(self, batch):
        assert self.awake == "trainer", "the trainer was asked while the sampler had the GPUs"
        found = self.logp(batch["tokens"], batch["n_prompt"], self.w)
        return list(enumerate([f * np.nan for f in found] if self.faults.get("nan") else found))

    def score(self, tokens, n_prompt):
        assert self.awake == "sampler", "the sampler was asked while the trainer had the GPUs"
        return self.logp(tokens, n_prompt, self.served)

    def generate(self, prompts, seeds, max_tokens):
        assert self.awake == "sampler"
        answers = [np.random.default_rng(s).integers(0, 100, max_tokens) for s in seeds]
        return [{"tokens": a, "logp": self.logp([a], [0], self.served)[0]} for a in answers]

    def perturb(self, std, seed, only=None):
        self.kept = self.w if self.kept is None else self.kept
        self.w += std

    def adapted(self):
        return ["layers.0.self_attn.o_proj"]

    def trace(self, tokens):
        return {0: [[1.0]] * len(tokens)}

    def restore_adapter(self):
        self.w, self.kept = self.kept + self.faults.get("not_restored", 0.0), None

    def fingerprint(self):
        return f"{self.w}"


def run(monkeypatch, dtype="float32", **faults):
    world, said = World(**faults), []

    def publish(trainer, sampler, version):
        if not (faults.get("dead") and version > 1):
            world.served = world.w * faults.get("scale", 1.0)
        return {"version": version, "fingerprint": f"{world.served}", "bytes": 1, "tensors": 1, "ranks": 1,
                "checksums": {f"{path}.lora_{side}": version * faults.get("moving", 1)
                              for path in ["layers.0.self_attn.o_proj"][:faults.get("sent", 1)] for side in "AB"}}
    monkeypatch.setattr(sync, "publish", publish)
    report = five_steps(Local(world), Local(world), [[1, 2], [3]], dtype=dtype, max_tokens=20, version=0, say=said.append)
    assert said[-1].startswith("five-step check: ") and world.awake == "sampler"
    return report


def test_tolerances_are_those_of_the_calibration():
    """20 healthy pairs, none refused; room for other processors, and not so much that a fault hides in it."""
    found = json.loads((Path(__file__).resolve().parent.parent / "results" / "calibration.json").read_text())
    assert len(found["pairs"]) == 20 and all(pair["passed"] for pair in found["pairs"])
    for dtype, (mean, single) in TOLERANCE.items():
        seen = found["summary"][dtype]
        assert seen["tolerance"] == [mean, single] and single > 1.5 * seen["largest_max"]
        assert 1.5 * seen["largest_mean"] < mean < (10 * seen["largest_mean"] if dtype == "float32" else 0.06)
        assert abs(seen["bias"]) < 0.1 * seen["mean"], "rounding has no direction"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_right_hand_off_passes(monkeypatch, dtype):
    report = run(monkeypatch, dtype)
    assert report["passed"] and report["version"] == 3, report["why"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("faults, step", [({"dead": True}, "step 5"), ({"scale": 2.0}, "step 5"), ({"scale": 0.7}, "step 5"),
                                          ({"nan": True}, "step 1"),
                                          ({"moving": 0}, "step 4: 2 tensors were published as before"),
                                          ({"sent": 0}, "1 modules not at all: layers.0.self_attn.o_proj"),
                                          ({"not_restored": 0.5}, "step 6")])
def test_a_wrong_one_fails_and_says_where(monkeypatch, dtype, faults, step):
    report = run(monkeypatch, dtype, **faults)
    assert not report["passed"] and any(step in why for why in report["why"]), report["why"]
    assert len(report["worst"]) == (10 if step in ("step 1", "step 5") else 0)
    assert not any("could not" in w for w in report["where"]), report


@pytest.mark.parametrize("change, looks", [
    (lambda d, g: 0 * d, "did not move at all"), (lambda d, g: 2 * d, "2.00 times as far"), (lambda d, g: d / 8, "a wrong scale"),
    (lambda d, g: d * (1 + 0.01 * g), "rounding, or few tokens"), (lambda d, g: d * (g > 0), "a part is lost or exchanged"),
    (lambda d, g: np.abs(d).mean() * g, "a part is lost or exchanged")])
def test_the_kind_of_error(change, looks):
    g = np.random.default_rng(0)
    mine = g.standard_normal(200)
    assert looks in localise.nature([change(mine, g.standard_normal(200))], [mine])


def test_the_worst_tokens_come_first_with_what_stood_before_them():
    mine = [np.array([-1.0, -2.0]), np.array([-1.0, -1.0, np.nan])]
    theirs = [np.array([-1.0, -2.5]), np.array([-1.1, -1.0, -1.0])]
    batch = {"tokens": [[5, 6, 7], [8, 9, 10, 11]], "n_prompt": [1, 1]}
    found = localise.worst(mine, theirs, batch, n=3)
    assert [(w["sequence"], w["position"], w["token"]) for w in found] == [(1, 2, 11), (0, 1, 7), (1, 0, 9)]
    assert found[1]["before"] == [5, 6] and (found[1]["first"], found[1]["second"]) == (-2.0, -2.5)
