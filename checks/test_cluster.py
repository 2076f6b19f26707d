"""Groups of actors that are killed, stopped and starved: Ray's own processes with a stand-in for rank and engine."""
import os
import signal
import time

import pytest

from common import cluster
from common.cli import Stop


class Stub:
    """Answers with what it was asked; `base` is its state, which a new one does without."""

    def __init__(self, number, fails=None):
        if fails:
            raise ValueError(fails)
        self.number, self.base = number, None

    def node(self):
        return os.getpid()

    def give(self, base):
        self.base = base

    def work(self, items, seconds=0.0):
        time.sleep(seconds)
        return [(self.number, self.base, item) for item in items]

    def fail(self, kind):
        if kind == "memory":
            raise MemoryError
        if kind == "cpu":
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to "
                               "allocate 8 bytes\nframe 0")
        if kind == "engine":
            raise type("EngineDeadError", (Exception,), {})("EngineCore encountered an issue")
        raise ValueError(kind)


@pytest.fixture(scope="module")
def place():
    import ray
    cluster.connect(local=True)
    yield cluster.nodes(1, 0)
    ray.shutdown()


def group(place, n=2, **how):
    return cluster.start("checks.test_cluster:Stub", "engine", place, [dict(number=i) for i in range(n)], **how).ready()


def during(monkeypatch, verb, n, act):
    """Run `act(group)` when `verb` is under way for the n-th time."""
    gather, seen = cluster.Group._gather, []

    def hooked(self, called, futures):
        if called == verb:
            seen.append(called)
            if len(seen) == n:
                time.sleep(1)
                act(self)
        return gather(self, called, futures)
    monkeypatch.setattr(cluster.Group, "_gather", hooked)


def alive(pid):
    try:
        return "(ray::Host) Z" not in open(f"/proc/{pid}/stat").read()
    except (FileNotFoundError, ProcessLookupError):                # gone between two looks
        return False


def test_a_dead_actor_is_built_anew_and_alone_asked_again(place, monkeypatch, capsys):
    engines = group(place, restarts=2)
    engines.give("v1")
    engines.again = {"work": lambda new: new.give("v1 again")}
    pids = engines.node()
    during(monkeypatch, "work", 1, lambda g: os.kill(pids[1], signal.SIGKILL))
    found = engines.each("work", [(["a", "b"], 2.0), (["c"], 2.0)])
    assert found == [[(0, "v1", "a"), (0, "v1", "b")], [(1, "v1 again", "c")]]
    assert engines.node()[0] == pids[0] and engines.node()[1] != pids[1] and engines.restarts == 1
    told = capsys.readouterr().out
    assert f"engine 1 on {os.uname().nodename} died during work (its process crashed or was killed" in told
    assert "): started again, 1 restarts are left\n" in told
    engines.stop()


def test_restarts_are_counted_and_other_verbs_end_the_call(place):
    engines = group(place, 1, restarts=1)
    engines.again, engines.hint = {"node": None}, "resume it"
    for _ in range(2):
        os.kill(engines.only([0]).node()[0], signal.SIGKILL)
        with pytest.raises(Stop, match=rf"^engine 0 on {os.uname().nodename} died during work \(.*\): resume it$"):
            engines.work([])
        if engines.restarts:
            assert engines.restart() == [0] and engines.restart() == []
    with pytest.raises(Stop, match=r"died during work .*, and no restart is left: resume it"):
        engines.restart()


def test_an_engine_whose_own_process_died_counts_as_dead(place):
    engines = group(place, 2, restarts=1)
    before = engines.node()
    with pytest.raises(Stop, match=r"engine [01] on .* died during fail \(EngineCore encountered an issue\)"):
        engines.each("fail", [("engine",), ("engine",)])
    new, *others = engines.restart()                         # whichever was heard first; the other one's end is not looked at
    assert not others and engines.node()[new] != before[new]
    engines.stop()


@pytest.mark.parametrize("kind, sentence", [
    ("memory", "engine 0, fail: out of memory"),
    ("cpu", "engine 0, fail: out of memory: .*can't allocate memory: you tried to allocate 8 bytes$"),
])
def test_a_lack_of_memory_is_one_sentence(place, kind, sentence):
    engines = group(place, 1)
    with pytest.raises(Stop, match=sentence):
        engines.fail(kind)
    with pytest.raises(ValueError, match="else"):
        engines.fail("else")
    engines.stop()


@pytest.mark.parametrize("text, sentence", [
    ("Free memory on device cuda:0 (1.0/139.8 GiB) on startup is less than desired GPU memory utilization",
     "engine 0, start: out of memory: Free memory on device cuda:0"),
    ("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`", "engine 0, start: out of memory: No "),
    ("Engine core initialization failed. See root cause above.", "engine 0, start: vLLM's engine did not start"),
])
def test_an_engine_that_finds_no_memory_at_its_start_is_one_sentence(place, text, sentence):
    engines = cluster.start("checks.test_cluster:Stub", "engine", place, [dict(number=0, fails=text)])
    with pytest.raises(Stop, match=sentence):
        engines.ready()
    engines.stop()


def test_a_hung_actor_ends_the_call_and_is_killed_by_name(place, monkeypatch):
    """The one that stands still is named, though the other has not answered either."""
    ranks = group(place, limits={None: 60, "work": 4})
    ranks.hint, pids = "resume it", ranks.node()
    during(monkeypatch, "work", 1, lambda g: os.kill(pids[1], signal.SIGSTOP))
    began = time.time()
    with pytest.raises(Stop, match=rf"^engine 1 on {os.uname().nodename} did not answer work within 4 s and was killed "
                                   r"\(its process: stopped\); killed with it: 0 \(sleeping\): resume it$"):
        ranks.work(["a"], 300.0)
    assert 4 < time.time() - began < 60
    until = time.time() + 20
    while any(map(alive, pids)) and time.time() < until:
        time.sleep(0.1)
    assert not any(map(alive, pids))


def test_vllm_without_room_for_its_cache_is_one_sentence(place, tmp_path):
    """The sampler's own engine, asked for a KV cache that no machine holds."""
    from data import arithmetic
    arithmetic.prepare(tmp_path)
    engines = cluster.start("common.sampler:SamplerEngine", "sampler engine", place, [dict(
        model=str(tmp_path / "start"), max_model_len=64, max_num_seqs=4, vllm_args={"kv_cache_memory_bytes": 1 << 50})])
    with pytest.raises(Stop, match=r"^sampler engine 0, start: out of memory"):
        engines.ready()
    engines.stop()
