"""GRPO with exploration strategies, on top of TRL."""
