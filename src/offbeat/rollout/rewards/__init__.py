"""Reward functions, called by dotted name in a pool of processes."""
