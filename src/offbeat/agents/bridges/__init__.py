"""Bridges to libraries that own their loop: single files that run under another Python, of which nothing here imports anything."""
