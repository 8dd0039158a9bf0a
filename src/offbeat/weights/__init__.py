"""Versions of weights: manifests, names, the channels by which they leave the trainer, and the proofs of engines."""
