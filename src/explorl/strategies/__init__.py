"""Exploration strategies: one file per mechanism, with a pure function for its mathematics and a dataclass of hooks.

Strategies compose: the trainer takes a list and calls the hooks of each in this order. Advantages are changed one after
the other, so a strategy that replaces them (negative_reinforcement, passk_training, pkpo, maxrl, risk_sensitive,
quantile_baseline) must be listed first. Weights are multiplied and masks intersected, so their order does not matter.
If two strategies set the same sampling parameter or the clip, the later one wins. Weights use the final advantages.

Every tensor function computes in double precision without gradient, returns 0 for uncounted tokens and ignores padding.
Shaped advantages keep the dtype of the advantages; weights and masks are float32.
"""

from explorl.strategies._lib.covariance import token_covariance
from explorl.strategies._lib.schedule import Schedule, Scheduled, at
from explorl.strategies.annealed_temperature import AnnealedTemperature, annealed_temperatures
from explorl.strategies.base import Batch, Sampling, StepState, Strategy
from explorl.strategies.bottom_p import BottomP
from explorl.strategies.clip_cov import ClipCov, clip_cov_mask
from explorl.strategies.clip_higher import ClipHigher
from explorl.strategies.curriculum import Curriculum
from explorl.strategies.egsw import EntropyGuidedWeighting, egsw_weights
from explorl.strategies.element_wise_temperature import ElementWiseTemperature
from explorl.strategies.entropy_advantage import EntropyAdvantage, entropy_shaped
from explorl.strategies.entropy_bonus import EntropyBonus
from explorl.strategies.entropy_branching import EntropyBranching, shared_advantages, shared_rows
from explorl.strategies.forking_tokens import ForkingTokens, forking_mask
from explorl.strategies.grpo import grpo_advantages
from explorl.strategies.importance_correction import ImportanceCorrection, importance_weights
from explorl.strategies.kl_cov import KLCov, top_cov_mask
from explorl.strategies.lp_reg import LowProbabilityRegularization, proxy_penalty, shielded_tokens
from explorl.strategies.mask_truncated import MaskTruncated
from explorl.strategies.maxrl import MaxRL, maxrl_advantages
from explorl.strategies.negative_reinforcement import NegativeReinforcement, signed_advantages
from explorl.strategies.outcome_exploration import OutcomeExploration, repetition_penalties, ucb_bonuses
from explorl.strategies.overlong_penalty import OverlongPenalty, overlong_penalties
from explorl.strategies.pass_threshold import PassThreshold
from explorl.strategies.passk_training import PassKTraining, passk_advantages
from explorl.strategies.pkpo import PKPO, pkpo_advantages
from explorl.strategies.position_shaping import PositionShaping, position_shaped
from explorl.strategies.ppl_shaping import PerplexityShaping, ppl_shaped
from explorl.strategies.quantile_baseline import QuantileBaseline, quantile_advantages
from explorl.strategies.reference_reset import ReferenceReset
from explorl.strategies.registry import REGISTRY, build, build_all, describe, find, warn_inert
from explorl.strategies.risk_sensitive import RiskSensitive, risk_sensitive_advantages
from explorl.strategies.tool_progression import ToolProgression, allowed_calls
from explorl.strategies.ucpo import UniformCorrect, uniform_correct
from explorl.strategies.unlikeliness import Unlikeliness, unlikeliness_rewards

__all__ = [
    "PKPO",
    "REGISTRY",
    "AnnealedTemperature",
    "Batch",
    "BottomP",
    "ClipCov",
    "ClipHigher",
    "Curriculum",
    "ElementWiseTemperature",
    "EntropyAdvantage",
    "EntropyBonus",
    "EntropyBranching",
    "EntropyGuidedWeighting",
    "ForkingTokens",
    "ImportanceCorrection",
    "KLCov",
    "LowProbabilityRegularization",
    "MaskTruncated",
    "MaxRL",
    "NegativeReinforcement",
    "OutcomeExploration",
    "OverlongPenalty",
    "PassKTraining",
    "PassThreshold",
    "PerplexityShaping",
    "PositionShaping",
    "QuantileBaseline",
    "ReferenceReset",
    "RiskSensitive",
    "Sampling",
    "Schedule",
    "Scheduled",
    "StepState",
    "Strategy",
    "ToolProgression",
    "UniformCorrect",
    "Unlikeliness",
    "allowed_calls",
    "annealed_temperatures",
    "at",
    "build",
    "build_all",
    "clip_cov_mask",
    "describe",
    "egsw_weights",
    "entropy_shaped",
    "find",
    "forking_mask",
    "grpo_advantages",
    "importance_weights",
    "maxrl_advantages",
    "overlong_penalties",
    "passk_advantages",
    "pkpo_advantages",
    "position_shaped",
    "ppl_shaped",
    "proxy_penalty",
    "quantile_advantages",
    "repetition_penalties",
    "risk_sensitive_advantages",
    "shared_advantages",
    "shared_rows",
    "shielded_tokens",
    "signed_advantages",
    "token_covariance",
    "top_cov_mask",
    "ucb_bonuses",
    "uniform_correct",
    "unlikeliness_rewards",
    "warn_inert",
]
