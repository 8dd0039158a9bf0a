"""What a rollout produces: trajectories, and groups of them that share a prompt. Frozen; numpy; no torch.

A worked example, prompt "31>" answered "13" and an end token (ids invented):

    tokens            [3, 1, 9,   1,    3,    0]
    loss_mask         [F, F, F,   T,    T,    T]
    rollout_logprobs  [0, 0, 0,  -.1,  -.2,  -.1]    of each token, under the policy that sampled it
    versions          [-1, -1, -1, 4,   4,    5]     a publish landed before the last token
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

import numpy as np

from offbeat.data.reward import FailedReward, NamedReward, check_reward
from offbeat.errors import describe, printable, shorten
from offbeat.types import PROMPT_VERSION, Version

Unusable = Literal["reward failed", "too long", "malformed", "wrong tokens", "wrong logprobs", "wrong versions"]
"""Why a trajectory is not trained on, as the first words of its reason."""

UNUSABLE: tuple[Unusable, ...] = get_args(Unusable)

_LONGEST_REASON = 1000

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
        reason: why the episode ended, "stop" or "length"; or why it is not trained on, as one of `Unusable` and ": ...".
        num_retries: number of engine failures before its requests were finished.
        named_rewards: the rewards by name that add up to `reward`, if it was given as a mapping or by a reward function that returns one.

    The arrays are read-only copies. Workflows create trajectories; one whose fields do not fit together costs only its sample, not its
    group: it has no tokens, and its reason is "malformed: ...".
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    versions: np.ndarray
    reward: float
    reason: str = "stop"
    num_retries: int = 0
    named_rewards: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if fault := self._take_arrays() or self._fault_of_fields():
            for name, dtype in DTYPES.items():
                object.__setattr__(self, name, np.zeros(0, dtype))
            object.__setattr__(self, "num_retries", 0)
            object.__setattr__(self, "reason", f"malformed: {fault}")
        reward = check_reward(self.reward)
        named = reward if isinstance(reward, NamedReward) else check_reward(self.named_rewards)
        # A workflow that replaces the reward by another number has no names for it.
        object.__setattr__(self, "named_rewards", named.parts if isinstance(named, NamedReward) and named == reward else {})
        object.__setattr__(self, "reward", math.nan if isinstance(reward, FailedReward) else float(reward))
        if isinstance(reward, FailedReward) and self.unusable is None:
            object.__setattr__(self, "reason", f"reward failed: {reward.reason}")
        object.__setattr__(self, "reason", printable(self.reason, most=_LONGEST_REASON))

    def _take_arrays(self) -> str:
        """Copy the arrays; returns what is wrong with them, or an empty string."""
        length = None
        for name, dtype in DTYPES.items():
            try:
                array = _vector(getattr(self, name), dtype)
            except Exception as exc:  # user code may pass anything, and numpy may then raise anything
                return f"Trajectory.{name} {exc if isinstance(exc, _VectorError) else f'cannot be read: {describe(exc)}'}"
            length = len(array) if length is None else length
            if len(array) != length:
                return f"Trajectory.{name} must have shape ({length},) like tokens, got {array.shape}"
            object.__setattr__(self, name, array)
        return ""

    def _fault_of_fields(self) -> str:
        if not isinstance(self.reason, str):
            return f"Trajectory.reason must be text, got {shorten(self.reason)}"
        return "" if isinstance(self.num_retries, int) else f"Trajectory.num_retries must be an integer, got {shorten(self.num_retries)}"

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def unusable(self) -> Unusable | None:
        """Why it cannot be trained on; None if it can. The rest of its group is trained on as if this one had not been sampled."""
        kind = self.reason.partition(": ")[0]
        return cast(Unusable, kind) if kind in UNUSABLE else None

    @property
    def row_tokens(self) -> int:
        """Number of tokens that must be run for its loss: all before the last generated one."""
        return row_tokens(self.loss_mask)

    @property
    def head_version(self) -> Version:
        """Oldest version that sampled one of its tokens; -1 if nothing was generated."""
        generated = self.versions[self.loss_mask]
        return int(generated.min()) if generated.size else PROMPT_VERSION

    @property
    def prompt_len(self) -> int:
        """Number of tokens before the first generated one."""
        return int(np.argmax(self.loss_mask)) if self.loss_mask.any() else len(self)


class _VectorError(ValueError):
    """Describes what is wrong with an array, as the end of a sentence."""


def _vector(value: Any, dtype: type) -> np.ndarray:
    """Copy `value` into a new, read-only vector [L] of `dtype`; raises `_VectorError` where converting would change numbers."""
    given = np.asarray(value)
    if given.ndim != 1:
        raise _VectorError(f"must have one dimension, got {shorten(value) if given.ndim == 0 else given.shape}")
    if given.size and given.dtype.kind not in "biuf":
        raise _VectorError(f"must hold numbers, got {shorten(next(x for x in given.tolist() if type(x) not in (bool, int, float)))}")
    with np.errstate(all="ignore"):  # overflow is reported below, or becomes inf
        vector = given.astype(dtype, copy=True)
    if dtype is not np.float32 and (changed := vector != given).any():
        raise _VectorError(f"must hold numbers of type {dtype.__name__}, got {given[changed][0]}")
    vector.setflags(write=False)
    return vector


def row_tokens(loss_mask: np.ndarray) -> int:
    """Return the number of tokens that must be run for a sequence's loss: all before the last token in its loss mask [L] bool."""
    return len(loss_mask) - 1 - int(np.argmax(loss_mask[::-1])) if loss_mask.any() else 0


@dataclass(frozen=True, eq=False)
class Group:
    """The G trajectories of one prompt, or the reason why there are none.

    Attributes:
        prompt_id: identifies the prompt across restarts, "epoch:index".
        admitted_version: version at which the gate admitted it; its deadline is `admitted_version + max_head_offpolicyness`.
        trajectories: in the order of samples; empty when `rejected`.
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
        """The trajectories that can be trained on."""
        return tuple(t for t in self.trajectories if t.unusable is None)

    @property
    def rewards(self) -> np.ndarray:
        """Rewards of the usable trajectories, [n] float32."""
        return np.array([t.reward for t in self.usable], dtype=np.float32)

    def reward_range(self, *, separate: bool) -> float:
        """Return the largest reward of the usable trajectories less the smallest; 0 if there are none.

        Args:
            separate: take the largest range of one named reward, as equal sums may be made of different parts.
        """
        by_name: dict[str, list[float]] = {}
        for trajectory in self.usable:
            for name, reward in (trajectory.named_rewards if separate and trajectory.named_rewards else {"": trajectory.reward}).items():
                by_name.setdefault(name, []).append(reward)
        return max((max(rewards) - min(rewards) for rewards in by_name.values()), default=0.0)
