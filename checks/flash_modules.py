"""Where does vLLM's GLM-5.3-Flash part from transformers, module by module?

python checks/flash_modules.py                           # on a GPU, bfloat16: the smallest widths that its kernels take
python checks/flash_modules.py --router bfloat16         # the router as vLLM has it, not told to compute in float32
python checks/flash_modules.py --shape tiny              # float32, anywhere

A random model is served eagerly, so that hooks fire. A prompt shorter than index_topk and one that is longer are each prefilled
in one piece; the vLLM worker records what every module takes and gives. transformers' module of the same layer then computes on
the same recorded input, in the served dtype and exactly (float32 for bfloat16, float64 for float32), with its plain torch code.
A row is ||output - exact|| / ||exact|| of vLLM and of transformers, and their ratio: rounding makes it about 1, and a module
above 2 computes something else or more coarsely. transformers computes router, streams' weights and norms in float32 whatever is
served, so an error below FLOOR counts as FLOOR. For picked tokens and chosen experts a row is the share that the exact module did
not take.
vLLM's kernels fuse a write into the streams, the next read and its norm: the streams between them are seen after rounding.
"""
import dataclasses
import inspect
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli  # noqa: E402
from common.receive import Receiver, answered  # noqa: E402

STANDS_OUT = 2                       # times transformers' error in the same dtype
FLOOR, FLOOR_PICKS = 2e-6, 1e-3      # errors below are those of float32, and of ties
WRITE = "write.x", "write.residual", "write.post", "write.comb"
READ = "post", "comb", "y"
ROUTER = "FLASH_MODULES_ROUTER"      # to every process that vLLM starts


@dataclasses.dataclass
class Config:
    shape: str = "cuda"              # or tiny
    router: str = "float32"          # or bfloat16
    seed: int = 0
    out: str = ""                    # write the result there as JSON


class Worker(Receiver):
    """vLLM's side: what the modules take and give."""

    @answered
    def record_start(self):
        from vllm.model_executor.layers.fused_moe import MoERunner
        model = self.model_runner.model
        model, self.seen, self.undo = getattr(model, "language_model", model), {}, []

        def keep(name, t):
            """Of several calls the longest: the prefill, not a sampled token."""
            if name not in self.seen or len(t) > len(self.seen[name]):
                self.seen[name] = t.detach().clone()

        def watch(module, name, argument=0):
            def before(_, args, kwargs):     # now: experts may write over their input
                keep(f"{name}.in", kwargs["hidden_states"] if "hidden_states" in kwargs else args[argument])

            def after(_, args, kwargs, output):
                keep(f"{name}.out", output[0] if isinstance(output, tuple) else output)
            self.undo += [module.register_forward_pre_hook(before, with_kwargs=True).remove,
                          module.register_forward_hook(after, with_kwargs=True).remove]

        def watch_streams(layer, i):
            """The three methods of a layer that read and write its streams. On the CPU the fused one calls the others."""
            first, inside = layer.input_layernorm.weight.data_ptr(), []

            def watched(name, takes, gives, real):
                def method(*args, **kwargs):
                    if inside:
                        return real(*args, **kwargs)
                    part = kwargs and ("attn" if kwargs["norm_weight"].data_ptr() == first else "ffn")
                    where = f"{i}.{part}" if part else "last"
                    for what, t in zip(takes, args):
                        keep(f"{where}.{what}", t)
                    inside.append(name)
                    try:
                        output = real(*args, **kwargs)
                    finally:
                        inside.pop()
                    for what, t in zip(gives, output):
                        keep(f"{where}.{what}", t)
                    return output
                setattr(layer, name, method)
                self.undo.append(lambda: delattr(layer, name))
            watched("hc_pre", ["streams"], READ, layer.hc_pre)
            watched("hc_fused_post_pre", WRITE, ["streams", *READ], layer.hc_fused_post_pre)
            watched("hc_post", WRITE, [], layer.hc_post)

        watch(model.model.embed_tokens, "embedding")
        watch(model.model.norm, "norm")
        watch(model.logits_processor, "logits", 1)
        for i, layer in enumerate(model.model.layers):
            watch_streams(layer, i)
            watch(layer.self_attn, f"{i}.attention")
            buffer = getattr(getattr(layer.self_attn, "indexer", None), "topk_indices_buffer", None)
            if buffer is not None:           # all layers write it, and its rows are more than a step's tokens
                hook = layer.self_attn.register_forward_hook(
                    lambda _, args, output, i=i, buffer=buffer: keep(f"{i}.picks", buffer[:len(output)]))
                self.undo.append(hook.remove)
            watch(layer.mlp, f"{i}.mlp")
            if hasattr(layer.mlp, "gate"):
                watch(layer.mlp.gate, f"{i}.gate")
                watch(layer.mlp.shared_experts, f"{i}.shared")
                for runner in (m for m in layer.mlp.modules() if isinstance(m, MoERunner)):
                    runner.router.set_capture_fn(lambda ids, i=i: keep(f"{i}.chosen", ids))
                    self.undo.append(lambda runner=runner: runner.router.set_capture_fn(None))
        return {}

    @answered
    def record_stop(self, path):
        import torch
        from safetensors.torch import save_file
        if torch.cuda.is_available():
            torch.cuda.synchronize()         # shared experts run on a stream of their own
        for action in self.undo:
            action()
        save_file({name: t.cpu().contiguous() for name, t in self.seen.items()}, path)
        del self.seen, self.undo
        return {}


if os.environ.get(ROUTER) == "bfloat16" and __name__ == "checks.flash_modules":
    # so vLLM imports this file, before it builds the model
    import torch as _torch

    from common import vllm_flash
    places = [vllm_flash]
    if not _torch.cuda.is_available():
        from common.vllm_cpu import glm5p3_flash
        places.append(glm5p3_flash)
    for place in places:
        place.float32_router = lambda vllm_config: None


# -- transformers' modules ---------------------------------------------------------------------------------------------------

def load(folder, dtype, device):
    """transformers' model in a dtype, with the parameters that a checkpoint keeps in float32 in no less; torch's own linear
    attention, where transformers would take another package's."""
    from transformers.models.glm5_next import modeling_glm5_next as code

    from checks import tiny
    from data.arithmetic import FLOAT32
    for name in ("chunk_kimi_delta_attention", "causal_conv1d_fn"):
        setattr(code, name, inspect.unwrap(getattr(code, name)))
    model, whole = tiny.hf_model(folder, dtype), None
    for name, p in model.named_parameters():
        if name.endswith(FLOAT32) and p.itemsize < 4:
            whole = whole or dict(tiny.hf_model(folder).named_parameters())
            p.data = whole[name].data
    model.set_experts_implementation("eager")
    return model.to(device)


def written(x, residual, post, comb):
    """A block's output x (n, hidden) and the streams before it (n, streams, hidden) -> the streams after it."""
    return post.flatten(1).to(x.dtype).unsqueeze(-1) * x.unsqueeze(1) + comb.to(x.dtype).mT @ residual


def as_mask(picks, width):
    """Indices (n, k), -1 for none -> bool (n, width)"""
    import torch
    mask = torch.zeros(len(picks), width + 1, dtype=torch.int8, device=picks.device)
    return mask.scatter_(1, picks.long().where(picks >= 0, width), 1)[:, :width].bool()


def attention(layer, x, picks=None):
    import torch
    if layer.block_type == "linear_attention":
        return layer.self_attn(x[None], attention_mask=None)[0]
    allowed = torch.ones(1, len(x), dtype=torch.bool, device=x.device)
    if picks is None:
        return layer.self_attn(x[None], attention_mask=allowed)[0][0]
    with mock.patch.object(layer.self_attn.indexer, "forward", lambda **_: picks[None]):
        return layer.self_attn(x[None], attention_mask=allowed)[0][0]


def picked(layer, x):
    import torch
    a, allowed = layer.self_attn, torch.ones(1, len(x), dtype=torch.bool, device=x.device)
    latent = a.q_a_layernorm(a.q_a_proj(x[None]))
    return a.indexer(hidden_states=x[None], q_resid=latent, attention_mask=allowed, past_key_values=None)[0]


def experts(mlp, x, chosen):
    """The routed experts that vLLM chose, with transformers' weights for them, and the shared one. None: its own choice."""
    gate = mlp.gate
    if chosen is None:
        return mlp(x[None])[0]
    weights = gate(x)[0].sigmoid().gather(1, chosen)
    if gate.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return mlp.experts(x, chosen, weights * gate.routed_scaling_factor) + mlp.shared_experts(x)


def modules(seen, hf):
    """Yield (layer, module, {what: name in seen, or what was recorded as a mask}, f): f(model, get) gives the same outputs as
    transformers' module computes them from get(name in seen)."""
    n, text = len(seen["norm.in"]), lambda model: model.model.language_model

    def write(where):
        return lambda model, get: [written(*(get(f"{where}.{name}") for name in WRITE))]
    yield "", "embedding", {"": "embedding.out"}, lambda model, get: [text(model).embed_tokens(get("embedding.in"))]
    for i in range(hf.num_hidden_layers):
        layer = lambda model, i=i: text(model).layers[i]                                                         # noqa: E731
        for part, norm in (("attn", "input_layernorm"), ("ffn", "post_attention_layernorm")):
            where = f"{i}.{part}"
            if f"{where}.write.x" in seen:
                yield i, f"hc write before {part}", {"": f"{where}.streams"}, write(where)

            def read(model, get, layer=layer, part=part, norm=norm, where=where):
                post, comb, y = getattr(layer(model), f"{part}_hc")(get(f"{where}.streams")[None])
                return post[0], comb[0], getattr(layer(model), norm)(y)[0]
            yield i, f"hc read for {part}", {what: f"{where}.{what}" for what in READ}, read
            if part == "ffn":
                break
            linear = hf.layer_types[i] == "linear_attention"
            yield i, "KDA" if linear else "MLA with indexer", {"": f"{i}.attention.out"}, \
                lambda model, get, i=i, layer=layer: [attention(layer(model), get(f"{i}.attention.in"))]
            if f"{i}.picks" in seen:
                yield i, "picks", {"": as_mask(seen[f"{i}.picks"], n)}, \
                    lambda model, get, i=i, layer=layer: [as_mask(picked(layer(model), get(f"{i}.attention.in")), n)]
                yield i, "MLA, vLLM's picks", {"": f"{i}.attention.out"}, lambda model, get, i=i, layer=layer: [
                    attention(layer(model), get(f"{i}.attention.in"), get(f"{i}.picks").long())]
        x = lambda get, i=i: get(f"{i}.mlp.in")                                                                  # noqa: E731
        if hf.mlp_layer_types[i] == "dense":
            yield i, "dense", {"": f"{i}.mlp.out"}, lambda model, get, x=x, layer=layer: [layer(model).mlp(x(get))]
            continue
        yield i, "router logits", {"": f"{i}.gate.out"}, lambda model, get, x=x, layer=layer: [layer(model).mlp.gate(x(get))[0]]
        yield i, "shared expert", {"": f"{i}.shared.out"}, \
            lambda model, get, x=x, layer=layer: [layer(model).mlp.shared_experts(x(get))]
        if f"{i}.chosen" in seen:                    # a kernel that chooses inside shows nothing
            yield i, "chosen experts", {"": as_mask(seen[f"{i}.chosen"], hf.n_routed_experts)}, \
                lambda model, get, x=x, layer=layer: [as_mask(layer(model).mlp.gate(x(get))[2], hf.n_routed_experts)]
        yield i, f"experts, {'vLLM' if f'{i}.chosen' in seen else 'transformers'}'s choice", {"": f"{i}.mlp.out"}, \
            lambda model, get, x=x, i=i, layer=layer: [
                experts(layer(model).mlp, x(get), get(f"{i}.chosen").long() if f"{i}.chosen" in seen else None)]
    yield "", "last hc write and mean", {"": "norm.in"}, \
        lambda model, get: [text(model).hc_head(write("last")(model, get)[0][None])[0]]
    yield "", "final norm", {"": "norm.out"}, lambda model, get: [text(model).norm(get("norm.in"))]
    yield "", "logits", {"": "logits.out"}, lambda model, get: [model.lm_head(get("logits.in"))]


def error(found, exact):
    if exact.dtype == found.dtype and str(exact.dtype) == "torch.bool":
        return ((found & ~exact).sum() / exact.sum()).item()
    found, exact = found.double().flatten(1), exact.double().flatten(1)
    found = found[:, :exact.shape[1]]                                        # vLLM pads the vocabulary
    return ((found - exact).norm() / exact.norm()).item()


def compare(seen, models, hf, say):
    """Rows of [layer, module and output, error of vLLM, of transformers, ratio]; and sentences on modules that failed."""
    import torch
    device, rows, failed = next(models[0].parameters()).device, [], []
    seen = {name: t.to(device) for name, t in seen.items()}

    def getter(model):
        dtype = model.lm_head.weight.dtype
        return lambda name: seen[name].to(dtype) if seen[name].is_floating_point() else seen[name]
    for i, module, outputs, f in modules(seen, hf):
        try:
            with torch.no_grad():
                low, exact = (f(model, getter(model)) for model in models)
            for (what, name), low_out, exact_out in zip(outputs.items(), low, exact, strict=True):
                vllm = error(seen[name] if isinstance(name, str) else name, exact_out)
                ours = error(low_out, exact_out)
                rows.append([i, f"{module} {what}".strip(), vllm, ours,
                             vllm / max(ours, FLOOR if isinstance(name, str) else FLOOR_PICKS)])
                say(f"  {i!s:>2} {rows[-1][1]:28} vLLM {vllm:.2e}  transformers {ours:.2e}  ratio {rows[-1][4]:.2f}")
        except Exception as fault:               # noqa: BLE001 - the other modules still tell
            failed.append(f"layer {i or '-'}, {module}: {type(fault).__name__}: {fault}")
            say(f"  {failed[-1]}\n{traceback.format_exc()}")
    return rows, failed


def logprobs(model, tokens):
    import torch
    with torch.no_grad():
        ids = torch.tensor(tokens, device=model.device)
        rows = model(input_ids=ids[None]).logits[0, :-1].double().log_softmax(-1)
    return rows.gather(1, ids[1:, None])[:, 0].cpu().numpy()


def main():
    cfg = cli.parse(Config, doc=__doc__)
    if cfg.shape not in ("cuda", "tiny") or cfg.router not in ("float32", "bfloat16"):
        raise cli.Stop(f"--shape is {cfg.shape!r} (cuda or tiny), --router {cfg.router!r} (float32 or bfloat16)")
    os.environ[ROUTER] = cfg.router
    import numpy as np
    import torch
    from safetensors.torch import load_file

    from common.sampler import SamplerEngine
    from data import arithmetic
    cuda = torch.cuda.is_available()
    if cuda != (cfg.shape == "cuda"):
        raise cli.Stop(f"--shape {cfg.shape} is for {'the CPU' if cuda else 'a GPU'}")
    dtype, device = ("bfloat16", "cuda") if cuda else ("float32", "cpu")
    low, exact = (torch.bfloat16, torch.float32) if cuda else (torch.float32, torch.float64)
    work = Path(tempfile.mkdtemp(prefix="flash-modules-"))
    arithmetic.prepare(work, seed=cfg.seed, dtype=dtype, flash=True, **(arithmetic.FLASH_CUDA_WIDTHS if cuda else {}))
    lengths, room = ((500, 2600), 4096) if cuda else ((30, 90), 192)
    rng = np.random.default_rng(cfg.seed)
    prompts = [rng.integers(9, arithmetic.VOCABULARY - 6, n).tolist() for n in lengths]
    result = {**dataclasses.asdict(cfg), "dtype": dtype, "prompts": {}, "failed": [], "versions": cli.versions()}

    def say(line):
        print(line, flush=True)
    try:
        engine = SamplerEngine(work / "start", dtype=dtype, max_model_len=room, max_num_seqs=4, max_num_batched_tokens=room,
                               gpu_memory_utilization=0.3, apart=True, vllm_args=dict(
                                   worker_extension_cls="checks.flash_modules.Worker", enforce_eager=True,
                                   enable_prefix_caching=False))
        models = [load(work / "start", d, device) for d in (low, exact)]
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.set_float32_matmul_precision("highest")
        for tokens in prompts:
            path = work / f"{len(tokens)}.safetensors"
            engine._rpc("record_start")
            theirs = engine.score([tokens], [1])[0]
            engine._rpc("record_stop", str(path))
            seen = load_file(path)
            result["router_answers_in"] = {str(t.dtype) for name, t in seen.items() if name.endswith("gate.out")}.pop()
            say(f"{len(tokens)} tokens, index_topk {engine.hf.index_topk}, router {result['router_answers_in']}")
            if len(seen["norm.in"]) != len(tokens):
                raise cli.Stop(f"the prefill of {len(tokens)} tokens came in pieces of {len(seen['norm.in'])} at most")
            rows, failed = compare(seen, models, engine.hf, say)
            of_low, of_exact = (logprobs(m, tokens) for m in models)
            gaps = {"vllm": np.abs(theirs - of_exact), "transformers": np.abs(of_low - of_exact)}
            gaps = {name: {"mean": g.mean().item(), "max": g.max().item()} for name, g in gaps.items()}
            odd = [r for r in rows if not r[4] <= STANDS_OUT]                    # nan too
            result["prompts"][len(tokens)] = {"rows": rows, "stand_out": odd, "dlogp": gaps}
            result["failed"] += failed
            say("  |dlogp| from exact: "
                + ", ".join(f"{name} mean {g['mean']:.2e} max {g['max']:.2e}" for name, g in gaps.items()))
            say("  above a ratio of 2: " + ("; ".join(f"{r[1]} of layer {r[0]}" for r in odd) or "none"))
    finally:
        if cfg.out:
            cli.write_atomic(cfg.out, json.dumps(result, indent=1) + "\n")
    if result["failed"]:
        raise cli.Stop(f"{len(result['failed'])} modules could not be compared: {'; '.join(result['failed'][:3])}")
    return 0


if __name__ == "__main__":
    cli.run_main(main)
