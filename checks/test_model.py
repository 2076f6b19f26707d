"""GLM-5.3 on megatron-core equals transformers in float32; bad configs, layouts and checkpoints stop with one sentence; logprobs
are right."""
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from checks import parallel_worker as worker
from checks import tiny
from common import attention, glm5p3, logprobs, weights
from common.cli import Stop

LENGTHS = [40, 7, 30, 16, 17, 33, 7, 2]          # one packed row; SPARSE has index_topk 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    for name, over in (("dense", {}), ("sparse", tiny.SPARSE), ("eps", dict(rms_norm_eps=1e-6)),
                       ("alldense", dict(first_k_dense_replace=3))):
        tiny.checkpoint(root / name, **over)
    worker.start()
    return root


def packed_logprobs(built, seqs):
    ids, where, psp = worker.packed(seqs)
    logits = built(ids, where, None, packed_seq_params=psp)[0].float()
    return logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0][worker.inside(psp)]


@pytest.mark.parametrize("name, at_once", [("dense", 0), ("sparse", attention.SCORES), ("sparse", 5000), ("eps", 0),
                                           ("alldense", 0)])
def test_packed_logprobs_equal_transformers(folders, name, at_once, monkeypatch):
    """at_once: index scores; 5,000 of them make blocks of a few queries."""
    monkeypatch.setattr(attention, "SCORES", at_once)
    _, built = worker.model(folders / name)
    seqs = tiny.sequences(LENGTHS)
    with torch.no_grad():
        got, want = packed_logprobs(built.eval(), seqs), tiny.hf_logprobs(tiny.hf_model(folders / name), seqs)
    assert want.std() > 0.5
    assert (got - want).abs().max() < 1e-5, f"logprobs differ by {(got - want).abs().max():.1e}"


def test_sparse_selection_matters(folders):
    """The sparse checkpoint would not pass as a dense one, so the test above exercises the indexer."""
    hf = tiny.hf_model(folders / "sparse")
    seqs = tiny.sequences(LENGTHS)
    want = tiny.hf_logprobs(hf, seqs)
    for layer in hf.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.index_topk = 4096
    assert (tiny.hf_logprobs(hf, seqs) - want).abs().max() > 0.1


def test_padded_rows_equal_packed(folders):
    _, built = worker.model(folders / "sparse")
    seqs = tiny.sequences([40, 25])
    ids = torch.stack([torch.nn.functional.pad(s, (0, 40 - len(s))) for s in seqs])
    with torch.no_grad():
        logits = built.eval()(ids, torch.arange(40).expand(2, -1), None).float()
        rows = [x[:len(s) - 1].log_softmax(-1).gather(-1, s[1:, None])[:, 0] for x, s in zip(logits, seqs)]
        assert (torch.cat(rows) - packed_logprobs(built, seqs)).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_gradients_equal_transformers(folders, name):
    cfg, built = worker.model(folders / name)
    seqs = tiny.sequences(LENGTHS)
    packed_logprobs(built, seqs).sum().mul(0.1).backward()
    hf = tiny.hf_model(folders / name)
    for s in seqs:
        hf(input_ids=s[None]).logits[0, :-1].log_softmax(-1).gather(-1, s[1:, None]).sum().mul(0.1).backward()
    for p in built.parameters():
        p.data = torch.zeros_like(p) if p.grad is None else p.grad
    got, compared = dict(weights.stream(built, cfg)), 0
    for key, p in hf.named_parameters():
        if p.grad is None:
            assert ".indexer." in key, f"{key} has no gradient in transformers"
            continue
        if ".experts." in key and "shared" not in key:               # transformers fuses them: [experts, gate and up, in]
            root, leaves = key.rsplit(".", 1)[0], ("gate_proj", "up_proj") if key.endswith("gate_up_proj") else ("down_proj",)
            mine = torch.stack([torch.cat([got[f"{root}.{e}.{leaf}.weight"] for leaf in leaves]) for e in range(len(p))])
        else:
            mine = got[key]
        diff, size = (mine - p.grad).abs().max().item(), p.grad.abs().max().item()
        assert diff <= 2e-5 * max(size, 0.1), f"{key}: gradients differ by {diff:.1e}, largest is {size:.1e}"
        compared += 1
    assert compared > 40


def test_bfloat16_forward_and_backward(folders, tmp_path):
    tiny.checkpoint(tmp_path / "bf16", dtype=torch.bfloat16)
    cfg, built = worker.model(tmp_path / "bf16", dtype=torch.bfloat16)
    biases = [b for n, b in built.named_buffers() if n.endswith("expert_bias")]
    assert biases and all(b.dtype == torch.float32 for b in biases)
    seqs = tiny.sequences([40, 30])
    got = packed_logprobs(built, seqs)
    got.sum().backward()
    assert all(p.grad.isfinite().all() for p in built.parameters() if p.grad is not None)
    want = tiny.hf_logprobs(tiny.hf_model(tmp_path / "bf16"), seqs)
    assert (got - want).abs().mean() < 0.05, f"bfloat16 logprobs are {(got - want).abs().mean():.3f} from float32 on average"
    weights.save(built, cfg, tmp_path / "again")
    old, new = ({k: t for f in (tmp_path / d).glob("*.safetensors") for k, t in load_file(f).items()} for d in ("bf16", "again"))
    assert old.keys() == new.keys() and all(old[k].dtype == new[k].dtype and torch.equal(old[k], new[k]) for k in old)


# ---------------------------------------------------------------- what must be refused

def edited(folders, tmp_path, change):
    shutil.copytree(folders / "dense", tmp_path / "bad")
    raw = json.loads((tmp_path / "bad" / "config.json").read_text())
    change(raw)
    (tmp_path / "bad" / "config.json").write_text(json.dumps(raw))
    return tmp_path / "bad"


@pytest.mark.parametrize("key, value, says", [
    ("model_type", "llama", "model_type is 'llama'"),
    ("scoring_func", None, "scoring_func is missing and must be \"sigmoid\""),
    ("scoring_func", "softmax", "scoring_func is \"softmax\", but only \"sigmoid\""),
    ("topk_method", None, "topk_method is missing"),
    ("indexer_rope_interleave", None, "indexer_rope_interleave is missing and must be true"),
    ("indexer_rope_interleave", False, "indexer_rope_interleave is false, but only true"),
    ("n_group", 2, "n_group is 2, but only 1"),
    ("norm_topk_prob", False, "norm_topk_prob is false"),
    ("attention_bias", True, "attention_bias is true"),
    ("tie_word_embeddings", True, "tie_word_embeddings is true"),
    ("index_topk_freq", 2, "indexer_types says 'full' for layer 2, but index_topk_freq 2"),
    ("first_k_dense_replace", 2, "mlp_layer_types says 'sparse' for layer 1, but first_k_dense_replace 2"),
])
def test_config_that_means_another_model(folders, tmp_path, key, value, says):
    folder = edited(folders, tmp_path, lambda raw: raw.pop(key) if value is None else raw.update({key: value}))
    with pytest.raises(Stop, match="config.json") as stop:
        glm5p3.read_config(folder)
    assert says in str(stop.value)


def test_no_config(tmp_path):
    with pytest.raises(Stop, match="config.json does not exist"):
        glm5p3.read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(Stop, match="config.json is not JSON"):
        glm5p3.read_config(tmp_path)


@pytest.mark.parametrize("over, layout, says", [
    ({}, dict(tp=3), "4 attention heads do not divide over tensor parallel size 3"),
    (dict(vocab_size=257), dict(tp=2), "257 vocabulary rows do not divide over tensor parallel size 2"),
    ({}, dict(ep=3), "8 routed experts do not divide over expert parallel size 3"),
    ({}, dict(pp=3), "4 layers do not divide over 3 pipeline stages"),
    ({}, dict(etp=2), "expert tensor parallel size 2 needs"),
    ({**tiny.SPARSE, "index_skip_topk_offset": 3}, dict(pp=2),
     "pipeline stage 1 of 2 would start on layer 3, which reuses the token selection of an earlier layer; "
     "a stage may start on layer 2 or 4"),
])
def test_layout_that_does_not_fit(over, layout, says):
    with pytest.raises(Stop) as stop:
        glm5p3.mcore_config(tiny.config(**over), **layout)
    assert says in str(stop.value)


def rewritten(folders, tmp_path, change):
    tensors = {k: t for f in (folders / "dense").glob("*.safetensors") for k, t in load_file(f).items()}
    change(tensors)
    (tmp_path / "bad").mkdir()
    shutil.copy(folders / "dense" / "config.json", tmp_path / "bad")
    save_file(tensors, tmp_path / "bad" / "model.safetensors", {"format": "pt"})
    return tmp_path / "bad"


NORM, UP = "model.layers.2.self_attn.q_a_layernorm.weight", "model.layers.3.mlp.experts.5.up_proj.weight"
NINTH, BEYOND = "model.layers.3.mlp.experts.8.up_proj.weight", "model.layers.5.input_layernorm.weight"


@pytest.mark.parametrize("change, says", [
    (lambda t: t.pop(NORM), f"has no tensor {NORM}, of shape [48]"),
    (lambda t: t.update({NORM: torch.ones(49)}), f"{NORM} has shape [49], but this model wants [48]"),
    (lambda t: t.update({UP: torch.ones(64, 32)}), f"{UP} has shape [64, 32], but this model wants [32, 64]"),
    (lambda t: t.update({NINTH: torch.ones(32, 64)}), f"1 tensors that this model has no place for: {NINTH}"),
    (lambda t: t.update({BEYOND: torch.ones(64)}), f"1 tensors that this model has no place for: {BEYOND}"),
    (lambda t: t.update({UP: t[UP].to(torch.float8_e4m3fn)}),
     f"{UP} is torch.float8_e4m3fn and its scales are unknown (tensor {UP}_scale_inv is missing, weight_block_size is None)"),
])
def test_checkpoint_that_does_not_fit(folders, tmp_path, change, says):
    with pytest.raises(Stop) as stop:
        worker.model(rewritten(folders, tmp_path, change))
    assert says in str(stop.value)


BLOCK = [24, 40]                                            # as published: 128 x 128; here the last blocks are cut short


def quantised(t):
    """(FP8 tensor, scale of each block, and what they mean in float32), element by element."""
    rows, columns = (-(-n // b) for n, b in zip(t.shape, BLOCK))
    scales, low, back = torch.empty(rows, columns), torch.empty(t.shape, dtype=torch.float8_e4m3fn), torch.empty(t.shape)
    for i in range(rows):
        for j in range(columns):
            at = slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1])
            scales[i, j] = t[at].abs().max() / 448
            low[at] = (t[at] / scales[i, j]).to(torch.float8_e4m3fn)
            back[at] = low[at].float() * scales[i, j]
    return low, scales, back


def test_an_fp8_checkpoint_is_multiplied_by_its_scales(folders, tmp_path):
    meant = {}

    def change(tensors):
        for name in [n for n in tensors if n.endswith("_proj.weight")]:
            tensors[name], tensors[f"{name}_scale_inv"], meant[name] = quantised(tensors[name].float())
    folder = rewritten(folders, tmp_path, change)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"weight_block_size": BLOCK}}))
    cfg, built = worker.model(folder)
    got = dict(weights.stream(built, cfg))
    assert len(meant) > 90 and all(torch.equal(got[n], t) for n, t in meant.items())
    plain = {k: t for f in (folders / "dense").glob("*.safetensors") for k, t in load_file(f).items()}
    assert all(torch.equal(got[n], t.to(got[n].dtype)) for n, t in plain.items() if n not in meant)
    assert not any(torch.equal(t, plain[n]) for n, t in meant.items()), "rounding to FP8 shows"

    where, files = weights.tensor_files(folder), {}
    for name, t in list(meant.items())[:12]:                # parts that begin inside a block, as tensor parallel ranks read them
        low = load_file(folder / "model.safetensors")[name]
        for start in ([7, 0], [0, 9]):
            part = weights._scaled(folder, where, files, name, low[start[0]:, start[1]:], list(low.shape), start)
            assert torch.equal(part, t[start[0]:, start[1]:])


def test_fp8_scales_of_another_shape_are_refused(folders, tmp_path):
    new = {f"{UP}_scale_inv": torch.ones(3, 2)}
    folder = rewritten(folders, tmp_path, lambda t: t.update({UP: t[UP].to(torch.float8_e4m3fn), **new}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"weight_block_size": BLOCK}}))
    with pytest.raises(Stop, match=r"_scale_inv has shape \[3, 2\], but .* of shape \[32, 64\] has \[2, 2\] blocks"):
        worker.model(folder)


def test_prediction_layer_is_left_alone_and_copied(folders, tmp_path):
    extra = {"model.layers.4.eh_proj.weight": torch.randn(64, 128), "model.layers.4.enorm.weight": torch.randn(64)}
    source = rewritten(folders, tmp_path, lambda t: t.update(extra))
    cfg, built = worker.model(source)
    weights.save(built, cfg, tmp_path / "saved", base=source, limit=100_000)
    files = list((tmp_path / "saved").glob("*.safetensors"))
    saved, want = {k: t for f in files for k, t in load_file(f).items()}, load_file(source / "model.safetensors")
    assert len(files) > 3 and saved.keys() == want.keys() and all(torch.equal(saved[k], want[k]) for k in want)
    with pytest.raises(Stop, match="exists and is not written over"):
        weights.save(built, cfg, tmp_path / "saved")


def test_failed_save_leaves_nothing(folders, tmp_path, monkeypatch):
    cfg, built = worker.model(folders / "dense")

    def full(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(weights, "save_file", full)
    with pytest.raises(Stop, match="cannot be written: .*No space left"):
        weights.save(built, cfg, tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_not_a_checkpoint(folders, tmp_path):
    shutil.copy(folders / "dense" / "config.json", tmp_path)
    with pytest.raises(Stop, match="holds neither model.safetensors.index.json nor model.safetensors"):
        worker.model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(Stop, match="cannot be read"):
        worker.model(tmp_path)


# ---------------------------------------------------------------- logprobs

@pytest.mark.parametrize("temperature, chunk", [(1.0, 7), (0.7, 64), (1.5, 1000)])
def test_logprobs_equal_float64(folders, temperature, chunk):
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(50, 16, generator=g), torch.randn(96, 16, generator=g)
    target, c, d = torch.randint(96, (50,), generator=g), torch.randn(50, generator=g), torch.randn(50, generator=g)
    grads = []
    for dtype in (torch.float32, torch.float64):
        h, w = (t.to(dtype, copy=True).requires_grad_() for t in (hidden, weight))
        if dtype == torch.float32:
            lp, entropy = got = logprobs.logprobs(h, w, target, temperature, chunk)
        else:
            every = (h @ w.t() / temperature).log_softmax(-1)
            lp, entropy = want = every.gather(-1, target[:, None])[:, 0], -(every.exp() * every).sum(-1)
        (lp * c + entropy * d).sum().backward()
        grads.append((h.grad, w.grad))
    for a, b in [*zip(got, want), *zip(*grads)]:
        assert (a - b).abs().max() < 1e-5 * max(1.0, b.abs().max().item()), f"differ by {(a - b).abs().max():.1e}"


def test_logprobs_keep_no_vocabulary_wide_tensor(folders):
    """4,000 tokens x 8,000 words in float32 would be 128 MB; a chunk of 100 tokens is 3 MB."""
    hidden, weight = torch.randn(4000, 8, requires_grad=True), torch.randn(8000, 8, requires_grad=True)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else [out]:
                largest = max(largest, t.numel() if isinstance(t, torch.Tensor) else 0)
            return out
    with Watch():
        lp, entropy = logprobs.logprobs(hidden, weight, torch.randint(8000, (4000,)), 1.0, 100)
        (lp + entropy).sum().backward()
    assert largest == 100 * 8000, f"a tensor of {largest} elements was made"
