"""Supervised fine-tuning in packed rows."""
