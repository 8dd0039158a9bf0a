"""A step's batch is made ahead of time only where it can be, is used once, and is given up when nobody will train on it."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from offbeat.config.algorithms import AlgorithmConfig
from offbeat.controller.batches import StepBatches
from offbeat.controller.state import LoopStep
from offbeat.data.trajectory import Group, Trajectory
from offbeat.telemetry.trace import Tracer

PLAIN = AlgorithmConfig()
LIMITS = {"max_new_tokens": 8, "timeout_s": 60.0}
FIRST = LoopStep(1, 0, 1)


def group(prompt_id: str) -> Group:
    samples = [Trajectory([1, token], [False, True], [0.0, -1.0], [-1, 0], float(token)) for token in (2, 3)]
    return Group(prompt_id, 0, tuple(samples))


class Released:
    """Rollouts of which the groups of the next step come when they are released."""

    def __init__(self) -> None:
        self.has_ahead = False
        self._groups: asyncio.Future[Sequence[Group]] = asyncio.get_running_loop().create_future()
        self.num_waiting = 0

    def release(self, groups: Sequence[Group]) -> None:
        self.has_ahead = True
        self._groups.set_result(groups)

    async def take_ahead(self) -> Sequence[Group]:
        self.num_waiting += 1
        try:
            return await self._groups
        finally:
            self.num_waiting -= 1


def parts_of(*, critic: object = None) -> tuple[Any, list[int]]:
    """The parts that batches use, and the number of sequences of each batch that ranks are given ahead of its step."""
    prepared: list[int] = []

    async def spread_ahead(batch, *, num_minibatches: int) -> None:
        assert num_minibatches == 1
        prepared.append(len(batch))

    return SimpleNamespace(
        record=SimpleNamespace(tracer=Tracer(None)), trainers=SimpleNamespace(spread_ahead=spread_ahead),
        critic=critic), prepared


def test_a_batch_that_was_made_ahead_is_taken_once() -> None:
    async def main() -> None:
        parts, prepared = parts_of()
        rollouts = Released()
        async with StepBatches(parts, **LIMITS) as batches:
            first, _ = await batches.take([group("0:0")], FIRST, PLAIN)
            batches.make_ahead(FIRST.following(), rollouts, PLAIN)
            rollouts.release([group("0:1"), group("0:2")])
            await batches.cancel_idle(rollouts)
            ahead, _ = await batches.take([], FIRST.following(), PLAIN)
            last, _ = await batches.take([group("0:3")] * 3, FIRST.following().following(), PLAIN)
        assert (len(first), len(ahead), len(last), prepared) == (2, 4, 6, [4])

    asyncio.run(main())


def test_a_step_does_not_wait_for_groups_that_were_not_released() -> None:
    async def main() -> None:
        rollouts = Released()
        async with StepBatches(parts_of()[0], **LIMITS) as batches:
            batches.make_ahead(FIRST.following(), rollouts, PLAIN)
            await asyncio.sleep(0)
            assert rollouts.num_waiting == 1
            await batches.cancel_idle(rollouts)
            assert rollouts.num_waiting == 0
            batch, _ = await batches.take([group("0:0")], FIRST.following(), PLAIN)
            assert len(batch) == 2
            following = Released()
            batches.make_ahead(FIRST.following().following(), following, PLAIN)
            await asyncio.sleep(0)
            assert following.num_waiting == 1
        assert following.num_waiting == 0, "the end leaves no task behind"

    asyncio.run(main())


@pytest.mark.parametrize("settings", [{"kl_target": 0.1, "kl_loss": "k3"}, {"entropy_target": 1.0}])
def test_nothing_is_made_ahead_with_coefficients_that_depend_on_the_step_in_training(settings) -> None:
    async def main() -> None:
        rollouts = Released()
        async with StepBatches(parts_of()[0], **LIMITS) as batches:
            batches.make_ahead(FIRST.following(), rollouts, AlgorithmConfig(**settings))
            await asyncio.sleep(0)
            assert rollouts.num_waiting == 0

    asyncio.run(main())


@pytest.mark.parametrize(("settings", "critic"), [({"kl_loss": "k3"}, None), ({}, object())], ids=["scores", "critic"])
def test_ranks_are_given_nothing_ahead_to_which_something_is_added(settings, critic) -> None:
    async def main() -> None:
        parts, prepared = parts_of(critic=critic)
        rollouts, algorithm = Released(), AlgorithmConfig(**settings)
        async with StepBatches(parts, **LIMITS) as batches:
            batches.make_ahead(FIRST.following(), rollouts, algorithm)
            rollouts.release([group("0:1")])
            batch, _ = await batches.take([], FIRST.following(), algorithm)
        assert (len(batch), prepared) == (2, [])

    asyncio.run(main())
