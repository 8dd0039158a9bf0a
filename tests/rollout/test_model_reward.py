"""A reward model in its own process: what waits is scored together, in order; late and dead processes are replaced."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from offbeat.data import wire
from offbeat.data.image_sources import ImageSource
from offbeat.data.reward import FailedReward
from offbeat.data.row import Row
from offbeat.engine.reward_options import RewardModelOptions, ScoredTexts, TextsToScore
from offbeat.errors import CodeError, DeadlineError, DeathError, WorkerError
from offbeat.process.frames import Payload
from offbeat.rollout.model_reward import ModelReward, worker_specs
from offbeat.workers.worker import Nothing, WorkerSpec

ROW = Row("12", "3")
OPTIONS = RewardModelOptions("folder", "float32", "", 64)


class ScriptedWorker:
    """A process whose answers are numbers; `acts` are errors to raise instead, in order."""

    host = "127.0.0.1"
    alive = True

    def __init__(self, name: str, launcher: "ScriptedLauncher") -> None:
        self.name = name
        self.stopped = False
        self._launcher = launcher

    async def call(self, method: str, payload: Payload = b"", *, timeout_s: float, patience_s: float | None = None) -> bytes:
        payload = b"".join(payload)
        if method == "load":
            assert wire.decode(RewardModelOptions, payload) == OPTIONS
            return wire.encode(Nothing())
        request = wire.decode(TextsToScore, payload)
        self._launcher.batches.append(request.answers)
        await asyncio.sleep(0)
        if self._launcher.acts:
            raise self._launcher.acts.pop(0)
        bad = tuple("too long" if answer == "bad" else "" for answer in request.answers)
        return wire.encode(ScoredTexts(tuple(float("nan") if why else float(a) for a, why in zip(request.answers, bad, strict=True)), bad))

    async def stack(self) -> str:
        return ""

    async def stop(self, *, timeout_s: float) -> None:
        self.stopped = True


class ScriptedLauncher:
    """Starts scripted processes."""

    def __init__(self, *acts: Exception) -> None:
        self.acts = list(acts)
        self.batches: list[tuple[str, ...]] = []
        self.workers: list[ScriptedWorker] = []

    async def __aenter__(self) -> "ScriptedLauncher":
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    async def start(self, spec: WorkerSpec, *, timeout_s: float) -> ScriptedWorker:
        self.workers.append(ScriptedWorker(spec.name, self))
        return self.workers[-1]


def run(launcher: ScriptedLauncher, body: Callable[[ModelReward], Awaitable[None]], *, num_workers: int = 1) -> None:
    async def main() -> None:
        async with ModelReward(
                launcher, OPTIONS, worker_specs(num_workers, log_dir=Path()), timeout_s=5, start_timeout_s=5) as reward:
            async with asyncio.timeout(10):
                await body(reward)

    asyncio.run(main())


def test_what_waits_is_scored_together_and_comes_back_in_order() -> None:
    launcher = ScriptedLauncher()

    async def body(reward: ModelReward) -> None:
        groups = [[str(10 * group + i) for i in range(8)] for group in range(20)]
        found = await asyncio.gather(*(reward.score(group, ROW) for group in groups))
        assert found == [[float(answer) for answer in group] for group in groups]

    run(launcher, body)
    assert max(map(len, launcher.batches)) == 64 and sum(map(len, launcher.batches)) == 160 and len(launcher.batches) <= 5


def test_every_process_takes_its_share() -> None:
    launcher = ScriptedLauncher()

    async def body(reward: ModelReward) -> None:
        await asyncio.gather(*(reward.score([str(i)] * 64, ROW) for i in range(4)))

    run(launcher, body, num_workers=2)
    assert len(launcher.workers) == 2 and len(launcher.batches) == 4


def test_a_completion_that_cannot_be_scored_fails_alone_and_calls_are_checked() -> None:
    async def body(reward: ModelReward) -> None:
        good, bad = await reward.score(["1", "bad"], ROW)
        assert good == 1.0 and isinstance(bad, FailedReward) and bad.reason == "the reward model folder: too long"
        with pytest.raises(CodeError, match="score takes a list of texts"):
            await reward.score([1], ROW)  # type: ignore[list-item]
        assert await reward.check(ROW) == 3.0
        with pytest.raises(CodeError, match="too long"):
            await reward.check(Row("12", "bad"))

    run(ScriptedLauncher(), body)


@pytest.mark.parametrize(("acts", "rewards", "reason", "num_workers"), [
    ([DeadlineError("late")], [None, 4.0], "did not answer within rollout.reward_timeout_s = 5 s", 2),
    ([DeathError("reward model 0 was killed")], [3.0, 4.0], "", 2),
    ([DeathError("killed"), DeathError("killed again")], [None, 4.0], "ended its process: killed again", 3),
    ([WorkerError("out of memory\nand more")], [None, 4.0], "failed: out of memory", 1),
])
def test_a_process_that_fails_costs_what_it_was_scoring_at_most(
    acts: list[Exception], rewards: list[float | None], reason: str, num_workers: int,
) -> None:
    launcher = ScriptedLauncher(*acts)

    async def body(reward: ModelReward) -> None:
        found = [(await reward.score([answer], ROW))[0] for answer in ("3", "4")]
        for got, expected in zip(found, rewards, strict=True):
            if expected is None:
                assert isinstance(got, FailedReward) and reason in got.reason
            else:
                assert got == expected

    run(launcher, body)
    assert len(launcher.workers) == num_workers
    assert [worker.stopped for worker in launcher.workers] == [True] * (num_workers - 1) + [False], "a replaced process is ended"


def test_a_group_that_was_given_up_costs_nothing() -> None:
    launcher = ScriptedLauncher()

    async def body(reward: ModelReward) -> None:
        given_up = asyncio.create_task(reward.score(["1"], ROW))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        assert await reward.score(["2"], ROW) == [2.0]

    run(launcher, body)


def test_a_prompt_with_images_is_not_scored_by_its_text(tmp_path: Path) -> None:
    reward = ModelReward(ScriptedLauncher(), OPTIONS, worker_specs(1, log_dir=tmp_path), timeout_s=1.0, start_timeout_s=1.0)
    with pytest.raises(CodeError, match="the reward model folder is not shown the images of a prompt"):
        asyncio.run(reward.score(["3"], Row("\ufffchow many?", "3", images=(ImageSource("a.png"),))))
