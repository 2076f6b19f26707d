"""One trainer rank's part of a checkpoint: trainable parameters, optimizer shard, counters, random state. Plain
tensors, no pickle."""
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from common.cli import Stop


def _file(folder, rank):
    return Path(folder) / "ranks" / f"{rank:05d}.safetensors"


def save(folder, rank, layout, trainable, optimizer, updates):
    """Write `folder`/ranks/RANK.safetensors. trainable: [(name, parameter)]; layout: a string that must be the same on
    restore."""
    state = {f"param.{n}": p.detach() for n, p in trainable}
    state |= {f"optim.{n}": t for n, t in _shard(optimizer)}
    state |= {"updates": torch.tensor(updates), "rng": torch.get_rng_state()}
    file = _file(folder, rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_file({k: v.cpu().clone() for k, v in state.items()}, file, {"layout": layout})
    except (OSError, SafetensorError) as error:
        raise Stop(f"{file} could not be written: {error}") from error


@torch.no_grad()
def restore(folder, rank, layout, trainable, optimizer):
    """Set parameters, optimizer and random state from `save`, bit for bit; returns the number of updates made before it."""
    file = _file(folder, rank)
    if not file.exists():
        raise Stop(f"{folder} has no part for trainer rank {rank}: it was saved by fewer ranks")
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
