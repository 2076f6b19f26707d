"""The hand-off: from the trainer's adapter to every sampler, in memory, versioned, all or nothing.

A *bundle* is the adapter's unique tensors packed into one flat buffer, and a header that says what is where. It crosses
once for each node; the receiver (receive.py) broadcasts a tensor that all experts of a layer share. `publish` is
two-phase: every engine *stages* the bundle beside the version that it serves; only when all have, every engine
*commits* and answers with a fingerprint of what its slots now hold. Any failure before the commit leaves the old
version serving everywhere.
"""
import dataclasses
import hashlib
import json
import mmap
import os
import struct
import uuid
from pathlib import Path

import torch

from common.checksum import checksums
from common.cli import Stop

ALIGN = 64   # bytes; every tensor starts on a cache line, so that a view of any dtype is aligned
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass
class Entry:
    key: str         # neutral name: layers.5.mlp.experts.gate_proj.lora_A
    shape: list[int]
    dtype: str
    offset: int      # bytes into the flat buffer
    checksum: int


@dataclasses.dataclass
class Header:
    """What a bundle holds. `experts`: 'shared' (one adapter for all routed experts of a layer), 'each' (leading expert
    dimension) or None."""
    version: int
    base: str        # fingerprint of the base model that the adapter belongs to
    rank: int
    experts: str | None
    nbytes: int
    entries: list[Entry]

    @property
    def fingerprint(self):
        return combine((e.key, e.checksum) for e in self.entries)

    def to_json(self):
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text):
        raw = json.loads(text)
        return Header(**{**raw, "entries": [Entry(**e) for e in raw["entries"]]})


def combine(pairs):
    """One short name for a set of (key, checksum), whatever their order."""
    return hashlib.sha256(json.dumps(sorted(pairs)).encode()).hexdigest()[:16]


def pack(tensors, *, version, base, rank, experts):
    """(Header, flat uint8 buffer on the tensors' device) of {neutral key: tensor}."""
    if not tensors:
        raise Stop("the adapter is empty: no trainable tensor to publish")
    entries, flat = lay(tensors, checksums(list(tensors.values())))
    return Header(version, base, rank, experts, flat.numel(), entries), flat


def lay(tensors, sums):
    """(entries, flat uint8 buffer) of {neutral key: tensor}, one after the other; sums: their checksums."""
    entries, end = [], 0
    for (key, t), total in zip(tensors.items(), sums):
        entries.append(Entry(key, list(t.shape), str(t.dtype).removeprefix("torch."), end, total))
        end += -(-t.nbytes // ALIGN) * ALIGN
    flat = torch.zeros(end, dtype=torch.uint8, device=next(iter(tensors.values())).device)
    for e, t in zip(entries, tensors.values()):
        flat[e.offset:e.offset + t.nbytes].copy_(t.detach().contiguous().view(torch.uint8).flatten())
    return entries, flat


def unpack(header, flat):
    """{neutral key: view of the buffer}; raises Stop if a tensor does not have the checksum that its sender gave it."""
    out = views(header, flat)
    for e, found in zip(header.entries, checksums(list(out.values()))):
        if found != e.checksum:
            raise Stop(f"version {header.version} arrived damaged: {e.key} does not have its sender's checksum")
    return out


def views(header, flat):
    """{neutral key: view of the buffer}, not looked into."""
    if flat.numel() != header.nbytes:
        raise Stop(f"version {header.version} arrived with {flat.numel()} of {header.nbytes} bytes")
    out = {}
    for e in header.entries:
        count = torch.Size(e.shape).numel()
        view = flat[e.offset:e.offset + count * DTYPES[e.dtype].itemsize].view(DTYPES[e.dtype]).view(e.shape)
        if e.key in out:
            raise Stop(f"version {header.version} holds {e.key} twice")
        out[e.key] = view
    return out


class SharedMemory:
    """Between processes of one node, through /dev/shm. A ticket is a small dict that names the buffer."""
    folder = Path("/dev/shm")

    def __init__(self):
        self._file = None

    def offer(self, flat):
        """Put the buffer where receivers can map it; returns its ticket. At most one buffer is offered at a time."""
        self.release()
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


def publish(trainer, sampler, version):
    """Bring the trainer's adapter, as it is now, to every sampler engine as `version`. Returns {bytes, tensors,
    fingerprint, ...}.

    trainer, sampler: groups of actors (cluster.py). Raises Stop if anything fails; before the commit the old version
    keeps serving.
    """
    try:
        header = _stage(trainer, sampler, version)
    except BaseException as error:                           # Ctrl-C too: the buffer must not stay in /dev/shm
        for tidy in (lambda: sampler.abort(version), trainer.release):
            try:
                tidy()
            except Exception:                                # whoever is gone cannot be told; the first error says why
                pass
        if isinstance(error, Stop):
            raise Stop(f"version {version} was not published, the samplers keep the version before it: {error}") from error
        raise
    trainer.release()                                        # staging copied everything into the slots
    held = [fingerprint for engine in sampler.commit(version) for fingerprint in engine]
    if wrong := [f for f in held if f != header.fingerprint]:
        raise Stop(f"version {version}: {len(wrong)} of {len(held)} sampler ranks hold {wrong[0]}, "
                   f"the trainer sent {header.fingerprint}")
    return {"version": version, "fingerprint": header.fingerprint, "bytes": header.nbytes, "tensors": len(header.entries),
            "checksums": {e.key: e.checksum for e in header.entries}, "ranks": len(held)}


def _stage(trainer, sampler, version):
    """Offer on every trainer node, stage on every engine; returns the header."""
    offers = [offer for offer in trainer.offer(version) if offer is not None]
    if len({offer["fingerprint"] for offer in offers}) != 1:
        raise Stop(f"the trainer's {len(offers)} replicas hold different adapters")
    on_node = {offer["node"]: offer for offer in offers if offer["ticket"] is not None}
    nodes = sampler.node()
    if lost := [n for n in nodes if n not in on_node]:
        raise Stop(f"no trainer rank on the sampler's node {lost[0]}: adapters travel inside a node only "
                   f"(trainer nodes: {sorted(on_node)})")
    sampler.each("stage", [(on_node[n]["header"], on_node[n]["ticket"]) for n in nodes])
    return Header.from_json(offers[0]["header"])


def node_name():
    """Which machine this process is on; processes with the same name can share memory."""
    return os.uname().nodename
