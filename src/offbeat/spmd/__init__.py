"""SPMD mode: every rank that torchrun started runs the loop beside its own trainer."""
