"""Noise planted in an engine's routers, for tests and benchmarks of replayed experts; no part of what a run can be set to."""

import torch

from offbeat.engine.engine import EmbeddedEngine
from offbeat.model.route_replay import choosing, find_routers


def plant_noise(engine: EmbeddedEngine, *, share: float = 0.5, seed: int = 5) -> None:
    """Let every router of an engine choose other experts than its own for a share of the tokens, as if its scores were off."""
    generator = torch.Generator().manual_seed(seed)
    for router in find_routers(engine._forward._model):  # pyright: ignore
        plain, num_experts = router.forward, router.num_experts

        def noisy(states, plain=plain, num_experts=num_experts):
            chosen = plain(states)[2]
            shift = (torch.rand(len(chosen), 1, generator=generator) < share).long()
            with choosing((chosen + shift) % num_experts, num_experts):
                return plain(states)

        router.forward = noisy
