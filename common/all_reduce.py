"""Tensor-parallel sums in vLLM 0.32.0 by NCCL alone, as the trainer's are.

`disable_custom_all_reduce` switches off vLLM's own kernels only. Those of FlashInfer and torch's symmetric memory stay, another
for another number of tokens, and FlashInfer's and GLM-5.3's fused norms set up NVLink multicast at the first pass even where
VLLM_ALLREDUCE_USE_FLASHINFER is 0. By vLLM's own numbers they are worth 3 to 5 % of a sampler's speed. NCCL too may add up in
another order for another size, and may use multicast, which NCCL_NVLS_ENABLE=0 forbids.
Retired when vLLM can be told so in its arguments.
"""
import os

from vllm.distributed.device_communicators import flashinfer_all_reduce
from vllm.v1.worker.gpu_worker import Worker as VllmWorker


def by_nccl():
    """For this process, before vLLM joins its ranks."""
    os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"
    flashinfer_all_reduce._resolve_fi_ar_backend = lambda group: (None, False)               # no backend: no workspace


class Worker(VllmWorker):
    """Handed to vLLM as worker_cls where it drives GPUs."""

    def __init__(self, *args, **kwargs):
        by_nccl()
        super().__init__(*args, **kwargs)
