"""Grade-school maths with a LoRA adapter merged into FP8 rollouts, GLM-5.3 (753B): published: GSM8K 82 % -> 93 % in 5 steps.

plan      python recipes/gsm8k_glm5p3_lora.py --plan           # what it will do and what is missing; seconds, no GPU
rehearse  python recipes/gsm8k_glm5p3_lora.py --rehearse       # the same code, a tiny GLM-5.3, 2 CPU cores or one GPU
full      RAY_ADDRESS=auto python recipes/gsm8k_glm5p3_lora.py # 8 nodes x 8 B200, trainer and sampler on the same GPUs
resume    ... --resume                                         # goes on from the newest checkpoint in runs/NAME

A short run that shows a cluster in order before a long one is paid for. What differs from recipes/dapo_glm5p3_lora.py, as in the
published run unless it says otherwise:
 1. The sampler has no adapter: the trainer merges it into the weights that it hands over (bf16), and the sampler casts them to
    FP8 as they arrive.
 2. 32 prompts x 8 answers a step in one update, rank 64, learning rate 1e-5 from the first update on.
 3. The loss is the mean over sequences of the mean over their tokens; no length penalty, and cut answers are learned from.
 4. Truncated importance sampling at 2, which here covers FP8's rounding too.
 5. Held-out problems are sampled once each (the published run does not say).

Shapes: P prompts, G answers each, B = P x G, N packed response tokens of one micro-batch. logp is the natural log of the
taken token's probability: logp_rollout from the sampler, logp_old from the trainer before the step's updates, logp_new
during them.
"""
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli, fits, gpus, hf_config, memory, size  # noqa: E402
from data import dataset  # noqa: E402


@dataclasses.dataclass
class Config:
    # model
    model: str = "zai-org/GLM-5.3-BF16"      # folder of the checkpoint, bf16; never a name to download
    dtype: str = "bfloat16"                  # of base, activations and merged weights; adapter parameters are float32
    sampler_fp8: str = "fp8"                 # the sampler's weights, cast as they arrive: fp8 (per tensor), fp8_per_block or none
    lora_rank: int = 64                      # alpha / rank = 1
    lora_alpha: int = 64
    lora_targets: tuple[str, ...] = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj",
                                     "gate_proj", "up_proj", "down_proj")
    lora_experts: str = "shared"             # shared: one adapter for all routed experts of a layer; each: one per expert
    # data
    train_data: str = "data/gsm8k_train.parquet" # data/prepare_gsm8k.py: 7,473 problems
    eval_data: str = "data/gsm8k_test.parquet"   # data/prepare_gsm8k.py --split test: 1,319 problems
    max_prompt_tokens: int = 512             # longer prompts are dropped, with a count
    # rollout
    prompts_per_step: int = 32               # P; 32 x 8 = 256 answers
    group_size: int = 8                      # G; answers per prompt, the baseline of the advantage
    max_response_tokens: int = 4096
    temperature: float = 1.0
    # algorithm
    clip_low: float = 0.2                    # ratio below 1 - clip_low is clipped
    clip_high: float = 0.28                  # DAPO 3.1: a higher upper bound lets rare tokens grow
    dual_clip: float = 10.0                  # arXiv 1912.09729
    is_cap: float = 2.0                      # truncated importance sampling
    max_mismatch: float = 0.2                # mean |logp_old - logp_rollout| of a step above which the run stops; 0.03 is usual
    drift_steps: int = 3                     # it also stops after so many steps in a row above 4 x what the check measured
    # optimiser
    steps: int = 5                           # 5 x 1 = 5 updates
    updates_per_step: int = 1                # mini-batch of 32 prompts
    lr: float = 1e-5
    warmup_updates: int = 0                  # linear, then constant
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    clip_grad: float = 1.0
    # parallelism: every node is one tensor-parallel group of the trainer and one sampler engine on the same 8 GPUs
    nodes: int = 8
    sampler_nodes: int = 0                   # more nodes, for the sampler alone: weights go there over the network
    gpus_per_node: int = 8                   # 0: on the CPU
    gpu_memory_gib: float = 178              # as torch reports it: B300 (sold as 288 GB) 267, B200 178, H200 139; plan only
    cpu_ranks: int = 1                       # trainer ranks and sampler engines when gpus_per_node is 0
    tp: int = 8                              # tensor, expert and pipeline parallel size of the trainer
    ep: int = 64
    pp: int = 1
    sampler_tp: int = 8
    max_tokens_per_micro_batch: int = 8192
    recompute: str = "full"                  # activations: full or none
    logprob_chunk: int = 1024                # tokens whose logits exist at once: 1,024 x 154,880 / TP 8 x 18 B = 0.4 GB
    bucket_gib: float = 1.0                  # of weights that travel to the sampler at a time
    max_num_seqs: int = 64                   # concurrent requests of one engine (published: 256 with graphs for at most 128)
    gpu_memory_utilization: float = 0.75     # a publish finds the sampler awake (published: 0.8)
    # evaluation
    eval_every: int = 5                      # steps; also before the first and after the last
    eval_samples: int = 1
    eval_top_p: float = 0.7
    # bookkeeping
    name: str = "gsm8k-glm5p3-lora"           # the run's folder is runs/NAME, below the current directory
    seed: int = 0
    save_every: int = 1                      # steps
    keep: int = 3                            # checkpoints
    wandb: str = "offline"                   # off, offline or online
    check: bool = True                       # five-step check before the first step and after a resume
    engine_restarts: int = 3                 # sampler engines that die are started again, so often in a run
    # limits: a call that takes longer is taken for hung, and the run ends; generous, because --resume repeats what it costs
    files_limit_s: float = 10800             # start, save and restore: 1.5 TB at 0.2 GB/s are two hours
    sample_limit_s: float = 21600            # all answers of a step or an evaluation
    update_limit_s: float = 7200             # one update, or the log-probabilities of a step
    call_limit_s: float = 1800               # any other call: publish, move weights
    # what to do
    gpu_price: float = 0.0                   # $ for an hour of one GPU; plan only
    plan: bool = False                       # print the plan and stop
    resume: bool = False
    rehearse: bool = False

    # derived
    @property
    def trainer_ranks(self):
        return self.nodes * self.gpus_per_node or self.cpu_ranks

    @property
    def engines(self):
        return (self.sampler_nodes or self.nodes) * self.gpus_per_node // self.sampler_tp or self.cpu_ranks

    @property
    def dp(self):
        return self.trainer_ranks // (self.tp * self.pp)


# Smaller in the rehearsal: model (taught to add), problems, lengths, rank and layout, no FP8; larger: the learning rate.
PRESETS = {"rehearse": dict(
    model="", train_data="", eval_data="", dtype="float32", sampler_fp8="none", lora_rank=8, lora_alpha=8, max_prompt_tokens=32,
    max_response_tokens=48, lr=1.5e-3, bucket_gib=0.002, steps=12, nodes=1,
    gpus_per_node=0, cpu_ranks=2, tp=1, ep=1, sampler_tp=1, max_tokens_per_micro_batch=4096,
    logprob_chunk=2048, max_num_seqs=128, save_every=5,
    max_mismatch=1e-3, name="")}
if gpus.count():                         # a wider model in bfloat16 on one GPU, where trainer and sampler take turns
    PRESETS["rehearse"] |= dict(gpus_per_node=1, dtype="bfloat16", gpu_memory_utilization=0.3, max_mismatch=Config.max_mismatch)
# what a GPU holds, for the plan
SIZES = functools.partial(memory.whole, problems=1319)


# -- plan ------------------------------------------------------------------------------------------------------------

def plan(cfg):
    """What the run will do, and the problems that would stop it. Needs neither torch nor a GPU."""
    c = cfg
    counts = ("steps", "updates_per_step", "prompts_per_step", "save_every", "eval_every", "keep", "eval_samples", "nodes",
              "cpu_ranks", "tp", "ep", "pp", "sampler_tp", "drift_steps", "max_num_seqs", "logprob_chunk")
    problems = [f"{name} is {getattr(c, name)}, but must be at least 1" for name in counts if getattr(c, name) < 1]
    if problems:                                              # the arithmetic below divides by them
        return cli.report([], problems)
    answers, mini = c.prompts_per_step * c.group_size, c.prompts_per_step // c.updates_per_step
    rows = [
        ("answers a step", f"{c.prompts_per_step} prompts x {c.group_size} = {answers:,}"),
        ("tokens a step, at most", f"{answers:,} x ({c.max_prompt_tokens:,} + {c.max_response_tokens:,}) = "
                                   f"{answers * (c.max_prompt_tokens + c.max_response_tokens):,}"),
        ("updates", f"{c.steps} steps x {c.updates_per_step} = {c.steps * c.updates_per_step}, "
                    f"each on {mini} x {c.group_size} = {mini * c.group_size:,} answers"),
        ("learning rate", f"{c.lr:g} from update {max(1, c.warmup_updates)} on"),
        ("adapter", f"rank {c.lora_rank}, alpha {c.lora_alpha}, {c.lora_experts} for routed experts"),
        ("precision", f"{c.dtype} weights, the sampler's in {c.sampler_fp8.replace('none', c.dtype)}"),
        ("trainer", f"{c.trainer_ranks} ranks: TP {c.tp} x EP {c.ep} x PP {c.pp}, DP {c.dp}"),
        ("sampler", f"{c.engines} engines x TP {c.sampler_tp}, {c.max_num_seqs} requests at once each"),
        ("machines", f"{c.nodes}{f' + {c.sampler_nodes}' * (c.sampler_nodes > 0)} x {c.gpus_per_node} GPUs" if c.gpus_per_node
         else f"the CPU: {os.cpu_count()} cores"),
        ("run folder", f"runs/{c.name}"),
    ]

    def must(ok, sentence):
        problems.extend([] if ok else [sentence])
    must(c.group_size >= 2, f"group_size is {c.group_size}: an advantage within the group needs at least 2 answers")
    must(c.prompts_per_step % c.updates_per_step == 0,
         f"{c.prompts_per_step} prompts do not divide into {c.updates_per_step} updates")
    must(c.dp > 0 and c.trainer_ranks % (c.tp * c.pp) == 0,
         f"{c.trainer_ranks} trainer ranks do not divide into TP {c.tp} x PP {c.pp}")
    must((c.trainer_ranks // c.pp) % c.ep == 0,
         f"{c.trainer_ranks // c.pp} ranks of a pipeline stage do not divide into EP {c.ep}")
    must(c.dp == 0 or mini * c.group_size >= c.dp, f"a mini-batch of {mini * c.group_size} answers is too small for DP {c.dp}")
    must(c.gpus_per_node in (0, c.sampler_tp),
         f"sampler_tp is {c.sampler_tp} on nodes of {c.gpus_per_node} GPUs: an engine takes all GPUs of its node")
    must(c.lora_rank > 0, f"lora_rank is {c.lora_rank}, but must be more than 0")
    must(c.lora_experts in ("shared", "each"), f"lora_experts is {c.lora_experts!r}: shared or each")
    must(c.dtype in ("float32", "bfloat16"), f"dtype is {c.dtype!r}: float32 or bfloat16")
    must(c.sampler_fp8 in ("fp8_per_block", "fp8", "none"), f"sampler_fp8 is {c.sampler_fp8!r}: fp8_per_block, fp8 or none")
    must(c.gpus_per_node or c.sampler_fp8 == "none", "sampler_fp8 needs GPUs")
    must(c.lora_targets, "lora_targets is empty: an adapter needs a layer to adapt")
    leaves = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    for target in c.lora_targets:
        must(target in leaves, f"lora_targets has {target!r}, which is none of {', '.join(leaves)}")
    must(c.recompute in ("full", "none"), f"recompute is {c.recompute!r}: full or none")
    must(c.wandb in ("off", "offline", "online"), f"wandb is {c.wandb!r}: off, offline or online")
    for name in ("lr", "lora_alpha", "max_mismatch", "clip_grad", "clip_low", "clip_high", "dual_clip", "is_cap",
                 "max_tokens_per_micro_batch", "max_prompt_tokens", "max_response_tokens", "gpu_memory_gib", "bucket_gib",
                 "files_limit_s", "sample_limit_s", "update_limit_s", "call_limit_s", "gpu_memory_utilization", "eval_top_p"):
        must(getattr(c, name) > 0, f"{name} is {getattr(c, name)}, but must be more than 0")
    for name in ("gpu_memory_utilization", "eval_top_p"):
        must(getattr(c, name) <= 1, f"{name} is {getattr(c, name)}, but must be at most 1")
    for name in ("sampler_nodes", "engine_restarts", "warmup_updates", "weight_decay", "gpu_price"):
        must(getattr(c, name) >= 0, f"{name} is {getattr(c, name)}, but must not be negative")
    must(all(0 <= beta < 1 for beta in c.betas), f"betas is {c.betas}, but both must be from 0 to below 1")
    must(c.gpus_per_node or c.sampler_tp == 1, f"sampler_tp is {c.sampler_tp}: a sampler on the CPU is one process")
    must(not (other := hf_config.other_model(c.model, "glm_moe_dsa")), other)
    if c.gpus_per_node and not c.rehearse and not problems:   # sizes are those of a layout that divides
        rows += fits.rows(c, must, SIZES, size.GLM5P3)
    must(c.temperature == 1.0, f"temperature is {c.temperature}: the sampler scores prompts at temperature 1 only")
    fits.there(c, must)                                       # machines, packages, model, data, run folder
    return cli.report(rows, problems)


# -- algorithm: pure functions of arrays and tensors -----------------------------------------------------------------

def group_advantage(reward_PG):
    """(r - mean) / (std + 1e-6) within each group of answers to one prompt; std with n - 1 (GRPO, arXiv 2402.03300)."""
    import numpy as np
    return (reward_PG - reward_PG.mean(1, keepdims=True)) / (np.std(reward_PG, axis=1, ddof=1, keepdims=True) + 1e-6)


def make_policy_loss(clip_low, clip_high, dual_clip, is_cap):
    def policy_loss(logp_new, entropy, mb):
        """Clipped policy gradient, summed over tokens. logp_new, entropy and the fields of mb: (N,). mb["weight"] is
        1 / (tokens of its answer) / (answers of the whole mini-batch): the sum is the mean over answers, whatever the
        ranks and micro-batches."""
        import torch
        weight, adv = mb["weight"], mb["adv"]
        ratio = (logp_new - mb["logp_old"]).clamp(-20, 20).exp()       # inf x 0 would be a gradient of nan
        surrogate = torch.minimum(ratio * adv, ratio.clamp(1 - clip_low, 1 + clip_high) * adv)
        surrogate = torch.where(adv < 0, torch.maximum(surrogate, dual_clip * adv), surrogate)
        # the tokens were drawn from the sampler's distribution, which rounds otherwise than the trainer's (Yao et al. 2025,
        # "Your efficient RL framework secretly brings you off-policy RL training")
        tis = (mb["logp_old"] - mb["logp_rollout"]).exp().clamp(max=is_cap)
        loss = -(weight * tis * surrogate).sum()
        with torch.no_grad():
            clipped = ((adv > 0) & (ratio > 1 + clip_high)) | ((adv < 0) & (ratio < 1 - clip_low))
            metrics = {"clip": (weight * clipped).sum(), "entropy": (weight * entropy).sum(),
                       "tis_capped": (weight * (tis >= is_cap)).sum(), "kl_old": (weight * (ratio - 1 - ratio.log())).sum()}
        return loss, metrics
    return policy_loss


def mismatch(logp_old, logp_rollout):
    """How far the two copies are apart on a step's answers (lists of arrays, one per answer), in nats: mean and largest |d| with
    d = logp_old - logp_rollout, the largest mean |d| of one answer, and k3 = mean(exp(d) - 1 - d), an estimate of
    KL(sampler || trainer) that is never negative (http://joschu.net/blog/kl-approx.html)."""
    import numpy as np
    gaps = [a.astype(np.float64) - b for a, b in zip(logp_old, logp_rollout)]
    d = np.concatenate(gaps)
    return {"mean": np.abs(d).mean(), "max": np.abs(d).max(), "worst_answer": max(np.abs(g).mean() for g in gaps),
            "k3": (np.expm1(d) - d).mean()}


# -- sampling and grading --------------------------------------------------------------------------------------------

def seed_of(*what):
    """A seed that depends on all of `what` and on nothing else."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:4])


def answer_all(sampler, tok, rows, samples, seed, max_tokens, temperature, top_p):
    """`samples` answers to every row, graded: a list of B dicts in the order row 0 sample 0, row 0 sample 1, ..."""
    from common import rewards
    from common.sampler import spread
    prompts = [row["prompt_tokens"] for row in rows for _ in range(samples)]
    # one seed an answer, from the run's seed and what the answer is for: the same answers again after a resume
    seeds = [seed_of(seed, row["id"], g) for row in rows for g in range(samples)]
    rollouts = spread(sampler, "generate", (prompts, seeds), max_tokens, temperature, top_p)
    asked = [row for row in rows for _ in range(samples)]
    texts = [tok.decode(rollout["tokens"], skip_special_tokens=False) for rollout in rollouts]
    grades = rewards.grade_all(texts, [row["answer"] for row in asked], [row["in_think"] for row in asked])
    for rollout, row, seed, text, grade in zip(rollouts, asked, seeds, texts, grades):
        rollout.update(prompt_tokens=row["prompt_tokens"], seed=seed, text=text, grade=grade)
    return rollouts


def evaluate(run, step, sampler, tok, rows, cfg):
    """avg@k over the held-out problems with the published protocol; every sample goes to eval/step-N.jsonl."""
    from common import evaluation
    start = time.time()
    rollouts = answer_all(sampler, tok, rows, cfg.eval_samples, f"{cfg.seed} eval", cfg.max_response_tokens, 1.0,
                          cfg.eval_top_p)
    asked = [(row, g) for row in rows for g in range(cfg.eval_samples)]
    lines = [evaluation.line(row, row["in_think"], g, r["seed"], r["text"], len(r["tokens"]),
                             "length" if r["is_truncated"] else "stop", r["grade"]) for r, (row, g) in zip(rollouts, asked)]
    (run.folder / "eval").mkdir(exist_ok=True)
    cli.write_atomic(run.folder / "eval" / f"step-{step}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    found = evaluation.summary(lines)
    found["stderr"] = found["stderr_fixed"]                   # were the same problems sampled again
    keys = [k for k in ("accuracy", "stderr", "capped", "accuracy_finished", "tokens") if found[k] is not None]
    print(f"eval at step {step}, {len(rows)} problems x {cfg.eval_samples}: "
          + "  ".join(f"{k} {found[k]:.3f}" for k in keys), flush=True)
    return {**{f"eval/{k}": found[k] for k in keys}, "time/eval_s": time.time() - start}


# -- start and checkpoints -------------------------------------------------------------------------------------------

def start(cfg, run):
    """Ray, the trainer's ranks and the sampler's engines, all on the same nodes; returns (trainer, sampler)."""
    from common import cluster
    place, apart = cluster.nodes(cfg.nodes + cfg.sampler_nodes, cfg.gpus_per_node), cfg.sampler_nodes > 0
    nodes = range(cfg.nodes + cfg.sampler_nodes)
    per_node, quantization = cfg.gpus_per_node, {} if cfg.sampler_fp8 == "none" else {"quantization": cfg.sampler_fp8}
    if cfg.rehearse and cfg.sampler_fp8 == "fp8_per_block":   # vLLM's own choice on Hopper compiles CUDA for minutes
        quantization |= {"linear_backend": "triton", "moe_backend": "triton"}
    limits = {None: cfg.call_limit_s, "generate": cfg.sample_limit_s, **dict.fromkeys(("logprobs", "update"), cfg.update_limit_s),
              **dict.fromkeys(("start", "load", "save", "restore", "export", "save_model"), cfg.files_limit_s)}
    sampler = cluster.start("common.sampler:SamplerEngine", "sampler engine", place, [dict(
        model=cfg.model, dtype=cfg.dtype, tp=cfg.sampler_tp, weights=True, max_num_seqs=cfg.max_num_seqs,
        # one more than the longest answer, because scoring it asks vLLM for a token after it
        max_model_len=cfg.max_prompt_tokens + cfg.max_response_tokens + 1, gpu_memory_utilization=cfg.gpu_memory_utilization,
        # no weights of its own: all of them come with the first version
        seed=cfg.seed, apart=apart, vllm_args={"load_format": "dummy", **quantization})] * cfg.engines,
        on=nodes[cfg.nodes:] or nodes, gpus=per_node and cfg.sampler_tp, limits=limits, restarts=cfg.engine_restarts)
    trainer = cluster.start("common.trainer:TrainerRank", "trainer rank", place, [dict(
        rank=r, world=cfg.trainer_ranks, model=cfg.model, tp=cfg.tp, pp=cfg.pp, ep=cfg.ep, dtype=cfg.dtype,
        lora_rank=cfg.lora_rank, lora_alpha=cfg.lora_alpha, lora_targets=cfg.lora_targets, experts=cfg.lora_experts,
        merge=True, bucket_bytes=int(cfg.bucket_gib * 2**30),
        lr=cfg.lr, warmup_updates=cfg.warmup_updates, weight_decay=cfg.weight_decay, betas=cfg.betas,
        clip_grad=cfg.clip_grad, max_tokens=cfg.max_tokens_per_micro_batch, temperature=cfg.temperature,
        logprob_chunk=cfg.logprob_chunk, recompute=cfg.recompute, seed=cfg.seed, apart=apart,
        handoff_limit_s=cfg.call_limit_s / 2) for r in range(cfg.trainer_ranks)],
        on=nodes[:cfg.nodes], gpus=per_node and 1, limits=limits)
    # the sampler first, then to sleep: at full size the two do not fit the GPUs together
    sampler.ready().sleep()
    trainer.ready().load(cluster.meeting(trainer, run.folder))
    trainer.offload()
    sampler.wake()
    trainer.hint = sampler.hint = "--resume goes on from the newest checkpoint, without one from step 1"
    return trainer, sampler


def publish(trainer, sampler, version):
    """The trainer's weights to all engines; returns the version that they then serve. Engines that died meanwhile are started
    again, and all get the weights as the next version, because some may hold this one already."""
    from common import sync
    while True:
        try:
            sync.publish(trainer, sampler, version)
            return version
        except cli.Stop:
            if not sampler.restart():                         # none died: it failed for another reason
                raise
            version += 1


def read(path, tok, max_prompt_tokens):
    """Rows of a data file with their prompts' token ids; prompts that are too long are dropped, with a count."""
    from common import rewards
    rows = dataset.load(path)
    if odd := next((row for row in rows if not rewards.gradable(row["answer"])), None):
        raise cli.Stop(f"{path}: the answer {odd['answer'][:40]!r} of row {odd['id']!r} is neither an integer nor an expression "
                       "that math-verify reads")
    for row in rows:
        row["prompt_tokens"] = dataset.encode(tok, row["prompt"])
        # GLM's template opens the thinking block: an answer must close it to count
        row["in_think"] = tok.decode(row["prompt_tokens"]).rstrip().endswith("<think>")
    kept = [row for row in rows if len(row["prompt_tokens"]) <= max_prompt_tokens]
    if len(kept) < len(rows):
        print(f"{path}: {len(rows) - len(kept)} of {len(rows)} prompts are longer than {max_prompt_tokens} tokens: left out")
    if not kept:
        raise cli.Stop(f"{path}: none of the {len(rows)} prompts is at most {max_prompt_tokens} tokens long")
    return kept


# -- main ------------------------------------------------------------------------------------------------------------

def main(check_only=False, doc=__doc__):
    cfg = cli.parse(Config, PRESETS, doc)
    if cfg.rehearse:
        print("rehearsal: a tiny GLM-5.3 that adds two numbers; model, lengths, batch, rank and layout are smaller than real")
    if not cfg.name and not cfg.resume or check_only and cfg.name == Config.name:
        cfg.name = time.strftime("check-%m%d-%H%M%S" if check_only else "rehearse-%m%d-%H%M%S")   # a folder of its own
    problems = plan(cfg)
    if problems or cfg.plan:
        return 2 if problems else 0

    import numpy as np
    from transformers import AutoTokenizer

    from checks.logprob_parity import five_steps
    from common import checkpoint, cluster, preflight, rewards, sync
    from common.batch import merge

    if cfg.rehearse:
        from data.teach import taught
        cluster.connect(local=True)
        cfg.model, cfg.train_data, cfg.eval_data = taught(cfg.gpus_per_node, cfg.dtype)
    # what can be wrong with the inputs is found before anything is started
    hf = hf_config.read_config(cfg.model)
    tok = AutoTokenizer.from_pretrained(cfg.model)
    train_rows, eval_rows = (read(path, tok, cfg.max_prompt_tokens) for path in (cfg.train_data, cfg.eval_data))
    cursor = dataset.Cursor(len(train_rows), cfg.prompts_per_step, cfg.seed)
    policy_loss = make_policy_loss(cfg.clip_low, cfg.clip_high, cfg.dual_clip, cfg.is_cap)
    run = cli.Run(cfg, cfg.name, resume=cfg.resume, wandb="off" if check_only else cfg.wandb)
    saved = run.folder / "checkpoints"
    try:
        cluster.connect(local=cfg.rehearse)
        preflight.check(cfg.nodes + cfg.sampler_nodes, cfg.gpus_per_node, cfg.model, (cfg.train_data, cfg.eval_data), run.folder,
                        fits.needs(cfg, SIZES), idle=cfg.gpu_memory_utilization if cfg.rehearse else preflight.IDLE)
        print(f"starting {cfg.trainer_ranks} trainer ranks and {cfg.engines} sampler engines", flush=True)
        trainer, sampler = start(cfg, run)
    except BaseException:
        if not cfg.resume:                                    # nothing was made yet: the name stays free
            shutil.rmtree(run.folder, ignore_errors=True)
        raise

    first, version, logged = 1, 0, []
    if cfg.resume:
        if found := checkpoint.complete(saved):
            state = checkpoint.read_state(found[-1])
            with cluster.trainer_turn(trainer, sampler):
                trainer.restore(str(found[-1].absolute()))
            first, version = state["step"] + 1, state["version"]
        logged = run.rewind(first)
        print(f"resumed from {found[-1]}" if found else f"{saved} has no complete checkpoint: the run starts with step 1")
    if cfg.check or check_only:
        # it publishes three versions, and the engines are new: after it they hold the one that the run had come to
        report = five_steps(trainer, sampler, [row["prompt_tokens"] for row in eval_rows[:8]], dtype=cfg.dtype, seed=cfg.seed,
                            max_tokens=min(128, cfg.max_response_tokens), version=max(version - 3, 0),
                            sampler_fp8=cfg.sampler_fp8, index_topk=hf.index_topk,
                            room=cfg.max_prompt_tokens + cfg.max_response_tokens, decode_text=tok.decode)
        run.write_json("check.json", report)
        if check_only or not report["passed"]:
            return 0 if report["passed"] else 1
        version = report["version"]
        band = max(report["tolerance"][0], 4 * max(r["mean"] for r in report["rows"] if r["what"].startswith("agree")))
    else:
        band = cfg.max_mismatch
        version = publish(trainer, sampler, max(version, 1))
    # An engine that dies is started again, gets the version that the others hold, and is asked once more what it was asked. On a
    # GPU it needs the room of the trainer's weights: the sampler is asked before `onload` or after `offload` only.
    sampler.again = {"generate": lambda new: sync.publish(trainer, new, version), "sleep": None, "wake": None}
    done = first - 1                                          # an evaluation that the run before a resume did not get to
    if (done % cfg.eval_every == 0 or done == cfg.steps) and not any(
            line["step"] == done and "eval/accuracy" in line for line in logged):
        run.log(done, evaluate(run, done, sampler, tok, eval_rows, cfg))

    drift = []                                                # mismatches of the last steps in a row that were above the band
    P, G, mini = cfg.prompts_per_step, cfg.group_size, cfg.prompts_per_step // cfg.updates_per_step * cfg.group_size
    for step in range(first, cfg.steps + 1):
        clock = [time.time()]

        # 1. sample: G answers to each of P prompts, from the version published last
        rows = [train_rows[i] for i in cursor.indices(step - 1)]
        rollouts = answer_all(sampler, tok, rows, G, f"{cfg.seed} {step}", cfg.max_response_tokens, cfg.temperature, 1.0)
        assert all((r["versions"] == version).all() for r in rollouts), f"step {step}: answers not all from version {version}"
        sampler.sleep()
        clock.append(time.time())

        # 2. reward: right or wrong
        length_B = np.array([len(r["tokens"]) for r in rollouts])
        is_truncated_B = np.array([r["is_truncated"] for r in rollouts])
        is_correct_B = np.array([r["grade"].correct for r in rollouts])
        reward_B = np.where(is_correct_B, rewards.RIGHT, rewards.WRONG)

        # 3. advantage; a cut answer is a wrong one
        adv_B = group_advantage(reward_B.reshape(P, G)).reshape(-1)
        batch = {"tokens": [np.concatenate([r["prompt_tokens"], r["tokens"]]).astype(np.int32) for r in rollouts],
                 "n_prompt": [len(r["prompt_tokens"]) for r in rollouts]}

        # 4. log-probabilities before the step's updates, by the trainer: the ratio's denominator
        trainer.onload()
        logp_rollout = [r["logp"] for r in rollouts]
        logp_old = merge(trainer.logprobs(batch), P * G)
        gap = mismatch(logp_old, logp_rollout)
        if not gap["mean"] <= cfg.max_mismatch:
            raise cli.Stop(f"step {step}: the log-probabilities of sampler and trainer differ by {gap['mean']:.3g} on average, "
                           f"more than max_mismatch {cfg.max_mismatch}: they are no longer one policy, nothing was learned")
        drift = [*drift, gap["mean"]] if gap["mean"] > band else []
        batch |= {"adv": adv_B, "logp_old": logp_old, "logp_rollout": logp_rollout}
        clock.append(time.time())

        # 5. updates: each on the answers to its own share of the prompts, every answer weighing the same
        updates = []
        for m in cli.progress(range(cfg.updates_per_step), desc=f"step {step} updates"):
            part = slice(m * mini, (m + 1) * mini)
            mb = {**{k: v[part] for k, v in batch.items()}, "weight": (1 / length_B / mini)[part]}
            updates.append(next(u for u in trainer.update(mb, policy_loss) if u))
        clock.append(time.time())

        # 6. publish: from here on the sampler answers with the new weights, or the run stops
        trainer.offload()
        sampler.wake()
        version = publish(trainer, sampler, version + 1)
        clock.append(time.time())

        # 7. log, save, evaluate
        metrics = {"reward/mean": reward_B.mean(), "reward/accuracy": is_correct_B.mean(),
                   "rollout/capped": is_truncated_B.mean(), "rollout/tokens": length_B.mean(),
                   "rollout/groups_with_signal": (np.ptp(reward_B.reshape(P, G), axis=1) > 0).mean(),
                   **{f"mismatch/{k}": v for k, v in gap.items()}, "policy/version": version,
                   **{f"policy/{k}": np.mean([u[k] for u in updates]) for k in (updates[0] if updates else ())},
                   **{f"time/{k}_s": b - a for k, a, b in zip(("sample", "logprobs", "update", "publish"), clock, clock[1:])}}
        run.log(step, metrics)
        run.line(step, reward=metrics["reward/mean"], accuracy=metrics["reward/accuracy"], capped=metrics["rollout/capped"],
                 tokens=metrics["rollout/tokens"], gap=float(gap["mean"]), clip=metrics.get("policy/clip", 0.0),
                 entropy=metrics.get("policy/entropy", 0.0), seconds=clock[-1] - clock[0])
        drifted = len(drift) >= cfg.drift_steps
        if step % cfg.save_every == 0 or step == cfg.steps or drifted:
            checkpoint.write(saved, step, trainer, {"version": version}, cfg.keep)
        if drifted:
            raise cli.Stop(f"sampler and trainer drift apart: mismatch/mean was {', '.join(f'{g:.2g}' for g in drift)} in the "
                           f"last {len(drift)} steps, above {band:.2g}, 4 times what the check measured. Step {step} is saved: "
                           "--resume repeats the check, which says where they part; mismatch/worst_answer says whether few "
                           "answers are far off or all a little")
        if step % cfg.eval_every == 0 or step == cfg.steps:
            run.log(step, evaluate(run, step, sampler, tok, eval_rows, cfg))

    trainer.export(str(run.folder.absolute()))
    for old in run.folder.glob("rendezvous-*"):               # and those of starts that were killed
        old.unlink()
    run.finish({"steps": cfg.steps, "version": version})
    print(f"done: {run.folder} has metrics.jsonl, the evaluations in eval/, and the adapter for peft and vLLM in adapter/")
    return 0


if __name__ == "__main__":
    cli.run_main(main)
