"""Clients, dialects and the pool of engines."""
