"""Countdown: reach a target from numbers by arithmetic."""
