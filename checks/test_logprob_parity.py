"""The five-step check on stand-ins: who has the GPUs when, and what it says of policies that are wrong in known ways."""
import numpy as np
import pytest

from checks.local import Local
from checks.logprob_parity import five_steps
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

    def perturb(self, std, seed):
        self.kept = self.w if self.kept is None else self.kept
        self.w += std

    def restore_adapter(self):
        self.w, self.kept = self.kept + self.faults.get("not_restored", 0.0), None

    def fingerprint(self):
        return f"{self.w}"


def run(monkeypatch, dtype="float32", **faults):
    world, said = World(**faults), []

    def publish(trainer, sampler, version):
        if not (faults.get("dead") and version > 1):
            world.served = world.w * faults.get("scale", 1.0)
        return {"version": version, "fingerprint": f"{world.served}", "bytes": 1, "tensors": 1, "ranks": 1}
    monkeypatch.setattr(sync, "publish", publish)
    report = five_steps(Local(world), Local(world), [[1, 2], [3]], dtype=dtype, max_tokens=20, version=0, say=said.append)
    assert len(said) == 2 and world.awake == "sampler"
    return report


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_right_hand_off_passes(monkeypatch, dtype):
    report = run(monkeypatch, dtype)
    assert report["passed"] and report["version"] == 3, report["why"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("faults, step", [({"dead": True}, "step 5"), ({"scale": 2.0}, "step 5"), ({"scale": 0.7}, "step 5"),
                                          ({"nan": True}, "step 1"), ({"not_restored": 0.5}, "step 6")])
def test_a_wrong_one_fails_and_says_where(monkeypatch, dtype, faults, step):
    report = run(monkeypatch, dtype, **faults)
    assert not report["passed"] and any(step in why for why in report["why"]), report["why"]
