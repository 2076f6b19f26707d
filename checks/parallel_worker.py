"""The ranks of checks/test_parallel.py: load a checkpoint under several layouts and write down what must not depend on the
layout.

    python checks/parallel_worker.py CHECKPOINT OUT RANKS:TPxPPxEP [RANKS:TPxPPxEP ...]       # what is left of the ranks is data
    parallel

Ranks are forked once the imports, most of the time of a short test, are done (with GPUs they are not, and each has one).
Importable too: start, model, packed for one rank.
"""
import multiprocessing.connection
import os
import shutil
import sys
import traceback
import warnings
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from common import cpu  # noqa: E402
from common.cpu import device  # noqa: E402

cpu.install()

from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402

from checks import tiny  # noqa: E402
from common import glm5p3, glm5p3_flash, logprobs, lora, weights  # noqa: E402

LENGTHS = [[24, 5, 35], [40, 8, 16], [17, 31, 16], [52, 12]]       # four microbatches of 64 tokens; index_topk is 16


def start(tp=1, pp=1, ep=1):
    """mcore's groups for this layout; a process that has joined no others is alone."""
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=1,
                                  create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)


def model(folder, tp=1, pp=1, ep=1, dtype=torch.float32, **over):
    """(config, model with weights)."""
    hf = glm5p3.read_config(folder)
    family = glm5p3_flash if hf.model_type == "glm5_next_text" else glm5p3
    cfg = family.mcore_config(hf, tp=tp, pp=pp, ep=ep, dtype=dtype, **over)
    built = family.build(cfg, hf.vocab_size)
    weights.load(built, cfg, folder)
    return cfg, built


def packed(seqs):
    """ids, positions [1, tokens] and PackedSeqParams of one row."""
    lens = [len(s) for s in seqs]
    cu = torch.tensor([0, *torch.tensor(lens).cumsum(0)], dtype=torch.int32, device=device())
    psp = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=max(lens), max_seqlen_kv=max(lens))
    return torch.cat(seqs)[None].to(device()), torch.cat([torch.arange(n) for n in lens])[None].to(device()), psp


def inside(psp):
    """Which of the row's next-token logprobs [tokens - 1] belong to one sequence."""
    keep = torch.ones(int(psp.cu_seqlens_q[-1]) - 1, dtype=torch.bool, device=device())
    keep[psp.cu_seqlens_q[1:-1].long() - 1] = False
    return keep


def step(cfg, built, micro, backward):
    """Logprobs of each of this rank's microbatches where the last pipeline stage is; with `backward` main_grad of every
    parameter."""
    seen = []

    def loss(hidden, ids, psp):
        lp, entropy = logprobs.logprobs(hidden[0, :-1], built.output_layer.weight, ids[0, 1:], temperature=0.8, chunk=50)
        keep = inside(psp)
        seen.append(lp.detach()[keep])
        coef = torch.randn(len(lp), generator=torch.Generator().manual_seed(int(ids.sum()))).to(device()) * keep
        total = (coef * (lp + 0.3 * entropy)).sum() / 10
        return total, {"loss": total.detach()}

    def forward(data, wrapped):
        ids, where, psp = next(data)
        return wrapped(ids, where, None, packed_seq_params=psp), partial(loss, ids=ids, psp=psp)

    if backward:
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
        wrapped = DistributedDataParallel(cfg, ddp, built)
        wrapped.zero_grad_buffer()
        cfg.finalize_model_grads_func, cfg.no_sync_func = finalize_model_grads, wrapped.no_sync
    else:
        wrapped = built
    with torch.set_grad_enabled(backward):
        get_forward_backward_func()(forward_step_func=forward, data_iterator=iter(micro), model=[wrapped],
                                    num_microbatches=len(micro), seq_length=64, micro_batch_size=1, forward_only=not backward)
    return seen


def measure(folder, out, tp=1, pp=1, ep=1):
    """Write `out`: full.safetensors (gradients under HF names, logprobs per microbatch) and shared/each.safetensors (adapter and
    its gradients) from the lead ranks, and a saved checkpoint; check on every rank that stream and the adapter's own round trip
    are exact."""
    start(tp, pp, ep)
    out = Path(out)
    dp, mine = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    micro = {i: packed(tiny.sequences(lens, seed=i)) for i, lens in enumerate(LENGTHS) if i % dp == mine}
    if dist.get_rank() == 0:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
    dist.barrier()

    def note(name, tensors, lps):
        """Each rank's own part of the facts; the test puts them together and checks that copies agree."""
        lps = {f"logprobs.{i}": lp for i, lp in zip(micro, lps)}
        facts = {k: t.cpu().clone().contiguous() for k, t in {**tensors, **lps}.items()}
        save_file(facts, out / f"{name}-{dist.get_rank()}.safetensors")

    cfg, built = model(folder, tp, pp, ep)
    weights.save(built, cfg, out / "saved", base=folder)
    note("stream", dict(weights.stream(built, cfg)), [])
    logprobs.return_hidden(built, cfg)
    lps = step(cfg, built, list(micro.values()), backward=True)
    for p in built.parameters():
        p.data = p.main_grad
    note("full", dict(weights.stream(built, cfg)), lps)

    for mode in ("shared", "each"):
        cfg, built = model(folder, tp, pp, ep)
        logprobs.return_hidden(built, cfg)
        flash = (*lora.FLASH_TARGETS, "f_b_proj", "g_b_proj") if hasattr(cfg, "flash") else None
        lora.add(built, cfg, rank=4, alpha=6, targets=flash, experts=mode)
        lora.perturb(built, cfg, std=0.05, seed=3)
        lps = step(cfg, built, list(micro.values()), backward=True)
        adapter = lora.export(built, cfg, torch.float32)
        note(f"merged-{mode}", dict(weights.stream(built, cfg, merge=True)), [])
        everywhere = [adapter]
        dist.broadcast_object_list(everywhere, 0)
        before = {k: v.clone() for k, v in lora.named(built, cfg)}
        for _, v in lora.named(built, cfg):
            v.fill_(9.0)
        lora.load(built, cfg, everywhere[0])
        for k, v in lora.named(built, cfg):
            assert torch.allclose(v, before[k], rtol=2e-7, atol=0), f"{k} changes through export and load"
        for p in built.parameters():
            if p.requires_grad:
                p.data = p.main_grad
        grads = lora.export(built, cfg, torch.float32)
        note(mode, {**{f"adapter.{k}": v for k, v in adapter.items()}, **{f"grad.{k}": v for k, v in grads.items()}}, lps)


def rank_of(rank, ranks, layouts, folder, out):
    code = 1
    try:
        if torch.cuda.is_available():
            torch.cuda.set_device(rank)
        store = dist.FileStore(str(Path(out) / f"meeting-{ranks}"), ranks)
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", store=store, rank=rank, world_size=ranks)
        for layout in layouts:
            measure(folder, Path(out) / f"{ranks}-{layout}", *map(int, layout.split("x")))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)                       # what is left of the groups would wait for the others


def run(ranks, layouts, folder, out):
    """Measure `layouts` with `ranks` processes; where one fails the others are ended and its traceback is on stderr."""
    # a forked process cannot use CUDA
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    children = [context.Process(target=rank_of, args=(rank, ranks, layouts, folder, out)) for rank in range(ranks)]
    for child in children:
        child.start()
    while children:
        ended = multiprocessing.connection.wait([child.sentinel for child in children])
        for child in [child for child in children if child.sentinel in ended]:
            child.join()
            children.remove(child)
            if child.exitcode:
                for other in children:
                    other.kill()
                raise SystemExit(f"one of {ranks} ranks failed")


if __name__ == "__main__":
    torch.set_num_threads(1)
    by_ranks = {}
    for argument in sys.argv[3:]:
        n, _, text = argument.partition(":")
        by_ranks.setdefault(int(n), []).append(text)
    Path(sys.argv[2]).mkdir(parents=True, exist_ok=True)
    for n, todo in by_ranks.items():
        run(n, todo, sys.argv[1], sys.argv[2])
