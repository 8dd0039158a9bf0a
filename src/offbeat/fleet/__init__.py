"""Engines in service: who serves, what adapters each holds, where requests go, and how versions reach them."""
