"""Rollouts: admission of prompts, execution of workflows, and rewards."""
