"""Rejection-sampling fine-tuning: sample, filter, select, fit, and again (Deng et al. 2025, §4.4.1 and Table 3).

`samples` says what a response is, `filters` and `selectors` choose among them, `registry` finds those by name or import
path, `sampling` draws a pool, `folder` keeps an iteration, and `loop` runs them all.
"""
