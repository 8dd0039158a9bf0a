"""AdamW over a model's parameters or over the rows of a matrix, and the learning rate of each step."""

import math

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from offbeat.algorithms.adam import AdamParams
from offbeat.config.train import OptimizerConfig
from offbeat.model.lora import doubled


def learning_rate(step: int, *, config: OptimizerConfig, total_steps: int) -> float:
    """The learning rate of step `step`, counted from 0.

    The warm-up rises in equal parts and reaches the peak with its last step; the decay starts at the peak and reaches
    `min_lr_ratio` times the peak with step `total_steps - 1`, where it stays.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - 1 - config.warmup_steps))
    remaining = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}[config.schedule]
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * remaining)


def build_optimizer(model: nn.Module, *, config: OptimizerConfig) -> torch.optim.AdamW:
    """Fused AdamW; weight decay leaves out norms and biases, which are the parameters of one dimension."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


class RowAdam:
    """AdamW whose every row has its own moments, step count and settings; rows that are not updated keep every bit.

    Attributes:
        exp_avg, exp_avg_sq: [N, P] float32, the moments.
        steps: [N] float32, updates done.
    """

    def __init__(self, weights: Tensor) -> None:
        """`weights` is [N, P] float32 and updated in place."""
        self._weights = weights
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(weights), torch.zeros_like(weights)
        self.steps = torch.zeros(len(weights), device=weights.device)

    @torch.no_grad()
    def update(self, row: int, gradient: Tensor, params: AdamParams, *, norm: float) -> None:
        """One step of one row.

        Args:
            gradient: [P] float32, of this norm; changed by the clip.
        """
        excess = (norm + 1e-6) / params.clip_norm if params.clip_norm else 1.0
        divisor = torch.tensor(excess, device=gradient.device) if excess > 1.0 else None
        adamw(
            [self._weights[row]], [gradient], [self.exp_avg[row]], [self.exp_avg_sq[row]], [], [self.steps[row]], fused=True, amsgrad=False,
            grad_scale=divisor, beta1=params.beta1, beta2=params.beta2, lr=params.lr, weight_decay=params.weight_decay, eps=params.eps,
            maximize=False)

    def set(self, row: int, *, exp_avg: Tensor, exp_avg_sq: Tensor, step: int) -> None:
        """Go on from elsewhere's moments [P] and step count."""
        self.exp_avg[row], self.exp_avg_sq[row], self.steps[row] = exp_avg, exp_avg_sq, step

    def clear(self, row: int) -> None:
        """Start over."""
        for state in (self.exp_avg, self.exp_avg_sq, self.steps):
            state[row] = 0.0

    def follow(self, weights: Tensor) -> None:
        """Go on with weights that have more rows than before."""
        self._weights = weights
        while len(self.steps) < len(weights):
            self.exp_avg, self.exp_avg_sq, self.steps = map(doubled, (self.exp_avg, self.exp_avg_sq, self.steps))
