"""The settings of one AdamW update, which may differ from step to step and from tenant to tenant. Torch-free."""

import math
from dataclasses import dataclass

from offbeat.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AdamParams:
    """AdamW (Loshchilov and Hutter 2019, Algorithm 2), with a clip of the gradient's norm before it.

    Attributes:
        lr: step size.
        beta1, beta2: decay of the first and the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled; lr * weight_decay of the weights is taken off.
        clip_norm: the gradient is scaled down to this norm; 0 is off.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 0.0

    def __post_init__(self) -> None:
        limits = {"lr": math.inf, "beta1": 1, "beta2": 1, "weight_decay": math.inf, "clip_norm": math.inf}
        for name, high in limits.items():
            if not 0 <= (value := getattr(self, name)) < high:
                raise ConfigError(f"{name} of an optimizer step must be at least 0 and below {high}, got {value!r}")
        if not 0 < self.eps < math.inf:
            raise ConfigError(f"eps of an optimizer step must be positive, got {self.eps!r}")
