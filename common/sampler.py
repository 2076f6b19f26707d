"""The sampler: one actor per vLLM engine. Generate, score, receive a version, sleep, wake.

What it answers is the distribution that it sampled from (`logprobs_mode="processed_logprobs"`), so a temperature or
top-p other than 1 is in the log-probabilities too. Randomness comes from the seeds that the caller gives, one for each
answer, never from time.
"""
import os
import uuid

import numpy as np

from common import replay as router_replay
from common.bundle import Header, base_fingerprint
from common.cli import Stop
from common.sync import node_name


class SamplerEngine:
    """One vLLM engine with a policy version. Requests always use the version committed last; version 0 is the base model. Its
    actor takes one call at a time, so a publish waits until every answer of a running `generate` is complete, and no answer
    has tokens of two versions."""

    def __init__(self, model, *, dtype="float32", tp=1, max_model_len, max_num_seqs, max_num_batched_tokens=None, lora_rank=0,
                 gpu_memory_utilization=0.8, weights=False, seed=0, replay=False, apart=False, vllm_args=None):
        """model: HF checkpoint folder. lora_rank 0: no adapters. weights: takes all weights from sync.publish, not adapters.
        replay: answers bring the experts of their tokens (common/replay.py). apart: the trainer has other GPUs, and this engine
        never sleeps. vllm_args: more arguments of vllm.LLM, which win."""
        import torch

        from common import hf_config, vllm_cpu
        config = hf_config.read_config(model)                # constants that vLLM would silently take from its own defaults
        self.hf, flash = config.get_text_config(), config.model_type.startswith("glm5_next")
        self.cuda = cuda = torch.cuda.is_available()
        if cuda:
            # a forked process cannot use CUDA once its parent has only looked whether there is any
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        else:
            os.environ.update(vllm_cpu.ENV)                  # before vllm is imported
        import vllm
        args = dict(model=str(model), dtype=dtype, seed=seed, tensor_parallel_size=tp, max_model_len=max_model_len,
                    max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens or max(max_model_len, 2048),
                    enable_prefix_caching=True, logprobs_mode="processed_logprobs",
                    worker_extension_cls="common.receive.Receiver")
        if lora_rank:
            # two slots: the version that serves and the one that is staged
            args |= dict(enable_lora=True, max_lora_rank=lora_rank, max_loras=2, max_cpu_loras=2)
        if weights:
            args |= dict(weight_transfer_config={"backend": "buckets"},
                         worker_extension_cls="common.receive_weights.WeightReceiver")
        if tp > 1:
            # processes of its own, also inside a Ray actor; and the reduction that rounds like everybody else's (all_reduce.py)
            args |= dict(distributed_executor_backend="mp", enable_expert_parallel=True, disable_custom_all_reduce=True)
        if cuda:
            # "auto" would choose an fp8 cache for this model on Blackwell, without a word
            args |= dict(gpu_memory_utilization=gpu_memory_utilization, enable_sleep_mode=not apart,
                         kv_cache_dtype="bfloat16" if dtype == "bfloat16" else "auto", worker_cls="common.all_reduce.Worker")
            if flash:
                # no image or video will come, so the vision tower is not loaded
                args |= dict(worker_cls="common.vllm_flash.Worker", limit_mm_per_prompt={"image": 0, "video": 0})
        else:
            if tp != 1:
                raise Stop(f"the CPU sampler runs on one process, --sampler-tp is {tp}")
            args |= vllm_cpu.engine_args(dtype)
            if flash:
                args |= dict(enable_prefix_caching=False)    # see common/vllm_cpu/worker.py
        if replay:
            # vLLM keeps routes beside its prefix cache and needs it; the CPU worker sees tokens that run, so none may be cached
            args |= dict(enable_return_routed_experts=True) if cuda else dict(enable_prefix_caching=False)
        self.replay = replay
        self.llm = vllm.LLM(**{**args, **(vllm_args or {})})
        if flash:
            from common.vllm_flash import whole_blocks
            whole_blocks(self.llm.llm_engine.vllm_config)
        self.stop_tokens = stop_tokens(self.llm)
        if (served := str(self.llm.model_config.dtype).removeprefix("torch.")) != dtype:
            raise Stop(f"the sampler was asked for {dtype} and serves {served}")
        self.base, self.version, self.request, self.broken = base_fingerprint(model), 0, None, None
        self.weights, self.id, self.ranks, self.apart = weights, uuid.uuid4().hex, tp, apart

    def where(self):
        """{"id": a name of this engine alone, "node", "ranks": how many take a version} for the trainer's `offer`."""
        return {"id": self.id, "node": node_name(), "ranks": self.ranks}

    def generate(self, prompts, seeds, max_tokens, temperature=1.0, top_p=1.0, routes=True):
        """One answer to each prompt (list of token ids). Returns a list of dicts: tokens (int32, T), logp (float32, T),
        is_truncated (the token cap ended it), versions (int32, T: which policy version produced each token); with replay
        also routes (prompt + T - 1, MoE layers, k), unless they are not wanted. Stop where an answer's end is missing."""
        from vllm import SamplingParams
        params = [SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=s, logprobs=0,
                                 detokenize=False) for s in seeds]
        outs, chosen = self._ask_routed(prompts, params) if self.replay and routes else (self._ask(prompts, params), [])
        answers = []
        for out, prompt in zip(outs, prompts, strict=True):
            one = out.outputs[0]
            cap = min(max_tokens, self.llm.model_config.max_model_len - len(prompt))
            if lost := lost_end(one.token_ids, one.finish_reason, cap, self.stop_tokens):
                raise Stop(f"an answer of {len(one.token_ids)} tokens {lost}: its end was lost on the way out of the engine")
            if len(one.token_ids) != len(one.logprobs):
                raise RuntimeError(f"{len(one.token_ids)} tokens came with {len(one.logprobs)} log-probabilities")
            answers.append({"tokens": np.asarray(one.token_ids, dtype=np.int32), "is_truncated": one.finish_reason == "length",
                            "logp": np.asarray([lp[t].logprob for lp, t in zip(one.logprobs, one.token_ids)], dtype=np.float32),
                            "versions": np.full(len(one.token_ids), self.version, dtype=np.int32)})
        for answer, r in zip(answers, chosen):
            answer["routes"] = r
        return answers

    def routes(self, sequences):
        """Routes of every token of these sequences, (T, MoE layers, k), from a prefill with the version that serves."""
        from vllm import SamplingParams
        return self._ask_routed(sequences, [SamplingParams(max_tokens=1, detokenize=False)] * len(sequences))[1]

    def score(self, tokens, n_prompt):
        """Log-probabilities (float32, T - n_prompt) of the tokens after each prompt, from a prefill at temperature 1."""
        from vllm import SamplingParams
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        out = self._ask([list(map(int, t)) for t in tokens], [params] * len(tokens))
        return [np.asarray([o.prompt_logprobs[i][int(t[i])].logprob for i in range(n, len(t))], dtype=np.float32)
                for o, t, n in zip(out, tokens, n_prompt)]

    def trace(self, tokens):
        """{layer: (len(tokens), trace.WIDTH) lists}: projections of what each layer hands on for these tokens."""
        from vllm import SamplingParams
        self.llm.reset_prefix_cache()                        # a cached token would run through no layer
        self._rpc("trace_start")
        try:
            self._ask([tokens], [SamplingParams(max_tokens=1, detokenize=False)])
        finally:
            found = self._rpc("trace_stop")[0]["layers"]
        return {int(layer): states[:len(tokens)] for layer, states in found.items()}

    def _ask(self, prompts, params):
        if self.broken:
            raise Stop(f"this sampler stopped serving: {self.broken}")
        prompts = [{"prompt_token_ids": list(map(int, p))} for p in prompts]
        return self.llm.generate(prompts, params, lora_request=self.request, use_tqdm=False)

    def _ask_routed(self, prompts, params):
        """(answers, their routes): a row for every token but the last, which was not fed."""
        if not self.replay:
            raise Stop("this sampler was started with replay off and keeps no routes")
        if self.cuda:
            outs = self._ask(prompts, params)
            sparse = np.array([kind == "sparse" for kind in self.hf.mlp_layer_types])       # vLLM has rows of dense layers too
            routes = [r if r is None else r[:, sparse] for r in (out.outputs[0].routed_experts for out in outs)]
        else:
            self._rpc("routes_start")
            try:
                outs = self._ask(prompts, params)
            finally:
                held = self._rpc("routes_stop")[0]["routes"]
            routes = [held.get(out.request_id) for out in outs]
        sizes = router_replay.sizes(self.hf)
        for out, r in zip(outs, routes):
            tokens = len(out.prompt_token_ids) + len(out.outputs[0].token_ids)
            router_replay.check(r, tokens, f"request {out.request_id}", **sizes)
        return outs, routes

    # -- receive a version (sync.publish) ---------------------------------------------------------------------------------------

    def stage(self, header, ticket):
        """Bring a version beside the one that serves. All of this engine's ranks have it, or Stop."""
        head = Header.from_json(header)
        if (head.kind == "weights") != self.weights:
            raise Stop(f"version {head.version} brings {head.kind}, this sampler was started for "
                       f"{'weights' if self.weights else 'adapters'}")
        if self.weights:
            self.broken = f"it holds a part of version {head.version}"
        if ticket["way"] == "network":
            ticket = {**ticket, "first": ticket["first"][self.id]}
        self._rpc("weights_stage" if self.weights else "adapter_stage", header, ticket, self.base)

    def commit(self, version):
        """Serve the staged version from now on; returns every rank's fingerprint of its slots."""
        from vllm.lora.request import LoRARequest
        try:
            answers = self._rpc("weights_commit" if self.weights else "adapter_commit", version)
            if not self.llm.reset_prefix_cache():
                raise Stop("the prefix cache could not be emptied")
        except BaseException as error:
            # some ranks may serve the new version and others the old: this engine must not answer again
            self.broken = f"version {version} was committed on part of it ({error})"
            raise
        # The name has the version: vLLM's prefix cache knows an adapter by name and path, so old blocks are never taken
        # for new ones.
        self.version, self.broken = version, None
        if not self.weights:
            self.request = LoRARequest(f"policy-v{version}", version + 1, f"memory://policy-v{version}")
        return [a["fingerprint"] for a in answers]

    def abort(self, version):
        return self._rpc("weights_abort" if self.weights else "adapter_abort", version)

    def _rpc(self, verb, *args):
        answers = self.llm.collective_rpc(verb, args=args)
        if bad := [(rank, a["error"]) for rank, a in enumerate(answers) if "error" in a]:
            raise Stop(f"rank {bad[0][0]}: {bad[0][1]}")
        return answers

    # -- memory -----------------------------------------------------------------------------------------------------------------

    def sleep(self):
        """Give the GPU memory to the trainer: weights go to the host, the KV cache is dropped. Nothing to do on the CPU, or with
        GPUs of its own."""
        if self.cuda and not self.apart:
            self.llm.sleep(level=1)

    def wake(self):
        if self.cuda and not self.apart:
            self.llm.wake_up()


def stop_tokens(llm):
    """Ids of the tokens that end an answer: the checkpoint's in config.json and generation_config.json, and its tokenizer's,
    which vLLM heeds too."""
    config = llm.model_config
    found = set()
    for ids in (config.hf_text_config.eos_token_id, config.try_get_generation_config().get("eos_token_id"),
                None if config.skip_tokenizer_init else llm.get_tokenizer().eos_token_id):
        found |= set() if ids is None else {ids} if isinstance(ids, int) else set(ids)
    return found


def lost_end(tokens, finish_reason, cap, stop):
    """What shows that an answer's last token is missing, or None. Without it no log-probability of the others is wrong, and
    training goes on as if the policy had ended there."""
    if finish_reason == "length":
        return None if len(tokens) == cap else f"is said to have met the cap of {cap}"
    if finish_reason != "stop":
        return f"ended with {finish_reason!r}, neither stop nor length"
    last = tokens[-1] if len(tokens) else None
    return None if last in stop else f"is said to be complete and ends with {last}, none of the stop tokens {sorted(stop)}"


def spread(sampler, verb, columns, *how):
    """A verb of SamplerEngine over all engines of a group: the items of every column (prompts and seeds, say) are dealt
    round-robin, `how` goes to all. Answers in the order of the items."""
    n = len(sampler)
    answers = [None] * len(columns[0])
    for i, part in enumerate(sampler.each(verb, [(*(c[i::n] for c in columns), *how) for i in range(n)])):
        answers[i::n] = part
    return answers
