"""The worker class handed to vLLM as worker_cls: importing it registers the CPU classes in whatever process vLLM starts."""
from vllm.v1.worker.cpu_worker import CPUWorker as VllmCPUWorker

from common import vllm_cpu

vllm_cpu.install()


class CPUWorker(VllmCPUWorker):
    pass
