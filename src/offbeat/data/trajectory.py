"""Results of rollouts: trajectories, episodes of one or more of them, and groups of episodes that share a prompt. Frozen; no torch.

For example, the trajectory of a prompt "31>" answered "13" and an end token (ids invented):

    tokens            [3, 1, 9,   1,    3,    0]
    loss_mask         [F, F, F,   T,    T,    T]
    rollout_logprobs  [0, 0, 0,  -.1,  -.2,  -.1]    of each token, under the policy that sampled it
    versions          [-1, -1, -1, 4,   4,    5]     a publish landed before the last token
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import index
from statistics import fmean
from typing import Any, Literal, cast, get_args

import numpy as np

from offbeat.data.expert_routes import check_routes
from offbeat.data.reward import FailedReward, NamedReward, check_reward
from offbeat.data.sample_supports import Supports, check_supports
from offbeat.errors import DataError, describe, printable, shorten
from offbeat.types import PROMPT_VERSION, Version
from offbeat.user_code.boundary import Caught

Unusable = Literal["reward failed", "too long", "malformed", "wrong tokens", "wrong logprobs", "wrong versions", "episode failed"]
"""Why a trajectory is not trained on, as the first words of its reason."""

UNUSABLE: tuple[Unusable, ...] = get_args(Unusable)

TURNS = "turns"
"""Name of the sum of the rewards of turns, beside rewards that have names."""

_LONGEST_REASON = 1000

DTYPES = {"tokens": np.int32, "loss_mask": np.bool_, "rollout_logprobs": np.float32, "versions": np.int32}


@dataclass(frozen=True)
class TurnEnd:
    """End of a turn of a trajectory: the policy's tokens of one call, with the given tokens before them.

    Attributes:
        end: number of tokens of the trajectory up to there, such as 6. The turn begins where the one before it ends.
        reward: reward of this turn, besides the outcome of the episode.
        state: names the environment's state at the call; calls of one group with equal states can be compared; "" with none.
        order: position of the call in time among the calls of its episode's trajectories; equal ones stay in listed order.
    """

    end: int
    reward: float = 0.0
    state: str = ""
    order: int = 0


@dataclass(frozen=True, eq=False)
class Trajectory:
    """L tokens that the model has seen in one piece: a finished episode, or one of the chains of a longer one.

    Attributes:
        tokens: [L] int32, prompt and generated tokens in order.
        loss_mask: [L] bool, True where the policy generated the token.
        rollout_logprobs: [L] float32, log-probability of each generated token under the distribution it was sampled from; 0 elsewhere.
        versions: [L] int32, weight version that sampled each generated token; -1 elsewhere.
        reward: outcome reward of the whole episode, the same on all of its trajectories of one agent; NaN where there is none that can be
            trained on. Rewards of turns are added to it.
        reason: why the episode ended, "stop" or "length"; or why it is not trained on, as one of `Unusable` and ": ...".
        num_retries: number of engine failures before its requests were finished.
        named_rewards: the rewards by name that add up to `reward`, if it was given as a mapping or by a reward function that returns one.
        episode: number of its episode within its group; None is an episode of its own.
        agent: role of the model that wrote it, where several play an episode.
        turns: ends of its turns, in order; all generated tokens lie before the last end. If empty, each run of generated tokens is a turn.
        malformed_calls: number of tool calls that could not be read.
        routes: the experts that its tokens used when they were sampled, [L, K]; see `data.expert_routes`. None if they are not replayed.
        supports: the tokens among which each was drawn; see `data.sample_supports`. None if all are whole, or they are not replayed.

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
    episode: int | None = None
    agent: str = ""
    turns: tuple[TurnEnd, ...] = ()
    malformed_calls: int = 0
    routes: np.ndarray | None = None
    supports: Supports | None = None

    def __post_init__(self) -> None:
        fault = self._take_arrays() or self._take_replayed() or self._fault_of_fields() or self._take_turns()
        agent, episode = (self.agent if isinstance(self.agent, str) else ""), (self.episode if _is_whole(self.episode) else None)
        self._set(agent=agent, episode=None if episode is None else index(episode))
        if fault:
            self._set(**{name: np.zeros(0, dtype) for name, dtype in DTYPES.items()})
            self._set(num_retries=0, turns=(), malformed_calls=0, routes=None, supports=None, reason=f"malformed: {fault}")
        reward = check_reward(self.reward)
        no_names = type(self.named_rewards) is dict and not self.named_rewards  # of most, and a refusal would be written for it
        named = reward if isinstance(reward, NamedReward) or no_names else check_reward(self.named_rewards)
        # A workflow that replaces the reward by another number has no names for it.
        self._set(named_rewards=named.parts if isinstance(named, NamedReward) and named == reward else {})
        given = [("", reward), *((f"turn {number}: ", turn.reward) for number, turn in enumerate(self.turns))]
        failed = [where + each.reason for where, each in given if isinstance(each, FailedReward)]
        self._set(
            reward=math.nan if isinstance(reward, FailedReward) else float(reward),
            turns=tuple(replace(turn, reward=float(turn.reward)) for turn in self.turns))
        if failed and self.unusable is None:
            self._set(reason=f"reward failed: {failed[0]}")
        self._set(reason=printable(self.reason, most=_LONGEST_REASON))

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _take_arrays(self) -> str:
        """Copy the arrays; returns their fault, or an empty string."""
        given = {name: getattr(self, name) for name in DTYPES}
        if all(type(array) is np.ndarray and array.dtype == DTYPES[name] and array.ndim == 1 for name, array in given.items()):
            arrays = {name: _frozen(array.copy()) for name, array in given.items()}  # as they come from a builder
        else:
            arrays = dict[str, np.ndarray]()
            with Caught() as caught:  # user code may pass anything, and numpy may then raise anything
                for name, dtype in DTYPES.items():
                    arrays[name] = _vector(given[name], dtype)
            if len(arrays) < len(DTYPES):
                exc, name = caught.take(), list(DTYPES)[len(arrays)]
                return f"Trajectory.{name} {exc if isinstance(exc, _VectorError) else f'cannot be read: {describe(exc)}'}"
        length = len(arrays["tokens"])
        for name, array in arrays.items():
            if len(array) != length:
                return f"Trajectory.{name} must have shape ({length},) like tokens, got {array.shape}"
        self._set(**arrays)
        return ""

    def _take_replayed(self) -> str:
        """Take what the trainer replays; returns its fault, or an empty string."""
        for name, check in (("routes", check_routes), ("supports", check_supports)):
            try:
                self._set(**{name: None if getattr(self, name) is None else check(getattr(self, name), self.tokens)})
            except DataError as exc:
                return f"Trajectory.{name} {exc}"
        return ""

    def _fault_of_fields(self) -> str:
        for name in ("reason", "agent"):
            if not isinstance(value := getattr(self, name), str):
                return f"Trajectory.{name} must be text, got {shorten(value)}"
        if not isinstance(self.num_retries, int):
            return f"Trajectory.num_retries must be an integer, got {shorten(self.num_retries)}"
        if not _is_whole(self.malformed_calls) or self.malformed_calls < 0:
            return f"Trajectory.malformed_calls must be an integer of at least 0, got {shorten(self.malformed_calls)}"
        if self.episode is not None and not _is_whole(self.episode):
            return f"Trajectory.episode must be an integer or None, got {shorten(self.episode)}"
        return ""

    def _take_turns(self) -> str:
        """Copy the turns; returns their fault, or an empty string."""
        given: Any = self.turns
        if not isinstance(given, Sequence) or not all(isinstance(turn, TurnEnd) for turn in given):
            return f"Trajectory.turns must hold TurnEnds, got {shorten(given)}"
        turns, before = [], 0
        for turn in given:
            if not (_is_whole(turn.end) and _is_whole(turn.order) and isinstance(turn.state, str)):
                return f"a TurnEnd must have integers for end and order, and text for state, got {shorten(turn)}"
            if not before <= turn.end <= len(self.tokens) or not turn.end:
                return f"the ends of Trajectory.turns must rise from 1 to the {len(self.tokens)} tokens, got {turn.end} after {before}"
            before = turn.end
            turns.append(TurnEnd(index(turn.end), check_reward(turn.reward), turn.state, index(turn.order)))
        if turns and self.loss_mask[before:].any():
            later = before + int(np.argmax(self.loss_mask[before:]))
            return f"the last of Trajectory.turns ends after {before} tokens, but token {later} was generated"
        self._set(turns=tuple(turns))
        return ""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def unusable(self) -> Unusable | None:
        """Why it cannot be trained on; None if it can. The rest of its group is trained on as if this one had not been sampled."""
        kind = self.reason.partition(": ")[0]
        return cast(Unusable, kind) if kind in UNUSABLE else None

    @cached_property
    def num_generated(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def row_tokens(self) -> int:
        """Number of tokens that must be run for its loss: all before the last generated one."""
        return row_tokens(self.loss_mask)

    @cached_property
    def head_version(self) -> Version:
        """Oldest version that sampled one of its tokens; -1 if nothing was generated."""
        generated = self.versions[self.loss_mask]
        return int(generated.min()) if generated.size else PROMPT_VERSION

    @cached_property
    def prompt_len(self) -> int:
        """Number of tokens before the first generated one."""
        return int(np.argmax(self.loss_mask)) if self.loss_mask.any() else len(self)

    @cached_property
    def calls(self) -> tuple[TurnEnd, ...]:
        """Its turns; where none were given, one for each run of generated tokens."""
        if self.turns:
            return self.turns
        ends = np.flatnonzero(self.loss_mask & ~np.append(self.loss_mask[1:], False)) + 1
        return tuple(TurnEnd(int(end)) for end in ends)


def failed_trajectory(reason: str, *, episode: int | None = None, agent: str = "") -> Trajectory:
    """Return the stand-in for an episode that could not be finished: it is left out, and the others of its group are trained on."""
    empty = np.zeros(0)
    return Trajectory(empty, empty, empty, empty, 0.0, f"episode failed: {reason}", episode=episode, agent=agent)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


class _VectorError(ValueError):
    """The fault of an array, as the end of a sentence."""


def _vector(value: Any, dtype: type) -> np.ndarray:
    """Copy `value` into a new, read-only vector [L] of `dtype`; raises `_VectorError` where converting would change numbers."""
    given = np.asarray(value)
    if given.ndim != 1:
        raise _VectorError(f"must have one dimension, got {shorten(value) if given.ndim == 0 else given.shape}")
    if given.size and given.dtype.kind not in "biuf":
        raise _VectorError(f"must hold numbers, got {shorten(next(x for x in given.tolist() if type(x) not in (bool, int, float)))}")
    if given.dtype == dtype:
        vector = given.copy()
    else:
        with np.errstate(all="ignore"):  # overflow is reported below, or becomes inf
            vector = given.astype(dtype, copy=True)
        if dtype is not np.float32 and (changed := vector != given).any():
            raise _VectorError(f"must hold numbers of type {dtype.__name__}, got {given[changed][0]}")
    return _frozen(vector)


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


def row_tokens(loss_mask: np.ndarray) -> int:
    """Return the number of tokens that must be run for a sequence's loss: all before the last token in its loss mask [L] bool."""
    return len(loss_mask) - 1 - int(np.argmax(loss_mask[::-1])) if loss_mask.any() else 0


@dataclass(frozen=True, eq=False)
class AgentPart:
    """The part of one agent in an episode: one or more trajectories, which share a reward."""

    chains: tuple[Trajectory, ...]

    @property
    def agent(self) -> str:
        return self.chains[0].agent

    @cached_property
    def turn_reward(self) -> float:
        """Sum of the rewards of its turns."""
        return math.fsum(turn.reward for t in self.chains for turn in t.turns) if any(t.turns for t in self.chains) else 0.0

    @property
    def reward(self) -> float:
        """The outcome and the rewards of all turns together."""
        return self.chains[0].reward + self.turn_reward


def named_rewards(parts: Sequence[AgentPart]) -> list[dict[str, float]]:
    """Return the rewards of each part by name, which add up to its reward, such as {"correct": 1.0, "turns": 0.5}.

    A reward without a name is "". The sum of the rewards of turns is "turns", if one of the parts has some.
    """
    beside = any(part.turn_reward and part.chains[0].named_rewards for part in parts)
    found = []
    for part in parts:
        named = part.chains[0].named_rewards
        turns = {TURNS: named.get(TURNS, 0.0) + part.turn_reward} if beside else {}
        found.append({**named, **turns} if named else {"": part.reward})
    return found


def parts_of(chains: Sequence[Trajectory]) -> tuple[AgentPart, ...]:
    """Return the parts of an episode's trajectories, one for each agent that played in it."""
    if len(chains) == 1:
        return (AgentPart(tuple(chains)),)
    found: dict[str, list[Trajectory]] = {}
    for trajectory in chains:
        found.setdefault(trajectory.agent, []).append(trajectory)
    return tuple(AgentPart(tuple(own)) for own in found.values())


def episode_reward(chains: Sequence[Trajectory]) -> float:
    """Return the reward of an episode with these trajectories: the mean of its agents' rewards, e.g. 0.5 of 1.0 and 0.0."""
    return mean_reward(parts_of(chains))


def mean_reward(parts: Sequence[AgentPart]) -> float:
    """Return the reward of an episode with these parts; see `episode_reward`."""
    return parts[0].reward if len(parts) == 1 else fmean(part.reward for part in parts)


@dataclass(frozen=True, eq=False)
class Group:
    """The G episodes of one prompt, or the reason why there are none.

    Attributes:
        prompt_id: identifies the prompt across restarts, "epoch:index", e.g. "0:17".
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

    @cached_property
    def episodes(self) -> tuple[tuple[Trajectory, ...], ...]:
        """The trajectories of each episode, by the first of each."""
        found: dict[object, list[Trajectory]] = {}
        for position, trajectory in enumerate(self.trajectories):
            key = ("alone", position) if trajectory.episode is None else trajectory.episode
            found.setdefault(key, []).append(trajectory)
        return tuple(map(tuple, found.values()))

    @cached_property
    def verdicts(self) -> tuple[Trajectory, ...]:
        """For each episode, the trajectory that decides whether it can be trained on: the first that cannot, or else its first."""
        return tuple(next((t for t in chains if t.unusable is not None), chains[0]) for chains in self.episodes)

    @cached_property
    def usable_episodes(self) -> tuple[tuple[Trajectory, ...], ...]:
        """The trajectories of each episode that can be trained on: one whose trajectories all can, since they share its reward."""
        return tuple(chains for chains, verdict in zip(self.episodes, self.verdicts, strict=True) if verdict.unusable is None)

    @cached_property
    def usable_parts(self) -> tuple[tuple[AgentPart, ...], ...]:
        """The parts of each usable episode, one for each agent."""
        return tuple(map(parts_of, self.usable_episodes))

    @property
    def usable(self) -> tuple[Trajectory, ...]:
        """The trajectories of the episodes that can be trained on, one episode after the other."""
        return tuple(t for chains in self.usable_episodes for t in chains)

    @property
    def rewards(self) -> np.ndarray:
        """Rewards of the usable episodes, [E] float32, such as [1.0, 0.0]; with several agents, the mean of theirs."""
        return np.array(list(map(mean_reward, self.usable_parts)), dtype=np.float32)

    def reward_range(self, *, separate: bool, by_agent: bool = False) -> float:
        """Return the largest reward of the usable episodes less the smallest; 0 if there are none.

        Args:
            separate: take the largest range of one named reward, as equal sums may be made of different parts.
            by_agent: take the largest range of one agent's rewards.
        """
        found: dict[tuple[str, str], list[float]] = {}
        parts = [part for own in self.usable_parts for part in own]
        rewards_of = named_rewards(parts) if separate else [{"": part.reward} for part in parts]
        for part, named in zip(parts, rewards_of, strict=True):
            for name, reward in named.items():
                found.setdefault((part.agent if by_agent else "", name), []).append(reward)
        return max((max(rewards) - min(rewards) for rewards in found.values()), default=0.0)


