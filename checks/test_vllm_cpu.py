"""vLLM on CPU against transformers: float32 log-probabilities of prompt and sampled tokens, sparse and dense, with every kind of adapter.

    python -m pytest checks/test_vllm_cpu.py            # 2 minutes: three engines, one after the other
"""
import gc
import json
import os
import types

import pytest

from common import vllm_cpu
from common.cli import Stop

if not os.environ.get("CUDA_VISIBLE_DEVICES"):
    os.environ.update(vllm_cpu.ENV)

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoModelForCausalLM, GlmMoeDsaConfig, GlmMoeDsaForCausalLM  # noqa: E402

RANK, ALPHA, TOPK = 8, 16, 24
FAMILIES = {
    "attention": ["self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.o_proj"],
    "kv_b": ["self_attn.kv_b_proj"],
    "dense": ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"],
    "shared": ["mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"],
    "routed": [f"mlp.experts.{e}.{p}_proj" for e in range(8) for p in ("gate", "up", "down")],
}
FAMILIES["all"] = sum(FAMILIES.values(), [])
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU classes stand aside where vLLM drives a GPU")


def make_checkpoint(folder, dtype=torch.float32, **changes):
    """A random GLM-5.3 with one dense layer, and a layer that takes over the selection of the one below."""
    torch.manual_seed(0)
    model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**{**dict(
        vocab_size=400, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=4, first_k_dense_replace=1,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1,
        routed_scaling_factor=2.5, norm_topk_prob=True, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=64, qk_rope_head_dim=32,
        v_head_dim=64, index_topk=TOPK, index_head_dim=64, index_n_heads=32, indexer_types=["full", "full", "full", "shared"],
        max_position_embeddings=512, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}, initializer_range=0.05,
        scoring_func="sigmoid", topk_method="noaux_tc",
        rms_norm_eps=1e-6,                        # transformers fixes the low-rank norms to this; vLLM and megatron-core take rms_norm_eps
        bos_token_id=2, eos_token_id=1, pad_token_id=0), **changes}))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.05, 0.05)          # else the bias could be dropped unnoticed
    with torch.no_grad():
        model.lm_head.weight.mul_(4)              # else every distribution is flat and hides mistakes
    model.to(dtype).save_pretrained(folder)
    return str(folder)


def make_adapter(folder, modules, seed):
    """A PEFT folder for the modules in every layer that has them, and {HF module: B A alpha / rank}."""
    g, tensors, deltas = torch.Generator().manual_seed(seed), {}, {}
    shapes = {n.removesuffix(".weight"): p.shape for n, p in GlmMoeDsaForCausalLM(GlmMoeDsaConfig.from_pretrained(folder)).named_parameters()}
    for layer in range(4):
        for module in modules:
            path = f"model.layers.{layer}.{module}"
            if ".experts." in path:
                base, e, kind = path.rsplit(".", 2)
                if f"{base}.gate_up_proj" not in shapes:
                    continue
                hidden, width = shapes[f"{base}.down_proj"][1:]
                out, inp = (hidden, width) if kind == "down_proj" else (width, hidden)
            elif path in shapes:
                out, inp = shapes[path]
            else:
                continue
            a, b = torch.randn(RANK, inp, generator=g) / inp ** 0.5, torch.randn(out, RANK, generator=g) * 0.1
            tensors |= {f"base_model.model.{path}.lora_A.weight": a, f"base_model.model.{path}.lora_B.weight": b}
            deltas[path] = b @ a * (ALPHA / RANK)
    target = os.path.join(folder, f"adapter-{seed}")
    os.makedirs(target)
    save_file(tensors, f"{target}/adapter_model.safetensors")
    kinds = sorted({m.split(".")[-1] for m in modules})
    with open(f"{target}/adapter_config.json", "w") as f:
        json.dump(dict(peft_type="LORA", r=RANK, lora_alpha=ALPHA, target_modules=kinds, bias="none", task_type="CAUSAL_LM"), f)
    return target, deltas


def reference(folder, sequences, deltas=None, dtype=torch.float32):
    """transformers' log-probability of every token after the first, for each sequence, with the adapter merged into the weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for path, delta in (deltas or {}).items():
            if ".experts." not in path:
                weights[f"{path}.weight"] += delta
                continue
            base, e, kind = path.rsplit(".", 2)
            if kind == "down_proj":
                weights[f"{base}.down_proj"][int(e)] += delta
            else:
                half = slice(0, len(delta)) if kind == "gate_proj" else slice(len(delta), None)
                weights[f"{base}.gate_up_proj"][int(e), half] += delta
        logits = [model(torch.tensor([s])).logits[0].float().log_softmax(-1) for s in sequences]
    return [lp[:-1].gather(1, torch.tensor(s[1:]).unsqueeze(1)).squeeze(1) for lp, s in zip(logits, sequences)]


def prompts(*lengths, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [{"prompt_token_ids": torch.randint(3, 400, (n,), generator=g).tolist()} for n in lengths]


def answer(llm, asked, new=12, score_prompt=True, adapter=None):
    """Returns [(token ids of prompt and answer, log-probabilities of the last len() tokens)] and vLLM's outputs."""
    from vllm import SamplingParams
    params = [SamplingParams(max_tokens=new, temperature=1.0, seed=i, ignore_eos=True, logprobs=0, detokenize=False,
                             prompt_logprobs=0 if score_prompt else None) for i in range(len(asked))]
    outputs = llm.generate(asked, params, use_tqdm=False, lora_request=adapter)
    answers = []
    for out in outputs:
        ids, new_ids = list(out.prompt_token_ids), list(out.outputs[0].token_ids)
        known = [row[t].logprob for row, t in zip(out.prompt_logprobs[1:], ids[1:])] if score_prompt else []
        answers.append((ids + new_ids, torch.tensor(known + [row[t].logprob for row, t in zip(out.outputs[0].logprobs, new_ids)])))
    return answers, outputs


def gap(answers, expected):
    """Largest |difference| of log-probabilities; expected covers every token after the first, the answers at least the last ones."""
    return max((lp - e[-len(lp):]).abs().max().item() for (_, lp), e in zip(answers, expected))


def start(folder, **changes):
    from vllm import LLM
    return LLM(**{**dict(model=folder, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=16, max_num_batched_tokens=64, enable_lora=True,
                         max_lora_rank=RANK, max_loras=2, max_cpu_loras=8), **vllm_cpu.engine_args("float32"), **changes})


def stop(llm):
    """End an engine that lives in this process, so that the next one can start."""
    from vllm.distributed import cleanup_dist_env_and_memory
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("glm"))


@pytest.fixture(scope="module")
def adapters(folder):
    return {name: make_adapter(folder, modules, seed) for seed, (name, modules) in enumerate(FAMILIES.items(), 1)}


@pytest.fixture(scope="module")
def llm(folder):
    """Longest sequence beyond index_topk: the sparse path. 64 tokens a step: a prompt of 100 arrives in pieces, beside decoding requests."""
    llm = start(folder)
    yield llm
    stop(llm)


# shorter than index_topk 24, crossing it while decoding, beyond it, and over several steps and cache blocks (of 32)
LENGTHS = (2, 5, 11, 17, 22, 24, 25, 40, 64, 100, 150)


def request(adapters, name):
    from vllm.lora.request import LoRARequest
    return LoRARequest(name, 1 + list(FAMILIES).index(name), adapters[name][0])


def test_base_model_sparse_and_dense(llm, folder):
    answers, _ = answer(llm, prompts(*LENGTHS))
    ids = [a[0] for a in answers]
    assert gap(answers, reference(folder, ids)) < 1e-5
    # the same tokens with every key selected: the test above could not pass without the indexer
    dense = make_dense(folder)
    assert gap(answers, reference(dense, ids)) > 0.05
    short = [(a, e) for a, e in zip(answers, reference(dense, ids)) if len(a[0]) <= TOPK]
    assert len(short) == 3 and gap(*zip(*short)) < 1e-5


def make_dense(folder):
    target = f"{folder}-dense"
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, index_topk=4096).save_pretrained(target)
    return target


def test_only_short_sequences(llm, folder):
    answers, _ = answer(llm, prompts(3, 6, 9, 12, seed=1))
    assert gap(answers, reference(folder, [a[0] for a in answers])) < 1e-5


def test_prefix_cache(llm, folder):
    asked = prompts(70, 100, seed=2)
    first, _ = answer(llm, asked, score_prompt=False)
    answers, outputs = answer(llm, asked, score_prompt=False)
    assert [o.num_cached_tokens for o in outputs] == [64, 96]
    assert [a[0] for a in answers] == [a[0] for a in first], "a seed means the same whether the prompt came in pieces or from the cache"
    assert gap(answers, reference(folder, [a[0] for a in answers])) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_adapter(llm, folder, adapters, family):
    answers, _ = answer(llm, prompts(9, 30, 70, seed=3), adapter=request(adapters, family))
    ids = [a[0] for a in answers]
    assert gap(answers, reference(folder, ids, adapters[family][1])) < 1e-5
    assert gap(answers, reference(folder, ids)) > 0.01, "the adapter changes nothing"


def test_all_slots_taken_beside_base_requests(llm, folder, adapters):
    names = ["routed", None, "all", None, "all", "routed"]
    answers, _ = answer(llm, prompts(5, 10, 15, 40, 40, 90, seed=4), adapter=[n and request(adapters, n) for n in names])
    for name in set(names):
        mine = [a for a, n in zip(answers, names) if n == name]
        assert gap(mine, reference(folder, [a[0] for a in mine], name and adapters[name][1])) < 1e-5, name


def test_expert_weights_stay_in_checkpoint_layout(llm, folder):
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    ours = dict(model.named_parameters())
    for layer in (1, 3):
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model.layers[layer].mlp.experts
        found = {n.split(".")[-1]: p for n, p in ours.items() if f"layers.{layer}.mlp.experts." in n}
        assert torch.equal(found["w13_weight"], theirs.gate_up_proj) and torch.equal(found["w2_weight"], theirs.down_proj)
