"""What a workflow is given, and what it gives back.

A workflow is one async function, `async def workflow(episode: Episode) -> Sequence[Trajectory]`: it plays the G samples of one prompt and
may call the engines and the reward as often as it likes.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from offbeat.data.row import Row
from offbeat.data.tokenizer import Tokenizer
from offbeat.data.trajectory import Trajectory
from offbeat.inference.sampling import Sample, Sampling
from offbeat.types import PROMPT_VERSION


class Generate(Protocol):
    """n continuations of a prompt of token ids. Calls of one session, such as a conversation's, go to one engine if the load allows."""

    def __call__(self, prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "") -> Awaitable[list[Sample]]: ...


@dataclass(frozen=True)
class Episode:
    """One prompt to play.

    Attributes:
        row: the dataset's row, with the reference answer.
        prompt: its token ids, chat template applied.
        group_size: samples wanted, G.
        sampling: how to sample, as configured.
        generate: calls the engines.
        score: rewards of completions, one each, from the reward processes; where one failed, a NaN that knows why (`FailedReward`), which
            makes a trajectory that counts nowhere.
        tokenizer: to encode further turns.
        context: most tokens that a prompt and the `max_new_tokens` asked for may have together; `generate` refuses more.
    """

    row: Row
    prompt: tuple[int, ...]
    group_size: int
    sampling: Sampling
    generate: Generate
    score: Callable[[Sequence[str], Row], Awaitable[list[float]]]
    tokenizer: Tokenizer
    context: int = 2**31


Workflow = Callable[[Episode], Awaitable[Sequence[Trajectory]]]


def single_turn_trajectory(prompt: tuple[int, ...], sample: Sample, reward: float) -> Trajectory:
    """The trajectory of one prompt and one continuation."""
    before, after = len(prompt), len(sample.token_ids)
    return Trajectory(
        tokens=np.array([*prompt, *sample.token_ids], dtype=np.int32),
        loss_mask=np.repeat([False, True], [before, after]),
        rollout_logprobs=np.concatenate([np.zeros(before, np.float32), np.array(sample.logprobs, dtype=np.float32)]),
        versions=np.concatenate([np.full(before, PROMPT_VERSION, np.int32), np.array(sample.versions, dtype=np.int32)]),
        reward=reward,
        reason=sample.finish_reason,
        num_retries=sample.num_retries,
    )
