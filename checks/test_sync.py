"""The hand-off's own parts, without engines: bundles, checksums, tickets, and who is told what when a publish fails."""
import errno
import os

import pytest
import torch

from checks.local import Local
from common import sync
from common.cli import Stop


def tensors():
    g = torch.Generator().manual_seed(0)
    return {"layers.0.self_attn.o_proj.lora_A": torch.randn(8, 33, generator=g).bfloat16(),
            "layers.0.self_attn.o_proj.lora_B": torch.randn(5, 8, generator=g),
            "layers.1.mlp.experts.up_proj.lora_A": torch.randn(4, 8, 16, generator=g)}


def packed(version=3):
    return sync.pack(tensors(), version=version, base="abc", rank=8, experts="each")


def test_a_bundle_comes_back_bit_for_bit_and_its_header_survives_json():
    header, flat = packed()
    back = sync.unpack(sync.Header.from_json(header.to_json()), flat)
    assert list(back) == list(tensors())
    for key, t in tensors().items():
        assert back[key].dtype == t.dtype and torch.equal(back[key], t)
    assert sync.Header.from_json(header.to_json()).fingerprint == header.fingerprint


@pytest.mark.parametrize("change", ["one bit", "two elements swapped", "two rows swapped", "sign of a zero", "shifted by one"])
def test_checksum_sees(change):
    t = torch.arange(1000, dtype=torch.float32).view(10, 100)
    u = t.clone()
    if change == "one bit":
        u.view(torch.int32)[3, 3] ^= 1
    elif change == "two elements swapped":
        u[0, 1], u[0, 2] = t[0, 2], t[0, 1]
    elif change == "two rows swapped":
        u[[2, 7]] = t[[7, 2]]
    elif change == "sign of a zero":
        u[0, 0] = -0.0
    else:
        u = t.flatten().roll(1).view(10, 100)
    assert sync.checksum(u) != sync.checksum(t)
    assert sync.checksum(t) == sync.checksum(t.t().contiguous().t()), "the layout in memory must not count"


def test_checksum_does_not_depend_on_the_piece_size():
    t = torch.randn(1001, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert sync.checksum(t, piece=7) == sync.checksum(t)


def test_a_damaged_or_short_buffer_is_refused():
    header, flat = packed()
    flat[header.entries[1].offset] ^= 1
    with pytest.raises(Stop, match="arrived damaged: layers.0.self_attn.o_proj.lora_B"):
        sync.unpack(header, flat)
    with pytest.raises(Stop, match=rf"{header.nbytes - 64} of {header.nbytes} bytes"):
        sync.unpack(header, packed()[1][:-64])


def test_shared_memory_carries_the_bytes_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sync.SharedMemory, "folder", tmp_path)
    header, flat = packed()
    memory = sync.SharedMemory()
    ticket = memory.offer(flat)
    assert os.stat(ticket["path"]).st_mode & 0o777 == 0o600
    got, let_go = sync.take(ticket)
    memory.release()
    assert torch.equal(got, flat) and list(tmp_path.iterdir()) == []
    let_go()
    with pytest.raises(Stop, match="is gone"):
        sync.take(ticket)


def test_a_full_shared_memory_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sync.SharedMemory, "folder", tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(Stop, match=r"bytes does not fit .*: [\d,]+ bytes are free \(No space left on device\)"):
        sync.SharedMemory().offer(packed()[1])
    assert list(tmp_path.iterdir()) == []


class Trainer:
    def __init__(self, node="here", tensor_scale=1.0):
        self.node_, self.scale, self.released = node, tensor_scale, 0

    def offer(self, version):
        scaled = {k: t * self.scale for k, t in tensors().items()}
        header, _ = sync.pack(scaled, version=version, base="abc", rank=8, experts="each")
        return {"node": self.node_, "fingerprint": header.fingerprint, "header": header.to_json(), "ticket": {"way": "none"}}

    def release(self):
        self.released += 1


class Sampler:
    def __init__(self, fail=False, holds=None):
        self.version, self.staged, self.fail, self.holds = 0, None, fail, holds

    def node(self):
        return "here"

    def stage(self, header, ticket):
        if self.fail:
            raise Stop("rank 0: no memory")
        self.staged = sync.Header.from_json(header)

    def commit(self, version):
        self.version, staged = version, self.staged
        return [self.holds or staged.fingerprint]

    def abort(self, version):
        self.staged = None


def test_a_publish_reaches_every_engine_and_frees_the_buffer():
    trainer, a, b = Trainer(), Sampler(), Sampler()
    info = sync.publish(Local(trainer), Local(a, b), 5)
    assert (a.version, b.version, info["ranks"], info["tensors"], trainer.released) == (5, 5, 2, 3, 1)


def test_one_engine_that_cannot_stage_leaves_the_old_version_everywhere():
    trainer, a, b = Trainer(), Sampler(), Sampler(fail=True)
    with pytest.raises(Stop, match="version 5 was not published, the samplers keep the version before it: rank 0: no memory"):
        sync.publish(Local(trainer), Local(a, b), 5)
    assert (a.version, b.version, a.staged, trainer.released) == (0, 0, None, 1)


def test_a_rank_that_holds_something_else_stops_the_run():
    with pytest.raises(Stop, match="1 of 2 sampler ranks hold 0123, the trainer sent"):
        sync.publish(Local(Trainer()), Local(Sampler(), Sampler(holds="0123")), 5)


def test_replicas_that_differ_and_a_sampler_without_a_trainer_on_its_node_are_refused():
    with pytest.raises(Stop, match="2 replicas hold different adapters"):
        sync.publish(Local(Trainer(), Trainer("there", 2.0)), Local(Sampler()), 5)
    with pytest.raises(Stop, match="no trainer rank on the sampler's node here"):
        sync.publish(Local(Trainer("there")), Local(Sampler()), 5)


def test_base_fingerprint_sees_config_header_and_weights(tmp_path):
    from safetensors.torch import save_file

    def folder(name, config="{}", value=1.0, key="a"):
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text(config)
        save_file({key: torch.full((64, 64), value)}, path / "model.safetensors")
        return sync.base_fingerprint(path)
    one = folder("one")
    assert folder("same") == one
    assert len({one, folder("config", '{"x": 1}'), folder("value", value=2.0), folder("key", key="b")}) == 4
