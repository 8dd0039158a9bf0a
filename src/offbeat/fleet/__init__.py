"""Engines in service: their standing, the adapters on them, the routing of requests, and the publishing of versions."""
