"""Composition of a run from its configuration, with a loop or with many adapters; torch-free."""
