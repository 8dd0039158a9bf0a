"""Admission, execution of workflows, rewards."""
