"""A vLLM engine on the CPU in the test's own process, what it answers, and what transformers answers, with adapters merged."""
import contextlib
import gc
import json
import os
import re

from common import gpus, vllm_cpu

if not gpus.count():
    os.environ.update(vllm_cpu.ENV)

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from checks import tiny  # noqa: E402

RANK, ALPHA = 8, 16


def shapes(model):
    """{module under its name in the checkpoint, experts one by one: (out, in)} of transformers' model."""
    found = {}
    for name, p in model.named_parameters():
        name = re.sub(r"forget_gate\.", "", name.removesuffix(".weight"))
        if ".experts." in name:
            base, _, kind = name.rpartition(".")
            for e in range(len(p)):
                if kind == "down_proj":
                    found[f"{base}.{e}.down_proj"] = tuple(p.shape[1:])
                else:
                    found |= {f"{base}.{e}.{half}_proj": (p.shape[1] // 2, p.shape[2]) for half in ("gate", "up")}
        else:
            found[name] = tuple(p.shape)
    return found


def random_adapter(folder, modules, seed, rank=RANK, expert_rank=None):
    """{checkpoint module: (A, B)} for the modules (self_attn.q_proj, ...) in every layer that has them."""
    g, out = torch.Generator().manual_seed(seed), {}
    for path, shape in shapes(tiny.hf_model(folder)).items():
        if len(shape) == 2 and re.sub(r".*layers\.\d+\.", "", path) in modules:
            r = expert_rank if expert_rank and ".experts." in path else rank
            out[path] = torch.randn(r, shape[1], generator=g) / shape[1] ** 0.5, torch.randn(shape[0], r, generator=g) * 0.03
    return out


def make_adapter(folder, modules, seed):
    """A PEFT folder for the modules in every layer that has them, and {checkpoint module: B A alpha / rank}."""
    tensors, deltas = {}, {}
    for path, (a, b) in random_adapter(folder, modules, seed).items():
        name = path.replace(".f_b_proj", ".forget_gate.f_b_proj")           # as transformers has it; the others as the checkpoint
        tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
        deltas[path] = b @ a * (ALPHA / RANK)
    target = os.path.join(folder, f"adapter-{seed}")
    os.makedirs(target)
    save_file(tensors, f"{target}/adapter_model.safetensors")
    kinds = sorted({m.split(".")[-1] for m in modules})
    with open(f"{target}/adapter_config.json", "w") as f:
        json.dump(dict(peft_type="LORA", r=RANK, lora_alpha=ALPHA, target_modules=kinds, bias="none", task_type="CAUSAL_LM"), f)
    return target, deltas


def reference(folder, sequences, deltas=None, dtype=torch.float64):
    """transformers' log-probability of every token after the first, for each sequence, with the adapter merged into the weights.

    In float64: its float32 is 4e-6 to 8e-6 away from that itself, which would add to the sampler's own 5e-6."""
    model = tiny.hf_model(folder, dtype)
    model.set_experts_implementation("eager")                             # the grouped product has no float64
    weights = {n.replace(".forget_gate.", "."): p for n, p in model.named_parameters()}
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
    return list(tiny.hf_logprobs(model, [torch.tensor(s) for s in sequences]).split([len(s) - 1 for s in sequences]))


def prompts(*lengths, seed=0):
    return [{"prompt_token_ids": s.tolist()} for s in tiny.sequences(lengths, seed)]


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
        sampled = [row[t].logprob for row, t in zip(out.outputs[0].logprobs, new_ids)]
        answers.append((ids + new_ids, torch.tensor(known + sampled)))
    return answers, outputs


def gap(answers, expected):
    """Largest |difference| of logprobs; expected covers every token after the first, the answers at least the last ones."""
    worst = max((lp - e[-len(lp):]).abs().max().item() for (_, lp), e in zip(answers, expected))
    print(f"max |dlogp| {worst:.1e} over {sum(len(lp) for _, lp in answers)} tokens")
    return worst


@contextlib.contextmanager
def engine(folder, dtype="float32", **changes):
    """A vLLM engine in this process, ended on the way out."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    settings = dict(model=folder, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=16, max_num_batched_tokens=64,
                    enable_lora=True, max_lora_rank=RANK, max_loras=2, max_cpu_loras=8)
    llm = LLM(**{**settings, **vllm_cpu.engine_args(dtype), **changes})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
