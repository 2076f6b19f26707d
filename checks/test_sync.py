"""The hand-off's own parts, without engines: bundles, checksums, tickets, and who is told what when a publish fails."""
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checks.local import Local
from common import bundle, checksum, sync
from common.cli import Stop

ROOT = Path(__file__).resolve().parent.parent


def tensors():
    g = torch.Generator().manual_seed(0)
    return {"layers.0.self_attn.o_proj.lora_A": torch.randn(8, 33, generator=g).bfloat16(),
            "layers.0.self_attn.o_proj.lora_B": torch.randn(5, 8, generator=g),
            "layers.1.mlp.experts.up_proj.lora_A": torch.randn(4, 8, 16, generator=g)}


def packed(version=3):
    return bundle.pack(tensors(), version=version, base="abc", rank=8, experts="each")


def test_a_bundle_comes_back_bit_for_bit_and_its_header_survives_json():
    header, flat = packed()
    back = bundle.unpack(bundle.Header.from_json(header.to_json()), flat)
    assert list(back) == list(tensors())
    for key, t in tensors().items():
        assert back[key].dtype == t.dtype and torch.equal(back[key], t)
    assert bundle.Header.from_json(header.to_json()).fingerprint == header.fingerprint


@pytest.mark.parametrize("change", ["one bit", "neighbours swapped", "two words swapped", "two rows swapped", "sign of a zero",
                                    "shifted by one", "signs of a column", "one bit in two words"])
def test_checksum_sees(change):
    t = torch.arange(1000, dtype=torch.float32).view(10, 100)
    u = t.clone()
    if change == "one bit":
        u.view(torch.int32)[3, 3] ^= 1
    elif change == "neighbours swapped":                    # within one 8-byte word
        u[0, 2], u[0, 3] = t[0, 3], t[0, 2]
    elif change == "two words swapped":
        u[0, :2], u[0, 2:4] = t[0, 2:4], t[0, :2]
    elif change == "two rows swapped":
        u[[2, 7]] = t[[7, 2]]
    elif change == "signs of a column":
        u[:, 1::2] *= -1
    elif change == "one bit in two words":
        u.view(torch.int32)[2:4, 5] ^= 1 << 30
    elif change == "sign of a zero":
        u[0, 0] = -0.0
    else:
        u = t.flatten().roll(1).view(10, 100)
    assert checksum.checksum(u) != checksum.checksum(t)
    assert checksum.checksum(t) == checksum.checksum(t.t().contiguous().t()), "the layout in memory must not count"


def test_checksum_does_not_depend_on_the_piece_size():
    words = torch.randint(-2**63, 2**63 - 1, (1001,), generator=torch.Generator().manual_seed(1))
    assert checksum._one(words, piece=7) == checksum._one(words) == checksum.checksum(words)


def test_checksum_against_its_formula():
    """In Python's own integers, for a size that is whole words and one that is not."""
    for t in (torch.arange(6, dtype=torch.int64) - 3, torch.tensor([1, 254, 3], dtype=torch.uint8)):
        total = 0
        for i, v in enumerate(t.tolist(), 1):
            w = i * checksum.GOLDEN % 2**64
            w = w - 2**64 if w >= 2**63 else w                       # as a signed number, for the arithmetic shift
            w = (w ^ (w >> 29)) * checksum.MIX % 2**64 | 1
            v = (v + checksum.SHIFT) % 2**64
            v = v - 2**64 if v >= 2**63 else v
            v = (v ^ (v >> 32)) * checksum.MIX % 2**64
            v = v - 2**64 if v >= 2**63 else v
            total += (v ^ (v >> 29)) * w
        assert checksum.checksum(t) % 2**64 == total % 2**64


def test_part_sums():
    t = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(2))
    misaligned = torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape)
    for layout in (t, t.transpose(1, 2).contiguous().transpose(1, 2), misaligned):
        assert checksum.part_sums([layout, t[0]], [6, 1]) == [[checksum.checksum(part) for part in t], [checksum.checksum(t[0])]]
    with pytest.raises(ValueError, match="no 7 equal parts"):
        checksum.part_sums([t], [7])


def test_the_gpu_kernel_gives_the_same_sums():
    """In Triton's interpreter; on a GPU the kernel itself."""
    program = """
import numpy
import torch
from common import checksum
g = torch.Generator().manual_seed(0)
tensors = [torch.randn(n, generator=g).to(d) for n, d in ((4, torch.bfloat16), (9000, torch.float32), (40000, torch.bfloat16))]
tensors.append(torch.randn(8, 4, 100, generator=g))
device = "cuda" if torch.cuda.is_available() else "cpu"
# slots larger than an adapter's rank: rows of A that end early, columns of B with a gap after each row
room = torch.randn(8, 64, 32, generator=g).to(device)
cases = [(t.to(device), n) for t, n in zip(tensors, (1, 1, 1, 8))] + [(room[:, :8], 8), (room[:, :, :8], 8), (room[0, :, :8], 1)]
cases += [(room[:, :8], 1), (room[:, :, :8], 1), (room[:, :8, :8], 8), (room[2:4], 2)]
real = torch.Tensor.is_cuda
torch.Tensor.is_cuda = True                                  # the table and the kernel in the interpreter too
found = [x for sums in checksum.Reader(*zip(*cases))() for x in sums]
torch.Tensor.is_cuda = real
assert found == [checksum._one(part) for t, n in cases for part in checksum._words(t, n)]
assert checksum._table(room[:, :, :1], 8) is None and checksum._table(room[:, ::2, 1:3], 8) is None
if device == "cuda":
    flat = torch.randint(0, 256, (4096,), dtype=torch.uint8, device=device)
    assert checksum.flat_sums(flat, [0, 64, 1024], [64, 800, 3072]) == checksum.checksums([flat[:64], flat[64:864], flat[1024:]])
"""
    kernel(program)


def test_parts_that_are_alike_are_compared_with_the_first_one():
    """One changed bit anywhere is a sum of its own; the others keep theirs. Triton's interpreter; on a GPU the kernel itself."""
    kernel("""
import torch
from common import checksum
device = "cuda" if torch.cuda.is_available() else "cpu"
g = torch.Generator().manual_seed(0)
new = lambda *s: torch.randn(s, generator=g).bfloat16().to(device)
shared = lambda n, *s: new(*s).expand(n, *s).clone()         # as a slot holds a tensor that n experts share
# sizes of one word, of a few blocks and one word more; rows that end early, columns with gaps, pieces of four dimensions
a, b, c = shared(3, 64, 96), shared(4, 40, 32), shared(3, 2, 16, 8)
cases = [(shared(5, 4), 5), (shared(2, 4 * 2049), 2), (a[:, :8], 3), (b[:, :, :8], 4), (c[:, :, :4], 3), (new(7, 12), 1),
         (new(3, 8), 3), (shared(33, 8), 33), (shared(2, 12), 2)]
right = lambda cases: [[checksum._one(part) for part in checksum._words(t, n)] for t, n in cases]
launched = []
many = checksum._many
checksum._many = lambda table, *args: launched.append(table.shape[1]) or many(table, *args)
real = torch.Tensor.is_cuda

def found(cases):
    launched.clear()
    torch.Tensor.is_cuda = True
    reader = checksum.Reader(*zip(*cases))
    torch.Tensor.is_cuda = real
    assert len(reader.fast) == len(cases)
    return [sums.tolist() for sums in reader()]
assert found(cases) == right(cases) and len(launched) == 2   # the parts of (3, 8) are no copies
alike = [case for i, case in enumerate(cases) if i != 6]
before = right(alike)
assert found(alike) == before and launched == [len(alike) + 1]      # (c has two pieces a part)
for i, (t, n) in enumerate(alike):
    if n > 1:
        for part, bit in [(n - 1, 1 << 14), (1, 1), (0, 1)][:3 if i == 2 else 1]:
            where = (part, *(size - 1 for size in t.shape[1:]))     # the last word of that part
            t.view(torch.int16)[where] ^= bit
            now = found(alike)
            assert now == right(alike) and [k for k, (x, y) in enumerate(zip(now, before)) if x != y] == [i]
            assert [k for k, (x, y) in enumerate(zip(now[i], before[i])) if x != y] == [part] and len(launched) == 2
            t.view(torch.int16)[where] ^= bit
assert found(alike) == before
""")


def kernel(program):
    env = {**os.environ, "PYTHONPATH": str(ROOT), **({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})}
    subprocess.run([sys.executable, "-c", program], check=True, env=env, timeout=300)


def test_one_kernel_writes_what_a_copy_for_each_tensor_writes():
    """A shared adapter to every expert's place, ranks smaller than the slot's on either side, one adapter for each expert, a long
    row; and nothing beside them. Two are not the kernel's: rows that are no whole words, another dtype."""
    kernel("""
import torch
from common import bundle, scatter
device = "cuda" if torch.cuda.is_available() else "cpu"
bf16, f32 = torch.bfloat16, torch.float32
shapes = dict(a=((8, 96), bf16), b=((96, 8), bf16), c=((5, 8, 64), bf16), d=((5, 40, 8), f32), e=((3, 5), f32),
              f=((8, 8192), f32), g=((7, 6), bf16))
g = torch.Generator().manual_seed(0)
new = lambda: {n: torch.randn(s, generator=g).to(d).to(device) for n, (s, d) in shapes.items()}
room = lambda *s, dtype=bf16: torch.full((2, *s), 9.0, dtype=dtype, device=device)
whole = dict(a=room(4, 16, 96), b=room(4, 96, 16), c=room(5, 16, 64), d=room(5, 40, 8, dtype=f32), e=room(3, 5, dtype=f32),
             f=room(1, 8, 8192, dtype=f32), g=room(7, 6, dtype=f32))
regions = {n: t[1] for n, t in whole.items()}
regions |= {"a": regions["a"][:, :8], "b": regions["b"][:, :, :8], "c": regions["c"][:, :8]}
layout, flat = bundle.lay(new())
real = torch.Tensor.is_cuda
torch.Tensor.is_cuda = True
writer = scatter.Scatter(list(regions.values()), bundle._views(layout, flat), flat)
torch.Tensor.is_cuda = real
assert writer.table.shape == (8, 1 + 1 + 5 + 5 + 1) and len(writer.rest[0]) == 2
for _ in range(2):                                           # another buffer of the same layout
    tensors = new()
    layout, flat = bundle.lay(tensors)
    writer(flat, bundle.pick)
    for n, t in tensors.items():
        assert torch.equal(regions[n], t.to(regions[n].dtype).expand(regions[n].shape)), n
for n, t in whole.items():
    assert (t == 9).sum() == t.numel() - regions[n].numel(), f"{n}: something beside its place was written"
""")


def test_a_damaged_or_short_buffer_is_refused():
    header, flat = packed()
    flat[header.entries[1].offset] ^= 1
    with pytest.raises(Stop, match="arrived damaged: layers.0.self_attn.o_proj.lora_B"):
        bundle.unpack(header, flat)
    with pytest.raises(Stop, match=rf"{header.nbytes - 64} of {header.nbytes} bytes"):
        bundle.unpack(header, packed()[1][:-64])


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

    def offer(self, version, engines):
        scaled = {k: t * self.scale for k, t in tensors().items()}
        header, _ = bundle.pack(scaled, version=version, base="abc", rank=8, experts="each")
        return {"node": self.node_, "fingerprint": header.fingerprint, "header": header.to_json(), "ticket": {"way": "none"}}

    def release(self, last=True, failed=False):
        self.released += 1


class Sampler:
    def __init__(self, fail=False, holds=None):
        self.version, self.staged, self.fail, self.holds = 0, None, fail, holds

    def where(self):
        return {"id": id(self), "node": "here", "ranks": 1}

    def stage(self, header, ticket):
        if self.fail:
            raise Stop("rank 0: no memory")
        self.staged = bundle.Header.from_json(header)

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


def test_one_publish_at_a_time():
    class Impatient(Sampler):
        def stage(self, header, ticket):
            super().stage(header, ticket)
            with pytest.raises(Stop, match="version 6 was not published: another publish is running"):
                sync.publish(Local(trainer), Local(self), 6)
    trainer, a = Trainer(), Impatient()
    assert sync.publish(Local(trainer), Local(a), 5)["version"] == a.version == 5 and trainer.released == 1
    memory = sync.SharedMemory()
    memory.offer(packed()[1])
    with pytest.raises(Stop, match="policy-.* is still on offer: two publishes at once"):
        memory.offer(packed()[1])
    memory.release()
    memory.offer(packed()[1])
    memory.release()


def test_replicas_that_differ_and_a_sampler_without_a_trainer_on_its_node_are_refused():
    with pytest.raises(Stop, match="2 replicas hold different weights"):
        sync.publish(Local(Trainer(), Trainer("there", 2.0)), Local(Sampler()), 5)
    with pytest.raises(Stop, match="no trainer rank on the sampler's node here"):
        sync.publish(Local(Trainer("there")), Local(Sampler()), 5)


def test_base_fingerprint_sees_config_header_and_every_tensor(tmp_path):
    from safetensors.torch import save_file

    def folder(name, config="{}", key="a", changed=None):
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text(config)
        tensors = {f"{key}{i}": torch.full((64, 64), float(i == changed)) for i in range(50)}
        save_file(tensors | {f"{key}.small": torch.full((3,), float(changed == "small"))}, path / "model.safetensors")
        return bundle.base_fingerprint(path)
    one = folder("one")
    assert folder("same") == one
    others = [folder("config", '{"x": 1}'), folder("key", key="b"), *(folder(f"{i}", changed=i) for i in (0, 17, 49, "small"))]
    assert len({one, *others}) == 7
    (tmp_path / "one" / "model.safetensors").write_bytes(b"12345678901234567890")
    with pytest.raises(Stop, match="model.safetensors is no safetensors file"):
        bundle.base_fingerprint(tmp_path / "one")
