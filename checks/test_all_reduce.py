"""vLLM's tensor-parallel sums are NCCL's: what common/all_reduce.py relies on in vLLM 0.32.0."""
import inspect
import os

import torch
from vllm.distributed.device_communicators import cuda_communicator, flashinfer_all_reduce
from vllm.model_executor.layers import fused_allreduce_gemma_rms_norm as fused
from vllm.models.deepseek_v32.nvidia import model

from common import all_reduce, vllm_flash


def test_no_workspace_of_flashinfer_is_made(monkeypatch):
    """Even where it is switched off: the fused norm asks for one all the same."""
    made = []
    monkeypatch.setattr(flashinfer_all_reduce, "_create_workspace", lambda *a: made.append(a[0]))
    monkeypatch.setattr(flashinfer_all_reduce, "_node_count", lambda group: 1)
    monkeypatch.setattr(flashinfer_all_reduce, "_fi_ar_workspace_failed", False)
    monkeypatch.setattr(flashinfer_all_reduce, "_resolve_fi_ar_backend", flashinfer_all_reduce._resolve_fi_ar_backend)
    monkeypatch.setenv("VLLM_ALLREDUCE_USE_FLASHINFER", "0")
    monkeypatch.setenv("VLLM_ALLREDUCE_USE_SYMM_MEM", "1")
    ask = dict(world_size=2, rank=0, max_token_num=8, hidden_dim=64, dtype=torch.bfloat16, group=None)
    assert flashinfer_all_reduce.get_fi_ar_workspace(**ask) is None and made == ["mnnvl", "trtllm"], "vLLM's own choice"
    monkeypatch.setattr(flashinfer_all_reduce, "_fi_ar_workspace_failed", False)
    all_reduce.by_nccl()
    for get in (flashinfer_all_reduce.get_fi_ar_workspace, flashinfer_all_reduce.get_fi_ar_quant_workspace):
        assert get(**ask) is None
    assert len(made) == 2 and os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] == "0"


def test_nobody_makes_one_past_it():
    for module in (fused, model, cuda_communicator):
        source = inspect.getsource(module)
        assert "_create_workspace" not in source and "create_allreduce_fusion_workspace" not in source, module
    source = inspect.getsource(cuda_communicator)
    assert "use_torch_symm_mem = envs.VLLM_ALLREDUCE_USE_SYMM_MEM" in source and "FlashInferPcieIpc" in source
    assert issubclass(vllm_flash.Worker, all_reduce.Worker)


def test_a_worker_chooses_it_before_anything_else(monkeypatch):
    order = []
    monkeypatch.setattr(all_reduce, "by_nccl", lambda: order.append("by_nccl"))
    monkeypatch.setattr(all_reduce.VllmWorker, "__init__", lambda self, *a, **k: order.append((a, k)))
    all_reduce.Worker(1, rank=2)
    assert order == ["by_nccl", ((1,), {"rank": 2})]
