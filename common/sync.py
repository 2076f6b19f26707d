"""The hand-off: from the trainer's adapter to every sampler, in memory, versioned, all or nothing.

A *bundle* is the adapter's unique tensors packed into one flat buffer, and a header that says what is where. It crosses
once for each node; the receiver (receive.py) broadcasts a tensor that all experts of a layer share. `publish` is
two-phase: every engine *stages* the bundle beside the version that it serves; only when all have, every engine
*commits* and answers with a fingerprint of what its slots now hold. Any failure before the commit leaves the old
version serving everywhere.
"""
import dataclasses
import functools
import hashlib
import json
import mmap
import os
import struct
import threading
import uuid
from pathlib import Path

import torch

from common.checksum import flat_sums
from common.cli import Stop

ALIGN = 64   # bytes; every tensor starts on a cache line, so that a view of any dtype is aligned
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
        return combine(zip((e.key for e in self.entries), self.sums))

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


def combine(pairs):
    """One short name for a set of (key, checksum), whatever their order."""
    return hashlib.sha256("\n".join(f"{key} {total}" for key, total in sorted(pairs)).encode()).hexdigest()[:16]


def pack(tensors, *, version, base, rank=0, experts=None, kind="adapter", last=True):
    """(Header, flat uint8 buffer on the tensors' device) of {neutral key: tensor}."""
    if not tensors:
        raise Stop("the adapter is empty: no trainable tensor to publish")
    layout, flat = lay(tensors)
    return Header(version, base, rank, experts, flat.numel(), sums_of(layout, flat), layout, kind, last), flat


def lay(tensors):
    """(layout, flat uint8 buffer) of {neutral key: tensor}, one after the other."""
    layout, nbytes = _laid(tuple((key, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for key, t in tensors.items()))
    flat = torch.zeros(nbytes, dtype=torch.uint8, device=next(iter(tensors.values())).device)
    torch._foreach_copy_(_views(layout, flat), [t.detach() for t in tensors.values()])
    return layout, flat


@functools.lru_cache(8)
def _laid(signature):
    rows, end = [], 0
    for key, shape, dtype in signature:
        rows.append([key, shape, dtype, end])
        end += -(-Entry(key, shape, dtype, end).nbytes // ALIGN) * ALIGN
    return json.dumps(rows), end


def sums_of(layout, flat):
    """The checksums of a bundle's entries, in order."""
    return flat_sums(flat, *_spans(layout))


@functools.lru_cache(8)
def _spans(layout):
    return [e.offset for e in _entries(layout)], [e.nbytes for e in _entries(layout)]


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
    for e, sent, found in zip(header.entries, header.sums, sums_of(header.layout, flat), strict=True):
        if found != sent:
            raise Stop(f"version {header.version} arrived damaged: {e.key} does not have its sender's checksum")


def views(header, flat):
    """{neutral key: view of the buffer}, not looked into."""
    return dict(zip((e.key for e in header.entries), _views(header.layout, flat)))


def _views(layout, flat):
    return pick(flat, _strides(layout))


def pick(flat, places):
    """Views of the buffer at [(dtype, (shape, stride, offset in elements))]."""
    typed = {dtype: flat.view(dtype) for dtype, _ in places}
    return [typed[dtype].as_strided(*where) for dtype, where in places]


@functools.lru_cache(8)
def _strides(layout):
    return [(DTYPES[e.dtype], (e.shape, torch.empty(e.shape, device="meta").stride(), e.offset // DTYPES[e.dtype].itemsize))
            for e in _entries(layout)]


class SharedMemory:
    """Between processes of one node, through /dev/shm. A ticket is a small dict that names the buffer."""
    folder = Path("/dev/shm")

    def __init__(self):
        self._file = None

    def offer(self, flat):
        """Put the buffer where receivers can map it; returns its ticket. One buffer at a time."""
        if self._file is not None:
            raise Stop(f"{self._file} is still on offer: two publishes at once")
        for old in self.folder.glob("policy-*"):            # of a sender that was killed while it offered
            if not Path("/proc", old.name.split("-")[1]).exists():
                old.unlink(missing_ok=True)
        path = self.folder / f"policy-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        self._file = path
        try:
            os.posix_fallocate(fd, 0, flat.numel())         # a full /dev/shm is an error here; in a mapping it would be a SIGBUS
            with os.fdopen(fd, "wb") as file:
                file.write(memoryview(flat.cpu().numpy()))
        except OSError as error:
            self.release()
            free = os.statvfs(self.folder)
            raise Stop(f"the adapter of {flat.numel():,} bytes does not fit {self.folder}: "
                       f"{free.f_bavail * free.f_frsize:,} bytes are free ({error.strerror})") from error
        return {"way": "shm", "path": str(path)}

    def release(self):
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None


class CudaIpc:
    """Between processes that share a GPU: the receiver maps the sender's buffer, which stays until `release`."""

    def __init__(self):
        self._flat = None

    def offer(self, flat):
        if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
            raise Stop("PYTORCH_CUDA_ALLOC_CONF has expandable_segments on: such memory cannot be shared between processes, "
                       "switch it off")
        from torch.multiprocessing.reductions import reduce_tensor
        if self._flat is not None:
            raise Stop(f"a buffer of {self._flat.numel():,} bytes is still on offer: two publishes at once")
        torch.cuda.synchronize()
        self._flat = flat
        args = reduce_tensor(flat)[1]
        # device, handle, storage bytes, offset, reference counter, its offset, event, whether to wait for it: plain
        # values, no pickle
        return {"way": "ipc", "numel": flat.numel(), "start": args[3],
                "storage": [a.hex() if isinstance(a, bytes) else a for a in (*args[6:10], *args[11:])]}

    def release(self):
        self._flat = None


def take(ticket):
    """The receiver's side: (flat uint8 tensor, function that lets go of it)."""
    if ticket["way"] == "shm":
        try:
            fd = os.open(ticket["path"], os.O_RDWR)
        except FileNotFoundError:
            raise Stop(f"the sender's buffer {ticket['path']} is gone") from None
        room = mmap.mmap(fd, 0)
        os.close(fd)
        return torch.frombuffer(room, dtype=torch.uint8), lambda: None
    from torch.multiprocessing.reductions import rebuild_cuda_tensor
    storage = [bytes.fromhex(a) if isinstance(a, str) else a for a in ticket["storage"]]
    flat = rebuild_cuda_tensor(torch.Tensor, (ticket["numel"],), (1,), ticket["start"], torch.UntypedStorage, torch.uint8,
                               *storage[:4], False, *storage[4:])
    return flat, torch.cuda.synchronize


def base_fingerprint(folder):
    """Names a checkpoint by its config and by each weight file's size, header and three samples of 64 KiB: seconds for
    terabytes."""
    digest, folder = hashlib.sha256((Path(folder) / "config.json").read_bytes()), Path(folder)
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with open(file, "rb") as f:
            head = struct.unpack("<Q", f.read(8))[0]
            digest.update(f.read(head))
            for at in (8 + head, (8 + head + size) // 2, max(8 + head, size - 65536)):
                f.seek(at)
                digest.update(f.read(65536))
    return digest.hexdigest()[:16]


_publishing = threading.Lock()


def publish(trainer, sampler, version):
    """Bring the trainer's adapter, or all weights of one that trains them, to every sampler engine as `version`. Returns {bytes,
    tensors, fingerprint, ...}.

    trainer, sampler: groups of actors (cluster.py). Raises Stop if anything fails; before the commit the old adapter keeps
    serving, while an engine that holds parts of new weights refuses to answer. What is being sampled is finished first, by the
    version that began it: an engine takes one call at a time.
    """
    if not _publishing.acquire(blocking=False):
        raise Stop(f"version {version} was not published: another publish is running")
    try:
        return _publish(trainer, sampler, version)
    finally:
        _publishing.release()


def _publish(trainer, sampler, version):
    headers = []                                             # of an adapter one, of all weights one a bucket
    try:
        while not headers or not headers[-1].last:
            _stage(trainer, sampler, version, headers)
            trainer.release(headers[-1].last)                # staging copied everything
    except BaseException as error:                           # Ctrl-C too: the buffer must not stay in /dev/shm
        for tidy in (lambda: sampler.abort(version), trainer.release):
            try:
                tidy()
            except Exception:                                # whoever is gone cannot be told; the first error says why
                pass
        if isinstance(error, Stop):
            state = "hold a part of it and answer nothing until they have a whole version" \
                if headers and headers[0].kind == "weights" else "keep the version before it"
            raise Stop(f"version {version} was not published, the samplers {state}: {error}") from error
        raise
    sums = {e.key: total for header in headers for e, total in zip(header.entries, header.sums)}
    sent, held = combine(sums.items()), [fingerprint for engine in sampler.commit(version) for fingerprint in engine]
    if wrong := [f for f in held if f != sent]:
        raise Stop(f"version {version}: {len(wrong)} of {len(held)} sampler ranks hold {wrong[0]}, the trainer sent {sent}")
    return {"version": version, "fingerprint": sent, "bytes": sum(h.nbytes for h in headers), "tensors": len(sums),
            "checksums": sums, "ranks": len(held)}


def _stage(trainer, sampler, version, headers):
    """Offer on every trainer node, stage on every engine; appends the header, before anything is staged."""
    offers = [offer for offer in trainer.offer(version) if offer is not None]
    if len({offer["fingerprint"] for offer in offers}) != 1:
        raise Stop(f"the trainer's {len(offers)} replicas hold different weights")
    on_node = {offer["node"]: offer for offer in offers if offer["ticket"] is not None}
    nodes = sampler.node()
    if lost := [n for n in nodes if n not in on_node]:
        raise Stop(f"no trainer rank on the sampler's node {lost[0]}: weights travel inside a node only "
                   f"(trainer nodes: {sorted(on_node)})")
    headers.append(Header.from_json(offers[0]["header"]))
    sampler.each("stage", [(on_node[n]["header"], on_node[n]["ticket"]) for n in nodes])


def node_name():
    """Which machine this process is on; processes with the same name can share memory."""
    return os.uname().nodename
