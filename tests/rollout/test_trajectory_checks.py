"""Checks of trajectories, by hand: the ones that pass, the ones that do not, and why."""

from dataclasses import replace

import numpy as np
import pytest

from offbeat.data.reward import FailedReward
from offbeat.data.trajectory import Trajectory
from offbeat.errors import CodeError
from offbeat.rollout.trajectory_checks import TrajectoryChecks, members

CHECKS = TrajectoryChecks(10, max_row_tokens=20, context=30)


def sample(*tokens: int, logprobs: tuple[float, ...] = (), versions: tuple[int, ...] = ()) -> Trajectory:
    """A prompt of two tokens, and these."""
    n = len(tokens)
    return Trajectory(
        np.array([3, 1, *tokens]), np.repeat([False, True], [2, n]), np.array([0, 0, *(logprobs or [-0.5] * n)]),
        np.array([-1, -1, *(versions or [4] * n)]), 1.0)


def check(*group: Trajectory, oldest: int = 4, newest: int = 5) -> list[str]:
    return [t.reason for t in CHECKS.check(group, oldest=oldest, newest=newest)]


def test_what_engines_gave_passes() -> None:
    assert check(sample(5, 0), sample(9, 9, versions=(4, 5)), sample(0, logprobs=(-100.0,)), sample()) == ["stop"] * 4
    assert check(sample(0, logprobs=(0.0,)), sample(0, logprobs=(1e-4,))) == ["stop"] * 2


@pytest.mark.parametrize(("wrong", "why"), [
    (sample(10), "wrong tokens: token 2 has the id 10, which is not in the vocabulary of 10 tokens"),
    (sample(5, -1), "wrong tokens: token 3 has the id -1"),
    (replace(sample(5), tokens=np.array([3, 99, 5])), "wrong tokens: token 1 has the id 99"),
    (sample(5, logprobs=(np.nan,)), "wrong logprobs: generated token 2 has the log-probability nan, where a sampled one has -104 to 0"),
    (sample(5, logprobs=(0.7,)), "wrong logprobs: generated token 2 has the log-probability 0.7"),
    (sample(5, logprobs=(-np.inf,)), "wrong logprobs: generated token 2 has the log-probability -inf"),
    (sample(5, logprobs=(-1e30,)), "wrong logprobs: generated token 2 has the log-probability -1e+30"),
    (sample(5, versions=(6,)), "wrong versions: generated token 2 is of version 6, where engines served 4 to 5"),
    (sample(5, 5, versions=(4, 3)), "wrong versions: generated token 3 is of version 3"),
    (sample(5, versions=(-1,)), "wrong versions: generated token 2 is of version -1"),
    (Trajectory([3, 1], [True, True], [-0.5, -0.5], [4, 4], 1.0), "malformed: it begins with a generated token"),
    (Trajectory([], [], [], [], 1.0), "malformed: it has no tokens"),
    (sample(*[5] * 20), "too long: a row of 21 tokens exceeds train.max_tokens_per_microbatch = 20"),
    (replace(sample(10), reward=FailedReward("it hangs")), "reward failed: it hangs"),
])
def test_what_cannot_be_trained_on_is_marked_alone(wrong: Trajectory, why: str) -> None:
    first, marked, last = check(sample(5, 0), wrong, sample(5, 1))
    assert (first, last) == ("stop", "stop")
    assert marked.startswith(why), marked


def test_what_stands_where_nothing_was_generated_does_not_matter() -> None:
    assert check(replace(sample(5), rollout_logprobs=[np.nan, 7, -0.5], versions=[99, 99, 4])) == ["stop"]


def test_samples_that_claim_certainty_and_differ_are_refused() -> None:
    lying = check(sample(5, 0, logprobs=(0, 0)), sample(6, 0, logprobs=(0, 0)), sample(7, 0, logprobs=(-1.5, -0.5)))
    assert [reason.partition(":")[0] for reason in lying] == ["wrong logprobs", "wrong logprobs", "stop"]
    assert "as if each token had been certain, but another sample drew another token 2 with a probability of 1" in lying[0]
    assert check(sample(5, 0, logprobs=(0, 0)), sample(7, 0, logprobs=(-1.5, -0.5)))[0].endswith(
        "with a probability of 0.22; take what the engine gave")


@pytest.mark.parametrize("others", [
    [sample(5, 0, logprobs=(0, 0))] * 3,  # a sure policy
    [sample(5, 0)],  # it says the same
    [sample(5, 0, 7)],  # it goes on where the other ended
    [sample(6, 0, logprobs=(-17.0, 0))],  # unlikelier than float32 can tell from certainty
    [sample(6, 0, versions=(5, 5))],  # another policy
    [replace(sample(5, 0), tokens=[3, 2, 6, 0])],  # after another prompt
], ids=["sure", "same", "longer", "unlikely", "version", "prompt"])
def test_certainty_that_nothing_contradicts_passes(others: list[Trajectory]) -> None:
    assert check(sample(5, 0, logprobs=(0, 0)), *others) == ["stop"] * (1 + len(others))


def test_members_are_trajectories_and_what_is_none_is_malformed() -> None:
    good = sample(5)
    assert members((each for each in [good, good]), 2, workflow="mine:play") == (good, good)
    first, second = members([good, "an answer"], 2, workflow="mine:play")
    assert first is good
    assert second.reason == "malformed: the workflow returned 'an answer' (str) in the place of a Trajectory"


@pytest.mark.parametrize(("returned", "got"), [
    (None, "None (NoneType)"), (sample(5), "Trajectory("), ("ab", "'ab' (str)"), (7, "7 (int)"), ({1: 2, 3: 4}, "{1: 2, 3: 4} (dict)"),
    ([], "0;"), ([sample(5)], "1;"), ([sample(5)] * 3, "more;"),
])
def test_a_workflow_that_gives_no_group_of_the_agreed_size_fails(returned: object, got: str) -> None:
    with pytest.raises(CodeError) as caught:
        members(returned, 2, workflow="mine:play")
    assert f"the workflow mine:play must return 2 trajectories, one for each sample, got {got}" in str(caught.value)


def test_a_series_without_end_is_not_read_to_its_end() -> None:
    def endless():
        while True:
            yield sample(5)

    with pytest.raises(CodeError, match="got more"):
        members(endless(), 2, workflow="mine:play")


def chain(episode: int | None, reward: float | dict = 1.0, agent: str = "") -> Trajectory:
    return replace(sample(5, 0), episode=episode, reward=reward, agent=agent)


def test_members_counts_episodes_of_which_each_has_one_or_more_trajectories() -> None:
    found = members([chain(4), chain(None, 0.0), chain(4), chain(9, -1.0), chain(4)], 3, workflow="mine:play")
    assert [t.episode for t in found] == [4, None, 4, 9, 4] and all(t.unusable is None for t in found)
    for wrong, got in (([chain(4), chain(4)], "1;"), ([chain(4), chain(4), *[chain(None)] * 3], "more;")):
        with pytest.raises(CodeError, match=f"must return the trajectories of 3 episodes, at most 1000 of each, got {got}"):
            members(wrong, 3, workflow="mine:play")


def test_an_episode_without_end_is_not_read_to_its_end() -> None:
    def endless():
        yield chain(2)
        while True:
            yield chain(1)

    with pytest.raises(CodeError, match="at most 1000 of each, got more"):
        members(endless(), 2, workflow="mine:play")


def test_trajectories_of_one_agent_in_one_episode_have_one_reward() -> None:
    found = members([chain(1), chain(1, 0.5), chain(1, -1.0, "black"), chain(2, 0.5)], 2, workflow="mine:play")
    assert [t.unusable for t in found] == [None, "malformed", None, None]
    assert found[1].reason.startswith("malformed: its reward is 0.5, but another trajectory of the same episode and agent has 1;")
    equal_sums = members([chain(1, {"a": 1.0, "b": 0.0}), chain(1, {"a": 0.0, "b": 1.0})], 1, workflow="mine:play")
    assert [t.unusable for t in equal_sums] == [None, "malformed"]
    failed = members([chain(1), chain(1, FailedReward("it hangs"))], 1, workflow="mine:play")
    assert [t.unusable for t in failed] == [None, "reward failed"]
