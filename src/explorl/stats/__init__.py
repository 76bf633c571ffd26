"""How sure we are: intervals, paired differences, resampling, interim looks and regression."""

from __future__ import annotations

from explorl.stats.interval import Interval
from explorl.stats.p_values import permutation_test
from explorl.stats.resample import bootstrap_mean, paired_difference
from explorl.stats.table import Cell, Table

__all__ = ["Cell", "Interval", "Table", "bootstrap_mean", "paired_difference", "permutation_test"]
