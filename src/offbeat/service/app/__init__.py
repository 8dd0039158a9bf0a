"""HTTP front of the service: routes, keys, limits on bodies, the status page and metrics. It turns requests into calls of the core."""
