"""The deadline of an episode, in real time."""

import asyncio
import time

import pytest

from chats import CHATML, words
from offbeat.aio import HaltingClock
from offbeat.data.row import Row
from offbeat.errors import DeadlineError
from offbeat.inference.sampling import Sample, Sampling
from offbeat.rollout.clock import EpisodeClock, requests_off
from offbeat.rollout.episode import Episode


async def later(value: int, delay_s: float) -> int:
    await asyncio.sleep(delay_s)
    return value


def test_a_body_that_is_late_is_ended_by_name() -> None:
    async def main() -> None:
        async with EpisodeClock("group 0:7", 0.05):
            await asyncio.sleep(10)

    with pytest.raises(DeadlineError, match="waiting for group 0:7 passed its deadline of 0.05 s"):
        asyncio.run(main())


def test_time_in_which_it_stands_still_does_not_count_also_of_several_waits_at_once() -> None:
    async def main() -> list[int]:
        async with EpisodeClock("group 0:7", 0.2) as clock:
            return [
                await clock.stand_still(later(1, 0.3)),
                *await asyncio.gather(clock.stand_still(later(2, 0.1)), clock.stand_still(later(3, 0.3)))]

    assert asyncio.run(main()) == [1, 2, 3]


def test_what_it_has_counted_before_it_stood_still_is_counted_on() -> None:
    async def main() -> float:
        start = time.monotonic()
        with pytest.raises(DeadlineError):
            async with EpisodeClock("group 0:7", 0.3) as clock:
                await asyncio.sleep(0.2)
                await clock.stand_still(later(1, 0.2))
                await asyncio.sleep(60)
        return time.monotonic() - start

    assert 0.45 < asyncio.run(main()) < 30


def test_a_loop_that_was_held_up_ends_nothing() -> None:
    def hold_up() -> None:
        time.sleep(0.4)

    async def main() -> int:
        async with EpisodeClock("group 0:7", 0.3):
            hold_up()
            return await later(1, 0.01)

    assert asyncio.run(main()) == 1


def test_errors_and_timeouts_of_the_body_are_its_own() -> None:
    async def main(error: Exception) -> None:
        async def fails() -> None:
            raise error

        async with EpisodeClock("group 0:7", 5) as clock:
            await clock.stand_still(fails())

    for error in (KeyError("turns"), TimeoutError("mine")):
        with pytest.raises(type(error)) as caught:
            asyncio.run(main(error))
        assert caught.value is error


def test_it_stands_still_while_it_is_told_to() -> None:
    async def main() -> float:
        engines = HaltingClock()
        engines.halt()
        start = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineError, match="waiting for group 0:7"):
            async with EpisodeClock("group 0:7", 0.2, engines=engines):
                await asyncio.sleep(0.4)
                engines.go_on()
                await asyncio.sleep(60)
        return asyncio.get_running_loop().time() - start

    assert asyncio.run(main()) >= 0.55


def test_requests_do_not_count_on_a_clock_that_they_are_off_and_end_with_the_one_around_it() -> None:
    asked = 0

    async def never(_prompt: tuple[int, ...], _sampling: Sampling, *, n: int, session: str = "") -> list[Sample]:
        nonlocal asked
        asked += n
        await asyncio.sleep(60)
        return []

    async def score(_completions: object, _row: Row) -> list[float]:
        return []

    async def main() -> None:
        clock = EpisodeClock("the episode", 0.1)
        episode = Episode(Row("1>", "1"), (1,), 1, Sampling(8), never, score, words(CHATML))
        async with EpisodeClock("the group", 0.6), clock:
            await requests_off(clock, episode).generate((1,), Sampling(8), n=1)

    with pytest.raises(DeadlineError, match="waiting for the group"):
        asyncio.run(main())
    assert asked == 1
