"""The GPUs that a process was given: those that CUDA_VISIBLE_DEVICES names, by index or UUID, or all of its machine. CUDA itself
is not asked: it would hold on to what it sees then."""
import glob
import itertools
import os

from common.cli import Stop

CHOICE = "CUDA_VISIBLE_DEVICES"


def named():
    """The names in CUDA_VISIBLE_DEVICES that count, which CUDA reads until the first one that is none (Slurm's NoDevFiles); None
    where it is unset."""
    if CHOICE not in os.environ:
        return None
    names = (name.strip() for name in os.environ[CHOICE].split(","))
    return list(itertools.takewhile(lambda name: name.isdigit() or name.startswith(("GPU-", "MIG-")), names))


def count():
    """How many GPUs this process may use."""
    here, names = len(glob.glob("/dev/nvidia[0-9]*")), named()
    return here if names is None else min(here, len(names))


def take(indices):
    """Leave this process those of its GPUs alone that `indices` number. For before anything starts CUDA."""
    names = named()
    if names is not None and max(indices) >= len(names):
        raise Stop(f"GPU {max(indices)} of a node is needed, counted from 0, but its {CHOICE}={os.environ[CHOICE]} gives it "
                   f"{len(names)}")
    os.environ[CHOICE] = ",".join(str(i) if names is None else names[i] for i in indices)
