"""Checkpoints. A rank's part: trainable parameters, optimizer shard, counters, random state; plain tensors, no pickle, and
beside it its checksum (`sha256sum -c` reads it). The whole: step-N, which appears complete and on disk, or not at all."""
import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from common.cli import Stop, write_atomic

# -- the whole, by the driver --------------------------------------------------------------------------------------------------

def write(folder, step, trainer, state, keep):
    """Save all ranks to `folder`/step-N, with `state` (JSON) beside them; the `keep` newest stay."""
    final, part = folder / f"step-{step}", folder / f".step-{step}"
    for left in folder.glob(".step-*"):                       # of a run that was killed
        shutil.rmtree(left)
    part.mkdir(parents=True)
    try:
        trainer.save(str(part.absolute()))
        if (n := len(list((part / "ranks").glob("*.sha256")))) != len(trainer):
            raise Stop(f"{part} has the parts of {n} of {len(trainer)} trainer ranks: runs/ must be on a file system "
                       "that all nodes share")
        write_atomic(part / "state.json", json.dumps({"step": step, **state}))
        _sync(part)
        if final.exists():                                    # one that `complete` does not count: this run began before it
            shutil.rmtree(final)
        os.rename(part, final)
        _sync(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    for old in complete(folder)[:-keep]:
        os.rename(old, gone := old.with_name(f".{old.name}"))    # a half deleted one must not look complete
        shutil.rmtree(gone)


def complete(folder):
    """Complete checkpoints below `folder`, oldest first; one that was given another name, as step-4.bad, is none of them."""
    found = (state.parent for state in Path(folder).glob("step-*/state.json"))
    return sorted((one for one in found if one.name.removeprefix("step-").isdecimal()), key=_step)


def read_state(folder):
    """{"step", ...} of a checkpoint, as `write` got it."""
    try:
        state = json.loads((folder / "state.json").read_text())
        if state["step"] != _step(folder):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise _damaged(folder, "state.json is not what was written") from None
    return state


def _step(folder):
    return int(folder.name.removeprefix("step-"))


def _damaged(folder, how):
    """Nothing older is taken unasked: the steps after it would be lost without a word."""
    older = [other for other in complete(folder.parent) if other != folder and _step(other) < _step(folder)]
    return Stop(f"{folder} is damaged: {how}; " + (f"delete it to resume from {older[-1]}" if older else "there is no older one"))


def _sync(folder):
    """Names of files survive a crash of the machine only once their folder is on disk."""
    held = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(held)
    finally:
        os.close(held)


# -- one rank's part, in its process -------------------------------------------------------------------------------------------


def _file(folder, rank):
    return Path(folder) / "ranks" / f"{rank:05d}.safetensors"


def _sha256(file):
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def save(folder, rank, layout, trainable, optimizer, updates):
    """Write `folder`/ranks/RANK.safetensors and its checksum, both on disk on return. trainable: [(name, parameter)];
    layout: a string that must be the same on restore."""
    state = {f"param.{n}": p.detach() for n, p in trainable}
    state |= {f"optim.{n}": t for n, t in _shard(optimizer)}
    state |= {"updates": torch.tensor(updates), "rng": torch.get_rng_state()}
    file = _file(folder, rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        # a copy of its own: tensors that share memory are refused
        save_file({k: v.cpu() if v.is_cuda else v.clone() for k, v in state.items()}, file, {"layout": layout})
        with open(file, "rb+") as f:
            os.fsync(f.fileno())
        write_atomic(file.with_suffix(".sha256"), f"{_sha256(file)}  {file.name}\n")
        _sync(file.parent)
    except (OSError, SafetensorError) as error:
        raise Stop(f"{file} could not be written ({error}): the checkpoints before it are whole, resume from them once there "
                   "is room") from error


@torch.no_grad()
def restore(folder, rank, layout, trainable, optimizer):
    """Set parameters, optimizer and random state from `save`, bit for bit; returns the number of updates made before it."""
    file = _file(folder, rank)
    if not file.exists():
        raise Stop(f"{folder} has no part for trainer rank {rank}: it was saved by fewer ranks")
    said = file.with_suffix(".sha256")
    if not said.exists() or said.read_text().split()[:1] != [_sha256(file)]:
        raise _damaged(Path(folder), f"ranks/{file.name} does not have the checksum in ranks/{said.name}")
    with safe_open(file, "pt") as f:
        saved = f.metadata()["layout"]
    if saved != layout:
        raise Stop(f"{folder} was saved with {saved}, this run has {layout}: resume with the same layout")
    state = load_file(file)
    want = {f"param.{n}": tuple(p.shape) for n, p in trainable}
    have = {k: tuple(v.shape) for k, v in state.items() if k.startswith("param.")}
    if want != have:
        odd = sorted(k for k in want.keys() | have.keys() if want.get(k) != have.get(k))[0]
        raise Stop(f"{file.name} does not fit this model: {odd} has shape {have.get(odd)}, the model wants {want.get(odd)}")
    for n, p in trainable:
        p.copy_(state[f"param.{n}"])
    optimizer.reload_model_params()
    for name, tensor in _shard(optimizer, create=True):
        tensor.copy_(state[f"optim.{name}"])
    torch.set_rng_state(state["rng"])
    return int(state["updates"])


def _shard(optimizer, create=False):
    """(name, tensor) of this rank's optimizer shard: float32 masters, both moments, step counts. create: there is no state
    before the first step, make it. torch's AdamW counts steps for each parameter, Transformer Engine's and Apex's Adam for
    each group, as a number."""
    for i, one in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        per_parameter = isinstance(one.optimizer, torch.optim.Adam)          # AdamW is a subclass
        for j, group in enumerate(one.optimizer.param_groups):
            if not per_parameter:
                group["step"] = torch.as_tensor(group.get("step", 0))
                yield f"{i}.{j}.step", group["step"]
            for k, p in enumerate(group["params"]):
                state = one.optimizer.state[p]
                if create and not state:
                    state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                    state.update({"step": torch.tensor(0.0)} if per_parameter else {})
                yield f"{i}.{j}.{k}.master", p.detach()
                yield from ((f"{i}.{j}.{k}.{name}", state[name]) for name in ("step", "exp_avg", "exp_avg_sq") if name in state)
