"""What do two right copies differ by? The five-step check on 20 healthy pairs, from which its tolerances come.

python checks/calibrate.py --out results/calibration.json        # 20 minutes on 2 cores
python checks/calibrate.py --flash --updates 10 --checks 6,6 --out results/calibration-flash.json
python checks/calibrate.py --no-layouts --dtypes bfloat16        # on a GPU

Pairs differ in seed, model (how large its weights are), adapter (shared or one per expert), prompts, dtype and layout (one
process; or the rehearsal's taught model on two trainer ranks as DP2, TP2, EP2, with two engines). Each is checked several times,
with other noise, prompts and answers. All must pass; where none of n checks fails, the rate of false alarms is below 3 / n with
95 % confidence. Told are, for each dtype, how far the two sides are apart before and after a publish: the largest mean and the
largest single token of any check, the bias, which a wrong scale has and rounding has not, and how near any came to a limit.
"""
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli  # noqa: E402

HERE = Path(__file__).resolve().parent
LAYOUTS = {"DP2": (), "TP2": ("--tp", "2"), "EP2": ("--ep", "2"), "DP2 bf16": ("--dtype", "bfloat16")}


@dataclasses.dataclass
class Config:
    out: str = ""              # write the result there as JSON
    pairs: int = 16            # in one process, dealt over the dtypes; besides the four layouts
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    layouts: bool = True
    checks: tuple[int, ...] = (6, 34)    # of each pair, for each of dtypes
    flash: bool = False        # pairs of GLM-5.3-Flash
    updates: int = 0           # that every second pair's adapter takes before its checks, as before those of a resumed run
    one: tuple[str, ...] = ()  # internal: DTYPE,SEED,CHECKS of one pair, or LAYOUT,NAME,CHECKS of a run


def one(dtype, seed, checks, flash, updates):
    """The check's reports on a random model in this process."""
    import numpy as np
    import torch

    from common.trainer import TrainerRank  # isort: skip - first, it prepares megatron-core for the CPU

    from checks.local import Local
    from checks.logprob_parity import five_steps
    from common import lora
    from common.sampler import SamplerEngine
    from data import arithmetic
    from data.teach import likelihood
    folder, cuda = Path(tempfile.mkdtemp(prefix="calibrate-")), torch.cuda.is_available()
    # bf16: smaller weights, or the rounding of a random model alone exceeds what taught and real ones show; still smaller ones on
    # the CPU make a policy so near to uniform that no adapter moves it enough
    width = (0.02, 0.05, 0.08, 0.12)[seed % 4] if dtype == "float32" else 0.02 if cuda else (0.03, 0.04)[seed % 2]
    widths = (arithmetic.FLASH_CUDA_WIDTHS if flash else arithmetic.CUDA_WIDTHS) if cuda else {}
    arithmetic.prepare(folder, seed=seed, dtype=dtype, flash=flash, **{**widths, "initializer_range": width})
    long, room = (2600, 4096) if cuda else (90, 192)
    engine = SamplerEngine(folder / "start", dtype=dtype, max_model_len=room, max_num_seqs=16,
                           max_num_batched_tokens=room // 3, lora_rank=8, gpu_memory_utilization=0.4)
    targets = [*lora.FLASH_TARGETS, "f_b_proj", "g_b_proj"] if flash else lora.TARGETS
    trainer = TrainerRank(0, 1, folder / "start", dtype=dtype, lora_rank=8, lora_alpha=16, lr=1e-3,
                          lora_targets=[t for t in targets if not cuda or t != "kv_b_proj"],
                          experts=("shared", "each")[seed // 4 % 2])
    trainer.load(folder / "rendezvous")
    g = np.random.default_rng(seed)
    words = arithmetic.VOCABULARY - 6 * flash                # the last of Flash's stand for images
    updates *= seed % 2
    for _ in range(updates):                                 # towards random answers: lora_B is no longer zero
        trainer.update({"tokens": [g.integers(9, words, 60) for _ in range(16)], "n_prompt": [12] * 16,
                        "weight": [1 / (16 * 48)] * 16}, likelihood)
    reports = []
    for i in range(checks):
        prompts = [g.integers(9, words, n).tolist() for n in (4, 12, 21, 30, 60, long)]
        reports.append(five_steps(Local(trainer), Local(engine), prompts, dtype=dtype, max_tokens=48, version=engine.version,
                                  seed=seed + 1000 * i, say=lambda *_: None))
    return f"seed {seed}, weights {width}, {trainer.lora['experts']} experts' adapter" + \
        f" after {updates} updates" * (updates > 0), reports


def rehearsal(layout, name, checks, flash):
    """The check's reports on the rehearsal's start in a layout."""
    from checks import logprob_parity
    recipe = importlib.import_module("recipes.dapo_glm5p3_flash_lora" if flash else "recipes.dapo_glm5p3_lora")
    check, reports = logprob_parity.five_steps, []

    def several(trainer, sampler, prompts, *, version, seed, **how):
        for i in range(checks):
            how["say"] = lambda *_: None
            reports.append(check(trainer, sampler, prompts, version=version, seed=seed + 1000 * i, **how))
            version = reports[-1]["version"]
        return reports[-1]
    logprob_parity.five_steps, sys.argv = several, [sys.argv[0], "--rehearse", "--name", name, *LAYOUTS[layout]]
    recipe.main(check_only=True)
    return f"the rehearsal, {layout}", reports


def outside(one, cfg, folder):
    """(name, reports) of a pair, checked in a process of its own."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    found = subprocess.run([sys.executable, "-W", "ignore", HERE / "calibrate.py", "--one", ",".join(map(str, one)),
                            "--flash" if cfg.flash else "--no-flash", "--updates", str(cfg.updates)], cwd=folder, env=env,
                           capture_output=True, text=True)
    if found.returncode:
        raise cli.Stop(f"the pair {', '.join(map(str, one))} ended with {found.returncode}: {found.stderr[-500:]}")
    return json.loads(found.stdout.rpartition("REPORT ")[2])


def dtype_of(what):
    """Of a pair in one process, named by it, or of a layout."""
    return ("bfloat16" if "bfloat16" in LAYOUTS[what] else "float32") if what in LAYOUTS else what


def main():
    cfg = cli.parse(Config, doc=__doc__)
    if cfg.one:
        what, which, checks = cfg.one
        found = rehearsal(what, which, int(checks), cfg.flash) if what in LAYOUTS else \
            one(what, int(which), int(checks), cfg.flash, cfg.updates)
        print("REPORT " + json.dumps(found, default=float))
        return 0
    checks, pairs, reports = dict(zip(cfg.dtypes, cfg.checks)), [], []
    todo = [(cfg.dtypes[i % len(cfg.dtypes)], i // len(cfg.dtypes)) for i in range(cfg.pairs)]
    todo += [(layout, f"layout-{i}") for i, layout in enumerate(LAYOUTS) if dtype_of(layout) in cfg.dtypes] if cfg.layouts else []
    with tempfile.TemporaryDirectory() as folder:
        for what, which in todo:
            dtype = dtype_of(what)
            name, found = outside((what, which, checks[dtype]), cfg, folder)
            pairs.append(told(name, found))
            reports += found
            print("  ".join(f"{k} {v:.2g}" if isinstance(v, float) else f"{v}" for k, v in pairs[-1].items()), flush=True)
    result = {"versions": cli.versions(), "pairs": pairs, "summary": summary(pairs, reports)}
    print(json.dumps(result["summary"], indent=1))
    if cfg.out:
        cli.write_atomic(cfg.out, json.dumps(result, indent=1) + "\n")
    return 0 if all(r["passed"] for r in reports) else 1


def agreeing(report):
    """The rows of two copies that must agree: before the change and after its publish."""
    return [row for row in report["rows"] if row["what"].startswith("agree")]


def told(name, reports):
    """What the checks of one pair show, in a line."""
    rows = [row for report in reports for row in agreeing(report)]
    return {"pair": name, "dtype": reports[0]["dtype"], "checks": len(reports), "passed": sum(r["passed"] for r in reports),
            "mean": max(row["mean"] for row in rows), "median": max(row["median"] for row in rows),
            "max": max(row["max"] for row in rows), "margin": max(row["margin"] for row in rows),
            "why": [why for r in reports for why in r["why"]]}


def summary(pairs, reports):
    """{dtype: what the agreeing rows of all its checks show}."""
    found = {}
    for dtype in sorted({r["dtype"] for r in reports}):
        own = [r for r in reports if r["dtype"] == dtype]
        rows = [row for r in own for row in agreeing(r)]
        tokens = sum(row["n"] for row in rows)
        found[dtype] = {
            "pairs": sum(p["dtype"] == dtype for p in pairs), "checks": len(own), "passed": sum(r["passed"] for r in own),
            "tokens": tokens, "mean": sum(row["mean"] * row["n"] for row in rows) / tokens,
            "largest_mean": max(row["mean"] for row in rows), "largest_median": max(row["median"] for row in rows),
            "largest_p99": max(row["p99"] for row in rows),
            "largest_max": max(row["max"] for row in rows), "bias": sum(row["bias"] * row["n"] for row in rows) / tokens,
            "largest_margin": max(row["margin"] for row in rows), "tolerance": own[0]["tolerance"],
            "seconds": [min(r["seconds"] for r in own), max(r["seconds"] for r in own)]}
    return found


if __name__ == "__main__":
    cli.run_main(main)
