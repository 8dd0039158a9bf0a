"""Scores completions with a reward model, which runs in processes of its own. Torch-free.

    _serve   one loop for each process; consumes waiting completions; produces their rewards; waits for one to come; woken by `score`

A process scores all waiting completions, up to a bound, in one call under the deadline of a reward. If the call is late, the process is
ended, and its completions fail; a new process takes the next ones. If a process dies, its completions are tried once more.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from offbeat.aio import gather_all
from offbeat.data.reward import FailedReward, check_reward
from offbeat.data.row import Prompt, Row
from offbeat.engine.reward_options import RewardModelOptions, ScoredTexts, TextsToScore
from offbeat.errors import CodeError, DeadlineError, DeathError, WorkerError, first_line
from offbeat.rollout.reward_pool import Rewards, check_call
from offbeat.user_code.boundary import Caught
from offbeat.workers.worker import FAILED_STOP_S, Launcher, Nothing, Worker, WorkerSpec, ask

_MOST_TEXTS = 64
"""Completions in one call: enough to fill a forward pass, and few enough that a call that fails does not lose many."""


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A completion that waits for its reward."""

    prompt: Prompt
    answer: str
    reward: "asyncio.Future[float]"


def worker_specs(num_workers: int, *, log_dir: Path, threads: int = 1, num_devices: int = 0, of_set: str = "") -> list[WorkerSpec]:
    """Return the processes of a reward model; their names begin with the evaluation set that it judges, "" for the run."""
    names = [f"{of_set} reward model {index}".lstrip() for index in range(num_workers)]
    return [
        WorkerSpec(
            name, "offbeat.engine.reward_worker:RewardModelWorker", log_dir / f"{name.replace(' ', '-')}.log", threads=threads,
            num_devices=num_devices)
        for name in names]


class ModelReward(Rewards):
    """A reward model in processes of its own."""

    def __init__(
        self, launcher: Launcher, options: RewardModelOptions, specs: Sequence[WorkerSpec], *, timeout_s: float, start_timeout_s: float,
    ) -> None:
        """Its processes, the `specs`, start on entering it; `timeout_s` limits one call, `start_timeout_s` starting and loading one."""
        self._launcher = launcher
        self._options = options
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._specs = list(specs)
        self._workers: dict[int, Worker] = {}
        self._waiting: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._serving: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await gather_all(self._start(index) for index in range(len(self._specs)))
        self._serving = [asyncio.create_task(self._serve(index), name=f"serve {spec.name}") for index, spec in enumerate(self._specs)]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def score(self, completions: Sequence[str], row: Row) -> list[float]:
        """See `Rewards.score`; raises CodeError also for a row that has images."""
        check_call(completions, row)
        if row.images:
            raise CodeError(f"the reward model {self._options.model} is not shown the images of a prompt; score rows without images")
        loop = asyncio.get_running_loop()
        waiting = [_Waiting(row.prompt, completion, loop.create_future()) for completion in completions]
        for each in waiting:
            self._waiting.put_nowait(each)
        return await gather_all(each.reward for each in waiting)

    async def _serve(self, index: int) -> None:
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < _MOST_TEXTS and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            batch = [each for each in batch if not each.reward.done()]  # an episode that was cancelled waits no more
            rewards: Sequence[float] = ()
            with Caught() as caught:  # this loop goes on, and whoever waits decides
                rewards = await self._score_batch(index, batch) if batch else ()
            if caught.error is not None:
                for each in batch:
                    if not each.reward.done():
                        each.reward.set_exception(caught.error)
                continue
            for each, reward in zip(batch, rewards, strict=True):
                if not each.reward.done():
                    each.reward.set_result(reward)

    async def _score_batch(self, index: int, batch: Sequence[_Waiting]) -> list[float]:
        request = TextsToScore(tuple(each.prompt for each in batch), tuple(each.answer for each in batch))
        why = ""
        for _ in range(2):
            worker = self._workers.get(index) or await self._start(index)
            try:
                found = await ask(worker, "score", request, ScoredTexts, timeout_s=self._timeout_s)
            except DeadlineError:
                await self._end(index)
                return self._failed(
                    batch, f"did not answer within rollout.reward_timeout_s = {self._timeout_s:g} s; raise the limit, or use a faster one")
            except DeathError as exc:
                await self._end(index)
                why = f"ended its process: {first_line(exc)}"
            except WorkerError as exc:
                return self._failed(batch, f"failed: {first_line(exc)}")
            else:
                return [
                    FailedReward(f"the reward model {self._options.model}: {failure}") if failure else check_reward(reward)
                    for reward, failure in zip(found.rewards, found.failures, strict=True)]
        return self._failed(batch, why)

    def _failed(self, batch: Sequence[_Waiting], how: str) -> list[float]:
        return [FailedReward(f"the reward model {self._options.model} {how}")] * len(batch)

    async def _start(self, index: int) -> Worker:
        worker = await self._launcher.start(self._specs[index], timeout_s=self._start_timeout_s)
        try:
            await ask(worker, "load", self._options, Nothing, timeout_s=self._start_timeout_s)
        except BaseException:
            await worker.stop(timeout_s=FAILED_STOP_S)
            raise
        self._workers[index] = worker
        return worker

    async def _end(self, index: int) -> None:
        await self._workers.pop(index).stop(timeout_s=FAILED_STOP_S)
