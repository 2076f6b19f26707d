"""Does a run fit its machines? Rows of a recipe's plan on memory, disk, hours and cost, and what the nodes are asked for before a
start. Computed from the model's config by size.py and memory.py, not measured; no torch.

`sizes` is memory.colocated (an adapter travels) or memory.whole (all weights do): functions of config.json and the recipe's
Config.
"""
import importlib.util
import os
import re
import shutil
from pathlib import Path

from common import cli, gpus, memory, size, speed


def needs(c, sizes):
    """What preflight.check asks every node for, in bytes; nothing for a rehearsal or on the CPU."""
    if c.rehearse or not c.gpus_per_node:
        return {}
    m = sizes(size.read(c.model), c)
    return {"host memory": m.host, "room in runs/": 0 if c.resume else m.checkpoints + m.export}


def there(c, must):
    """must(ok, sentence) gets what the run needs and does not find: GPUs, packages, model, data, a free name."""
    here, needed = gpus.count(), (c.nodes + c.sampler_nodes) * c.gpus_per_node
    must(needed == 0 or os.environ.get("RAY_ADDRESS") or needed <= here,
         f"{needed} GPUs are needed, RAY_ADDRESS names no cluster, and this machine has {here}")
    must(c.gpus_per_node or not here, f"gpus_per_node is 0, but torch would take this machine's {here} GPUs: hide them, "
                                      "CUDA_VISIBLE_DEVICES=")
    must(re.fullmatch(r"[\w.+-]*\w[\w.+-]*", c.name),
         f"name is {c.name!r}: letters, digits, '.', '_', '+' and '-' (with --resume, the run's)")
    for package in ("torch", "vllm", "megatron", "transformers", "ray", "safetensors", "pyarrow", "math_verify", "pebble"):
        must(importlib.util.find_spec(package), f"package {package} is missing: pip install -r requirements.txt")
    if not c.rehearse:                                        # the rehearsal makes its own
        must((Path(c.model) / "config.json").is_file(), f"no model folder {c.model} (config.json is missing there)")
        lost = (Path(c.model) / "config.json").is_file() and size.missing(c.model)
        must(not lost, lost)
        for path in (c.train_data, c.eval_data):
            must(Path(path).is_file(), f"no data file {path} (data/README.md says how to make it)")
    must(c.resume or c.plan or not Path("runs", c.name).exists(), f"runs/{c.name} exists: use --resume or another --name")
    must(not c.resume or Path("runs", c.name, "config.json").exists(), f"runs/{c.name} holds no run to resume")


def rows(c, must, sizes, published):
    """[(what, text)] for the plan; must(ok, sentence) gets what does not fit. published: the config of a model that is not here
    yet."""
    try:
        hf = size.read(c.model, published)
    except cli.Stop as stop:
        must(False, str(stop))
        return []
    for sentence in size.layout_problems(hf, c.tp, c.ep, c.pp):
        must(False, sentence)
    if c.dtype != "bfloat16":
        return [("memory", f"not computed for {c.dtype}")]
    m = sizes(hf, c)
    moments = [("an update", m.update, m.card), ("the sampler", m.sampler, m.engine)]
    if sum(m.sampler.values()) <= m.engine:                   # else nothing is left for a KV cache, and these sums say nothing
        moments += [(f"sampling at gpu_memory_utilization {c.gpu_memory_utilization}", m.sampling, m.card),
                    *([("a publish", m.publish, m.card)] if m.publish else [])]
    for what, parts, room in moments:
        must(not (sentence := memory.too_large(what, parts, room)), sentence)
    gib, disk, step = memory.GIB, m.checkpoints + m.export, sum(m.seconds.values())
    # the check's publishes, its two turns of the trainer, and twice 128 tokens of a few answers at once
    check = 3 * m.seconds["publish"] + 2 * m.seconds.get("move", 0) + 2 * min(128, c.max_response_tokens) / speed.of(hf).request
    gpu_hours = m.hours * (c.nodes + c.sampler_nodes) * c.gpus_per_node
    if gpus.count():                                          # this machine is a node: then it can be asked
        ram, free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), shutil.disk_usage(".").free
        must(ram > m.host, f"this node has {ram / gib:,.0f} GiB of memory, the copies that sleep take {m.host / gib:,.0f}")
        must(free > disk, f"{disk / 1e9:,.0f} GB will be written below runs/, {free / 1e9:,.0f} GB are free")
    what = f"{2 * m.sent / 1e9:,.2f} GB in {m.tensors:,} tensors" if m.tensors is not None else \
        f"{2 * m.sent / 1e9:,.0f} GB, {c.bucket_gib:g} GiB at a time,"
    return [
        ("model", f"{sum(size.parameters(hf).values()) / 1e9:.1f}B parameters, "
                  + (f"{m.adapter / 1e6:,.0f}M in the adapter" if m.adapter else "all trained")),
        ("a GPU in an update", f"{memory.listed(m.update)}; {m.card / gib:.0f} may be used"),
        ("a GPU while sampling", memory.listed(m.sampling)),
        *([("a GPU in a publish", memory.listed(m.publish))] if m.publish else []),
        ("KV cache", f"{max(0, m.kv_tokens):,.0f} tokens, {max(0, m.kv_answers):.1f} answers of full length"
                     + (f", each with up to {m.state / 2**20:.0f} MiB for linear attention" if m.state else "")),
        ("host memory of a node", f"{m.host / gib:,.0f} GiB page-locked for the copies that sleep"
                                  + ("" if m.adapter else " and the optimizer") + ", beside the system's"),
        ("a publish", f"{what} to each node, {m.seconds['publish']:.0f} s"),
        ("disk", (f"{m.checkpoints / 1e9:,.0f} GB for {c.keep} + 1 checkpoints" if c.save_every else "no checkpoints")
                 + f", {m.export / 1e9:,.0f} GB for the final " + ("adapter" if m.adapter else "model")),
        ("minutes a step", f"about {step / 60:.0f} = " + " + ".join(f"{k} {v / 60:.1f}" for k, v in m.seconds.items())
            + f", with {speed.tokens(c):,} tokens an answer and published rates"),
        ("five-step check",
            f"about {check:.0f} s before the first step, {100 * check / step:.1f} % of one" if c.check else "none"),
        ("hours", f"about {m.hours:.{1 if m.hours < 10 else 0}f} with {m.evals} evaluations of {m.problems:,} problems: "
            f"{gpu_hours:,.0f} GPU-hours"
            + (f", ${gpu_hours * c.gpu_price:,.0f} at ${c.gpu_price:g}" if c.gpu_price else "; --gpu-price gives the cost"))]
