"""Adapters: what is trained equals what is exported, what peft loads and what peft merges; keys, shapes and targets are
checked."""
import json

import peft
import pytest
import torch
from safetensors.torch import load_file

from checks import parallel_worker as worker
from checks import tiny
from common import logprobs, lora
from common.cli import Stop

RANK, ALPHA = 4, 6                                  # a scale of 1.5: forgetting or doubling it shows
ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora") / "model"
    tiny.checkpoint(folder, **tiny.SPARSE)
    worker.start()
    return folder


def adapted(folder, std=0.05, dtype=torch.float32, targets=lora.TARGETS, experts="shared", rank=RANK):
    cfg, built = worker.model(folder, dtype=dtype)
    made = lora.add(built, cfg, rank, ALPHA, targets, experts)
    if std:
        lora.perturb(built, cfg, std, seed=1)
    return cfg, built.eval(), made


def packed_logprobs(built, seqs):
    ids, where, psp = worker.packed(seqs)
    logits = built(ids, where, None, packed_seq_params=psp)[0].float()
    return logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0][worker.inside(psp)]


SEQS = tiny.sequences([30, 12, 41, 13])


@pytest.mark.parametrize("targets, experts", [
    (lora.TARGETS, "shared"), (lora.TARGETS, "each"), (lora.TARGETS, None), (ATTENTION, None), (("gate_proj", "up_proj"), None),
    (MLP, "each"), (("down_proj",), "shared"), (("down_proj",), None), (("kv_b_proj",), None)],
    ids=lambda v: f"{len(v)}-{v[-1]}" if isinstance(v, tuple) else str(v))
def test_peft_loads_and_merges_what_was_trained(folder, tmp_path, targets, experts):
    cfg, built, _ = adapted(folder, targets=targets, experts=experts)
    with torch.no_grad():
        mine = packed_logprobs(built, SEQS)
    hf = tiny.hf_model(folder)
    base = tiny.hf_logprobs(hf, SEQS)
    lora.save_peft(lora.export(built, cfg, torch.float32), hf.config, RANK, tmp_path / "adapter", "tiny")
    model = peft.PeftModel.from_pretrained(hf, tmp_path / "adapter")
    loaded = tiny.hf_logprobs(model, SEQS)
    merged = tiny.hf_logprobs(model.merge_and_unload(), SEQS)
    assert (mine - base).abs().max() > 0.01, "the adapter changes nothing, so this compares nothing"
    assert (mine - loaded).abs().max() < 1e-5, f"peft's live adapter is {(mine - loaded).abs().max():.1e} off"
    assert (mine - merged).abs().max() < 1e-5, f"peft's merged adapter is {(mine - merged).abs().max():.1e} off"


@pytest.mark.parametrize("experts", ["shared", "each"])
def test_every_family_moves_the_model_and_reaches_peft(folder, tmp_path, experts):
    """Each adapter tensor on its own, others zero: a family that peft drops or swaps cannot hide behind the rest."""
    cfg, built, _ = adapted(folder, experts=experts)
    whole = lora.export(built, cfg, torch.float32)
    families = sorted({k.split(".", 2)[2].removesuffix(".lora_B") for k in whole if k.endswith("lora_B")})
    assert len(families) == 5 + 3 + 3 + 3
    hf = tiny.hf_model(folder)
    base = tiny.hf_logprobs(hf, SEQS)
    lora.save_peft(whole, hf.config, RANK, tmp_path / "adapter", "tiny")
    model = peft.PeftModel.from_pretrained(hf, tmp_path / "adapter")
    for family in families:
        one = {k: t if k.split(".", 2)[2] == family + ".lora_B" or k.endswith("lora_A") else torch.zeros_like(t)
               for k, t in whole.items()}
        lora.load(built, cfg, one)
        lora.save_peft(one, hf.config, RANK, tmp_path / "adapter", "tiny")
        peft.set_peft_model_state_dict(model, load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
        with torch.no_grad():
            mine = packed_logprobs(built, SEQS)
        theirs = tiny.hf_logprobs(model, SEQS)
        assert (mine - base).abs().max() > 1e-3, f"{family} has no effect"
        assert (mine - theirs).abs().max() < 1e-5, f"{family}: peft is {(mine - theirs).abs().max():.1e} off"


def test_keys_shapes_and_layout(folder):
    cfg, built, _ = adapted(folder, experts="each")
    out = lora.export(built, cfg, torch.bfloat16)
    shapes = {k: list(t.shape) for k, t in out.items()}
    assert all(t.dtype == torch.bfloat16 for t in out.values()) and len(out) == 2 * (6 * 5 + 2 * 3 + 4 * 6)
    assert list(out) == sorted(out, key=lambda k: int(k.split(".")[1])), "layers are not in order"
    for module, a, b in (("layers.0.mlp.gate_proj", [4, 64], [96, 4]),
                         ("layers.5.mlp.shared_experts.down_proj", [4, 32], [64, 4]),
                         ("layers.2.mlp.experts.up_proj", [8, 4, 64], [8, 32, 4])):
        assert (shapes[f"{module}.lora_A"], shapes[f"{module}.lora_B"]) == (a, b), module
    assert not torch.equal(out["layers.2.mlp.experts.up_proj.lora_A"], out["layers.2.mlp.experts.gate_proj.lora_A"])
    _, shared, _ = adapted(folder)
    assert list(lora.export(shared, cfg, torch.float32)["layers.2.mlp.experts.up_proj.lora_A"].shape) == [4, 64]


def test_base_is_frozen_and_new_adapter_is_silent(folder):
    cfg, built, made = adapted(folder, std=0)
    trained = {n for n, p in built.named_parameters() if p.requires_grad}
    assert trained and all(".lora." in n for n in trained) and all(p.dtype == torch.float32 for p in built.parameters())
    assert all(m.a.abs().max() > 0 and not m.b.any() for m in made.values())
    _, plain = worker.model(folder)
    with torch.no_grad():
        assert (packed_logprobs(built, SEQS) - packed_logprobs(plain.eval(), SEQS)).abs().max() < 5e-6


def test_export_is_a_copy(folder):
    cfg, built, made = adapted(folder)
    out = lora.export(built, cfg, torch.float32)
    before = {k: t.clone() for k, t in out.items()}
    for m in made.values():
        m.a.data.zero_(), m.b.data.zero_()
    assert all(torch.equal(out[k], before[k]) for k in out)


def test_bfloat16_base_with_float32_adapters(folder, tmp_path):
    tiny.checkpoint(tmp_path / "bf16", dtype=torch.bfloat16, **tiny.SPARSE)
    for experts in ("shared", "each"):
        cfg, built, made = adapted(tmp_path / "bf16", dtype=torch.bfloat16, experts=experts, rank=8)
        logprobs.return_hidden(built, cfg)
        ids, where, psp = worker.packed(SEQS)
        hidden = built.train()(ids, where, None, packed_seq_params=psp)
        lp, _ = logprobs.logprobs(hidden[0, :-1], built.output_layer.weight, ids[0, 1:])
        lp.sum().backward()
        assert hidden.dtype == torch.bfloat16 and lp.dtype == torch.float32
        for name, m in made.items():
            for p in (m.a, m.b):
                assert p.dtype == p.grad.dtype == torch.float32 and p.grad.isfinite().all() and p.grad.any(), name


def test_perturb_is_seeded_and_scaled(folder):
    cfg, built, _ = adapted(folder, std=0)
    before = {k: v.clone() for k, v in lora.named(built, cfg)}
    x = torch.randn(2000, 64)
    lora.perturb(built, cfg, 0.25, seed=7)
    first = {k: v.clone() for k, v in lora.named(built, cfg)}
    assert not any(torch.equal(first[k], before[k]) for k in before), "a tensor left as it was could be lost without being missed"
    a, b = before["layers.1.self_attn.q_a_proj.lora_A"], first["layers.1.self_attn.q_a_proj.lora_B"]
    assert 0.15 < (x @ a.t() @ b.t() * ALPHA / RANK).std() < 0.4, "0.25 of the input's size was asked for"
    for k, v in lora.named(built, cfg):
        v.copy_(before[k])
    lora.perturb(built, cfg, 0.25, seed=7)
    assert all(torch.equal(v, first[k]) for k, v in lora.named(built, cfg))
    lora.perturb(built, cfg, 0.25, seed=8)
    assert not any(torch.equal(v, first[k]) for k, v in lora.named(built, cfg))


@pytest.mark.parametrize("experts", ["shared", "each"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folder_round_trip(folder, tmp_path, experts, dtype):
    cfg, built, _ = adapted(folder, experts=experts)
    out = lora.export(built, cfg, dtype)
    for _ in range(2):                                            # the second replaces the first
        lora.save_peft(out, tiny.config(**tiny.SPARSE), RANK, tmp_path / "adapter", "tiny")
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]
    back = lora.load_peft(tmp_path / "adapter")
    assert back.keys() == out.keys() and all(back[k].dtype == dtype and torch.equal(back[k], out[k]) for k in out)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (RANK, RANK)
    config["lora_alpha"] = 2 * RANK
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    twice = lora.load_peft(tmp_path / "adapter")
    assert all(torch.equal(twice[k], out[k] * (2 if k.endswith("B") else 1)) for k in out)


# ---------------------------------------------------------------- what must be refused

@pytest.mark.parametrize("targets, experts, says", [
    (["q_proj"], "shared", "LoRA target q_proj is no linear layer of GLM-5.3"),
    (["gate"], "shared", "LoRA target gate is no linear layer"),
    (["gate_proj"], "shared", "gate_proj and up_proj go together"),
    (["q_a_proj"], "all", "experts is 'all'"),
    (["gate_proj", "up_proj"], "each", "need down_proj too"),
])
def test_bad_targets(folder, targets, experts, says):
    cfg, built = worker.model(folder)
    with pytest.raises(Stop, match=says):
        lora.add(built, cfg, RANK, ALPHA, targets, experts)


def test_bad_rank(folder):
    cfg, built = worker.model(folder)
    with pytest.raises(Stop, match="rank is 0"):
        lora.add(built, cfg, 0, ALPHA)
    with pytest.raises(Stop, match="rank 6 with an adapter for each expert must be a multiple of 4 in torch.float32"):
        lora.add(built, cfg, 6, ALPHA, experts="each")


def test_target_that_matches_nothing(folder, monkeypatch):
    monkeypatch.setattr(lora, "TARGETS", (*lora.TARGETS, "k_proj"))
    cfg, built = worker.model(folder)
    with pytest.raises(Stop, match="LoRA target k_proj matches no layer of this model"):
        lora.add(built, cfg, RANK, ALPHA, ["q_a_proj", "k_proj"], None)


KEY = "layers.2.mlp.experts.up_proj.lora_B"


@pytest.mark.parametrize("change, says", [
    (lambda t: t.pop(KEY), f"the adapter has no tensor {KEY}, of shape [8, 32, 4]"),
    (lambda t: t.update({KEY: t[KEY][:, :, :2]}), f"{KEY} has shape [8, 32, 2], but this model wants [8, 32, 4]"),
    (lambda t: t.update({KEY: t[KEY][0]}), f"{KEY} has shape [32, 4], but this model wants [8, 32, 4]"),
    (lambda t: t.update({"layers.2.mlp.gate_proj.lora_B": t[KEY]}),
     "1 tensors that this model has no place for, e.g. layers.2.mlp.gate_proj.lora_B"),
])
def test_adapter_that_does_not_fit(folder, change, says):
    cfg, built, _ = adapted(folder, experts="each")
    tensors = lora.export(built, cfg, torch.float32)
    change(tensors)
    with pytest.raises(Stop) as stop:
        lora.load(built, cfg, tensors)
    assert says in str(stop.value)


def test_folder_that_is_refused(folder, tmp_path):
    with pytest.raises(Stop, match="is no adapter folder"):
        lora.load_peft(tmp_path)
    cfg, built, _ = adapted(folder)
    out, hf = lora.export(built, cfg, torch.float32), tiny.config(**tiny.SPARSE)
    with pytest.raises(Stop, match="has rank 4, not 8"):
        lora.save_peft(out, hf, 8, tmp_path / "adapter", "tiny")
    lora.save_peft(out, hf, RANK, tmp_path / "adapter", "tiny")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(Stop, match="use_dora is True, but only plain LoRA is read"):
        lora.load_peft(tmp_path / "adapter")
