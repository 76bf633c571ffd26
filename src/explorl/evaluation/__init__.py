"""Evaluations: sample, verify and score, under a protocol that can be named."""

from explorl.evaluation.core import Evaluation, evaluate, fitting_template
from explorl.evaluation.protocols import PROTOCOLS, Protocol, protocol

__all__ = ["PROTOCOLS", "Evaluation", "Protocol", "evaluate", "fitting_template", "protocol"]
