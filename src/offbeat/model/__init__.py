"""Causal language models: loading, writing and building them, packed attention, LoRA, and log-probabilities."""
