"""The worker class handed to vLLM as worker_cls: importing it registers the CPU classes in whatever process vLLM starts, and each
engine's configuration is checked before it loads anything. Goes when common/vllm_cpu goes.
"""
import json
from pathlib import Path

from vllm.config import CompilationMode
from vllm.v1.worker.cpu_worker import CPUWorker as VllmCPUWorker

from common import vllm_cpu
from common.cli import Stop

vllm_cpu.install()


class CPUWorker(VllmCPUWorker):
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


def check(vllm_config):
    """Raises Stop, with the reason in one sentence, for every setting that vLLM would accept and then answer wrongly with."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    config = model.hf_config
    ranks = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if ranks != (1, 1):
        raise Stop(f"the CPU classes run on one rank, (tensor, pipeline) parallel sizes are {ranks}; start more engines.")
    if config.model_type != "glm_moe_dsa":
        raise Stop(f"the CPU classes serve glm_moe_dsa, and {model.model} is {config.model_type}.")
    if model.use_mla:
        raise Stop("set VLLM_MLA_DISABLE=1 (common.vllm_cpu.ENV) before vLLM is imported: its CPU MLA kernels have no indexer "
                   "and ignore adapters on kv_b_proj.")
    if vllm_config.compilation_config.mode != CompilationMode.NONE:
        raise Stop(f"start the CPU engine with enforce_eager=True, not in mode {vllm_config.compilation_config.mode.name}.")
    if cache.block_size % 32 or cache.cache_dtype != "auto":
        raise Stop("the CPU cache needs a block_size divisible by 32 and kv_cache_dtype auto, "
                   f"got {cache.block_size} and {cache.cache_dtype}.")
    stored, served = str(config.dtype).removeprefix("torch."), str(model.dtype).removeprefix("torch.")
    if stored == "float32" and served != "float32":
        raise Stop(f"{model.model} is a float32 checkpoint and would be rounded to {served} without a word; "
                   "pass dtype=\"float32\" or convert it.")

    # constants in transformers, which does not write them; without them vLLM takes softmax routing without the expert bias
    written = json.loads((Path(model.model) / "config.json").read_text())
    for key, value in {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}.items():
        if written.get(key) != value:
            raise Stop(f"{model.model}/config.json must say \"{key}\": \"{value}\", as published, and says {written.get(key)!r}.")
    rope = config.rope_parameters.get("rope_type", "default")
    if rope != "default":
        raise Stop(f"the CPU classes know the default rotary embedding only, and {model.model} has rope_type {rope}.")
    if model.max_model_len > config.index_topk and config.index_n_heads < 16:
        # a key scores exactly 0 when ReLU cuts it in every head: one in 2^heads, and ties are broken differently everywhere
        raise Stop(f"index_n_heads {config.index_n_heads} gives tied indexer scores beyond index_topk {config.index_topk}, so "
                   "sampler and trainer would select different keys; use 16 or more.")
