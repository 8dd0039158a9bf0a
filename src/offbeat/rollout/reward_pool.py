"""Runs rewards in separate processes, so that user code cannot block, crash or leak into the controller, nor read its secrets by accident.

A worker scores the completions of one group in successive calls, each under a deadline. A completion that cannot be scored fails alone;
the others of its group are scored. If a call is late, its process is killed, and a new one continues with the next completion. A process
that dies is replaced, and the completion that it was scoring is tried once more, because something else may have killed the process. A
reward of groups, or one that is async, scores all completions of one in a single call under one deadline.
"""

import asyncio
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Self

from offbeat.aio import gather_all
from offbeat.data import wire
from offbeat.data.given import pack
from offbeat.data.reward import FailedReward, NamedReward
from offbeat.data.row import Row
from offbeat.errors import CodeError, DeadlineError, WorkerError, shorten
from offbeat.process.child import Child, ChildSpec
from offbeat.rollout.reward_worker import GroupRequest, RewardLoadRequest, RewardRequest, RewardsLoaded, ScoredCompletion, ScoredGroup

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 1.0
_SECRET_NAME = re.compile(
    r"^(AWS|AZURE)_|PASSWORD|SECRET|CREDENTIAL|APIKEY|(^|_)(KEY|KEYS|TOKEN|PASSWD|PASS|PASSPHRASE|AUTH|COOKIE|PAT|DSN)(_|$)|_PWD$",
    re.IGNORECASE)
_SECRET_VALUE = re.compile(r"://[^/@\s]*:[^/@\s]+@")
"""Matches a URL that contains a password."""


class RewardPool:
    """A pool of `num_workers` processes that run one reward function, or several with weights."""

    def __init__(
        self, reward: str | Mapping[str, float], *, num_workers: int, timeout_s: float, log_dir: Path | None, memory_bytes: int = 0,
        allowed: Collection[str] = (),
    ) -> None:
        """Prepare the pool; its processes start on entering it.

        Args:
            reward: "module:function"; or several such names with the weight of each.
            timeout_s: limit for scoring one completion.
            memory_bytes: memory limit of each process; 0 for none.
            allowed: environment variables that the processes see although they look like secrets.
        """
        self._weights = {} if isinstance(reward, str) else dict(reward)
        self._dotted = reward if isinstance(reward, str) else " or ".join(reward)
        self._given = pack(self._weights or [self._dotted])
        self._memory_bytes = memory_bytes
        self._hidden = secret_variables(os.environ, allowed=allowed)
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._log_dir = log_dir
        self._of_group = False
        self._children: dict[int, Child] = {}
        self._idle: asyncio.Queue[int] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        try:
            await gather_all(self._start(index) for index in range(self._num_workers))
        except BaseException:
            await self.__aexit__()
            raise
        for index in range(self._num_workers):
            self._idle.put_nowait(index)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.gather(*(child.stop(timeout_s=_STOP_TIMEOUT_S) for child in self._children.values()))

    async def check(self, row: Row) -> float:
        """Score the row's own answer, so that a broken reward is found before any training.

        Raises:
            CodeError: it cannot be scored.
            WorkerError, DeadlineError: as in `score`.
        """
        [reward] = await self.score([row.answer], row)
        if isinstance(reward, FailedReward):
            missed = next((f"; rollout.reward_env = ['{name}'] would show it that variable" for name in self._hidden
                           if name in reward.reason), "")
            raise CodeError(reward.reason + missed)
        return reward

    async def score(self, completions: Sequence[str], row: Row) -> list[float]:
        """Return one reward per completion; a `FailedReward` where the function raised, was late, ended its process or gave no valid one.

        Raises:
            CodeError: a workflow passes completions that are not text, or something other than a row.
            WorkerError, DeadlineError: a replacement process does not start.
        """
        check_call(completions, row)
        if not completions:
            return []
        index = await self._idle.get()
        try:
            if self._of_group:
                [scored] = await self._answers(index, "score_group", [wire.encode(GroupRequest(tuple(completions), row))])
                group = wire.decode(ScoredGroup, scored).scored if isinstance(scored, bytes) else [scored] * len(completions)
                return [_reward(each) for each in group]
            answers = await self._answers(index, "score", [wire.encode(RewardRequest(completion, row)) for completion in completions])
            return [_reward(wire.decode(ScoredCompletion, answer) if isinstance(answer, bytes) else answer) for answer in answers]
        finally:
            self._idle.put_nowait(index)

    async def _answers(self, index: int, method: str, requests: Sequence[bytes]) -> list[bytes | FailedReward]:
        """Return the process's answer to each request, or why there is none."""
        answers: list[bytes | FailedReward] = []
        died_at = -1  # index of the request at which a process last died
        while rest := requests[len(answers):]:
            child = self._children.get(index) or await self._start(index)
            try:
                async for answer in child.call_each(method, rest, timeout_s=self._timeout_s):
                    answers.append(answer)
            except BaseException as exc:  # late, dead, or cancelled during a call: this process cannot be used again
                del self._children[index]
                await child.kill()
                if isinstance(exc, DeadlineError):
                    answers.append(FailedReward(
                        f"the reward {self._dotted} did not answer within rollout.reward_timeout_s = {self._timeout_s:g} s; "
                        "make it faster or raise the limit"))
                elif not isinstance(exc, WorkerError):
                    raise
                elif died_at < len(answers):
                    died_at = len(answers)
                else:
                    answers.append(FailedReward(f"the reward {self._dotted} ended its process: {exc}"))
        return answers

    async def _start(self, index: int) -> Child:
        log = self._log_dir / f"reward-{index}.log" if self._log_dir else None
        env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        spec = ChildSpec(f"reward {index}", "offbeat.rollout.reward_worker:RewardWorker", env, log, without=self._hidden)
        child = await Child.start(spec, timeout_s=_START_TIMEOUT_S)
        try:
            request = wire.encode(RewardLoadRequest("" if self._weights else self._dotted, self._memory_bytes, self._weights, self._given))
            self._of_group = wire.decode(RewardsLoaded, await child.call("load", request, timeout_s=_START_TIMEOUT_S)).of_group
        except BaseException:
            await child.kill()
            raise
        self._children[index] = child
        return child


def _reward(scored: ScoredCompletion | FailedReward) -> float:
    if isinstance(scored, FailedReward):
        return scored
    return FailedReward(scored.failure) if scored.failure else NamedReward(scored.parts) if scored.parts else scored.reward


def check_call(completions: Sequence[str], row: Row) -> None:
    """Raise CodeError unless a workflow asks for the rewards of texts, for a row."""
    if wrong := [each for each in completions if not isinstance(each, str)] or ([] if isinstance(row, Row) else [row]):
        raise CodeError(f"score takes a list of texts and the episode's row, got {shorten(wrong[0])} among them")


def secret_variables(environ: Mapping[str, str], *, allowed: Collection[str]) -> frozenset[str]:
    """Return the names of variables that look like secrets, by name or value, and are not in `allowed`."""
    return frozenset(
        name for name, value in environ.items()
        if name not in allowed and (_SECRET_NAME.search(name) or _SECRET_VALUE.search(value)))
