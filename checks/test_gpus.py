"""Which GPUs a process gets: those that CUDA_VISIBLE_DEVICES gives its node, through Ray's own processes; what recipes want."""
import importlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from checks.conftest import ROOT
from common import cluster, gpus
from common.cli import Stop

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.py"))
UUID = "GPU-5a2ecb7b-2ff4-4a2c-9c5c-2f4ba1a1f0d3"


@pytest.fixture(autouse=True)
def given_back():
    """`take` changes this process's environment, which the tests after these would hand to Ray."""
    before = os.environ.get(gpus.CHOICE)
    yield
    os.environ.pop(gpus.CHOICE, None)
    if before is not None:
        os.environ[gpus.CHOICE] = before


@pytest.mark.parametrize("given, indices, left", [
    (None, [0, 1], "0,1"), (None, [3], "3"), ("5,3", [0], "5"), ("5,3", [1], "3"), ("5, 3", [1, 0], "3,5"),
    (f"{UUID},MIG-0", [0], UUID), (f"2,{UUID}", [0, 1], f"2,{UUID}"),
])
def test_a_process_takes_its_share_of_what_its_node_was_given(monkeypatch, given, indices, left):
    monkeypatch.delenv(gpus.CHOICE, raising=False)
    if given is not None:
        monkeypatch.setenv(gpus.CHOICE, given)
    gpus.take(indices)
    assert os.environ[gpus.CHOICE] == left


@pytest.mark.parametrize("given, n", [("5,3", 2), ("", 0), ("-1", 0), ("4,-1,2", 1)])
def test_more_than_was_given_is_refused(monkeypatch, given, n):
    monkeypatch.setenv(gpus.CHOICE, given)
    with pytest.raises(Stop, match=rf"^GPU 2 of a node is needed, counted from 0, but its CUDA_VISIBLE_DEVICES={given} "
                                   rf"gives it {n}$"):
        gpus.take([1, 2])
    assert os.environ[gpus.CHOICE] == given


@pytest.mark.parametrize("given, n", [(None, 8), ("5,3", 2), (UUID, 1), ("", 0), ("NoDevFiles", 0), ("0,1,2,3,4,5,6,7,8", 8)])
def test_gpus_are_counted(monkeypatch, given, n):
    monkeypatch.setattr(gpus.glob, "glob", lambda pattern: [pattern] * 8)
    monkeypatch.delenv(gpus.CHOICE, raising=False)
    if given is not None:
        monkeypatch.setenv(gpus.CHOICE, given)
    assert gpus.count() == n


class Seen:
    """Tells what its process may use."""

    def gpus(self):
        return os.environ.get(gpus.CHOICE)


DRIVER = f"""
import functools, json, sys
sys.path.insert(0, {str(ROOT)!r})
import ray
ray.init = functools.partial(ray.init, num_gpus=2)
from common import cluster
from common.cli import Stop
cluster.connect(local=True)
place = cluster.nodes(1, 2)
def seen(n, gpus):
    group = cluster.start("checks.test_gpus:Seen", "engine", place, [{{}}] * n, gpus=gpus)
    try:
        return group.ready().gpus()
    except Stop as stop:
        return str(stop)
    finally:
        group.stop()
print(json.dumps([seen(2, 1), seen(1, 2), seen(2, 2), seen(1, 0)]))
"""


@pytest.mark.parametrize("given", ["5,3", f"{UUID},0"])
def test_actors_share_what_the_shell_gave_their_node(given):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", DRIVER], env={**os.environ, gpus.CHOICE: given}, cwd=ROOT,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = given.split(",")
    assert json.loads(done.stdout.splitlines()[-1]) == [
        [first, second], [given], "engine 1, start: GPU 3 of a node is needed, counted from 0, but its "
        f"CUDA_VISIBLE_DEVICES={given} gives it 2", [given]]


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_ask_for_one_gpu_a_rank_and_tp_an_engine(name, monkeypatch, tmp_path):
    recipe, asked = importlib.import_module(f"recipes.{name}"), {}
    monkeypatch.setattr(cluster, "nodes", lambda *_: "the nodes")
    monkeypatch.setattr(cluster, "meeting", lambda *_: "a meeting")
    monkeypatch.setattr(cluster, "start", lambda where, name, place, arguments, on=None, gpus=0, **_:
                        asked.update({name: (len(arguments), list(on), gpus)}) or mock.MagicMock())
    cfg = recipe.Config()
    recipe.start(cfg, SimpleNamespace(folder=tmp_path))
    ranks, rank_nodes, rank_gpus = asked["trainer rank"]
    engines, engine_nodes, engine_gpus = asked["sampler engine"]
    assert rank_gpus == 1 and ranks == len(rank_nodes) * cfg.gpus_per_node
    assert engine_gpus == cfg.sampler_tp and engines * engine_gpus == len(engine_nodes) * cfg.gpus_per_node
