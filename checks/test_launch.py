"""Launching on a cluster: the scripts as Slurm runs them (with stand-ins for its commands that make this machine two hosts, each
with a real Ray), the SkyPilot task, and the preflight between real Ray nodes of which two have other files."""
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from common import preflight
from common.cli import Stop
from recipes.launch import wait_nodes
from recipes.launch.wait_nodes import wrong

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = ROOT / "recipes" / "launch"

SRUN = """#!/usr/bin/env bash
# one task a host, all on this machine; exits with the largest code, as srun does; TERM is what scancel's stand-in sends
echo $$ > srun.pid
shift 3
trap 'kill -TERM ${pids[*]}' TERM
for host in $FAKE_HOSTS; do
    [ "$host" = "$FAKE_DOWN" ] || { SLURMD_NODENAME=$host "$@" & pids+=($!); }
done
worst=0
for pid in ${pids[*]}; do
    wait $pid; code=$?
    [ $code -le 128 ] || { wait $pid; code=$?; }
    [ $code -le $worst ] || worst=$code
done
exit $worst
"""

RECIPE = """
import json, os, pathlib, sys, time
sys.path.insert(0, ROOT)
from common import cli, cluster
def main():
    import ray
    cluster.connect(local=False)
    args = sys.argv[1:]
    run = pathlib.Path("runs", args[args.index("--name") + 1])
    run.mkdir(exist_ok="--resume" in args)
    nodes = sorted([n["NodeName"], n["Resources"].get("GPU", 0)] for n in ray.nodes() if n["Alive"])
    (run / f"seen{len(list(run.glob('seen*')))}").write_text(json.dumps([args, nodes]))
    if "--save" in args:
        (run / "checkpoints/step-1").mkdir(parents=True, exist_ok=True)
        (run / "checkpoints/step-1/state.json").write_text("{}")
    if "--sleep" in args:
        time.sleep(600)
    return 7
cli.run_main(main)
"""


@pytest.fixture
def job(tmp_path):
    """`job(*args, **env)` starts slurm.sh as a job of the hosts localhost and n2, in a copy of the repository's scripts."""
    for name in ("common", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "recipe.py").write_text(RECIPE.replace("ROOT", repr(str(ROOT))))
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", '#!/bin/sh\nprintf "%s\\n" $FAKE_HOSTS\n'),
                       ("scancel", '#!/bin/sh\n[ "$*" = "--signal=TERM $SLURM_JOB_ID.0" ] && kill -TERM $(cat srun.pid)\n')):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        number = s.getsockname()[1] % 10000                   # slurm.sh makes the port of Ray's head from the job's id
    started = []

    def start(*args, **env):
        env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "FAKE_HOSTS": "localhost n2", "FAKE_DOWN": "",
               "SLURM_JOB_NODELIST": "localhost,n2", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_NAME": "a",
               "SLURM_JOB_ID": str(number), "PYTHON": sys.executable,
               "RAY_FLAGS": "--num-gpus=8 --object-store-memory=80000000", **env}
        with open(tmp_path / f"log{len(started)}", "w") as log:
            started.append(subprocess.Popen(["bash", str(LAUNCH / "slurm.sh"), "recipe.py", *args], cwd=tmp_path, env=env,
                                            stdout=log, stderr=subprocess.STDOUT, start_new_session=True))
        started[-1].log = Path(log.name)
        return started[-1]
    start.folder = tmp_path
    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    left = [line for line in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout.splitlines()
            if f":{20000 + number}" in line or f"={20000 + number}" in line]
    assert not left, f"processes are left: {left}"


def wait_for(condition, process, seconds=180):
    end = time.time() + seconds
    while not condition():
        assert process.poll() is None and time.time() < end, process.log.read_text()
        time.sleep(0.2)


def test_scripts_are_sound():
    for script in LAUNCH.glob("*.sh"):
        subprocess.run(["bash", "-n", script], check=True)
        if shutil.which("shellcheck"):
            subprocess.run(["shellcheck", "-S", "warning", script], check=True)


def test_slurm_job_resumes_only_itself(job):
    """The recipe's code and output, both hosts, no Ray left; the same job again goes on; SIGTERM ends it in a sentence."""
    first = job("--lr", "1", "--save")
    assert first.wait(240) == 7, first.log.read_text()
    assert "Ray: 2 hosts x 8 GPUs" in first.log.read_text()
    seen = json.loads((job.folder / "runs/a/seen0").read_text())
    assert seen == [["--lr", "1", "--save", "--name", "a"], [["localhost", 8.0], ["n2", 8.0]]]

    again = job("--sleep")
    wait_for((job.folder / "runs/a/seen1").exists, again)
    assert json.loads((job.folder / "runs/a/seen1").read_text())[0] == ["--sleep", "--resume", "--name", "a"]
    again.send_signal(signal.SIGTERM)                          # as Slurm before the time limit
    assert again.wait(60) == 1
    assert "interrupted: a run that has saved a checkpoint goes on with --resume" in again.log.read_text()
    assert "Traceback" not in again.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("env, sentence", [({"FAKE_DOWN": "n2"}, "1 of 2 hosts are missing: n2"),
                                           ({"GPUS": "9"}, "localhost has 8 GPUs, not 9; n2 has 8 GPUs, not 9")])
def test_slurm_names_missing_host_and_missing_gpus(job, env, sentence):
    start = time.time()
    lost = job(WAIT_S="25", **env)
    assert lost.wait(120) == 1
    assert f"the Ray cluster is not complete: {sentence}\n" in lost.log.read_text()
    assert time.time() - start < 90 and not (job.folder / "runs").exists()


def test_a_head_that_never_answers_is_said(tmp_path):
    (tmp_path / "python").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "python").chmod(0o755)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))                               # bound, but nobody listens
        env = {**os.environ, "NODE": "localhost", "HOSTS": "localhost n2", "GPUS": "8", "NAME": "a", "JOB": "1", "WAIT_S": "2",
               "PORT": str(s.getsockname()[1]), "PYTHON": str(tmp_path / "python")}
        done = subprocess.run(["bash", LAUNCH / "node.sh", "x.py"], cwd=tmp_path, env=env, capture_output=True, text=True,
                              timeout=40)
    assert done.returncode == 1 and not (tmp_path / "runs").exists()
    assert done.stderr.splitlines()[-1] == f"localhost: Ray's head did not answer at localhost:{env['PORT']} within 2 s"


def test_slurm_refuses_another_folder(tmp_path):
    done = subprocess.run(["bash", LAUNCH / "slurm.sh", "recipe.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.strip().endswith("submit from the repository's root")


def test_wait_nodes_says_what_is_wrong():
    assert wrong(8, ["a", "b"], {"a": 8, "b": 8}) == []
    assert wrong(8, ["a", "b", "c"], {"a": 7, "d": 8}) == ["2 of 3 hosts are missing: b, c", "a has 7 GPUs, not 8",
                                                            "d is not one of this job's hosts"]


def test_wait_nodes_asks_again_while_the_head_starts(monkeypatch, capsys):
    import ray
    asked = []

    def init(**_):
        asked.append(1)
        if len(asked) < 3:
            raise ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: len(asked) == 3)
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeName": "a", "Alive": True, "Resources": {"GPU": 8.0}}])
    monkeypatch.setattr(sys, "argv", ["x", "9", "8", "a"])
    wait_nodes.main()
    assert len(asked) == 3 and capsys.readouterr().out == "Ray: 1 hosts x 8 GPUs\n"
    asked.clear()
    monkeypatch.setattr(sys, "argv", ["x", "0", "8", "a"])
    with pytest.raises(Stop, match="no Ray cluster answers within 0 s: Failed to connect to Ray cluster at 10.0.0.1:6379"):
        wait_nodes.main()


# ---------------------------------------------------------------- SkyPilot

TASK_KEYS = {"name", "num_nodes", "workdir", "resources", "envs", "secrets", "setup", "run"}     # of those of SkyPilot 0.14.1


def test_skypilot_task_runs_on_each_host(tmp_path):
    """Only documented keys; its `run`, with the variables that SkyPilot sets, hands node.sh its host, the head first."""
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert set(task) <= TASK_KEYS and isinstance(task["num_nodes"], int)
    assert set(task["resources"]) <= {"accelerators", "disk_size"} and re.fullmatch(r"\w+:8", task["resources"]["accelerators"])
    assert all(isinstance(v, str) for v in task["envs"].values()) and task["secrets"] == {"RAY_AUTH_TOKEN": None}
    subprocess.run(["bash", "-n"], input=task["setup"] + task["run"], text=True, check=True)
    (tmp_path / "recipes/launch").mkdir(parents=True)
    (tmp_path / "recipes/launch/node.sh").write_text(
        'printf "%s|" "$NODE" "$HOSTS" $NAME $GPUS $JOB $PORT "$RAY_FLAGS" $RAY_AUTH_MODE "$*"; exit 7\n')
    env = {**os.environ, **task["envs"], "SHARED": str(tmp_path / "shared"), "FLAGS": "--lr 1",
           "SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.9", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8",
           "SKYPILOT_TASK_ID": "sky-1"}
    done = subprocess.run(["bash", "-c", task["run"]], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.split("|") == ["10.0.0.9", "10.0.0.5 10.0.0.9", "dapo-glm5p3-lora", "8", "sky-1", "6379",
                                      "--node-ip-address=10.0.0.9", "token", "recipes/dapo_glm5p3_lora.py --lr 1", ""]
    assert done.returncode == 7 and (tmp_path / "runs").resolve() == tmp_path / "shared" / "runs"


# ---------------------------------------------------------------- preflight

HERE = {"sources": {"common/a.py": "11", "common/b.py": "22"}, "torch": "2.13.0", "vllm": None, "model /m": "aa"}
CARD = ("NVIDIA B300", "580.1", 267 << 30, 266 << 30)
FIT = {"gpus": [CARD] * 8, "host memory": 4000 << 30, "room in runs/": 900 << 30, "room in /dev/shm": 100 << 30}


def test_differences_have_both_values():
    assert preflight.differences(HERE, HERE) == []
    there = {**HERE, "torch": "2.12.0", "vllm": "0.32.0", "model /m": "unreadable (No such file or directory)"}
    assert preflight.differences(there, HERE) == [
        ("torch", "2.12.0", "driver: 2.13.0"), ("vllm", "0.32.0", "driver: missing"),
        ("model /m", "unreadable (No such file or directory)", "driver: aa")]
    there = {**HERE, "sources": {"common/a.py": "11", "common/b.py": "23"}}
    assert preflight.differences(there, HERE) == [("common/b.py", "23", "driver: 22")]
    there = {**HERE, "sources": {"common/b.py": "23", "common/c.py": "33"}}
    assert preflight.differences(there, HERE) == [("common/a.py and 2 more sources", "missing", "driver: 11")]


def test_shortages_have_both_values():
    needs = {"host memory": 3800 << 30, "room in runs/": 900 << 30, "room in /dev/shm": preflight.SHM}
    assert preflight.shortages(FIT, 8, needs, 0.95) == []
    taken = ("NVIDIA B300", "580.1", 267 << 30, 200 << 30)
    short = {**FIT, "gpus": [CARD] * 6 + [taken], "host memory": 512 << 30, "room in /dev/shm": 64 << 20}
    assert preflight.shortages(short, 8, needs, 0.95) == [
        ("GPUs", 7, "needed: 8"), ("free memory of GPU 6", "200.0 GiB", "needed: 253.6 GiB"),
        ("host memory", "512.0 GiB", "needed: 3,800.0 GiB"), ("room in /dev/shm", "0.1 GiB", "needed: 8.0 GiB")]


@pytest.mark.parametrize("given, seen", [(None, [0, 1]), ("1", [1]), ("1,0", [1, 0]), ("GPU-bb", [1]), ("0,7", [0]), ("", [])])
def test_gpus_are_read_from_nvidia_smi(tmp_path, monkeypatch, given, seen):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-aa11, NVIDIA B300, 580.1, 273408, 272384'\n"
                    "echo '1, GPU-bb22, NVIDIA B300, 580.1, 273408, 5'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    found = preflight.amounts(tmp_path)
    assert found["gpus"] == [[CARD, ("NVIDIA B300", "580.1", 267 << 30, 5 << 20)][i] for i in seen]
    assert 0 < found["host memory"] < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") and found["room in runs/"] > 0


def test_a_resumed_run_must_find_its_model_and_data(tmp_path):
    files, here = ["train.parquet", "eval.parquet"], {"model m": "11", "train.parquet": "22", "eval.parquet": "33", "torch": "2"}
    for now in (here, here, {**here, "torch": "3"}):
        preflight.unchanged(tmp_path, "m", files, now)
    assert json.loads((tmp_path / "inputs.json").read_text()) == {"model": "11", "data": ["22", "33"]}
    with pytest.raises(Stop) as stop:
        preflight.unchanged(tmp_path, "m", files, {**here, "model m": "12", "eval.parquet": "34"})
    assert str(stop.value) == f"{tmp_path} was started with other content in m (fingerprint 11, now 12), eval.parquet " \
                              "(fingerprint 33, now 34): put that back or use another --name"


DRIVER = """
import sys; sys.path.insert(0, ROOT)
from common import cli, cluster, preflight
def main():
    cluster.connect(local=False)
    preflight.check(3, 0, "model", ["train.parquet", "eval.parquet"], "runs/a",
                    {"host memory": 1 << 20, "room in runs/": 1 << 20})
cli.run_main(main)
"""


def test_preflight_between_nodes(tmp_path):
    """The second node lives in a mount namespace of its own, as another machine would: another model, data, package and source, a
    runs/ of its own. The third has no checkout. All of it is said in one sentence, and the first alone is fit."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("unshare -m is not permitted: no second node with other files")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text("{} ")
    (tmp_path / "runs/a").mkdir(parents=True)
    for name in ("train", "eval"):
        (tmp_path / f"{name}.parquet").write_text(name)
    (tmp_path / "flags.py").write_text((ROOT / "common/flags.py").read_text() + "\n# edited\n")
    (tmp_path / "drive.py").write_text(DRIVER.replace("ROOT", repr(str(ROOT))))
    from importlib import metadata
    peft = next(Path(metadata.distribution("peft").locate_file(f)) for f in metadata.files("peft") if f.name == "METADATA")
    (tmp_path / "METADATA").write_text(peft.read_text().replace(f"Version: {metadata.version('peft')}", "Version: 0.0.1"))
    mounts = "mount --bind other model && mount -t tmpfs none runs && mount --bind eval.parquet train.parquet && " \
             f"mount --bind flags.py {ROOT}/common/flags.py && mount --bind METADATA {peft}"
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 32, "RAY_ADDRESS": f"127.0.0.1:{port}"}
    ray = f"exec {sys.executable} -m ray.scripts.scripts start --block --num-cpus=1 --object-store-memory=80000000"

    def start(before, options):
        return subprocess.Popen(["unshare", "-m", "bash", "-c", f"{before} && {ray} {options}"], cwd=tmp_path, env=env,
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)

    def drive(seconds=60):
        end = time.time() + seconds
        while True:
            done = subprocess.run([sys.executable, "drive.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
            if "no Ray cluster answers" not in done.stderr or time.time() > end:
                return done

    nodes = [start("true", f"--head --port={port} --include-dashboard=false --node-name=n1")]
    try:
        alone = drive()
        assert alone.returncode == 0 and re.search(r"preflight: 1 node alike and fit, \d+\.\d s", alone.stdout), alone.stderr
        # one after the other: two that start together may pick the same port
        for n, before in ((2, mounts), (3, f"mount -t tmpfs none {ROOT}/common")):
            nodes.append(start(before, f"--address=127.0.0.1:{port} --node-name=n{n}"))
            end = time.time() + 120
            while f" of {n} nodes" not in (all_three := drive()).stderr and time.time() < end:
                pass
    finally:
        for node in reversed(nodes):
            os.killpg(node.pid, signal.SIGTERM)
            try:
                node.wait(15)
            except subprocess.TimeoutExpired:
                pass
            os.killpg(node.pid, signal.SIGKILL) if node.poll() is None else None
    sentence = all_three.stderr.strip().splitlines()[-1]
    assert all_three.returncode == 1, sentence
    assert sentence.startswith("2 of 3 nodes are not fit for this run: n2: common/flags.py "), sentence
    second, third = sentence.split("; n3: ")
    at = str(tmp_path)
    for what in (f"peft 0.0.1 (driver: {metadata.version('peft')})", f"model {at}/model ", f"{at}/train.parquet ",
                 f"the driver's file in {at}/runs/a not seen (needed: one folder for all nodes)"):
        assert what in second, sentence
    assert "eval.parquet" not in second and "torch" not in second
    assert third.startswith(f"checkout {ROOT} unusable (cannot import name 'preflight' from 'common'"), sentence
    assert not list((tmp_path / "runs/a").glob(".preflight*"))
    assert [line.split()[0] for line in all_three.stdout.splitlines()[-7:]] == ["node"] + ["n2"] * 5 + ["n3"]
