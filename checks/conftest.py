"""Set before anything imports torch: the environment the CPU stack needs, and what skips a test (`slow`, `gpu`)."""
import os
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# Ray and torchrun start processes of their own
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_MODE="offline")
HAVE_GPU = shutil.which("nvidia-smi") is not None                  # asking torch would import it
if not HAVE_GPU:
    from common import vllm_cpu
    os.environ.update(vllm_cpu.ENV)


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: minutes long; run by `make test-all` only")
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU")
    for noise in ("megatron", "torch", "vllm"):                    # thousands of lines that nobody can act on here
        for kind in ("DeprecationWarning", "FutureWarning", "UserWarning"):
            config.addinivalue_line("filterwarnings", f"ignore:.*:{kind}:{noise}.*")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not HAVE_GPU:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; none on this machine"))


@pytest.fixture(scope="module", autouse=True)
def own_receiver():
    if "vllm" in sys.modules:
        from checks.local import free_worker
        free_worker()
