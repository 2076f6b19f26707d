"""A real vLLM engine and a real trainer rank in one process: what is published is what is sampled, family by family,
and faults are caught.

DTYPE=bfloat16 runs the families on a bf16 engine (checks/test_handoff_bf16.py does, in a process of its own).
"""
import os

import numpy as np
import pytest
import torch

from common.trainer import TrainerRank, mpu  # isort: skip - first, it prepares megatron-core for the CPU

from checks import logprob_parity
from checks.local import Local, memory
from common import lora, sync
from common.batch import merge
from common.cli import Stop
from common.receive import kind
from common.sampler import SamplerEngine
from data import arithmetic

DTYPE = os.environ.get("DTYPE", "float32")
CUDA = torch.cuda.is_available()
# float32: rounding only. bf16: measured 0.002-0.04. What the adapter itself changes must be four times the gap: a
# missing or doubled adapter makes gap and change alike.
MEAN, MAX, SIZE = {"float32": (2e-6, 5e-5, 0.5), "bfloat16": (0.06, 1, 3.0)}[DTYPE]
ATTENTION = ["self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa",
             *([] if CUDA else ["self_attn.kv_b_proj"]), "self_attn.o_proj"]
FAMILIES = {**{name: [name] for name in ATTENTION}, "dense": ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"],
            "shared expert": [f"mlp.shared_experts.{p}_proj" for p in ("gate", "up", "down")],
            "routed experts": [f"mlp.experts.{p}_proj" for p in ("gate", "up", "down")], "all": None}
only_float32 = pytest.mark.skipif(DTYPE != "float32", reason="float32 alone is enough for what this test shows")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("handoff")
    # bf16: smaller weights, or the rounding of a random model alone exceeds the tolerance that real ones keep
    widths = arithmetic.CUDA_WIDTHS if CUDA else {} if DTYPE == "float32" else {"initializer_range": 0.02}
    arithmetic.prepare(path, dtype=DTYPE, **widths)
    return path / "start"


@pytest.fixture(scope="module")
def engine(folder):
    # prompts longer than a batch: their prefill comes in chunks
    room, batch = (4096, 1024) if CUDA else (192, 64)
    return SamplerEngine(folder, dtype=DTYPE, max_model_len=room, max_num_seqs=16, max_num_batched_tokens=batch, lora_rank=16,
                         gpu_memory_utilization=0.4, vllm_args=dict(worker_extension_cls="checks.local.Worker"))


@pytest.fixture(scope="module", params=["shared", "each"])
def trainer(request, folder, tmp_path_factory):
    targets = [t for t in lora.TARGETS if not CUDA or t != "kv_b_proj"]
    rank = TrainerRank(0, 1, folder, dtype=DTYPE, lora_rank=8, lora_alpha=16, lora_targets=targets, experts=request.param,
                       lr=1e-3)
    rank.load(tmp_path_factory.mktemp("rendezvous") / "file")
    yield rank
    mpu.destroy_model_parallel()


@pytest.fixture()
def prompts():
    g = np.random.default_rng(3)
    long = 2600 if CUDA else 90                                      # more than index_topk: 2048, or 40 for the CPU's model
    return [g.integers(9, arithmetic.VOCABULARY, n).tolist() for n in (4, 21, long)]


def next_version(engine):
    return engine.version + 1


def set_family(trainer, kinds, size=SIZE):
    """Noise in the lora_B of the given kinds of module (None: all), zero in the others."""
    g = torch.Generator().manual_seed(1)
    for key, view in lora.named(trainer.model, trainer.cfg):
        if key.endswith("lora_B"):
            wanted = kinds is None or kind(key)[:-len(".lora_B")] in kinds
            view.copy_((torch.randn(view.shape, generator=g) * size / 8).to(view.device) if wanted else torch.zeros(()))


def scored(trainer, engine, prompts, seed=0):
    """(decode gap, prefill gap, trainer's logp) over fresh answers: arrays over all response tokens."""
    answers = engine.generate(prompts, [seed, seed + 1, seed + 2], 24)
    tokens = [np.concatenate([p, a["tokens"]]) for p, a in zip(prompts, answers)]
    batch = {"tokens": tokens, "n_prompt": [len(p) for p in prompts]}
    mine = merge([trainer.logprobs(batch)], len(prompts))
    theirs = engine.score(batch["tokens"], batch["n_prompt"])
    gap = lambda xs: np.abs(np.concatenate(xs) - np.concatenate(mine))                                       # noqa: E731
    return gap([a["logp"] for a in answers]), gap(theirs), batch


@pytest.mark.parametrize("family", FAMILIES)
def test_published_equals_trainer(trainer, engine, prompts, family):
    set_family(trainer, [])
    sync.publish(Local(trainer), Local(engine), next_version(engine))
    _, _, batch = scored(trainer, engine, prompts)
    without = engine.score(batch["tokens"], batch["n_prompt"])
    set_family(trainer, FAMILIES[family])
    sync.publish(Local(trainer), Local(engine), next_version(engine))
    moved = np.abs(np.concatenate(engine.score(batch["tokens"], batch["n_prompt"])) - np.concatenate(without))
    for seed in (0, 10):                    # the second time with the prompts' prefix in the cache
        decode, prefill, _ = scored(trainer, engine, prompts, seed)
        for what, gap in (("decode", decode), ("prefill", prefill)):
            assert gap.mean() <= min(MEAN, moved.mean() / 4) and gap.max() <= MAX, \
                f"{family}, {what}: mean {gap.mean():.2e}, max {gap.max():.2e}, the adapter moves {moved.mean():.2e}"


def check(trainer, engine, prompts):
    try:
        return logprob_parity.five_steps(Local(trainer), Local(engine), prompts, dtype=DTYPE, max_tokens=16,
                                         version=engine.version, say=lambda *_: None)
    finally:
        trainer.onload()                                             # the check leaves the GPU to the sampler


def test_five_steps_pass_and_leave_everything_as_it_was(trainer, engine, prompts):
    set_family(trainer, None, 0.1)
    before = [view.clone() for _, view in lora.named(trainer.model, trainer.cfg)]
    report = check(trainer, engine, prompts)
    assert report["passed"], report["why"]
    assert all(torch.equal(a, view) for a, (_, view) in zip(before, lora.named(trainer.model, trainer.cfg)))
    stale = next(r for r in report["rows"] if r["what"] == "stale, must disagree")
    assert stale["mean"] > 2.5 * report["tolerance"][0]


def faulty_export(monkeypatch, change):
    real = lora.export
    monkeypatch.setattr(lora, "export", lambda model, cfg, dtype: change(dict(real(model, cfg, dtype))))


def dropped(tensors):
    return {k: t for k, t in tensors.items() if k != "layers.2.self_attn.q_b_proj.lora_B"}


def dropped_family(tensors):
    return {k: t for k, t in tensors.items() if ".q_b_proj." not in k}


def scaled(tensors):
    return {k: t * 2 if k.endswith("lora_B") else t for k, t in tensors.items()}


def swapped(tensors):
    return {k: t[[1, 0, *range(2, len(t))]] if t.ndim == 3 else t for k, t in tensors.items()}


def gate_is_up(tensors):
    other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    return {k: tensors[k.replace(n, other[n])] if (n := k.split(".")[-2]) in other else t for k, t in tensors.items()}


def one_layer_stale(tensors):
    return {k: torch.zeros_like(t) if k.startswith("layers.3.") and k.endswith("lora_B") else t for k, t in tensors.items()}


@pytest.mark.skipif(not CUDA, reason="the CPU sampler applies kv_b_proj adapters")
def test_an_adapter_that_vllm_would_ignore_is_refused(trainer, engine, monkeypatch):
    shapes = {"A": (8, 512), "B": (16 * 448, 8)}
    faulty_export(monkeypatch, lambda t: {**t, **{
        f"layers.{i}.self_attn.kv_b_proj.lora_{ab}": torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
        for i in range(4) for ab, shape in shapes.items()}})
    with pytest.raises(Stop, match="kv_b_proj cannot be adapted: vLLM 0.32.0's MLA attention uses the unadapted weight"):
        sync.publish(Local(trainer), Local(engine), next_version(engine))


def stale_a(tensors, first={}):                                     # noqa: B006 - what is kept between calls is the fault
    first.update({k: t for k, t in tensors.items() if k.endswith("lora_A") and k not in first})
    return {k: first.get(k, t) for k, t in tensors.items()}


@only_float32
@pytest.mark.parametrize("fault, where", [
    (dropped, None), (scaled, "every family part"), (stale_a, None),
    (dropped_family, "alone, self_attn.q_b_proj parts; layer by layer the first that does is 0"),
    (swapped, "mlp.experts.down_proj, mlp.experts.gate_proj, mlp.experts.up_proj part; layer by layer the first that does is 1"),
    (gate_is_up, "gate_proj, mlp.shared_experts.up_proj, mlp.up_proj part; layer by layer the first that does is 0"),
    (one_layer_stale, "layer by layer the first that does is 3 of 4")])
def test_five_steps_catch_what_the_checksums_cannot_know(trainer, engine, prompts, monkeypatch, fault, where):
    if fault is swapped and trainer.lora["experts"] != "each":
        pytest.skip("all experts of a layer share one adapter: there is nothing to swap")
    set_family(trainer, [])                 # as at the start of a run: every fault is invisible in step 1
    faulty_export(monkeypatch, fault)
    if fault is dropped:
        with pytest.raises(Stop, match="1 modules would keep no adapter, their tensors are missing: layers.2.self_attn.q_b_proj"):
            check(trainer, engine, prompts)
        return
    report = check(trainer, engine, prompts)
    assert not report["passed"] and "step 5" in report["why"][0], report["why"]
    assert where is None or where in report["where"][1], report["where"]
    looks = "it looks like a wrong scale" if fault is scaled else "a part is lost or exchanged"
    assert looks in report["where"][0], report["where"]
    assert len(report["worst"]) == 10 and report["version"] == engine.version


@only_float32
def test_a_wrong_layer_of_the_base_model_is_named(trainer, engine, prompts):
    """Step 1 fails: the sampler's third layer has another norm."""
    set_family(trainer, [])
    worker = engine.llm.llm_engine.model_executor.driver_worker.worker
    weight = worker.model_runner.model.model.layers[2].post_attention_layernorm.weight
    weight.data.mul_(1.01)
    try:
        report = check(trainer, engine, prompts)
    finally:
        weight.data.div_(1.01)
    assert not report["passed"] and "step 1" in report["why"][0], report["why"]
    assert "the hidden states part after layer 2 of 4: relative difference" in report["where"][0], report["where"]


@only_float32
def test_five_steps_catch_a_stale_version_that_answers_as_if_new(trainer, engine, prompts, monkeypatch):
    set_family(trainer, [])
    real, changed = SamplerEngine.commit, engine.version + 2

    def commit(self, version):
        request = self.request
        answer = real(self, version)
        if version == changed:
            self.request = request                       # acknowledged, installed, and not used
        return answer
    monkeypatch.setattr(SamplerEngine, "commit", commit)
    report = check(trainer, engine, prompts)
    assert not report["passed"] and "step 5" in report["why"][0], report["why"]


O_PROJ = "layers.0.self_attn.o_proj"
GUARDS = {
    "a tensor without a module": (
        lambda t: {**t, **{f"layers.9.self_attn.o_proj.lora_{ab}": t[f"{O_PROJ}.lora_{ab}"] for ab in "AB"}},
        "2 of .* tensors match no module"),
    "a router adapter": (
        lambda t: {**t, "layers.1.mlp.gate.lora_A": torch.zeros(8, 128), "layers.1.mlp.gate.lora_B": torch.zeros(8, 8)},
        "never applies it"),
    "a wrong shape": (
        lambda t: {**t, f"{O_PROJ}.lora_B": t[f"{O_PROJ}.lora_B"][:-1]}, r"shape \(127, 8\), its slot takes \(128, 8\)"),
    "A and B exchanged": (
        lambda t: {**t, f"{O_PROJ}.lora_A": t[f"{O_PROJ}.lora_B"]}, r"o_proj.lora_A has shape \(128, 8\)"),
}


@only_float32
@pytest.mark.parametrize("case", GUARDS)
def test_a_bundle_that_does_not_fit_is_refused_and_the_old_version_serves_on(trainer, engine, prompts, monkeypatch, case):
    set_family(trainer, None)
    sync.publish(Local(trainer), Local(engine), next_version(engine))
    _, _, batch = scored(trainer, engine, prompts)
    before, version = engine.score(batch["tokens"], batch["n_prompt"]), engine.version
    change, sentence = GUARDS[case]
    set_family(trainer, None, 2.0)
    faulty_export(monkeypatch, change)
    with pytest.raises(Stop, match=f"was not published, the samplers keep the version before it.*{sentence}"):
        sync.publish(Local(trainer), Local(engine), version + 1)
    after = engine.score(batch["tokens"], batch["n_prompt"])
    assert engine.version == version and all(np.array_equal(a, b) for a, b in zip(before, after))


@only_float32
def test_old_versions_other_base_models_and_cut_transfers_are_refused(trainer, engine, monkeypatch, tmp_path):
    set_family(trainer, None)
    sync.publish(Local(trainer), Local(engine), next_version(engine))
    with pytest.raises(Stop, match=f"version {engine.version} is not newer than version {engine.version}"):
        sync.publish(Local(trainer), Local(engine), engine.version)
    monkeypatch.setattr(trainer, "base", "0123456789abcdef")
    with pytest.raises(Stop, match="adapts base model 0123456789abcdef, this sampler serves"):
        sync.publish(Local(trainer), Local(engine), next_version(engine))
    monkeypatch.undo()
    real = sync.SharedMemory.offer

    def cut(self, flat, engines):
        ticket = real(self, flat, engines)
        os.truncate(ticket["path"], flat.numel() // 2)
        return ticket
    monkeypatch.setattr(sync.SharedMemory, "offer", cut)
    with pytest.raises(Stop, match=r"arrived with \d+ of \d+ bytes"):
        sync.publish(Local(trainer), Local(engine), next_version(engine))


@only_float32
def test_versions_of_tokens_slots_and_base_requests(trainer, engine, prompts):
    set_family(trainer, None)
    serving, engine.request = engine.request, None                        # a request without adapter
    base = engine.score([p + [5, 6, 7] for p in prompts], [len(p) for p in prompts])
    engine.request = serving
    for _ in range(5):
        sync.publish(Local(trainer), Local(engine), next_version(engine))
        assert all((a["versions"] == engine.version).all() for a in engine.generate(prompts, [1, 2, 3], 4))
    adapters = engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner.lora_manager._adapter_manager
    assert len(adapters._registered_adapters) <= 2 and engine.version + 1 in adapters.lora_index_to_id, "old versions are let go"
    engine.request = None
    again = engine.score([p + [5, 6, 7] for p in prompts], [len(p) for p in prompts])
    engine.request = serving
    assert all(np.array_equal(a, b) for a, b in zip(base, again)), "a base request must not see an adapter"
    engine.request = None
    sync.publish(Local(trainer), Local(engine), next_version(engine))


@only_float32
def test_sampled_logprobs_are_those_of_the_sampled_distribution(trainer, engine, prompts):
    """At temperature 0.5 and top-p 0.8 the answer's log-probabilities must be renormalised over what could be drawn
    (float64 reference)."""
    set_family(trainer, None)
    sync.publish(Local(trainer), Local(engine), next_version(engine))
    answer = engine.generate(prompts[:1], [7], 1, 0.5, 0.8)[0]
    vocabulary = range(arithmetic.VOCABULARY)
    logits = np.array([engine.score([prompts[0] + [t]], [len(prompts[0])])[0][0] for t in vocabulary], dtype=np.float64)
    p = np.exp(logits / 0.5)
    p /= p.sum()
    order = np.argsort(-p)
    kept = order[:int(np.searchsorted(np.cumsum(p[order]), 0.8)) + 1]
    token = int(answer["tokens"][0])
    assert token in kept and abs(answer["logp"][0] - np.log(p[token] / p[kept].sum())) < 1e-4


@only_float32
def test_vllm_loads_the_exported_folder_as_what_was_trained(trainer, engine, prompts, tmp_path):
    """The PEFT folder through vLLM's own file loader, as somebody who was given the folder would."""
    from vllm.lora.request import LoRARequest
    set_family(trainer, None)
    trainer.export(tmp_path)
    serving, engine.request = engine.request, LoRARequest("exported", 100_000, str(tmp_path / "adapter"))
    try:
        decode, prefill, _ = scored(trainer, engine, prompts)
    finally:
        engine.request = serving
        engine.llm.llm_engine.remove_lora(100_000)
    assert decode.max() <= MAX and prefill.max() <= MAX and decode.mean() <= MEAN, f"{decode.mean():.1e} {prefill.max():.1e}"
    sync.publish(Local(trainer), Local(engine), next_version(engine))              # and the engine goes on
    assert scored(trainer, engine, prompts)[0].max() <= MAX


def test_a_receiver_without_memory_keeps_the_old_version(trainer, engine, prompts, monkeypatch):
    set_family(trainer, None)
    sync.publish(Local(trainer), Local(engine), next_version(engine))
    _, _, batch = scored(trainer, engine, prompts)
    before, version = engine.score(batch["tokens"], batch["n_prompt"]), engine.version
    set_family(trainer, None, 2 * SIZE)
    if CUDA:
        engine._rpc("fill")
    else:
        real = torch._foreach_copy_

        def half(regions, sources):                                    # some of the slot is written
            real(regions[::2], sources[::2])
            raise torch.OutOfMemoryError("no room")
        monkeypatch.setattr("common.receive.copy", half)
    try:
        sync.publish(Local(trainer), Local(engine), version + 1)
    except Stop as error:
        assert "the samplers keep the version before it: rank 0: OutOfMemoryError: " in str(error)
        assert engine.version == version
    else:
        assert CUDA and engine.version == version + 1, "on a full card it may fit yet, on the CPU this must fail"
    if CUDA:
        engine._rpc("empty")
    monkeypatch.undo()
    after = engine.score(batch["tokens"], batch["n_prompt"])
    assert (engine.version == version) == all(np.array_equal(a, b) for a, b in zip(before, after))
    sync.publish(Local(trainer), Local(engine), next_version(engine))    # and what the failure left in the slot does not show
    decode, prefill, _ = scored(trainer, engine, prompts)
    assert max(decode.max(), prefill.max()) <= MAX


def test_a_second_version_waits_for_the_first(trainer, engine):
    set_family(trainer, None)
    version = next_version(engine)
    first = trainer.offer(version)
    with pytest.raises(Stop, match="still on offer: two publishes at once"):
        trainer.offer(version + 1)
    engine.stage(first["header"], first["ticket"])
    with pytest.raises(Stop, match=f"version {version} is staged here and neither committed nor aborted"):
        engine.stage(first["header"], first["ticket"])
    engine.abort(version)
    trainer.release()
    sync.publish(Local(trainer), Local(engine), version)


class Scribbles(Local):
    """Sampler engines whose trainer reuses the buffer as soon as the version is staged."""
    transport = None

    def each(self, verb, arguments):
        answers = super().each(verb, arguments)
        if verb == "stage" and CUDA:
            self.transport._flat.fill_(7)
        elif verb == "stage":
            self.transport._file.write_bytes(b"\7" * self.transport._file.stat().st_size)
        return answers


def test_the_trainer_may_reuse_its_buffer_once_staged(trainer, engine, prompts):
    set_family(trainer, None)
    sampler = Scribbles(engine)
    sampler.transport = trainer.transport
    sync.publish(Local(trainer), sampler, next_version(engine))        # compares fingerprints read back from the slots
    decode, prefill, _ = scored(trainer, engine, prompts)
    assert max(decode.max(), prefill.max()) <= MAX


def test_200_publishes_leave_no_memory_behind(trainer, engine):
    set_family(trainer, None)
    for i in range(220):
        if i == 20:
            before = memory()
        told = sync.publish(Local(trainer), Local(engine), next_version(engine))
    assert memory() - before < 40 * told["bytes"], "a fifth of the bundles"
    assert not list(sync.SharedMemory.folder.glob(f"policy-{os.getpid()}-*"))


@pytest.mark.skipif(not CUDA, reason="CUDA IPC needs a GPU")
def test_a_sender_that_died_is_one_sentence_and_the_next_publish_works(trainer, engine, prompts):
    import json
    import subprocess
    import sys
    program = """
import json, sys, torch
from common import bundle, sync
tensors = {"layers.1.self_attn.o_proj.lora_A": torch.randn(8, 4096, device="cuda").bfloat16(),
           "layers.1.self_attn.o_proj.lora_B": torch.randn(512, 8, device="cuda").bfloat16()}
header, flat = bundle.pack(tensors, version=int(sys.argv[1]), base=sys.argv[2], rank=8, experts=None)
print(json.dumps([header.to_json(), sync.CudaIpc().offer(flat)]))
"""
    asked = [sys.executable, "-c", program, str(next_version(engine)), engine.base]
    found = subprocess.run(asked, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": os.getcwd()})
    header, ticket = json.loads(found.stdout.splitlines()[-1])
    with pytest.raises(Stop, match="rank 0: "):
        engine.stage(header, ticket)
    set_family(trainer, None)
    sync.publish(Local(trainer), Local(engine), next_version(engine))
    decode, prefill, _ = scored(trainer, engine, prompts)
    assert max(decode.max(), prefill.max()) <= MAX
