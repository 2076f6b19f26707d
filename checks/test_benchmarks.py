"""The benchmark scripts run, at a size that needs no GPU, and what they compare is equal. No time is looked at."""
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the scripts are run as they are meant to")


def run(tmp_path, script, *args):
    out = tmp_path / "out.json"
    found = subprocess.run([sys.executable, "-W", "ignore", ROOT / "checks" / script, "--shape", "tiny", *args, "--out", out],
                           capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(out.read_text())


def test_an_adapter_is_the_same_in_the_slots_by_every_way(tmp_path):
    found = run(tmp_path, "sync_speed.py", "--rounds", "1")
    assert set(found["seconds"]) == {"file", "alias", "ours", "network"} and found["slots_filled"] == 74
    for way in ("alias", "ours", "network"):
        assert found[f"slots_{way}_unlike_file"] == 0 and found[f"logprob_{way}_minus_file"] == [0, 0]
    assert all(moved > 1e-5 for moved in found["moves_base_by"].values())


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_the_trainer_is_measured(tmp_path, mode):
    found = run(tmp_path, "train_speed.py", "--mode", mode, "--tokens", "2048", "--micro-batch", "1024", "--rounds", "1")
    assert found["tokens_per_s"] > 0 and found["tokens"] == 2048 and len(found["update_s"]) == 1
    assert (found["trainable"] == found["parameters"]) == (mode == "full")
