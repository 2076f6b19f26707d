"""Router replay: the sampler's routes are those of transformers; forced ones give the log-probabilities and gradients of
transformers with the same routes forced, with recomputation and on every layout; routes that cannot be are refused.

    python checks/test_replay.py CHECKPOINT OUT RANKS:TPxPPxEP ...        # the ranks, as in parallel_worker.py
"""
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.trainer import RECOMPUTE, TrainerRank, mpu  # isort: skip - first, it prepares megatron-core for the CPU

from checks import parallel_worker, tiny
from checks.local import Local, free_worker
from checks.test_parallel import together
from common import replay, sync, weights
from common.batch import merge
from common.cli import Stop
from data import arithmetic

SIZES = dict(layers=3, k=2, experts=8)                       # of checks/tiny.py
CASES = ["2-2x1x1", "2-1x2x1", "2-1x1x2", "2-2x1x2", "4-2x2x2"]
LENGTHS = (24, 5, 35, 40, 8, 1)


def other_routes(lengths, seed=5, layers=3, k=2, experts=8):
    """Random routes that no router chose."""
    g = np.random.default_rng(seed)
    return [g.random((n - 1, layers, experts)).argsort(-1)[..., :k].astype(np.uint8) for n in lengths]


def batch(routes=None, lengths=LENGTHS[:-1], seed=1):
    g, tokens = np.random.default_rng(seed), [t.numpy().astype(np.int32) for t in tiny.sequences(lengths, seed)]
    data = {"tokens": tokens, "n_prompt": [1] * len(tokens), "weight": g.normal(size=len(tokens)).tolist()}
    return data | ({} if routes is None else {"routes": routes})


def weighted(logp, entropy, mb):
    return (mb["weight"] * logp).sum() / 10, {"entropy": entropy.sum()}


@contextlib.contextmanager
def noted(model, force=None):
    """transformers' gates note what they choose, (tokens, k) for each MoE layer; with `force` (tokens, MoE layers, k) they choose
    that, weighted by their own scores."""
    chosen, gates = [], [m for n, m in model.named_modules() if n.endswith("mlp.gate")]

    def hook(column):
        def choose(gate, args, output):
            logits, gate_weights, ids = output
            if force is not None:
                ids = torch.from_numpy(force[:, column].astype(np.int64))
                scores = logits.sigmoid().gather(1, ids)
                gate_weights = scores / (scores.sum(-1, keepdim=True) + 1e-20) * gate.routed_scaling_factor
            chosen.append(ids)
            return logits, gate_weights, ids
        return choose
    hooks = [gate.register_forward_hook(hook(i)) for i, gate in enumerate(gates)]
    try:
        yield chosen
    finally:
        for h in hooks:
            h.remove()


def reference(folder, data, routes):
    """transformers, sequence by sequence: log-probabilities and {HF name: gradient of `weighted`}. Given routes are forced, a
    last token's are arbitrary."""
    model, found = tiny.hf_model(folder), []
    for i, (tokens, n) in enumerate(zip(data["tokens"], data["n_prompt"])):
        ids = torch.from_numpy(tokens.astype(np.int64))
        force = None if routes is None else np.concatenate([routes[i], np.full((1, *routes[i].shape[1:]), [3, 6])])
        with noted(model, force):
            logp = model(input_ids=ids[None]).logits[0, n - 1:-1].log_softmax(-1).gather(-1, ids[n:, None])[:, 0]
        (data["weight"][i] * logp.sum() / 10).backward()
        found.append(logp.detach().numpy())
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name in [n for n in grads if n.endswith("experts.gate_up_proj")]:                  # of all experts in one
        parts = [*grads.pop(name).chunk(2, 1), grads.pop(name.replace("gate_up", "down"))]
        for part, kind in zip(parts, ("gate_proj", "up_proj", "down_proj")):
            grads |= {name.replace("gate_up_proj", f"{e}.{kind}.weight"): g for e, g in enumerate(part)}
    return found, grads


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("replay") / "model"
    tiny.checkpoint(path)
    return path


@pytest.fixture()
def make(folder, tmp_path):
    def build(model=folder, **kw):
        if mpu.model_parallel_is_initialized():
            mpu.destroy_model_parallel()
        rank = TrainerRank(0, 1, model, **{**dict(replay=True, max_tokens=64), **kw})
        rank.load(tmp_path / "rendezvous")
        return rank
    yield build
    mpu.destroy_model_parallel()


def gradients(trainer, data):
    """{HF name: gradient} of the update, which is not applied."""
    trainer.optimizer.step = lambda: (True, torch.tensor(0.0), None)
    trainer.update(data, weighted)
    kept = [p.data for p in trainer.model.parameters()]
    for p in trainer.model.parameters():
        p.data = p.main_grad.clone()
    found = {k: t.clone() for k, t in weights.stream(trainer.model, trainer.cfg)}
    for p, data in zip(trainer.model.parameters(), kept):
        p.data = data
    return found


def same(got, want, atol, what=""):
    assert got.keys() == want.keys()
    for k in want:
        diff, size = (got[k] - want[k]).abs().max().item(), want[k].abs().max().item()
        assert diff <= atol * max(size, 0.1), f"{what} {k}: gradients differ by {diff:.1e}, largest is {size:.1e}"


def own_routes(trainer, data):
    """What the trainer chooses by itself for every token but the last."""
    found = {}

    def choose(column):
        def spy(scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
            values, ids = default_compute_topk(scores, topk, num_groups, group_topk)
            found.setdefault(column, []).append(ids)
            return values, ids
        return spy
    for forced in trainer.replaying:
        forced.get_replay_topk = choose(forced.column)
    trainer.logprobs(data)
    for forced in trainer.replaying:
        del forced.get_replay_topk
    routes = [None] * len(data["tokens"])
    for n, micro in enumerate(trainer._micro_batches(data)):
        ids = np.stack([found[c][n].numpy() for c in sorted(found)], 1).astype(np.uint8)
        for i, start in zip(micro["index"], micro["psp"].cu_seqlens_q.tolist()):
            routes[i] = ids[start:start + len(data["tokens"][i]) - 1]
    return routes


def test_the_trainers_own_routes_change_nothing(make):
    trainer, data = make(), batch()
    routes = own_routes(trainer, data)
    free, forced = (merge([trainer.logprobs(d)], 5) for d in (data, batch(routes)))
    for a, b in zip(free, forced):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    same_sets, shared, n = trainer.replayed()
    assert same_sets == shared == n == 3 * sum(len(t) - 1 for t in data["tokens"])
    assert trainer.replayed().tolist() == [0, 0, 0], "read once"
    same(gradients(trainer, batch(routes)), gradients(trainer, data), 5e-6)
    assert all(f.target is None and f.real is None for f in trainer.replaying)


def test_other_routes_are_those_of_transformers_forced(make, folder):
    routes = other_routes(LENGTHS[:-1])
    trainer, data = make(), batch(routes)
    want, wanted_gradients = reference(folder, data, routes)
    free, _ = reference(folder, data, None)
    got = merge([trainer.logprobs(data)], 5)
    assert max(np.abs(g - w).max() for g, w in zip(got, want)) < 2e-5
    assert min(np.abs(g - f).max() for g, f in zip(got, free)) > 0.01, "the routes made no difference"
    share = trainer.replayed()
    assert share[2] == 3 * sum(len(r) for r in routes) and share[1] == pytest.approx(share[2] * 2 / 8, rel=0.3)
    found = gradients(trainer, data)
    idle = found.keys() - wanted_gradients.keys()              # the indexer's choice has no gradient
    assert all(".indexer." in k or k.endswith("correction_bias") for k in idle), sorted(idle)
    assert wanted_gradients.keys() <= found.keys()
    same({k: g for k, g in found.items() if k not in idle}, wanted_gradients, 5e-5)
    gates = [wanted_gradients[k] for k in found if k.endswith("mlp.gate.weight")]
    assert len(gates) == 3 and all(g.abs().max() > 1e-2 for g in gates)


def test_a_micro_batch_leaves_nothing_for_the_next_and_what_has_no_routes_is_as_always(make):
    trainer, off = make(), make(replay=False)
    want = merge([off.logprobs(batch())], 5)
    trainer = make()
    trainer.logprobs(batch(other_routes(LENGTHS[:-1])))
    trainer.replayed()
    for a, b in zip(merge([trainer.logprobs(batch())], 5), want):
        np.testing.assert_array_equal(a, b)
    assert trainer.replayed().tolist() == [0, 0, 0]


def test_recomputation_takes_the_same_routes(make):
    data = batch(other_routes(LENGTHS[:-1]))
    plain = make()
    want, updated = gradients(plain, data), plain.replayed()
    assert updated.tolist() == [0, 0, 0], "an update counts nothing"
    for how in ("full", "selective"):
        again = make(recompute=how)
        assert len(again._micro_batches(data)) > 1
        same(gradients(again, data), want, 5e-6, how)
        assert again.replayed().tolist() == [0, 0, 0] and not any(f.waiting for f in again.replaying)
        same(gradients(again, batch()), gradients(plain, batch()), 5e-6, f"{how}, no routes")


def test_a_last_token_and_the_padding_do_not_matter(make, monkeypatch):
    """Other experts for the rows that have no routes: the same log-probabilities and gradients."""
    data = batch(other_routes(LENGTHS), LENGTHS)
    trainer, found = make(), []
    for spread in (0, 3):
        def place(micros, batch, _real=replay.place, _add=spread, **sizes):
            _real(micros, batch, **sizes)
            for m in micros:
                ids, known = m["psp"].routes
                ids[~known] = (ids[~known] + _add) % 8
                assert (~known).sum() >= len(m["index"])
        with monkeypatch.context() as patch:
            patch.setattr(replay, "place", place)
            patch.setitem(trainer.layout, "tp", 16)                        # rows are padded to 16
            found.append((merge([trainer.logprobs(data)], 6), gradients(trainer, data)))
    for a, b in zip(found[0][0], found[1][0]):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    same(found[1][1], found[0][1], 5e-6)


@pytest.mark.parametrize("change, message", [
    (lambda r: r[:-1], "routes of 4 sequences came with tokens of 5"),
    (lambda r: [r[0].astype(np.int64), *r[1:]], r"sequence 0: routes are int64 \(23, 3, 2\), but 24 tokens want uint8"),
    (lambda r: [r[0].tolist(), *r[1:]], "sequence 0: routes are list, but 24 tokens want uint8"),
    (lambda r: [r[1], r[0], *r[2:]], r"sequence 0: routes are uint8 \(4, 3, 2\), but 24 tokens want uint8 \(23, 3, 2\)"),
    (lambda r: [*r[:4], r[4][:, :2]], r"sequence 4: routes are uint8 \(7, 2, 2\), but 8 tokens want uint8 \(7, 3, 2\)"),
    (lambda r: [*r[:4], r[4][..., :1]], r"sequence 4: routes are uint8 \(7, 3, 1\)"),
    (lambda r: [*r[:4], np.full_like(r[4], 8)], "sequence 4: routes name expert 8, the model has 0 to 7"),
    (lambda r: [*r[:4], np.full_like(r[4], 5)], r"21 times an expert is named twice for one token, .* 0: \[5, 5\]"),
])
def test_routes_that_cannot_be_are_refused(make, change, message):
    trainer = make(max_tokens=10_000)
    data = batch(change(other_routes(LENGTHS[:-1])))
    for verb in (trainer.logprobs, lambda d: trainer.update(d, weighted)):
        with pytest.raises(Stop, match=message):
            verb(data)
    assert trainer.updates == 0


def test_routes_without_replay_and_layouts_that_bypass_it(make):
    with pytest.raises(Stop, match="the batch has routes, and this trainer was started with replay off"):
        make(replay=False).logprobs(batch(other_routes(LENGTHS[:-1])))
    with pytest.raises(Stop, match="no router replay with moe_router_fusion"):
        replay.attach(None, SimpleNamespace(moe_router_fusion=True))


def test_health():
    routes = other_routes((300, 200), experts=16, k=4, layers=2)
    found = replay.health(routes, 16, counts=[np.array([90, 95.5, 100]), np.array([10, 14.5, 20])])
    assert found["routes/same"] == pytest.approx(100 / 120) and found["routes/overlap"] == pytest.approx(110 / 120)
    assert found["routes/entropy"] == pytest.approx(np.log(16), abs=0.02) and found["routes/entropy_relative"] > 0.99
    assert found["routes/spread"] > 0.98 and found["routes/entropy_lowest"] <= found["routes/entropy"]
    # two experts, one of them in every row, the other in half of the rows: p = 1/2, 1/4, 1/4
    half = np.zeros((4, 1, 2), np.uint8)
    half[:, 0, 1] = [1, 1, 2, 2]
    assert replay.health([half], 4)["routes/entropy"] == pytest.approx(1.5 * np.log(2))
    moved = [r.copy() for r in routes]
    moved[0][:30, 1] = moved[0][:30, 1, ::-1]                  # the same experts in another order
    moved[0][50:70, 0] = (moved[0][50:70, 0] + 1) % 16         # other experts in 20 of 498 x 2 sets
    assert replay.health(routes, 16, probe=(routes, moved))["routes/changed"] == pytest.approx(20 / 996)
    constant = [np.tile(routes[0][:1], (len(r), 1, 1)) for r in routes]
    with pytest.raises(Stop, match=r"498 tokens take the same 4 of 16 experts in MoE layer 0 \(entropy 1.386 nats\)"):
        replay.health(constant, 16)
    with pytest.raises(Stop, match="name expert 15, the model has 15"):
        replay.health(routes, 15)
    with pytest.raises(Stop, match="30 of 100 choices of sampler and trainer are the same"):
        replay.health(routes, 16, counts=[np.array([1, 30, 100])])
    with pytest.raises(Stop, match="0 of 0 choices"):
        replay.health(routes, 16, counts=[np.zeros(3)])
    assert replay.health(routes, 16, probe=(routes, routes))["routes/changed"] == 0       # a small step, and few of them
    longer = other_routes((6000, 5000), experts=16, k=4, layers=2)
    with pytest.raises(Stop, match="none of 21996 routes changed with the weights"):
        replay.health(longer, 16, probe=(longer, longer))


# -- layouts -----------------------------------------------------------------------------------------------------------------

def measure(folder, out, tp=1, pp=1, ep=1):
    """Files of log-probabilities and gradients by HF name, routes forced, for each recomputation."""
    from safetensors.torch import save_file
    parallel_worker.start(tp, pp, ep)
    out.mkdir(parents=True, exist_ok=True)
    dp, mine = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    for name, over in RECOMPUTE.items():
        cfg, built = parallel_worker.model(folder, tp, pp, ep, **over)
        parallel_worker.logprobs.return_hidden(built, cfg)
        replay.attach(built, cfg)
        micro = {}
        for i, lengths in enumerate(parallel_worker.LENGTHS):
            if i % dp == mine:
                seqs = tiny.sequences(lengths, seed=i)
                ids, where, psp = parallel_worker.packed(seqs)
                place = dict(tokens=seqs, routes=other_routes(lengths, seed=i, layers=4))
                replay.place([dict(ids=ids, psp=psp, index=range(len(seqs)))], place, **{**SIZES, "layers": 4})
                micro[i] = ids, where, psp
        found = parallel_worker.step(cfg, built, list(micro.values()), backward=True)
        for p in built.parameters():
            p.data = p.main_grad
        facts = {**dict(weights.stream(built, cfg)), **{f"logprobs.{i}": lp for i, lp in zip(micro, found)}}
        file = out / f"{name}-{parallel_worker.dist.get_rank()}.safetensors"
        save_file({k: t.clone().contiguous() for k, t in facts.items()}, file)


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    root = tmp_path_factory.mktemp("layouts")
    tiny.checkpoint(root / "model", **tiny.SPARSE)
    cases = [case.replace("-", ":") for case in ["1-1x1x1", *CASES]]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([sys.executable, __file__, root / "model", root, *cases], env=env, timeout=400, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return root


@pytest.mark.parametrize("case", CASES)
def test_same_as_one_rank(facts, case):
    want = together(facts / "1-1x1x1", "none")
    for name in RECOMPUTE:
        got = together(facts / case, name)
        lps = {k for k in want if k.startswith("logprobs.")}
        assert max((got[k] - want[k]).abs().max() for k in lps) < 5e-5
        same({k: t for k, t in got.items() if k not in lps}, {k: t for k, t in want.items() if k not in lps}, 5e-5, name)


# -- the sampler -------------------------------------------------------------------------------------------------------------

def checkpoint(folder, **over):
    """A tiny model with a tokenizer, which a sampler wants."""
    tiny.checkpoint(folder, vocab_size=arithmetic.VOCABULARY, **over)
    arithmetic.tokenizer().save_pretrained(folder)


@contextlib.contextmanager
def engine(folder, **over):
    from common.sampler import SamplerEngine
    args = dict(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, replay=True)
    free_worker()
    held = SamplerEngine(folder, **{**args, **over})
    try:
        yield held
    finally:
        from vllm.distributed import cleanup_dist_env_and_memory
        held.llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
        free_worker()


def agreement(folder, sequences, routes):
    """Share of (token, layer) where transformers chooses the same set of experts."""
    model, hits = tiny.hf_model(folder), []
    for tokens, r in zip(sequences, routes):
        with torch.no_grad(), noted(model) as chosen:
            model(input_ids=torch.as_tensor(np.asarray(tokens, np.int64))[None])
        want = torch.stack(chosen, 1).numpy()[:len(r)]
        hits.append((np.sort(want) == np.sort(r)).all(-1).ravel())
    return np.concatenate(hits).mean()


on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="of the CPU classes; a GPU has vLLM's own routes")


@on_cpu
def test_the_samplers_routes_are_those_of_transformers(tmp_path):
    checkpoint(tmp_path, **tiny.SPARSE)
    prompts = [p.tolist() for p in tiny.sequences((3, 20, 64, 100, 150, 20, 7, 33, 2, 90), seed=3)]      # some in pieces of 64
    with engine(tmp_path) as sampler:
        answers = sampler.generate(prompts, list(range(10)), 24)
        again = sampler.generate(prompts, list(range(10)), 24)
        whole = [p + a["tokens"].tolist() for p, a in zip(prompts, answers)]
        for tokens, a, b in zip(whole, answers, again):
            assert a["routes"].shape == (len(tokens) - 1, 4, 2) and a["routes"].dtype == np.uint8
            assert np.array_equal(a["tokens"], b["tokens"]) and np.array_equal(a["routes"], b["routes"])
        assert agreement(tmp_path, whole, [a["routes"] for a in answers]) == 1.0
        scored = sampler.routes(whole)
        assert [len(r) for r in scored] == [len(t) for t in whole] and agreement(tmp_path, whole, scored) == 1.0
        assert all(np.array_equal(np.sort(s[:-1]), np.sort(a["routes"])) for s, a in zip(scored, answers))
        assert 0.3 < replay.health([a["routes"] for a in answers], 8)["routes/spread"] <= 1
        assert {a["is_truncated"] for a in answers} == {True, False}, "some end by themselves"
        assert len(sampler.score(whole[:1], [3])[0]) == len(whole[0]) - 3


@on_cpu
def test_a_preempted_answer_keeps_all_rows(tmp_path):
    """A cache of 24 blocks of 32 tokens for eight requests that grow to 150 tokens each; experts wrapped for LoRA."""
    checkpoint(tmp_path)
    prompts = [p.tolist() for p in tiny.sequences([50] * 8, seed=4)]
    with engine(tmp_path, lora_rank=8, vllm_args=dict(num_gpu_blocks_override=24)) as sampler:
        scheduler, preempted = sampler.llm.llm_engine.engine_core.engine_core.scheduler, []
        real = scheduler._preempt_request
        scheduler._preempt_request = lambda request, *a, **kw: (preempted.append(request.request_id), real(request, *a, **kw))[1]
        answers = sampler.generate(prompts, list(range(8)), 100)
        whole = [p + a["tokens"].tolist() for p, a in zip(prompts, answers)]
        assert preempted, "the cache was large enough"
        assert [len(a["routes"]) for a in answers] == [len(t) - 1 for t in whole]
        assert agreement(tmp_path, whole, [a["routes"] for a in answers]) == 1.0


@on_cpu
def test_the_trainer_chooses_what_the_sampler_did(make, tmp_path):
    checkpoint(tmp_path)
    prompts = [p.tolist() for p in tiny.sequences((3, 20, 30, 9), seed=3)]
    with engine(tmp_path) as sampler:
        answers = sampler.generate(prompts, list(range(4)), 30)
    data = {"tokens": [np.concatenate([p, a["tokens"]]) for p, a in zip(prompts, answers)], "n_prompt": [len(p) for p in prompts],
            "routes": [a["routes"] for a in answers]}
    trainer = make(model=tmp_path)
    logp = merge([trainer.logprobs(data)], 4)
    assert max(np.abs(a["logp"] - b).max() for a, b in zip(answers, logp)) < 2e-5
    counts = trainer.replayed()
    found = replay.health(data["routes"], 8, counts=[counts])
    assert counts[2] == 3 * sum(len(t) - 1 for t in data["tokens"])
    assert found["routes/same"] == found["routes/overlap"] == 1


@on_cpu
def test_routes_follow_a_publish_of_all_weights(make, tmp_path):
    checkpoint(tmp_path)
    probe = [p.tolist() for p in tiny.sequences((120, 150, 110), seed=8)]
    with engine(tmp_path, weights=True) as sampler:
        trainer = make(model=tmp_path)
        before = sampler.routes(probe)
        trainer.perturb(5, seed=1)
        with pytest.raises(Stop, match="none of 1140 routes changed with the weights"):
            replay.health(before, 8, probe=(before, sampler.routes(probe)), least=1000)
        data = {"tokens": [np.array(p) for p in probe], "n_prompt": [1] * 3, "routes": [r[:-1] for r in before]}
        trainer.logprobs(data)
        stale = trainer.replayed()
        sync.publish(Local(trainer), Local(sampler), 1)
        after = sampler.routes(probe)
        trainer.logprobs(data | {"routes": [r[:-1] for r in after]})
        found = replay.health(after, 8, counts=[trainer.replayed()], probe=(before, after))
        assert found["routes/same"] == 1 and found["routes/changed"] > 0.3 and stale[0] < 0.7 * stale[2]


@on_cpu
def test_missing_rows_and_replay_off_are_a_stop(tmp_path):
    checkpoint(tmp_path)
    prompt = tiny.sequences([80], seed=4)[0].tolist()
    with engine(tmp_path, vllm_args=dict(enable_prefix_caching=True)) as sampler:
        sampler.generate([prompt], [0], 4)
        with pytest.raises(Stop, match=r"routes are NoneType, but 84 tokens want uint8 \(83, 3, 2\)"):
            sampler.generate([prompt], [0], 4)
        assert "routes" not in sampler.generate([prompt], [0], 4, routes=False)[0]
        sampler.replay = False
        assert "routes" not in sampler.generate([prompt], [0], 4)[0]
        with pytest.raises(Stop, match="started with replay off"):
            sampler.routes([prompt])


def test_vllms_own_routes_lose_their_dense_layers_and_are_checked():
    """The CUDA branch with an answer made by hand: vLLM's array has a row for each layer."""
    from common.sampler import SamplerEngine
    rows = np.arange(5 * 4 * 2, dtype=np.uint8).reshape(5, 4, 2) % 8
    hf = SimpleNamespace(mlp_layer_types=["dense", "sparse", "sparse", "sparse"], num_experts_per_tok=2, n_routed_experts=8)
    answer = SimpleNamespace(token_ids=[1, 2], routed_experts=rows)
    out = SimpleNamespace(prompt_token_ids=[3, 4, 5, 6], outputs=[answer], request_id="0")
    sampler = SimpleNamespace(replay=True, cuda=True, hf=hf, _ask=lambda prompts, params: [out])
    assert np.array_equal(SamplerEngine._ask_routed(sampler, [], [])[1][0], rows[:, 1:])
    for bad, message in ((rows[:4], r"uint8 \(4, 3, 2\), but 6 tokens want uint8 \(5, 3, 2\)"), (None, "NoneType")):
        answer.routed_experts = bad
        with pytest.raises(Stop, match=message):
            SamplerEngine._ask_routed(sampler, [], [])


if __name__ == "__main__":
    torch.set_num_threads(1)
    parallel_worker.measure = lambda folder, out, *layout: measure(folder, Path(out), *layout)
    by_ranks = {}
    for argument in sys.argv[3:]:
        n, _, layout = argument.partition(":")
        by_ranks.setdefault(int(n), []).append(layout)
    for n, layouts in by_ranks.items():
        parallel_worker.run(n, layouts, sys.argv[1], sys.argv[2])
