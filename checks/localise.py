"""Where do trainer and sampler part? Asked by the five-step check when it fails; every answer is a sentence.

A hand-off that goes wrong is found by publishing the same change in parts: one family of modules at a time, then, by
bisection, the first layers. Two base models that differ are found by comparing what their layers hand on. What kind of error it
is shows in how the sampler moved beside the trainer: the same way but too far for a wrong scale, another way for a lost part.
"""
import re

import numpy as np

from common import sync
from common.batch import merge
from common.cluster import trainer_turn
from common.receive import kind

# of hidden states; rounding gives 1e-6 resp. 0.02 in the middle of a model; an FP8 product is off by some hundredths
RELATIVE = {"float32": 1e-3, "bfloat16": 0.1, "fp8": 0.3}


def score(sampler, batch):
    """Log-probabilities of the batch's answers, one array per sequence, from a prefill of the engine that each belongs to: the
    batch holds all sequences of the first engine, then all of the next."""
    n = len(batch["tokens"]) // len(sampler)
    return sum(sampler.each("score", [(batch["tokens"][i:i + n], batch["n_prompt"][i:i + n])
                                      for i in range(0, n * len(sampler), n)]), [])


def gaps(mine, theirs, engines):
    """|dlogp| of all tokens of each engine: as many arrays."""
    n = len(mine) // engines
    return [np.abs(np.concatenate(mine[i:i + n]) - np.concatenate(theirs[i:i + n])) for i in range(0, n * engines, n)]


def typical(d):
    """Mean of all but the largest hundredth (one, where there are fewer) of |dlogp|: where two experts or two keys score nearly
    alike, rounding chooses, and such a token jumps in any dtype."""
    return float(np.sort(d)[:max(1, len(d) - max(1, len(d) // 100))].mean())


def allowed(dtype, limit, base, moved):
    """|dlogp| (`typical`) that two right copies may have after a change: they had `base` before it, and it moved the trainer by
    `moved` (mean). float32: the check's `limit`. bfloat16: rounding grows with the adapter, and a lost part must not hide in the
    tolerance; healthy pairs stay below 0.7 of this (results/calibration.json, `margin`). fp8: weights and activations of the
    rehearsal's model rounded to FP8, by tensor or in blocks, leave 0.17 to 0.24 of what an adapter or turned signs move,
    simulated, and a family or layer that alone keeps its old weights 0.2 to 0.7: not each shows (test_weight_handoff.py with FP8
    asks for it), but half of the change lost does."""
    if dtype == "float32":
        return min(limit, 3 * base + moved / 10)
    return min(2 * base + moved / 3, 0.45 * moved) if dtype == "fp8" else base + moved / 8


def worst(mine, theirs, batch, n=10):
    """The n tokens with the largest |dlogp|, largest first: sequence, position in the answer, the token, both log-probabilities,
    and the eight tokens before it. mine, theirs: arrays per sequence of the batch's answers."""
    found = []
    for i, (a, b, tokens, start) in enumerate(zip(mine, theirs, batch["tokens"], batch["n_prompt"])):
        for j in np.argsort(-np.nan_to_num(np.abs(a - b), nan=np.inf))[:n]:
            at = start + int(j)
            found.append(dict(sequence=i, position=int(j), token=int(tokens[at]), first=float(a[j]), second=float(b[j]),
                              before=[int(t) for t in tokens[max(0, at - 8):at]]))
    return sorted(found, key=lambda w: -np.nan_to_num(abs(w["first"] - w["second"]), nan=np.inf))[:n]


def enlarge(trainer, batch, before, need, std, seed, attempts, only=None):
    """Change the trainer by noise that moves it by `need` to twice as much: (its log-probabilities after, mean |change| from
    `before`, std). Enlarged in small strides and halved again where that was too far: a model that is sure of its answers first
    hardly moves and then all at once, and a change of nats would be drowned in rounding. Where less noise moves it no less (an
    adapter's A is changed whatever `std` is, and shows once B is not zero), the larger noise stays: less would be lost in
    rounding."""
    def changed():
        trainer.perturb(std, seed, only)
        after = merge(trainer.logprobs(batch), len(batch["tokens"]))
        return after, float(np.abs(np.concatenate(after) - np.concatenate(before)).mean()), std

    low, high, larger = 0.0, np.inf, (None, 0.0, 0.0)
    for left in reversed(range(attempts)):
        _, moved, _ = found = changed()
        if need <= moved <= 2 * need or not left or high - low <= 0.05 * low and moved >= need:
            return found
        trainer.restore_adapter()
        if std < larger[2] and moved > max(need, 0.9 * larger[1]):
            std = larger[2]
            return changed()
        larger = found
        low, high = (low, std) if moved > need else (std, high)
        if high < np.inf:
            std = high if left == 1 else (low * high) ** 0.5 if low else high / 4
        else:
            std *= min(max(1.2 * need / max(moved, 1e-12), 1.5), 4)


class Parts:
    """Publishes parts of a change. The trainer's adapter must be as it was when `before`, its log-probabilities, were taken."""

    def __init__(self, trainer, sampler, batch, before, base, dtype, limit, need, version, seed):
        """base: `typical` |dlogp| of each engine before; limit: the check's; need: by how much a change must move the trainer."""
        self.trainer, self.sampler, self.batch, self.before = trainer, sampler, batch, before
        self.base, self.dtype, self.limit, self.need, self.version, self.seed = base, dtype, limit, need, version, seed

    def disagree(self, std, only=None):
        """Whether the sides part, by the check's own rule, when the modules `only` change: by noise of `std`, or by as much more
        as it takes to move the trainer."""
        self.version += 1
        with trainer_turn(self.trainer, self.sampler):
            mine, _, _ = enlarge(self.trainer, self.batch, self.before, self.need, std, self.seed, 8, only)
        try:
            sync.publish(self.trainer, self.sampler, self.version)
            theirs = score(self.sampler, self.batch)
        finally:
            self.trainer.restore_adapter()
        n = len(self.sampler)
        return not all(typical(d) <= allowed(self.dtype, self.limit, base, moved.mean()) for d, base, moved in
                       zip(gaps(mine, theirs, n), self.base, gaps(mine, self.before, n)))


def adapter(parts, paths, std):
    """A sentence: which families of modules part, and which layer first. paths: the modules that the trainer adapts."""
    families, layers = sorted({kind(p) for p in paths}), sorted({int(p.split(".")[1]) for p in paths})
    guilty = [f for f in families if parts.disagree(std, rf"layers\.\d+\.{re.escape(f)}")]
    if not guilty and not parts.disagree(std):
        return "changed and published once more the two agree, all at once and family by family"
    low, high = 0, len(layers)                               # with `low` layers changed they agree, with `high` they part
    while high - low > 1:
        middle = (low + high) // 2
        first = "|".join(map(str, layers[:middle]))
        low, high = (low, middle) if parts.disagree(std, rf"layers\.({first})\..*") else (middle, high)
    names = "every family" if guilty == families else ", ".join(guilty) or "no family"
    return f"changed alone, {names} part{'s' * (len(guilty) < 2)}; layer by layer the first that does is {layers[high - 1]} of " \
           f"{layers[-1] + 1}"


def nature(theirs, mine):
    """A sentence on how the sampler moved when the trainer did. theirs, mine: changes of the same tokens' log-probabilities.
    Medians, because single tokens jump where another expert or another token to attend to is chosen."""
    theirs, mine = np.concatenate(theirs).astype(np.float64), np.concatenate(mine).astype(np.float64)
    if not np.abs(theirs).sum():
        return "the sampler did not move at all: nothing arrived, or nothing of it is used"
    ratio = (theirs / np.where(mine == 0, np.inf, mine))[np.abs(mine) >= np.quantile(np.abs(mine), 0.25)]
    middle = float(np.median(ratio))
    alike = float(np.mean(np.abs(ratio - middle) <= 0.1 * abs(middle)))
    if alike > 0.4 and abs(middle) > 0.05 < abs(middle - 1):
        looks = "a wrong scale, or the same share lost everywhere"
    elif alike > 0.8 and abs(middle) > 0.05:
        looks = "rounding, or few tokens"
    else:
        looks = "a part is lost or exchanged"
    return (f"the sampler moved {middle:.2f} times as far as the trainer (median over tokens, {alike:.0%} of them within a tenth "
            f"of that): it looks like {looks}")


def hidden(trainer, sampler, tokens, dtype, engine):
    """A sentence: the first layer after which the trainer's and an engine's residual streams differ. tokens: one sequence."""
    theirs = sampler.trace(tokens)[engine]
    with trainer_turn(trainer, sampler):
        mine = {layer: states for rank in trainer.trace(tokens) for layer, states in rank.items()}
    if not theirs:
        return "the sampler's layers run compiled and cannot be looked into: start it with enforce_eager to compare them"
    errors = {}
    for layer in sorted(mine.keys() & theirs.keys()):
        a, b = np.asarray(mine[layer]), np.asarray(theirs[layer])
        errors[layer] = float(np.abs(a - b).max() / np.abs(a).max()) if a.shape == b.shape else float("inf")
    wrong = next((layer for layer, e in errors.items() if not e <= RELATIVE[dtype]), None)
    if wrong is None:
        return (f"all {len(errors)} layers hand on the same (largest relative difference {max(errors.values()):.1e}): look at "
                "the final norm, the head and the reported log-probabilities")
    before = max((e for layer, e in errors.items() if layer < wrong), default=0.0)
    return (f"the hidden states part after layer {wrong} of {len(errors)}: relative difference {errors[wrong]:.1e}, "
            f"{before:.1e} before it")
