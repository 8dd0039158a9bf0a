"""Bridges to libraries that own their loop: single files that run under another Python. Nothing here imports them."""
