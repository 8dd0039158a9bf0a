"""The HTTP front of the service: routes, keys, limits on bodies, the status page and metrics. It turns bytes into calls of the core."""
