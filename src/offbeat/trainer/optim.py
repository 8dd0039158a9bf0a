"""AdamW over a model's parameters, and the learning rate of each step."""

import math

import torch
from torch import nn

from offbeat.config.train import OptimizerConfig


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
