"""The config.json of a GLM-5.3 checkpoint, checked: what trainer and sampler read from it must mean the same to both."""
import json
import struct
from pathlib import Path

from .cli import Stop

INDEX = "model.safetensors.index.json"
# What the model here computes and config.json must say. vLLM reads the first three from there and, where one is missing, silently
# uses a softmax router, no correction bias and half-split instead of interleaved rotation.
SPOKEN = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "indexer_rope_interleave": True}
FIXED = {**SPOKEN, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "hidden_act": "silu", "attention_bias": False,
         "mlp_bias": False, "attention_dropout": 0, "tie_word_embeddings": False, "moe_layer_freq": 1}


def read_config(folder):
    """The HF config of a GLM-5.3 checkpoint folder. Stop names file, key and both values where this code or vLLM would compute
    otherwise."""
    from transformers import AutoConfig
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise Stop(f"{file} does not exist: a checkpoint folder holds config.json and *.safetensors")
    try:
        raw = json.loads(file.read_text())
    except ValueError as error:
        raise Stop(f"{file} is not JSON: {error}") from None
    if raw.get("model_type") != "glm_moe_dsa":
        raise Stop(f"{file}: model_type is {raw.get('model_type')!r}, but this is the trainer of 'glm_moe_dsa'")
    hf = AutoConfig.from_pretrained(folder)
    for key, want in FIXED.items():
        if key in SPOKEN and key not in raw:
            raise Stop(f"{file}: {key} is missing and must be {json.dumps(want)}, or the sampler computes another model")
        if getattr(hf, key, want) != want:
            raise Stop(f"{file}: {key} is {json.dumps(getattr(hf, key))}, but only {json.dumps(want)} is built here")
    if hf.rope_parameters.get("rope_type", "default") != "default":
        raise Stop(f"{file}: rope_parameters.rope_type is {hf.rope_parameters['rope_type']!r}, but only 'default' is built here")
    if hf.num_key_value_heads != hf.num_attention_heads:
        raise Stop(f"{file}: num_key_value_heads is {hf.num_key_value_heads} and num_attention_heads {hf.num_attention_heads}, "
                   "but must be equal")
    if len(hf.indexer_types) != hf.num_hidden_layers or len(hf.mlp_layer_types) != hf.num_hidden_layers:
        raise Stop(f"{file}: indexer_types has {len(hf.indexer_types)} and mlp_layer_types {len(hf.mlp_layer_types)} entries "
                   f"for {hf.num_hidden_layers} layers")
    layers, dense = range(hf.num_hidden_layers), hf.first_k_dense_replace        # vLLM derives both lists from these numbers
    freq, offset, pattern = (getattr(hf, f"index_{k}", None) for k in ("topk_freq", "skip_topk_offset", "topk_pattern"))
    freq, offset = 1 if freq is None else freq, 2 if offset is None else offset                              # vLLM's defaults
    shared = [pattern[i] == "S" if pattern else max(i - offset + 1, 0) % freq != 0 for i in layers]
    rule = f"index_topk_pattern {pattern}" if pattern else f"index_topk_freq {freq}, index_skip_topk_offset {offset}"
    types, mlps = ["shared" if s else "full" for s in shared], ["dense" if i < dense else "sparse" for i in layers]
    for key, want, by in (("indexer_types", types, rule), ("mlp_layer_types", mlps, f"first_k_dense_replace {dense}")):
        have = getattr(hf, key)
        wrong = next((i for i in layers if have[i] != want[i]), None)
        if wrong is not None:
            raise Stop(f"{file}: {key} says {have[wrong]!r} for layer {wrong}, but {by} says {want[wrong]!r}, "
                       "and the sampler follows the latter")
    return hf


def tensor_files(folder):
    """{tensor name: file name} of a checkpoint folder, from its index or its only file's header."""
    folder = Path(folder)
    if (folder / INDEX).is_file():
        return json.loads((folder / INDEX).read_text())["weight_map"]
    one = folder / "model.safetensors"
    if not one.is_file():
        raise Stop(f"{folder} holds neither {INDEX} nor model.safetensors")
    try:
        with open(one, "rb") as f:
            length = struct.unpack("<Q", f.read(8))[0]
            if length > one.stat().st_size:
                raise ValueError(f"its header would have {length:,} bytes")
            header = json.loads(f.read(length))
    except (struct.error, ValueError) as error:
        raise Stop(f"{one} cannot be read: it is no safetensors file ({error})") from None
    return {name: one.name for name in header if name != "__metadata__"}
