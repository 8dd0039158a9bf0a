"""The settings of one AdamW update, which may differ from step to step and from adapter to adapter, and their schedule. Torch-free."""

import math
from dataclasses import dataclass

from offbeat.config.train import OptimizerConfig
from offbeat.errors import ConfigError

MAX_LR = 10.0
"""A step changes each weight by about the learning rate; far beyond this, float32 weights overflow."""


@dataclass(frozen=True, kw_only=True)
class AdamParams:
    """AdamW (Loshchilov and Hutter 2019, Algorithm 2), after clipping the gradient by its norm.

    Attributes:
        lr: step size, below `MAX_LR`.
        eps: added to the root of the second moment.
        weight_decay: decoupled; each step subtracts lr * weight_decay times the weights.
        clip_norm: a gradient of a larger norm is scaled down to it; 0 disables clipping.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 0.0

    def __post_init__(self) -> None:
        limits = {"lr": MAX_LR, "beta1": 1, "beta2": 1, "weight_decay": math.inf, "clip_norm": math.inf}
        for name, high in limits.items():
            if not 0 <= (value := getattr(self, name)) < high:
                raise ConfigError(f"{name} of an optimizer step must be at least 0 and below {high}, got {value!r}")
        if not 0 < self.eps < math.inf:
            raise ConfigError(f"eps of an optimizer step must be positive, got {self.eps!r}")


def adam_params(step: int, *, config: OptimizerConfig, total_steps: int) -> AdamParams:
    """Return the settings of training step `step`, counted from 0, in a schedule of `total_steps`."""
    return AdamParams(
        lr=learning_rate(step, config=config, total_steps=total_steps), beta1=config.beta1, beta2=config.beta2, eps=config.eps,
        weight_decay=config.weight_decay, clip_norm=config.clip_norm)


def learning_rate(step: int, *, config: OptimizerConfig, total_steps: int) -> float:
    """Return the learning rate of step `step`, counted from 0.

    The warm-up rises linearly, e.g. 0.1, 0.2, ... times the peak over 10 steps, and reaches the peak with its last step; the decay starts
    at the peak and reaches `min_lr_ratio` times the peak with step `total_steps - 1`, where it stays.
    """
    if step < config.warmup_steps:
        return config.peak * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - 1 - config.warmup_steps))
    remaining = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}[config.schedule]
    return config.peak * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * remaining)
