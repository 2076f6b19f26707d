"""What do two right copies differ by? The five-step check on 20 healthy pairs, from which its tolerances come.

python checks/calibrate.py --out results/calibration.json        # 10 minutes on 2 cores
python checks/calibrate.py --no-layouts --dtypes bfloat16        # on a GPU

Pairs differ in seed, model (how large its weights are), adapter (shared or one per expert), prompts, dtype and layout (one
process; or the rehearsal's taught model on two trainer ranks as DP2, TP2, EP2, with two engines). All must pass. Told are, for
each dtype, how far the two sides are apart before and after a publish: the largest mean and the largest single token of any
pair, and the bias, which a wrong scale has and rounding has not.
"""
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli  # noqa: E402

HERE = Path(__file__).resolve().parent
LAYOUTS = {"DP2": (), "TP2": ("--tp", "2"), "EP2": ("--ep", "2"), "DP2, bf16": ("--dtype", "bfloat16")}


@dataclasses.dataclass
class Config:
    out: str = ""              # write the result there as JSON
    pairs: int = 16            # in one process, dealt over the dtypes; besides the four layouts
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    layouts: bool = True
    one: str = ""              # internal: DTYPE,SEED of one pair


def one(dtype, seed):
    """The check's report on a random model in this process."""
    import numpy as np
    import torch

    from common.trainer import TrainerRank  # isort: skip - first, it prepares megatron-core for the CPU

    from checks.local import Local
    from checks.logprob_parity import five_steps
    from common import lora
    from common.sampler import SamplerEngine
    from data import arithmetic
    folder, cuda = Path(tempfile.mkdtemp(prefix="calibrate-")), torch.cuda.is_available()
    # bf16: smaller weights, or the rounding of a random model alone exceeds what taught and real ones show
    width = (0.02, 0.05, 0.08, 0.12)[seed % 4] if dtype == "float32" else (0.02, 0.03)[seed % 2]
    arithmetic.prepare(folder, seed=seed, dtype=dtype, **{**(arithmetic.CUDA_WIDTHS if cuda else {}), "initializer_range": width})
    long, room = (2600, 4096) if cuda else (90, 192)
    engine = SamplerEngine(folder / "start", dtype=dtype, max_model_len=room, max_num_seqs=16,
                           max_num_batched_tokens=room // 3, lora_rank=8, gpu_memory_utilization=0.4)
    targets = [t for t in lora.TARGETS if not cuda or t != "kv_b_proj"]
    trainer = TrainerRank(0, 1, folder / "start", dtype=dtype, lora_rank=8, lora_alpha=16, lora_targets=targets,
                          experts=("shared", "each")[seed // 4 % 2])
    trainer.load(folder / "rendezvous")
    g = np.random.default_rng(seed)
    prompts = [g.integers(9, arithmetic.VOCABULARY, n).tolist() for n in (4, 12, 21, 30, 60, long)]
    report = five_steps(Local(trainer), Local(engine), prompts, dtype=dtype, max_tokens=48, version=0, seed=seed,
                        say=lambda *_: None)
    return {"pair": f"seed {seed}, weights {width}, {trainer.lora['experts']} experts' adapter", **report}


def outside(command, folder):
    """Run a check in a process of its own; its report."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    found = subprocess.run([sys.executable, "-W", "ignore", *map(str, command)], cwd=folder, env=env, capture_output=True,
                           text=True)
    if found.returncode and "five-step check: FAILED" not in found.stdout:
        raise cli.Stop(f"{' '.join(map(str, command))} ended with {found.returncode}: {found.stderr[-500:]}")
    return found.stdout


def main():
    cfg = cli.parse(Config, doc=__doc__)
    if cfg.one:
        dtype, seed = cfg.one.split(",")
        print("REPORT " + json.dumps(one(dtype, int(seed))))
        return 0
    reports, folder = [], Path(tempfile.mkdtemp(prefix="calibrate-"))
    for i in range(cfg.pairs):
        dtype, seed = cfg.dtypes[i % len(cfg.dtypes)], i // len(cfg.dtypes)
        said = outside([HERE / "calibrate.py", "--one", f"{dtype},{seed}"], folder)
        reports.append(json.loads(said.rpartition("REPORT ")[2]))
        print(told(reports[-1]), flush=True)
    for name, flags in LAYOUTS.items() if cfg.layouts else ():
        run = f"layout-{len(reports)}"
        outside([HERE / "logprob_parity.py", "--rehearse", "--name", run, *flags], folder)
        reports.append({"pair": f"the rehearsal, {name}", **json.loads((folder / "runs" / run / "check.json").read_text())})
        print(told(reports[-1]), flush=True)
    result = {"versions": cli.versions(), "pairs": reports, "summary": summary(reports)}
    print(json.dumps(result["summary"], indent=1))
    if cfg.out:
        cli.write_atomic(cfg.out, json.dumps(result, indent=1) + "\n")
    return 0 if all(r["passed"] for r in reports) else 1


def agreeing(report):
    """The rows of two copies that must agree: before the change and after its publish."""
    return [row for row in report["rows"] if row["what"].startswith("agree")]


def told(report):
    worst = max(agreeing(report), key=lambda row: row["mean"])
    return (f"{report['dtype']}  {report['pair']}: {'passed' if report['passed'] else 'FAILED ' + '; '.join(report['why'])}  "
            f"mean {worst['mean']:.1e}  max {worst['max']:.1e}  {report['seconds']} s")


def summary(reports):
    """{dtype: what the agreeing rows of all its pairs show}."""
    found = {}
    for dtype in sorted({r["dtype"] for r in reports}):
        rows = [row for r in reports if r["dtype"] == dtype for row in agreeing(r)]
        tokens = sum(row["n"] for row in rows)
        found[dtype] = {
            "pairs": sum(r["dtype"] == dtype for r in reports),
            "passed": sum(r["dtype"] == dtype and r["passed"] for r in reports),
            "tokens": tokens, "mean": sum(row["mean"] * row["n"] for row in rows) / tokens,
            "largest_mean": max(row["mean"] for row in rows), "largest_p99": max(row["p99"] for row in rows),
            "largest_max": max(row["max"] for row in rows), "bias": sum(row["bias"] * row["n"] for row in rows) / tokens,
            "tolerance": next(r["tolerance"] for r in reports if r["dtype"] == dtype),
            "seconds": [min(r["seconds"] for r in reports), max(r["seconds"] for r in reports)]}
    return found


if __name__ == "__main__":
    cli.run_main(main)
