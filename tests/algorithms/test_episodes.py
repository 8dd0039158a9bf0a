"""Episodes as arrays, by hand."""

from dataclasses import replace

import numpy as np

from offbeat.algorithms.episodes import Episodes, Turns, last_tokens, turn_of_tokens
from offbeat.data.trajectory import Group, Trajectory, TurnEnd

MASK = [False, True, True, False, True, False]
TWO = Trajectory(range(6), MASK, np.where(MASK, -0.5, 0), np.where(MASK, 3, -1), 1.0, episode=4, turns=[  # pyright: ignore
    TurnEnd(1, 0.5), TurnEnd(3, 0.25, "shop", 2), TurnEnd(6, 0.0, "", 1)])
ALONE = replace(TWO, episode=None, turns=(), reward=2.0)
GROUPS = [Group("0:0", 0, (TWO, ALONE, replace(TWO, agent="black"), replace(TWO, turns=()))), Group("0:1", 0, rejected="late"),
          Group("0:2", 0, (replace(TWO, reason="too long: 9"), replace(ALONE, agent="black")))]


def test_trajectories_belong_to_parts_and_parts_to_episodes_and_groups() -> None:
    episodes = Episodes.of(GROUPS)
    assert [t.reward for t in episodes.trajectories] == [1.0, 1.0, 1.0, 2.0, 2.0]
    assert (episodes.group_ids.tolist(), episodes.part_ids.tolist(), episodes.episode_ids.tolist()) == (
        [0, 0, 0, 0, 2], [0, 0, 1, 2, 3], [0, 0, 0, 1, 2])
    assert (episodes.part_groups.tolist(), episodes.part_episodes.tolist()) == ([0, 0, 0, 2], [0, 0, 1, 2])
    assert (episodes.names, episodes.rewards.tolist(), episodes.turn_rewards.tolist()) == (
        ("",), [[1.75, 1.75, 2.0, 2.0]], [0.75, 0.75, 0.0, 0.0])
    assert np.unique(episodes.compared(by_agent=True), return_inverse=True)[1].tolist() == [0, 1, 0, 2]
    assert episodes.compared(by_agent=False).tolist() == [0, 0, 0, 2]
    assert episodes.of_parts(np.array([1, 2, 3, 4, 5])).tolist() == [3, 3, 4, 5]


def test_no_groups_are_empty_arrays() -> None:
    episodes = Episodes.of([])
    assert (len(episodes.trajectories), episodes.rewards.shape, len(episodes.compared(by_agent=True))) == (0, (1, 0), 0)
    assert len(Turns.of(episodes, np.zeros(0, np.int64)).of_tokens) == 0


def test_tokens_know_their_turn_and_turns_their_last_token() -> None:
    assert (turn_of_tokens(TWO).tolist(), last_tokens(TWO).tolist()) == ([1, 1, 2], [0, 1, 2])
    assert (turn_of_tokens(ALONE).tolist(), last_tokens(ALONE).tolist()) == ([0, 0, 1], [1, 2])


def test_turns_are_ranked_as_they_were_played() -> None:
    episodes = Episodes.of(GROUPS[:1])
    turns = Turns.of(episodes, np.array([3, 0, 3, 3]))
    assert turns.parts.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert turns.ranks.tolist() == [0, 4, 3, 1, 2, 0, 2, 1, 0, 1]
    assert turns.in_order[0].tolist() == [0, 3, 4, 2, 1]
    assert (turns.states >= 0).tolist() == [False, True, False, False, False, False, True, False, False, False]
    assert turns.states[1] == turns.states[6]
    assert (turns.of_tokens.tolist(), turns.num_tokens.tolist()) == ([1, 1, 2, 6, 6, 7, 8, 8, 9], [0, 2, 1, 0, 0, 0, 2, 1, 2, 1])


def test_the_longest_turn_of_a_part_counts() -> None:
    # TWO generated 0, 2 and 1 tokens in its turns, ALONE 2 and 1 in its runs.
    assert Episodes.of(GROUPS).longest_answers().tolist() == [2, 2, 2, 2]
    whole = replace(TWO, turns=[TurnEnd(6)])
    assert Episodes.of([Group("0:0", 0, (whole, replace(ALONE, episode=5)))]).longest_answers().tolist() == [3, 2]


def test_an_episode_whose_last_turn_was_cut_off_is_so_as_a_whole() -> None:
    first, last = replace(TWO, turns=[TurnEnd(6, order=1)]), replace(TWO, turns=[TurnEnd(6, order=2)])
    for reasons, expected in ((("stop", "length"), [True, True]), (("length", "stop"), [True, False]), (("stop", "stop"), [False, False])):
        # In whatever order they are listed.
        chains = replace(last, reason=reasons[1]), replace(first, reason=reasons[0])
        assert Episodes.of([Group("0:0", 0, chains)]).cut_off().tolist() == expected[::-1]
