"""Sharded training checkpoints, Hugging Face export and recovery."""
