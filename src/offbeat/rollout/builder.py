"""Builds a trajectory from token ids that the policy was given and samples that it wrote.

    trajectory = TrajectoryBuilder(prompt).generated(first).given(hint).generated(second).finish(reward)

Called by workflows, ours and users'. Log-probabilities and versions stay with the tokens that the engine gave them for.
"""

import hashlib
from collections.abc import Iterable
from typing import Self

import numpy as np

from offbeat.data.expert_routes import unknown_routes
from offbeat.data.sample_supports import Supports, join_supports
from offbeat.data.trajectory import DTYPES, Trajectory, TurnEnd
from offbeat.inference.sampling import Sample
from offbeat.types import PROMPT_VERSION

_TOKENS_END = 2**31
_NOTHING = tuple(np.zeros(0, dtype) for dtype in DTYPES.values())


class TrajectoryBuilder:
    """Collects one trajectory, in the order in which the model sees it. Every call but `finish` returns the builder itself."""

    def __init__(self, prompt: Iterable[int] | np.ndarray = ()) -> None:
        """Begin with the tokens of a prompt, [L] integers such as [4, 2, 7]."""
        self._parts: list[tuple[np.ndarray, ...]] = []
        self._length = 0
        self._turns: list[TurnEnd] = []
        self._state = ""
        self._num_retries = 0
        self._reason = "stop"
        self._routes: list[np.ndarray] = []
        self._num_routed = 0
        self._supports: list[Supports | None] = []
        self.given(prompt)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens so far, which are the prompt of the next turn."""
        return tuple(token for part in self._parts for token in part[0].tolist())

    def given(self, ids: Iterable[int] | np.ndarray) -> Self:
        """Add tokens that the policy did not write, [L] integers, such as a tool's answer: they have no loss."""
        tokens = _flat(ids)
        num = len(tokens)
        self._add(None, tokens, np.zeros(num, np.bool_), np.zeros(num, np.float32), np.full(num, PROMPT_VERSION, np.int32))
        return self

    def state(self, text: str) -> Self:
        """Set the state of the environment in which the next turn is sampled; credit compares a group's turns from equal states."""
        self._state = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
        return self

    def generated(self, sample: Sample, *, order: int = 0) -> Self:
        """Add a sample that continues `tokens` and ends a turn; `order` is `TurnEnd.order`, for trajectories that were played in turns."""
        mask = np.ones(len(sample.tokens), np.bool_)
        self._add(sample.supports, sample.tokens, mask, sample.token_logprobs, sample.token_versions)
        if sample.routes is not None and (routes := sample.routes[self._num_routed : len(self)]).size:
            # A token keeps the experts with which the token after it was sampled first, not those of a later prompt.
            self._routes.append(routes)
            self._num_routed += len(routes)
        self._turns.append(TurnEnd(len(self), 0.0, self._state, order))
        self._state, self._reason = "", sample.finish_reason
        self._num_retries += sample.num_retries
        return self

    def reward(self, value: float) -> Self:
        """Add to the reward of the last turn; raises ValueError if nothing was generated yet."""
        if not self._turns:
            raise ValueError("a reward of a turn needs a turn; call generated() before reward(), or give it to finish()")
        last = self._turns[-1]
        self._turns[-1] = TurnEnd(last.end, last.reward + value if last.reward else value, last.state, last.order)
        return self

    def finish(
        self, reward: float, *, reason: str = "", episode: int | None = None, agent: str = "", malformed_calls: int = 0,
    ) -> Trajectory:
        """Return the trajectory.

        Args:
            reward: the outcome of the whole episode, to which the rewards of turns are added; also several by name, or a failed one.
            reason: why it ended; "" takes the last sample's reason, "stop" or "length".
            episode, agent, malformed_calls: see `Trajectory`.
        """
        tokens, mask, logprobs, versions = (np.concatenate(column) for column in zip(_NOTHING, *self._parts, strict=True))
        return Trajectory(
            tokens, mask, logprobs, versions, reward, reason or self._reason, self._num_retries,
            episode=episode, agent=agent, turns=self._told_turns(), malformed_calls=malformed_calls, routes=self._known_routes(),
            supports=join_supports(self._supports, [len(part[0]) for part in self._parts]))

    def _known_routes(self) -> np.ndarray | None:
        """Return the routes [L, K] of all tokens, those of the last turn's end unknown; None where no sample had any."""
        if not self._routes:
            return None
        return np.concatenate([*self._routes, unknown_routes(len(self) - self._num_routed, self._routes[0])])

    def _told_turns(self) -> tuple[TurnEnd, ...]:
        """Return the turns; none where there is only one, which the loss mask describes completely."""
        alone = len(self._turns) == 1 and self._turns[0] == TurnEnd(self._turns[0].end)
        return () if alone else tuple(self._turns)

    def _add(self, supports: Supports | None, *columns: np.ndarray) -> None:
        if len(columns[0]):
            self._parts.append(columns)
            self._supports.append(supports)
            self._length += len(columns[0])


def _flat(ids: Iterable[int] | np.ndarray) -> np.ndarray:
    """Return [L] int32, as engines return tokens; another integer type if one does not fit.

    Anything but a row of numbers becomes [L] objects, which `Trajectory` refuses with a reason.
    """
    if isinstance(ids, np.ndarray) and ids.dtype == DTYPES["tokens"] and ids.ndim == 1:
        return ids
    listed = ids if isinstance(ids, np.ndarray) else list(ids)
    try:
        array = np.asarray(listed)
    except ValueError:  # lists of different lengths
        array = np.zeros((0, 0))
    if array.ndim != 1:
        return np.fromiter(listed, object, len(listed))
    fits = array.dtype.kind == "i" and array.size > 0 and array.min() >= -_TOKENS_END and array.max() < _TOKENS_END
    return array.astype(DTYPES["tokens"], copy=False) if fits else array
