"""Agents that play episodes: their calls recorded token by token, their sessions, their processes and their tools. Torch-free."""
