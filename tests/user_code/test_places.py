"""Places for episodes."""

import asyncio

from offbeat.rollout.clock import EpisodeClock
from offbeat.user_code.places import Places


def test_waiting_for_a_place_counts_to_no_deadline() -> None:
    async def main() -> list[str]:
        places, done = Places(1), []

        async def play(name: str) -> None:
            async with EpisodeClock(name, 0.5) as clock, places.taken(clock.stand_still):
                await asyncio.sleep(0.3)
                done.append(name)

        await asyncio.gather(*map(play, "abcd"))
        return done

    assert asyncio.run(main()) == ["a", "b", "c", "d"]
