"""Every fault of checks/faults.py is found where its list says, and leaves nothing behind."""
from unittest import mock

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the faults patch the CPU's classes")

from checks import faults, faults_handoff, faults_model, faults_parallel, localise  # noqa: E402


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    with mock.patch.object(localise, "adapter", lambda *_: "not asked"):         # most of the time; test_handoff.py asks it
        yield faults.Bench(tmp_path_factory.mktemp("faults"))
    faults.mpu.destroy_model_parallel()


@pytest.fixture(scope="module")
def healthy(bench):
    """(rows of the check without a fault, what both sides answer)."""
    report = bench.check()
    assert report["passed"], report["why"]
    return report["rows"], bench.state()


@pytest.mark.parametrize("fault", faults.FAULTS, ids=[f[0] for f in faults.FAULTS])
def test_it_is_found_where_the_list_says_and_leaves_nothing_behind(bench, healthy, fault):
    rows, state = healthy
    found = faults.measure(bench, {f"step {r['step']}, {r['what']}": r["mean"] for r in rows}, *fault)
    assert faults.as_expected(found), found
    if found["found"] == faults_model.UNSEEN:            # it is there all the same
        assert found["mean"] > 5 * found["healthy"] or found["tokens"] < rows[0]["n"], found
    report = bench.check()
    assert report["passed"] and bench.state() == state, report["why"]


@pytest.mark.parametrize("control", (c := faults_handoff.CONTROLS + faults_model.CONTROLS), ids=[name for name, _ in c])
def test_the_same_patch_without_its_fault_passes(bench, healthy, control):
    with control[1](bench):
        report = bench.check()
    assert report["passed"], report["why"]
    assert bench.state() == healthy[1]


def test_faults_of_several_processes_are_found_and_the_check_passes_before_and_after():
    found = faults.parallel()
    assert [f["name"] for f in found] == [f[0] for f in faults_parallel.FAULTS]
    assert all(faults.as_expected(f) for f in found), found
