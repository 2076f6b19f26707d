"""Do trainer and sampler hold the same policy, and does a publish make it so again? The five-step check.

    python checks/logprob_parity.py --rehearse          # tiny model, CPU or one GPU; prints the table, exit code 0 or 1

 1 agree     the same tokens through both copies: |dlogp| within the tolerance, both for a prefill and for the sampler's
             own decode
 2 change    only the trainer's adapter: noise seeded by parameter name, as small as moves the trainer by a few
             tolerances
 3 stale     the sampler was told nothing: it must answer exactly as before, so the two must now disagree by more than
             the tolerance
 4 publish   the changed adapter; by their checksums, all of its tensors must be other than before
 5 agree     again, prefill and decode
Then the change is taken back, published, and must leave both copies exactly where they were. Why 2 and 3: at the start
lora_B is zero, so a dead hand-off passes step 1, and step 5 means something only if the stale sampler was seen to
disagree. Every engine answers all prompts and scores its own answers, and every engine must pass alone: one stale engine
does not hide behind the others.
Recipes run `five_steps` before their first training step and after every resume.
"""
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from checks import localise  # noqa: E402
from common import bundle, cli, sync  # noqa: E402
from common.batch import merge  # noqa: E402
from common.cluster import trainer_turn  # noqa: E402

# Largest gap between two right copies, |dlogp| over response tokens: the mean without the largest hundredth, and the max;
# results/calibration.json has what healthy pairs differ by. bfloat16: the mean that the field report uses, twice what the real
# model shows (0.025). Single tokens say little: where rounding chooses another expert a healthy one is off by hundredths in
# float32, by nats in bf16 (3.2 here; results/published.json has 6.9 to 17.6 in training), so that limit is for nonsense.
# fp8: bfloat16 with a sampler in FP8. A published pair of those is 0.095 apart where bf16's is 0.032 (NeMo-RL): three times its
# limit.
TOLERANCE = {"float32": (2e-5, 1.0), "bfloat16": (0.05, 10.0), "fp8": (0.15, 20.0)}
# Half of the tokens must be within this share of the mean's limit. In healthy pairs few tokens that jump make the mean, and the
# median is below 0.45 of it; a fault moves all tokens. So does FP8: no share of its own.
MEDIAN = {"float32": 1 / 3, "bfloat16": 1 / 3, "fp8": 1}
# The same engine asked twice: batches differ in shape, kernels in the order of sums. bfloat16: 0.024 seen on an H200 for a
# prompt of 2,600 tokens, once in three chunks and once from the prefix cache; FP8 casts activations, and turns such into steps
# (not measured).
REPEAT = {"float32": 1e-4, "bfloat16": 0.1, "fp8": 1.0}
# The change must move the trainer by this many tolerances, so that step 3 leaves no doubt and step 5 sees the loss of a small
# part; fewer in bf16, where a larger adapter amplifies rounding. FIRST: the noise that is tried first.
STALE_FACTOR = {"float32": 1000, "bfloat16": 6, "fp8": 4}
FIRST = {"float32": 1e-4, "bfloat16": 0.02, "fp8": 0.02}


def trained(key, paths):
    """The path in `paths` of the module that a published tensor belongs to: its own, or that which stands for all experts."""
    path = key.rpartition(".")[0]
    return path if path in paths else bundle.module_of(key)


def five_steps(trainer, sampler, prompts, *, dtype, max_tokens, version, sampler_fp8="none", seed=0, index_topk=None, room=0,
               say=print, decode_text=None):
    """Run the check on groups of actors (or what behaves alike). prompts: lists of token ids; every engine answers all, with at
    most max_tokens tokens, and those are compared. version: the last one published; three more are published, and one for each
    question that a failure raises. sampler_fp8: the recipe's; FP8 has tolerances of its own. index_topk: the model's; where
    `room`, the longest prompt and answer that the sampler takes, allows, one prompt more is put together that is longer, so that
    attention must select. decode_text: token ids -> text, to show the worst tokens. Returns a report dict: passed, version (the
    last one published), rows, why, where (what localise.py found), worst (tokens), selected (compared tokens that more than
    index_topk tokens precede)."""
    dtype = dtype if sampler_fp8 == "none" else "fp8"
    mean_limit, max_limit = TOLERANCE[dtype]
    started, rows, failures, worst, engines = time.time(), [], [], [], len(sampler)
    prompts = prompts + beyond(prompts, index_topk, room - max_tokens)

    def on_trainer(batch):
        return merge(trainer.logprobs(batch), len(batch["tokens"]))

    def on_sampler(batch):
        return localise.score(sampler, batch)

    def decode():
        """Fresh answers, engine by engine, and the log-probabilities that the sampler gave them while decoding."""
        seeds = [[seed + e * len(prompts) + i for i in range(len(prompts))] for e in range(engines)]
        answers = sum(sampler.each("generate", [(prompts, own, max_tokens) for own in seeds]), [])
        tokens = [np.concatenate([p, a["tokens"]]).astype(np.int32) for p, a in zip(prompts * engines, answers)]
        return {"tokens": tokens, "n_prompt": [len(p) for p in prompts] * engines}, [a["logp"] for a in answers]

    def row(step, what, mine, theirs, most=None, least=None, note="", of=None, parts=engines):
        """Compare two sides, engine by engine: |dlogp| at most `most` (for each engine the typical, median and max), or its mean
        at least `least`. The row's `margin` is the largest of them in units of its limit."""
        signed = np.concatenate(mine) - np.concatenate(theirs)
        d, own = np.abs(signed), localise.gaps(mine, theirs, parts)
        means, margins = [float(e.mean()) for e in own], [0.0]
        if most:
            margins = [max(v / m for v, m in zip((localise.typical(e), np.median(e), e.max()), limits))
                       for e, limits in zip(own, most)]
        good = bool(np.isfinite(d).all()) and max(margins) <= 1 and (least is None or min(means) >= least)
        odd = int(np.argmax(np.nan_to_num(margins, nan=np.inf)) if most else np.argmin(means))
        sequence = max(float(np.abs(a - b).mean()) for a, b in zip(mine, theirs))
        rows.append(dict(step=step, what=what, mean=float(d.mean()), median=float(np.median(d)), p99=float(np.quantile(d, 0.99)),
                         max=float(d.max()), bias=float(signed.mean()), worst_sequence=sequence, n=d.size, engines=means, ok=good,
                         margin=float(max(margins)) if most else None, note=note))
        if not good and of is not None and not worst:
            worst.extend(localise.worst(mine, theirs, of))
        if not good:
            which = f"engine {odd} of {parts}: " if parts > 1 else ""
            failures.append(f"step {step} ({what}): {which}mean {means[odd]:.2g}, median {np.median(own[odd]):.2g}, "
                            f"max {own[odd].max():.2g}{', ' + note if note else ''}")
        return own

    info = sync.publish(trainer, sampler, version + 1)
    before = [f for f in trainer.fingerprint() if f]
    batch, decoded = decode()
    s0, again = on_sampler(batch), on_sampler(batch)

    # 2. Calibrate: noise that moves the trainer enough
    need = STALE_FACTOR[dtype] * mean_limit
    with trainer_turn(trainer, sampler):
        t0 = on_trainer(batch)
        t1, _, std = localise.enlarge(trainer, batch, t0, need, FIRST[dtype], seed, 12)
    agree = [(mean_limit, MEDIAN[dtype] * mean_limit, max_limit)] * engines
    base = [max(map(localise.typical, both)) for both in zip(row(1, "agree, prefill", s0, t0, agree, of=batch),
                                                    row(1, "agree, decode", decoded, t0, agree, of=batch))]
    same = [(np.inf, np.inf, REPEAT[dtype])] * engines
    noise = max(e.max() for e in row(1, "sampler, asked twice", again, s0, same))
    same = [(np.inf, np.inf, max(REPEAT[dtype], 3 * noise))] * engines
    row(2, "change, trainer alone", t1, t0, least=need, note=f"noise std {std:.2g}", parts=1)
    s1 = on_sampler(batch)
    row(3, "stale, must disagree", s1, t1, least=mean_limit, note=f"more than {mean_limit:g}")
    row(3, "stale, unmoved", s1, s0, same)
    # small beside the change: a hand-off that loses part of it must not hide in the tolerance
    allowed = [localise.allowed(dtype, mean_limit, b, d.mean()) for b, d in zip(base, localise.gaps(t1, t0, engines))]
    agree = [(limit, MEDIAN[dtype] * limit, max_limit) for limit in allowed]
    try:
        changed = sync.publish(trainer, sampler, version + 2)
        s1, (batch1, decoded1) = on_sampler(batch), decode()
        with trainer_turn(trainer, sampler):
            t2 = on_trainer(batch1)
        row(5, "agree again, prefill", s1, t1, agree, of=batch)
        row(5, "agree again, decode", decoded1, t2, agree, of=batch1)
        # exact, where the tolerance of bf16 hides a single tensor: the noise changed each of them
        paths = {path for rank in trainer.adapted() for path in rank}
        of = {key: trained(key, paths) for key in changed["checksums"]}
        stale = [key for key, value in changed["checksums"].items() if of[key] in paths and info["checksums"].get(key) == value]
        lost = paths - set(of.values())
        if stale or lost:
            names = ", ".join([*stale, *sorted(lost)][:3])
            failures.append(f"step 4: {len(stale)} tensors were published as before the change, {len(lost)} modules not at all: "
                            f"{names}")
    except cli.Stop as error:
        failures.append(f"step 4: {error}")
    trainer.restore_adapter()
    sync.publish(trainer, sampler, version + 3)
    row(6, "taken back, sampler", on_sampler(batch), s0, same)
    if [f for f in trainer.fingerprint() if f] != before:
        failures.append("step 6: the trainer's adapter is not what it was before the check")

    version, where = version + 3, []
    wrong = {r["step"] for r in rows if not r["ok"]}
    try:
        if 1 in wrong and worst:
            one = worst[0]["sequence"]
            where.append(localise.hidden(trainer, sampler, batch["tokens"][one].tolist(), dtype, one // len(prompts)))
        elif 5 in wrong:
            where.append(localise.nature([b - a for a, b in zip(s0, s1)], [b - a for a, b in zip(t0, t1)]))
            parts = localise.Parts(trainer, sampler, batch, t0, base, dtype, mean_limit, need, version, seed)
            try:
                where.append(localise.adapter(parts, {p for rank in trainer.adapted() for p in rank}, std))
            finally:
                version = parts.version + 1
                sync.publish(trainer, sampler, version)           # without the parts' changes
    except Exception as error:                                # noqa: BLE001 - the check's verdict must not be lost to its details
        where.append(f"where they part could not be found out: {type(error).__name__}: {error}")

    selected = sum(max(0, len(t) - max(n, index_topk + 1)) for t, n in zip(*batch.values())) if index_topk else 0
    report = dict(passed=not failures, why=failures, where=where, worst=worst, rows=rows, version=version, dtype=dtype,
                  tolerance=[mean_limit, max_limit], noise_std=std, selected=selected, seconds=round(time.time() - started, 1),
                  bytes=info["bytes"], tensors=info["tensors"], ranks=info["ranks"])
    say(cli.table([[r["step"], r["what"], f"{r['mean']:.2e}", f"{r['median']:.2e}", f"{r['max']:.2e}",
                    f"{r['worst_sequence']:.2e}", r["n"], "yes" if r["ok"] else "NO", r["note"]] for r in rows],
                  ["step", "", "mean |dlogp|", "median", "max", "worst sequence", "tokens", "ok", ""]))
    if worst:
        text = decode_text or (lambda ids: " ".join(map(str, ids)))
        say("the worst tokens:\n" + cli.table([[w["sequence"], w["position"], repr(text([w["token"]])), w["first"], w["second"],
                                               repr(text(w["before"]))] for w in worst],
                                             ["sequence", "position", "token", "one side", "the other", "after"]))
    for sentence in where:
        say(f"where: {sentence}")
    say(f"five-step check: {'passed' if report['passed'] else 'FAILED: ' + '; '.join(failures)}"
        + (f"; {selected} of the compared tokens are past index_topk {index_topk:,}" if index_topk else "") + " "
        f"({info['tensors']} tensors, {info['bytes'] / 1e6:.1f} MB to {info['ranks']} sampler ranks, {report['seconds']} s)")
    return report


def beyond(prompts, index_topk, most):
    """[a prompt of the given ones, one after the other: twice as long as index_topk, or `most`]: about half of its tokens are
    then left out of its answer's attention. [] where that is not longer than index_topk, or a given one is."""
    length = min(2 * index_topk, most) if index_topk else 0
    if not index_topk or length <= index_topk or max(map(len, prompts)) > index_topk:
        return []
    tokens = [t for p in prompts for t in p]
    return [(tokens * (length // len(tokens) + 1))[:length]]


def main():
    """The check alone: the recipe's own start, up to and including its check."""
    from recipes import dapo_glm5p3_lora as recipe
    return recipe.main(check_only=True, doc=__doc__)


if __name__ == "__main__":
    cli.run_main(main)
