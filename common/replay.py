"""Router replay (R3): the trainer sends every token through the experts that the sampler chose for it, in the pass for the
old log-probabilities and in every update, so that both compute one function where rounding would decide a near tie.

Only the choice is replayed: an expert's weight is the trainer's own score of it, so gradients reach the router. The routes
of a sequence are an array (tokens - 1, MoE layers, k): the last sampled token was never fed to the sampler and has none.
Ids are uint8 up to 256 experts, uint16 beyond. GLM-5.3: 75 layers x 8 experts x 1 byte = 600 bytes a token; an answer of
8,192 tokens has 4,915,200 bytes, a step of 2,048 such answers 10.1 GB, which pass through Ray's object store.
"""
import numpy as np

from common.cli import Stop


def sizes(hf):
    """What `check` and `place` want to know of a HF config."""
    return dict(layers=hf.mlp_layer_types.count("sparse"), k=hf.num_experts_per_tok, experts=hf.n_routed_experts)


def dtype(experts):
    return np.dtype("uint8" if experts <= 256 else "uint16")


def check(routes, tokens, whose, *, layers, k, experts):
    """Stop unless these are the routes of a sequence of `tokens` tokens; `whose` names it."""
    want = f"{dtype(experts)} {(tokens - 1, layers, k)}"
    found = f"{routes.dtype} {routes.shape}" if isinstance(routes, np.ndarray) else type(routes).__name__
    if found != want:
        raise Stop(f"{whose}: routes are {found}, but {tokens} tokens want {want}: all but the last, MoE layers, experts of each")
    if routes.size and (largest := int(routes.max())) >= experts:
        raise Stop(f"{whose}: routes name expert {largest}, the model has 0 to {experts - 1}")


# -- in a trainer rank -------------------------------------------------------------------------------------------------------

class Forced:
    """Stands in a layer's router where megatron-core (0.19.2) looks for its RouterReplay, with one target, set beforehand, and a
    queue that a pass without a backward puts out of step. Here routes travel on the micro-batch's PackedSeqParams: a layer
    takes its own whenever it runs or is recomputed, and puts them away when it ends. Without routes it routes as always."""

    def __init__(self, column, rank, ranks, waits):
        """column: this layer's in the routes. With sequence parallelism it routes part `rank` of `ranks` of the row. waits: its
        router is recomputed alone, outside of the layer; a stage's backward takes micro-batches in the order of their forward."""
        self.column, self.rank, self.ranks, self.waits = column, rank, ranks, waits
        self.inside, self.target, self.real, self.waiting, self.counts = False, None, None, [], []

    def before(self, layer, args, kw):
        self.inside, (routes, real) = True, getattr(kw["packed_seq_params"], "routes", (None, None))
        if routes is not None:
            self.target = routes[:, self.column].chunk(self.ranks)[self.rank].long()
            # count in `logprobs` only: there the weights are the sampler's
            self.real = None if layer.training else real.chunk(self.ranks)[self.rank]
        if self.waits and layer.training:
            self.waiting.append(self.target)

    def after(self, layer, args, output):
        self.inside, self.target, self.real = False, None, None

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        """megatron-core's call. scores (tokens, experts) have the correction bias; returns (values, indices), (tokens, topk)
        each, of which it takes the indices and gathers the weights from the scores without bias."""
        target = self.target if self.inside else self.waiting.pop(0)
        if target is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        if target.shape != (len(scores), topk):
            raise Stop(f"a router has {len(scores)} tokens and top-{topk}, its routes are {tuple(target.shape)}")
        if self.real is not None:
            own = default_compute_topk(scores, topk, num_groups, group_topk)[1]
            both = (own[:, :, None] == target[:, None]).sum((1, 2))[self.real]
            self.counts.append(((both == topk).sum(), both.sum() / topk, len(both)))       # stay on the device
        return scores.gather(1, target), target


def attach(model, cfg):
    """Make this rank's MoE layers replay; returns their Forced."""
    from megatron.core import parallel_state as mpu
    from megatron.core.transformer.moe.moe_layer import MoELayer
    if cfg.moe_router_fusion:
        raise Stop("no router replay with moe_router_fusion, which passes it by")
    part = (mpu.get_tensor_model_parallel_rank(), cfg.tensor_model_parallel_size) if cfg.sequence_parallel else (0, 1)
    waits = cfg.recompute_granularity == "selective" and "moe" in cfg.recompute_modules
    found = []
    for layer in model.decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            forced = layer.mlp.router.router_replay = Forced(sum(cfg.moe_layer_freq[:layer.layer_number - 1]), *part, waits)
            layer.register_forward_pre_hook(forced.before, with_kwargs=True)
            layer.register_forward_hook(forced.after, always_call=True)
            found.append(forced)
    return found


def place(micros, batch, *, layers, k, experts):
    """Put a batch's routes on its packed micro-batches: psp.routes = (ids int16 (tokens, MoE layers, k), bool (tokens): known).
    Each sequence's last token and the padding have none and get k fixed, distinct experts, spread over all: no later token
    attends to them and no loss is read off them, so any will do, and fixed ones keep a run repeatable."""
    import torch
    routes, lengths = batch["routes"], [len(t) for t in batch["tokens"]]
    if len(routes) != len(lengths):
        raise Stop(f"routes of {len(routes)} sequences came with tokens of {len(lengths)}")
    for i, (r, n) in enumerate(zip(routes, lengths)):         # of all ranks' sequences, so that all ranks refuse together
        check(r, n, f"sequence {i}", layers=layers, k=k, experts=experts)
    for micro in micros:
        n = micro["ids"].shape[1]
        spread = (np.arange(n)[:, None] * k + np.arange(k)) % experts
        ids, known = np.repeat(spread[:, None], layers, 1).astype(np.int16), np.zeros(n, bool)
        for i, start in zip(micro["index"], micro["psp"].cu_seqlens_q.tolist()):
            rows = slice(start, start + lengths[i] - 1)
            ids[rows], known[rows] = routes[i], True
        ids = torch.from_numpy(ids).to(micro["ids"].device)
        if len(twice := (ids.sort(-1).values.diff(dim=-1) == 0).any(-1).nonzero()):
            row, layer = twice[0].tolist()
            raise Stop(f"routes of sequences {micro['index'][:8]}: {len(twice)} times an expert is named twice for one token, "
                       f"first in MoE layer {layer}: {ids[row, layer].tolist()}")
        micro["psp"].routes = ids, torch.from_numpy(known).to(ids.device)


# -- for the run's log -------------------------------------------------------------------------------------------------------

def health(routes, experts, counts=(), probe=None, min_overlap=0.5, sample=20_000, least=20_000):
    """Metrics of a step's routes, read from about `sample` evenly spaced rows; Stop where the sampler cannot have used them.

    entropy: of the use of a layer's experts in nats (mean, lowest layer), relative: mean / log(experts). spread: 0 at
    log(k), where all tokens take the same k experts, 1 at log(experts). counts: the trainer ranks' `replayed`, gives same
    (share of (token, layer) whose set is the trainer's own choice) and overlap (share of experts). probe: (before, after),
    routes of the same tokens around a publish. A capture that a weight update cut off repeats old routes (vllm#59449): of
    `least` or more none would be another, which no step of a real model leaves so (a rehearsal's, of 2,000, may)."""
    every = max(1, sum(map(len, routes)) // sample)
    rows = np.concatenate([r[::every] for r in routes])
    if not rows.size or (largest := int(rows.max())) >= experts:
        raise Stop(f"routes of {len(rows)} tokens name expert {largest if rows.size else 'none'}, the model has {experts}")
    layers, k = rows.shape[1:]
    use = np.stack([np.bincount(rows[:, i].ravel(), minlength=experts) for i in range(layers)]) / (len(rows) * k)
    entropy = -(use * np.log(np.where(use > 0, use, 1))).sum(1)
    spread = (entropy - np.log(k)) / max(np.log(experts / k), 1e-9)
    if experts > k and spread.min() < 0.01:
        raise Stop(f"{len(rows)} tokens take the same {k} of {experts} experts in MoE layer {spread.argmin()} (entropy "
                   f"{entropy.min():.3f} nats): the sampler returns routes that are not theirs")
    found = dict(entropy=entropy.mean(), entropy_lowest=entropy.min(), entropy_relative=entropy.mean() / np.log(experts),
                 spread=spread.mean())
    if len(counts):
        same, shared, n = np.sum(counts, axis=0)
        if not n or shared < min_overlap * n:
            raise Stop(f"{shared:.0f} of {n:.0f} choices of sampler and trainer are the same, less than {min_overlap:.0%} (by "
                       f"chance {k / experts:.0%}): the routes are of other tokens or other weights")
        found |= {"same": same / n, "overlap": shared / n}
    if probe:
        moved = np.concatenate([(np.sort(a) != np.sort(b)).any(-1).ravel() for a, b in zip(*probe)])
        found["changed"] = moved.mean()
        if not moved.any() and len(moved) >= least:
            raise Stop(f"none of {len(moved)} routes changed with the weights: the sampler returns old ones")
    return {f"routes/{name}": float(value) for name, value in found.items()}
