"""An adapter under neutral keys <-> a PEFT folder that both `peft` and vLLM load. Needs neither of them, nor megatron-core.

Routed experts are written under per-expert names, the only layout both take as it is: vLLM packs it, and peft turns it into the
fused 3-D parameters of transformers 5 on loading (so a shared adapter is repeated for each expert). While doing so peft (0.21.2)
reads, for GLM-5.3, gate_proj, up_proj and down_proj in `target_modules` as the routed experts alone and would silently drop the
adapters of the dense MLP and the shared expert: those are named as `target_parameters`. For GLM-5.3-Flash it does not know that
gate and up, side by side, have twice the rank: `rank_pattern` says so, and vLLM then wants a max_lora_rank of twice the experts'
rank. Flash's modules are named in full, or the vision tower's of the same name would get adapters.
"""
import json
import re
import shutil
import struct
from pathlib import Path

import torch

from .cli import Stop

PREFIX, FILE = "base_model.model.model.", "adapter_model.safetensors"
NAME = re.compile(r"base_model\.model\.model\.(?:language_model\.)?(layers\.\d+\.(?:self_attn|mlp)\.(?:shared_experts\.)?)"
                  r"(experts\.(\d+)\.)?(\w+)\.(lora_[AB])\.weight$")
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def save_peft(tensors, hf_config, rank, folder, base_model, expert_rank=None):
    """Write `folder` from the whole adapter {neutral key: tensor}, alpha / r folded into B (so lora_alpha = r = `rank`, of routed
    experts `expert_rank`), replacing an older one. The folder appears complete or not at all. hf_config: as read_config gives it.
    base_model: name or path for adapter_config.json."""
    folder = Path(folder)
    partial, old = (folder.with_name(folder.name + end) for end in (".partial", ".old"))
    expert_rank, experts, ranks = expert_rank or rank, "none", {}
    for key, t in tensors.items():
        have, routed = t.shape[-2 if key.endswith("lora_A") else -1], ".mlp.experts." in key
        if have != (want := expert_rank if routed else rank):
            raise Stop(f"adapter tensor {key} of shape {list(t.shape)} has rank {have}, not {want}")
        if routed:
            experts = "each" if t.ndim == 3 else "shared"
    is_flash = hf_config.model_type.startswith("glm5_next")
    rows = list(public(tensors, hf_config.n_routed_experts, PREFIX + "language_model." * is_flash))
    modules = sorted({k.rpartition(".")[0] for k in tensors})
    routed = {m.rpartition(".")[2] for m in modules if ".mlp.experts." in m}
    if is_flash:
        linears = [f"language_model.{m}" for m in modules if ".mlp.experts." not in m]
        linears = [re.sub(r"(\.f_[ab]_proj)$", r".forget_gate\1", m) for m in linears]                # as transformers has them
        fused = {"gate_up_proj": 2 * expert_rank} if "gate_proj" in routed else {}
        fused |= {"down_proj": expert_rank} if "down_proj" in routed else {}
        parameters = [f"mlp.experts.{name}" for name in fused]
        ranks = {rf".*\.experts\.{name}": r for name, r in fused.items() if r != rank}
    else:
        linears = sorted({m.rpartition(".")[2] for m in modules if ".mlp." not in m} | routed)
        parameters = sorted({m.split(".", 2)[2] + ".weight" for m in modules if ".mlp." in m and ".mlp.experts." not in m})
        if expert_rank != rank and routed:
            ranks = {r".*\.experts\.gate_up_proj": 2 * expert_rank, r".*\.experts\.down_proj": expert_rank}
    if expert_rank != rank and routed:
        ranks[r".*\.experts\.\d+\.(?:gate|up|down)_proj"] = expert_rank        # as vLLM names them, the others as peft does
    config = dict(
        peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path=str(base_model), r=rank, lora_alpha=rank,
        lora_dropout=0.0, bias="none", target_modules=linears, target_parameters=parameters, use_rslora=False, use_dora=False,
        rank_pattern=ranks, alpha_pattern=ranks, fan_in_fan_out=False, init_lora_weights=True, inference_mode=True)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write(partial / FILE, rows, {"format": "pt", "experts": experts})
        (partial / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
    except OSError as error:
        raise Stop(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)


def public(tensors, n_experts, prefix=PREFIX):
    """(PEFT name, tensor) of an adapter under neutral keys: every routed expert has names of its own, and views."""
    for key, t in tensors.items():
        if ".mlp.experts." in key:
            head, leaf = key.split(".experts.")
            for e in range(n_experts):
                yield f"{prefix}{head}.experts.{e}.{leaf}.weight", t[e] if t.ndim == 3 else t
        else:
            yield f"{prefix}{key}.weight", t


def _write(file, rows, metadata):
    """A safetensors file, tensor by tensor: the library's own writer wants a copy of a shared adapter for every expert in memory
    (at GLM-5.3's size and rank 32 that is 31 GB). Format: 8 bytes header length, JSON header, the tensors' bytes."""
    header, end = {"__metadata__": metadata}, 0
    for name, t in rows:
        header[name] = {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [end, end + t.nbytes]}
        end += t.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with open(file, "wb") as f:
        f.write(struct.pack("<Q", len(head)) + head)
        for _, t in rows:
            f.write(t.detach().cpu().contiguous().view(torch.uint8).numpy())


def load_peft(folder):
    """The inverse of `save_peft`: {neutral key: tensor} with alpha / r folded into B. Experts come back as one adapter where the
    file says that it repeats one, else stacked. Stop for a file that is no plain LoRA of per-expert names."""
    from safetensors import safe_open
    folder = Path(folder)
    if not (folder / FILE).is_file() or not (folder / "adapter_config.json").is_file():
        raise Stop(f"{folder} is no adapter folder: it needs {FILE} and adapter_config.json")
    config = json.loads((folder / "adapter_config.json").read_text())
    for key in ("use_rslora", "use_dora", "modules_to_save", "lora_bias"):
        if config.get(key):
            raise Stop(f"{folder / 'adapter_config.json'}: {key} is {config[key]!r}, but only plain LoRA is read")
    ranks, alphas = (config.get(f"{key}_pattern") or {} for key in ("rank", "alpha"))
    if ranks != alphas or (ranks and config["lora_alpha"] != config["r"]):
        raise Stop(f"{folder / 'adapter_config.json'}: rank_pattern is {ranks} and alpha_pattern {alphas} beside r {config['r']} "
                   f"and lora_alpha {config['lora_alpha']}: several ranks are read only where alpha is the rank for each")
    scale, out, experts = config["lora_alpha"] / config["r"], {}, {}
    with safe_open(folder / FILE, "pt") as f:
        shared = (f.metadata() or {}).get("experts") == "shared"
        for name in f.keys():
            if not (found := NAME.match(name)):
                raise Stop(f"{folder / FILE}: {name} is no adapter of GLM-5.3 or GLM-5.3-Flash under per-expert names")
            head, routed, expert, leaf, side = found.groups()
            t = f.get_tensor(name)
            t = t * scale if side == "lora_B" and scale != 1 else t
            if not routed:
                out[f"{head}{leaf}.{side}"] = t
            elif not shared:
                experts.setdefault(f"{head}experts.{leaf}.{side}", {})[int(expert)] = t
            elif not torch.equal(out.setdefault(f"{head}experts.{leaf}.{side}", t), t):
                raise Stop(f"{folder / FILE}: {name} differs from another expert's, but the file says that one adapter is shared")
    for key, each in experts.items():
        if sorted(each) != list(range(len(each))):
            raise Stop(f"{folder / FILE}: {key} has adapters for {len(each)} experts, not numbered from 0 without gaps")
        out[key] = torch.stack([each[e] for e in range(len(each))])
    return out
