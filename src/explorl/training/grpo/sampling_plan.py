"""How one call of the engine samples: TRL's options as `SamplingParams`, and the strategies' settings of each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from explorl.rollout import SamplingParams
from explorl.strategies import Strategy
from explorl.strategies._lib.validate import name_of
from explorl.strategies.base import overrides
from explorl.training.grpo.branches import branching_of

HONOURED_OPTIONS = {
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
"""Options of `generate` that change no token sampled by an engine with its own cache (`max_length` has no effect beside
the `max_new_tokens` that TRL sets)."""

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


def unsupported_options(generate_options: Mapping[str, Any], declared: GenerationConfig | None) -> dict[str, Any]:
    """Return the options of TRL's call of `generate`, or of the model's generation config, that the engine lacks."""
    defaults = GenerationConfig()
    options = declared.to_diff_dict() if declared is not None else {}
    options |= {name: value for name, value in generate_options.items() if value is not None}
    return {
        name: value
        for name, value in options.items()
        if name not in HONOURED_OPTIONS | IRRELEVANT_OPTIONS
        and value != getattr(defaults, name, None)
        and not _is_disabled(name, value)
    }


def _is_disabled(name: str, value: Any) -> bool:
    """Tell whether an option with this value has no effect on `generate`."""
    no_effect_at_one = {
        "num_beams",
        "num_return_sequences",
        "num_beam_groups",
        "length_penalty",
        "typical_p",
        "guidance_scale",
    }
    return value is None or value is False or value == [] or (name in no_effect_at_one and value == 1)


def sampling_options(generate_options: Mapping[str, Any], eos: Sequence[int]) -> dict[str, Any]:
    """Convert TRL's options of `generate` to arguments of `SamplingParams`."""
    greedy = generate_options.get("do_sample") is False
    stop_tokens = generate_options.get("eos_token_id")
    stop_tokens = eos if stop_tokens is None else [stop_tokens] if isinstance(stop_tokens, int) else stop_tokens

    def number(name: str, off: float) -> Any:
        value = generate_options.get(name)
        return off if value is None else value

    return {
        "temperature": 0.0 if greedy else number("temperature", 1.0),
        "top_p": number("top_p", 1.0),
        "top_k": max(0, int(number("top_k", 0))),
        "min_p": number("min_p", 0.0),
        "repetition_penalty": number("repetition_penalty", 1.0),
        "max_tokens": int(generate_options["max_new_tokens"]),
        "stop_token_ids": list(stop_tokens),
    }


def _checked_row_settings(strategy: Strategy, settings: Any, rows: int) -> dict[str, Any]:
    """Return a strategy's sampling settings, one value per row; a single number applies to all rows."""
    settings = dict(settings or {})
    for key, value in settings.items():
        if key not in ROW_OPTIONS:
            raise ValueError(f"{name_of(strategy)}.sampling returns {key!r}; it may return {', '.join(ROW_OPTIONS)}")
        value = value.tolist() if isinstance(value, Tensor) else value
        settings[key] = [value] * rows if isinstance(value, Real) else list(value)
        if key == "temperature_by_position" and any(isinstance(schedule, Real) for schedule in settings[key]):
            raise ValueError(
                f"{name_of(strategy)}.sampling returns a single number as a row's {key!r}; return a sequence for each "
                "row, such as [1.2, 1.1, 1.0]"
            )
        if len(settings[key]) != rows:
            raise ValueError(
                f"{name_of(strategy)}.sampling returns {len(settings[key])} values of {key!r} for {rows} rows; return "
                "one per row"
            )
    return settings


_EXCLUSIVE = {"temperature": "temperature_by_position", "temperature_by_position": "temperature"}
"""A setting, and the one of an earlier strategy that it replaces."""


class SamplingPlan:
    """How the rows of one call of the engine are sampled, and the temperature that the loss uses for each of them."""

    def __init__(
        self,
        options: dict[str, Any],
        strategies: Sequence[Strategy],
        prompts: Sequence[str],
        step: int,
        has_interpreter: bool = True,
    ) -> None:
        settings: dict[str, Any] = {}
        for strategy in strategies:
            if overrides(strategy, "sampling"):
                new_settings = _checked_row_settings(strategy, strategy.sampling(prompts, step), len(prompts))
                if "tool_calls" in new_settings and not has_interpreter:
                    raise ValueError(
                        f"{name_of(strategy)}.sampling returns 'tool_calls', but there is no tool to call; set "
                        "interpreter='python' (rollout.tools in a configuration), or remove the strategy"
                    )
                for key, replaced in _EXCLUSIVE.items():
                    if key in new_settings:
                        settings.pop(replaced, None)
                        settings.pop("training_temperature", None)  # it belongs to the temperature that is replaced
                settings.update(new_settings)
            if strategy.needs_min_p_mass is not None:
                settings["min_p_mass"] = strategy.needs_min_p_mass
        if any(settings.pop("bottom_p_per_sequence", [])):
            settings["bottom_p_per"] = "sequence"
        training = settings.pop("training_temperature", None)
        # The strategies decide whether there is a temperature per row, not the values: so all processes agree on it,
        # even if the prompts of one of them happen to have the trainer's temperature.
        self.sampling_temperature: Sequence[Any] | None = settings.get(
            "temperature_by_position", settings.get("temperature")
        )
        """One number per row, or one sequence per row if the temperature goes by position."""
        self.training_temperature: Sequence[Any] | None = self.sampling_temperature if training is None else training
        """None means the trainer's temperature."""
        self.calls: Sequence[int] | None = settings.pop("tool_calls", None)
        """Maximum number of tool calls of each row; None means the tool's own limit."""
        self._temperature = options.get("temperature", 1.0)
        self.params = SamplingParams(**{**options, **settings})
        self.branching = branching_of(strategies, step)

    def set_default_temperature(self, rows: int, temperature: float) -> None:
        """Record the temperature of the options for each row unless a strategy has set one.

        The loss uses ``temperature``, that of `GRPOConfig`; `generation_kwargs` may contain a different one.
        """
        sampled_at = self._temperature or 1.0  # greedy tokens are recorded at temperature 1
        if self.sampling_temperature is None and sampled_at != temperature:
            self.sampling_temperature = [sampled_at] * rows

    def reorder(self, settings: Sequence[int]) -> None:
        """Give each row the temperatures of the row that it was sampled as: ``settings[row]``."""
        same = self.training_temperature is self.sampling_temperature
        if self.sampling_temperature is not None:
            self.sampling_temperature = [self.sampling_temperature[row] for row in settings]
        if same:
            self.training_temperature = self.sampling_temperature
        elif self.training_temperature is not None:
            self.training_temperature = [self.training_temperature[row] for row in settings]


def pad_schedules(schedules: Sequence[Sequence[float]], width: int) -> list[list[float]]:
    """Cut or extend schedules to ``width`` positions, repeating the last value."""
    padded: dict[int, list[float]] = {}  # most rows share one schedule
    for schedule in schedules:
        if id(schedule) not in padded:
            values = list(schedule[:width])
            padded[id(schedule)] = values + [values[-1]] * (width - len(values))
    return [padded[id(schedule)] for schedule in schedules]
