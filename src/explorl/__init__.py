"""Exploration in RL fine-tuning of language models with verifiable rewards."""
