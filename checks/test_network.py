"""The hand-off over the network: a sender, receivers in processes of their own. By gloo, and by NCCL where two GPUs are."""
import multiprocessing
import os
import signal
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from common import cluster, network
from common.cli import Stop

ENGINES = [{"id": "a", "ranks": 1}, {"id": "b", "ranks": 2}]
ALONE = ENGINES[:1]
NCCL = pytest.param("NCCL", marks=[pytest.mark.gpu, pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL takes one rank a card: needs two GPUs")])


def flat(n, device="cpu"):
    """The same n bytes wherever it is called; on cards of one kind, too."""
    return torch.randint(0, 256, (n,), dtype=torch.uint8, device=device, generator=torch.Generator(device).manual_seed(n))


class Receiver:
    def __init__(self, device):
        self.device = device

    def receive(self, ticket, name="a", rank=0):
        """Whether every byte of the buffer came."""
        got = network.receive({**ticket, "first": ticket["first"][name]}, rank, self.device)
        return torch.equal(got, flat(len(got), self.device))

    def meet(self, ticket):
        """Come to the group, and end before it is made."""
        channel = network.Channel(ticket["where"], 1, 2, 60)
        channel._make = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        channel.broadcast(torch.empty(1, dtype=torch.uint8, device=self.device), 1)

    def used(self):
        """Bytes: of its card, taken by whomever, or of its process."""
        if self.device == "cpu":
            return psutil.Process().memory_info().rss
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def works(self):
        return (torch.ones(999, 999, device=self.device) @ torch.ones(999, device=self.device)).sum().item() == 999 * 999


class Sender(Receiver):
    way = None

    def offer(self, meeting, n, limit_s=60, engines=ALONE):
        if self.way is None or (self.way.meeting, self.way.limit_s) != (meeting, limit_s):
            self.way = network.Network(meeting, limit_s)
        return self.way.offer(flat(n, self.device), engines)

    def under_way(self):
        return self.way._sending.is_alive()

    def release(self):
        self.way.release()
        return torch.cuda.memory_allocated(self.device) if self.device != "cpu" else 0


def act(pipe, kind, device):
    """A process that holds a Sender or a Receiver and calls it: answers (what it returned or its error, seconds)."""
    os.environ.update(cluster.NO_WATCHDOG)                   # as every actor has them
    torch.set_num_threads(1)
    if device != "cpu":
        torch.cuda.set_device(device)
    actor = kind(device)
    pipe.send("up")
    for verb, *asked in iter(pipe.recv, None):
        began = time.monotonic()
        try:
            answer = getattr(actor, verb)(*asked)
        except Exception as error:                           # noqa: BLE001
            answer = f"{type(error).__name__}: {error}"
        pipe.send((answer, time.monotonic() - began))


class Actor:
    """`act` in its process, which a wait for an answer ends when its limit is over: no test hangs."""

    def __init__(self, kind, device="cpu"):
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=act, args=(there, kind, device), daemon=True)
        self.process.start()
        there.close()
        assert self._next(90) == "up"

    def tell(self, verb, *asked):
        self.pipe.send((verb, *asked))

    def answer(self, seconds=30):
        """(answer, seconds that it took)"""
        return self._next(seconds)

    def _next(self, seconds):
        if not self.pipe.poll(seconds):
            self.end()
            raise AssertionError(f"no answer within {seconds} s")
        return self.pipe.recv()                              # EOFError: the process is gone

    def ask(self, verb, *asked, seconds=30):
        self.tell(verb, *asked)
        return self.answer(seconds)[0]

    def signal(self, number):
        os.kill(self.process.pid, number)

    def end(self):
        self.process.kill()
        self.process.join()


class Receivers:
    def __init__(self):
        self.members = [("a", 0), ("b", 0), ("b", 1)]
        self.actors = [Actor(Receiver) for _ in self.members]

    def send(self, ticket, which=(0, 1, 2)):
        for i in which:
            self.actors[i].tell("receive", ticket, *self.members[i])

    def answers(self, which=(0, 1, 2)):
        return [self.actors[i].answer() for i in which]

    def stop(self):
        for actor in self.actors:
            actor.end()


@pytest.fixture(scope="module")
def all_there():
    receivers = Receivers()
    yield receivers
    receivers.stop()


@pytest.fixture
def there(all_there):
    """All receivers up; a test may end some."""
    all_there.actors = [actor if actor.process.is_alive() else Actor(Receiver) for actor in all_there.actors]
    return all_there


@pytest.fixture(params=["file", "address"])
def sender(request, tmp_path):
    return network.Network(tmp_path / "meeting" if request.param == "file" else "127.0.0.1", limit_s=20)


def delivered(sender, there, n=1000, engines=ENGINES):
    there.send(sender.offer(flat(n), engines))
    assert [answer for answer, _ in there.answers()] == [True] * 3
    sender.release()


def test_bundles_of_any_size_reach_every_rank_of_every_engine(sender, there):
    delivered(sender, there, 1)
    channel = sender._channel
    for n in (12_345_678, 64):
        delivered(sender, there, n)
        assert sender._channel is channel, "one group serves until the engines change"
    delivered(sender, there, 999, ENGINES[::-1])             # their ranks in the group change: another group
    assert sender._channel is not channel


def test_a_buffer_on_its_way_is_not_replaced(sender, there):
    sender.offer(flat(10), ENGINES)
    with pytest.raises(Stop, match="still on its way: two publishes at once"):
        sender.offer(flat(10), ENGINES)
    sender.release()
    delivered(sender, there)


def test_who_waits_is_told_when_another_refused(sender, there):
    """One engine refused before it took the buffer: publish releases it, the others must not wait for the limit."""
    ticket = sender.offer(flat(10), ENGINES)
    there.send(ticket, [0, 1])
    time.sleep(0.5)
    sender.release(failed=True)
    for told, seconds in there.answers([0, 1]):
        assert told == "Stop: the sender gave bundle 1 up (the publish failed elsewhere)" and seconds < 10
    delivered(sender, there)                                 # the next one goes to all of them again


@pytest.mark.parametrize("came", [[], [0], [0, 1]])
def test_who_refuses_in_a_group_that_stands_gets_the_next_bundle(sender, there, came):
    """The sender's part may be done by then, and the others' too; whoever stood aside must not take this bundle for the next."""
    delivered(sender, there)
    there.send(sender.offer(flat(10), ENGINES), came)
    time.sleep(0.5)
    sender.release(failed=True)
    for told, seconds in there.answers(came):
        assert told in (True, "Stop: the sender gave bundle 2 up (the publish failed elsewhere)") and seconds < 10
    delivered(sender, there, 2000)
    delivered(sender, there, 3000)


@pytest.mark.parametrize("told_first", [True, False])
def test_whether_a_group_begins_is_decided_once(tmp_path, monkeypatch, told_first):
    """Everybody came, and the sender was told to let go just before it said so, or while the group was made."""
    channel = network.Channel(str(tmp_path / "meeting"), network.SENDER, 1, 5)
    signs, made = channel._signs, []

    def compare_set(*asked):
        if told_first:
            monkeypatch.setattr(channel, "_signs", signs)
            channel.tell("too late")
        return signs.compare_set(*asked)

    def make(nccl):
        made.append("made")
        channel._given_up = True
    monkeypatch.setattr(channel, "_signs", SimpleNamespace(set=signs.set, check=signs.check, get=signs.get,
                                                           compare_set=compare_set))
    channel._make, channel._abort = make, lambda: made.append("ended")
    with pytest.raises(Stop, match=r"gave bundle 1 up \(too late\)" if told_first else "bundle 1 was given up"):
        channel.broadcast(flat(10), 1)
    assert made == ([] if told_first else ["made", "ended"])


def test_what_is_wrong_with_the_sender_is_told(sender, there, monkeypatch):
    def broken(self, *_):
        raise torch.OutOfMemoryError("no room for a group")
    with monkeypatch.context() as patch:
        patch.setattr(network.Channel, "broadcast", broken)
        there.send(sender.offer(flat(10), ENGINES))
        for told, seconds in there.answers():
            assert told.startswith("Stop: the sender") and "OutOfMemoryError: no room for a group" in told and seconds < 10, told
    sender.release()
    delivered(sender, there)


def test_a_receiver_that_never_comes(tmp_path, there):
    sender = network.Network(tmp_path / "meeting", limit_s=2)
    there.send(sender.offer(flat(10), ENGINES), [0])
    (told, seconds), = there.answers([0])
    assert "not all 4 members of the hand-off's group met within 2 s, over gloo" in told and 1 < seconds < 4
    sender.release()
    delivered(sender, there)


def test_a_receiver_that_died_takes_nobody_with_it(sender, there):
    delivered(sender, there)
    there.actors[2].end()
    sender.offer(flat(10), ENGINES)
    sender.release()                                         # notices, or gives up: either way this process goes on
    there.actors[2] = Actor(Receiver)
    delivered(sender, there)


class Pair:
    """A sender and a receiver of one rank, each with a card of its own by NCCL."""

    def __init__(self, way):
        self.way, (self.from_, self.to) = way, ("cpu", "cpu") if way == "gloo" else ("cuda:0", "cuda:1")
        self.big = 1 << (32 if way == "NCCL" else 27)        # bytes, more than gloo's sockets hold
        self.sender = self.receiver = None

    def up(self):
        for name, kind, device in (("sender", Sender, self.from_), ("receiver", Receiver, self.to)):
            actor = getattr(self, name)
            if actor is None or not actor.process.is_alive():
                setattr(self, name, Actor(kind, device))
        return self

    def end(self):
        for actor in filter(None, (self.sender, self.receiver)):
            actor.end()

    def delivered(self, meeting, n=1000, limit_s=60, engines=ALONE):
        ticket = self.sender.ask("offer", meeting, n, limit_s, engines)
        assert self.receiver.ask("receive", ticket, engines[0]["id"]) is True, n
        self.sender.ask("release")
        return ticket


@pytest.fixture(scope="module", params=["gloo", NCCL])
def two(request):
    pair = Pair(request.param)
    yield pair
    pair.end()


@pytest.fixture
def pair(two, request):
    failed = request.session.testsfailed
    yield two.up()
    if request.session.testsfailed > failed:                 # whatever state they are in
        two.end()


@pytest.fixture(params=["file", "127.0.0.1"])
def meeting(request, tmp_path):
    return str(tmp_path / "meeting") if request.param == "file" else request.param


def test_a_pair_hands_over_any_size(pair, meeting):
    first = pair.delivered(meeting, 1)
    for n in (12_345_678, 1 << 31 if pair.way == "NCCL" else 64, 1):
        assert pair.delivered(meeting, n)["where"] == first["where"], "one group serves until the engines change"
    other = pair.delivered(meeting, 999, engines=[{"id": "b", "ranks": 1}])
    assert other["where"] != first["where"]


def test_a_receiver_that_dies_in_the_middle(pair, meeting):
    """It is stopped before it can take its part, so that the sender's is certain to have begun."""
    pair.delivered(meeting)
    pair.receiver.signal(signal.SIGSTOP)
    pair.sender.ask("offer", meeting, pair.big)
    time.sleep(1)
    assert pair.sender.ask("under_way")
    pair.receiver.end()
    pair.sender.tell("release")
    held, seconds = pair.sender.answer()
    assert seconds < 2 * network.GRACE_S + 10 and held < pair.big / 2, "the buffer's memory is free again"
    assert pair.sender.ask("works")
    pair.up().delivered(meeting)


def test_a_receiver_that_dies_between_meeting_and_its_part(pair, meeting):
    ticket = pair.sender.ask("offer", meeting, 1000)
    pair.receiver.tell("meet", ticket)
    pair.receiver.process.join(30)
    time.sleep(1)                                            # the sender is in NCCL's meeting now, which nothing calls off
    pair.sender.tell("release")
    assert pair.sender.answer()[1] < 2 * network.GRACE_S + 10 and pair.sender.ask("works")
    pair.up().delivered(meeting)
    pair.sender.end()                                        # it is there still


def test_a_receiver_that_stands_still(pair, meeting):
    limit_s = 2 if pair.way == "gloo" else 10                # which the first bundle needs, too
    pair.delivered(meeting, 1000, limit_s)
    pair.receiver.signal(signal.SIGSTOP)
    ticket = pair.sender.ask("offer", meeting, pair.big, limit_s)
    time.sleep(limit_s + 1)
    assert not pair.sender.ask("under_way")
    pair.sender.ask("release")
    pair.receiver.signal(signal.SIGCONT)
    told, seconds = pair.receiver.tell("receive", ticket) or pair.receiver.answer()
    late = f"({pair.big:,} bytes did not arrive everywhere within {limit_s} s, over {pair.way})"
    assert told == f"Stop: the sender gave bundle 2 up {late}" or pair.way == "gloo" and told is True, "its sockets go on"
    assert seconds < 10 and pair.receiver.ask("works")
    pair.delivered(meeting)


def test_a_receiver_that_comes_late(pair, meeting):
    """The sender has met the limit, or was told to let go, before the last member came."""
    for limit_s, why in ((60, "the publish failed elsewhere"),
                         (2, f"not all 2 members of the hand-off's group met within 2 s, over {pair.way}")):
        ticket = pair.sender.ask("offer", meeting, 1000, limit_s)
        time.sleep(3 if limit_s == 2 else 0)
        pair.sender.ask("release")
        told, seconds = pair.receiver.tell("receive", ticket) or pair.receiver.answer()
        assert told == f"Stop: the sender gave bundle 1 up ({why})" and seconds < 10
    pair.delivered(meeting)


@pytest.mark.parametrize("met", [False, True])
def test_a_sender_that_is_gone_ends_the_wait(pair, meeting, met):
    if met:                                                  # the receiver's part begins, the sender's does not
        ticket = pair.delivered(meeting)
        ticket |= {"number": ticket["number"] + 1, "numel": pair.big}
    else:                                                    # an engine that does not come
        ticket = pair.sender.ask("offer", meeting, 1000, 60, ENGINES)
    pair.receiver.tell("receive", ticket)
    time.sleep(1)
    pair.sender.end()
    told, seconds = pair.receiver.answer()
    assert told.startswith(f"Stop: the sender of bundle {ticket['number']}") and " gone" in told and seconds < 10
    assert pair.receiver.ask("works")
    pair.up().delivered(meeting)


def test_bundles_leave_no_memory_taken(pair, meeting):
    used = []
    for _ in range(50):
        pair.delivered(meeting, 1 << 24)
        used.append((pair.sender.ask("used"), pair.receiver.ask("used")))
    grown = [last - first for first, last in zip(used[9], used[-1])]      # by then both allocators have what they keep
    assert max(grown) < 128 << 20, used                      # of the 640 MiB that came since


def test_the_buffer_is_let_go_when_nccls_kernel_has_ended(tmp_path, monkeypatch):
    """With stand-ins for group and work: an abort that fails is one, an abort that hangs ends the run with a sentence."""
    def group(abort):
        channel = network.Channel(str(tmp_path / "meeting"), network.SENDER, 2, 60)
        channel._group, channel._work = SimpleNamespace(abort=abort), work
        return channel

    def fails():
        calls.append("abort")
        raise RuntimeError("timed out")
    calls, hung = [], threading.Event()
    work = SimpleNamespace(synchronize=lambda: calls.append("synchronize"))
    group(fails).give_up()
    assert calls == ["abort", "synchronize"]
    monkeypatch.setattr(network, "ABORT_S", 0.2)
    with pytest.raises(Stop, match="NCCL did not end the hand-off's group within 0.2 s: its kernel may still hold the GPU"):
        group(hung.wait).give_up()
    hung.set()
    assert calls == ["abort", "synchronize"]
