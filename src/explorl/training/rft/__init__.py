"""Rejection-sampling fine-tuning: sample, filter, select, fit, and again (Deng et al. 2025, §4.4.1 and Table 3).

`samples` defines a response, `filters` and `selectors` choose among responses, `registry` resolves them by name or
import path, `sampling` samples a pool, `folder` stores an iteration, and `loop` runs it all.
"""
