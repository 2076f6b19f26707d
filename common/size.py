"""How large GLM-5.3 and GLM-5.3-Flash are by part, how a layout cuts them, and whether a checkpoint folder is whole. No torch.

`c` is config.json as a dict (GLM5P3, FLASH where there is none yet). Counts are parameters; checks/test_plan.py compares them
with transformers' models.
"""
import json
import math
from pathlib import Path

from common.flags import Stop

GLM5P3 = dict(
    model_type="glm_moe_dsa", vocab_size=154880, hidden_size=6144, intermediate_size=12288, moe_intermediate_size=2048,
    num_hidden_layers=78, first_k_dense_replace=3, num_attention_heads=64, q_lora_rank=2048, kv_lora_rank=512,
    qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, n_routed_experts=256, num_experts_per_tok=8, n_shared_experts=1,
    index_n_heads=32, index_head_dim=128, index_topk=2048, index_topk_freq=4, index_skip_topk_offset=3)
FLASH = dict(
    model_type="glm5_next", vocab_size=154880, hidden_size=4096, intermediate_size=12288, moe_intermediate_size=2048,
    num_hidden_layers=45, first_k_dense_replace=3, num_attention_heads=64, q_lora_rank=1536, kv_lora_rank=512,
    qk_nope_head_dim=256, qk_rope_head_dim=0, v_head_dim=256, n_routed_experts=288, num_experts_per_tok=8, n_shared_experts=1,
    index_n_heads=32, index_head_dim=128, index_topk=2048, index_kpool=4, linear_num_heads=64, linear_head_dim=128,
    linear_conv_kernel_dim=4, hc_mult=4, hc_sinkhorn_iters=20)


# -- parameters ------------------------------------------------------------------------------------------------------

def text(c):
    """The language model's part of a config; Flash keeps it apart from the vision tower's, which is not counted here (0.46B)."""
    return c.get("text_config", c)


def selects(c):
    """For each layer whether it selects tokens with an indexer of its own; GLM-5.3's others reuse a selection. None: no attention
    over selected tokens (Flash's linear attention)."""
    n = range(c["num_hidden_layers"])
    if "linear_num_heads" in c:
        linear = [t == "linear_attention" for t in c["layer_types"]] if c.get("layer_types") else [i % 4 != 3 for i in n]
        return [None if one else True for one in linear]
    if c.get("indexer_types"):
        return [t == "full" for t in c["indexer_types"]]
    freq, offset = c.get("index_topk_freq", 1), c.get("index_skip_topk_offset", 2)
    return [max(i - offset + 1, 0) % freq == 0 for i in n]


def kinds(c):
    """(layers, dense ones, layers with latent attention, of these with an indexer of their own, linear attention layers)."""
    n, select = c["num_hidden_layers"], selects(c)
    dense = c["mlp_layer_types"].count("dense") if c.get("mlp_layer_types") else c["first_k_dense_replace"]
    return n, dense, n - select.count(None), select.count(True), select.count(None)


def linears(c):
    """{part.leaf: (in, out, layers, split)} of the linear layers that take adapters, but the routed experts; split: how tensor
    parallelism cuts the weight ('column', 'row', or 'whole' on each rank)."""
    layers, dense, mla, _, kda = kinds(c)
    h, heads, rope = c["hidden_size"], c["num_attention_heads"], c["qk_rope_head_dim"]
    q, kv = c["q_lora_rank"], c["kv_lora_rank"]
    found = {"attention.q_a_proj": (h, q, mla, "whole"), "attention.kv_a_proj_with_mqa": (h, kv + rope, mla, "whole"),
             "attention.q_b_proj": (q, heads * (c["qk_nope_head_dim"] + rope), mla, "column"),
             "attention.kv_b_proj": (kv, heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), mla, "column"),
             "attention.o_proj": (heads * c["v_head_dim"], h, mla, "row")}
    if kda:
        wide, d = c["linear_num_heads"] * c["linear_head_dim"], c["linear_head_dim"]
        found |= {f"linear attention.{x}_proj": (h, wide, kda, "column") for x in "qkv"}
        found |= {f"linear attention.{x}_a_proj": (h, d, kda, "whole") for x in "fg"}
        found |= {f"linear attention.{x}_b_proj": (d, wide, kda, "column") for x in "fg"}
        found |= {"linear attention.b_proj": (h, c["linear_num_heads"], kda, "column"),
                  "linear attention.o_proj": (wide, h, kda, "row")}
    for part, wide, n in (("dense MLP", c["intermediate_size"], dense),
                          ("shared experts", c["moe_intermediate_size"] * c["n_shared_experts"], layers - dense)):
        found |= {f"{part}.{x}_proj": (h, wide, n, "column") for x in ("gate", "up")}
        found[f"{part}.down_proj"] = (wide, h, n, "row")
    return found


def parameters(c, mtp=False):
    """{part: parameters}; the router's correction bias is a buffer and not counted. mtp: also the multi-token-prediction layer of
    the checkpoint, which neither trainer nor sampler loads here: one more MoE layer, a projection [2 h, h] and three norms."""
    c = text(c)
    (layers, dense, mla, indexers, kda), h = kinds(c), c["hidden_size"]
    expert = 3 * h * c["moe_intermediate_size"]
    count = {"embedding": c["vocab_size"] * h, "attention": 0, **({"linear attention": 0} if kda else {})}
    for name, (fan_in, fan_out, n, _) in linears(c).items():
        part = name.partition(".")[0]
        count[part] = count.get(part, 0) + fan_in * fan_out * n
    pool, d = c.get("index_kpool", 0), c["index_head_dim"]
    index = c["q_lora_rank"] * c["index_n_heads"] * d + h * d + 2 * d + h * c["index_n_heads"] + (pool * d + d * h if pool else 0)
    norms = 2 * h * layers + (c["q_lora_rank"] + c["kv_lora_rank"]) * mla + h
    count |= {"indexer": index * indexers, "router": h * c["n_routed_experts"] * (layers - dense),
              "routed experts": expert * c["n_routed_experts"] * (layers - dense), "norms": norms, "head": c["vocab_size"] * h}
    if kda:
        heads, d = c["linear_num_heads"], c["linear_head_dim"]
        count["linear attention"] += kda * (3 * heads * d * c["linear_conv_kernel_dim"] + heads * d + heads + d)
        n = c["hc_mult"]
        count["hyper-connections"] = 2 * layers * ((2 + n) * n * n * h + (2 + n) * n + 3)
    if mtp:
        attention = sum(i * o for name, (i, o, *_) in linears(c).items() if name.startswith("attention"))
        mlp = expert * (c["n_routed_experts"] + c["n_shared_experts"]) + h * c["n_routed_experts"]
        count["MTP layer"] = attention + index + mlp + 2 * h + c["q_lora_rank"] + c["kv_lora_rank"] + 2 * h * h + 3 * h
    return count


def on_gpu(c, tp, ep, pp=1):
    """(parameters outside the routed experts, in the routed experts) on the fullest rank. What tensor parallelism does not split
    (the latent down projections, indexer, router, norms, hyper-connections) lies whole on each rank."""
    c = text(c)
    p, (layers, dense, *_) = parameters(c), kinds(c)
    split = sum(i * o * n for i, o, n, how in linears(c).values() if how != "whole") + single(c)[1]
    body = sum(p.values()) - p["embedding"] - p["head"] - p["routed experts"]
    stage, moe = math.ceil(layers / pp), layers - dense
    ends = p["embedding"] + (p["head"] if pp == 1 else 0)
    return (split / tp + body - split) * stage / layers + ends / tp, p["routed experts"] / ep * min(stage, moe) / moe


def single(c):
    """(whole on each rank, split by tensor parallelism): parameters of Flash that a bfloat16 model holds in float32."""
    c = text(c)
    _, _, _, indexers, kda = kinds(c)
    if not kda:
        return 0, 0
    heads, d = c["linear_num_heads"], c["linear_head_dim"]
    return (parameters(c)["hyper-connections"] + c["index_kpool"] * c["index_head_dim"] * indexers,
            kda * (3 * heads * d * c["linear_conv_kernel_dim"] + heads * d + heads))


def single_on_gpu(c, tp, pp=1):
    whole, split = single(c)
    layers = text(c)["num_hidden_layers"]
    return (whole + split / tp) * math.ceil(layers / pp) / layers


def weight_bytes(c, tp, ep, pp=1):
    """Bytes of a bfloat16 model on the fullest rank."""
    return 2 * (sum(on_gpu(c, tp, ep, pp)) + single_on_gpu(c, tp, pp))


def adapter(c, rank, targets, experts, expert_rank=None):
    """A LoRA adapter as (unique parameters, under public names, unique tensors, public tensors). experts: 'shared' (one for all
    routed experts of a layer), 'each' or None; public names repeat a shared one for every expert. Gate and up have an A each."""
    c = text(c)
    layers, dense, *_ = kinds(c)
    chosen = [v for name, v in linears(c).items() if name.rpartition(".")[2] in targets]
    unique, tensors = sum(rank * (i + o) * n for i, o, n, _ in chosen), sum(2 * n for _, _, n, _ in chosen)
    pairs = len({"gate_proj", "up_proj", "down_proj"} & set(targets)) * (layers - dense) if experts else 0
    one, e = pairs * (expert_rank or rank) * (c["hidden_size"] + c["moe_intermediate_size"]), c["n_routed_experts"]
    own = e if experts == "each" else 1
    return unique + one * own, unique + one * e, tensors + 2 * pairs * own, tensors + 2 * pairs * e


def adapter_on_gpu(c, rank, targets, experts, tp, ep, pp=1, expert_rank=None):
    """(parameters of the adapter on one rank, as common/lora.py splits it; those of them that belong to one expert each)."""
    c = text(c)
    layers, dense, *_ = kinds(c)
    cut = {"whole": (1, 1), "column": (1, tp), "row": (tp, 1)}
    local = sum(rank * (i / cut[how][0] + o / cut[how][1]) * n for name, (i, o, n, how) in linears(c).items()
                if name.rpartition(".")[2] in targets)
    one = len({"gate_proj", "up_proj", "down_proj"} & set(targets)) * (c["hidden_size"] + c["moe_intermediate_size"])
    routed = one * (expert_rank or rank) * (layers - dense) * {"each": c["n_routed_experts"] / ep, "shared": 1}.get(experts, 0)
    share = math.ceil(layers / pp) / layers
    return (local + routed) * share, routed * share if experts == "each" else 0


def layout_problems(c, tp, ep, pp):
    """Sentences on what of the model a trainer layout does not divide, as the trainer will say it."""
    c = text(c)
    n, found = c["num_hidden_layers"], []
    linear = [("linear attention heads", c["linear_num_heads"], "TP", tp)] if "linear_num_heads" in c else []
    for what, count, by, ranks in (
            ("attention heads", c["num_attention_heads"], "TP", tp), *linear, ("vocabulary rows", c["vocab_size"], "TP", tp),
            ("routed experts", c["n_routed_experts"], "EP", ep), ("layers", n, "PP", pp)):
        if count % ranks:
            found.append(f"{count:,} {what} do not divide over {by} {ranks}")
    for first in range(n // pp, n, n // pp) if not n % pp else ():
        if selects(c)[first] is False:
            found.append(f"with PP {pp} a stage would start on layer {first}, which reuses an earlier layer's token selection")
    return found


# -- checkpoint folders -----------------------------------------------------------------------------------------------

COUNTS = ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
          "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "n_routed_experts",
          "num_experts_per_tok", "n_shared_experts", "index_n_heads", "index_head_dim", "index_topk")


def read(folder, published=None):
    """config.json of a checkpoint folder, or `published` (GLM5P3, FLASH) where there is no such folder yet. Raises Stop."""
    file = Path(folder) / "config.json"
    if published and not file.is_file():
        return published
    try:
        c = json.loads(file.read_text())
        t = text(c)
        odd = next((k for k in COUNTS if type(t[k]) is not int or t[k] < 1), None)
        parameters(c) if not odd else None
    except (ValueError, AttributeError, TypeError, ZeroDivisionError) as error:
        raise Stop(f"{file} is no JSON object of a model: {error}") from None
    except KeyError as error:
        raise Stop(f"{file} has no {error}, which the sizes are counted from") from None
    if odd:
        raise Stop(f"{file}: {odd} is {json.dumps(t[odd])}, but must be a number of at least 1")
    layers, dense, *_ = kinds(t)
    if not 0 <= dense < layers:
        raise Stop(f"{file}: {dense} of {layers} layers are dense, none has experts")
    for key in ("layer_types", "indexer_types", "mlp_layer_types"):
        if t.get(key) and len(t[key]) != layers:
            raise Stop(f"{file}: {key} has {len(t[key])} entries for {layers} layers")
    if c.get("quantization_config") or t.get("quantization_config"):
        raise Stop(f"{folder} is a quantized checkpoint (config.json has quantization_config): give the bfloat16 one")
    return c


def missing(folder):
    """What a checkpoint folder lacks, as a sentence, or None: every file that its index names must be there, as long as its own
    header says."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if not files or not all(isinstance(f, str) for f in files):
                raise ValueError
        except (ValueError, KeyError, AttributeError, TypeError):
            return f"{index} is not an index of safetensors files"
    elif not (folder / files[0]).is_file():
        return f"{folder} has neither {index.name} nor model.safetensors"
    if lost := [f for f in files if not (folder / f).is_file()]:
        return f"{folder} lacks {len(lost)} of the {len(files)} files that {index.name} names: {', '.join(lost[:3])}" \
            + " ..." * (len(lost) > 3)
    cut = [said for f in files if (said := _cut(folder / f))]
    return f"{cut[0]}{f', and {len(cut) - 1} more files of the {len(files)} are not whole' * (len(cut) > 1)}" if cut else None


def _cut(file):
    """What is wrong with the length of a safetensors file, as a sentence, or None: 8 bytes with its header's length, the header,
    then what the header's offsets say."""
    have = file.stat().st_size
    try:
        with open(file, "rb") as f:
            length = int.from_bytes(f.read(8), "little")
            if length > 100_000_000:                          # the format's limit
                raise ValueError
            header = json.loads(f.read(length)) if 8 + length <= have else {}
        want = 8 + length + max((t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"), default=0)
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    except (ValueError, AttributeError, KeyError, TypeError, IndexError):
        return f"{file} is no safetensors file"
    return f"{file} has {have:,} bytes of the {want:,} that its header promises" if have < want else None
