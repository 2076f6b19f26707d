"""The hand-off: from the trainer's adapter, or all of its weights, to every sampler, in memory, versioned, whole or not at all.

A bundle (bundle.py) crosses once for each node, or to engines with GPUs of their own over the network (network.py): an adapter's
unique tensors, which the receiver (receive.py) broadcasts where all experts of a layer share one, or a bucket of the whole model
(receive_weights.py). `publish` is two-phase: every engine *stages* what comes; only when all have, every engine *commits* and
answers with a fingerprint. An adapter is staged beside the version that serves, and any failure before the commit leaves that one
serving everywhere; while all weights arrive an engine answers nothing.
"""
import mmap
import os
import threading
import uuid
from pathlib import Path

import torch
import torch.distributed as dist

from common import network
from common.bundle import Header, combine
from common.cli import Stop


class SharedMemory:
    """Between processes of one node, through /dev/shm. A ticket is a small dict that names the buffer."""
    folder = Path("/dev/shm")

    def __init__(self):
        self._file = None

    def offer(self, flat, engines=()):
        """Put the buffer where receivers can map it; returns its ticket. One buffer at a time. engines: read by
        network.Network only, which is called the same way."""
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

    def release(self, failed=False):
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None


class CudaIpc:
    """Between processes that share a GPU: the receiver maps the sender's buffer, which stays until `release`."""

    def __init__(self):
        self._flat = None

    def offer(self, flat, engines=()):
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

    def release(self, failed=False):
        self._flat = None


def take(ticket):
    """The receiver's side: (flat uint8 tensor, function that lets go of it)."""
    if ticket["way"] == "network":
        rank = dist.get_rank() if dist.is_initialized() else 0
        return network.receive(ticket, rank, torch.device("cuda") if torch.cuda.is_available() else "cpu"), lambda: None
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

    def let_go():
        torch.cuda.synchronize(flat.device)
        torch.cuda.synchronize()
    return flat, let_go


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
        # the first frees engines that still wait for a buffer
        for tidy in (lambda: trainer.release(failed=True), lambda: sampler.abort(version)):
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
    sent, held = combine(sums, sums.values()), [fingerprint for engine in sampler.commit(version) for fingerprint in engine]
    if wrong := [f for f in held if f != sent]:
        raise Stop(f"version {version}: {len(wrong)} of {len(held)} sampler ranks hold {wrong[0]}, the trainer sent {sent}")
    return {"version": version, "fingerprint": sent, "bytes": sum(h.nbytes for h in headers), "tensors": len(sums),
            "checksums": sums, "ranks": len(held)}


def _stage(trainer, sampler, version, headers):
    """Offer on every trainer node, or from one rank to all over the network; stage on every engine. Appends the header, before
    anything is staged."""
    engines = sampler.where()
    offers = [offer for offer in trainer.offer(version, engines) if offer is not None]
    if len({offer["fingerprint"] for offer in offers}) != 1:
        raise Stop(f"the trainer's {len(offers)} replicas hold different weights")
    on_node = {offer["node"]: offer for offer in offers if offer["ticket"] is not None}
    nodes = [engine["node"] for engine in engines]
    if len(on_node) == 1 and (only := next(iter(on_node.values())))["ticket"]["way"] == "network":
        on_node = dict.fromkeys(nodes, only)
    if lost := [n for n in nodes if n not in on_node]:
        raise Stop(f"no trainer rank on the sampler's node {lost[0]}: weights travel inside a node only "
                   f"(trainer nodes: {sorted(on_node)}); start trainer and sampler with apart=True")
    headers.append(Header.from_json(offers[0]["header"]))
    sampler.each("stage", [(on_node[n]["header"], on_node[n]["ticket"]) for n in nodes])


def node_name():
    """Which of the run's nodes this process is on (cluster.start says which, where a machine holds several): processes with the
    same name can share memory, and GPUs."""
    return f"{os.uname().nodename} {os.environ.get('RUN_NODE', '')}".strip()
