"""One typed configuration for every command: defaults, a preset, a YAML file and `--set key=value`, in that order."""

from explorl.core.config.changes import RESUMABLE, changed_keys, resumed_config, rft_config, with_defaults
from explorl.core.config.checks import check_engine, check_precision, check_trackers, unsandboxed_code
from explorl.core.config.loading import adapt_preset, apply_overrides, load_config, presets, read_yaml
from explorl.core.config.schema import (
    CISPO_BOUND,
    Config,
    Count,
    DynamicSamplingSettings,
    EvaluationSettings,
    LensSettings,
    LoraSettings,
    ModelSettings,
    RftSettings,
    RolloutSettings,
    Section,
    SftSettings,
    SkipSolvedSettings,
    TaskSettings,
    TrainingSettings,
)
from explorl.core.errors import ConfigError

__all__ = [
    "CISPO_BOUND",
    "RESUMABLE",
    "Config",
    "ConfigError",
    "Count",
    "DynamicSamplingSettings",
    "EvaluationSettings",
    "LensSettings",
    "LoraSettings",
    "ModelSettings",
    "RftSettings",
    "RolloutSettings",
    "Section",
    "SftSettings",
    "SkipSolvedSettings",
    "TaskSettings",
    "TrainingSettings",
    "adapt_preset",
    "apply_overrides",
    "changed_keys",
    "check_engine",
    "check_precision",
    "check_trackers",
    "load_config",
    "presets",
    "read_yaml",
    "resumed_config",
    "rft_config",
    "unsandboxed_code",
    "with_defaults",
]
