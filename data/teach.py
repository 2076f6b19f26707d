"""Teach the rehearsal's model to add, by supervised steps through the trainer itself; the result is cached and the same
every time."""
import hashlib
import math
import os
import shutil
import time
from pathlib import Path

from common import cli, cluster
from data import arithmetic

CACHE = Path(__file__).resolve().parent.parent / ".cache"


def likelihood(logp, entropy, mb):
    """Negative log-likelihood, summed with the weights that the caller gave: the mean over the batch's answer tokens."""
    return -(mb["weight"] * logp).sum(), {}


def taught(gpus=0, dtype="float32", ranks=2, settings=None, flash=False):
    """(model folder, train.parquet, test.parquet). Ray must be running. gpus: of a node of the run that follows; any number is
    for the wider model, taught on one of them, 0 for `ranks` CPU processes; flash: a GLM-5.3-Flash. The cache is named by
    everything that the result depends on."""
    gpus = min(gpus, 1)
    ranks, config = gpus or ranks, {"flash": True} if flash else {}
    if gpus:
        config |= arithmetic.FLASH_CUDA_WIDTHS if flash else arithmetic.CUDA_WIDTHS
    settings = settings or (arithmetic.TEACH_CUDA if gpus else arithmetic.TEACH)
    source = Path(arithmetic.__file__).read_bytes()
    key = hashlib.sha256(f"{source} {ranks} {dtype} {settings} {config}".encode()).hexdigest()[:12]
    folder = CACHE / f"arithmetic-{key}"
    if not folder.exists():
        part = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(part, ignore_errors=True)
        try:
            arithmetic.prepare(part, dtype=dtype, **config)
            _teach(part, gpus, dtype, ranks, settings)
            if not folder.exists():                           # another rehearsal may have been faster
                os.rename(part, folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return str(folder / "model"), str(folder / "train.parquet"), str(folder / "test.parquet")


def _teach(part, gpus, dtype, ranks, settings):
    started, steps, place = time.time(), settings["steps"], cluster.nodes(1, gpus)
    trainer = cluster.start("common.trainer:TrainerRank", "teacher rank", place, [dict(
        rank=r, world=ranks, model=str(part / "start"), dtype=dtype, max_tokens=settings["tokens"],
        weight_decay=0.0, betas=(0.9, 0.98)) for r in range(ranks)],
        gpus=gpus, env={"OMP_NUM_THREADS": "1"}).ready()
    trainer.load(str(part / "rendezvous"))
    batches = arithmetic.sft_batches(arithmetic.tokenizer(), arithmetic.problems()[0], steps=steps, tokens=settings["tokens"])
    for step, (tokens, n_prompt) in enumerate(cli.progress(batches, total=steps, desc="teaching")):
        n = sum(map(len, tokens)) - sum(n_prompt)
        # linear warm-up, then a cosine down to a twentieth
        lr = settings["lr"] * min((step + 1) / settings["warmup"], 0.525 + 0.475 * math.cos(math.pi * step / steps))
        found = trainer.update({"tokens": tokens, "n_prompt": n_prompt, "weight": [1 / n] * len(tokens)}, likelihood, lr)[0]
        if step % 20 == 0 or step == steps - 1:
            print(f"teaching {step + 1}/{steps}: {found['loss']:.3f} nats a token, {time.time() - started:.0f} s", flush=True)
    trainer.save_model(str(part / "model"))
    trainer.stop()
    (part / "rendezvous").unlink(missing_ok=True)             # not before: NCCL reads it again for every new group of ranks
    cluster.release(place)
    shutil.rmtree(part / "start")
