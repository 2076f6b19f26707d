"""The families of test_handoff.py again on a bf16 engine with a bf16 trainer, in a process of its own (one engine a process)."""
import os
import subprocess
import sys
from pathlib import Path


def test_published_equals_trainer_in_bfloat16():
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider",
               Path(__file__).with_name("test_handoff.py"), "-k", "published_equals_trainer or five_steps_pass"]
    found = subprocess.run(command, env={**os.environ, "DTYPE": "bfloat16"}, capture_output=True, text=True)
    assert found.returncode == 0 and "20 passed" in found.stdout, found.stdout[-3000:]
