"""A bundle: tensors under neutral names packed into one flat buffer, and a header that says what is where, of which version, and
each tensor's checksum. Both ends of a hand-off (sync.py, receive.py, receive_weights.py) read it."""
import dataclasses
import functools
import hashlib
import json
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from common.checksum import flat_sums
from common.cli import Stop

SAMPLE = 256 # bytes of every tensor that a checkpoint's fingerprint reads
ALIGN = 64   # bytes; every tensor starts on a cache line, so that a view of any dtype is aligned
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Entry:
    key: str         # neutral name: layers.5.mlp.experts.gate_proj.lora_A
    shape: tuple[int, ...]
    dtype: str
    offset: int      # bytes into the flat buffer

    @property
    def nbytes(self):
        return torch.Size(self.shape).numel() * DTYPES[self.dtype].itemsize


@dataclasses.dataclass
class Header:
    """What a bundle holds. `experts`: 'shared' (one adapter for all routed experts of a layer), 'each' (leading expert
    dimension) or None. layout: the entries as JSON, the same text for every version of one adapter, so that both ends work
    out only once what follows from it."""
    version: int
    base: str        # fingerprint of the base model that the adapter belongs to
    rank: int
    experts: str | None
    nbytes: int
    sums: list[int]  # checksum of every entry, in order
    layout: str
    kind: str = "adapter"    # or weights: a bucket of the whole model's tensors
    last: bool = True        # whether the version is complete with this bundle

    @property
    def entries(self):
        return _entries(self.layout)

    @property
    def fingerprint(self):
        return combine((e.key for e in self.entries), self.sums)

    def to_json(self):
        """Two lines of JSON: what changes with the version, and the layout."""
        return json.dumps({k: v for k, v in vars(self).items() if k != "layout"}) + "\n" + self.layout

    @staticmethod
    def from_json(text):
        head, _, layout = text.partition("\n")
        return Header(**json.loads(head), layout=layout)


@functools.lru_cache(8)
def _entries(layout):
    return [Entry(key, tuple(shape), dtype, offset) for key, shape, dtype, offset in json.loads(layout)]


def module_of(key):
    """The path of a tensor's module, which stands for all experts of a layer: layers.5.mlp.experts.17.up_proj.weight ->
    layers.5.mlp.experts.up_proj"""
    return re.sub(r"\.experts\.\d+\.", ".experts.", key.rpartition(".")[0])


def combine(keys, sums):
    """One short name for a set of keys, each once, and their checksums, whatever their order."""
    keys, sums = tuple(keys), list(sums)
    return hashlib.sha256("\n".join(f"{keys[i]} {sums[i]}" for i in _sorted(keys)).encode()).hexdigest()[:16]


@functools.lru_cache(8)
def _sorted(keys):
    return sorted(range(len(keys)), key=keys.__getitem__)


def pack(tensors, *, version, base, rank=0, experts=None, kind="adapter", last=True, dtype=None):
    """(Header, flat uint8 buffer on the tensors' device) of {neutral key: tensor}; dtype: to round all of them to."""
    if not tensors:
        raise Stop("the adapter is empty: no trainable tensor to publish")
    layout, flat = lay(tensors, dtype)
    return Header(version, base, rank, experts, flat.numel(), sums_of(layout, flat), layout, kind, last), flat


@torch.no_grad()
def lay(tensors, dtype=None):
    """(layout, flat uint8 buffer) of {neutral key: tensor}, one after the other, each in `dtype` or its own."""
    keys, whole = tuple(tensors), list(tensors.values())
    layout, nbytes = _laid(keys, tuple(t.shape for t in whole), tuple(NAMES[dtype or t.dtype] for t in whole))
    flat = torch.empty(nbytes, dtype=torch.uint8, device=whole[0].device)      # nobody reads the gaps between tensors
    torch._foreach_copy_(_views(layout, flat), whole)
    return layout, flat


@functools.lru_cache(8)
def _laid(keys, shapes, dtypes):
    rows, end = [], 0
    for key, shape, dtype in zip(keys, shapes, dtypes):
        rows.append([key, shape, dtype, end])
        end += -(-Entry(key, shape, dtype, end).nbytes // ALIGN) * ALIGN
    return json.dumps(rows), end


def sums_of(layout, flat):
    """The checksums of a bundle's entries, in order."""
    return flat_sums(flat, *_spans(layout))


@functools.lru_cache(8)
def _spans(layout):
    return np.array([(e.offset, e.nbytes) for e in _entries(layout)]).T


def unpack(header, flat):
    """{neutral key: view of the buffer}; raises Stop if a tensor does not have the checksum that its sender gave it."""
    verify(header, flat)
    return views(header, flat)


def verify(header, flat):
    """Stop if the buffer is not what the header says."""
    if flat.numel() != header.nbytes:
        raise Stop(f"version {header.version} arrived with {flat.numel()} of {header.nbytes} bytes")
    if flat.storage_offset():
        raise ValueError("a bundle's buffer must begin where its memory begins: offsets are counted from there")
    if (found := sums_of(header.layout, flat)) != header.sums:
        key = next(e.key for e, sent, here in zip(header.entries, header.sums, found, strict=True) if sent != here)
        raise Stop(f"version {header.version} arrived damaged: {key} does not have its sender's checksum")


def views(header, flat):
    """{neutral key: view of the buffer}, not looked into."""
    return dict(zip((e.key for e in header.entries), _views(header.layout, flat)))


def _views(layout, flat):
    return pick(flat, _strides(layout))


def pick(flat, places):
    """Views of the buffer at [(dtype, (shape, stride, offset in elements))]."""
    typed = {dtype: flat.view(dtype) for dtype in {dtype for dtype, _ in places}}
    return [typed[dtype].as_strided(*where) for dtype, where in places]


@functools.lru_cache(8)
def _strides(layout):
    return [(DTYPES[e.dtype], (e.shape, torch.empty(e.shape, device="meta").stride(), e.offset // DTYPES[e.dtype].itemsize))
            for e in _entries(layout)]


def base_fingerprint(folder):
    """Names a checkpoint by its config and by each weight file's size, header and SAMPLE bytes from the middle of every tensor: a
    fine-tuned tensor has changed there too."""
    folder = Path(folder)
    with ThreadPoolExecutor(16) as pool:                     # a network's file system answers slowly, but many at once
        files = pool.map(_sampled, sorted(folder.glob("*.safetensors")))
        digest = hashlib.sha256((folder / "config.json").read_bytes())
        for part in files:
            digest.update(part)
    return digest.hexdigest()[:16]


def _sampled(file):
    size = file.stat().st_size
    with open(file, "rb") as f:
        try:
            length = struct.unpack("<Q", f.read(8))[0]
            header = f.read(length) if length <= size else b""
            places = {n: t["data_offsets"] for n, t in json.loads(header).items() if n != "__metadata__"}
        except (struct.error, ValueError, TypeError, KeyError, AttributeError):
            raise Stop(f"{file} is no safetensors file: it has no header that can be read") from None
        digest = hashlib.sha256(f"{file.name} {size}".encode() + header)
        for start, end in sorted(places.values()):
            if end > start:
                f.seek(8 + length + start + max(0, (end - start - SAMPLE) // 2))
                digest.update(f.read(min(SAMPLE, end - start)))
    return digest.digest()
