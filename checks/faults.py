"""Faults put into the real code path, one at a time: does the five-step check, or a guard before it, find each one, and where?

    python checks/faults.py                     # all of them, minutes on 2 cores; writes results/faults.json
    python checks/faults.py --only rotary       # those whose name holds this word; prints only
    python checks/faults.py --flash             # GLM-5.3-Flash's own; writes results/faults-flash.json

A real vLLM engine and a real trainer rank in this process, every kind of layer adapted, prompts longer than index_topk. The
lists are in faults_handoff.py, faults_model.py, faults_flash.py and, for what needs several processes, faults_parallel.py.
lora_B starts at zero, as in a new run: what is wrong with the adapter cannot show in step 1. In float32 all must be found where
the list says; what the wider tolerance of bf16 leaves of that is measured beside it.
"""
import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common import cli, vllm_cpu  # noqa: E402

if __name__ == "__main__":
    os.environ.update(vllm_cpu.ENV, PYTHONPATH=str(ROOT))

from common.trainer import TrainerRank, mpu  # noqa: E402, I001 - first, it prepares megatron-core for the CPU

import numpy as np  # noqa: E402
import torch  # noqa: E402

from checks import faults_flash, faults_handoff, faults_model, faults_parallel, localise, logprob_parity  # noqa: E402
from checks.local import Local, free_worker  # noqa: E402
from common import lora, sync  # noqa: E402
from common.batch import merge  # noqa: E402
from common.sampler import SamplerEngine  # noqa: E402
from data import arithmetic  # noqa: E402

FAULTS = faults_handoff.FAULTS + faults_model.FAULTS
ANSWER = {"float32": 16, "bfloat16": 64}               # tokens; where rounding is large, more of them tell more
RANK = 8
# so near the tolerance that on another processor, whose rounding draws other answers, they may fall below it
NEAR = ("one tensor stays stale: a layer's q_a_proj lora_B", "one expert of one layer stays stale: its down_proj lora_B",
        "latent norms with eps 1e-5 for 1e-6, latents of variance 1")


@dataclasses.dataclass
class Config:
    only: str = ""             # faults whose name holds this
    dtype: str = "float32"     # bfloat16: measures, expects nothing
    flash: bool = False        # GLM-5.3-Flash
    out: str = ""              # by default results/faults.json or faults-flash.json


class Bench:
    """The engine and two trainer ranks: with an adapter for each expert, and with one for all experts of a layer. whole: one rank
    that trains all weights, and an engine that takes them."""

    def __init__(self, folder, dtype="float32", flash=False, whole=False):
        arithmetic.prepare(folder, dtype=dtype, flash=flash, initializer_range=faults_parallel.WEIGHTS[dtype],
                           **(faults_flash.MODEL if flash else {}))
        if flash:
            faults_flash.varied(Path(folder) / "start")
        self.folder, self.dtype, self.trainers, self.clean, self.whole = Path(folder) / "start", dtype, {}, {}, whole
        rank, self.expert_rank = 2 * RANK if flash else RANK, RANK
        # 64 tokens a batch: the longest prompt's prefill comes in two pieces
        self.engine = SamplerEngine(self.folder, dtype=dtype, max_model_len=192, max_num_seqs=16, max_num_batched_tokens=64,
                                    **(dict(weights=True) if whole else dict(lora_rank=rank)))
        self.worker = self.engine.llm.llm_engine.model_executor.driver_worker.worker
        self.layers = self.worker.model_runner.model.model.layers
        targets = (*lora.FLASH_TARGETS, "f_b_proj", "g_b_proj") if flash else lora.TARGETS
        for experts in ("each",) if whole or flash else ("shared", "each"):
            mpu.destroy_model_parallel()
            adapter = {} if whole else dict(lora_rank=rank, lora_alpha=int(rank * faults_handoff.SCALE), lora_targets=targets,
                                            experts=experts, lora_expert_rank=self.expert_rank)
            t = self.trainers[experts] = TrainerRank(0, 1, self.folder, dtype=dtype, bucket_bytes=500_000, **adapter)
            t.load(str(Path(folder) / "rendezvous"))
            self.clean[experts] = [p.detach().clone() for _, p in t.trainable]
        g = np.random.default_rng(3)
        self.prompts = [g.integers(9, arithmetic.VOCABULARY - 6 * flash, n).tolist() for n in (4, 12, 21, 60, 90)]
        self.use("each")

    def use(self, experts):
        """Take one of the trainers, its adapter as at the start."""
        self.trainer = self.trainers[experts]
        with torch.no_grad():
            for (_, p), old in zip(self.trainer.trainable, self.clean[experts]):
                p.copy_(old)
        self.trainer.before = None
        self.told = self.publish()

    def publish(self):
        return sync.publish(Local(self.trainer), Local(self.engine), self.engine.version + 1)

    def check(self):
        return logprob_parity.five_steps(Local(self.trainer), Local(self.engine), self.prompts, dtype=self.dtype,
                                         max_tokens=ANSWER[self.dtype], version=self.engine.version, say=lambda *_: None)

    def state(self):
        """What both sides answer with an adapter that does something, bit for bit: shows what a fault left behind."""
        self.trainer.perturb(0.1)
        self.publish()
        answers = self.engine.generate(self.prompts, range(5), 8)
        batch = {"tokens": [np.concatenate([p, a["tokens"]]) for p, a in zip(self.prompts, answers)],
                 "n_prompt": [len(p) for p in self.prompts]}
        found = [*merge([self.trainer.logprobs(batch)], 5), *self.engine.score(**batch), *(a["logp"] for a in answers)]
        self.trainer.restore_adapter()
        self.publish()
        return np.concatenate(found).tobytes()

    def beside(self):
        """Mean |dlogp| of base requests: alone, and in a batch with a request that has an adapter."""
        from vllm import SamplingParams
        if self.whole:
            return 0.0
        for _ in range(2):                                               # both slots hold an adapter that does something
            self.trainer.perturb(0.5)
            self.publish()
        asked, how = [{"prompt_token_ids": p} for p in self.prompts], SamplingParams(max_tokens=1, prompt_logprobs=0)
        logp, others = [], (0, 2, 3, 4)
        for request in (None, self.engine.request):
            outs = self.engine.llm.generate(asked, how, use_tqdm=False, lora_request=[None, request, None, None, None])
            rows = [pair for i in others for pair in zip(outs[i].prompt_logprobs[1:], self.prompts[i][1:])]
            logp.append(np.array([row[t].logprob for row, t in rows]))
        return float(np.abs(logp[0] - logp[1]).mean())


def measure(b, healthy, name, expected, put_in, experts="each"):
    """{name, expected, found, seconds} of one fault, and where rows were compared all of `verdict`, and `healthy`, the same row's
    mean without the fault. healthy: {row: mean} of the check without a fault."""
    b.use(experts)
    began, told, sentence = time.time(), {}, ""
    try:
        with put_in(b):
            report = b.check()
            told = faults_parallel.verdict(report)
            sentence = told["found"] if told["found"].startswith("step 4: ") else ""
            if report["passed"] and (gap := b.beside()) > 1e-6:
                told = {"found": faults_handoff.BESIDE, "mean": gap}
    except (cli.Stop, RuntimeError) as error:
        if not expected.startswith("guard: "):                           # else a fault that crashes would count as found
            raise
        sentence = str(error)
    b.use("each")
    if sentence:
        said = re.search(expected.removeprefix("guard: "), sentence)
        told = {"found": f"guard: {said[0] if said else sentence}"}
    return dict(name=name, expected=expected, **told, healthy=healthy.get(told.get("row"), 0.0),
                seconds=round(time.time() - began, 1))


def as_expected(found):
    """Whether a fault was found where its list says (those NEAR the tolerance: or by the checksums of step 4, or had
    an effect far above rounding)."""
    far = found["found"] == faults_model.UNSEEN and found["mean"] > 5 * found["healthy"]
    near = found["name"] in NEAR and (far or "published as before the change" in found["found"])
    return near or bool(re.fullmatch(found["expected"], found["found"]))


def outside(command):
    """JSON that a command writes into the file whose name it is given, run in a process and a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-W", "ignore", *map(str, command), "out.json"], cwd=folder, capture_output=True,
                              text=True)
        if done.returncode:
            raise cli.Stop(f"{' '.join(map(str, command))} ended with {done.returncode}: {(done.stderr or done.stdout)[-1500:]}")
        return json.loads(Path(folder, "out.json").read_text())


def parallel(dtype="float32"):
    return outside([ROOT / "checks" / "faults_parallel.py", dtype])


def measured(dtype, flash=False, whole=False, only=""):
    """({row: mean} of the check without a fault, [what `measure` says of each fault]) on one bench. Stop where the check fails
    without a fault, or one leaves something behind."""
    listed = (faults_flash.WHOLE if whole else faults_flash.FAULTS) if flash else FAULTS
    todo = [f for f in listed if only in f[0] and not (dtype == "bfloat16" and f[0].startswith("a float32"))]
    if not todo:
        return {}, []
    # of Flash's it is not asked which part of an adapter is wrong, which takes most of the time and is tested elsewhere
    asked = mock.patch.object(localise, "adapter", lambda *_: "not asked") if flash else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as folder, asked:
        b = Bench(folder, dtype, flash, whole)
        report = b.check()
        if not report["passed"]:
            raise cli.Stop(f"the check fails without a fault: {report['why'][0]}")
        healthy, before, found = {f"step {r['step']}, {r['what']}": r["mean"] for r in report["rows"]}, b.state(), []
        for fault in cli.progress(todo, desc="faults"):
            found.append(measure(b, healthy, *fault))
            if b.state() != before:
                raise cli.Stop(f"{fault[0]}: something of this fault was left behind")
    return healthy, found


def main():
    cfg = cli.parse(Config, doc=__doc__)
    healthy, found = measured(cfg.dtype, cfg.flash, only=cfg.only)
    if cfg.flash:
        free_worker()
        found += measured(cfg.dtype, flash=True, whole=True, only=cfg.only)[1]
    elif not cfg.only:
        found += parallel(cfg.dtype)
    wrong = [f for f in found if not as_expected(f)]
    print(cli.table([(f["name"], f["found"], f"{f['mean']:.1e}" if "mean" in f else "", f"{f['margin']:.2g}" if f.get("margin")
                      else "", "" if as_expected(f) else f"expected: {f['expected']}") for f in found],
                    ("fault", "found", "mean |dlogp|", "error / tolerance", "")))
    out = cfg.out or ROOT / "results" / ("faults-flash.json" if cfg.flash else "faults.json")
    if not cfg.only and cfg.dtype == "bfloat16":
        cli.write_atomic(out, json.dumps(found))
    elif not cfg.only:
        report = {"versions": cli.versions(), "healthy": healthy, "float32": found, "bfloat16": outside(
            [__file__, "--flash" if cfg.flash else "--no-flash", "--dtype", "bfloat16", "--out"])}
        cli.write_atomic(out, json.dumps(report, indent=1) + "\n")
    return 1 if wrong and cfg.dtype == "float32" else 0


if __name__ == "__main__":
    cli.run_main(main)
