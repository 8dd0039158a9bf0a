"""Rewards in processes of their own: user code cannot block, crash or leak into the controller.

A worker runs one call at a time. A call that passes its deadline has its process killed; the call fails, and the next call in that place
starts a new one.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from offbeat.aio import gather_all
from offbeat.data import wire
from offbeat.data.row import Row
from offbeat.errors import CodeError, DeadlineError, WorkerError
from offbeat.process import Child, ChildSpec
from offbeat.rollout.reward_worker import ScoreRequest

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 1.0


class RewardPool:
    """`num_workers` processes that run one reward function."""

    def __init__(self, dotted: str, *, num_workers: int, timeout_s: float, log_dir: Path | None) -> None:
        """`dotted` is "module:function"; `timeout_s` bounds scoring the completions of one group."""
        self._dotted = dotted
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._log_dir = log_dir
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
        """Score the row's own answer, so that a broken reward is found before anything is trained.

        Raises:
            CodeError: as `score`.
        """
        return (await self.score([row.answer], row))[0]

    async def score(self, completions: Sequence[str], row: Row) -> list[float]:
        """One reward per completion.

        Raises:
            CodeError: the reward raised, took longer than `timeout_s`, or ended its process.
            WorkerError, DeadlineError: a process that had to be replaced does not start.
        """
        index = await self._idle.get()
        try:
            child = self._children.get(index) or await self._start(index)
            return await self._score(index, child, wire.encode(ScoreRequest(tuple(completions), row)))
        finally:
            self._idle.put_nowait(index)

    async def _score(self, index: int, child: Child, request: bytes) -> list[float]:
        try:
            return wire.decode(list[float], await child.call("score", request, timeout_s=self._timeout_s))
        except CodeError:
            raise
        except BaseException as exc:  # late, dead, or cancelled in mid-call: this process cannot be used again
            del self._children[index]
            await child.kill()
            if isinstance(exc, DeadlineError):
                raise CodeError(
                    f"the reward {self._dotted} did not answer within rollout.reward_timeout_s = {self._timeout_s:g} s; "
                    "make it faster or raise the limit") from exc
            if isinstance(exc, WorkerError):
                raise CodeError(f"the reward {self._dotted} ended its process: {exc}") from exc
            raise

    async def _start(self, index: int) -> Child:
        log = self._log_dir / f"reward-{index}.log" if self._log_dir else None
        env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        spec = ChildSpec(f"reward {index}", "offbeat.rollout.reward_worker:RewardWorker", env, log)
        child = await Child.start(spec, timeout_s=_START_TIMEOUT_S)
        try:
            await child.call("load", self._dotted.encode(), timeout_s=_START_TIMEOUT_S)
        except BaseException:
            await child.kill()
            raise
        self._children[index] = child
        return child
