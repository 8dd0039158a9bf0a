"""Workflows: one async function that turns a prompt into trajectories."""
