"""vLLM on CPU in float32 against transformers in float64: logprobs of prompt and sampled tokens, sparse and dense, every adapter.

    python -m pytest checks/test_vllm_cpu.py            # about a minute: three engines
"""
import json
import types

import pytest
import torch

from checks import tiny
from checks.vllm_engine import answer, engine, gap, make_adapter, prompts, reference
from common import vllm_cpu
from common.cli import Stop

TOPK = tiny.SPARSE["index_topk"]
LIMIT = 2e-5                                      # measured: 1e-5 at most
FAMILIES = {
    "attention": ["self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.o_proj"],
    "kv_b": ["self_attn.kv_b_proj"],
    "dense": ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"],
    "shared": ["mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"],
    "routed": [f"mlp.experts.{e}.{p}_proj" for e in range(8) for p in ("gate", "up", "down")],
}
FAMILIES["all"] = sum(FAMILIES.values(), [])
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU classes stand aside where vLLM drives a GPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = tmp_path_factory.mktemp("glm")
    tiny.checkpoint(target, **tiny.SPARSE)
    return str(target)


@pytest.fixture(scope="module")
def adapters(folder):
    return {name: make_adapter(folder, modules, seed) for seed, (name, modules) in enumerate(FAMILIES.items(), 1)}


@pytest.fixture(scope="module")
def llm(folder):
    """The sparse path. 64 tokens a step: a prompt of 100 arrives in pieces, beside requests that decode."""
    with engine(folder) as llm:
        yield llm


# shorter than index_topk 16, crossing it while decoding, beyond it, and over several steps and cache blocks (of 32)
LENGTHS = (2, 3, 4, 11, 15, 16, 17, 40, 64, 100, 150)
SHORT = range(2, 11)


def request(adapters, name):
    from vllm.lora.request import LoRARequest
    return LoRARequest(name, 1 + list(FAMILIES).index(name), adapters[name][0])


def test_base_model_sparse_and_dense(llm, folder):
    answers, _ = answer(llm, prompts(*LENGTHS))
    ids = [a[0] for a in answers]
    assert gap(answers, reference(folder, ids)) < LIMIT
    # the same tokens with every key selected: the test above could not pass without the indexer
    dense = make_dense(folder)
    assert gap(answers, reference(dense, ids)) > 0.05
    short = [(a, e) for a, e in zip(answers, reference(dense, ids)) if len(a[0]) <= TOPK]
    assert len(short) == 3 and gap(*zip(*short)) < LIMIT


def make_dense(folder):
    target = f"{folder}-dense"
    tiny.checkpoint(target, **{**tiny.SPARSE, "index_topk": 2048})
    return target


def test_only_short_sequences(llm, folder):
    answers, _ = answer(llm, prompts(2, 3, 6, 10, seed=1), new=6)
    assert gap(answers, reference(folder, [a[0] for a in answers])) < LIMIT


def test_prefix_cache(llm, folder):
    asked = prompts(70, 100, seed=2)
    first, _ = answer(llm, asked, score_prompt=False)
    answers, outputs = answer(llm, asked, score_prompt=False)
    assert [o.num_cached_tokens for o in outputs] == [64, 96]
    assert [a[0] for a in answers] == [a[0] for a in first], "a seed means the same for a prompt in pieces and from the cache"
    assert gap(answers, reference(folder, [a[0] for a in answers])) < LIMIT


@pytest.mark.parametrize("family", FAMILIES)
def test_adapter(llm, folder, adapters, family):
    answers, _ = answer(llm, prompts(9, 30, 70, seed=3), adapter=request(adapters, family))
    ids = [a[0] for a in answers]
    assert gap(answers, reference(folder, ids, adapters[family][1])) < LIMIT
    assert gap(answers, reference(folder, ids)) > 0.01, "the adapter changes nothing"


def test_all_slots_taken_beside_base_requests(llm, folder, adapters):
    names = ["routed", None, "all", None, "all", "routed"]
    answers, _ = answer(llm, prompts(5, 10, 15, 40, 40, 90, seed=4), adapter=[n and request(adapters, n) for n in names])
    for name in ("routed", "all", None):
        mine = [a for a, n in zip(answers, names) if n == name]
        assert gap(mine, reference(folder, [a[0] for a in mine], name and adapters[name][1])) < LIMIT, name


def test_expert_weights_stay_in_checkpoint_layout(llm, folder):
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    ours = dict(model.named_parameters())
    for layer in (2, 5):
        theirs = tiny.hf_model(folder).model.layers[layer].mlp.experts
        found = {n.split(".")[-1]: p for n, p in ours.items() if f"layers.{layer}.mlp.experts." in n}
        assert torch.equal(found["w13_weight"], theirs.gate_up_proj) and torch.equal(found["w2_weight"], theirs.down_proj)


def test_whole_context_within_index_topk(folder, adapters):
    """No sequence can reach index_topk: only the kernel's heads are cached. One adapter slot, and base requests beside it."""
    dense = make_dense(folder)
    with engine(dense, max_loras=1, max_num_batched_tokens=512) as llm:
        cache = llm.llm_engine.model_executor.driver_worker.model_runner.kv_caches[0]
        assert cache.shape[1] == 4, f"{cache.shape[1]} heads are cached for 4"
        who = [request(adapters, "all") if i % 2 else None for i in range(len(LENGTHS))]
        answers, _ = answer(llm, prompts(*LENGTHS, seed=5), adapter=who)
    assert gap(answers[::2], reference(dense, [a[0] for a in answers[::2]])) < LIMIT
    assert gap(answers[1::2], reference(dense, [a[0] for a in answers[1::2]], adapters["all"][1])) < LIMIT


def test_bfloat16(tmp_path_factory, adapters):
    """No further from the exact answer than transformers in bfloat16. Beyond index_topk both flip near ties of the indexer."""
    folder = tmp_path_factory.mktemp("glm-bf16")
    tiny.checkpoint(folder, dtype=torch.bfloat16, **tiny.SPARSE)
    with engine(str(folder), "bfloat16") as llm:
        for name, lengths, new in ((None, SHORT, 6), ("all", SHORT, 6), (None, (60, 100), 12), ("all", (60, 100), 12)):
            answers, _ = answer(llm, prompts(*lengths, seed=6), new, adapter=name and request(adapters, name))
            ids, deltas = [a[0] for a in answers], name and adapters[name][1]
            exact = torch.cat(reference(folder, ids, deltas))
            ours = (torch.cat([lp for _, lp in answers]) - exact).abs()
            theirs = (torch.cat(reference(folder, ids, deltas, torch.bfloat16)) - exact).abs()
            print(f"bfloat16, adapter {name}, {max(map(len, ids))} tokens: |dlogp| mid {ours.median():.4f} max {ours.max():.3f},"
                  f" transformers mid {theirs.median():.4f} max {theirs.max():.3f}")
            assert ours.median() < 1.5 * theirs.median()


@pytest.mark.parametrize("change, says", [
    ("tensor_parallel_size", "one rank"), ("pipeline_parallel_size", "one rank"), ("model_type", "serve glm_moe_dsa"),
    ("use_mla", "VLLM_MLA_DISABLE=1"), ("mode", "enforce_eager"), ("block_size", "divisible by 32"),
    ("cache_dtype", "kv_cache_dtype auto"), ("dtype", "float32 checkpoint"), ("scoring_func", "scoring_func"),
    ("topk_method", "topk_method"), ("rope_type", "rope_type yarn"), ("index_n_heads", "tied indexer scores")])
def test_every_silent_setting_is_refused(tmp_path, change, says):
    from vllm.config import CompilationMode

    from common.vllm_cpu.worker import check
    bad = dict(tensor_parallel_size=2, pipeline_parallel_size=2, model_type="llama", use_mla=True, block_size=16,
               mode=CompilationMode.VLLM_COMPILE, cache_dtype="fp8", dtype=torch.bfloat16, scoring_func=None, topk_method=None,
               rope_type="yarn", index_n_heads=4)

    def configuration(changed=None):
        def only(**settings):
            return types.SimpleNamespace(**{k: bad[k] if k == changed else v for k, v in settings.items()})
        written = only(scoring_func="sigmoid", topk_method="noaux_tc", rope_type="default")
        (tmp_path / "config.json").write_text(json.dumps(vars(written)))
        hf = only(model_type="glm_moe_dsa", index_topk=64, index_n_heads=32, rope_parameters={"rope_type": written.rope_type})
        hf.dtype, hf.get_text_config = torch.float32, lambda: hf
        return types.SimpleNamespace(
            model_config=only(hf_config=hf, use_mla=False, dtype=torch.float32, model=str(tmp_path), max_model_len=256),
            parallel_config=only(tensor_parallel_size=1, pipeline_parallel_size=1),
            cache_config=only(block_size=32, cache_dtype="auto"),
            compilation_config=only(mode=CompilationMode.NONE))

    check(configuration())
    with pytest.raises(Stop, match=says):
        check(configuration(change))


def test_refusals_reach_the_caller(folder, monkeypatch):
    with pytest.raises(Stop, match="float32 checkpoint"), engine(folder, "bfloat16"):
        pass
    monkeypatch.setenv("VLLM_MLA_DISABLE", "0")
    with pytest.raises(Stop, match="VLLM_MLA_DISABLE=1"), engine(folder):
        pass


def test_other_version_is_refused(monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.33.0")
    with pytest.raises(Stop, match="0.32.0 only and found 0.33.0"):
        vllm_cpu.install()
