"""Workflows: async functions that turn a prompt into trajectories."""
