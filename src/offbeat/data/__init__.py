"""Rows, tokenizers, trajectories and batches, and their packing and balancing; in numpy, without torch."""
