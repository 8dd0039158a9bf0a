import asyncio
from typing import Any

from offbeat.inference.sampling import Sampling
from offbeat.rollout.episode import Episode
from offbeat.rollout.randomness import mixed, of_sample, seeded

SAMPLING = Sampling(max_new_tokens=4)


def episode_of(asked: list[int | None]) -> Episode:
    async def generate(_prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "") -> list[Any]:
        asked.append(sampling.seed)
        return []

    async def score(*_arguments: object) -> list[float]:
        return []

    return Episode(row=None, prompt=(1,), group_size=2, sampling=SAMPLING, generate=generate, score=score, tokenizer=None)  # type: ignore[arg-type]


def seeds(*requests: tuple[int, ...], seed: int = 5, sample: int | None = None) -> list[int | None]:
    """The seeds of requests with these prompts, in order."""
    asked: list[int | None] = []
    episode = seeded(episode_of(asked), seed)
    episode = episode if sample is None else of_sample(episode, sample)

    async def ask() -> None:
        for prompt in requests:
            await episode.generate(prompt, SAMPLING, n=1)

    asyncio.run(ask())
    return asked


def test_a_seed_depends_on_the_run_the_prompt_and_its_try_alone() -> None:
    assert mixed(0, "0:17", 0) == mixed(0, "0:17", 0)
    assert len({mixed(0, "0:17", 0), mixed(1, "0:17", 0), mixed(0, "0:18", 0), mixed(0, "0:17", 1)}) == 4
    assert all(0 <= mixed(0, number) < 2**63 for number in range(1000))


def test_a_request_has_the_same_seed_whatever_other_requests_came_before() -> None:
    one, two, three = (1, 2), (1, 2, 3), (4,)
    first, second, third = seeds(one, two, three)
    assert seeds(three, one, two) == [third, first, second] and len({first, second, third}) == 3


def test_equal_requests_and_the_samples_of_a_group_have_different_seeds() -> None:
    assert len(set(seeds((1, 2), (1, 2), (1, 2)))) == 3
    assert len({seeds((1, 2), sample=sample)[0] for sample in range(5)} | {seeds((1, 2))[0]}) == 6
    assert seeds((1, 2), sample=3) == seeds((1, 2), sample=3)


def test_a_request_keeps_its_own_seed_and_an_episode_without_one_stays_as_it_is() -> None:
    asked: list[int | None] = []
    plain = episode_of(asked)
    assert of_sample(plain, 1) is plain
    asyncio.run(seeded(plain, 5).generate((1,), Sampling(max_new_tokens=4, seed=9), n=1))  # type: ignore[arg-type]
    assert asked == [9]
