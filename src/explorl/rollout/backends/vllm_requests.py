"""Translate our requests into arguments of vLLM, and hold the completions it returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from explorl.rollout.backends.chain import Chain
from explorl.rollout.requests import Requests
from explorl.rollout.sampling import SamplingParams, rng

TEMPERATURES = 1e-2, 2.0
"""Range that vLLM divides by. Outside of it the logits processor does, except for 0, which is greedy."""


class VllmCompletion(NamedTuple):
    """A completion as vLLM returns it."""

    token_ids: list[int]
    logps: list[float]
    """Log-probability of each token, in the distribution that ``logprobs_mode`` selects."""
    reason: str


def refuse(params: SamplingParams) -> None:
    """Raise `ValueError` for parameters that vLLM does not support, and name an alternative."""
    if params.min_p_mass is not None:
        raise ValueError(f"min_p_mass is {params.min_p_mass}, which vLLM does not record; sample with engine='explorl'")


def build_chains(requests: Requests, params: SamplingParams) -> list[Chain]:
    """Return the chain that the logits processor applies to each request; an idle one if it is greedy."""
    rows, keys = requests.rows, rng.request_keys(requests.seed, range(len(requests)))
    per_sequence = int(params.bottom_p_per == "sequence")
    chains = []
    for i in range(len(requests)):
        if not requests.curves and rows["temperature"][i] == 0:
            chains.append(Chain())
            continue
        temperature = float(rows["temperature"][i])
        constant = () if TEMPERATURES[0] <= temperature <= TEMPERATURES[1] else (temperature,)
        coin = bool(rows["bottom_p"][i] < 1 and rows["bottom_p_frequency"][i] < 1)
        chain = Chain(
            top_k=int(rows["top_k"][i]),
            top_p=float(rows["top_p"][i]),
            min_p=float(rows["min_p"][i]),
            bottom_p=float(rows["bottom_p"][i]),
            bottom_p_frequency=float(rows["bottom_p_frequency"][i]) if coin else 1.0,
            bottom_p_per_sequence=per_sequence if coin else 0,
            temperatures=tuple(requests.curves[int(rows["curve"][i])]) if requests.curves else constant,
            key=int(keys[i]) if coin else None,
        )
        chains.append(chain)
    return chains


def request_options(requests: Requests, params: SamplingParams, chains: Sequence[Chain]) -> list[dict[str, Any]]:
    """Return the arguments of vLLM's `SamplingParams` for each request.

    If `SamplingParams.seed` is set, vLLM samples each request with its own stream of random numbers, and the same call
    gives the same tokens. If it is None, vLLM uses one stream for all, which is faster.
    """
    rows, keys = requests.rows, rng.request_keys(requests.seed, range(len(requests)))
    arguments = []
    for i, chain in enumerate(chains):
        options: dict[str, Any] = {
            "n": 1,
            "temperature": 1.0 if chain.temperatures else float(rows["temperature"][i]),
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": float(rows["repetition_penalty"][i]),
            "max_tokens": int(rows["max_tokens"][i]),
            "stop": list(requests.stops[i]),
            "include_stop_str_in_output": True,
            "stop_token_ids": list(requests.stop_sets[int(rows["stop_set"][i])]),
            "ignore_eos": True,  # stop_token_ids contains it if needed
            "logprobs": 0,
            "detokenize": bool(requests.stops[i]),
        }
        if params.seed is not None:
            options["seed"] = int(keys[i]) & (2**62 - 1)
        if extra := chain.extra_args():
            options["extra_args"] = extra
        arguments.append(options)
    return arguments
