"""Sampling with vLLM, in this process or on a server, with the parameters and the records of our engine.

    VllmEngine(model, tokenizer, LLM("my-model"))
    VllmEngine(model, tokenizer, "http://localhost:8000")

vLLM draws the tokens: each request with its own temperature, penalties, stops and seed, and with top-k, top-p, min-p
and bottom-p in our order by `explorl.rollout.backends.vllm_processor`, which has to be installed beside that vLLM (it
is where Explorl is). ``model`` is the same policy in transformers, whose pass gives the records. What differs from our
engine: tokens are drawn by vLLM's own random numbers, so the same seed gives other tokens than there.
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

from explorl.modeling.proof import inner_model, text_config
from explorl.rollout.backends.chain import Chain
from explorl.rollout.backends.token_stats import RecomputedStats, StatsPass, compute_token_stats
from explorl.rollout.backends.vllm_requests import VllmCompletion, build_chains, refuse, request_options
from explorl.rollout.requests import Prompt, Requests, eos_token_ids, prepare
from explorl.rollout.rollouts import Rollout, Rollouts
from explorl.rollout.sampling import SamplingParams
from explorl.rollout.sampling.constraints import spread
from explorl.rollout.stops import StopStrings

AT_ONCE = 64
"""Requests that are open at a server at the same time, as many as TRL has."""


class VllmError(ValueError):
    """vLLM cannot be used as asked; the message says why and what to do."""


def need_vllm() -> None:
    """Raises where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise VllmError("vLLM is not installed: pip install explorl[vllm] (see docs/vllm.md), or use engine='explorl'")


def keep_weights_in_place() -> None:
    """On a CPU, has vLLM keep its weights as they are: packed for oneDNN, they could not be written to any more.

    To be called before a `vllm.LLM` whose weights are to change is made; elsewhere it does nothing.
    """
    if torch.cuda.is_available() or importlib.util.find_spec("vllm") is None:
        return
    ops: Any = importlib.import_module("vllm._custom_ops")
    ops._supports_onednn = False


class VllmSampler(Protocol):
    """What draws: one completion for each prompt, with options of vLLM's `SamplingParams` of its own."""

    def sample(self, prompts: Sequence[Sequence[int]], options: Sequence[dict[str, Any]]) -> list[VllmCompletion]: ...

    @property
    def context(self) -> int | None:
        """Longest prompt and completion together."""
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

        given = [{"prompt_token_ids": list(ids)} for ids in prompts]
        outputs = self.llm.generate(given, [VllmParams(**one) for one in options], use_tqdm=False)
        return [_drawn(output.outputs[0]) for output in outputs]


def _drawn(output: Any) -> VllmCompletion:
    ids = list(output.token_ids)
    logps = [step[token].logprob for token, step in zip(ids, output.logprobs, strict=True)]
    return VllmCompletion(ids, logps, str(output.finish_reason))


class VllmServer:
    """A server (``vllm serve``) as TRL's `VLLMClient` speaks to it: one call for each request, many at a time."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self._context: int | None = None

    @classmethod
    def at(cls, url: str) -> VllmServer:
        """The server at this address; `VllmError` where none answers."""
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
            return list(pool.map(self._one, prompts, options))

    def _one(self, prompt: Sequence[int], options: dict[str, Any]) -> VllmCompletion:
        given = {name: value for name, value in options.items() if name not in ("extra_args", "detokenize")}
        given["logit_bias"] = {str(token): amount for token, amount in options.get("logit_bias", {}).items()} or None
        payload = {
            "model": self.client.model,
            "prompt": list(prompt),
            "return_token_ids": True,
            "vllm_xargs": options.get("extra_args"),
            **given,
        }
        choice = self.client._post(f"{self.client.base_url}/v1/completions", json=payload)["choices"][0]
        logps = [float(value) for value in choice["logprobs"]["token_logprobs"]]
        return VllmCompletion(list(choice["token_ids"]), logps, str(choice["finish_reason"]))


def check_processor(sampler: VllmSampler, token: int) -> None:
    """`VllmError` where that vLLM does not know our logits processor: it would sample as if nothing had been said."""
    wanted = [token, token + 1]
    options = [
        {"temperature": 1.0, "max_tokens": 1, "logprobs": 0, "extra_args": Chain(only=one).extra_args()}
        for one in wanted
    ]
    found = [drawn.token_ids[0] for drawn in sampler.sample([[token]] * len(wanted), options)]
    if found != wanted:
        raise VllmError(
            "this vLLM does not know Explorl's logits processor, so top-k, top-p, min-p, bottom-p and temperatures by "
            "position would be ignored: install explorl where vLLM runs, without speculative decoding on the V1 runner"
        )


def sampler_of(backend: Any) -> VllmSampler:
    """From a `vllm.LLM`, a `VLLMClient` of TRL's or the address of a server; a `VllmSampler` is one."""
    if hasattr(backend, "sample"):
        return backend
    if isinstance(backend, str):
        return VllmServer.at(backend)
    return ColocatedVllm(backend) if hasattr(backend, "llm_engine") else VllmServer(backend)


class VllmEngine:
    """Samples with vLLM as `explorl.rollout.Engine` does."""

    def __init__(self, model: Any, tokenizer: Any, backend: Any, *, stats_pass: StatsPass | None = None) -> None:
        """
        Args:
            model: The policy in transformers, for the records; it has the weights that vLLM has.
            backend: A `vllm.LLM`, the address of a server, or TRL's `VLLMClient`.
            stats_pass: How the model is called; by default packed, as many rows at a time as are asked for.
        """
        need_vllm()
        self.model, self.tokenizer = model, tokenizer
        self.sampler = sampler_of(backend)
        self.stats_pass = stats_pass or StatsPass(model)
        self._checked = self._owns = False

    @classmethod
    def colocated(cls, model: Any, tokenizer: Any, *, source: str | None = None, **options: Any) -> VllmEngine:
        """With a `vllm.LLM` of its own in this process; `release` lets go of it.

        Args:
            source: A folder or hub id with the weights of ``model``; None writes them to a folder that vLLM reads.
            options: Arguments of `vllm.LLM`, such as ``max_num_seqs=64`` or ``max_model_len=4096``.
        """
        need_vllm()
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it has a hundred lines to say
        device = next(model.parameters()).device
        given: dict[str, Any] = {
            "dtype": str(model.dtype).removeprefix("torch."), "seed": 0, "trust_remote_code": False,
        }  # fmt: skip
        if device.type == "cuda":  # the model is there too
            free, total = torch.cuda.mem_get_info(device)
            given["gpu_memory_utilization"] = 0.85 * free / total
        else:
            given["enforce_eager"] = True  # compiling takes minutes
        with tempfile.TemporaryDirectory(prefix="explorl-vllm-") as folder:
            path = source or _written(model, tokenizer, Path(folder))
            try:
                from vllm import LLM

                llm = LLM(path, **{**given, **options})
            except Exception as error:  # of any kind: from its configuration, its workers, torch
                said = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), "")
                raise VllmError(f"vLLM cannot load {path}: {said or type(error).__name__}") from error
        engine = cls(model, tokenizer, llm)
        engine._owns = True
        return engine

    def requests(self, prompts: Sequence[Prompt], n: int, params: SamplingParams) -> Requests:
        """The requests of a call; `ValueError` for what cannot be run."""
        refuse(params)
        vocab = int(text_config(self.model).vocab_size)
        seed = int(torch.randint(2**62, ())) if params.seed is None else params.seed
        own = getattr(text_config(self.model), "max_position_embeddings", None)
        contexts = [length for length in (own, self.sampler.context) if length is not None]
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

    def options(self, requests: Requests, params: SamplingParams, chains: Sequence[Chain]) -> list[dict[str, Any]]:
        """Each request in vLLM's words."""
        prompts, n = len(requests.prompts), requests.n
        allowed = spread("allowed_tokens", params.allowed_tokens, prompts, n)
        biases = spread("logit_bias", params.logit_bias, prompts, n)
        return request_options(requests, params, chains, allowed, biases)

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int = 1,
        params: SamplingParams | None = None,
        on_finish: Callable[[Rollout], object] | None = None,
    ) -> Rollouts:
        """Samples ``n`` completions of every prompt; a prompt is a text, token ids or chat messages.

        ``on_finish`` is called with every completion once all are there.
        """
        rollouts = self.generate_with_logps(prompts, n, params or SamplingParams())[0]
        for rollout in rollouts if on_finish is not None else ():
            on_finish(rollout)  # type: ignore[misc]
        return rollouts

    def generate_with_logps(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams
    ) -> tuple[Rollouts, list[list[float]]]:
        """``n`` completions of every prompt, and vLLM's log q of their tokens, see `rollouts`."""
        requests = self.requests(prompts, n, params)
        chains = build_chains(requests, params)
        self.check(chains)
        repeated = [prompt for prompt in requests.prompts for _ in range(n)]
        return self.rollouts(requests, chains, self.sampler.sample(repeated, self.options(requests, params, chains)))

    def check(self, chains: Sequence[Chain]) -> None:
        """That vLLM honours them; asked once."""
        if not self._checked and any(not chain.idle for chain in chains):
            check_processor(self.sampler, 5)
            self._checked = True

    def rollouts(
        self, requests: Requests, chains: Sequence[Chain], drawn: Sequence[VllmCompletion]
    ) -> tuple[Rollouts, list[list[float]]]:
        """What was drawn, with its records; and vLLM's log-probability of each token, over both sides of a coin that is
        thrown for every token."""
        broken = [one for one in drawn if one.reason not in ("stop", "length") or not one.token_ids]
        if broken:
            raise VllmError(f"vLLM ended {len(broken)} of {len(drawn)} requests with {broken[0].reason!r}")
        stops = StopStrings(requests.stops, self.tokenizer, 1)
        cuts = [stops.cut(i, np.array(one.token_ids)) for i, one in enumerate(drawn)]
        tokens = [one.token_ids[: None if cut is None else cut[0]] for one, cut in zip(drawn, cuts, strict=True)]
        known = compute_token_stats(self.stats_pass, requests, chains, tokens)
        found = [
            self._rollout(requests, i, ids, one.reason, None if cut is None else cut[1], known)
            for i, (ids, one, cut) in enumerate(zip(tokens, drawn, cuts, strict=True))
        ]
        coin = known.coin_logps.tolist()
        logps = [
            [value + more for value, more in zip(one.logps[: len(ids)], extra, strict=False)]
            for one, ids, extra in zip(drawn, tokens, coin, strict=True)
        ]
        return Rollouts(found, requests.prompts, requests.n, requests.seed), logps

    def _rollout(
        self, requests: Requests, i: int, ids: list[int], reason: str, stop: str | None, known: RecomputedStats
    ) -> Rollout:
        ended = stop is not None or (reason == "stop" and ids[-1] in requests.stop_sets[int(requests.stop_set[i])])
        size = len(ids)
        return Rollout(
            request=i,
            prompt_index=i // requests.n,
            sample_index=i % requests.n,
            token_ids=ids,
            logps=known.logps[i, :size],
            sampling_logps=known.sampling_logps[i, :size],
            entropy=known.entropy[i, :size],
            branching=known.branching[i, :size],
            finish_reason="stop" if ended else "length",
            tokenizer=self.tokenizer,
            stop=stop,
        )

    def release(self) -> None:
        """Lets go of a vLLM that `colocated` has made, and of its memory."""
        if not self._owns:
            return
        from vllm.distributed import cleanup_dist_env_and_memory

        assert isinstance(self.sampler, ColocatedVllm)
        self.sampler.llm.llm_engine.engine_core.shutdown()
        del self.sampler.llm
        self._owns = False
        cleanup_dist_env_and_memory()


def _written(model: Any, tokenizer: Any, folder: Path) -> str:
    """The weights as they are now, with adapters merged into them."""
    if hasattr(model, "merge_and_unload"):
        model = copy.deepcopy(model).merge_and_unload()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
