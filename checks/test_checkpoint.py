"""Checkpoints on a disk that fills up, loses bytes or dies in mid-write. Two ranks in this process, torch's own optimizer."""
import json
import os
import resource
import signal
import types

import pytest
import torch

from common import checkpoint
from common.cli import Stop


class Rank:
    def __init__(self, number):
        torch.manual_seed(number)
        self.number, self.weight = number, torch.nn.Parameter(torch.randn(64, 16))
        self.adam = torch.optim.AdamW([self.weight], lr=0.1)
        self.sharded = types.SimpleNamespace(optimizer=self.adam, reload_model_params=lambda: None)

    def update(self):
        self.weight.grad = torch.randn_like(self.weight)
        self.adam.step()

    def save(self, folder):
        checkpoint.save(folder, self.number, "2 ranks", [("weight", self.weight)], self.sharded, 7)

    def restore(self, folder):
        return checkpoint.restore(folder, self.number, "2 ranks", [("weight", self.weight)], self.sharded)


class Trainer(list):
    def save(self, folder):
        for rank in self:
            rank.save(folder)


@pytest.fixture
def trainer(tmp_path):
    made = Trainer([Rank(0), Rank(1)])
    for step in range(1, 5):
        for rank in made:
            rank.update()
        checkpoint.write(tmp_path / "checkpoints", step, made, {"version": step + 3}, keep=3)
    return made


def steps(tmp_path):
    return [folder.name for folder in checkpoint.complete(tmp_path / "checkpoints")]


def test_the_newest_are_kept_and_go_on_bit_for_bit(trainer, tmp_path):
    assert steps(tmp_path) == ["step-2", "step-3", "step-4"] == sorted(os.listdir(tmp_path / "checkpoints"))
    newest = tmp_path / "checkpoints" / "step-4"
    assert checkpoint.read_state(newest) == {"step": 4, "version": 7}
    again = Rank(1)
    again.weight.data.zero_()
    assert again.restore(newest) == 7
    for rank in (trainer[1], again):
        torch.manual_seed(0)
        rank.update()
    assert torch.equal(again.weight, trainer[1].weight)


@pytest.mark.parametrize("harm", ["a bit", "its end", "its checksum", "state.json", "the state of another step"])
def test_damage_is_found_and_the_next_older_one_named_not_taken(trainer, tmp_path, harm):
    newest = tmp_path / "checkpoints" / "step-4"
    file, told = newest / "ranks" / "00001.safetensors", "ranks/00001.safetensors does not have the checksum"
    if harm == "a bit":
        raw = bytearray(file.read_bytes())
        raw[-100] ^= 4
        file.write_bytes(raw)
    elif harm == "its end":
        os.truncate(file, file.stat().st_size - 1)
    elif harm == "its checksum":
        file.with_suffix(".sha256").unlink()
    else:
        told = "state.json is not what was written"
        (newest / "state.json").write_text('{"step": 5, "version": 7}' if harm.startswith("the") else '{"step": 4, "ver')
    before = Rank(1)
    with pytest.raises(Stop, match=f"step-4 is damaged: {told}.*; delete it to resume from .*/step-3$"):
        checkpoint.read_state(newest)
        before.restore(newest)
    assert torch.equal(before.weight, Rank(1).weight)                 # nothing of it was taken
    assert steps(tmp_path)[-1] == "step-4" and Rank(1).restore(tmp_path / "checkpoints" / "step-3") == 7


def test_one_that_lost_its_state_or_was_renamed_is_none_and_written_anew(trainer, tmp_path):
    """`mv step-4 step-4.bad` takes it out of the way as deleting it does; what has no state.json does not stop its step."""
    folder = tmp_path / "checkpoints"
    os.rename(folder / "step-4", folder / "step-4.bad")
    assert steps(tmp_path) == ["step-2", "step-3"]
    (folder / "step-3" / "state.json").unlink()
    assert steps(tmp_path) == ["step-2"]
    checkpoint.write(folder, 3, trainer, {"version": 6}, keep=3)
    assert steps(tmp_path) == ["step-2", "step-3"] and checkpoint.read_state(folder / "step-3") == {"step": 3, "version": 6}
    assert sorted(os.listdir(folder)) == ["step-2", "step-3", "step-4.bad"]
    assert [Rank(i).restore(folder / "step-3") for i in (0, 1)] == [7, 7]


def test_damage_of_the_only_one(trainer, tmp_path):
    only = tmp_path / "other" / "step-9"
    checkpoint.write(only.parent, 9, trainer, {}, keep=1)
    (only / "ranks" / "00000.safetensors").write_bytes(b"")
    with pytest.raises(Stop, match="step-9 is damaged: .*; there is no older one$"):
        Rank(0).restore(only)


def test_a_full_disk_leaves_the_older_ones_and_the_run_goes_on_later(trainer, tmp_path):
    """The system's own error: no file of this process may grow beyond 4 KiB, as on a disk without room."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(Stop, match=r"ranks/00000.safetensors could not be written \(.*(File too large|space).*\): "
                                       "the checkpoints before it are whole, resume from them once there is room"):
            checkpoint.write(tmp_path / "checkpoints", 5, trainer, {}, keep=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-2", "step-3", "step-4"]
    assert Rank(0).restore(tmp_path / "checkpoints" / "step-4") == 7
    checkpoint.write(tmp_path / "checkpoints", 5, trainer, {}, keep=3)
    assert steps(tmp_path) == ["step-3", "step-4", "step-5"]


@pytest.mark.parametrize("call", ["fsync", "rename", "replace"])
def test_no_space_at_any_later_moment_leaves_the_older_ones(trainer, tmp_path, monkeypatch, call):
    real, calls = getattr(os, call), []
    total = {"fsync": 9, "rename": 1, "replace": 3}[call]
    for n in range(total):
        monkeypatch.setattr(os, call, lambda *a, n=n: calls.append(a) or (real(*a) if len(calls) != n + 1 else _full()))
        if call == "fsync" and n == total - 1:                        # of the folder, after the rename: it may be there
            break
        calls.clear()
        with pytest.raises((Stop, OSError), match="No space left on device"):
            checkpoint.write(tmp_path / "checkpoints", 5, trainer, {}, keep=3)
        assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-2", "step-3", "step-4"], n
    monkeypatch.undo()
    checkpoint.write(tmp_path / "checkpoints", 5, trainer, {"version": 8}, keep=3)
    assert checkpoint.read_state(tmp_path / "checkpoints" / "step-5")["version"] == 8


def _full():
    raise OSError(28, "No space left on device")


def test_all_is_on_disk_before_it_has_its_name(trainer, tmp_path, monkeypatch):
    """Every file and every folder of a checkpoint is synced before the rename, the folder around it after."""
    order, fsync, rename, replace = [], os.fsync, os.rename, os.replace

    def path(fd):
        return os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path / "checkpoints").replace(f".{os.getpid()}", "")
    monkeypatch.setattr(os, "fsync", lambda fd: order.append(path(fd)) or fsync(fd))
    monkeypatch.setattr(os, "rename", lambda *a: order.append(f"rename to {a[1].name}") or rename(*a))
    monkeypatch.setattr(os, "replace", lambda *a: replace(*a))
    checkpoint.write(tmp_path / "checkpoints", 5, trainer, {}, keep=9)
    at = order.index("rename to step-5")
    files = {f".step-5/ranks/{name}" for name in ("00000.safetensors", "00001.safetensors", ".00000.sha256", ".00001.sha256")}
    assert {*files, ".step-5/ranks", ".step-5/.state.json", ".step-5"} == set(order[:at]) and order[at + 1:] == ["."]


def test_what_a_killed_run_left_is_cleared_and_a_missing_part_refused(trainer, tmp_path):
    (tmp_path / "checkpoints" / ".step-9" / "ranks").mkdir(parents=True)
    one = Trainer([trainer[0], trainer[1]])
    one.save = lambda folder: trainer[0].save(folder)                 # rank 1 wrote to a disk of its own
    with pytest.raises(Stop, match="has the parts of 1 of 2 trainer ranks: runs/ must be on a file system that all nodes share"):
        checkpoint.write(tmp_path / "checkpoints", 5, one, {}, keep=3)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-2", "step-3", "step-4"]
    assert json.loads((tmp_path / "checkpoints" / "step-4" / "state.json").read_text())["step"] == 4
