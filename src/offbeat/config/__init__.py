"""Typed configuration: one module per section, composed in `root`."""
