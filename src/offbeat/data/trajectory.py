"""What a rollout produces: trajectories, and groups of them that share a prompt. Frozen; numpy; no torch.

A worked example, prompt "31>" answered "13" and an end token (ids invented):

    tokens            [3, 1, 9,   1,    3,    0]
    loss_mask         [F, F, F,   T,    T,    T]
    rollout_logprobs  [0, 0, 0,  -.1,  -.2,  -.1]    of each token, under the policy that sampled it
    versions          [-1, -1, -1, 4,   4,    5]     a publish landed before the last token
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from offbeat.data.reward import FailedReward, check_reward
from offbeat.errors import DataError
from offbeat.types import PROMPT_VERSION, Version

Unusable = Literal["reward failed", "too long"]
"""Why a trajectory is not trained on, as the first words of its reason."""

DTYPES = {"tokens": np.int32, "loss_mask": np.bool_, "rollout_logprobs": np.float32, "versions": np.int32}


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One finished episode of L tokens.

    Attributes:
        tokens: [L] int32, prompt and generated tokens in order.
        loss_mask: [L] bool, True where the policy generated the token.
        rollout_logprobs: [L] float32, log-probability of each generated token under the distribution it was sampled from; 0 elsewhere.
        versions: [L] int32, weight version that sampled each generated token; -1 elsewhere.
        reward: outcome reward of the whole episode; NaN where there is none that can be trained on.
        reason: why it ended: "stop" or "length"; or why it is not trained on, "reward failed: ..." or "too long: ...".
        num_retries: engines that failed its requests before others finished them.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    versions: np.ndarray
    reward: float
    reason: str = "stop"
    num_retries: int = 0

    def __post_init__(self) -> None:
        length = len(self.tokens)
        for name, dtype in DTYPES.items():
            array = np.asarray(getattr(self, name), dtype=dtype)
            if array.shape != (length,):
                raise DataError(f"Trajectory.{name} must have shape ({length},) like tokens, got {array.shape}")
            object.__setattr__(self, name, array)
        reward = check_reward(self.reward)
        if isinstance(reward, FailedReward):
            object.__setattr__(self, "reward", math.nan)
            if self.unusable is None:
                object.__setattr__(self, "reason", f"reward failed: {reward.reason}")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def unusable(self) -> Unusable | None:
        """Why it cannot be trained on; None if it can. The others of its group are trained on as if it had not been sampled."""
        if self.reason.startswith("too long"):
            return "too long"
        return "reward failed" if self.reason.startswith("reward failed") else None

    @property
    def row_tokens(self) -> int:
        """Tokens that have to be run for its loss: all before the last generated one."""
        return row_tokens(self.loss_mask)

    @property
    def head_version(self) -> Version:
        """Oldest version that sampled a token of it; -1 if nothing was generated."""
        generated = self.versions[self.loss_mask]
        return int(generated.min()) if generated.size else PROMPT_VERSION

    @property
    def prompt_len(self) -> int:
        """Tokens before the first generated one."""
        return int(np.argmax(self.loss_mask)) if self.loss_mask.any() else len(self)


def row_tokens(loss_mask: np.ndarray) -> int:
    """Tokens that have to be run for a sequence's loss: all before the last token in its loss mask [L] bool."""
    return len(loss_mask) - 1 - int(np.argmax(loss_mask[::-1])) if loss_mask.any() else 0


@dataclass(frozen=True, eq=False)
class Group:
    """The G trajectories of one prompt, or the reason why there are none.

    Attributes:
        prompt_id: names the prompt across restarts, "epoch:index".
        admitted_version: version at which the gate admitted it; its deadline is `admitted_version + max_head_offpolicyness`.
        trajectories: in sample order; empty when `rejected`.
        rejected: None, or why the group is not trained on.
    """

    prompt_id: str
    admitted_version: Version
    trajectories: tuple[Trajectory, ...] = ()
    rejected: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(len(t) for t in self.trajectories)

    @property
    def head_version(self) -> Version:
        """Oldest version in any trajectory; the admitted version if nothing was generated."""
        heads = [t.head_version for t in self.trajectories if t.head_version != PROMPT_VERSION]
        return min(heads, default=self.admitted_version)

    @property
    def usable(self) -> tuple[Trajectory, ...]:
        """Those that can be trained on."""
        return tuple(t for t in self.trajectories if t.unusable is None)

    @property
    def rewards(self) -> np.ndarray:
        """Of the usable trajectories, float32."""
        return np.array([t.reward for t in self.usable], dtype=np.float32)
