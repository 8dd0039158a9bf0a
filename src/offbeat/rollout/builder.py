"""Builds a trajectory from what workflows have at hand: token ids that the policy was given, and samples that it wrote.

    trajectory = TrajectoryBuilder(prompt).generated(first).given(hint).generated(second).finish(reward)

Called by workflows, the ones here and those of users. Log-probabilities and versions stay with the tokens that the engine gave them for.
"""

import hashlib
from collections.abc import Iterable
from typing import Self

from offbeat.data.trajectory import Trajectory, TurnEnd
from offbeat.inference.sampling import Sample
from offbeat.types import PROMPT_VERSION


class TrajectoryBuilder:
    """Collects one trajectory, in the order in which the model sees it. Every call but `finish` returns the builder itself."""

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        """Begin with the tokens of a prompt."""
        self._tokens: list[int] = []
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._turns: list[TurnEnd] = []
        self._state = ""
        self._num_retries = 0
        self._reason = "stop"
        self.given(prompt)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens so far, which are the prompt of the next turn."""
        return tuple(self._tokens)

    def given(self, ids: Iterable[int]) -> Self:
        """Add tokens that the policy did not write, such as a tool's answer: they have no loss."""
        before = len(self._tokens)
        self._tokens.extend(ids)
        num = len(self._tokens) - before
        self._add(num, trained=False, logprobs=[0.0] * num, versions=[PROMPT_VERSION] * num)
        return self

    def state(self, text: str) -> Self:
        """Name the state of the environment in which the next turn is sampled; calls of one group from equal states can be compared."""
        self._state = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
        return self

    def generated(self, sample: Sample, *, order: int = 0) -> Self:
        """Add what an engine has sampled after `tokens`, which ends a turn.

        Args:
            order: see `TurnEnd.order`; for episodes of several trajectories that were played in turns.
        """
        self._tokens.extend(sample.token_ids)
        self._add(len(sample.token_ids), trained=True, logprobs=sample.logprobs, versions=sample.versions)
        self._turns.append(TurnEnd(len(self._tokens), 0.0, self._state, order))
        self._state, self._reason = "", sample.finish_reason
        self._num_retries += sample.num_retries
        return self

    def reward(self, value: float) -> Self:
        """Add to the reward of the last turn.

        Raises:
            ValueError: nothing was generated yet.
        """
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
            reason: why it ended; "" takes that of the last sample, "stop" or "length".
            episode, agent, malformed_calls: see `Trajectory`.
        """
        return Trajectory(
            self._tokens, self._mask, self._logprobs, self._versions, reward, reason or self._reason, self._num_retries,  # pyright: ignore
            episode=episode, agent=agent, turns=self._told_turns(), malformed_calls=malformed_calls)

    def _told_turns(self) -> tuple[TurnEnd, ...]:
        """Return the turns; none where there is only one, of which the loss mask says all."""
        alone = len(self._turns) == 1 and self._turns[0] == TurnEnd(self._turns[0].end)
        return () if alone else tuple(self._turns)

    def _add(self, num: int, *, trained: bool, logprobs: Iterable[float], versions: Iterable[int]) -> None:
        self._mask.extend([trained] * num)
        self._logprobs.extend(logprobs)
        self._versions.extend(versions)
