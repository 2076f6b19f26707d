"""Do trainer and sampler hold the same policy, and does a publish make it so again? The five-step check.

    python checks/logprob_parity.py --rehearse          # tiny model, CPU or one GPU; prints the table, exit code 0 or 1

 1 agree     the same tokens through both copies: mean |dlogp| within the tolerance, both for a prefill and for the
             sampler's own decode
 2 change    only the trainer's adapter: noise seeded by parameter name, as small as moves the trainer by a few
             tolerances
 3 stale     the sampler was told nothing: it must answer exactly as before, so the two must now disagree by more than
             the tolerance
 4 publish   the changed adapter; by their checksums, all of its tensors must be other than before
 5 agree     again, prefill and decode
Then the change is taken back, published, and must leave both copies exactly where they were. Why 2 and 3: at the start
lora_B is zero, so a dead hand-off passes step 1, and step 5 means something only if the stale sampler was seen to
disagree.
Recipes run `five_steps` before their first training step and after every resume.
"""
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from checks import localise  # noqa: E402
from common import cli, sync  # noqa: E402
from common.batch import merge  # noqa: E402
from common.cluster import trainer_turn  # noqa: E402
from common.sampler import spread  # noqa: E402

# Largest gap between two right copies, (mean, max) of |dlogp| over response tokens; results/calibration.json has what healthy
# pairs differ by. float32: nine times the largest mean there, six times the largest single token. bfloat16: the mean that the
# field report uses, twice what the real model shows (0.025, single tokens 0.49).
TOLERANCE = {"float32": (2e-5, 1e-3), "bfloat16": (0.05, 2.0)}
# The same engine asked twice: batches differ in shape, kernels in the order of sums. bfloat16: 0.024 seen on an H200 for a
# prompt of 2,600 tokens, once in three chunks and once from the prefix cache.
REPEAT = {"float32": 1e-4, "bfloat16": 0.1}
# The change must move the trainer by this many tolerances, so that step 3 leaves no doubt and step 5 sees the loss of a small
# part; little in bf16, where a larger adapter amplifies rounding. FIRST: the noise that is tried first.
STALE_FACTOR = {"float32": 100, "bfloat16": 3}
FIRST = {"float32": 1e-4, "bfloat16": 0.02}


def five_steps(trainer, sampler, prompts, *, dtype, max_tokens, version, seed=0, say=print, decode_text=None):
    """Run the check on groups of actors (or what behaves alike). prompts: lists of token ids; their answers, at most
    max_tokens long, are the tokens compared. version: the last one published; three more are published, and one for each
    question that a failure raises. decode_text: token ids -> text, to show the worst tokens. Returns a report dict: passed,
    version (the last one published), rows, why, where (what localise.py found), worst (tokens)."""
    mean_limit, max_limit = TOLERANCE[dtype]
    started, rows, failures, worst = time.time(), [], [], []
    seeds = [seed + i for i in range(len(prompts))]

    def on_trainer(batch):
        return merge(trainer.logprobs(batch), len(batch["tokens"]))

    def on_sampler(batch):
        return spread(sampler, "score", (batch["tokens"], batch["n_prompt"]))

    def decode():
        """Fresh answers, and the log-probabilities that the sampler gave them while decoding."""
        answers = spread(sampler, "generate", (prompts, seeds), max_tokens)
        tokens = [np.concatenate([p, a["tokens"]]).astype(np.int32) for p, a in zip(prompts, answers)]
        return {"tokens": tokens, "n_prompt": [len(p) for p in prompts]}, [a["logp"] for a in answers]

    def row(step, what, mine, theirs, ok=None, note="", of=None):
        signed = np.concatenate(mine) - np.concatenate(theirs)
        d = np.abs(signed)
        good = bool(np.isfinite(d).all() and (ok(d) if ok else d.mean() <= mean_limit and d.max() <= max_limit))
        sequence = max(float(np.abs(a - b).mean()) for a, b in zip(mine, theirs))
        rows.append(dict(step=step, what=what, mean=float(d.mean()), p99=float(np.quantile(d, 0.99)), max=float(d.max()),
                         bias=float(signed.mean()), worst_sequence=sequence, n=d.size, ok=good, note=note))
        if not good and of is not None and not worst:
            worst.extend(localise.worst(mine, theirs, of))
        if not good:
            failures.append(f"step {step} ({what}): mean {d.mean():.2g}, max {d.max():.2g}{', ' + note if note else ''}")
        return d

    info = sync.publish(trainer, sampler, version + 1)
    before = [f for f in trainer.fingerprint() if f]
    batch, decoded = decode()
    s0, again = on_sampler(batch), on_sampler(batch)

    # 2. Calibrate: noise that moves the trainer enough
    need = STALE_FACTOR[dtype] * mean_limit
    with trainer_turn(trainer, sampler):
        t0 = on_trainer(batch)
        t1, moved, std = localise.enlarge(trainer, batch, t0, need, FIRST[dtype], seed, 12)
    row(1, "agree, prefill", s0, t0, of=batch)
    base = row(1, "agree, decode", decoded, t0, of=batch).mean()
    noise = row(1, "sampler, asked twice", again, s0, lambda d: d.max() <= REPEAT[dtype]).max()
    row(2, "change, trainer alone", t1, t0, lambda d: d.mean() >= need, f"noise std {std:.2g}")
    s1 = on_sampler(batch)
    row(3, "stale, must disagree", s1, t1, lambda d: d.mean() > mean_limit, f"more than {mean_limit:g}")
    row(3, "stale, unmoved", s1, s0, lambda d: d.max() <= max(REPEAT[dtype], 3 * noise))

    def agrees(d):
        """Within the tolerance, and small beside the change: a hand-off that loses part of it must not hide in it."""
        return d.mean() <= localise.allowed(mean_limit, base, moved) and d.max() <= max_limit
    try:
        changed = sync.publish(trainer, sampler, version + 2)
        s1, (batch1, decoded1) = on_sampler(batch), decode()
        with trainer_turn(trainer, sampler):
            t2 = on_trainer(batch1)
        row(5, "agree again, prefill", s1, t1, agrees, of=batch)
        row(5, "agree again, decode", decoded1, t2, agrees, of=batch1)
        # exact, where the tolerance of bf16 hides a single tensor: the noise changed each of them
        stale = [key for key, value in changed["checksums"].items() if info["checksums"].get(key) == value]
        lost = {path for rank in trainer.adapted() for path in rank} - {key.rpartition(".")[0] for key in changed["checksums"]}
        if stale or lost:
            names = ", ".join([*stale, *sorted(lost)][:3])
            failures.append(f"step 4: {len(stale)} tensors were published as before the change, {len(lost)} modules not at all: "
                            f"{names}")
    except cli.Stop as error:
        failures.append(f"step 4: {error}")
    trainer.restore_adapter()
    sync.publish(trainer, sampler, version + 3)
    row(6, "taken back, sampler", on_sampler(batch), s0, lambda d: d.max() <= max(REPEAT[dtype], 3 * noise))
    if [f for f in trainer.fingerprint() if f] != before:
        failures.append("step 6: the trainer's adapter is not what it was before the check")

    version, where = version + 3, []
    wrong = {r["step"] for r in rows if not r["ok"]}
    try:
        if 1 in wrong and worst:
            where.append(localise.hidden(trainer, sampler, batch["tokens"][worst[0]["sequence"]].tolist(), dtype))
        elif 5 in wrong:
            where.append(localise.nature([b - a for a, b in zip(s0, s1)], [b - a for a, b in zip(t0, t1)]))
            parts = localise.Parts(trainer, sampler, batch, t0, base, mean_limit, need, version, seed)
            try:
                where.append(localise.adapter(parts, {p for rank in trainer.adapted() for p in rank}, std))
            finally:
                version = parts.version + 1
                sync.publish(trainer, sampler, version)           # without the parts' changes
    except Exception as error:                                # noqa: BLE001 - the check's verdict must not be lost to its details
        where.append(f"where they part could not be found out: {type(error).__name__}: {error}")

    report = dict(passed=not failures, why=failures, where=where, worst=worst, rows=rows, version=version, dtype=dtype,
                  tolerance=[mean_limit, max_limit], noise_std=std, seconds=round(time.time() - started, 1),
                  bytes=info["bytes"], tensors=info["tensors"], ranks=info["ranks"])
    say(cli.table([[r["step"], r["what"], f"{r['mean']:.2e}", f"{r['max']:.2e}", f"{r['worst_sequence']:.2e}", r["n"],
                    "yes" if r["ok"] else "NO", r["note"]] for r in rows],
                  ["step", "", "mean |dlogp|", "max", "worst sequence", "tokens", "ok", ""]))
    if worst:
        text = decode_text or (lambda ids: " ".join(map(str, ids)))
        say("the worst tokens:\n" + cli.table([[w["sequence"], w["position"], repr(text([w["token"]])), w["first"], w["second"],
                                               repr(text(w["before"]))] for w in worst],
                                             ["sequence", "position", "token", "one side", "the other", "after"]))
    for sentence in where:
        say(f"where: {sentence}")
    say(f"five-step check: {'passed' if report['passed'] else 'FAILED: ' + '; '.join(failures)} "
        f"({info['tensors']} tensors, {info['bytes'] / 1e6:.1f} MB to {info['ranks']} sampler ranks, {report['seconds']} s)")
    return report


def main():
    """The check alone: the recipe's own start, up to and including its check."""
    from recipes import dapo_glm5p3_lora as recipe
    return recipe.main(check_only=True, doc=__doc__)


if __name__ == "__main__":
    cli.run_main(main)
