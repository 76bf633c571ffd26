"""When an advantage counts as zero."""

NO_ADVANTAGE = 1e-3
"""Smallest absolute advantage that counts. In a group of equal rewards, rounding divided by 1e-4 leaves less."""
