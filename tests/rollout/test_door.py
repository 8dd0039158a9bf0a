"""The door, by hand: what passes it, what does not, and why."""

from dataclasses import replace

import numpy as np
import pytest

from offbeat.data.reward import FailedReward
from offbeat.data.trajectory import Trajectory
from offbeat.errors import CodeError
from offbeat.rollout.door import Door, members

DOOR = Door(10, lambda t: f"a row of {t.row_tokens} tokens" if t.row_tokens > 20 else "")


def sample(*tokens: int, logprobs: tuple[float, ...] = (), versions: tuple[int, ...] = ()) -> Trajectory:
    """A prompt of two tokens, and these."""
    n = len(tokens)
    return Trajectory(
        np.array([3, 1, *tokens]), np.repeat([False, True], [2, n]), np.array([0, 0, *(logprobs or [-0.5] * n)]),
        np.array([-1, -1, *(versions or [4] * n)]), 1.0)


def check(*group: Trajectory, oldest: int = 4, newest: int = 5) -> list[str]:
    return [t.reason for t in DOOR.check(group, oldest=oldest, newest=newest)]


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
    (sample(*[5] * 20), "too long: a row of 21 tokens"),
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
