"""Dialects: how each kind of engine is called and how its answers are read. One module per kind contains all of its quirks."""
