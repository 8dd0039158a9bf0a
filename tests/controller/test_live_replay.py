"""Answers that are generated again: what is compared, and the reasons that are given for a token that differs."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from offbeat.controller.live_replay import ComparedSpan, LiveEngines, LiveReplay, compare_span, reason_of
from offbeat.data.trajectory import Group, Trajectory
from offbeat.inference.sampling import Sample, Sampling
from offbeat.journal.history import PastStep
from offbeat.rollout.recorded_spans import RecordedSpan
from small_run import small_config

WAS = (-0.5, -1.0, -2.0)


def span(*, begun: int = 0, seed: int | None = 9) -> RecordedSpan:
    return RecordedSpan(
        "0:31", 2, 4, begun, (1, 2, 3, 4), np.array([5, 6, 7], np.int32), np.array(WAS, np.float32), np.full(3, 6, np.int32), seed, 2)


def sampled(*tokens: int, logprobs: tuple[float, ...] = WAS) -> Sample:
    return Sample(np.array(tokens), np.array(logprobs[: len(tokens)]), np.full(len(tokens), 6), "", "length")


def test_equal_tokens_are_counted_up_to_the_first_difference_and_their_log_probabilities_are_compared() -> None:
    assert compare_span(span(), sampled(5, 6, 7)).is_equal
    found = compare_span(span(), sampled(5, 6, 8, logprobs=(-0.5, -1.25, -3.0)))
    assert (found.num_equal, found.gap, found.is_equal) == (2, 0.25, False)
    assert compare_span(span(begun=2), sampled(0, 0, 7)).is_equal, "what was begun with is not compared"
    ended = compare_span(span(), sampled(5))
    assert (ended.num_equal, ended.is_equal) == (1, False)


@pytest.mark.parametrize(("now", "seed", "gap", "settings", "told"), [
    (-3.5, 9, 0.0, {}, "7 has the log-probability -3.5 now, and had -2: the run's engine had other weights, or computed with"),
    (-2.0, 9, 0.5, {}, "the log-probabilities of the tokens before it differ by up to 0.5: the run's engine had other weights"),
    (-3.5, 9, 0.0, {"weights__interrupt": "keep"}, "went on with the keys and values of an older version (weights.interrupt = 'keep')"),
    (-2.0, None, 0.0, {}, "up to 0; engines drew random numbers that are not recorded, as inference.seeded_requests was off"),
    (None, 9, 0.0, {"rollout__top_p": "0.9"}, "not among the 20 likeliest tokens that can be drawn now; top_p or top_k leaves it out"),
    (-2.0, 9, 0.0, {}, "rounding decided, as batches had other shapes (inference.batch_invariant was off)"),
    (-2.0, 9, 0.0, {"inference__batch_invariant": "true"}, "the request had another seed or other settings"),
])
def test_the_reason_follows_from_how_likely_the_recorded_token_is_now(
    tmp_path: Path, now: float | None, seed: int | None, gap: float, settings: dict[str, str], told: str,
) -> None:
    config = small_config(tmp_path, **{"rollout__max_head_offpolicyness": "1"} | settings)
    found = ComparedSpan(span(begun=1, seed=seed), sampled(5, 6, 8), 1, gap, is_equal=False)
    assert told in reason_of(found, was=7, now=now, config=config)


class StoredGroup:
    """A group that needs no file."""

    def __init__(self, group: Group) -> None:
        self.prompt_id, self.read = group.prompt_id, lambda: group


class Publisher:
    """Takes every version."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    async def publish(self, version: int, *, on_served: object) -> None:
        self.versions.append(version)

    async def settle(self, *, behind: int = 0) -> None:
        pass


def test_each_version_generates_what_it_has_sampled_after_the_tokens_of_those_before_it(tmp_path: Path) -> None:
    versions = np.array([-1, 3, 3, 4, 4], np.int32)
    whole = Trajectory(np.arange(5, dtype=np.int32), versions >= 0, np.where(versions >= 0, -0.5, 0).astype(np.float32), versions, 1.0)
    past = PastStep(4, (StoredGroup(Group("0:1", 3, (whole,))),), b"", None, b"")  # pyright: ignore[reportArgumentType]
    publisher = Publisher()

    async def generate(prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "") -> list[Sample]:
        known = list(sampling.hearing.samples[0].tokens) if sampling.hearing is not None else []
        assert prompt == (0,) and known[:2] == ([] if publisher.versions[-1] == 3 else [1, 2])
        tokens = [1, 2] if not known else [1, 2, 3, 9]
        top = ((9, -0.5), (4, -0.5)) if sampling.top_logprobs else ()
        return [Sample(np.array(tokens), np.full(len(tokens), -0.5), np.zeros(len(tokens)), "", "length", top_logprobs=(top,) * bool(top))]

    config = small_config(tmp_path, rollout__max_head_offpolicyness="1")
    live = LiveReplay(LiveEngines(publisher, generate), [past], config=config, sampling=Sampling(8), num_groups=1)  # pyright: ignore

    async def replay() -> None:
        await live.take_version(3, step=3)
        await live.take_version(4, step=4)
        done = live.of_step(4)
        assert (done.num_groups, done.num_tokens, done.num_equal, done.num_missing, done.logprob_gap) == (1, 4, 3, 0, 0.0)
        assert done.difference.startswith(
            "in the group of prompt 0:1, sample 0, token 4: the engine sampled token 9, and 4 in the run, by version 4 of the weights;")

    asyncio.run(replay())
    assert publisher.versions == [3, 4]


def test_tokens_of_versions_before_the_first_one_are_counted_as_missing_and_changed_weights_are_the_reason(tmp_path: Path) -> None:
    versions = np.array([-1, 2, 3], np.int32)
    whole = Trajectory(np.arange(3, dtype=np.int32), versions >= 0, np.zeros(3, np.float32), versions, 1.0)
    past = PastStep(4, (StoredGroup(Group("0:1", 2, (whole,))),), b"", None, b"")  # pyright: ignore[reportArgumentType]

    async def generate(prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "") -> list[Sample]:
        return [Sample(np.array([1, 7]), np.zeros(2), np.zeros(2), "", "length")]

    live = LiveReplay(
        LiveEngines(Publisher(), generate), [past], config=small_config(tmp_path), sampling=Sampling(8), num_groups=0)  # pyright: ignore

    async def replay() -> None:
        await live.take_version(3, step=4, changed="train/loss is 1.0, and was 2.0")
        done = live.of_step(4)
        assert (done.num_tokens, done.num_missing) == (1, 1)
        assert done.difference.endswith("the step that made these weights was not equal: train/loss is 1.0, and was 2.0")

    asyncio.run(replay())
