"""Typed configuration: one module per layer, composed in `root`."""
