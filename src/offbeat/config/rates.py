"""Learning rates in place of "auto": a table by kind of training, weights and width of the model. Data and one function, torch-free.

`offbeat.runs.learning_rates` applies it to a run. The width (`hidden_size`) stands for a model's size, as in Tinker's rule and in
mu-parametrisation: every config.json has it, and the experts of a mixture do not change it. Sources of the rows:

- SFT: SmolLM2's recipes have 1e-3 for the base models of 135M and 360M and 3e-4 for 1.7B; TRL 2e-5; Tulu 3 5e-6 for 8B and 2e-6 for 70B
  (arXiv:2411.15124); Tinker's sweep over 25 models a tenth of 3e-4 to 1e-3.
- Preferences: SmolLM2's recipes and TRL 1e-6; Zephyr and Tulu 3 5e-7 for 7B and 8B; Tulu 3 2e-7 for 70B; Zephyr's adapter 5e-6.
- Reward models: InstructGPT 9e-6 for 6B; TRL's examples 1e-5 for 0.5B, and 1e-4 for an adapter; Tulu 3 3e-6 for 8B.
- Reinforcement learning: TRL, verl and slime 1e-6; Tulu 3 3e-7 for 8B; verl 1e-5 for critics.
- Distillation on the policy's own samples, which has a signal at every token: Tinker 1e-4 for an adapter.
- Adapters: ten times the rate of all weights, whatever their rank (Schulman and others, LoRA Without Regret, 2025; Tinker).

Short runs of models below 0.6B need higher rates than long runs of large ones: the first column has the rates of the examples, and some of
the second were measured (docs/choosing-settings.md). The other columns rest on the sources alone.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

Task = Literal["sft", "preference", "reward_model", "rl", "distillation", "critic"]

WIDTHS = (256, 1024, 2560, 5120)
"""Widest model of each column of `RATES` but the last: tiny ones, then about 0.6B, 4B and 30B parameters."""

RATES: Mapping[Task, tuple[float, ...]] = MappingProxyType({
    # width up to:    256   1024   2560   5120   more
    "sft":          (2e-3,  3e-5,  2e-5,  1e-5,  5e-6),
    "preference":   (2e-4,  5e-6,  1e-6,  5e-7,  2e-7),
    "reward_model": (1e-3,  3e-5,  1e-5,  5e-6,  3e-6),
    "rl":           (2e-4,  1e-5,  2e-6,  1e-6,  5e-7),
    "distillation": (2e-4,  5e-5,  2e-5,  1e-5,  5e-6),
    "critic":       (1e-3,  3e-5,  1e-5,  1e-5,  5e-6),
})  # fmt: skip
"""Peak rates of AdamW for all weights."""

ADAPTER_FACTOR = 10
"""Rate of an adapter, as a multiple of the rate of all weights."""


def choose_rate(task: Task, *, width: int, adapter: bool) -> float:
    """Return the peak learning rate for all weights of a model of this width, or an adapter, e.g. 1e-4 for an adapter, "rl", width 576."""
    column = sum(width > widest for widest in WIDTHS)
    # Through text, so that ten times 5e-7 is written 5e-06 and not 4.9999999999999996e-06.
    return float(f"{RATES[task][column] * (ADAPTER_FACTOR if adapter else 1):.6g}")
