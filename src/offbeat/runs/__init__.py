"""Composition: how a configuration becomes a run, with a loop or with many adapters; torch-free."""
