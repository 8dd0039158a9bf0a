"""Inference: the client of an engine, the dialects that engines speak, the pool of engines, and the embedded engine."""
