"""The plainest workflow."""

import asyncio
from collections.abc import Sequence

from offbeat.data.row import Row
from offbeat.data.tokenizer import character_tokenizer
from offbeat.inference.sampling import Sample, Sampling
from offbeat.rollout.episode import Episode
from offbeat.rollout.workflows.single_turn import single_turn


def test_a_group_is_one_request_and_each_sample_gets_its_own_reward() -> None:
    asked: list[tuple[tuple[int, ...], Sampling, int]] = []

    async def generate(prompt: tuple[int, ...], sampling: Sampling, *, n: int) -> list[Sample]:
        asked.append((prompt, sampling, n))
        return [Sample((7 + i, 0), (-0.5, -0.5), (2, 2), "abc"[i], "stop") for i in range(n)]

    async def score(completions: Sequence[str], row: Row) -> list[float]:
        return [float(completion == row.answer) for completion in completions]

    sampling = Sampling(5, temperature=0.7)
    episode = Episode(Row("x>", "b"), (3, 4), 3, sampling, generate, score, character_tokenizer())
    trajectories = asyncio.run(single_turn(episode))
    assert asked == [((3, 4), sampling, 3)]
    assert [t.reward for t in trajectories] == [0.0, 1.0, 0.0]
    assert [t.tokens.tolist() for t in trajectories] == [[3, 4, 7, 0], [3, 4, 8, 0], [3, 4, 9, 0]]
