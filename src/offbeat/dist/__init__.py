"""The only home of devices, process groups and collectives."""
