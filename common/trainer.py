"""The trainer: one actor per rank, megatron-core inside. Load, score, update, offer the adapter, save.

Every rank gets the whole batch (token ids and a few numbers per token) and takes its share, so the driver needs no idea
of the layout. A batch is a dict of lists with one entry per sequence: "tokens" (int array: prompt and response) and
"n_prompt" always; any other field is either a number per sequence or an array with a number per response token, and
reaches `policy_loss` flattened to (N,), where N counts the packed response tokens of a micro-batch.
"""
import os
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch._dynamo
import torch.distributed as dist

from common import cpu

cpu.install()                                                # before the first megatron import; does nothing where there is CUDA
# megatron-core compiles small functions of the router at their first use: minutes on a cold machine, and nothing is gained
torch._dynamo.config.disable = True

from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402

from common import (  # noqa: E402
    bundle,
    checkpoint,
    glm5p3,
    glm5p3_flash,
    logprobs,
    lora,
    network,
    replay,
    sync,
    weights,
)
from common.batch import deal, micro_count  # noqa: E402
from common.checksum import checksums  # noqa: E402
from common.cli import Stop  # noqa: E402
from common.cpu import device  # noqa: E402
from common.hf_config import read_config  # noqa: E402
from common.packing import pack  # noqa: E402
from common.trace import Trace  # noqa: E402

MODELS = {"glm_moe_dsa": glm5p3, "glm5_next_text": glm5p3_flash}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RECOMPUTE = {"none": {}, "full": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
             "selective": dict(recompute_granularity="selective", recompute_modules=["core_attn", "moe"])}


class TrainerRank:
    """One rank of the trainer. Verbs are collective: call them on all ranks at once (cluster.Group does)."""

    def __init__(self, rank, world, model, *, tp=1, pp=1, ep=1, dtype="float32", lora_rank=0, lora_alpha=0, lora_targets=(),
                 experts=None, lora_expert_rank=None, lr=1e-5, warmup_updates=0, weight_decay=0.1, betas=(0.9, 0.999),
                 clip_grad=1.0, max_tokens=8192, temperature=1.0, logprob_chunk=2048, recompute="none", seed=0,
                 te=None, fp8=None, kda_kernels=None, bucket_bytes=1 << 30, optimizer_offload=0.0, precision_aware=False,
                 replay=False, merge=False, apart=False, handoff_limit_s=600.0):
        """model: a HF checkpoint folder. lora_rank 0 trains all weights; lora_expert_rank: of the routed experts' adapters. lr is
        reached after `warmup_updates` updates, then constant. max_tokens: tokens of a micro-batch (a longer sequence gets one of
        its own). recompute: a key of RECOMPUTE. te: Transformer Engine's layers instead of torch's, by default where it is
        installed (never for Flash); fp8: its recipe for the matrix products, 'blockwise' (Hopper) or 'mxfp8' (Blackwell), None
        for `dtype`. kda_kernels: of Flash's linear attention, see common/glm5p3_flash.py. bucket_bytes: of a hand-off of all
        weights. optimizer_offload: share of the optimizer's state that lives and steps on the host; precision_aware: keeps it in
        narrower types. replay: a batch may have "routes" (common/replay.py), and its tokens then take those experts. merge: hands
        over all weights with the adapter in them. apart: the sampler has other GPUs, so the weights stay on these and travel over
        the network, each bundle within handoff_limit_s."""
        if fp8 and not (glm5p3.HAVE_TE if te is None else te):
            raise Stop(f"fp8 is {fp8!r}: FP8 training needs Transformer Engine, which is not installed or switched off")
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self.rank, self.world, self.folder, self.dtype = rank, world, Path(model), DTYPES[dtype]
        self.layout = dict(tp=tp, pp=pp, ep=ep)
        self.lora = dict(rank=lora_rank, alpha=lora_alpha, targets=tuple(lora_targets), experts=experts,
                         expert_rank=lora_expert_rank)
        self.optim = dict(lr=lr, weight_decay=weight_decay, betas=tuple(betas), clip_grad=clip_grad)
        self.host_optimizer = dict(optimizer_cpu_offload=optimizer_offload > 0, optimizer_offload_fraction=optimizer_offload,
                                   use_precision_aware_optimizer=precision_aware)
        self.warmup_updates, self.max_tokens, self.temperature = warmup_updates, max_tokens, temperature
        self.te, self.fp8, self.replay, self.merge, self.bucket_bytes = te, fp8, replay, merge, bucket_bytes
        self.kda_kernels = kda_kernels
        self.coming, self.flips, self.parked = None, [], False
        self.chunk, self.recompute, self.seed, self.updates, self.store = logprob_chunk, recompute, seed, 0, None
        self.apart, self.handoff_limit_s = apart, handoff_limit_s
        self.transport = sync.CudaIpc() if torch.cuda.is_available() else sync.SharedMemory()

    # -- start -------------------------------------------------------------------------------------------------------------------

    def address(self):
        """Rank 0: opens the place where the ranks meet, on a port that the system picks; for `load`. None on the others."""
        if self.rank:
            return None
        import ray
        host = ray.util.get_node_ip_address()
        self.store = dist.TCPStore(host, 0, self.world, is_master=True, wait_for_workers=False)
        return f"{host}:{self.store.port}"

    def load(self, address):
        """Join the other ranks, build the model, read this rank's slices of the checkpoint, make adapters and optimizer.

        address: host:port from rank 0's `address`, or a path: then they meet in a file, which needs no port but one
        common machine."""
        if not dist.is_initialized():
            if self.store is None and str(address).startswith("/"):
                self.store = dist.FileStore(str(address), self.world)
            elif self.store is None:
                host, _, port = str(address).rpartition(":")
                self.store = dist.TCPStore(host, int(port), self.world)
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            # ranks read a checkpoint of terabytes at different speeds before they first meet; the default is 10 minutes
            dist.init_process_group(backend, store=self.store, rank=self.rank, world_size=self.world, timeout=timedelta(hours=6))
        if self.apart:
            import ray
            here = f"{address}-handoff" if str(address).startswith("/") else ray.util.get_node_ip_address()
            self.transport = network.Network(here, self.handoff_limit_s)
        tp, pp, ep = self.layout.values()
        if self.world % (tp * pp) or (self.world // pp) % ep:
            raise Stop(f"{self.world} trainer ranks do not divide into TP {tp} x PP {pp} x EP {ep}")
        mpu.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=1,
                                      create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(self.seed)
        self.hf = read_config(self.folder)
        family = MODELS[self.hf.model_type]
        te = glm5p3.HAVE_TE and (family is glm5p3 or bool(self.fp8)) if self.te is None else self.te
        extra = dict(RECOMPUTE[self.recompute])
        if self.fp8:
            extra |= dict(fp8="e4m3", fp8_recipe=self.fp8, moe_router_padding_for_quantization=True)
        if family is glm5p3_flash:
            extra |= dict(kda_kernels=self.kda_kernels)
        self.cfg = cfg = family.mcore_config(self.hf, **self.layout, dtype=self.dtype, te=te, **extra)
        # to(device): mcore leaves the router's weight on the host until its first use
        self.model = family.build(cfg, self.hf.vocab_size, te).to(device())
        weights.load(self.model, cfg, self.folder)
        if self.lora["rank"]:
            lora.add(self.model, cfg, **self.lora)
        logprobs.return_hidden(self.model, cfg)
        self.replaying = replay.attach(self.model, cfg) if self.replay else []
        self.trainable = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        # overlap off: one all-reduce after the last micro-batch, in a fixed order, so that a resumed run repeats it bit for bit
        self.ddp = DistributedDataParallel(cfg, DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False), self.model)
        self.ddp.broadcast_params()
        self.optimizer = get_megatron_optimizer(OptimizerConfig(
            optimizer="adam", lr=self.optim["lr"], min_lr=self.optim["lr"], weight_decay=self.optim["weight_decay"],
            adam_beta1=self.optim["betas"][0], adam_beta2=self.optim["betas"][1], adam_eps=1e-8,
            bf16=self.dtype == torch.bfloat16, params_dtype=self.dtype, use_distributed_optimizer=True,
            clip_grad=self.optim["clip_grad"], **self.host_optimizer), [self.ddp], use_gloo_process_groups=False)
        cfg.finalize_model_grads_func, cfg.no_sync_func = finalize_model_grads, self.ddp.no_sync
        self.base = bundle.base_fingerprint(self.folder)
        kernels = {"layers": "transformer_engine" if te else "torch"}
        if family is glm5p3_flash:
            kernels["linear attention"] = cfg.kda_kernels
            if self.rank == 0:
                print(f"trainer: linear attention by {cfg.kda_kernels}", flush=True)
        return {"rank": self.rank, "trainable": sum(p.numel() for _, p in self.trainable), "base": self.base, "kernels": kernels}

    # -- score and update --------------------------------------------------------------------------------------------------------

    def logprobs(self, batch):
        """[(index of the sequence, float32 array of its response tokens' log-probabilities)] of this rank's share; []
        on ranks that hold none (all but the last pipeline stage's first tensor rank). `batch.merge` puts the answers of
        all ranks in order."""
        found = []

        def keep(hidden, micro):
            logp, _ = self._logp(hidden, micro)
            found.extend(zip(micro["index"], np.split(logp.cpu().numpy(), np.cumsum(micro["lengths"])[:-1])))
            return logp.sum() * 0, {}

        self.ddp.eval()
        with torch.no_grad():
            self._run(self._micro_batches(batch), keep, forward_only=True)
        self.ddp.train()
        return found if mpu.is_pipeline_last_stage() and mpu.get_tensor_model_parallel_rank() == 0 else []

    def replayed(self):
        """(3,) sums over this rank's tokens and layers in `logprobs` with routes since the last call, for replay.health: the
        sampler's experts are the trainer's own choice, share of them that is, 1."""
        found = sum((np.array([float(n) for n in counts]) for f in self.replaying for counts in f.counts), np.zeros(3))
        for forced in self.replaying:
            forced.counts.clear()
        return found

    def trace(self, tokens):
        """{layer: (len(tokens), trace.WIDTH) lists} of this rank's layers: projections of what each hands on."""
        def stream(output):
            state = output[0] if isinstance(output, tuple) else output
            state = gather_from_sequence_parallel_region(state) if self.cfg.sequence_parallel else state
            return state.flatten(0, 1).unflatten(-1, (-1, self.hf.hidden_size)).mean(1)          # of Flash's streams, their mean
        watch = Trace({layer.layer_number - 1: layer for layer in self.model.decoder.layers}, stream)
        copies = mpu.get_data_parallel_world_size()               # every data-parallel rank wants a sequence
        try:
            self.logprobs({"tokens": [np.asarray(tokens)] * copies, "n_prompt": [1] * copies})
        finally:
            found = watch.stop()
        return {layer: states[:len(tokens)] for layer, states in found.items()}

    def update(self, batch, policy_loss, lr=None):
        """One optimizer step on a mini-batch. `policy_loss(logp, entropy, fields) -> (loss, metrics)` sums over its
        tokens: logp, entropy and every field are (N,), loss and each metric are scalars, and the trainer adds them up
        over micro-batches and ranks. So the normalisation (token mean, sequence mean) is in the fields that the caller
        made. lr: another rate than the warm-up's. Returns the sums, grad_norm and lr; None on ranks without the last
        pipeline stage."""
        micros = self._micro_batches(batch)
        # mcore divides the loss by the number of micro-batches and averages gradients over data-parallel ranks: undo
        # both, for a sum
        scale = len(micros) * mpu.get_data_parallel_world_size()
        sums = {}

        def loss_of(hidden, micro):
            logp, entropy = self._logp(hidden, micro)
            loss, metrics = policy_loss(logp, entropy, micro["fields"])
            if not loss.requires_grad:                             # megatron-core would leave the backward pass out
                raise Stop(f"update {self.updates + 1}: the loss does not depend on any trained weight")
            for name, value in {"loss": loss, **metrics}.items():
                sums[name] = sums.get(name, 0.0) + value.detach().item()
            return loss * scale, {}

        self.ddp.train()
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        lr = lr or self.optim["lr"] * min(1.0, (self.updates + 1) / max(1, self.warmup_updates))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._run(micros, loss_of)
        bad = torch.tensor([float(not torch.isfinite(b.grad_data.sum())) for b in self._buffers()]).amax().to(device())
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        if bad:
            raise Stop(f"update {self.updates + 1} has a gradient that is not finite: it was not applied, "
                       "the weights before it are kept")
        _, grad_norm, _ = self.optimizer.step()
        self.updates += 1
        if not mpu.is_pipeline_last_stage():
            return None
        names = sorted(sums)
        total = torch.tensor([sums[n] for n in names], dtype=torch.float64, device=device())
        dist.all_reduce(total, group=mpu.get_data_parallel_group())
        return {**dict(zip(names, total.tolist())), "grad_norm": float(grad_norm), "lr": lr}

    def _logp(self, hidden, micro):
        """(logp, entropy) of the response tokens, (N,) each. hidden: (1, tokens, h)."""
        return logprobs.logprobs(hidden[0, micro["rows"]], self.model.output_layer.weight, micro["targets"],
                                 self.temperature, self.chunk)

    def _micro_batches(self, batch):
        """This rank's share of the batch as packed rows. Sequences are dealt to data-parallel ranks, longest first to
        the rank with the fewest tokens; all ranks make the same number of micro-batches (expert parallelism exchanges
        tokens in each)."""
        lengths = [len(t) for t in batch["tokens"]]
        ranks = deal(lengths, mpu.get_data_parallel_world_size())
        n = max(micro_count([lengths[i] for i in r], self.max_tokens) for r in ranks)
        if n > min(map(len, ranks)):
            raise Stop(f"{len(lengths)} sequences do not fill {n} micro-batches on each of {len(ranks)} data-parallel ranks: "
                       f"use fewer ranks, longer micro-batches (max_tokens is {self.max_tokens}) or more sequences")
        mine = ranks[mpu.get_data_parallel_rank()]
        rows = self.layout["tp"] * (32 if self.fp8 else 1)         # FP8 products want whole blocks of rows on every tensor rank
        micros = [pack(batch, sorted(mine[j] for j in part), rows) for part in deal([lengths[i] for i in mine], n)]
        if "routes" in batch:
            if not self.replay:
                raise Stop("the batch has routes, and this trainer was started with replay off")
            replay.place(micros, batch, **replay.sizes(self.hf))
        return micros

    def _run(self, micros, loss_of, forward_only=False):
        def step(data, model):
            micro = next(data)
            return model(micro["ids"], micro["positions"], None, packed_seq_params=micro["psp"]), partial(loss_of, micro=micro)
        get_forward_backward_func()(
            forward_step_func=step, data_iterator=iter(micros), model=[self.ddp], num_microbatches=len(micros),
            seq_length=max(m["ids"].shape[1] for m in micros), micro_batch_size=1, forward_only=forward_only)
        if left := sum(len(forced.waiting) for forced in self.replaying):
            raise Stop(f"{left} routers were to be recomputed with their routes and were not: others took these")

    # -- the adapter -------------------------------------------------------------------------------------------------------------

    def offer(self, version, engines=()):
        """Collective export of the adapter in the model's dtype, or of the next bucket of all weights. The lead rank of each
        replica answers with its fingerprint, and the first lead of a node packs it and says where it lies; None on all others."""
        adapter = self.lora["rank"] and not self.merge
        if adapter:
            # one rank alone has nothing to send to another: rounded on its way into the buffer
            tensors, last = lora.export(self.model, self.cfg, self.dtype if self.world > 1 else torch.float32), True
        else:
            self.coming = self.coming or weights.buckets(self.model, self.cfg, self.bucket_bytes, self.merge)
            tensors, last = next(self.coming)
            if mpu.get_tensor_model_parallel_rank() or mpu.get_pipeline_model_parallel_rank():
                tensors = {}                                       # every rank has them; the lead of each replica answers
        where = [None] * self.world
        dist.all_gather_object(where, sync.node_name() if tensors else None)
        if not tensors:
            return None
        header, flat = bundle.pack(tensors, version=version, base=self.base, rank=self.lora["rank"], experts=self.lora["experts"],
                                   kind="adapter" if adapter else "weights", last=last, dtype=self.dtype if adapter else None)
        leads = [where.index(node) for node in where if node]      # the first lead of each one's node
        sends = self.rank == leads[0] if self.apart else self.rank in leads
        ticket = self.transport.offer(flat, engines) if sends else None
        return {"node": where[self.rank], "fingerprint": header.fingerprint, "header": header.to_json(), "ticket": ticket}

    def release(self, last=True, failed=False):
        """Free the buffer on offer; with `last` what would still come of this version too. failed: not every engine took it."""
        self.transport.release(failed)
        self.coming = None if last else self.coming

    def fingerprint(self):
        """Fingerprint of the adapter, or of all weights, as they would be published; None on ranks that do not have it whole."""
        if self.lora["rank"]:
            parts = [lora.export(self.model, self.cfg, self.dtype)]
        else:
            parts = (part for part, _ in weights.buckets(self.model, self.cfg, self.bucket_bytes))
        sums = {key: total for part in parts for key, total in zip(part, checksums(list(part.values())))}
        return bundle.combine(sums, sums.values()) if sums else None

    def adapted(self):
        """Paths of this rank's modules that are trained: layers.5.mlp.experts.gate_proj, ..."""
        if not self.lora["rank"]:
            return weights.paths(self.model, self.cfg)
        return sorted({key.rpartition(".")[0] for key, _ in lora.named(self.model, self.cfg)})

    def perturb(self, std, seed=0, only=None):
        """Add noise to the adapter, the same on every split of the model (seeded by parameter name); only to modules whose
        path (layers.5.mlp.experts.gate_proj) matches the regular expression `only`, if given. Without an adapter the sign of
        a share `std` / 100 of all weights is turned. `restore_adapter` takes it back."""
        if not self.lora["rank"]:
            self.flips.append((std / 100, seed, only))
            weights.flip(self.model, self.cfg, *self.flips[-1])
            return
        if getattr(self, "before", None) is None:
            self.before = [p.detach().clone() for _, p in self.trainable]
        lora.perturb(self.model, self.cfg, std, seed, only)

    def restore_adapter(self):
        """Undo `perturb`, bit for bit."""
        while self.flips:
            weights.flip(self.model, self.cfg, *self.flips.pop())
        with torch.no_grad():
            for (_, p), old in zip(self.trainable, getattr(self, "before", None) or ()):
                p.copy_(old)
        self.before = None

    def offload(self):
        """Give the GPU's memory to the sampler: weights go to the host, pinned, where `offer` reads them, gradients are dropped.
        Frozen weights never change, so their host copy is made once; the adapter stays."""
        if device().type == "cuda" and not self.apart:
            self._park()
            torch.cuda.empty_cache()

    def onload(self):
        """Bring the weights back."""
        for p in self.model.parameters():
            if hasattr(p, "parked") and not p.requires_grad and not p.numel():
                p.data = p.parked.to(device(), non_blocking=True)
        for buffer in self._buffers() if self.parked else ():
            buffer.reload_from_cpu()
            for p in buffer.params:
                del p.parked
        self.parked = False

    def _park(self):
        for module in self.model.modules():                        # Transformer Engine's FP8 copies of the weights
            getattr(module, "_fp8_workspaces", {}).clear()
        for p in self.model.parameters():
            if not p.requires_grad:
                if not hasattr(p, "parked"):
                    p.parked = weights.like(p.detach().to("cpu").pin_memory(), p)
                p.data = p.data.new_empty(0)
        if not self.lora["rank"]:
            for buffer in self._buffers():
                buffer.offload_to_cpu()
                start = buffer.param_data.storage_offset()
                for p in buffer.params:
                    view = buffer.param_data_cpu.as_strided(p.shape, p.stride(), p.storage_offset() - start)
                    p.parked = weights.like(view, p)
            self.parked = True

    def _buffers(self):
        return self.ddp.buffers + self.ddp.expert_parallel_buffers

    # -- files -------------------------------------------------------------------------------------------------------------------

    def save(self, folder):
        """This rank's part of a checkpoint: trainable parameters, optimizer, counters, random state."""
        # the master of a float32 weight is the weight itself
        if back := self.parked and any(p.dtype == torch.float32 for _, p in self.trainable):
            self.onload()
        held = [(n, p.parked if self.parked else p) for n, p in self.trainable]
        checkpoint.save(folder, self.rank, f"{self.world} ranks, {self.layout}", held, self.optimizer, self.updates)
        if back:
            self._park()

    def export(self, folder):
        """The adapter as a PEFT folder (collective; rank 0 writes `folder`/adapter)."""
        tensors = lora.export(self.model, self.cfg, torch.float32)
        if self.rank == 0:
            lora.save_peft({k: t.cpu() for k, t in tensors.items()}, self.hf, self.lora["rank"],
                           Path(folder) / "adapter", str(self.folder), self.lora["expert_rank"])

    def save_model(self, folder):
        """The whole model as a HF checkpoint, with the config and tokenizer that it was loaded with, without adapters
        (collective)."""
        weights.save(self.model, self.cfg, folder, base=self.folder)

    def restore(self, folder):
        """Continue from `save`; the layout must be the same. With the weights on the device (`onload`)."""
        self.updates = checkpoint.restore(folder, self.rank, f"{self.world} ranks, {self.layout}", self.trainable, self.optimizer)
