"""The hand-off between processes that share neither memory nor a GPU: one trainer rank broadcasts a bundle to every rank of every
sampler engine, by NCCL from GPU to GPU, by gloo on the CPU, in a process group of their own.

A group is made for one set of engines; another set, one of them started anew, gets another group. Each wait but NCCL's own first
meeting has a limit and ends early when the sender gives up or is gone. Then the group is aborted, and the next bundle makes a new
one.
"""
import contextlib
import os
import threading
import time
import uuid
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from common.cli import Stop

SENDER = 0               # its rank in the group; the engines' ranks follow in the order of the engines
GRACE_S = 2              # the sender's own end of a broadcast may lag behind the receivers' by this much
ABORT_S = 60             # NCCL may take this long to end its kernel; it has no limit of its own
CTAS = 32                # blocks of NCCL's broadcast inside a machine, each a ring of its own; for two H200 NCCL would take 24
NO_TEARDOWN = "TORCH_NCCL_ASYNC_ERROR_HANDLING"     # 0: where a peer is lost torch would otherwise end the process, the trainer's


class Network:
    """The sender's side, beside sync.SharedMemory and sync.CudaIpc."""

    def __init__(self, meeting, limit_s=600):
        """meeting: a path where nothing is, for processes of one machine (they meet in a file, and nothing listens on the
        network), or the name by which this machine is reached. limit_s: seconds for one bundle to be everywhere."""
        self.meeting, self.limit_s = str(meeting), limit_s
        self._members = self._channel = self._sending = self._server = None

    def offer(self, flat, engines):
        """Begin to send the buffer; returns its ticket. engines: [{"id": name, "ranks": their number}]. One buffer at a time."""
        if self._sending is not None:
            raise Stop("a buffer is still on its way: two publishes at once")
        members, first = [(e["id"], e["ranks"]) for e in engines], [1]
        for _, ranks in members:
            first.append(first[-1] + ranks)
        if members != self._members:
            self._leave()
            if self.meeting.startswith("/"):
                where = f"{self.meeting}-{uuid.uuid4().hex}"
            else:
                self._server = dist.TCPStore(self.meeting, 0, is_master=True, wait_for_workers=False)
                where = f"{self.meeting}:{self._server.port}"
            self._members, self._channel, self._number = members, Channel(where, SENDER, first[-1], self.limit_s), 0
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)              # NCCL reads it on a stream of its own
        self._number += 1
        self._sending = threading.Thread(target=self._send, args=(self._channel, flat, self._number), daemon=True)
        self._sending.start()
        return {"way": "network", "where": self._channel.where, "world": first[-1], "numel": flat.numel(), "number": self._number,
                "first": {name: at for (name, _), at in zip(members, first)}, "limit_s": self.limit_s, "sender": os.getpid()}

    def _send(self, channel, flat, number):
        try:
            if flat.is_cuda:
                torch.cuda.set_device(flat.device)           # a new thread begins with the first one
            channel.broadcast(flat, number)
        except Exception as error:                           # noqa: BLE001 - told to the receivers, who tell the driver
            channel.lost = True                              # not the error, whose frames hold the buffer
            channel.tell(str(error) if isinstance(error, Stop) else f"{type(error).__name__}: {error}")

    def release(self, failed=False):
        """Let go of the buffer. failed: not everybody took it, and the members' counts of broadcasts differ; those who still
        wait are told that it does not come, and the next bundle makes another group."""
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.join(GRACE_S)
            if failed or sending.is_alive() or self._channel.lost:
                self._leave(sending)

    def _leave(self, sending=None):
        # not the server: receivers read there that it is over
        channel, self._members, self._channel = self._channel, None, None
        if channel is not None:
            channel.give_up(sending)


class Channel:
    """One member's side of a group. Every member calls `broadcast` with the same number."""

    def __init__(self, where, rank, world, limit_s):
        self.where, self.rank, self.world, self.limit_s = where, rank, world, limit_s
        self.lost, self._group, self._work, self._given_up = False, None, None, False
        # signs of life have a client of their own: a wait inside the group blocks the one that it uses
        self._signs = dist.PrefixStore("signs", self._store())

    def _store(self):
        if self.where.startswith("/"):
            store = dist.FileStore(self.where, -1)           # -1: the file stays when a member leaves
            store.set_timeout(timedelta(seconds=self.limit_s))
            return store
        host, _, port = self.where.rpartition(":")
        return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=self.limit_s))

    def broadcast(self, flat, number, sender=None):
        """Fill `flat`, uint8 on this member's device, with the sender's; its own is what it sends. sender: its process, on this
        machine. Stop when the limit is over or the sender gave up."""
        until = time.monotonic() + self.limit_s

        def wait(done, what):
            began = time.monotonic()
            look = began + 0.1
            while not done():
                if self._given_up:
                    raise Stop(f"bundle {number} was given up")
                if time.monotonic() > look:
                    look += 0.1
                    self._look(number, sender, met=self._group is not None)
                if time.monotonic() > until:
                    raise Stop(f"{what} within {self.limit_s:g} s, over {'NCCL' if flat.is_cuda else 'gloo'}")
                time.sleep(min(0.05 * (time.monotonic() - began), 0.001))      # it is noticed a twentieth late at most
        if self._group is None:
            # A group that is being made cannot be called off. So all are there first, and then it is decided once and for all
            # whether they begin: the sender may have given up while the last one came.
            self._signs.set(f"here {self.rank}", "1")
            sign = [f"here {rank}" for rank in range(self.world)] if self.rank == SENDER else ["begin"]
            wait(lambda: self._signs.check(sign), f"not all {self.world} members of the hand-off's group met")
            if self.rank == SENDER:
                self._signs.compare_set("begin", "", "yes")
            if self._signs.get("begin") != b"yes":
                raise Stop(f"the sender gave bundle {number} up ({self._signs.get('given up').decode()})")
            self._group = self._make(flat.is_cuda)
            if self._given_up:                               # meanwhile: nobody else has seen this group
                self._abort()
                raise Stop(f"bundle {number} was given up")
        how = dist.BroadcastOptions()
        how.rootRank = SENDER
        work = self._group.broadcast([flat], how)
        self._work = work if flat.is_cuda else None
        wait(work.is_completed, f"{flat.numel():,} bytes did not arrive everywhere")
        work.wait()                                          # raises what went wrong
        if flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()
            self._work = None
            self._look(number, sender)                       # NCCL's receiver is also done when the sender gave up in the middle

    def _look(self, number, sender, met=True):
        """Stop if the sender will send nothing any more. met: the group is made; before that "begin" alone counts."""
        if met and self._signs.check(["given up"]):
            raise Stop(f"the sender gave bundle {number} up ({self._signs.get('given up').decode()})")
        if sender and self.where.startswith("/") and not Path(f"/proc/{sender}").exists():
            raise Stop(f"the sender of bundle {number}, process {sender}, is gone")

    def _make(self, nccl):
        store, limit = dist.PrefixStore("group", self._store()), timedelta(seconds=2 * self.limit_s)
        if nccl:
            before = os.environ.get(NO_TEARDOWN)
            os.environ[NO_TEARDOWN] = "0"                    # read when a group is made, and meant for this one alone
            try:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = limit
                if self.where.startswith("/"):
                    # NCCL copies its rings until there are so many (ncclTopoPostset, graph/connect.cc); each has 9 MB of buffers.
                    # Its check of a minimum wants a maximum, too (parseCommConfig, init.cc): NCCL's own
                    options.config.min_ctas, options.config.max_ctas = CTAS, 64
                return dist.ProcessGroupNCCL(store, self.rank, self.world, options)
            finally:
                os.environ.pop(NO_TEARDOWN) if before is None else os.environ.update({NO_TEARDOWN: before})
        options = dist.ProcessGroupGloo._Options()
        options._timeout = limit
        if self.where.startswith("/"):
            options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        else:
            options._devices = [dist.ProcessGroupGloo.create_default_device()]
        return dist.ProcessGroupGloo(store, self.rank, self.world, options)

    def tell(self, why):
        """Make the receivers stop waiting."""
        with contextlib.suppress(dist.DistError):            # its file or server went with the run
            if not self._signs.check(["given up"]):
                self._signs.set("given up", why)
            self._signs.compare_set("begin", "", "no")

    def give_up(self, sending=None):
        """End the group; Stop if NCCL does not let go of the GPU. sending: the thread that is in `broadcast`, if one is."""
        if self.rank == SENDER:
            self.tell("the publish failed elsewhere")
        self._given_up = True                                # and only then: that thread tells, too
        if sending is not None:
            sending.join(GRACE_S)
        if self._group is not None:
            _aborted.append(self._group)
            ending = threading.Thread(target=self._abort, daemon=True)
            ending.start()
            ending.join(ABORT_S)
            if ending.is_alive():
                raise Stop(f"NCCL did not end the hand-off's group within {ABORT_S} s: its kernel may still hold the GPU")
            work, self._work = self._work, None
            if work is not None:                             # lets go of the buffer; its next owner's work waits for the kernel
                work.synchronize()

    def _abort(self):
        with contextlib.suppress(RuntimeError):              # what ended it is told already
            self._group.abort()


_joined = None           # this process's Channel
_aborted = []            # when it is deleted, gloo's group waits for what it had to send to the dead, NCCL's for its watchdog


def receive(ticket, rank, device):
    """The receiver's side: the sender's buffer as a new uint8 tensor on `device`. rank: of this process in its engine, whose
    first one is ticket["first"]."""
    global _joined
    if _joined is None or _joined.where != ticket["where"] or _joined.lost:
        if _joined is not None:
            _joined.give_up()
        _joined = Channel(ticket["where"], ticket["first"] + rank, ticket["world"], ticket["limit_s"])
    flat = torch.empty(ticket["numel"], dtype=torch.uint8, device=device)
    try:
        _joined.broadcast(flat, ticket["number"], ticket["sender"])
    except BaseException as error:
        _joined.lost = True
        _joined.give_up()
        # the store, or gloo's connection (a plain RuntimeError), went with its process
        if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)) or type(error) is RuntimeError:
            raise Stop(f"the sender of bundle {ticket['number']} is gone, or another receiver ({str(error).splitlines()[0]})") \
                from error
        raise
    return flat
