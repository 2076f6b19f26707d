"""The faults of checks/faults.py that need several processes: the recipe's own check on Ray, with two trainer ranks that split
tensors and experts (TP 2 and EP 2, as 8 and 8 at full size) and two sampler engines. One start serves them all.

    python checks/faults_parallel.py float32 OUT.json    # or bfloat16; in an empty folder; a minute
"""
import contextlib
import importlib
import json
import sys
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli  # noqa: E402

FLAGS = ("--model start --train-data train.parquet --eval-data test.parquet --nodes 1 --gpus-per-node 0 --cpu-ranks 2 --tp 2 "
         "--ep 2 --sampler-tp 1 --lora-rank 8 --lora-alpha 16 --lora-experts each --max-prompt-tokens 32 "
         "--max-response-tokens 48 --overlong-buffer 4 --prompts-per-step 8 --updates-per-step 1 --recompute none "
         "--wandb off").split()

# how large the random model's are; bf16: then the two sides differ by 0.02 to 0.03, as the real model's do
WEIGHTS = {"float32": 0.08, "bfloat16": 0.04}


def actor(where, arguments):
    """The object that the recipe asked for, with one more verb: `fault(name)` puts a fault of FAULTS into its process, None takes
    it out again."""
    module, _, name = where.partition(":")
    held, stack = getattr(importlib.import_module(module), name)(**arguments), contextlib.ExitStack()

    def fault(name):
        stack.close()
        if name:
            stack.enter_context(next(f for f in FAULTS if f[0] == name)[2](held))
    held.fault = fault
    return held


def shared_expert_times_tp(rank):
    """The adapter's sum over tensor parallel ranks is complete, and is added up once more with the layer's (MB#6089)."""
    from common.lora import Lora
    real = Lora.forward

    def forward(self, *args):
        return real(self, *args) * (self.tp if "shared_experts.down_proj" in self.keys[0] else 1)
    return mock.patch.object(Lora, "forward", forward)


def experts_rotated(rank):
    """Experts counted from the wrong expert parallel rank."""
    from common import lora
    real = lora._gathered

    def gathered(slices, axes, group):
        return [whole.roll(len(mine), 0) if axis == 0 else whole
                for whole, mine, axis in zip(real(slices, axes, group), slices, axes)]
    return mock.patch.object(lora, "_gathered", gathered)


def noise_by_rank(rank):
    """What tensor parallel ranks hold alike drifts apart (a seed from the rank, a gradient that is not summed)."""
    from common import lora
    real = lora._normal
    return mock.patch.object(lora, "_normal", lambda key, seed, *rest: real(key, f"{seed} {rank.rank}", *rest))


def not_installed(engine):
    """The changed adapter's slot is written and read back, and requests go on naming the version before."""
    real, changed = engine.commit, engine.version + 2

    def commit(version):
        request = engine.request
        answer = real(version)
        engine.request = request if version == changed else engine.request
        return answer
    return mock.patch.object(engine, "commit", commit)


STALE = "step 5, agree again, prefill"
# name, where it must be found, what puts it in, where it is put
FAULTS = [("TP 2: the shared expert's adapter counted twice", STALE, shared_expert_times_tp, "trainer"),
          ("EP 2: experts of the other rank", STALE, experts_rotated, "trainer"),
          ("TP 2: a different lora_A on each rank", STALE, noise_by_rank, "trainer"),
          ("one sampler engine of two stays stale", STALE, not_installed, "engine 1")]


def verdict(report):
    """What a report of the check says of a fault: {found, row (the first that fails, else the one nearest to its limit), its
    mean, max, tokens and margin (error / limit; None for a row that must exceed its limit), moved (by how much the change moved
    the trainer), where (the check's own guess)}."""
    rows = report["rows"]
    moved = next(r["mean"] for r in rows if r["what"] == "change, trainer alone")
    bad = next((r for r in rows if not r["ok"]), None)
    row = bad or max((r for r in rows if r["what"].startswith("agree")), key=lambda r: r["margin"])
    found = f"step {bad['step']}, {bad['what']}" if bad else report["why"][0] if report["why"] else "not caught"
    return {"found": found, "row": f"step {row['step']}, {row['what']}", "mean": row["mean"], "max": row["max"],
            "tokens": row["n"], "margin": row["margin"], "moved": moved, "where": report["where"]}


def main():
    from checks import logprob_parity
    from common import cluster
    from data import arithmetic
    from recipes import dapo_glm5p3_lora as recipe
    dtype, out, start, check = sys.argv[1], Path(sys.argv[2]).absolute(), cluster.start, logprob_parity.five_steps
    arithmetic.prepare(".", dtype=dtype, initializer_range=WEIGHTS[dtype])

    def start_faulty(where, name, place, arguments, **how):
        return start("checks.faults_parallel:actor", name, place, [dict(where=where, arguments=a) for a in arguments], **how)

    def check_all(trainer, sampler, prompts, *, version, **how):
        healthy, found = None, []
        for name, expected, _, place in [("", "", None, ""), *FAULTS, ("", "", None, "")]:
            began = time.time()
            trainer.fault(name if place == "trainer" else None)
            sampler.each("fault", [(name if place == f"engine {i}" else None,) for i in range(len(sampler))])
            report = check(trainer, sampler, prompts, version=version, **{**how, "say": lambda *_: None})
            version, healthy = report["version"], healthy or {f"step {r['step']}, {r['what']}": r["mean"] for r in report["rows"]}
            told = verdict(report)
            if name:
                found.append(dict(name=name, expected=expected, **told, healthy=healthy[told["row"]],
                                  seconds=round(time.time() - began, 1)))
            elif not report["passed"]:
                raise cli.Stop(f"the check fails {'after the faults' if found else 'without a fault'}: {report['why'][0]}")
        cli.write_atomic(out, json.dumps(found, default=float))
        return report
    cluster.start, logprob_parity.five_steps, sys.argv = start_faulty, check_all, [sys.argv[0], *FLAGS, "--dtype", dtype]
    return recipe.main(check_only=True)


if __name__ == "__main__":
    cli.run_main(main)
