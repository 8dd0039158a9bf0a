"""Devices, process groups, collectives and sync points; no other package touches them."""
