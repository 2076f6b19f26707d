"""A PEFT folder against a checkpoint, before anything starts: vLLM passes over an adapter of a layer that the model does not
have, and takes one that is smaller than its module, both without a word. Reads headers only; needs neither torch nor vLLM."""
import json
import re
import struct
from pathlib import Path

from common.cli import Stop

FILE = "adapter_model.safetensors"
NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
SLOTS = (1, 8, 16, 32, 64, 128, 256, 320, 512)               # ranks that vLLM 0.32 has slots for


def shapes(folder):
    """{tensor: shape} of all safetensors files in a folder, from their headers."""
    found = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        try:
            with open(file, "rb") as f:
                header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        except (ValueError, struct.error, MemoryError):
            raise Stop(f"{file} is not a safetensors file, or is cut short") from None
        found |= {name: tuple(of["shape"]) for name, of in header.items() if name != "__metadata__"}
    return found


def check(adapter, model, cpu):
    """(rank of the vLLM slot that the adapter needs, its base model's name in its config). Stop for what vLLM would not apply as
    peft does: a feature beyond plain LoRA, a tensor that fits no module of the model, half a pair, a wrong shape."""
    adapter = Path(adapter)
    for name in (FILE, "adapter_config.json"):
        if not (adapter / name).is_file():
            raise Stop(f"{adapter} is no PEFT adapter that can be read here: {name} is missing")
    config = json.loads((adapter / "adapter_config.json").read_text())
    if config.get("peft_type") != "LORA":
        raise Stop(f"{adapter}/adapter_config.json: peft_type is {config.get('peft_type')!r}, but only LORA is evaluated")
    for key in ("use_dora", "modules_to_save", "lora_bias", "layer_replication", "alora_invocation_tokens"):
        if config.get(key):
            raise Stop(f"{adapter}/adapter_config.json: {key} is {config[key]!r}, which vLLM does not apply")
    rank = max(config["r"], *(config.get("rank_pattern") or {}).values(), 0)
    if rank > SLOTS[-1]:
        raise Stop(f"{adapter} has rank {rank}, but vLLM's largest slot is {SLOTS[-1]}")

    have, pairs = shapes(model), {}
    experts = {name.partition(".experts.")[0] + ".experts" for name in have if ".experts." in name}
    for name, shape in shapes(adapter).items():
        if not (found := NAME.fullmatch(name)):
            raise Stop(f"{adapter}/{FILE}: {name} is not the adapter of a linear layer")
        pairs.setdefault(found[1], {})[found[2]] = shape
    if not pairs:
        raise Stop(f"{adapter}/{FILE} holds no tensor")
    for module, pair in pairs.items():
        if len(pair) != 2:
            raise Stop(f"{adapter}/{FILE}: {module} has lora_{''.join(pair)} alone")
        weight = have.get(f"{module}.weight")
        if weight and (pair["A"][1:], pair["B"][:1]) != (weight[1:], weight[:1]):
            raise Stop(f"{adapter}/{FILE}: the adapter of {module} maps {pair['A'][-1]} to {pair['B'][0]} values, and the module "
                       f"of {model} {weight[1]} to {weight[0]}")
        # routed experts may be one tensor in the checkpoint and many in the adapter, or the other way round
        if not weight and module.partition(".experts")[0] + ".experts" not in experts:
            raise Stop(f"{adapter}/{FILE}: {model} has no module {module}, so its adapter would change nothing")
        if module.endswith(".kv_b_proj") and not cpu:
            raise Stop(f"{adapter}/{FILE} adapts {module}, which vLLM 0.32 on a GPU ignores while decoding: merge the adapter "
                       "into the model and evaluate that")
    return next(slot for slot in SLOTS if slot >= rank), config.get("base_model_name_or_path") or ""
