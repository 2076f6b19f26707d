"""GLM-5.3-Flash on megatron-core equals transformers in float32: log-probabilities, gradients, adapters; what is refused."""
import json
import shutil
from types import SimpleNamespace

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from checks import parallel_worker as worker
from checks import tiny
from common import attention, glm5p3_flash, hf_config, kda, lora, names, size, weights
from common.cli import Stop

LENGTHS = [40, 7, 30, 16, 17, 33, 7, 2, 65]              # one packed row; FLASH_SPARSE has index_topk 16, pools of 4
SEQS = tiny.sequences(LENGTHS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("flash")
    for name, over in (("dense", {}), ("sparse", tiny.FLASH_SPARSE)):
        tiny.flash_checkpoint(root / name, **over)
    worker.start()
    return root


@pytest.fixture(scope="module")
def reference(folders):
    """{name: transformers' model}, {name: its logprobs of SEQS}."""
    models = {name: tiny.hf_model(folders / name) for name in ("dense", "sparse")}
    return models, {name: tiny.hf_logprobs(model, SEQS) for name, model in models.items()}


def packed_logprobs(built, seqs):
    ids, where, psp = worker.packed(seqs)
    logits = built(ids, where, None, packed_seq_params=psp)[0].float()
    return logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0][worker.inside(psp)]


def everything(folder):
    return {k: t for f in folder.glob("*.safetensors") for k, t in load_file(f).items()}


# ---------------------------------------------------------------- the model

@pytest.mark.parametrize("name, at_once", [("dense", 0), ("sparse", attention.SCORES), ("sparse", 3000), ("sparse", 1)])
def test_packed_logprobs_equal_transformers(folders, reference, name, at_once, monkeypatch):
    """at_once: index scores; 3,000 of them make blocks of a few queries, 1 a block for each, also where no pool is complete."""
    monkeypatch.setattr(attention, "SCORES", at_once)
    _, built = worker.model(folders / name)
    with torch.no_grad():
        got, want = packed_logprobs(built.eval(), SEQS), reference[1][name]
    assert want.std() > 0.4
    assert (got - want).abs().max() < 1e-5, f"logprobs differ by {(got - want).abs().max():.1e}"


@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_padded_rows_equal_transformers(folders, reference, name):
    _, built = worker.model(folders / name)
    seqs = [SEQS[0], SEQS[5], SEQS[1]]
    ids = torch.stack([torch.nn.functional.pad(s, (0, 40 - len(s))) for s in seqs])
    with torch.no_grad():
        logits = built.eval()(ids, torch.arange(40).expand(3, -1), None).float()
    got = torch.cat([x[:len(s) - 1].log_softmax(-1).gather(-1, s[1:, None])[:, 0] for x, s in zip(logits, seqs)])
    assert (got - tiny.hf_logprobs(reference[0][name], seqs)).abs().max() < 1e-5


def off(model, what):
    """Switch one feature of transformers' model off."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if what == "clamp" and hasattr(module, "swiglu_limit") and "visual" not in name:
            module.swiglu_limit = 1e9
        elif what == "selection" and kind == "Glm5NextTextIndexer":
            module.index_topk = 4096
        elif what == "tail" and kind == "Glm5NextTextIndexer":
            module.index_kpool_always_select_tail = False
    for name, p in model.named_parameters():
        if (what in ("compress_ape", "compress_gate", "dt_bias", "A_log") and name.endswith(what)) \
                or (what == "streams" and name.endswith("_hc.scale")):
            p.data.zero_()
        elif what == "memory" and "conv1d" in name:
            p.data[..., :-1] = 0
    for name, b in model.named_buffers():
        if what == "bias" and name.endswith("e_score_correction_bias"):
            b.zero_()


@pytest.mark.parametrize("what", ["clamp", "selection", "tail", "compress_ape", "compress_gate", "dt_bias", "A_log", "streams",
                                  "memory", "bias"])
def test_the_checkpoint_shows_every_feature(folders, reference, what):
    """Without it transformers gives other numbers, so the tests above would see it missing here."""
    model = tiny.hf_model(folders / "sparse")
    off(model, what)
    with torch.no_grad():
        assert (tiny.hf_logprobs(model, SEQS) - reference[1]["sparse"]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_documents_of_a_row_do_not_see_each_other(folders, name):
    """Neither values nor gradients: state, convolution and pools begin anew."""
    _, built = worker.model(folders / name)
    embedded = []

    def keep(module, args, output):
        output.retain_grad()
        embedded.append(output)
    built.embedding.register_forward_hook(keep)
    other = [SEQS[0], tiny.sequences([30], seed=9)[0], SEQS[5], SEQS[1]]
    one, two = packed_logprobs(built, [SEQS[0], SEQS[2], SEQS[5], SEQS[1]]), packed_logprobs(built, other)
    second = slice(39, 39 + 29)
    assert (one[second] - two[second]).abs().median() > 0.01
    moved = (one - two).abs()                                # the experts' sums are blocked by how many tokens they get
    assert max(moved[:39].max(), moved[68:].max()) < 3e-6, f"another document's tokens move logprobs by {moved[68:].max():.1e}"
    one[second].sum().backward()
    grad = embedded[0].grad.abs().amax(-1).flatten()
    assert not grad[:40].any() and not grad[70:].any() and (grad[40:69] > 0).all()


def of_checkpoint(model):
    """transformers' gradients under the checkpoint's names."""
    found = {}
    for key, p in model.named_parameters():
        if ".visual." in key or p.grad is None:
            continue
        root, leaf = key.rpartition(".")[::2]
        if ".experts." in key and "shared" not in key:
            for e, g in enumerate(p.grad):
                parts = dict(zip(("gate_proj", "up_proj"), g.chunk(2))) if leaf == "gate_up_proj" else {leaf: g}
                found |= {f"{root}.{e}.{n}.weight": t for n, t in parts.items()}
        elif ".conv1d." in key:
            found |= {key.replace("conv1d", f"{n}_conv1d"): g for n, g in zip("qkv", p.grad.chunk(3))}
        else:
            for block in ("attn", "ffn"):
                key = key.replace(f"{block}_hc.", f"hc_{block}_")
            found[key.replace("forget_gate.", "")] = p.grad
    return found


@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_gradients_equal_transformers(folders, reference, name):
    cfg, built = worker.model(folders / name)
    packed_logprobs(built, SEQS).sum().mul(0.1).backward()
    hf = reference[0][name]
    hf.zero_grad()
    for s in SEQS:
        hf(input_ids=s[None]).logits[0, :-1].log_softmax(-1).gather(-1, s[1:, None]).sum().mul(0.1).backward()
    want = of_checkpoint(hf)
    for p in built.parameters():
        p.data = torch.zeros_like(p) if p.grad is None else p.grad
    got = dict(weights.stream(built, cfg))
    assert [k for k in got if k not in want and ".indexer." not in k and not k.endswith("correction_bias")] == []
    for key, t in want.items():
        diff, size = (got[key] - t).abs().max().item(), t.abs().max().item()
        assert size > 0 and diff <= 3e-5 * max(size, 0.1), f"{key}: gradients differ by {diff:.1e}, largest is {size:.1e}"
    leaves = {k.rpartition("self_attn.")[2] if "self_attn" in k else k.split(".", 4)[-1] for k in want}
    assert {"A_log", "dt_bias", "q_conv1d.weight", "o_norm.weight", "hc_attn_fn", "hc_ffn_base", "hc_ffn_scale"} <= leaves


# ---------------------------------------------------------------- its parts

def draw(n, t, heads=2, d=8, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v, f = (torch.randn(n, heads, t, d, generator=g, dtype=dtype) for _ in range(4))
    return kda.unit(q) * d ** -0.5, kda.unit(k), v, -5 * f.sigmoid(), torch.rand(n, heads, t, generator=g, dtype=dtype)


@pytest.mark.parametrize("t, d", [(1, 8), (15, 8), (16, 8), (100, 32), (37, 128)])
def test_chunks_equal_the_recurrence(t, d):
    """transformers' recurrence, in float32; and token by token in float64."""
    from transformers.models.glm5_next.modeling_glm5_next import recurrent_kimi_delta_attention
    q, k, v, g, beta = draw(2, t, d=d)
    state, want = torch.zeros(2, 2, d, d, dtype=torch.float64), []
    for i in range(t):
        state = g[:, :, i, :, None].exp() * state
        missing = v[:, :, i] - (k[:, :, i, None] @ state)[:, :, 0]
        state = state + k[:, :, i, :, None] * (beta[:, :, i, None] * missing)[:, :, None]
        want.append((q[:, :, i, None] @ state)[:, :, 0])
    want = torch.stack(want, 2)
    assert (kda.kda(q, k, v, g, beta) - want).abs().max() < 1e-13
    single = [x.float() for x in (q, k, v, g, beta)]
    assert (kda.kda(*single) - want).abs().max() < 2e-6
    swapped = [x.transpose(1, 2) for x in single]
    theirs, _ = recurrent_kimi_delta_attention(swapped[0] * d ** 0.5, *swapped[1:3], g=swapped[3], beta=swapped[4],
                                               initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False)
    assert (theirs.transpose(1, 2) - want).abs().max() < 2e-6


@pytest.mark.parametrize("g", [-5.0, -1e-6])
def test_extreme_decays_stay_finite(g):
    """64 tokens that all forget as much, or as little, as the gate can."""
    q, k, v, _, beta = (x.float().requires_grad_() for x in draw(1, 64, d=16))
    rate = torch.full((1, 2, 64, 16), g, requires_grad=True)
    out = kda.kda(q, k, v, rate, beta)
    out.square().sum().backward()
    exact = kda.kda(*(x.detach().double() for x in (q, k, v, rate, beta)))
    assert (out - exact).abs().max() < 2e-6 and all(x.grad.isfinite().all() for x in (q, k, v, rate, beta))


def test_linear_attention_gradients():
    q, k, v, g, beta = (x.requires_grad_() for x in draw(1, 19, heads=1, d=3))
    assert torch.autograd.gradcheck(kda.kda, (q, k, v, g, beta), fast_mode=True)
    f, A, dt = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 2, 4), (2,), (8,)))
    assert torch.autograd.gradcheck(lambda *x: kda.decay(*x, -5.0), (f, A, dt), fast_mode=True)


@pytest.mark.gpu
@pytest.mark.skipif(not glm5p3_flash.HAVE_FLA, reason="needs flash-linear-attention")
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 5e-3), (torch.bfloat16, 3e-2)])
def test_fla_equals_torch(dtype, tolerance):
    """Values and gradients of two packed documents, relative to the largest."""
    heads, d, t = 2, 128, 300
    g = torch.Generator().manual_seed(0)

    def leaf(*shape, scale=1.0, shift=0.0, kind=torch.float32):
        return (torch.randn(shape, generator=g) * scale + shift).to("cuda", kind).requires_grad_()
    own = SimpleNamespace(dim=d, bound=-5.0, A_log=leaf(heads, scale=0.3), dt_bias=leaf(heads * d, scale=0.5, shift=-2),
                          **{f"{n}_conv1d": leaf(heads * d, 1, 4, scale=0.5) for n in "qkv"})
    own._sequences = lambda *args: kda.KDA._sequences(own, *args)
    inputs = [leaf(t, 1, 3 * heads * d, kind=dtype), leaf(t, 1, heads, d, kind=dtype), leaf(t, 1, heads, kind=dtype)]
    leaves = [*inputs, own.A_log, own.dt_bias, own.q_conv1d, own.k_conv1d, own.v_conv1d]
    bounds, weight = torch.tensor([0, 70, t], dtype=torch.int32, device="cuda"), leaf(t, 1, heads, d)
    found = []
    for core in (kda.KDA._torch, kda.KDA._fla):
        out = core(own, *inputs, bounds)
        found.append([out, *torch.autograd.grad((out.float() * weight).sum(), leaves)])
    for mine, theirs in zip(*found):
        assert mine.dtype == theirs.dtype and (mine - theirs).abs().max() <= tolerance * mine.abs().max()


def test_hyper_connection_gradients(folders):
    cfg, built = worker.model(folders / "dense")
    hc = built.decoder.layers[1].attn_hc.double()
    streams = torch.randn(3, 2, 4, 64, dtype=torch.float64, requires_grad=True)
    y = torch.randn(3, 2, 64, dtype=torch.float64, requires_grad=True)
    params = [p.detach().double().requires_grad_() for p in (hc.fn, hc.base, hc.scale)]

    def both(streams, y, *values):
        for name, value in zip(("fn", "base", "scale"), values):
            del hc._parameters[name]
            setattr(hc, name, value)
            hc._parameters[name] = value
        x, post, mix = hc.read(streams)
        assert (mix.sum(-1) - 1).abs().max() < 1e-3 and (mix.sum(-2) - 1).abs().max() < 1e-5       # 20 iterations end on columns
        return x, hc.write(streams, post, mix, y)
    assert torch.autograd.gradcheck(both, (streams, y, *params), fast_mode=True)


# ---------------------------------------------------------------- checkpoints

def test_bfloat16_keeps_its_float32_parameters_and_round_trips(folders, tmp_path):
    tiny.flash_checkpoint(tmp_path / "bf16", dtype=torch.bfloat16, **tiny.FLASH_SPARSE)
    cfg, built = worker.model(tmp_path / "bf16", dtype=torch.bfloat16)
    single = {n.rpartition(".")[2] for n, p in built.named_parameters() if p.dtype == torch.float32}
    assert single == {"A_log", "dt_bias", "q_conv1d", "k_conv1d", "v_conv1d", "fn", "base", "scale", "index_kpool_compress_ape"}
    assert all(b.dtype == torch.float32 for n, b in built.named_buffers() if n.endswith("expert_bias"))
    got = packed_logprobs(built, SEQS)
    got.sum().backward()
    assert all(p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in built.parameters() if p.grad is not None)
    want = tiny.hf_logprobs(tiny.hf_model(tmp_path / "bf16"), SEQS)
    assert (got - want).abs().mean() < 0.03, f"bfloat16 logprobs are {(got - want).abs().mean():.3f} from float32 on average"
    weights.save(built, cfg, tmp_path / "again", base=tmp_path / "bf16")
    old, new = everything(tmp_path / "bf16"), everything(tmp_path / "again")
    assert old.keys() == new.keys() and any(".visual." in k for k in old)
    assert all(old[k].dtype == new[k].dtype and torch.equal(old[k], new[k]) for k in old)


def rewritten(folders, tmp_path, change):
    tensors = everything(folders / "sparse")
    change(tensors)
    (tmp_path / "bad").mkdir()
    shutil.copy(folders / "sparse" / "config.json", tmp_path / "bad")
    save_file(tensors, tmp_path / "bad" / "model.safetensors", {"format": "pt"})
    return tmp_path / "bad"


ROOT = "model.language_model.layers."
CONV, APE, HC = f"{ROOT}0.self_attn.k_conv1d.weight", f"{ROOT}1.self_attn.indexer.index_kpool_compress_ape", f"{ROOT}2.hc_ffn_fn"


@pytest.mark.parametrize("change, says", [
    (lambda t: t.pop(APE), f"has no tensor {APE}, of shape [4, 32]"),
    (lambda t: t.pop("lm_head.weight"), "has no tensor lm_head.weight, of shape [264, 64]"),
    (lambda t: t.update({CONV: torch.ones(64, 4)}), f"{CONV} has shape [64, 4], but this model wants [64, 1, 4]"),
    (lambda t: t.update({HC: torch.ones(24, 64)}), f"{HC} has shape [24, 64], but this model wants [24, 256]"),
    (lambda t: t.update({f"{ROOT}0.self_attn.q_a_proj.weight": torch.ones(1)}),
     f"1 tensors that this model has no place for: {ROOT}0.self_attn.q_a_proj.weight"),
    (lambda t: t.update({"model.layers.0.input_layernorm.weight": torch.ones(64)}),
     "1 tensors that this model has no place for: model.layers.0.input_layernorm.weight"),
])
def test_checkpoint_that_does_not_fit(folders, tmp_path, change, says):
    with pytest.raises(Stop) as stop:
        worker.model(rewritten(folders, tmp_path, change))
    assert says in str(stop.value)


def test_prediction_layer_and_vision_tower_are_left_alone_and_copied(folders, tmp_path):
    extra = {f"{ROOT}4.eh_proj.weight": torch.randn(64, 128), "model.visual.new.weight": torch.randn(3)}
    source = rewritten(folders, tmp_path, lambda t: t.update(extra))
    cfg, built = worker.model(source)
    weights.save(built, cfg, tmp_path / "saved", base=source)
    saved, want = everything(tmp_path / "saved"), load_file(source / "model.safetensors")
    assert saved.keys() == want.keys() and all(torch.equal(saved[k], want[k]) for k in want)
    streamed = {k for part, _ in weights.buckets(built, cfg, 1 << 20) for k in part}
    assert streamed == {names.neutral(k) for k in want if not k.startswith(("model.visual.", f"{ROOT}4."))}
    assert "layers.0.hc_attn_fn" in streamed and "layers.2.self_attn.A_log" in streamed and "lm_head.weight" in streamed


def test_an_fp8_checkpoint_is_multiplied_by_its_scales(folders, tmp_path):
    scale, meant = 0.25, {}

    def change(tensors):
        for name in [n for n in tensors if n.endswith("_proj.weight") and ".experts." in n]:
            blocks = torch.full([-(-n // b) for n, b in zip(tensors[name].shape, (24, 40))], scale)
            blocks[0, 0] = 2 * scale
            low = (tensors[name].float() * 16).to(torch.float8_e4m3fn)
            meant[name] = low.float() * scale
            meant[name][:24, :40] *= 2
            tensors[name], tensors[f"{name}_scale_inv"] = low, blocks
    folder = rewritten(folders, tmp_path, change)
    config = json.loads((folder / "config.json").read_text())
    for place in (config, config["text_config"]):                # vLLM finds it in either
        place["quantization_config"] = {"weight_block_size": [24, 40]}
        (folder / "config.json").write_text(json.dumps(config))
        cfg, built = worker.model(folder)
        got = dict(weights.stream(built, cfg))
        assert len(meant) == 3 * 8 * 3 and all(torch.equal(got[n], t) for n, t in meant.items())
        del place["quantization_config"]


# ---------------------------------------------------------------- what must be refused

def edited(folders, tmp_path, change):
    shutil.copytree(folders / "dense", tmp_path / "bad")
    raw = json.loads((tmp_path / "bad" / "config.json").read_text())
    change(raw)
    (tmp_path / "bad" / "config.json").write_text(json.dumps(raw))
    return tmp_path / "bad"


def test_config_is_the_text_part(folders):
    hf = hf_config.read_config(folders / "dense")
    assert (hf.model_type, hf.num_hidden_layers, hf.index_kpool) == ("glm5_next_text", 4, 4)


@pytest.mark.parametrize("key, value, says", [
    ("mhc", ..., "text_config: mhc is missing and must be true"),
    ("mhc", False, "mhc is false, but only true"),
    ("mla_use_nope", ..., "mla_use_nope is missing and must be true"),
    ("scoring_func", ..., 'scoring_func is missing and must be "sigmoid"'),
    ("topk_method", "greedy", 'topk_method is "greedy", but only "noaux_tc"'),
    ("indexer_rope_interleave", ..., "indexer_rope_interleave is missing"),
    ("hidden_act", "gelu", 'hidden_act is "gelu", but only "silu"'),
    ("norm_topk_prob", False, "norm_topk_prob is false"),
    ("n_group", 2, "n_group is 2, but only 1"),
    ("moe_layer_freq", 2, "moe_layer_freq is 2, but only 1"),
    ("rms_norm_eps", 1e-6, "rms_norm_eps is 1e-06, but only 1e-05"),
    ("tie_word_embeddings", True, "tie_word_embeddings is true"),
    ("index_kpool_always_select_tail", False, "index_kpool_always_select_tail is false, but only true"),
    ("qk_rope_head_dim", 8, "transformers refuses it: "),
    ("num_key_value_heads", 2, "transformers refuses it: "),
    ("index_topk", 2046, "transformers refuses it: "),
    ("linear_lower_bound", None, "linear_lower_bound is null, but only -5 to 0"),
    ("linear_lower_bound", -6.0, "linear_lower_bound is -6.0, but only -5 to 0"),
    ("indexer_types", ["full", "full", "full", "shared"], "indexer_types says 'shared' for layer 3, but only 'full'"),
    ("layer_types", ["linear_attention"] * 3 + ["sliding_attention"], "layer_types says 'sliding_attention' for layer 3"),
    ("layer_types", ["linear_attention"] * 3, "transformers refuses it: "),
    ("indexer_types", ["full"] * 3, "indexer_types has 3 entries for 4 layers"),
    ("first_k_dense_replace", 2, "mlp_layer_types says 'sparse' for layer 1, but first_k_dense_replace 2 says 'dense'"),
])
def test_config_that_means_another_model(folders, tmp_path, key, value, says):
    def change(raw):
        raw["text_config"].pop(key) if value is ... else raw["text_config"].update({key: value})
    with pytest.raises(Stop, match="config.json") as stop:
        hf_config.read_config(edited(folders, tmp_path, change))
    assert says in str(stop.value)


def test_config_without_a_text_part(folders, tmp_path):
    with pytest.raises(Stop, match="has no text_config"):
        hf_config.read_config(edited(folders, tmp_path, lambda raw: raw.pop("text_config")))


@pytest.mark.parametrize("over, how, says", [
    ({}, dict(te=True), "te is True, but linear attention"),
    ({}, dict(etp=2), "expert tensor parallel size 2"),
    ({}, dict(context_parallel_size=2), "context parallel size 2: linear attention carries its state"),
    ({}, dict(tp=2, sequence_parallel=False), "tensor parallel size 2 without sequence parallel"),
    ({}, dict(tp=3), "4 linear attention heads do not divide over tensor parallel size 3"),
    (dict(linear_num_heads=6), dict(tp=3), "4 attention heads do not divide over tensor parallel size 3"),
    ({}, dict(ep=3), "8 routed experts do not divide over expert parallel size 3"),
    ({}, dict(pp=3), "4 layers do not divide over 3 pipeline stages"),
    ({}, dict(recompute_granularity="selective", recompute_modules=["core_attn", "mlp"]), "recompute_modules has 'mlp'"),
    ({}, dict(kda_kernels="triton"), "kda_kernels is 'triton', but must be 'torch' or 'fla'"),
    pytest.param({}, dict(kda_kernels="fla"), "kda_kernels is 'fla', but there is no CUDA device",
                 marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")),
])
def test_layout_that_does_not_fit(over, how, says):
    with pytest.raises(Stop) as stop:
        glm5p3_flash.mcore_config(tiny.flash_config(**over).text_config, **how)
    assert says in str(stop.value)


# ---------------------------------------------------------------- adapters

RANK, ALPHA = 8, 12                                          # a scale of 1.5; experts with rank 4: 3
KDA_LEAVES = ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj", "f_b_proj", "g_b_proj")


def adapted(folder, targets=None, experts="shared", expert_rank=4, dtype=torch.float32):
    cfg, built = worker.model(folder, dtype=dtype)
    lora.add(built, cfg, RANK, ALPHA, targets, experts, expert_rank)
    lora.perturb(built, cfg, 0.05, seed=1)
    return cfg, built.eval()


@pytest.mark.parametrize("targets, experts, expert_rank", [
    (None, "shared", 4), (None, "each", 4), (None, "each", None), (None, None, 4), (KDA_LEAVES, None, None),
    (("o_proj",), None, 4), (("gate_proj", "up_proj", "down_proj"), "each", 8),
    (("down_proj",), "shared", 4)],
    ids=lambda v: f"{len(v)}-{v[-1]}" if isinstance(v, tuple) else str(v))
def test_peft_loads_and_merges_what_was_trained(folders, reference, tmp_path, targets, experts, expert_rank):
    cfg, built = adapted(folders / "sparse", targets, experts, expert_rank)
    with torch.no_grad():
        mine = packed_logprobs(built, SEQS)
    out = lora.export(built, cfg, torch.float32)
    lora.save_peft(out, cfg.flash, RANK, tmp_path / "adapter", "tiny", expert_rank)
    hf = tiny.hf_model(folders / "sparse")
    model = peft.PeftModel.from_pretrained(hf, tmp_path / "adapter")
    loaded = tiny.hf_logprobs(model, SEQS)
    merged = tiny.hf_logprobs(model.merge_and_unload(), SEQS)
    assert (mine - reference[1]["sparse"]).abs().max() > 0.01, "the adapter changes nothing, so this compares nothing"
    assert (mine - loaded).abs().max() < 2e-5, f"peft's live adapter is {(mine - loaded).abs().max():.1e} off"
    assert (mine - merged).abs().max() < 2e-5, f"peft's merged adapter is {(mine - merged).abs().max():.1e} off"
    back = lora.load_peft(tmp_path / "adapter")
    assert back.keys() == out.keys() and all(torch.equal(back[k], out[k]) for k in out)


def test_every_family_moves_the_model_and_reaches_peft(folders, reference, tmp_path):
    """Each adapter on its own, others zero: a family that peft drops or swaps cannot hide behind the rest."""
    cfg, built = adapted(folders / "sparse", (*lora.FLASH_TARGETS, "f_b_proj", "g_b_proj"), "each")
    whole = lora.export(built, cfg, torch.float32)
    families = sorted({k.split(".", 2)[2].removesuffix(".lora_B") for k in whole if k.endswith("lora_B")})
    assert len(families) == 4 + 1 + 8 + 3 + 3 + 3
    hf = tiny.hf_model(folders / "sparse")
    lora.save_peft(whole, cfg.flash, RANK, tmp_path / "adapter", "tiny", 4)
    model = peft.PeftModel.from_pretrained(hf, tmp_path / "adapter")
    seqs, base = SEQS[:4], tiny.hf_logprobs(tiny.hf_model(folders / "sparse"), SEQS[:4])
    for family in families:
        one = {k: t if k.split(".", 2)[2] == family + ".lora_B" or k.endswith("lora_A") else torch.zeros_like(t)
               for k, t in whole.items()}
        lora.load(built, cfg, one)
        lora.save_peft(one, cfg.flash, RANK, tmp_path / "adapter", "tiny", 4)
        peft.set_peft_model_state_dict(model, load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
        with torch.no_grad():
            mine = packed_logprobs(built, seqs)
        theirs = tiny.hf_logprobs(model, seqs)
        assert (mine - base).abs().max() > 5e-4, f"{family} has no effect"
        assert (mine - theirs).abs().max() < 2e-5, f"{family}: peft is {(mine - theirs).abs().max():.1e} off"


def test_ranks_scales_and_the_folder_that_vllm_reads(folders, tmp_path):
    from vllm.lora.peft_helper import PEFTHelper
    cfg, built = adapted(folders / "sparse", None, "each")
    scales = {k: m.scale for m in built.modules() if isinstance(m, lora.Lora) for k in m.keys}
    assert {(".experts." in k, s) for k, s in scales.items()} == {(True, 3.0), (False, 1.5)}
    out = lora.export(built, cfg, torch.bfloat16)
    shapes = {k: list(t.shape) for k, t in out.items()}
    for module, a, b in (("layers.0.self_attn.f_a_proj", [8, 64], [16, 8]), ("layers.0.self_attn.b_proj", [8, 64], [4, 8]),
                         ("layers.1.mlp.shared_experts.up_proj", [8, 64], [32, 8]),
                         ("layers.1.mlp.experts.up_proj", [8, 4, 64], [8, 32, 4])):
        assert (shapes[f"{module}.lora_A"], shapes[f"{module}.lora_B"]) == (a, b), module
    lora.save_peft(out, cfg.flash, RANK, tmp_path / "adapter", "tiny", 4)
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    helper = PEFTHelper.from_local_dir(str(tmp_path / "adapter"), 4096)
    assert max([helper.r, *helper.rank_pattern.values()]) == RANK                        # vLLM's bound on max_lora_rank
    for name, t in found.items():
        module = name.removeprefix("base_model.model.").rpartition(".lora_")[0]
        assert module.startswith("model.language_model.layers.")
        rank = 4 if ".experts." in module else RANK
        assert helper.get_rank_and_scaling(module) == (rank, 1.0) and rank in t.shape, name
    with pytest.raises(Stop, match="has rank 4, not 8"):
        lora.save_peft(out, cfg.flash, RANK, tmp_path / "other", "tiny")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "alpha_pattern": {}}))
    with pytest.raises(Stop, match="several ranks are read only where alpha is the rank for each"):
        lora.load_peft(tmp_path / "adapter")


@pytest.mark.parametrize("targets, expert_rank, says", [
    (["kv_proj"], None, "LoRA target kv_proj is no linear layer of GLM-5.3-Flash that takes an adapter: choose from q_a_proj"),
    (["q_conv1d"], None, "LoRA target q_conv1d is no linear layer"),
    (["wq_b"], None, "LoRA target wq_b is no linear layer"),
    (None, 9, "LoRA expert_rank is 9, but must be 1 to 8"),
    (None, 0, "LoRA expert_rank is 0, but must be 1 to 8"),
    (None, 2, "LoRA rank 2 with an adapter for each expert must be a multiple of 4"),
])
def test_adapters_that_are_refused(folders, targets, expert_rank, says):
    cfg, built = worker.model(folders / "sparse")
    with pytest.raises(Stop) as stop:
        lora.add(built, cfg, RANK, ALPHA, targets, "each", expert_rank)
    assert says in str(stop.value)


@pytest.mark.parametrize("experts, expert_rank", [("each", 4), ("shared", 4), ("each", None), (None, None)])
def test_the_plan_counts_what_is_built(folders, experts, expert_rank):
    c = json.loads((folders / "sparse" / "config.json").read_text())
    cfg, built = worker.model(folders / "sparse")
    assert sum(size.parameters(c).values()) == sum(p.numel() for p in built.parameters())
    lora.add(built, cfg, RANK, ALPHA, None, experts, expert_rank)
    found = sum(p.numel() for p in built.parameters() if p.requires_grad)
    plan = dict(rank=RANK, targets=lora.FLASH_TARGETS, experts=experts, expert_rank=expert_rank)
    assert size.adapter(c, **plan)[0] == found == size.adapter_on_gpu(c, **plan, tp=1, ep=1)[0]


def test_the_plan_refuses_what_the_trainer_refuses():
    assert size.layout_problems(size.FLASH, 8, 8, 3) == []                           # 45 layers; a stage may start on any
    assert "64 linear attention heads do not divide over TP 3" in size.layout_problems(size.FLASH, 3, 8, 1)
