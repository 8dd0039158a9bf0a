import asyncio
from collections.abc import Sequence
from typing import Any

from offbeat.config.rollout import RolloutConfig
from offbeat.data.dataset import ListDataset
from offbeat.data.row import Row
from offbeat.data.stream import PromptStream
from offbeat.data.tokenizer import character_tokenizer
from offbeat.errors import EngineError
from offbeat.inference.sampling import Sample, Sampling
from offbeat.rollout.episode import Episode
from offbeat.rollout.executor import RolloutExecutor
from offbeat.rollout.player import RolloutParts
from offbeat.rollout.randomness import mixed, of_sample, seeded
from offbeat.rollout.staleness import Gate
from offbeat.rollout.workflows.single_turn import single_turn

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


def test_a_prompt_that_is_drawn_again_has_other_seeds_and_the_same_ones_in_every_process() -> None:
    """The first try of each prompt fails, as where an engine does."""

    async def seeds_of() -> dict[str, list[int | None]]:
        asked: dict[str, list[int | None]] = {}

        async def fail_first(prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "") -> list[Sample]:
            tries = asked.setdefault(str(prompt), [])
            tries.append(sampling.seed)
            if len(tries) == 1:
                raise EngineError("it fell over")
            return [Sample((5, 0), (-0.5, -0.5), (0, 0), "1", "stop")] * n

        async def score(completions: Sequence[str], _row: Row) -> list[float]:
            return [1.0] * len(completions)

        gate = Gate(batch_size=2, max_running=2, eta=0, version=0, last_version=1)
        stream = PromptStream(ListDataset([Row(f"{index}", "") for index in range(2)]), seed=0, shuffle=False)
        parts = RolloutParts(single_turn, lambda row, size, sampling: Episode(
            row, (int(str(row.prompt)), 2), size, sampling, fail_first, score, character_tokenizer()), seed=7)
        async with RolloutExecutor(gate, stream, parts, config=RolloutConfig(group_size=2), sampling=Sampling(8)) as executor:
            await executor.prepare_batch()
        return asked

    first, again = asyncio.run(seeds_of()), asyncio.run(seeds_of())
    assert first == again and all(len(set(seeds)) == len(seeds) == 2 and None not in seeds for seeds in first.values())
