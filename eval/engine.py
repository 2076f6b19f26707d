"""One vLLM engine for any model, in a process of its own: requests go in, finished samples come out as they finish."""
import itertools
import os

from common.cli import Stop

# with max_tokens, temperature and top_p all that shapes the distribution which is sampled from; vLLM's defaults, said aloud
NEUTRAL = {"top_k": -1, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}

GLM = ("glm_moe_dsa", "glm5_next")                           # GLM-5.3 and GLM-5.3-Flash

ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}    # of engines on a GPU; the CPU's are common.vllm_cpu.ENV


class Engine:
    def __init__(self, model, *, model_type, cpu, dtype, kv_cache_dtype, tp, max_model_len, max_num_seqs, gpu_memory_utilization,
                 cpu_cache_gb, sampling, adapter=None, lora_rank=0):
        """model, adapter: folders; model_type: config.json's; sampling: arguments of vLLM's SamplingParams but the seed."""
        import torch

        from common import vllm_cpu
        if torch.cuda.is_available() == cpu:
            raise Stop("a GPU is there, but this engine was asked for without one" if cpu else "no GPU is there for this engine")
        if cpu:
            os.environ.update(vllm_cpu.ENV)                  # before vllm is imported
        import vllm
        glm, flash = model_type in GLM, model_type == "glm5_next"
        args = dict(model=str(model), dtype=dtype, seed=0, tensor_parallel_size=tp, max_model_len=max_model_len,
                    max_num_seqs=max_num_seqs, max_num_batched_tokens=max(max_model_len, 2048),
                    enable_prefix_caching=not (cpu and flash), worker_extension_cls="eval.engine.Placed")
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
            # vLLM has no word for float32; its "auto" is fp8 for GLM-5.3 on Blackwell, which the check below finds
            args |= dict(gpu_memory_utilization=gpu_memory_utilization, worker_cls="common.all_reduce.Worker",
                         kv_cache_dtype="auto" if kv_cache_dtype == "float32" else kv_cache_dtype)
            if flash:                                        # as the recipes' sampler
                args |= dict(worker_cls="common.vllm_flash.Worker", limit_mm_per_prompt={"image": 0, "video": 0})
        try:
            self.llm = vllm.LLM(**args)
        except ValueError as error:
            raise Stop(f"vLLM does not serve {model}: {' '.join(str(error).split())[:400]}") from error
        self.engine, self.request, self.adapters = self.llm.llm_engine, None, 0
        if flash:
            from common.vllm_flash import whole_blocks
            whole_blocks(self.engine.vllm_config)
        served = str(self.llm.model_config.dtype).removeprefix("torch.")
        cache = self.engine.vllm_config.cache_config.cache_dtype          # "auto" here: the model's own
        asked, self.served = (dtype, kv_cache_dtype), (served, served if cache == "auto" else cache)
        if self.served != asked:
            raise Stop(f"asked for {asked[0]} with a KV cache in {asked[1]}, the engine serves {' and '.join(self.served)}")
        if adapter:
            self.use(adapter)
        self.params = lambda seed: vllm.SamplingParams(
            seed=seed, detokenize=False, output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY, **NEUTRAL, **sampling)

    def use(self, adapter):
        """Answer with a PEFT folder's adapter from now on."""
        from vllm.lora.request import LoRARequest
        self.adapters += 1                                   # vLLM takes one that it knows by number for the same
        self.request = LoRARequest(f"adapter-{self.adapters}", self.adapters, str(adapter))
        self.engine.add_lora(self.request)
        for lost in self.llm.collective_rpc("without_module", args=(self.adapters,)):
            if lost:
                raise Stop(f"vLLM puts {len(lost)} adapters of {adapter} nowhere, where they change nothing; first {lost[0]}")

    def about(self):
        """Where this engine runs, and what it serves."""
        import platform

        from vllm.platforms import current_platform
        device = current_platform.get_device_name()
        if current_platform.is_cpu():
            with open("/proc/cpuinfo") as f:
                device = next((line.partition(":")[2].strip() for line in f if line.startswith("model name")), platform.machine())
        return {"node": platform.node(), "device": device, "dtype": self.served[0], "kv_cache_dtype": self.served[1]}

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


def answers(engines, work, at_once):
    """Yield (key, token ids, finish reason) of every request in `work`, (key, token ids, seed) each, in the order in which they
    finish. Every engine holds `at_once` requests. An engine that dies is Stop, after what the others have finished."""
    import ray
    work, waiting = iter(work), {}

    def ask(i, held, n):
        new = list(itertools.islice(work, n))
        if held + len(new):
            waiting[engines.actors[i].call.remote("step", ((new,), {}))] = i, held + len(new)
    for i in range(len(engines)):
        ask(i, 0, at_once)
    while waiting:
        (ready, *_), _ = ray.wait(list(waiting))
        i, held = waiting.pop(ready)
        try:
            found = ray.get(ready)
        except ray.exceptions.RayActorError as error:
            for other in ray.wait(list(waiting), num_returns=len(waiting), timeout=0)[0] if waiting else ():
                yield from ray.get(other)
            reason = str(error).strip().splitlines()[-1].strip()
            raise Stop(f"engine {i} died ({reason}); what had finished is kept, the same command goes on from there") from error
        ask(i, held - len(found), len(found))                # before the answers are graded: the engine does not wait for that
        yield from found
