"""The hand-off over the network, by gloo: a sender here, receivers in processes of their own."""
import multiprocessing
import os
import time

import pytest
import torch

from common import network
from common.cli import Stop

ENGINES = [{"id": "a", "ranks": 1}, {"id": "b", "ranks": 2}]


def receiver(pipe, name, rank):
    """Answers each ticket with the sum of what came, or with the error."""
    torch.set_num_threads(1)
    pipe.send("up")
    for ticket in iter(pipe.recv, None):
        began = time.monotonic()
        try:
            pipe.send(int(network.receive({**ticket, "first": ticket["first"][name]}, rank, "cpu").long().sum()))
        except Exception as error:                           # noqa: BLE001
            pipe.send((f"{type(error).__name__}: {error}", time.monotonic() - began))


class Receivers:
    def __init__(self):
        self.members = [("a", 0), ("b", 0), ("b", 1)]
        self.pipes, self.processes = [None] * 3, [None] * 3
        for i in range(3):
            self.start(i)

    def start(self, i):
        context = multiprocessing.get_context("spawn")
        self.pipes[i], there = context.Pipe()
        self.processes[i] = context.Process(target=receiver, args=(there, *self.members[i]), daemon=True)
        self.processes[i].start()
        assert self.pipes[i].recv() == "up"

    def send(self, ticket, which=(0, 1, 2)):
        for i in which:
            self.pipes[i].send(ticket)

    def answers(self, which=(0, 1, 2)):
        assert all(self.pipes[i].poll(30) for i in which), "a receiver still waits"
        return [self.pipes[i].recv() for i in which]

    def stop(self):
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def all_there():
    receivers = Receivers()
    yield receivers
    receivers.stop()


@pytest.fixture
def there(all_there):
    """All receivers up; a test may kill some."""
    for i, process in enumerate(all_there.processes):
        if not process.is_alive():
            all_there.start(i)
    return all_there


@pytest.fixture(params=["file", "address"])
def sender(request, tmp_path):
    return network.Network(tmp_path / "meeting" if request.param == "file" else "127.0.0.1", limit_s=20)


def flat(n, seed=0):
    return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def delivered(sender, there, n=1000, engines=ENGINES):
    buffer = flat(n, n)
    there.send(sender.offer(buffer, engines))
    assert there.answers() == [int(buffer.long().sum())] * 3
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
    sender.release()
    for told, seconds in there.answers([0, 1]):
        assert told == "Stop: the sender gave bundle 1 up (the publish failed elsewhere)" and seconds < 10
    delivered(sender, there)                                 # the next one goes to all of them again


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
    there.processes[2].kill()
    there.processes[2].join()
    sender.offer(flat(10), ENGINES)
    sender.release()                                         # notices, or gives up: either way this process goes on
    there.start(2)
    delivered(sender, there)


def _send_and_stay(meeting, pipe):
    torch.set_num_threads(1)
    pipe.send(network.Network(meeting, limit_s=60).offer(flat(10), ENGINES))
    time.sleep(600)


@pytest.mark.parametrize("meeting", ["file", "127.0.0.1"])
def test_a_sender_that_is_gone_ends_the_wait(meeting, tmp_path, there):
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=_send_and_stay, args=(str(tmp_path / "meeting") if meeting == "file" else meeting, other))
    process.start()
    there.send(pipe.recv(), [0, 1])
    time.sleep(0.5)
    os.kill(process.pid, 9)
    process.join()
    for told, seconds in there.answers([0, 1]):
        assert told.startswith("Stop: the sender of bundle 1") and " gone" in told and seconds < 20
