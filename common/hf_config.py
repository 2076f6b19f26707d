"""The config.json of a checkpoint, checked: what trainer and sampler read from it must mean the same to both."""
import json
import struct
from pathlib import Path

from .cli import Stop

INDEX = "model.safetensors.index.json"
# What the models here compute and config.json must say. vLLM reads the SPOKEN ones from there and, where one is missing, silently
# uses a softmax router, no correction bias, half-split instead of interleaved rotation, or stops without naming the file.
SPOKEN = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "indexer_rope_interleave": True}
FIXED = {**SPOKEN, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "hidden_act": "silu", "attention_bias": False,
         "mlp_bias": False, "attention_dropout": 0, "tie_word_embeddings": False, "moe_layer_freq": 1}
FLASH_SPOKEN = {**SPOKEN, "mhc": True, "mla_use_nope": True}
# eps: vLLM's gated norm of linear attention has 1e-5 built in
FLASH_FIXED = {**FIXED, **FLASH_SPOKEN, "qk_rope_head_dim": 0, "index_kpool_always_select_tail": True, "rms_norm_eps": 1e-5}


def read_config(folder):
    """The HF config of a GLM-5.3 checkpoint folder, or the text part of a GLM-5.3-Flash one's. Stop names file, key and both
    values where this code or vLLM would compute otherwise."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise Stop(f"{file} does not exist: a checkpoint folder holds config.json and *.safetensors")
    try:
        raw = json.loads(file.read_text())
    except ValueError as error:
        raise Stop(f"{file} is not JSON: {error}") from None
    kind = raw.get("model_type")
    if kind not in ("glm_moe_dsa", "glm5_next"):
        raise Stop(f"{file}: model_type is {kind!r}, but this is the trainer of 'glm_moe_dsa' and 'glm5_next'")
    if kind == "glm5_next" and not isinstance(raw.get("text_config"), dict):
        raise Stop(f"{file} has no text_config, where GLM-5.3-Flash's language model is described")
    try:
        hf = AutoConfig.from_pretrained(folder)
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise Stop(f"{file}: transformers refuses it: {' '.join(str(error).split())}") from None
    if kind == "glm5_next":
        if hf.tie_word_embeddings:
            raise Stop(f"{file}: tie_word_embeddings is true, but only false is built here")
        return _flash(f"{file}: text_config", raw["text_config"], hf.text_config)
    return _glm5p3(file, raw, hf)


def _constants(file, raw, hf, spoken, fixed):
    for key, want in fixed.items():
        if key in spoken and key not in raw:
            raise Stop(f"{file}: {key} is missing and must be {json.dumps(want)}, or the sampler computes another model")
        if getattr(hf, key, want) != want:
            raise Stop(f"{file}: {key} is {json.dumps(getattr(hf, key))}, but only {json.dumps(want)} is built here")
    if hf.num_key_value_heads != hf.num_attention_heads:
        raise Stop(f"{file}: num_key_value_heads is {hf.num_key_value_heads} and num_attention_heads {hf.num_attention_heads}, "
                   "but must be equal")


def _same_layers(file, hf, key, want, by, told=", and the sampler follows the latter"):
    """Stop unless the list `key` of a config says the same for each layer as `by`."""
    have = getattr(hf, key)
    wrong = next((i for i in range(hf.num_hidden_layers) if have[i] != want[i]), None)
    if wrong is not None:
        raise Stop(f"{file}: {key} says {have[wrong]!r} for layer {wrong}, but {by} says {want[wrong]!r}{told}")


def _glm5p3(file, raw, hf):
    _constants(file, raw, hf, SPOKEN, FIXED)
    if hf.rope_parameters.get("rope_type", "default") != "default":
        raise Stop(f"{file}: rope_parameters.rope_type is {hf.rope_parameters['rope_type']!r}, but only 'default' is built here")
    if len(hf.indexer_types) != hf.num_hidden_layers or len(hf.mlp_layer_types) != hf.num_hidden_layers:
        raise Stop(f"{file}: indexer_types has {len(hf.indexer_types)} and mlp_layer_types {len(hf.mlp_layer_types)} entries "
                   f"for {hf.num_hidden_layers} layers")
    layers, dense = range(hf.num_hidden_layers), hf.first_k_dense_replace        # vLLM derives both lists from these numbers
    freq, offset, pattern = (getattr(hf, f"index_{k}", None) for k in ("topk_freq", "skip_topk_offset", "topk_pattern"))
    freq, offset = 1 if freq is None else freq, 2 if offset is None else offset                              # vLLM's defaults
    shared = [pattern[i] == "S" if pattern else max(i - offset + 1, 0) % freq != 0 for i in layers]
    rule = f"index_topk_pattern {pattern}" if pattern else f"index_topk_freq {freq}, index_skip_topk_offset {offset}"
    mlps = ["dense" if i < dense else "sparse" for i in layers]
    _same_layers(file, hf, "indexer_types", ["shared" if s else "full" for s in shared], rule)
    _same_layers(file, hf, "mlp_layer_types", mlps, f"first_k_dense_replace {dense}")
    return hf


def _flash(file, raw, hf):
    """vLLM reads the lists as they are; where one is left out, both sides have it from transformers."""
    _constants(file, raw, hf, FLASH_SPOKEN, FLASH_FIXED)
    if hf.linear_lower_bound is None or not -5 <= hf.linear_lower_bound < 0:
        raise Stop(f"{file}: linear_lower_bound is {json.dumps(hf.linear_lower_bound)}, but only -5 to 0 is built here: chunks "
                   "of linear attention would leave float32's range")
    for key, known in (("layer_types", ("linear_attention", "indexed_attention")), ("mlp_layer_types", ("dense", "sparse")),
                       ("indexer_types", ("full",))):
        have = getattr(hf, key)
        if len(have) != hf.num_hidden_layers:
            raise Stop(f"{file}: {key} has {len(have)} entries for {hf.num_hidden_layers} layers")
        if odd := [i for i, t in enumerate(have) if t not in known]:
            raise Stop(f"{file}: {key} says {have[odd[0]]!r} for layer {odd[0]}, but only {' and '.join(map(repr, known))} are "
                       "built here")
    if (dense := raw.get("first_k_dense_replace")) is not None:
        want = ["dense" if i < dense else "sparse" for i in range(hf.num_hidden_layers)]
        _same_layers(file, hf, "mlp_layer_types", want, f"first_k_dense_replace {dense}", told="")
    return hf


def other_model(folder, kind):
    """A sentence where the checkpoint in `folder` is of the other model than `kind` (a model_type), else ''. No torch; what
    cannot be read is left to who reads all of it."""
    names, file = {"glm_moe_dsa": "GLM-5.3", "glm5_next": "GLM-5.3-Flash"}, Path(folder or "nowhere") / "config.json"
    try:
        found = json.loads(file.read_text())["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    where = "recipes/*_flash_*.py train" if found == "glm5_next" else "those without flash in their name train"
    return "" if found == kind or found not in names else \
        f"model folder {folder} holds {names[found]}, but this recipe trains {names[kind]}: {where} {names[found]}"


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
