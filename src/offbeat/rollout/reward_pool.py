"""Rewards in processes of their own: user code cannot block, crash or leak into the controller.

A worker runs one call at a time. A call that passes its deadline has its process killed and replaced; the call fails, the others go on.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

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
        self._idle: asyncio.Queue[Child] = asyncio.Queue()
        self._all: set[Child] = set()

    async def __aenter__(self) -> "RewardPool":
        try:
            await gather_all(self._add(index) for index in range(self._num_workers))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.gather(*(child.stop(timeout_s=_STOP_TIMEOUT_S) for child in self._all))

    async def check(self, row: Row) -> float:
        """Score the row's own answer, so that a broken reward is found before anything is trained.

        Raises:
            CodeError: the reward cannot be loaded, raises, hangs or kills its process.
        """
        try:
            return (await self.score([row.answer], row))[0]
        except DeadlineError as exc:
            raise CodeError(
                f"the reward {self._dotted} did not answer within rollout.reward_timeout_s = {self._timeout_s:g} s; "
                "make it faster or raise the limit") from exc
        except WorkerError as exc:
            raise CodeError(f"the reward {self._dotted} ended its process: {exc}") from exc

    async def score(self, completions: Sequence[str], row: Row) -> list[float]:
        """One reward per completion.

        Raises:
            CodeError: the reward raised; shows the exception.
            DeadlineError: it took longer than `timeout_s`.
            WorkerError: its process died.
        """
        child = await self._idle.get()
        try:
            request = wire.encode(ScoreRequest(tuple(completions), row))
            rewards = wire.decode(list[float], await child.call("score", request, timeout_s=self._timeout_s))
        except CodeError:
            self._idle.put_nowait(child)
            raise
        except BaseException:  # late, dead, or cancelled in mid-call: this process cannot be used again
            await asyncio.shield(self._replace(child))
            raise
        self._idle.put_nowait(child)
        return rewards

    async def _replace(self, child: Child) -> None:
        self._all.discard(child)
        await child.kill()
        await self._add(len(self._all))

    async def _add(self, index: int) -> None:
        name = f"reward {index}"
        log = self._log_dir / f"reward-{index}.log" if self._log_dir else None
        env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        child = await Child.start(ChildSpec(name, "offbeat.rollout.reward_worker:RewardWorker", env, log), timeout_s=_START_TIMEOUT_S)
        self._all.add(child)
        await child.call("load", self._dotted.encode(), timeout_s=_START_TIMEOUT_S)
        self._idle.put_nowait(child)
