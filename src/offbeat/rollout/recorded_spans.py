"""What a recorded group has asked of engines: for each answer, the tokens that one version sampled, so that they can be generated again.

Called by `controller.live_replay`; pure. A switch of weights in the middle of an answer ends a span, and the next one goes on after it.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from offbeat.data.trajectory import Group, Trajectory
from offbeat.rollout.randomness import mixed
from offbeat.types import PROMPT_VERSION, Version


@dataclass(frozen=True, eq=False)
class RecordedSpan:
    """Tokens of an answer that one version sampled, and what precedes them.

    Attributes:
        sample: index of the trajectory in its group.
        start: index in the trajectory of the answer's first token.
        num_begun: number of the answer's tokens that earlier versions have sampled.
        prompt: tokens before the answer.
        tokens: [L] int32, the answer up to the last token of this version.
        logprobs: [L] float32, as the engine gave them.
        versions: [L] int32; the last one is that of the span.
        seed: of the request; None if it had none.
        first_sample: index in the request of its sample.
    """

    prompt_id: str
    sample: int
    start: int
    num_begun: int
    prompt: tuple[int, ...]
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    seed: int | None
    first_sample: int

    @property
    def version(self) -> Version:
        """The version that sampled the tokens after `num_begun`."""
        return int(self.versions[-1])


def spans_of(group: Group, *, seed: int | None) -> Iterator[RecordedSpan]:
    """Yield the spans of a group's answers, in order.

    From the `seed` of the group (see `randomness.seeded`) follow those of the built-in workflows: one request for all samples of the
    prompt, or those of episodes by their number.
    """
    num_equal: Counter[tuple[int, bytes]] = Counter()
    for sample, trajectory in enumerate(group.trajectories):
        for start, end in _answers(trajectory):
            prompt = tuple(trajectory.tokens[:start].tolist())
            asked = hashlib.blake2b(np.array(prompt, np.int64).tobytes(), digest_size=16).digest()
            of_request, first = seed, 0
            if seed is not None and trajectory.episode is None:
                of_request, first = mixed(seed, asked, 0), sample
            elif seed is not None and trajectory.episode is not None:
                of_request = mixed(mixed(seed, trajectory.episode), asked, num_equal[trajectory.episode, asked])
                num_equal[trajectory.episode, asked] += 1
            begun = 0
            for stop in (*(np.flatnonzero(np.diff(trajectory.versions[start:end])) + 1).tolist(), end - start):
                own = slice(start, start + stop)
                yield RecordedSpan(
                    group.prompt_id, sample, start, begun, prompt, trajectory.tokens[own], trajectory.rollout_logprobs[own],
                    trajectory.versions[own], of_request, first)
                begun = stop


def _answers(trajectory: Trajectory) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each run of sampled tokens; the end of a turn ends one, too."""
    sampled = trajectory.versions != PROMPT_VERSION
    turns = {turn.end for turn in trajectory.turns}
    start = None
    for at, own in enumerate([*sampled.tolist(), False]):
        if start is not None and (not own or at in turns):
            yield start, at
            start = None
        if own and start is None:
            start = at
