"""The spans of recorded answers, and the seeds with which they were asked for."""

import asyncio
from dataclasses import replace

import numpy as np

from offbeat.data.row import Row
from offbeat.data.trajectory import Group, Trajectory
from offbeat.inference.sampling import Sample, Sampling
from offbeat.rollout.episode import Episode
from offbeat.rollout.randomness import of_sample, seeded
from offbeat.rollout.recorded_spans import spans_of


def trajectory(versions: list[int], *, episode: int | None = None) -> Trajectory:
    """Tokens 10, 11, ...; a version of -1 is a given token."""
    columns = np.array(versions, np.int32)
    return Trajectory(
        np.arange(10, 10 + len(versions), dtype=np.int32), columns >= 0, np.where(columns >= 0, -0.5, 0).astype(np.float32), columns, 1.0,
        episode=episode)


def test_a_switch_of_weights_ends_a_span_and_the_next_one_goes_on_after_its_tokens() -> None:
    group = Group("0:7", 3, (trajectory([-1, -1, 3, 3, 4]), trajectory([-1, -1, 4])))
    spans = list(spans_of(group, seed=None))
    assert [(span.sample, span.start, span.num_begun, span.version) for span in spans] == [(0, 2, 0, 3), (0, 2, 2, 4), (1, 2, 0, 4)]
    assert [span.tokens.tolist() for span in spans] == [[12, 13], [12, 13, 14], [12]] and {span.prompt for span in spans} == {(10, 11)}
    assert {span.seed for span in spans} == {None}


def test_each_turn_of_an_episode_is_asked_with_what_came_before_it() -> None:
    group = Group("0:7", 3, (trajectory([-1, 3, 3, -1, 3], episode=1),))
    assert [(span.prompt, span.tokens.tolist()) for span in spans_of(group, seed=None)] == [((10,), [11, 12]), ((10, 11, 12, 13), [14])]


def test_seeds_are_those_with_which_episodes_ask() -> None:
    asked: list[tuple[tuple[int, ...], int | None]] = []

    async def generate(prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "") -> list[Sample]:
        asked.append((prompt, sampling.seed))
        return []

    async def score(completions: list[str], row: Row) -> list[float]:
        return []

    episode = Episode(
        row=Row(prompt="", answer=""), prompt=(10, 11), group_size=2, sampling=Sampling(4), generate=generate, score=score,
        tokenizer=None, context=64)  # pyright: ignore[reportArgumentType] - nothing here reads tokens
    of_group = seeded(episode, 5)

    async def ask() -> None:
        await of_group.generate((10, 11), Sampling(4), n=2)
        one = of_sample(replace(of_group), 1)
        await one.generate((10,), Sampling(4), n=1)
        await one.generate((10, 11, 12, 13), Sampling(4), n=1)

    asyncio.run(ask())
    together = Group("0:7", 3, (trajectory([-1, -1, 3]), trajectory([-1, -1, 3])))
    assert [(span.prompt, span.seed, span.first_sample) for span in spans_of(together, seed=5)] == [(*asked[0], 0), (*asked[0], 1)]
    episodes = Group("0:7", 3, (trajectory([-1, 3, 3, -1, 3], episode=1),))
    assert [(span.prompt, span.seed) for span in spans_of(episodes, seed=5)] == asked[1:]
