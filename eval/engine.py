"""One vLLM engine for any model, in a process of its own: requests go in, finished samples come out as they finish."""
import os

from common.cli import Stop

# with max_tokens, temperature and top_p all that shapes the distribution which is sampled from; vLLM's defaults, said aloud
NEUTRAL = {"top_k": -1, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}


class Engine:
    def __init__(self, model, *, glm, cpu, dtype, kv_cache_dtype, tp, max_model_len, max_num_seqs, gpu_memory_utilization,
                 cpu_cache_gb, sampling, adapter=None, lora_rank=0):
        """model, adapter: folders; glm: it is a GLM-5.3; sampling: arguments of vLLM's SamplingParams but the seed."""
        import torch

        from common import vllm_cpu
        if torch.cuda.is_available() == cpu:
            raise Stop("a GPU is there, but this engine was asked for without one" if cpu else "no GPU is there for this engine")
        if cpu:
            os.environ.update(vllm_cpu.ENV)                  # before vllm is imported
        import vllm
        from vllm.lora.request import LoRARequest
        args = dict(model=str(model), dtype=dtype, seed=0, tensor_parallel_size=tp, max_model_len=max_model_len,
                    max_num_seqs=max_num_seqs, max_num_batched_tokens=max(max_model_len, 2048), enable_prefix_caching=True,
                    worker_extension_cls="eval.engine.Placed")
        if adapter:
            args |= dict(enable_lora=True, max_lora_rank=lora_rank, max_loras=1, max_cpu_loras=1)
        if tp > 1:                                           # as the recipes' sampler, for the same reasons
            args |= dict(distributed_executor_backend="mp", enable_expert_parallel=glm, disable_custom_all_reduce=True)
        if cpu:
            args |= vllm_cpu.engine_args(dtype) | dict(kv_cache_memory_bytes=cpu_cache_gb << 30)
            if not glm:
                # vLLM's own worker: ours, which is GLM's, mends the sampling of a prompt that arrives in pieces; so no pieces
                args |= dict(worker_cls="auto", enable_chunked_prefill=False)
        else:
            args |= dict(gpu_memory_utilization=gpu_memory_utilization, kv_cache_dtype=kv_cache_dtype)
        try:
            self.llm = vllm.LLM(**args)
        except ValueError as error:
            raise Stop(f"vLLM does not serve {model}: {' '.join(str(error).split())[:400]}") from error
        self.engine, self.request = self.llm.llm_engine, LoRARequest("adapter", 1, str(adapter)) if adapter else None
        self.served = {"dtype": str(self.llm.model_config.dtype).removeprefix("torch."),
                       "kv_cache_dtype": self.engine.vllm_config.cache_config.cache_dtype}
        if self.served != {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype}:
            raise Stop(f"the engine was asked for {dtype} and a KV cache of {kv_cache_dtype} and serves {self.served}")
        if adapter:
            self.engine.add_lora(self.request)
            for lost in self.llm.collective_rpc("without_module", args=(1,)):
                if lost:
                    raise Stop(f"vLLM puts {len(lost)} adapters of {adapter} nowhere, where they change nothing; first {lost[0]}")
        self.params = lambda seed: vllm.SamplingParams(
            seed=seed, detokenize=False, output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY, **NEUTRAL, **sampling)

    def about(self):
        """Where this engine runs."""
        import platform

        import torch
        if torch.cuda.is_available():
            return {"node": platform.node(), "device": torch.cuda.get_device_name(), **self.served}
        with open("/proc/cpuinfo") as f:
            names = [line.partition(":")[2].strip() for line in f if line.startswith("model name")]
        return {"node": platform.node(), "device": names[0] if names else platform.machine(), **self.served}

    def step(self, new):
        """Take on `new` requests, (key, prompt's token ids, seed) each, and work until any answer is finished; returns those that
        are: (key, token ids with the one that ended it, finish reason)."""
        for key, tokens, seed in new:
            self.engine.add_request(key, {"prompt_token_ids": tokens}, self.params(seed), lora_request=self.request)
        done = []
        while not done and self.engine.has_unfinished_requests():
            done = [(out.request_id, list(out.outputs[0].token_ids), out.outputs[0].finish_reason)
                    for out in self.engine.step() if out.finished]
        return done


class Placed:
    """A verb for collective_rpc, on every rank of an engine."""

    def without_module(self, lora):
        """The adapters of a loaded folder that vLLM has put nowhere."""
        manager = self.model_runner.lora_manager._adapter_manager
        loaded = {name.removesuffix(".base_layer") for name in manager._registered_adapters[lora].loras}
        return sorted(loaded - set(manager.modules))
