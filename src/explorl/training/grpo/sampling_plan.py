"""How one call of the engine is sampled: TRL's options in the engine's words, and what strategies say of each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from explorl.rollout import SamplingParams
from explorl.strategies import Strategy
from explorl.strategies._lib.validate import title
from explorl.strategies.base import overrides
from explorl.training.grpo.branches import branching_of

KNOWN = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
    "do_sample",
    "eos_token_id",
    "stop_strings",
}
"""Options of `generate` that the engine honours."""
IRRELEVANT_OPTIONS = {
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

ROW_OPTIONS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "bottom_p",
    "bottom_p_frequency",
    "bottom_p_per_sequence",
    "training_temperature",
    "max_tokens",
    "temperature_by_position",
    "tool_calls",
)
"""What a strategy may set for each row (`explorl.strategies.base.Sampling`)."""


def unsupported_options(given: Mapping[str, Any], declared: GenerationConfig | None) -> dict[str, Any]:
    """Options of TRL's call of `generate`, or of the model's own generation config, that the engine does not have."""
    defaults = GenerationConfig()
    asked = declared.to_diff_dict() if declared is not None else {}
    asked |= {name: value for name, value in given.items() if value is not None}
    return {
        name: value
        for name, value in asked.items()
        if name not in KNOWN | IRRELEVANT_OPTIONS and value != getattr(defaults, name, None) and not _off(name, value)
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
        "max_tokens": int(given["max_new_tokens"]),
        "stop_token_ids": list(ends),
    }


def _checked_row_values(strategy: Strategy, given: Any, rows: int) -> dict[str, Any]:
    """What a strategy says of sampling, one value per row; one number for all rows is spread over them."""
    said = dict(given or {})
    for key, value in said.items():
        if key not in ROW_OPTIONS:
            raise ValueError(f"{title(strategy)}.sampling gives {key!r}; it may give {', '.join(ROW_OPTIONS)}")
        value = value.tolist() if isinstance(value, Tensor) else value
        said[key] = [value] * rows if isinstance(value, Real) else list(value)
        if key == "temperature_by_position" and any(isinstance(one, Real) for one in said[key]):
            raise ValueError(
                f"{title(strategy)}.sampling gives one number as a row's {key!r}; give each row a sequence, such as "
                "[1.2, 1.1, 1.0]"
            )
        if len(said[key]) != rows:
            raise ValueError(
                f"{title(strategy)}.sampling gives {len(said[key])} values of {key!r} for {rows} rows; give one per row"
            )
    return said


_EXCLUSIVE = {"temperature": "temperature_by_position", "temperature_by_position": "temperature"}
"""What takes the place of what an earlier strategy said."""


class SamplingPlan:
    """How the rows of one call of the engine are sampled, and at which temperature the loss looks at them."""

    def __init__(
        self,
        options: dict[str, Any],
        strategies: Sequence[Strategy],
        prompts: Sequence[str],
        step: int,
        interprets: bool = True,
    ) -> None:
        said: dict[str, Any] = {}
        for strategy in strategies:
            if overrides(strategy, "sampling"):
                own_words = _checked_row_values(strategy, strategy.sampling(prompts, step), len(prompts))
                if "tool_calls" in own_words and not interprets:
                    raise ValueError(
                        f"{title(strategy)}.sampling gives 'tool_calls', and there is no tool to call; give "
                        "interpreter='python' (rollout.tools in a configuration), or leave it out"
                    )
                for key, other in _EXCLUSIVE.items():
                    if key in own_words:
                        said.pop(other, None)
                        said.pop("training_temperature", None)  # it went with the temperature that is replaced
                said.update(own_words)
            if strategy.needs_min_p_mass is not None:
                said["min_p_mass"] = strategy.needs_min_p_mass
        if any(said.pop("bottom_p_per_sequence", [])):
            said["bottom_p_per"] = "sequence"
        own = said.pop("training_temperature", None)
        # Whether rows have temperatures of their own is up to the strategies, not to their values: so all processes
        # agree on it, also where the prompts of one of them happen to have the trainer's temperature.
        # By position, each row has a sequence of them.
        self.sampling_temperature: Sequence[Any] | None = said.get("temperature_by_position", said.get("temperature"))
        self.training_temperature: Sequence[Any] | None = self.sampling_temperature if own is None else own
        """None is that of the trainer."""
        self.calls: Sequence[int] | None = said.pop("tool_calls", None)
        """Most calls of a tool, one number per row; None is as many as the tool allows."""
        self._temperature = options.get("temperature", 1.0)
        self.params = SamplingParams(**{**options, **said})
        self.branching = branching_of(strategies, step)

    def spread(self, rows: int, temperature: float) -> None:
        """So many rows are sampled at the temperature of the options, where no strategy gives them one, and the loss
        looks at them at this one: `generation_kwargs` may have another than `GRPOConfig`."""
        at = self._temperature or 1.0  # what is greedy is recorded at 1
        if self.sampling_temperature is None and at != temperature:
            self.sampling_temperature = [at] * rows

    def reorder(self, settings: Sequence[int]) -> None:
        """Each row was sampled as the one that ``settings`` names."""
        same = self.training_temperature is self.sampling_temperature
        if self.sampling_temperature is not None:
            self.sampling_temperature = [self.sampling_temperature[row] for row in settings]
        if same:
            self.training_temperature = self.sampling_temperature
        elif self.training_temperature is not None:
            self.training_temperature = [self.training_temperature[row] for row in settings]


def pad_schedules(curves: Sequence[Sequence[float]], width: int) -> list[list[float]]:
    """Sequences of any length as rows of so many positions; the last value holds on."""
    known: dict[int, list[float]] = {}  # rows mostly share one
    for curve in curves:
        if id(curve) not in known:
            held = list(curve[:width])
            known[id(curve)] = held + [held[-1]] * (width - len(held))
    return [known[id(curve)] for curve in curves]
