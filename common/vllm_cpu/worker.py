"""The worker class handed to vLLM as worker_cls: importing it registers the CPU classes in whatever process vLLM starts, and each
engine's configuration is checked before it loads anything. Goes when common/vllm_cpu goes.
"""
import json
from pathlib import Path

import numpy as np
from vllm.config import CompilationMode
from vllm.v1.worker.cpu_worker import CPUWorker as VllmCPUWorker

from common import replay, vllm_cpu
from common.cli import Stop
from common.hf_config import FLASH_SPOKEN, SPOKEN
from common.receive import answered

vllm_cpu.install()


# Constants in transformers, which does not write them into config.json, and for which vLLM takes another value where one is
# missing (softmax routing, no expert bias, no hyper-connections) or ends without a word of the key.
WRITTEN = {"glm_moe_dsa": {key: SPOKEN[key] for key in ("scoring_func", "topk_method")}, "glm5_next": FLASH_SPOKEN}


class CPUWorker(VllmCPUWorker):
    routes = None                                   # {request: [rows, [(tokens, MoE layers, k), ...]]} while routes are kept

    def __init__(self, vllm_config, *args, **kwargs):
        check(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    def sample_tokens(self, *args, **kwargs):
        """While a prompt arrives in pieces vLLM samples, discards, and rewinds the request's generator, which fails on CPU ("CPU
        Generator does not use offset"): put away, the generator is not advanced. Goes when vLLM's runner stops rewinding."""
        runner = self.model_runner
        generators = runner.input_batch.generators
        partial = runner.discard_request_mask.np[:runner.input_batch.num_reqs].nonzero()[0].tolist()
        away = {i: generators.pop(i) for i in partial if i in generators}
        try:
            return super().sample_tokens(*args, **kwargs)
        finally:
            generators.update(away)

    # vLLM's own enable_return_routed_experts needs its Model Runner V2, which needs Triton. Goes when that runs on the CPU.

    @answered
    def routes_start(self):
        """Keep the experts of every token from here on."""
        self.routes, self.chosen = {}, {}
        kind = replay.dtype(self.model_config.get_num_experts())
        self._capture(lambda layer: lambda ids: self.chosen.__setitem__(layer, ids.numpy().astype(kind)))
        return {}

    @answered
    def routes_stop(self):
        """{"routes": {request: (tokens that were fed, MoE layers, k)}} since routes_start."""
        self._capture(lambda layer: None)
        kept, self.routes = self.routes, None
        # vLLM's name of a request inside is the outer one with a dash and eight digits
        return {"routes": {request.rpartition("-")[0]: np.concatenate(parts) for request, (_, parts) in kept.items() if parts}}

    def _capture(self, hook):
        from vllm.model_executor.layers.fused_moe import MoERunner
        for module in self.model_runner.model.modules():
            if isinstance(module, MoERunner):
                module.router.set_capture_fn(hook(module.layer_id))

    def execute_model(self, scheduler_output):
        if self.routes is None or not scheduler_output.total_num_scheduled_tokens:
            return super().execute_model(scheduler_output)
        self.chosen.clear()
        output = super().execute_model(scheduler_output)
        rows, first = np.stack([self.chosen[layer] for layer in sorted(self.chosen)], 1), 0
        cached = scheduler_output.scheduled_cached_reqs
        computed = {r.req_id: r.num_computed_tokens for r in scheduler_output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens))
        for request in self.model_runner.input_batch.req_ids:
            n, kept = scheduler_output.num_scheduled_tokens[request], self.routes.setdefault(request, [0, []])
            # A preempted request starts over: its first rows stay, which the log-probabilities that are out already used. A token
            # that was not run (prefix cache) leaves a gap; nothing more is kept then, and the caller misses rows.
            again = kept[0] - computed[request]
            if 0 <= again < n:
                kept[1].append(rows[first + again:first + n])
                kept[0] += n - again
            first += n
        if first != len(rows):
            raise Stop(f"{len(rows)} tokens were routed, the batch's requests have {first}")
        return output


def check(vllm_config):
    """Raises Stop, with the reason in one sentence, for every setting that vLLM would accept and then answer wrongly with."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    config = model.hf_config
    ranks = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if ranks != (1, 1):
        raise Stop(f"the CPU classes run on one rank, (tensor, pipeline) parallel sizes are {ranks}; start more engines.")
    if config.model_type not in ("glm_moe_dsa", "glm5_next"):
        raise Stop(f"the CPU classes serve glm_moe_dsa and glm5_next, and {model.model} is {config.model_type}.")
    if model.use_mla:
        raise Stop("set VLLM_MLA_DISABLE=1 (common.vllm_cpu.ENV) before vLLM is imported: its CPU MLA kernels have no indexer "
                   "and ignore adapters on kv_b_proj.")
    if vllm_config.compilation_config.mode != CompilationMode.NONE:
        raise Stop(f"start the CPU engine with enforce_eager=True, not in mode {vllm_config.compilation_config.mode.name}.")
    if cache.block_size % 32 or cache.cache_dtype != "auto":
        raise Stop("the CPU cache needs a block_size divisible by 32 and kv_cache_dtype auto, "
                   f"got {cache.block_size} and {cache.cache_dtype}.")
    text = config.get_text_config()
    stored, served = str(text.dtype).removeprefix("torch."), str(model.dtype).removeprefix("torch.")
    if stored == "float32" and served != "float32":
        raise Stop(f"{model.model} is a float32 checkpoint and would be rounded to {served} without a word; "
                   "pass dtype=\"float32\" or convert it.")

    written = json.loads((Path(model.model) / "config.json").read_text())
    written = written.get("text_config", written)
    for key, value in WRITTEN[config.model_type].items():
        if written.get(key) != value:
            raise Stop(f"{model.model}/config.json must say \"{key}\": {json.dumps(value)}, as published, and says "
                       f"{json.dumps(written.get(key))}.")
    if config.model_type == "glm5_next":
        check_flash(model.model, text, cache)
    elif (rope := text.rope_parameters.get("rope_type", "default")) != "default":
        raise Stop(f"the CPU classes know the default rotary embedding only, and {model.model} has rope_type {rope}.")
    if model.max_model_len > text.index_topk and text.index_n_heads < 16:
        # a key scores exactly 0 when ReLU cuts it in every head: one in 2^heads, and ties are broken differently everywhere
        raise Stop(f"index_n_heads {text.index_n_heads} gives tied indexer scores beyond index_topk {text.index_topk}, so "
                   "sampler and trainer would select different keys; use 16 or more.")


def check_flash(folder, text, cache):
    """What vLLM reads of GLM-5.3-Flash otherwise than transformers, or not at all, and what the CPU class lacks."""
    if other := set(text.layer_types) - {"linear_attention", "indexed_attention"}:
        raise Stop(f"{folder} has layer_types {sorted(other)}, which vLLM takes for indexed_attention.")
    shared = [i for i, (kind, indexer) in enumerate(zip(text.layer_types, text.indexer_types))
              if kind == "indexed_attention" and indexer != "full"]
    if shared:
        raise Stop(f"{folder} has indexer_types {text.indexer_types[shared[0]]!r} for layer {shared[0]}, and vLLM gives every "
                   "layer an indexer of its own.")
    for key, value in {"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "qk_rope_head_dim": 0,
                       "index_kpool_always_select_tail": True}.items():
        if getattr(text, key) != value:
            raise Stop(f"{folder} has {key} {getattr(text, key)!r}, and vLLM computes {value!r}.")
    if text.linear_lower_bound is None:
        raise Stop(f"{folder} has no linear_lower_bound, and vLLM computes the decay with one.")
    if cache.block_size % text.index_kpool:
        raise Stop(f"block_size {cache.block_size} is no multiple of index_kpool {text.index_kpool}: a pool would end in another "
                   "block of the cache.")
    if cache.enable_prefix_caching:
        raise Stop("start the CPU engine of GLM-5.3-Flash with enable_prefix_caching=False: vLLM copies the states of linear "
                   "attention at a prefix's end with a Triton kernel, which the CPU lacks.")
    if cache.mamba_ssm_cache_dtype not in ("auto", "float32"):
        raise Stop(f"the recurrent state is float32, mamba_ssm_cache_dtype is {cache.mamba_ssm_cache_dtype}.")
