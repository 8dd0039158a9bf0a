"""Default size of an engine's cache where the settings give none. Called by the engine when it is created."""

import torch

from offbeat.machine import machine_bytes

CPU_SHARE = 0.25
"""Share of a machine's memory for the caches of all its engines; the rest is for weights, staged weights and a trainer beside them."""

DEVICE_SHARE = 0.5
"""Share of an accelerator's memory that is free once the model is loaded; the rest is for a staged version and a step's activations."""


def default_cache_bytes(device: torch.device, *, num_engines: int) -> int:
    """Return the default cache size in bytes: `num_engines` share a machine's memory, while an accelerator has one engine."""
    if device.type == "cpu":
        return int(CPU_SHARE * machine_bytes() / num_engines)
    free, _ = torch.accelerator.get_memory_info(device)
    return int(DEVICE_SHARE * free)
