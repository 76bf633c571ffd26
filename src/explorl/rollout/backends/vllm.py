"""Sampling with vLLM, in this process or on a server, with the parameters and token statistics of our engine.

    VllmEngine(model, tokenizer, LLM("my-model"))
    VllmEngine(model, tokenizer, "http://localhost:8000")

vLLM samples the tokens: each request with its own temperature, penalties, stops and seed, and with top-k, top-p, min-p
and bottom-p in our order, applied by `explorl.rollout.backends.vllm_processor`, for which Explorl must be installed in
vLLM's environment. ``model`` is the same policy in transformers, whose forward pass gives the token statistics. Unlike
in our engine, random numbers are vLLM's, so the same seed gives other tokens.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from explorl.core.errors import ExplorlError
from explorl.modeling.proof import inner_model, text_config
from explorl.rollout.backends.chain import Chain
from explorl.rollout.backends.token_stats import RecomputedStats, StatsPass, compute_token_stats
from explorl.rollout.backends.vllm_requests import VllmCompletion, build_chains, refuse, request_options
from explorl.rollout.requests import Prompt, Requests, eos_token_ids, prepare
from explorl.rollout.rollouts import Rollout, Rollouts
from explorl.rollout.sampling import SamplingParams
from explorl.rollout.stops import StopStrings

AT_ONCE = 64
"""Concurrent requests to a server, as many as in TRL."""


class VllmError(ExplorlError, ValueError):
    """Raised if vLLM cannot be used as requested; says why and what to do."""


def need_vllm() -> None:
    """Raise `VllmError` if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise VllmError("vLLM is not installed: pip install explorl[vllm] (see docs/vllm.md), or use engine='explorl'")


def keep_weights_in_place() -> None:
    """Prevent vLLM on a CPU from packing its weights for oneDNN, after which they could not be updated.

    Call it before creating a `vllm.LLM` whose weights will change. On other devices it does nothing.
    """
    if torch.cuda.is_available() or importlib.util.find_spec("vllm") is None:
        return
    ops: Any = importlib.import_module("vllm._custom_ops")
    ops._supports_onednn = False


class VllmSampler(Protocol):
    """Samples one completion of each prompt, each with its own arguments of vLLM's `SamplingParams`."""

    def sample(self, prompts: Sequence[Sequence[int]], options: Sequence[dict[str, Any]]) -> list[VllmCompletion]: ...

    @property
    def context(self) -> int | None:
        """Most tokens of a prompt and its completion together."""
        ...


class ColocatedVllm:
    """A `vllm.LLM` in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    @property
    def context(self) -> int | None:
        return int(self.llm.llm_engine.model_config.max_model_len)

    def sample(self, prompts: Sequence[Sequence[int]], options: Sequence[dict[str, Any]]) -> list[VllmCompletion]:
        from vllm import SamplingParams as VllmParams

        requests = [{"prompt_token_ids": list(ids)} for ids in prompts]
        outputs = self.llm.generate(requests, [VllmParams(**arguments) for arguments in options], use_tqdm=False)
        return [_completion(output.outputs[0]) for output in outputs]


def _completion(output: Any) -> VllmCompletion:
    ids = list(output.token_ids)
    logps = [step[token].logprob for token, step in zip(ids, output.logprobs, strict=True)]
    return VllmCompletion(ids, logps, str(output.finish_reason))


class VllmServer:
    """A server (``vllm serve``), called through TRL's `VLLMClient`: one call per request, many at a time."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self._context: int | None = None

    @classmethod
    def at(cls, url: str) -> VllmServer:
        """Return the server at this address; raise `VllmError` if it does not respond."""
        from trl.generation.vllm_client import VLLMClient

        try:
            return cls(VLLMClient(base_url=url))
        except OSError as error:  # requests' ConnectionError is one
            raise VllmError(f"no vLLM server answers at {url}; start one with vllm serve, see docs/vllm.md") from error

    @property
    def context(self) -> int | None:
        if self._context is None:
            model = self.client._get(f"{self.client.base_url}/v1/models")["data"][0]
            self._context = int(model.get("max_model_len") or 0)
        return self._context or None

    def sample(self, prompts: Sequence[Sequence[int]], options: Sequence[dict[str, Any]]) -> list[VllmCompletion]:
        with ThreadPoolExecutor(min(AT_ONCE, len(prompts))) as pool:
            return list(pool.map(self._sample_one, prompts, options))

    def _sample_one(self, prompt: Sequence[int], options: dict[str, Any]) -> VllmCompletion:
        arguments = {name: value for name, value in options.items() if name not in ("extra_args", "detokenize")}
        payload = {
            "model": self.client.model,
            "prompt": list(prompt),
            "return_token_ids": True,
            "vllm_xargs": options.get("extra_args"),
            **arguments,
        }
        choice = self.client._post(f"{self.client.base_url}/v1/completions", json=payload)["choices"][0]
        logps = [float(value) for value in choice["logprobs"]["token_logprobs"]]
        return VllmCompletion(list(choice["token_ids"]), logps, str(choice["finish_reason"]))


def check_processor(sampler: VllmSampler, token: int) -> None:
    """Raise `VllmError` if that vLLM does not have our logits processor, as it would ignore our arguments."""
    wanted = [token, token + 1]
    options = [
        {"temperature": 1.0, "max_tokens": 1, "logprobs": 0, "extra_args": Chain(only=only).extra_args()}
        for only in wanted
    ]
    sampled = [completion.token_ids[0] for completion in sampler.sample([[token]] * len(wanted), options)]
    if sampled != wanted:
        raise VllmError(
            "this vLLM does not know Explorl's logits processor, so top-k, top-p, min-p, bottom-p and temperatures by "
            "position would be ignored: install explorl where vLLM runs, without speculative decoding on the V1 runner"
        )


def as_sampler(backend: Any) -> VllmSampler:
    """Return the sampler for a `vllm.LLM`, TRL's `VLLMClient`, the address of a server, or a `VllmSampler`."""
    if hasattr(backend, "sample"):
        return backend
    if isinstance(backend, str):
        return VllmServer.at(backend)
    return ColocatedVllm(backend) if hasattr(backend, "llm_engine") else VllmServer(backend)


class VllmEngine:
    """Samples with vLLM; has the interface of `explorl.rollout.Engine`.

    Args:
        model: The policy in transformers with the same weights as in vLLM, for the token statistics.
        backend: A `vllm.LLM`, the address of a server, or TRL's `VLLMClient`.
        stats_pass: Options for calls of the model; by default all rows at once, packed.
    """

    def __init__(self, model: Any, tokenizer: Any, backend: Any, *, stats_pass: StatsPass | None = None) -> None:
        need_vllm()
        self.model, self.tokenizer = model, tokenizer
        self.sampler = as_sampler(backend)
        self.stats_pass = stats_pass or StatsPass(model)
        self._checked = self._owns = False

    @classmethod
    def colocated(cls, model: Any, tokenizer: Any, *, source: str | None = None, **options: Any) -> VllmEngine:
        """Create an engine with its own `vllm.LLM` in this process, which `release` frees.

        Args:
            source: A folder or hub id with the weights of ``model``; None writes them to a temporary folder for vLLM.
            options: Arguments of `vllm.LLM`, such as ``max_num_seqs=64`` or ``max_model_len=4096``.
        """
        need_vllm()
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it would log a hundred lines
        device = next(model.parameters()).device
        defaults: dict[str, Any] = {
            "dtype": str(model.dtype).removeprefix("torch."), "seed": 0, "trust_remote_code": False,
        }  # fmt: skip
        if device.type == "cuda":  # the model takes memory there too
            free, total = torch.cuda.mem_get_info(device)
            defaults["gpu_memory_utilization"] = 0.85 * free / total
        else:
            defaults["enforce_eager"] = True  # compiling takes minutes
        with tempfile.TemporaryDirectory(prefix="explorl-vllm-") as folder:
            path = source or _save(model, tokenizer, Path(folder))
            try:
                from vllm import LLM

                llm = LLM(path, **{**defaults, **options})
            except Exception as error:  # of any type: from its configuration, its workers, torch
                message = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), "")
                raise VllmError(f"vLLM cannot load {path}: {message or type(error).__name__}") from error
        engine = cls(model, tokenizer, llm)
        engine._owns = True
        return engine

    def requests(self, prompts: Sequence[Prompt], n: int, params: SamplingParams) -> Requests:
        """Return the requests of a call; raise `ValueError` for what cannot be run."""
        refuse(params)
        vocab = int(text_config(self.model).vocab_size)
        seed = int(torch.randint(2**62, ())) if params.seed is None else params.seed
        context = getattr(text_config(self.model), "max_position_embeddings", None)
        contexts = [length for length in (context, self.sampler.context) if length is not None]
        return prepare(
            prompts,
            n,
            params,
            tokenizer=self.tokenizer,
            vocab=vocab,
            context=min(contexts, default=None),
            eos=eos_token_ids(inner_model(self.model), self.tokenizer),
            seed=seed,
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int = 1,
        params: SamplingParams | None = None,
        on_finish: Callable[[Rollout], object] | None = None,
    ) -> Rollouts:
        """Sample ``n`` completions of every prompt; a prompt is a text, token ids or chat messages.

        ``on_finish`` is called with every completion after all have finished.
        """
        rollouts = self.generate_with_logps(prompts, n, params or SamplingParams())[0]
        for rollout in rollouts if on_finish is not None else ():
            on_finish(rollout)  # type: ignore[misc]
        return rollouts

    def generate_with_logps(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams
    ) -> tuple[Rollouts, list[list[float]]]:
        """Return ``n`` completions of every prompt, and vLLM's log q of their tokens; see `rollouts`."""
        requests = self.requests(prompts, n, params)
        chains = build_chains(requests, params)
        self.check(chains)
        repeated = [prompt for prompt in requests.prompts for _ in range(n)]
        return self.rollouts(requests, chains, self.sampler.sample(repeated, request_options(requests, params, chains)))

    def check(self, chains: Sequence[Chain]) -> None:
        """Raise `VllmError` if vLLM would not apply these chains; it is tested once."""
        if not self._checked and any(not chain.idle for chain in chains):
            check_processor(self.sampler, 5)
            self._checked = True

    def rollouts(
        self, requests: Requests, chains: Sequence[Chain], completions: Sequence[VllmCompletion]
    ) -> tuple[Rollouts, list[list[float]]]:
        """Return the completions as rollouts with token statistics, and vLLM's log-probability of each token.

        The latter is over both outcomes if bottom-p is applied at random per token.
        """
        failed = [c for c in completions if c.reason not in ("stop", "length") or not c.token_ids]
        if failed:
            raise VllmError(f"vLLM ended {len(failed)} of {len(completions)} requests with {failed[0].reason!r}")
        stops = StopStrings(requests.stops, self.tokenizer)
        ends = [stops.cut(i, np.array(completion.token_ids)) for i, completion in enumerate(completions)]
        tokens = [
            completion.token_ids[: None if end is None else end[0]]
            for completion, end in zip(completions, ends, strict=True)
        ]
        stats = compute_token_stats(self.stats_pass, requests, chains, tokens)
        rollouts = [
            self._rollout(requests, i, ids, completion.reason, None if end is None else end[1], stats)
            for i, (ids, completion, end) in enumerate(zip(tokens, completions, ends, strict=True))
        ]
        logps = [
            [logp + coin for logp, coin in zip(completion.logps[: len(ids)], coins, strict=False)]
            for completion, ids, coins in zip(completions, tokens, stats.coin_logps.tolist(), strict=True)
        ]
        return Rollouts(rollouts, requests.prompts, requests.n, requests.seed), logps

    def _rollout(
        self, requests: Requests, i: int, ids: list[int], reason: str, stop: str | None, stats: RecomputedStats
    ) -> Rollout:
        ended = stop is not None or (
            reason == "stop" and ids[-1] in requests.stop_sets[int(requests.rows["stop_set"][i])]
        )
        size = len(ids)
        return Rollout(
            request=i,
            prompt_index=i // requests.n,
            sample_index=i % requests.n,
            token_ids=ids,
            logps=stats.logps[i, :size],
            sampling_logps=stats.sampling_logps[i, :size],
            entropy=stats.entropy[i, :size],
            branching=stats.branching[i, :size],
            finish_reason="stop" if ended else "length",
            tokenizer=self.tokenizer,
            stop=stop,
        )

    def release(self) -> None:
        """Shut down the vLLM that `colocated` has created, and free its memory."""
        if not self._owns:
            return
        from vllm.distributed import cleanup_dist_env_and_memory

        assert isinstance(self.sampler, ColocatedVllm)
        self.sampler.llm.llm_engine.engine_core.shutdown()
        del self.sampler.llm
        self._owns = False
        cleanup_dist_env_and_memory()


def _save(model: Any, tokenizer: Any, folder: Path) -> str:
    """Save the current weights with adapters merged into them, and return the folder."""
    if hasattr(model, "merge_and_unload"):
        model = copy.deepcopy(model).merge_and_unload()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
