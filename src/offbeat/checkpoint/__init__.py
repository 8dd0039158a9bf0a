"""Checkpoints: sharded ones to resume from, their recovery, and exports as Hugging Face folders."""
