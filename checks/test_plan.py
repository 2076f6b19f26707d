"""The plan's arithmetic: parameters against transformers, sizes against what was published and measured, and the plan as a user
meets it. Where a formula misses a published figure by more than 5 %, a test says by how much."""
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from common import activations, memory, size, speed
from common.cli import Stop
from common.memory import GIB
from common.size import FLASH, GLM5P3

ROOT = Path(__file__).resolve().parent.parent
MEMORY = ROOT / "checks" / "plan_memory.py"
RECIPES = ("dapo_glm5p3_lora", "gsm8k_glm5p3_lora", "dapo_glm5p3_fullft")
TARGETS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj")
ALL = (*TARGETS, "kv_b_proj")
H200, B200, B300 = 139 * GIB, 178 * GIB, 267 * GIB


def near(found, published, percent=5):
    return abs(found / published - 1) <= percent / 100


# -- parameters ------------------------------------------------------------------------------------------------------

PARTS = (("visual", "vision"), ("embed_tokens", "embedding"), ("lm_head", "head"), ("indexer", "indexer"),
         ("_hc", "hyper-connections"), ("shared_experts", "shared experts"), ("mlp.experts", "routed experts"),
         ("mlp.gate.weight", "router"), ("mlp.", "dense MLP"), ("linear attention", "linear attention"), ("norm", "norms"))


def counted(model, linear=()):
    """{part: parameters} of a transformers model; linear: numbers of its linear attention layers."""
    found = {}
    for name, p in model.named_parameters():
        for layer in linear:
            name = name.replace(f".layers.{layer}.self_attn.", ".linear attention.")
        part = next((part for mark, part in PARTS if mark in name), "attention")
        found[part] = found.get(part, 0) + p.numel()
    return found


def test_glm5p3s_parameters_are_those_of_transformers():
    import torch
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
    hf = GlmMoeDsaConfig(**{k: v for k, v in GLM5P3.items() if k != "model_type"})
    with torch.device("meta"):
        model = GlmMoeDsaForCausalLM._from_config(hf)
    assert counted(model) == size.parameters(GLM5P3) == size.parameters(hf.to_dict())
    assert sum(size.parameters(GLM5P3).values()) == 743_377_000_704
    assert round(sum(size.parameters(GLM5P3, mtp=True).values()) / 1e9) == 753          # as it is called


def test_flashs_parameters_are_those_of_transformers():
    import torch
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration
    hf = Glm5NextConfig()
    assert hf.text_config.index_kpool == 16
    hf.text_config.index_kpool = 4                            # as the checkpoint has it
    with torch.device("meta"):
        model = Glm5NextForConditionalGeneration._from_config(hf)
    kda = [i for i, kind in enumerate(hf.text_config.layer_types) if kind == "linear_attention"]
    found = counted(model, kda)
    vision = found.pop("vision")
    assert found == size.parameters(FLASH) == size.parameters(hf.to_dict())
    assert sum(size.parameters(FLASH).values()) / 1e9 == pytest.approx(313.3, abs=0.05)
    whole = 2 * (sum(size.parameters(FLASH, mtp=True).values()) + vision) / GIB
    assert near(whole, 599, 0.5)                              # with the MTP layer and the vision tower (0.46B)


def test_parts_of_a_layer():
    one = dict(GLM5P3, num_hidden_layers=2, first_k_dense_replace=1)                     # both layers select tokens
    assert size.parameters(one) == {
        "embedding": 951_582_720, "attention": 2 * 165_019_648, "dense MLP": 226_492_416, "shared experts": 37_748_736,
        "indexer": 2 * 9_371_904, "router": 1_572_864, "routed experts": 9_663_676_416, "norms": 2 * 14_848 + 6_144,
        "head": 951_582_720}
    assert [i for i, own in enumerate(size.selects(GLM5P3)) if own][:5] == [0, 1, 2, 6, 10]
    assert size.selects(GLM5P3).count(True) == 21


# -- published sizes; the sources mix GB and GiB ---------------------------------------------------------------------

def test_sampler_weights():
    assert near(memory.sampler_weights(GLM5P3, 8) / GIB, 176, 0.5)                         # published as ~176 GiB
    assert near(memory.sampler_weights(GLM5P3, 8, fp8=True) / GIB, 89, 1)                  # ~89 GiB
    # "TP4 peaked at 173 of 178 GiB": FP8 weights of a sampler at TP 4
    assert near(memory.sampler_weights(GLM5P3, 4, fp8=True) / GIB, 173)


def test_experts_of_a_full_fine_tuning_rank():
    routed = size.on_gpu(GLM5P3, 8, 64)[1]
    # published as 23 GiB and 45 GiB: right in GB; in GiB they would be off by 8 and 6 %
    assert near(2 * routed / 1e9, 23, 2) and near(4 * routed / 1e9, 45, 1)
    assert round(2 * routed / GIB, 1) == 21.1 and round(4 * routed / GIB, 1) == 42.2


def test_adapters():
    unique, public, tensors, names = size.adapter(GLM5P3, 32, ALL, "shared")
    assert (tensors, names) == (1_698, 116_448)               # 115,200 of routed experts
    assert near(2 * public / 1e9, 30.77, 0.1)                 # the rest is the file's header
    # 0.62 GB quoted: 0.625 GiB with an A each for gate and up, 0.611 GB if they share one
    assert round(2 * unique / GIB, 3) == 0.625
    one_a = unique - 32 * 6144 * (75 + 75 + 3)
    assert near(2 * one_a / 1e9, 0.62, 2)
    # rank 64 with a copy of the experts' adapter on each of 64 expert parallel ranks: 6.2B with one A, 8.1B with two
    unique, _, _, _ = size.adapter(GLM5P3, 64, ALL, "shared")
    routed = 64 * 3 * (6144 + 2048) * 75
    assert near(unique + 63 * routed, 8.1e9, 1)
    assert near(unique - 64 * 6144 * 78 + 63 * routed - 64 * 64 * 6144 * 75, 6.2e9, 1)
    # Flash, rank 64, experts of rank 8 each: 3.79 GiB counted, 3.9 GiB published
    kda = ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj")
    found = 2 * size.adapter(FLASH, 64, (*ALL, *kda), "each", expert_rank=8)[0] / GIB
    assert near(found, 3.79, 0.5) and near(found, 3.9, 5)


def test_adapter_of_a_rank():
    """SkyRL's split, which cuts all but the latent projections: 0.22B of rank 64 on a GPU, 0.88B of rank 256."""
    for rank, published in ((64, 0.22e9), (256, 0.88e9)):
        local, own = size.adapter_on_gpu(GLM5P3, rank, ALL, None, 1, 1)
        latent, _ = size.adapter_on_gpu(GLM5P3, rank, ("q_a_proj", "kv_a_proj_with_mqa"), None, 1, 1)
        one_a = rank * 6144 * (75 + 3)
        assert own == 0 and near((local - latent - one_a) / 8 + latent + rank * (2 * (6144 + 2048) + 2048) * 75, published, 1)
    # ours, o_proj of two layers: A [r, 16384] is cut over TP 8, B [6144, r] whole
    two = dict(GLM5P3, num_hidden_layers=2)
    assert size.adapter_on_gpu(two, 32, ("o_proj",), "shared", 8, 8) == (2 * 32 * (16384 / 8 + 6144), 0)
    one_moe = dict(GLM5P3, num_hidden_layers=4)
    local, own = size.adapter_on_gpu(one_moe, 8, ("down_proj",), "each", 8, 8)
    assert own == 8 * (6144 + 2048) * 256 / 8 and local - own == 8 * (3 * (12288 / 8 + 6144) + 2048 / 8 + 6144)


# -- peaks that were measured ----------------------------------------------------------------------------------------

def peak(parts):
    return sum(v for k, v in parts.items() if k != "context")


def test_peak_of_the_lora_update_on_an_h200():
    """results/hardware.md: 76.1 GB; lengths up to 8,192."""
    cut = dict(GLM5P3, num_hidden_layers=3, first_k_dense_replace=1)
    parts = memory.trainer(cut, tp=1, ep=1, lora=dict(rank=32, targets=TARGETS, experts="shared"), tokens=16384, longest=8192)
    assert round(sum(size.parameters(cut).values()) / 1e9, 1) == 22.1 and near(peak(parts), 76.1e9, 2)


def test_peak_of_the_full_update_on_an_h200():
    """results/hardware.md: 97.3 GB."""
    cut = dict(GLM5P3, num_hidden_layers=2, first_k_dense_replace=1, n_routed_experts=32)
    parts = memory.trainer(cut, tp=1, ep=1, tokens=16384, longest=8192)
    assert round(sum(size.parameters(cut).values()) / 1e9, 1) == 3.7 and near(peak(parts), 97.3e9, 2)


def test_peak_of_the_published_full_fine_tuning():
    """8 x 8 B200, TP 8, EP 64. Published trainer peaks: 117 GiB with the whole optimizer on the host, 157 GiB with the masters on
    the GPU. The formula is 7 and 2 % below them with the CUDA context, 9 and 4 % without it; it does not know
    TileLang's buffers."""
    layout = dict(tp=8, ep=64, dp=8, tokens=8192, longest=10240, recompute="selective", chunk=1024)
    all_off, masters = (memory.trainer(GLM5P3, **layout, offload=o) for o in ("all", "masters"))
    assert near(sum(all_off.values()) / GIB, 117, 7) and not near(sum(all_off.values()) / GIB, 117)
    assert near(sum(masters.values()) / GIB, 157)
    # float32 masters "about 50 GiB": 43.9 GiB, 47.1 GB
    assert round(masters["optimizer"] / GIB, 1) == 43.9 and not near(masters["optimizer"] / 1e9, 50)
    on_gpu = memory.trainer(GLM5P3, **layout)
    assert "takes 241 GiB a GPU of 178 that it may take: optimizer 132" in memory.too_large("an update", on_gpu, B200)
    assert memory.too_large("an update", all_off, 0.95 * B200) is None
    assert "gradients 56" in memory.too_large("an update", all_off, 100 * GIB)


def test_peak_of_a_merged_sync():
    """Published: ~151 GiB a GPU in full fine-tuning with FP8 rollouts. Rank-64 LoRA failed by 1.5 GiB of 178 with graphs up to
    512 and ran with 128; rank 256 failed. The last is refused only because a plan keeps 5 % of the card free."""
    layout = dict(tp=8, ep=64, sampler_tp=8, fp8=True)
    full = memory.merged_sync(GLM5P3, **layout, captured=256)
    assert near(sum(v for k, v in full.items() if k not in ("CUDA graphs", "context")) / GIB, 151, 2)
    assert not near(sum(full.values()) / GIB, 151)            # with the graphs and the context it is 9 % more
    room = (1 - memory.SPARE) * B200
    large, small, wide = (memory.merged_sync(GLM5P3, **layout, captured=n, adapter=a) for n, a in (
        (512, 0.22e9), (128, 0.22e9), (128, 0.88e9)))
    assert near(sum(large.values()) / GIB, 178 + 1.5) and memory.too_large("a sync", large, room)
    assert memory.too_large("a sync", small, room) is None
    assert memory.too_large("a sync", wide, room).startswith("a sync takes 171 GiB a GPU of 169") and sum(wide.values()) < B200
    assert memory.too_large("a sync", small, (1 - memory.SPARE) * H200).startswith("a sync takes 163 GiB a GPU of 132")
    assert near(full["a layer in reload"] / 1e9, 19, 2)       # "about 19 GiB": GB
    # the same run's two other moments, both with room to spare on a B200
    sampler = memory.sampler(GLM5P3, tp=8, card=B200, utilization=0.8, max_num_seqs=64, batched=8192, fp8=True)
    assert round(sampler["KV cache"] / GIB, 1) == 43.5
    update = memory.trainer(GLM5P3, tp=8, ep=64, dp=8, lora=dict(rank=64, targets=ALL, experts="shared"), tokens=8192,
                            longest=4608, recompute="selective", chunk=1024)
    assert memory.too_large("an update", update, room) is None


def test_the_page_says_what_the_formulas_say():
    """results/README.md, computed anew: each row's numbers as they stand there."""
    page = (ROOT / "results" / "README.md").read_text()
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ")[1] for line in page.splitlines() if line.count(" | ") == 3}
    routed, unique = size.on_gpu(GLM5P3, 8, 64)[1], size.adapter(GLM5P3, 32, ALL, "shared")
    layout = dict(tp=8, ep=64, dp=8, tokens=8192, longest=10240, recompute="selective", chunk=1024)
    host, masters = (memory.trainer(GLM5P3, **layout, offload=o) for o in ("all", "masters"))
    merged = [memory.merged_sync(GLM5P3, tp=8, ep=64, sampler_tp=8, fp8=True, captured=n, adapter=a)
              for n, a in ((256, 0), (512, 0.22e9))]
    cut = dict(GLM5P3, first_k_dense_replace=1)
    micro = dict(tp=1, ep=1, tokens=16384, longest=8192)
    peaks = [peak(memory.trainer(dict(cut, num_hidden_layers=3), lora=dict(rank=32, targets=TARGETS, experts="shared"), **micro)),
             peak(memory.trainer(dict(cut, num_hidden_layers=2, n_routed_experts=32), **micro))]
    bare = sum(v for k, v in merged[0].items() if k not in ("CUDA graphs", "context"))
    bf16, fp8, four = (memory.sampler_weights(GLM5P3, tp, fp8=f) / GIB for tp, f in ((8, False), (8, True), (4, True)))
    for start, said in (
            ("GLM-5.3 with its MTP layer", f"{sum(size.parameters(GLM5P3, mtp=True).values()) / 1e9:.1f}B; "
                                           f"{sum(size.parameters(FLASH).values()) / 1e9:.1f}B"),
            ("sampler at TP 8", f"{bf16:.1f}; {fp8:.1f} GiB"), ("FP8 sampler at TP 4", f"{four:.1f} GiB"),
            ("full fine-tuning, EP 64", f"{2 * routed / 1e9:.1f}; {4 * routed / 1e9:.1f} GB = {2 * routed / GIB:.1f}; "
                                        f"{4 * routed / GIB:.1f} GiB"),
            ("full fine-tuning, peak of a GPU", f"{sum(host.values()) / GIB:.0f} GiB"),
            ("the same, float32 masters", f"{sum(masters.values()) / GIB:.0f} GiB"),
            ("of it the masters", f"{masters['optimizer'] / GIB:.1f} GiB = {masters['optimizer'] / 1e9:.1f} GB"),
            ("merged sync, full fine-tuning", f"{bare / GIB:.0f}; {sum(merged[0].values()) / GIB:.0f} GiB"),
            ("merged sync, rank 64", f"{sum(merged[1].values()) / GIB:.0f} GiB"),
            ("one MoE layer", f"{merged[0]['a layer in reload'] / GIB:.1f} GiB"),
            ("adapter of rank 32", f"{2 * unique[1] / 1e9:.2f}; {2 * unique[0] / 1e9:.3f} GB"),
            ("peak of an update on an H200", f"{peaks[0] / 1e9:.1f}; {peaks[1] / 1e9:.1f} GB")):
        found = [computed for what, computed in rows.items() if what.startswith(start)]
        assert len(found) == 1 and found[0].startswith(said), (start, said, found)


@pytest.mark.parametrize("args", [(), ("--mode", "full")])
def test_what_the_trainer_holds_and_keeps(args):
    """Bytes of weights, adapter, gradients and optimizer, and what autograd keeps, of the real trainer on the CPU."""
    found = subprocess.run([sys.executable, MEMORY, "--shape", "tiny", *args], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-2000:]
    off = {line[:28].strip(): float(line.split()[-1]) for line in found.stdout.splitlines() if line.split()[-1][0] in "+-"}
    assert {"weights", "gradients", "optimizer", "kept for the backward pass"} <= set(off)
    assert all(abs(v) <= (0.02 if k != "kept for the backward pass" else 4) for k, v in off.items()), off


SPLIT = """
import sys
from pathlib import Path
from common import trainer
from checks.plan_memory import TARGETS, held
rank, folder, experts = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
trainer.weights.load = lambda *_: None
r = trainer.TrainerRank(rank, 2, folder, tp=2, ep=2, dtype="bfloat16", lora_rank=8, lora_alpha=8, lora_targets=TARGETS,
                        experts=experts, te=False)
r.load(str(folder / "rendezvous"))
print("HELD", held(r)["weights"], held(r)["adapter"], flush=True)
trainer.dist.barrier()
trainer.dist.destroy_process_group()
"""


@pytest.mark.parametrize("experts", ["each"])
def test_what_a_rank_of_two_holds(tmp_path, experts):
    from checks import tiny
    hf = tiny.config(num_hidden_layers=5, first_k_dense_replace=2)
    hf.save_pretrained(tmp_path)
    ranks = [subprocess.Popen([sys.executable, "-c", SPLIT, str(r), str(tmp_path), experts], stdout=subprocess.PIPE, text=True,
                              stderr=subprocess.DEVNULL) for r in range(2)]
    outside, routed = size.on_gpu(hf.to_dict(), 2, 2)
    mine, _ = size.adapter_on_gpu(hf.to_dict(), 8, TARGETS, experts, 2, 2)
    for rank in ranks:
        out, _ = rank.communicate(timeout=300)
        assert f"HELD {2 * (outside + routed):.0f} {4 * mine:.0f}\n" in out


def test_activations_by_hand():
    """A layer's attention keeps 248,576 bytes a token, an MoE layer's rest 321,856, and the backward pass takes 327,680 more."""
    s = activations.saved(GLM5P3)
    assert (s["attention"], s["moe"]) == (
        6 * 6144 + 6 * 2048 + 4 * 512 + 8 * 64 + 2 * 64 * 5 * 256 + 4 * 64 + 2 * 64 * 256,
        6 * 6144 + 8 * (2 * 6144 + 10 * 2048) + 10 * 2048 + 8 * 256 + 40 * 8)
    found = activations.activations(GLM5P3, tokens=1000, longest=1000, recompute="full")
    assert found == {"activations": 78 * 2 * 6144 * 1000, "attention masks": 0, "logits": 18 * 1000 * 154880 + 6 * 6144 * 1000,
                     "one layer's backward pass": (248_576 + 321_856 + 327_680) * 1000}
    long = activations.activations(GLM5P3, tokens=8192, longest=4096, recompute="full", tp=8, chunk=1024)
    assert long["attention masks"] == 8192 * 4096 * (21 + 2)
    parts = memory.trainer(GLM5P3, tp=8, ep=8, tokens=8192, longest=4096, recompute="full", chunk=64,
                           lora=dict(rank=32, targets=TARGETS, experts="shared"))
    assert "one layer's backward pass" in parts and "logits" not in parts               # never both at once
    # the head of all weights: gradient of its weight in float32; with two stages, two micro-batches of half the layers at once
    full = activations.activations(GLM5P3, tokens=1000, longest=1000, recompute="none", chunk=8192, full=True, tp=8)
    assert full["logits"] == max(18 * 1000 + 4 * 6144, 10 * (1000 + 6144)) * 154880 / 8 + 6 * 6144 * 1000
    full = activations.activations(GLM5P3, tokens=8192, longest=1000, recompute="full", chunk=8192, full=True, tp=8, pp=2)
    assert full["logits"] == (18 * 8192 + 4 * 6144) * 154880 / 8 + 6 * 6144 * 8192
    assert full["activations"] == 2 * 39 * 2 * 6144 * 8192 / 8
    # 32 ranks, EP 16: Adam's moments of an expert's adapter lie on its two ranks, the rest on the four that hold the same slice
    each = dict(rank=8, targets=TARGETS, experts="each")
    mine, own = size.adapter_on_gpu(GLM5P3, **each, tp=8, ep=16)
    parts = memory.trainer(GLM5P3, tp=8, ep=16, dp=4, lora=each, tokens=8192, longest=4096, recompute="full")
    assert own > 0 and parts["optimizer"] == 8 * (own / 2 + (mine - own) / 4)
    # the larger of two pipeline stages: 39 of 78 layers and of the 75 with experts, and only one of embedding and head
    both, first = size.on_gpu(GLM5P3, 8, 8), size.on_gpu(GLM5P3, 8, 8, 2)
    end = 154880 * 6144 / 8
    assert first[0] - end == pytest.approx((both[0] - 2 * end) / 2) and first[1] == both[1] * 39 / 75


def test_small_sums_of_the_sampler():
    assert memory.kv_per_token(GLM5P3) == 78 * (512 + 64) * 2 + 21 * 132
    assert memory.graphs(32) == 11 * memory.GRAPHS and round(memory.graphs(256) / GIB) == 14              # 1, 2, 4, 8 ... 64
    # slots of one MoE layer's experts: 32 of 256 on a rank, each with 2 slots of gate, up and down
    one, two = (dict(GLM5P3, num_hidden_layers=n, first_k_dense_replace=n - moe, n_routed_experts=e)
                for n, moe, e in ((2, 1, 256), (2, 1, 512)))
    assert memory.slots(two, 32, 8) - memory.slots(one, 32, 8) == 2 * 2 * (32 * 3 * 32 * (6144 + 2048) + 32 * 256)
    assert memory.slots(one, 64, 8, n=1) == memory.slots(one, 32, 8, n=2)


@pytest.mark.parametrize("moe, tensors, unique, slots", [(3, 74, 27e6, 1.24e9), (75, 1514, 511e6, 30.8e9)])
def test_adapter_that_was_handed_over_on_an_h200(moe, tensors, unique, slots):
    """results/hardware.md: bytes and tensors of the bundle, and of one version in the slots of a vLLM rank alone on its card."""
    c = dict(GLM5P3, num_hidden_layers=1 + moe, first_k_dense_replace=1)
    found, _, count, _ = size.adapter(c, 32, TARGETS, "shared")
    assert count == tensors and near(2 * found, unique, 2) and near(memory.slots(c, 32, 1, n=1), slots, 0.5)


def test_rates_give_back_the_published_step():
    """SkyRL's full fine-tuning: 128 x 12 answers on 64 B200: 410 + 320 + 1,550 s."""
    cfg = SimpleNamespace(prompts_per_step=128, group_size=12, engines=8, max_num_seqs=256, trainer_ranks=64,
                          max_response_tokens=8192)
    found = speed.step(GLM5P3, cfg, 0, lora=False)
    assert [round(found[k]) for k in ("sample", "score", "update")] == [405, 321, 1558]
    assert round(0.62e9 / speed.of(GLM5P3).sync) == 13


# -- the plan as its user meets it -----------------------------------------------------------------------------------

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
HEADER = json.dumps({"__metadata__": {"format": "pt"}, "w": {"dtype": "U8", "shape": [10], "data_offsets": [0, 10]}}).encode()
SHARD = len(HEADER).to_bytes(8, "little") + HEADER + b"0123456789"


@pytest.fixture
def prepared(tmp_path):
    return ready(tmp_path, "GLM-5.3-BF16", GLM5P3)


def ready(tmp_path, name, config):
    """A folder in which the published runs' plans find data, model and packages: the files are there, what they hold is not."""
    model = tmp_path / "zai-org" / name
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors.index.json").write_text(json.dumps(
        {"metadata": {"total_size": 20}, "weight_map": {f"tensor.{i}": shard for i, shard in enumerate(SHARDS)}}))
    for file in SHARDS:
        (model / file).write_bytes(SHARD)
    (tmp_path / "data").mkdir()
    for package in ("transformer_engine", "fla"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    for name in ("dapo_math", "aime_2024", "gsm8k_train", "gsm8k_test"):
        (tmp_path / "data" / f"{name}.parquet").touch()
    return tmp_path


def plan(cwd, *args, address="auto", recipe="dapo_glm5p3_lora"):
    """(exit code, lines) of a recipe's plan; without torch and in less than two seconds of a core."""
    code = f"import sys, time; sys.argv = ['x', '--plan', *{args!r}]; sys.path[:0] = [{str(ROOT)!r}, {str(cwd)!r}]\n" \
           f"from recipes import {recipe} as r\ncode = r.main()\n" \
           "assert not {'torch', 'vllm', 'ray', 'transformers', 'megatron', 'numpy'} & set(sys.modules)\n" \
           "assert time.process_time() < 2\nsys.exit(code)"
    found = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, env={"RAY_ADDRESS": address})
    assert not found.stderr, found.stderr
    return found.returncode, found.stdout.splitlines()


def row(lines, name):
    return next(line[len(name):].strip() for line in lines if line.startswith(f"{name} "))


def test_the_published_layout_fits_b300s(prepared):
    code, lines = plan(prepared, "--gpu-price", "5")
    assert (code, lines[-1]) == (0, "plan: OK") and len(lines) == 20
    assert row(lines, "model") == "743.4B parameters, 263M in the adapter"
    assert row(lines, "a GPU in an update").startswith("195 GiB: weights 175.6, adapter 0.7, gradients 0.7, optimizer 0.3, ")
    assert row(lines, "a GPU in an update").endswith("; 254 may be used")
    assert "weights 175.6, adapter slots 7.6" in row(lines, "a GPU while sampling")
    assert row(lines, "KV cache") == "249,417 tokens, 24.4 answers of full length"
    assert row(lines, "host memory of a node").startswith("3,828 GiB page-locked")
    assert row(lines, "a publish") == "0.53 GB in 1,542 tensors to each node, 11 s"
    assert row(lines, "disk") == "157 GB for 3 + 1 checkpoints, 61 GB for the final adapter"
    # 2,048 answers on 4 x 32 places are 16 rounds of 4,460 tokens at 11/s; 9.44M tokens on 32 GPUs at 345/s and 71/s
    assert row(lines, "minutes a step").startswith("about 192 = sample 108.1 + score 14.3 + update 69.3 + move 0.4 + publish 0.2")
    # 3 publishes of 11.1 s, 2 turns of 22.7 s, 2 x 128 tokens at 11/s
    assert row(lines, "five-step check") == "about 102 s before the first step, 0.9 % of one"
    assert row(lines, "hours").endswith("2,185 GPU-hours, $10,926 at $5")


def test_a_sequence_longer_than_a_micro_batch_gets_its_own(prepared):
    assert "activations 1.1," in row(plan(prepared, "--max-tokens-per-micro-batch", "100")[1], "a GPU in an update")


@pytest.mark.parametrize("memory, update, sampler", [("178", 169, 142), ("139", 132, 111)])
def test_the_published_layout_fits_no_smaller_card(prepared, memory, update, sampler):
    code, lines = plan(prepared, "--gpu-memory-gib", memory)
    assert (code, lines[-1]) == (2, "plan: 2 problems")
    assert f"problem: an update takes 195 GiB a GPU of {update} that it may take: weights 176, attention masks 4" in lines[-3]
    assert f"problem: the sampler takes 193 GiB a GPU of {sampler} that it may take: weights 176, adapter slots 8" in lines[-2]


CARDS = {"B300": "267", "B200": "178", "H200": "139"}


@pytest.mark.parametrize("recipe, card, refused", [
    ("dapo_glm5p3_lora", "B300", []), ("dapo_glm5p3_lora", "B200", ["an update takes 195", "the sampler takes 193"]),
    ("gsm8k_glm5p3_lora", "B300", []), ("gsm8k_glm5p3_lora", "B200", []),
    ("gsm8k_glm5p3_lora", "H200", ["a publish takes 135 GiB a GPU of 132 that it may take: weights 88, a layer in reload 18"]),
    ("dapo_glm5p3_fullft", "B300", []), ("dapo_glm5p3_fullft", "B200", []),
    ("dapo_glm5p3_fullft", "H200", ["the sampler takes 109 GiB a GPU of 104 that it may take: weights 88, CUDA graphs 14"])])
def test_a_published_layout_fits_its_card_and_not_the_next_smaller_one(prepared, recipe, card, refused):
    code, lines = plan(prepared, "--gpu-memory-gib", CARDS[card], recipe=recipe)
    said = [line for line in lines if line.startswith("problem: ")]
    assert len(said) == len(refused) and all(line.startswith(f"problem: {part}") for line, part in zip(said, refused)), said
    assert (code, lines[-1]) == ((2, f"plan: {len(said)} problem{'s' * (len(said) > 1)}") if refused else (0, "plan: OK"))


def test_four_gpus_do_not_hold_the_fp8_sampler_and_rank_256_does_not_pass_a_publish(prepared):
    """Published: TP 4 peaked at 173 of 178 GiB and failed; of the shared adapters rank 64 ran and 256 failed."""
    four = "--nodes 16 --gpus-per-node 4 --sampler-tp 4 --tp 4 --gpu-memory-utilization 0.95".split()
    for args, sentence in ((four, "the sampler takes 185 GiB a GPU of 169 that it may take: weights 175, CUDA graphs 5, "),
                           (["--lora-rank", "256"], "a publish takes 173 GiB a GPU of 169 that it may take: weights 88, ")):
        code, lines = plan(prepared, *args, recipe="gsm8k_glm5p3_lora")
        assert (code, lines[-1]) == (2, "plan: 1 problem") and lines[-2].startswith(f"problem: {sentence}"), lines[-2:]
    assert row(plan(prepared, *four, recipe="gsm8k_glm5p3_lora")[1], "KV cache") == "0 tokens, 0.0 answers of full length"


@pytest.mark.parametrize("recipe, nodes", [("gsm8k_glm5p3_lora", 4), ("dapo_glm5p3_fullft", 7)])
def test_experts_over_64_gpus_take_eight_nodes(prepared, recipe, nodes):
    code, lines = plan(prepared, "--nodes", str(nodes), recipe=recipe)
    assert code == 2 and lines[-2] == f"problem: {8 * nodes} ranks of a pipeline stage do not divide into EP 64"


def test_an_answer_is_not_planned_longer_than_its_cap(prepared):
    """256 answers on 8 x 64 places are one round of 4,096 tokens at 11/s; 256 x 4,246 / 64 tokens at 345/s and 71/s."""
    _, lines = plan(prepared, recipe="gsm8k_glm5p3_lora")
    assert row(lines, "minutes a step").startswith("about 16 = sample 6.2 + score 0.8 + update 4.0 + move 0.2 + publish 4.3, ")
    assert row(lines, "minutes a step").endswith("with 4,096 tokens an answer and published rates")
    assert row(plan(prepared, recipe="dapo_glm5p3_fullft")[1], "disk") == "no checkpoints, 1,487 GB for the final model"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("args, sentence", [
    (["--gpu-price", "-3"], "gpu_price is -3.0, but must not be negative"),
    (["--engine-restarts", "-1"], "engine_restarts is -1, but must not be negative"),
    (["--gpu-memory-utilization", "1.5"], "gpu_memory_utilization is 1.5, but must be at most 1"),
    (["--gpu-memory-utilization", "0"], "gpu_memory_utilization is 0.0, but must be more than 0"),
    (["--eval-top-p", "0"], "eval_top_p is 0.0, but must be more than 0"),
    (["--betas", "0.9,1"], "betas is (0.9, 1.0), but both must be from 0 to below 1")])
def test_values_that_would_end_the_run_hours_later(prepared, recipe, args, sentence):
    code, lines = plan(prepared, *args, recipe=recipe)
    assert (code, lines[-2:]) == (2, [f"problem: {sentence}", "plan: 1 problem"])


@pytest.mark.parametrize("args, sentence", [
    (["--lora-targets", ""], "lora_targets is empty: an adapter needs a layer to adapt"),
    (["--recompute", "none"], "an update takes 339 GiB a GPU of 254 that it may take: weights 176, activations 122"),
    (["--lora-rank", "256"], "the sampler takes 246 GiB a GPU of 214 that it may take: weights 176, adapter slots 61"),
    (["--gpu-memory-utilization", "0.99"],
     "sampling at gpu_memory_utilization 0.99 takes 270 GiB a GPU of 254 that it may take: weights 176, KV cache 72"),
    (["--lora-experts", "each"], "sampling at gpu_memory_utilization 0.8 takes 292 GiB a GPU of 254 that it may take: "
                                 "weights 176, adapter gathered and packed 57"),
    (["--tp", "4", "--pp", "2"], "with PP 2 a stage would start on layer 39, which reuses an earlier layer's token selection"),
    (["--nodes", "3", "--tp", "3", "--ep", "3"], "64 attention heads do not divide over TP 3"),
    (["--tp", "64"], "32 trainer ranks do not divide into TP 64 x PP 1"),
    (["--gpu-memory-gib", "0"], "gpu_memory_gib is 0.0, but must be more than 0"),
])
def test_what_does_not_fit_is_named(prepared, args, sentence):
    code, lines = plan(prepared, *args)
    assert code == 2 and any(line.startswith(f"problem: {sentence}") for line in lines), "\n".join(lines)


@pytest.mark.parametrize("case, sentence", [
    ("a lost file", f"lacks 1 of the 2 files that model.safetensors.index.json names: {SHARDS[1]}"),
    ("a cut file", f"{SHARDS[0]} has {len(SHARD) - 1} bytes of the {len(SHARD)} that its header promises"),
    ("a cut header", f"{SHARDS[0]} has 40 bytes of the {8 + len(HEADER)} that its header promises"),
    ("two cut files", f"{SHARDS[0]} has 0 bytes of the 8 that its header promises, and 1 more files of the 2 are not whole"),
    ("another file", f"{SHARDS[1]} is no safetensors file"),
    ("a broken index", "is not an index of safetensors files"),
    ("an empty index", "is not an index of safetensors files"),
    ("no index", "has neither model.safetensors.index.json nor model.safetensors"),
    ("a lost key", "config.json has no 'q_lora_rank', which the sizes are counted from"),
    ("FP8", "is a quantized checkpoint (config.json has quantization_config): give the bfloat16 one"),
    ("no data", "no data file data/aime_2024.parquet"),
])
def test_missing_files_are_named(prepared, case, sentence):
    model = prepared / "zai-org" / "GLM-5.3-BF16"
    index = model / "model.safetensors.index.json"
    match case:
        case "a lost file":
            (model / SHARDS[1]).unlink()
        case "a cut file":
            (model / SHARDS[0]).write_bytes(SHARD[:-1])
        case "a cut header":
            (model / SHARDS[0]).write_bytes(SHARD[:40])
        case "two cut files":
            (model / SHARDS[0]).write_bytes(b"")
            (model / SHARDS[1]).write_bytes(SHARD[:-1])
        case "another file":
            (model / SHARDS[1]).write_bytes(b"<html>no such file</html>")
        case "a broken index":
            index.write_text('{"weight_map": 3}')
        case "an empty index":
            index.write_text('{"weight_map": {}}')
        case "no index":
            index.unlink()
        case "a lost key":
            (model / "config.json").write_text(json.dumps({k: v for k, v in GLM5P3.items() if k != "q_lora_rank"}))
        case "FP8":
            (model / "config.json").write_text(json.dumps({**GLM5P3, "quantization_config": {"quant_method": "fp8"}}))
        case "no data":
            (prepared / "data" / "aime_2024.parquet").unlink()
    code, lines = plan(prepared)
    assert (code, lines[-1]) == (2, "plan: 1 problem") and sentence in lines[-2]


def test_a_machine_with_gpus_is_asked_for_memory_and_disk(prepared, monkeypatch):
    from common import fits
    from recipes import dapo_glm5p3_lora as recipe
    monkeypatch.chdir(prepared)
    monkeypatch.setattr(fits.gpus, "count", lambda: 8)
    monkeypatch.setattr(fits.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 3000 * GIB // 4096}.get)
    monkeypatch.setattr(fits.shutil, "disk_usage", lambda _: SimpleNamespace(free=200e9))
    found = []
    fits.rows(recipe.Config(), lambda ok, sentence: found.extend([] if ok else [sentence]), recipe.SIZES, GLM5P3)
    assert found == ["this node has 3,000 GiB of memory, the copies that sleep take 3,828",
                     "218 GB will be written below runs/, 200 GB are free"]


def test_the_rehearsals_plan_is_short(tmp_path):
    code, lines = plan(tmp_path, "--rehearse")
    assert (code, lines[-1]) == (0, "plan: OK") and len(lines) == 11
    assert not any("GiB" in line or "hours" in line for line in lines)


def test_read(tmp_path):
    assert size.read(tmp_path, GLM5P3) is GLM5P3
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(Stop, match="is no JSON object of a model"):
        size.read(tmp_path)


@pytest.mark.parametrize("change, sentence", [
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0, but must be a number of at least 1"),
    ({"hidden_size": "6144"}, 'hidden_size is "6144", but must be a number'), ({"hidden_size": None}, "hidden_size is null, but"),
    ({"n_routed_experts": -256}, "n_routed_experts is -256, but"), ({"first_k_dense_replace": 78}, "78 of 78 layers are dense"),
    ({"first_k_dense_replace": -1}, "-1 of 78 layers are dense"), ({"index_topk_freq": 0}, "is no JSON object of a model"),
    ({"mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entries for 78 layers"),
    ({"indexer_types": ["full"] * 77}, "indexer_types has 77 entries for 78 layers"),
    ({"text_config": {**GLM5P3, "quantization_config": {}}}, None),
    ({"text_config": {**GLM5P3, "quantization_config": {"quant_method": "fp8"}}}, "is a quantized checkpoint")])
def test_a_config_that_is_no_models_is_named_before_anything_is_counted(tmp_path, change, sentence):
    (tmp_path / "config.json").write_text(json.dumps({**GLM5P3, **change}))
    if sentence is None:
        return size.read(tmp_path)
    with pytest.raises(Stop) as stop:
        size.read(tmp_path)
    assert sentence in str(stop.value)
