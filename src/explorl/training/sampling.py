"""What TRL's options say about sampling, in the engine's words; and what the engine has no word for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import GenerationConfig

from explorl.rollout import SamplingParams
from explorl.strategies import Strategy
from explorl.strategies.base import overrides

KNOWN = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
    "do_sample",
    "eos_token_id",
}
"""Options of `generate` that the engine honours."""
OF_NO_MATTER = {
    "pad_token_id",
    "bos_token_id",
    "decoder_start_token_id",
    "cache_implementation",
    "cache_config",
    "use_cache",
    "disable_compile",
    "compile_config",
    "return_dict_in_generate",
    "max_length",
    "transformers_version",
    "_from_model_config",
    "trust_remote_code",
}
"""Options of `generate` that change no token that an engine with a cache of its own samples (TRL gives
`max_new_tokens`, beside which `max_length` does not count)."""


def beyond_the_engine(given: Mapping[str, Any], declared: GenerationConfig | None) -> dict[str, Any]:
    """Options of TRL's call of `generate`, or of the model's own generation config, that the engine does not have."""
    defaults = GenerationConfig()
    asked = declared.to_diff_dict() if declared is not None else {}
    asked |= {name: value for name, value in given.items() if value is not None}
    return {
        name: value
        for name, value in asked.items()
        if name not in KNOWN | OF_NO_MATTER and value != getattr(defaults, name, None) and not _off(name, value)
    }


def _off(name: str, value: Any) -> bool:
    """Whether a value leaves `generate` as it is."""
    ones = {"num_beams", "num_return_sequences", "num_beam_groups", "length_penalty", "typical_p", "guidance_scale"}
    return value is None or value is False or value == [] or (name in ones and value == 1)


def sampling_options(given: Mapping[str, Any], eos: Sequence[int]) -> dict[str, Any]:
    """TRL's options of `generate` as arguments of `SamplingParams`."""
    greedy = given.get("do_sample") is False
    ends = given.get("eos_token_id")
    ends = eos if ends is None else [ends] if isinstance(ends, int) else ends

    def number(name: str, off: float) -> Any:
        value = given.get(name)
        return off if value is None else value

    return {
        "temperature": 0.0 if greedy else number("temperature", 1.0),
        "top_p": number("top_p", 1.0),
        "top_k": max(0, int(number("top_k", 0))),
        "min_p": number("min_p", 0.0),
        "repetition_penalty": number("repetition_penalty", 1.0),
        "max_tokens": int(number("max_new_tokens", 256)),
        "stop_token_ids": list(ends),
    }


class Draw:
    """How the rows of one call of the engine are sampled, and at which temperature the loss looks at them."""

    def __init__(
        self, options: dict[str, Any], strategies: Sequence[Strategy], prompts: Sequence[str], step: int
    ) -> None:
        said: dict[str, Any] = {}
        for strategy in strategies:
            if overrides(strategy, "sampling"):
                said.update(strategy.sampling(prompts, step))
        if any(said.pop("bottom_p_per_sequence", [])):
            said["bottom_p_per"] = "sequence"
        own = said.pop("training_temperature", None)
        # Whether rows have temperatures of their own is up to the strategies, not to their values: so all processes
        # agree on it, also where the prompts of one of them happen to have the trainer's temperature.
        self.sampling_temperature: Sequence[float] | None = said.get("temperature")
        self.training_temperature: Sequence[float] | None = said.get("temperature") if own is None else own
        self.params = SamplingParams(**{**options, **said})
