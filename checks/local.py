"""Trainer and sampler in the test's own process, behind the same interface as cluster.Group: no Ray, so a test can
reach inside."""
import os
import sys

from common.receive import Receiver, answered


def free_worker():
    """Take the receiver out of vLLM's worker class: vLLM mixes it in for good and refuses another one beside it. The engines that
    had it are of no use any more."""
    for module, name in (("common.vllm_cpu.worker", "CPUWorker"), ("vllm.v1.worker.gpu_worker", "Worker")):
        if module in sys.modules:
            worker = getattr(sys.modules[module], name)
            worker.__bases__ = tuple(b for b in worker.__bases__ if not issubclass(b, Receiver))


def memory():
    """Bytes in use: of this process, or on a GPU of all processes there."""
    import torch
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return total - free
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Worker(Receiver):
    """A sampler's worker whose GPU can be filled up."""

    @answered
    def fill(self):
        import torch
        torch.cuda.empty_cache()
        self.filling = []
        for size in (1 << 30, 1 << 24, 1 << 20):
            try:
                while True:
                    self.filling.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                pass
        return {}

    @answered
    def empty(self):
        import torch
        del self.filling
        torch.cuda.empty_cache()
        return {}


class Local:
    def __init__(self, *members):
        self.actors = members

    def __len__(self):
        return len(self.actors)

    def __getattr__(self, verb):
        if verb.startswith("_"):
            raise AttributeError(verb)
        return lambda *args, **kw: [getattr(m, verb)(*args, **kw) for m in self.actors]

    def each(self, verb, arguments):
        return [getattr(m, verb)(*args) for m, args in zip(self.actors, arguments)]
