"""Every fault of checks/faults.py is found where its list says, and leaves nothing behind."""
from unittest import mock

import pytest
import torch

from common.cli import Stop

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
    report = bench.check()
    assert report["passed"] and bench.state() == state, report["why"]


def test_an_answer_ends_with_a_stop_token_of_the_model(bench):
    assert bench.engine.stop_tokens == {0}               # <|endoftext|>
    real = bench.engine.llm.generate

    def generate(prompts, params, **kw):
        for p in params:
            p.allowed_token_ids = [0]
        return real(prompts, params, **kw)
    with mock.patch.object(bench.engine.llm, "generate", generate):
        answers = bench.engine.generate(bench.prompts, range(5), 8)
        assert all(a["tokens"].tolist() == [0] and not a["is_truncated"] for a in answers)
        with mock.patch.object(bench.engine, "stop_tokens", {7}), \
                pytest.raises(Stop, match=r"an answer of 1 tokens is said to be complete and ends with 0, none of .*\[7\]"):
            bench.engine.generate(bench.prompts, range(5), 8)


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
