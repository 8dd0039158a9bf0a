"""Ratios and losses on tensors; their settings are rows of `offbeat.config.objectives`."""
