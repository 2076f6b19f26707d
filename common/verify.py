"""Is this expression the gold answer? math-verify decides, in processes of its own that can be killed.

Only gold answers that are no integers come here. math-verify builds sympy expressions from text that a model wrote, and some of
it never ends or takes all memory (9**9**9**9); its own time limit is an alarm signal, which fails outside a main thread. So each
comparison runs in a worker process with a hard limit of time and memory.
"""
import atexit
import functools
import multiprocessing
import os
import threading
from concurrent.futures import TimeoutError

SECONDS = 0.8                     # a usual comparison takes 6 ms; a worker that takes longer is killed and replaced
MEMORY = 2 << 30                  # bytes of address space of a worker; sympy and its imports take about a quarter of it
WORKERS = max(2, min(8, (os.cpu_count() or 2) // 2))
_lock = threading.Lock()


def same(found, gold):
    """(whether two expressions mean the same, reason). found, gold: LaTeX or plain text, without the box around it. reason is
    right, wrong, took too long or failed; the last two count as wrong. Waits for a free worker; may be called from any thread."""
    future = _pool().schedule(_same, args=(found, gold), timeout=SECONDS)
    try:
        equal = future.result()
    except TimeoutError:
        return False, "took too long"
    except Exception:             # out of memory, too deep a recursion, a dead worker: whatever a model's text can cause
        return False, "failed"
    return equal, "right" if equal else "wrong"


def readable(gold):
    """Whether math-verify reads an expression from a gold answer, and finds it equal to itself."""
    return same(gold, gold)[0]


@functools.cache
def _start():
    from pebble import ProcessPool
    # workers are forked from a small server that has imported sympy already: a killed one is replaced at once
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "math_verify"])
    pool = ProcessPool(WORKERS, initializer=_limit, context=context)
    atexit.register(lambda: (pool.stop(), pool.join()))
    return pool


def _pool():
    with _lock:                   # two threads that come first together must not start two pools
        return _start()


def _limit():
    import logging
    import resource
    import signal
    logging.disable()             # it warns that its own time limit is off
    _same("1/2", "0.5")           # what sympy loads at its first use does not count against the first answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _same(found, gold):
    from math_verify import parse, verify
    gold, found = (parse(f"${text.strip().strip('$')}$", parsing_timeout=None) for text in (gold, found))
    return bool(gold and found and verify(gold, found, timeout_seconds=None))
