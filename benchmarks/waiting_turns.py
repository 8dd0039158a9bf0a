"""The environment of `async_env.py`, as a workflow: it takes its time over each part of an answer.

The policy sorts digits, and writes its answer in four turns of a few tokens. After each the environment waits for a time that is drawn from
an exponential distribution, whose spread is its mean; the same draws for the same sample, whoever plays. So the sequences are those of the
single turn that the policy was warmed up on, and nothing but the waiting differs from it.

What it saw goes to the file in OFFBEAT_WAITING_LOG, one line of JSON for each group: seconds in which at least one request was at an
engine, and seconds since it began. OFFBEAT_WAITING_MEAN_S is the mean of a wait.
"""

import asyncio
import json
import os
import random
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from offbeat.data.trajectory import Trajectory
from offbeat.inference.sampling import Sample
from offbeat.rollout.episode import Episode
from offbeat.types import PROMPT_VERSION

TURN_TOKENS = (3, 2, 2, 2)
"""Of an answer's eight digits and its end."""


class Watch:
    """Adds up the time in which somebody waits for an engine."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._since = self._busy_s = 0.0
        self._num = 0

    def __enter__(self) -> None:
        if not self._num:
            self._since = time.monotonic()
        self._num += 1

    def __exit__(self, *_: object) -> None:
        self._num -= 1
        if not self._num:
            self._busy_s += time.monotonic() - self._since

    def seen(self) -> dict[str, float]:
        now = time.monotonic()
        return {"busy_s": self._busy_s + (now - self._since if self._num else 0.0), "total_s": now - self._began}


WATCH = Watch()


async def waiting_turns(episode: Episode) -> list[Trajectory]:
    """Play the samples of a group side by side, each at its own pace."""
    trajectories = await asyncio.gather(*(play(episode, index) for index in range(episode.group_size)))
    if log := os.environ.get("OFFBEAT_WAITING_LOG"):
        with Path(log).open("a") as file:
            file.write(json.dumps(WATCH.seen()) + "\n")
    return trajectories


async def play(episode: Episode, index: int) -> Trajectory:
    """Write one answer in four turns, with a wait after each."""
    waits = random.Random(f"{episode.row.prompt} {index}")
    mean_s = float(os.environ.get("OFFBEAT_WAITING_MEAN_S", "1"))
    parts: list[Sample] = []
    for num_tokens in TURN_TOKENS:
        before = tuple(token for part in parts for token in part.token_ids)
        with WATCH:
            parts += await episode.generate(episode.prompt + before, replace(episode.sampling, max_new_tokens=num_tokens), n=1)
        await asyncio.sleep(waits.expovariate(1 / mean_s))
        if parts[-1].finish_reason != "length":
            break
    [reward] = await episode.score(["".join(part.text for part in parts)], episode.row)
    written = sum(len(part.token_ids) for part in parts)
    num_prompt = len(episode.prompt)
    return Trajectory(
        np.array([*episode.prompt, *(token for part in parts for token in part.token_ids)], np.int32),
        np.repeat([False, True], [num_prompt, written]),
        np.array([0.0] * num_prompt + [logprob for part in parts for logprob in part.logprobs], np.float32),
        np.array([PROMPT_VERSION] * num_prompt + [version for part in parts for version in part.versions], np.int32),
        reward, parts[-1].finish_reason)
