"""Pools and rows that leave: by hand, whatever the order in which groups end, and across checkpoints."""

import random

import numpy as np
import pytest

from offbeat.config.curriculum import CurriculumConfig
from offbeat.data import wire
from offbeat.data.curriculum import Curriculum, CurriculumState
from offbeat.data.dataset import ListDataset
from offbeat.data.row import Row
from offbeat.data.stream import PromptStream, StreamState
from offbeat.data.trajectory import Group, Trajectory

POOLS = CurriculumConfig(pools=True)
BOTH = CurriculumConfig(pools=True, leave_at=0.75)
EMPTY = np.zeros(0)


def stream(num_rows: int, config: CurriculumConfig | None, *, shuffle: bool = True) -> PromptStream:
    return PromptStream(ListDataset(tuple(Row(str(i), "") for i in range(num_rows))), seed=3, shuffle=shuffle, curriculum=config)


def group(prompt_id: str, *rewards: float) -> Group:
    return Group(prompt_id, 0, tuple(Trajectory(EMPTY, EMPTY, EMPTY, EMPTY, reward) for reward in rewards))


def rewards_of(prompt_id: str) -> tuple[float, ...]:
    """Rewards that depend on the prompt alone: rows differ in difficulty, and epochs in luck."""
    chance = random.Random(prompt_id)
    solved = (int(prompt_id.partition(":")[2]) % 5) / 4
    return tuple(float(chance.random() < solved) for _ in range(4))


@pytest.mark.parametrize("config", [None, CurriculumConfig()])
def test_without_a_curriculum_the_stream_neither_keeps_nor_tells_anything(config: CurriculumConfig | None) -> None:
    drawing = stream(4, config)
    assert sorted(drawing.next()[0] for _ in range(4)) == [f"0:{i}" for i in range(4)]
    drawing.note(group("0:1", 1.0, 1.0))
    assert drawing.state() == StreamState(0, 4) and drawing.stats().values() == {}


def test_rows_are_in_the_pool_of_their_last_groups_mean() -> None:
    curriculum = Curriculum(POOLS, num_rows=7, seed=0)
    for index, rewards in enumerate(([0.0, 0.5], [0.0, 0.75], [1.0, 0.5], [1.0, 0.75], [], [1.0])):
        curriculum.note(index, np.array(rewards, np.float32))
    curriculum.note(5, np.array([0.0]))  # the last one counts
    assert curriculum.stats().values() == {
        "curriculum/hard_prompts": 2, "curriculum/normal_prompts": 2, "curriculum/easy_prompts": 1, "curriculum/unseen_prompts": 2,
        "curriculum/left_share": 0}
    assert curriculum.state() == CurriculumState({0: 0.25, 1: 0.375, 2: 0.75, 3: 0.875, 5: 0.0})


def test_a_pool_is_drawn_in_the_share_of_epochs_that_its_weight_says() -> None:
    num_rows, epochs = 400, 50
    curriculum = Curriculum(POOLS, num_rows=num_rows, seed=1)
    means = np.arange(num_rows) % 4 / 3  # hard, normal, normal, easy
    for index in range(num_rows - 100):
        curriculum.note(index, means[index : index + 1])
    drawn = np.zeros(num_rows)
    for epoch in range(epochs):
        curriculum.start_epoch(epoch)
        drawn += [curriculum.draws(index) for index in range(num_rows)]
    assert (drawn[300:] == epochs).all() and (drawn[:300][means[:300] % 1 > 0] == epochs).all()
    for mean in (0, 1):
        assert drawn[:300][means[:300] == mean].mean() / epochs == pytest.approx(0.2, abs=0.02)  # 75 rows: a deviation of 0.0065


def test_a_row_that_is_solved_leaves_and_all_return_once_none_is_left() -> None:
    drawing = stream(3, CurriculumConfig(leave_at=0.75), shuffle=False)
    for rewards in ((1, 1, 1, 1), (1, 1, 1, 0), (1, 1, 0, 0)):
        prompt_id, _ = drawing.next()
        drawing.note(group(prompt_id, *rewards))
    assert drawing.stats().values()["curriculum/left_share"] == pytest.approx(2 / 3)
    assert [drawing.next()[0] for _ in range(2)] == ["1:2", "2:2"]
    drawing.note(group("2:2", 1, 1, 1, 2))
    assert [drawing.next()[0] for _ in range(4)] == ["3:0", "3:1", "3:2", "4:0"]


def test_draws_do_not_depend_on_the_order_in_which_groups_end() -> None:
    def play(seed: int) -> list[str]:
        """With 40 rows and at most 8 groups in flight, hardly a row's turn comes while its last group runs."""
        chance, drawing = random.Random(seed), stream(40, BOTH)
        drawn, running = [], []
        while len(drawn) < 400:
            running.append(drawing.next()[0])
            drawn.append(running[-1])
            if len(running) == 8 or chance.random() < 0.5:
                ended = running.pop(chance.randrange(len(running)) if len(running) < 8 else 0)
                drawing.note(group(ended, *rewards_of(ended)))
        return drawn

    expected = play(0)
    assert len({int(name.partition(":")[0]) for name in expected}) > 12, "rows were never passed over"
    assert all(play(seed) == expected for seed in range(1, 6))


@pytest.mark.parametrize("stop", [0, 1, 17, 40, 90, 199])
def test_a_restored_stream_draws_what_the_other_one_draws(stop: int) -> None:
    def play(drawing: PromptStream, count: int) -> list[str]:
        drawn = []
        for _ in range(count):
            drawn.append(drawing.next()[0])
            drawing.note(group(drawn[-1], *rewards_of(drawn[-1])))
        return drawn

    straight = stream(12, BOTH)
    expected = play(straight, 200)
    first, second = stream(12, BOTH), stream(12, BOTH)
    before = play(first, stop)
    second.restore(wire.decode_json(StreamState, wire.encode_json(first.state())))
    assert before + play(second, 200 - stop) == expected
    assert second.state() == straight.state() and second.stats() == straight.stats()


def test_a_checkpoint_without_a_curriculum_may_go_on_with_one() -> None:
    drawing = stream(4, BOTH)
    drawing.note(group("0:1", 1.0))
    drawing.restore(wire.decode_json(StreamState, b'{"epoch": 2, "position": 1, "returned": []}'))
    assert drawing.state() == StreamState(2, 1, (), CurriculumState())
