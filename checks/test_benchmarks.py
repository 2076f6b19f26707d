"""The benchmark scripts run, at a size that needs no GPU, and what they compare is equal. No time is looked at."""
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from checks import weight_speed
from common import sync
from common.cli import Stop

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


@pytest.mark.parametrize("merge", [False, True])
def test_all_weights_arrive_by_every_way(tmp_path, merge):
    found = run(tmp_path, "weight_speed.py", "--bucket-gib", "0.0002", "--rounds", "1", *["--merge"] * merge)
    ways = found["ways"]
    assert set(ways) == {"card", "host", "network"} | ({"adapter"} if merge else set()) and not found["failed"]
    for way in {"card", "host", "network"}:
        row = ways[way]
        assert row["moved"][0] > 1e-3 and row["asked_twice"] == [0, 0] and row["gap_to_trainer"][0] < 2e-6
        assert row["buckets"] == 6 and len(row["seconds"]) == 1 and row["split_s"]["stage"] < row["median_s"]
        # 8 bytes of alignment and the routers' correction bias, 8 experts, are no parameters
        assert 0 <= row["bytes"] - 4 * (found["parameters"] - found["trainable"] * merge) < 64 * row["tensors"]
    if merge:
        assert ways["adapter"]["moved"][0] > 1e-3 and ways["adapter"]["bytes"] < ways["card"]["bytes"] / 2
        assert found["merged_over_adapter"]["adapter"] == 1


def test_a_publish_that_does_nothing_is_no_result(monkeypatch):
    class Nothing:
        def __getattr__(self, verb):
            return lambda *args, **kw: [{"peak": 0}]

        def score(self, tokens, n_prompt):
            return [np.zeros(3, np.float32)]

    def publish(trainer, sampler, version):
        trainer.offer(version), sampler.stage(version), sampler.commit(version)
        return {"bytes": 8, "tensors": 1}
    monkeypatch.setattr(sync, "publish", publish)
    with pytest.raises(Stop, match="by 0, the same one asked twice by 0: nothing was published"):
        weight_speed.shows(weight_speed.measure("adapter", Nothing(), Nothing(), {"tokens": [], "n_prompt": []}, iter([1, 2]), 1))


def test_rates_are_those_of_the_whole_model():
    found = weight_speed.whole_model({"bytes": 2e9, "split_s": {"offer": 0.1, "stage": 0.2, "commit": 0.01}}, merged=False)
    assert found["bytes"] == 2 * found["parameters"] and 0.97 < found["routed_experts_share"] < 0.98
    assert found["seconds"] == pytest.approx(0.31 * found["parameters"] / 1e9)
    assert found["the_plan_says_s"] == pytest.approx(2 * found["parameters"] / (599 * 2 ** 30 / 45))


def test_vllms_flash_and_transformers_agree_module_by_module(tmp_path):
    found = run(tmp_path, "flash_modules.py")
    assert found["failed"] == [] and list(found["prompts"]) == ["30", "90"]
    for prompt in found["prompts"].values():
        assert len(prompt["rows"]) == 52 and {row[1] for row in prompt["rows"]} >= {
            "embedding", "hc read for attn y", "hc write before ffn", "KDA", "MLA with indexer", "dense", "router logits",
            "chosen experts", "shared expert", "experts, vLLM's choice", "last hc write and mean", "final norm", "logits"}
        assert prompt["stand_out"] == [] and all(row[2] < 1e-6 for row in prompt["rows"])
        assert all(gap["mean"] < 5e-6 for gap in prompt["dlogp"].values())


def test_attention_at_given_picks(tmp_path):
    """What vLLM's CPU class does not record: transformers' own picks give its own attention, others another."""
    from checks import flash_modules, tiny
    tiny.flash_checkpoint(tmp_path, **tiny.FLASH_SPARSE)
    layer = flash_modules.load(tmp_path, torch.float64, "cpu").model.language_model.layers[1]
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        picks = flash_modules.picked(layer, x)
        own = flash_modules.attention(layer, x)
        assert torch.equal(flash_modules.attention(layer, x, picks.long()), own)
        assert not torch.equal(flash_modules.attention(layer, x, picks.long().clamp(max=20)), own)
    mask = flash_modules.as_mask(picks, 50)
    assert mask[10].tolist() == [True] * 11 + [False] * 39, "all that there is"
    assert mask[49].sum() == 16 + 2, "index_topk, and two of a pool of 4 that is not complete"
