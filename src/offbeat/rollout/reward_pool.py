"""Runs rewards in a pool of processes of user code.

A worker scores the completions of one group in successive calls, each under a deadline. A completion that cannot be scored fails alone;
the others of its group are scored. If a call is late, its process is killed, and a new one continues with the next completion. A process
that dies is replaced, and the completion that it was scoring is tried once more, because something else may have killed the process. A
reward of groups, or one that is async, scores all completions of one in a single call under one deadline.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Self

from offbeat.data import wire
from offbeat.data.reward import FailedReward, NamedReward
from offbeat.data.row import Row
from offbeat.errors import CodeError, DeadlineError, WorkerError, shorten
from offbeat.rollout.reward_worker import GroupRequest, RewardLoadRequest, RewardRequest, RewardsLoaded, ScoredCompletion, ScoredGroup
from offbeat.user_code.pool import CodePool, CodeRole


class Rewards(ABC):
    """Rewards of completions, computed by processes that start on entering it."""

    _hidden: Collection[str] = ()
    """Environment variables that the processes do not see."""

    @abstractmethod
    async def score(self, completions: Sequence[str], row: Row) -> list[float]:
        """Return one reward per completion; a `FailedReward` where there is none.

        Raises:
            CodeError: a workflow passes completions that are not text, or something other than a row.
            WorkerError, DeadlineError: a replacement process does not start.
        """

    async def check(self, row: Row) -> float:
        """Score the row's own answer, to find a broken reward before training; raises CodeError if that fails, others as in `score`."""
        [reward] = await self.score([row.answer], row)
        if isinstance(reward, FailedReward):
            missed = next((f"; rollout.reward_env = ['{name}'] would show it that variable" for name in self._hidden
                           if name in reward.reason), "")
            raise CodeError(reward.reason + missed)
        return reward


class RewardPool(Rewards):
    """A pool of `num_workers` processes that run one reward function, or several with weights."""

    def __init__(
        self, reward: str | Mapping[str, float], *, num_workers: int, timeout_s: float, log_dir: Path | None, memory_bytes: int = 0,
        allowed: Collection[str] = (), start_timeout_s: float = 120.0,
    ) -> None:
        """Prepare the pool; its processes start on entering it.

        Args:
            reward: "module:function"; or several such names with the weight of each.
            timeout_s: limit for scoring one completion.
            memory_bytes: memory limit of each process; 0 for none.
            allowed: environment variables that the processes see although they look like secrets.
            start_timeout_s: limit for starting a process, and for loading the function.
        """
        weights = {} if isinstance(reward, str) else dict(reward)
        self._dotted = reward if isinstance(reward, str) else " or ".join(reward)
        self._timeout_s = timeout_s
        self._pool = CodePool(
            CodeRole(
                "reward {}", "offbeat.rollout.reward_worker:RewardWorker", log="reward-{}.log",
                load=wire.encode(RewardLoadRequest("" if weights else self._dotted, weights)), functions=(*weights,) or (self._dotted,),
                memory_bytes=memory_bytes, allowed=allowed, start_timeout_s=start_timeout_s),
            num_processes=num_workers, log_dir=log_dir)
        self._hidden = self._pool.hidden

    async def __aenter__(self) -> Self:
        try:
            await self._pool.__aenter__()
        except DeadlineError as exc:
            exc.add_note("if the machine is busy, raise cluster.start_timeout_s")
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._pool.__aexit__(*exc)

    async def score(self, completions: Sequence[str], row: Row) -> list[float]:
        """See `Rewards.score`; there is no reward where the function raised, was late, ended its process or gave no valid one."""
        check_call(completions, row)
        if not completions:
            return []
        async with self._pool.place() as index:
            if wire.decode(RewardsLoaded, self._pool.loaded).of_group:
                [scored] = await self._answers(index, "score_group", [wire.encode(GroupRequest(tuple(completions), row))])
                group = wire.decode(ScoredGroup, scored).scored if isinstance(scored, bytes) else [scored] * len(completions)
                return [_reward(each) for each in group]
            answers = await self._answers(index, "score", [wire.encode(RewardRequest(completion, row)) for completion in completions])
            return [_reward(wire.decode(ScoredCompletion, answer) if isinstance(answer, bytes) else answer) for answer in answers]

    async def _answers(self, index: int, method: str, requests: Sequence[bytes]) -> list[bytes | FailedReward]:
        """Return the process's answer to each request, or why there is none."""
        answers: list[bytes | FailedReward] = []
        died_at = -1  # index of the request at which a process last died
        while rest := requests[len(answers):]:
            process = await self._pool.process(index)
            try:
                async with self._pool.ending_on_error(process):
                    async for answer in process.child.call_each(method, rest, timeout_s=self._timeout_s):
                        answers.append(answer)
            except DeadlineError:
                answers.append(FailedReward(
                    f"the reward {self._dotted} did not answer within rollout.reward_timeout_s = {self._timeout_s:g} s; "
                    "make it faster or raise the limit"))
            except WorkerError as exc:
                if died_at < len(answers):
                    died_at = len(answers)
                else:
                    answers.append(FailedReward(f"the reward {self._dotted} ended its process: {exc}"))
        return answers


def _reward(scored: ScoredCompletion | FailedReward) -> float:
    if isinstance(scored, FailedReward):
        return scored
    return FailedReward(scored.failure) if scored.failure else NamedReward(scored.parts) if scored.parts else scored.reward


def check_call(completions: Sequence[str], row: Row) -> None:
    """Raise CodeError unless a workflow asks for the rewards of texts, for a row."""
    if wrong := [each for each in completions if not isinstance(each, str)] or ([] if isinstance(row, Row) else [row]):
        raise CodeError(f"score takes a list of texts and the episode's row, got {shorten(wrong[0])} among them")
