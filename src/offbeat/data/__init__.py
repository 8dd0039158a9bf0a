"""Trajectories, batches, tokenizers and datasets, in numpy; no torch."""
