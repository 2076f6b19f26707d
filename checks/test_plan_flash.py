"""The plan's arithmetic of GLM-5.3-Flash: what its layers keep, against autograd and flash-linear-attention's source; sizes,
against what was published; and the plans of its three recipes."""
import importlib.util
import subprocess
import sys

import pytest

from checks.test_plan import ALL, B200, B300, MEMORY, ROOT, near, plan, ready, row
from common import activations, memory, size, speed
from common.memory import GIB
from common.size import FLASH

LORA, FULL, GSM8K = "dapo_glm5p3_flash_lora", "dapo_glm5p3_flash_fullft", "gsm8k_glm5p3_flash_lora"
LINEAR = ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj")
ADAPTER = dict(rank=64, targets=(*ALL, *LINEAR), experts="each", expert_rank=8)


# -- what is kept ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("args", [
    ("--lora-experts", "each", "--moe-layers", "4"), ("--recompute", "selective"), ("--mode", "full"),
    ("--mode", "full", "--recompute", "selective")], ids=" ".join)
def test_what_the_trainer_holds_and_keeps(args):
    """Of the real trainer on the CPU, whose core of linear attention is torch's and always recomputed here."""
    found = subprocess.run([sys.executable, MEMORY, "--shape", "tiny-flash", *args], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-2000:]
    off = {line[:28].strip(): float(line.split()[-1]) for line in found.stdout.splitlines() if line.split()[-1][0] in "+-"}
    assert {"weights", "gradients", "optimizer", "kept for the backward pass"} <= set(off)
    assert all(abs(v) <= (0.05 if k != "kept for the backward pass" else 1) for k, v in off.items()), off


SPLIT = """
import sys
from pathlib import Path
import numpy as np
from checks.plan_memory import LINEAR, TARGETS, held, kept
from checks.train_speed import likelihood
from common import trainer
rank, folder, adapter = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "adapter"
trainer.weights.load = lambda *_: None
lora = dict(lora_rank=8, lora_alpha=8, lora_targets=TARGETS + LINEAR, experts="each", lora_expert_rank=8) if adapter else {}
r = trainer.TrainerRank(rank, 2, folder, tp=2, ep=2, dtype="bfloat16", te=False, recompute="selective", **lora)
r.load(str(folder / "rendezvous"))
rng = np.random.default_rng(0)
batch = {"tokens": [rng.integers(3, 250, 256).astype(np.int32) for _ in range(4)], "n_prompt": [10] * 4, "weight": [1 / 1000] * 4}
measured, tokens, longest = kept(r, lambda: r.update(batch, likelihood))
print("HELD", measured, tokens, longest, held(r)["weights"], held(r).get("adapter", 0), held(r)["optimizer"], flush=True)
trainer.dist.barrier()
trainer.dist.destroy_process_group()
"""


@pytest.mark.parametrize("adapter", [True, False], ids=["adapter", "full"])
def test_what_a_rank_of_two_holds_and_keeps(tmp_path, adapter):
    """With tensor and sequence parallelism: streams and heads are divided, what linear attention reads is whole on each rank."""
    from checks import tiny
    hf = tiny.flash_config(layer_types=["linear_attention", "indexed_attention"] * 2, hidden_size=256, intermediate_size=512,
                           moe_intermediate_size=128, num_attention_heads=8, num_key_value_heads=8, q_lora_rank=128,
                           kv_lora_rank=64, qk_nope_head_dim=64, v_head_dim=64, linear_num_heads=8, linear_head_dim=64)
    hf.save_pretrained(tmp_path)
    ranks = [subprocess.Popen([sys.executable, "-c", SPLIT, str(r), str(tmp_path), "adapter" if adapter else "full"], cwd=ROOT,
                              stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL) for r in range(2)]
    targets = (*(t for t in ALL if t != "kv_b_proj"), *LINEAR)
    lora = dict(rank=8, targets=targets, experts="each", expert_rank=8) if adapter else None
    for rank in ranks:
        out, _ = rank.communicate(timeout=300)
        assert "HELD" in out, out
        measured, tokens, longest, weights, own, optimizer = map(float, out.partition("HELD")[2].split()[:6])
        found = memory.trainer(hf.to_dict(), tp=2, ep=2, tokens=tokens, longest=longest, recompute="selective", lora=lora)
        assert (found["weights"], found.get("adapter", 0), found["optimizer"]) == (weights, own, optimizer)
        assert tokens == 1024 and near(found["activations"], measured, 1)


FLA = """
import torch
from types import SimpleNamespace
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.jit import JITFunction
for kernel in (JITFunction, Heuristics, Autotuner, *Autotuner.__subclasses__()):
    kernel.run = lambda self, *args, **kw: None
from common import activations, cpu
cpu.install()
from common.kda import KDA
heads, d, t = 8, 128, 1024
conv, seen = lambda: torch.zeros(heads * d, 1, 4, requires_grad=True), {}
me = SimpleNamespace(dim=d, bound=-5.0, q_conv1d=conv(), k_conv1d=conv(), v_conv1d=conv(), A_log=torch.zeros(heads),
                     dt_bias=torch.zeros(heads * d))
def keep(tensor):
    storage = tensor.untyped_storage()
    seen[storage.data_ptr()] = storage
    return tensor
x = [torch.zeros(t, 1, *shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((3 * heads * d,), (heads, d), (heads,))]
with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
    KDA._fla(me, *x, torch.tensor([0, 500, t], dtype=torch.int32))
print(sum(s.nbytes() for s in seen.values()) / t)
"""


@pytest.mark.skipif(not importlib.util.find_spec("fla"), reason="needs flash-linear-attention (pip install fla-core==0.6.0)")
def test_what_flash_linear_attention_keeps():
    """Its autograd functions on the CPU, with the kernels left out: they allocate and save what they do on a GPU. Beside the
    formula's bytes there are the joined weight of the convolution and the documents' bounds."""
    found = subprocess.run([sys.executable, "-c", FLA], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert found.returncode == 0, found.stderr[-2000:]
    c = dict(hidden_size=64, hc_mult=4, linear_num_heads=8, linear_head_dim=128)
    assert 48 <= float(found.stdout) - activations.flash_saved(c, False)["linear core"] <= 60


def test_activations_by_hand():
    """One layer's linear attention, hyper-connections and experts; 64 heads of 128 are 8,192 channels."""
    s = activations.saved(FLASH)
    core_in, core = 8 * 8192 + 2 * 64, 14 * 8192 + 2 * 64 + 64 * (256 + 12)
    assert (s["linear core's input"], s["linear core"]) == (core_in, core)
    assert s["linear attention"] == 4 * 4096 + core + 14 * 8192 + 4 * 64 and s["whole"] == 2 * 4096
    assert s["moe"] == 6 * 4096 + 8 * (2 * 4096 + 14 * 2048) + 12 * 2048 + 8 * 288 + 40 * 8
    assert s["streams"] == 2 * (6 * 4 * 4096 + 2 * 4096 + 39 * 80 + 2 * 64 + 64 + 32 + 32)
    full = activations.saved(FLASH, full=True)
    assert full["streams"] - s["streams"] == 2 * (4 * 4 * 4096 + 4 * 24) and full["whole"] - s["whole"] == 4 * 128
    found = activations.activations(FLASH, tokens=1000, longest=1000, recompute="full", tp=4)
    assert found["activations"] == 45 * 2 * 4 * 4096 * 1000 / 4
    for recompute, masks in (("none", 1 + 2 * 11), ("selective", 3)):
        found = activations.activations(FLASH, tokens=8192, longest=4096, recompute=recompute)
        assert found["attention masks"] == 8192 * 4096 * masks


# -- the sampler -----------------------------------------------------------------------------------------------------

def test_small_sums_of_the_sampler():
    assert memory.kv_per_token(FLASH) == 11 * (2 * 512 + 132 / 4)
    one = 34 * (2 * 3 * 3 * 8192 / 8 + 4 * 8 * 128 * 128)
    assert memory.state(FLASH, 8) == 3 * one and memory.answers_in(10 * (1000 * 11627 + 3 * one), FLASH, 8, 1000) == 10
    assert memory.state(size.GLM5P3, 8) == 0
    single = 2 * 45 * (24 * 4 * 4096 + 24 + 3) + 11 * 4 * 128 + 34 * (3 * 8192 * 4 + 8192 + 64)          # held in float32
    assert sum(size.single(FLASH)) == single
    assert memory.sampler_weights(FLASH, 1) == 2 * (sum(size.parameters(FLASH).values()) + single)
    # slots of one more layer with 288 experts, 36 of them here, and what a layer of linear attention has beside
    few, more = (dict(FLASH, num_hidden_layers=n, first_k_dense_replace=1) for n in (2, 3))
    kda = 64 * (6 * 4096 + 3 * 1024 + 8 + 2 * 128 + 2 * (128 + 1024) + 1024 + 4096 + 3 * (4 + 1024))
    mlp = 64 * (36 * 3 * (4096 + 2048) + 4096 + 288 + 2 * (4096 + 256) + 256 + 4096)
    assert memory.slots(more, 64, 8) - memory.slots(few, 64, 8) == 2 * 2 * (kda + mlp)
    assert memory.pinned(FLASH, 8) == memory.pinned(FLASH, 32) == 16 / 9 and memory.pinned(size.GLM5P3, 64) == 4 / 3


def test_vllms_state_of_a_request_has_these_shapes():
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
    conv, recurrent = MambaStateShapeCalculator.kda_state_shape(8, 64, 128, conv_kernel_size=4)
    assert sorted(conv) == [3, 3 * 8192 // 8] and tuple(recurrent) == (8, 128, 128)


# -- published -------------------------------------------------------------------------------------------------------

def full_update(ep):
    """With a sequence as long as the run allows, 10,240 tokens."""
    return memory.trainer(FLASH, tp=4, ep=ep, dp=16, tokens=10240, longest=10240, recompute="selective", chunk=1024,
                          offload="masters")


def test_published_sizes():
    assert near(memory.trainer(FLASH, tp=4, ep=8, dp=4, lora=ADAPTER, tokens=8192, longest=10240)["weights"] / GIB, 75, 1)
    unique, _, tensors, _ = size.adapter(FLASH, **ADAPTER)
    assert near(2 * unique / GIB, 3.79, 0.5) and near(2 * unique / GIB, 3.9, 3)
    rest = size.adapter(FLASH, 64, ADAPTER["targets"], None)[2]
    assert tensors - rest == 72_576
    mine, own = size.adapter_on_gpu(FLASH, **ADAPTER, tp=4, ep=8)
    assert own == 42 * 36 * 3 * 8 * (4096 + 2048) and mine > own
    assert near(14 * sum(size.parameters(FLASH).values()) / 2 ** 40, 4, 1)                 # a checkpoint: ~4 TiB


def test_full_fine_tuning_needs_its_experts_on_two_ranks_each():
    """Published: EP 32 with whole experts ran out of the 178 GiB of a B200; with each expert on two ranks, as if EP were 64, it
    ran. Beside the trainer a GPU holds the sleeping sampler's 17 GiB."""
    sampler = memory.graphs(512) + memory.CONTEXT
    whole, split = (sum(full_update(ep).values()) + sampler for ep in (32, 64))
    assert near(whole / GIB, 178, 1) and near(split / GIB, 151, 1)
    assert memory.too_large("an update", full_update(32) | {"sampler": sampler}, 0.95 * B200).startswith(
        "an update takes 178 GiB a GPU of 169 that it may take: activations 69, gradients 45, weights 22, ")
    assert split < 0.95 * B200


def test_rates_give_back_the_published_steps():
    """The rates come from these steps, so nothing is confirmed: 15 to 21 minutes of full fine-tuning, ~40 of LoRA."""
    assert near(sum((4460 / 24, 1536 * 4610 / 64 / 770, 1536 * 4610 / 64 / 160, 44, 10)) / 60, 18, 1)
    assert near(sum((1.5 * 4460 / 24, 1536 * 4610 / 16 / 770, 1536 * 4610 / 16 / 290, 28, 10)) / 60, 40, 1)
    v = speed.of({"text_config": FLASH})
    assert (v.request, v.score, v.update, v.adapter) == (24, 770, 160, 290) and round(3.9 * GIB / v.sync) == 29


# -- plans -----------------------------------------------------------------------------------------------------------

@pytest.fixture
def flash(tmp_path):
    return ready(tmp_path, "GLM-5.3-Flash-BF16", {"model_type": "glm5_next", "text_config": FLASH})


def test_the_plan_of_lora(flash):
    code, lines = plan(flash, recipe=LORA)
    assert (code, lines[-1]) == (0, "plan: OK"), lines[-5:]
    assert row(lines, "model") == "313.3B parameters, 2,011M in the adapter"
    assert row(lines, "a GPU in an update").startswith("107 GiB: weights 75.5, adapter 1.3, gradients 1.3, optimizer 1.1, ")
    assert "weights 73.5, adapter slots 7.2, CUDA graphs 14.0" in row(lines, "a GPU while sampling")
    assert row(lines, "KV cache") == "5,412,831 tokens, 528.6 answers of full length, each with up to 53 MiB for linear attention"
    assert row(lines, "a publish") == "4.02 GB in 73,410 tensors to each node, 28 s"
    assert row(lines, "minutes a step").startswith("about 40 = ")


def test_the_plan_of_full_fine_tuning(flash):
    code, lines = plan(flash, "--recompute", "full", recipe=FULL)
    assert (code, lines[-1]) == (0, "plan: OK"), lines[-5:]
    assert row(lines, "model") == "313.3B parameters, all trained"
    assert row(lines, "a GPU in an update").startswith("114 GiB: weights 22.4, gradients 44.6, optimizer 18.3, activations 3.5, ")
    assert row(lines, "a GPU in a publish").startswith("166 GiB: ") and row(lines, "a publish").endswith(" to each node, 44 s")
    assert row(lines, "minutes a step").startswith("about 18 = ")


@pytest.mark.parametrize("recipe, card, args, refused", [
    (LORA, 267, [], []), (LORA, 178, [], []), (LORA, 178, ["--recompute", "selective"], []),
    (LORA, 139, [], ["the sampler takes 101 GiB a GPU of 97 that it may take: weights 74, CUDA graphs 14, adapter slots 7"]),
    (FULL, 178, ["--recompute", "full"], []), (FULL, 178, ["--recompute", "selective", "--precision-aware"], []),
    (FULL, 178, ["--recompute", "selective"], ["an update takes 178 GiB a GPU of 169 that it may take: activations 69"]),
    (FULL, 139, ["--recompute", "full"], ["a publish takes 139 GiB a GPU of 132 that it may take: weights 74, trainer's opt"]),
    (GSM8K, 267, [], []), (GSM8K, 267, ["--recompute", "selective"], []), (GSM8K, 178, [], []), (GSM8K, 139, [], []),
    (GSM8K, 79, [], ["an update takes 107 GiB a GPU of 75", "the sampler takes 92 GiB a GPU of 55"]),
    (GSM8K, 267, ["--recompute", "selective", "--max-tokens-per-micro-batch", "16384"],
     ["an update takes 269 GiB a GPU of 254 that it may take: activations 159, weights 80, sampler's CUDA graphs 14"])])
def test_which_cards_hold_a_published_layout(flash, recipe, card, args, refused):
    """B300, B200, H200 and, of 80 GB, H100. The published GSM8K run recomputes selectively and failed with 16,384 tokens."""
    code, lines = plan(flash, "--gpu-memory-gib", str(card), *args, recipe=recipe)
    said = [line for line in lines if line.startswith("problem: ")]
    assert len(said) == len(refused) and all(line.startswith(f"problem: {part}") for line, part in zip(said, refused)), said
    assert code == (2 if refused else 0)


def test_a_stage_may_start_on_linear_attention():
    assert size.layout_problems(FLASH, 4, 8, 5) == []
    assert size.layout_problems(FLASH, 3, 7, 2) == [
        "64 attention heads do not divide over TP 3", "64 linear attention heads do not divide over TP 3",
        "154,880 vocabulary rows do not divide over TP 3", "288 routed experts do not divide over EP 7",
        "45 layers do not divide over PP 2"]


def test_the_page_says_what_the_formulas_say():
    """results/README.md, computed anew: each row's numbers as they stand there."""
    page = (ROOT / "results" / "README.md").read_text()
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ")[1] for line in page.splitlines() if line.count(" | ") == 3}
    sampler = memory.graphs(512) + memory.CONTEXT

    def update(lora=True, **how):
        return (sum(memory.trainer(FLASH, lora=lora, recompute="selective", chunk=1024, **how).values()) + sampler) / GIB
    shared = dict(rank=32, targets=ADAPTER["targets"], experts="shared")
    gsm8k = [update(shared, tp=2, ep=8, dp=4, tokens=n, longest=1536) for n in (16384, 4096)]
    lora = [update(ADAPTER, tp=4, ep=ep, dp=4, tokens=10240, longest=10240) for ep in (8, 16)]
    full = [(sum(full_update(ep).values()) + sampler) / GIB for ep in (32, 64)]
    part = memory.trainer(FLASH, tp=4, ep=8, dp=4, lora=ADAPTER, tokens=8192, longest=10240)
    checkpoint = 16 * (part["adapter"] + 1.5 * part["optimizer"])
    for start, said in (
            ("Flash LoRA, weights", f"{part['weights'] / GIB:.1f} GiB"),
            ("Flash LoRA, a checkpoint", f"{checkpoint / 1e9:.0f} GB"),
            ("Flash full fine-tuning, a checkpoint", f"{14 * sum(size.parameters(FLASH).values()) / 2 ** 40:.1f} TiB"),
            ("Flash full fine-tuning, EP 32", "; ".join(f"{n:.0f}" for n in full)),
            ("Flash GSM8K", "; ".join(f"{n:.0f}" for n in gsm8k)), ("Flash LoRA on B200s", "; ".join(f"{n:.0f}" for n in lora))):
        found = [computed for what, computed in rows.items() if what.startswith(start)]
        assert len(found) == 1 and found[0].startswith(said), (start, said, found)
    assert 0.95 * B300 < gsm8k[0] * GIB and max(gsm8k[1], *lora) * GIB < 0.95 * B200
