"""Layouts over several ranks (gloo; with several GPUs NCCL) equal one rank, for GLM-5.3 and GLM-5.3-Flash: logprobs, gradients
(all weights, adapters), files, streamed weights, exported adapter."""
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checks import tiny

HERE = Path(__file__).resolve().parent
# ranks - TP x PP x EP; the rest is DP
GLM5P3 = ["2-2x1x1", "2-1x2x1", "2-1x1x2", "2-2x1x2", "2-1x1x1", "4-2x1x2", "4-2x2x2"]
FLASH = ["2-2x1x1", "2-1x2x1", "2-1x1x2", "2-2x1x2", "4-2x2x2"]
if torch.cuda.is_available():
    GLM5P3, FLASH = ([case for case in cases if int(case[0]) <= torch.cuda.device_count()] for cases in (GLM5P3, FLASH))
CASES = [*(f"glm5p3/{case}" for case in GLM5P3), *(f"flash/{case}" for case in FLASH)]
ALL = ["glm5p3/1-1x1x1", "flash/1-1x1x1", *CASES]


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """The folder of a case's facts; beside it are `model` and the facts of one rank alone, "1-1x1x1"."""
    root = tmp_path_factory.mktemp("parallel")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}

    @functools.cache
    def measured(name):
        tiny.checkpoint(root / name / "model", **tiny.SPARSE) if name == "glm5p3" else \
            tiny.flash_checkpoint(root / name / "model", **tiny.FLASH_SPARSE)
        cases = [case.replace("-", ":") for case in ["1-1x1x1", *(GLM5P3 if name == "glm5p3" else FLASH)]]
        done = subprocess.run([sys.executable, HERE / "parallel_worker.py", root / name / "model", root / name, *cases], env=env,
                              timeout=900 if torch.cuda.is_available() else 400, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    return lambda case: measured(case.partition("/")[0]) or root / case


def together(folder, name):
    """All ranks' tensors; those that several ranks wrote must be equal."""
    out, parts = {}, sorted(folder.glob(f"{name}-*.safetensors"))
    assert parts, f"{folder} holds no {name}-*.safetensors"
    for part in parts:
        for k, t in load_file(part).items():
            assert torch.allclose(out.setdefault(k, t), t, rtol=1e-5, atol=1e-7), f"{part}: {k} differs between ranks"
    return out


def everything(folder):
    return {k: t for f in folder.glob("*.safetensors") for k, t in load_file(f).items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("what", ["full", "shared", "each"])
def test_same_as_one_rank(facts, case, what):
    got, want = together(facts(case), what), together(facts(case).parent / "1-1x1x1", what)
    assert got.keys() == want.keys()
    for k in want:
        diff, size = (got[k] - want[k]).abs().max().item(), want[k].abs().max().item()
        if k.startswith("adapter."):
            assert diff == 0, f"{k}: exported adapters differ by {diff:.1e}"
        elif k.startswith("logprobs."):
            assert diff < 5e-5, f"{k}: logprobs differ by {diff:.1e}"          # the order of sums: up to 1.3e-5 by processor
        else:
            assert diff <= 5e-5 * max(size, 0.1), f"{k}: gradients differ by {diff:.1e}, largest is {size:.1e}"
    if what != "full":
        moved = [k for k, t in want.items() if k.startswith("grad.") and t.abs().max() > 0]
        assert len(moved) == sum(k.startswith("adapter.") for k in want), "an adapter tensor gets no gradient"


@pytest.mark.parametrize("case", ALL)
def test_checkpoint_round_trip_is_exact(facts, case):
    folder, model = facts(case), facts(case).parent / "model"
    want, saved, streamed = everything(model), everything(folder / "saved"), together(folder, "stream")
    assert want.keys() == saved.keys()
    assert streamed.keys() == {k for k in want if not k.startswith("model.visual.")}
    for k in want:
        for got in (saved[k], streamed.get(k, want[k])):
            assert got.dtype == want[k].dtype and torch.equal(got, want[k]), k
    assert (folder / "saved" / "config.json").read_text() == (model / "config.json").read_text()
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize("mode", ["shared", "each"])
def test_merged_weights_are_base_plus_b_times_a(facts, case, mode):
    """Against the exported adapter, in float64."""
    base, merged = everything(facts(case).parent / "model"), together(facts(case), f"merged-{mode}")
    exported = together(facts(case), mode).items()
    adapter = {k.removeprefix("adapter."): t.double() for k, t in exported if k.startswith("adapter.")}
    assert merged.keys() == {k for k in base if not k.startswith("model.visual.")}
    changed = 0
    for name, t in merged.items():
        path, expert = name.removeprefix("model.").removeprefix("language_model.").removesuffix(".weight"), None
        if found := re.search(r"\.experts\.(\d+)\.", path):
            path, expert = path.replace(found[0], ".experts."), int(found[1])
        a, b = adapter.get(f"{path}.lora_A"), adapter.get(f"{path}.lora_B")
        if a is None:
            assert torch.equal(t, base[name]), name
            continue
        a, b = (a[expert], b[expert]) if a.ndim == 3 else (a, b)
        torch.testing.assert_close(t.double(), base[name].double() + b @ a, rtol=1e-6, atol=1e-6, msg=name)
        changed += 1
    assert changed > 80
