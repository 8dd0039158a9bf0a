"""How much memory an engine's cache may take, where nobody has said. Called by the engine when it is made."""

import torch

from offbeat.machine import machine_bytes

CPU_SHARE = 0.25
"""Of a machine's memory, for the caches of all engines on it: the rest is for weights, staged weights, and a trainer beside them."""

DEVICE_SHARE = 0.5
"""Of what is free on an accelerator once the model is there: the other half takes a staged version and what a step computes with."""


def default_cache_bytes(device: torch.device, *, num_engines: int) -> int:
    """A share of the memory that `device` computes in; `num_engines` share a machine, while an accelerator has one engine."""
    if device.type == "cpu":
        return int(CPU_SHARE * machine_bytes() / num_engines)
    free, _ = torch.accelerator.get_memory_info(device)
    return int(DEVICE_SHARE * free)
