"""Some of the faults of checks/faults_flash.py: each is found where its list says, and leaves nothing behind."""
from unittest import mock

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the faults patch the CPU's classes")

from checks import faults, faults_flash, localise  # noqa: E402
from checks.local import free_worker  # noqa: E402

SOME = ("clamp missing in the routed experts", "linear attention's state is not reset between requests",
        "linear attention's state is carried in bf16", "pools: one token off", "hyper-connections: the mixing not transposed",
        "router scores in bf16", "adapter: f_a_proj and g_a_proj exchanged",
        "adapter: experts keep rows of an older, larger rank", "prefixes are cached, states of linear attention are not")
SOME_WHOLE = ("all weights: ape: no version reaches the sampler's tensor",
              "all weights: convolutions: the changed version does not", "all weights: ape is not sent")


@pytest.fixture(scope="module", params=["an adapter", "all weights"])
def bench(request, tmp_path_factory):
    """(bench, {row: mean} of the check without a fault, what both sides answer, the faults to put in)"""
    whole = request.param == "all weights"
    with mock.patch.object(localise, "adapter", lambda *_: "not asked"):
        b = faults.Bench(tmp_path_factory.mktemp("faults"), flash=True, whole=whole)
        report = b.check()
        assert report["passed"], report["why"]
        listed = {f[0]: f for f in (faults_flash.WHOLE if whole else faults_flash.FAULTS)}
        yield b, {f"step {r['step']}, {r['what']}": r["mean"] for r in report["rows"]}, b.state(), \
            [listed[name] for name in (SOME_WHOLE if whole else SOME)]
    faults.mpu.destroy_model_parallel()
    free_worker()


def test_they_are_found_where_the_list_says_and_leave_nothing_behind(bench):
    b, healthy, state, listed = bench
    for fault in listed:
        found = faults.measure(b, healthy, *fault)
        assert faults.as_expected(found), found
        assert b.state() == state, fault[0]
    assert b.check()["passed"]


def test_the_same_patch_without_its_fault_passes(bench):
    b, healthy, state, _ = bench
    for name, put_in in faults_flash.CONTROLS if not b.whole else ():
        with put_in(b):
            report = b.check()
        assert report["passed"] and b.state() == state, (name, report["why"])


def test_a_float32_output_of_a_bf16_model_takes_its_adapter():
    """Flash's router is wrapped like every linear layer and answers in float32."""
    from common.vllm_cpu.experts import LoRA
    adapters = object.__new__(LoRA)
    adapters.in_batch = [(0, None)]
    g = torch.Generator().manual_seed(0)
    x, a, b = (torch.randn(shape, generator=g).bfloat16() for shape in ((5, 16), (1, 1, 4, 16), (1, 1, 8, 4)))
    y = torch.ones(5, 8)
    adapters.add_lora_linear(y, x, (a,), (b,), 2.0, (8,))
    want = 1 + 2 * (x @ a[0, 0].T).float() @ b[0, 0].T.float()
    assert y.dtype == torch.float32 and torch.allclose(y, want, atol=1e-5)
