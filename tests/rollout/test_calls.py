"""Answers of engines to groups that were killed while they ran: recorded, and given again to the same calls."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from offbeat.config.rollout import RolloutConfig
from offbeat.data.dataset import ListDataset
from offbeat.data.row import Row
from offbeat.data.sample_supports import LEFT_OUT, Supports
from offbeat.data.stream import PromptStream
from offbeat.data.tokenizer import character_tokenizer
from offbeat.inference.sampling import Sample, Sampling
from offbeat.journal.records import CallEntry, HeardSample
from offbeat.journal.standing import HeardCall, HeldGroups, OpenGroup
from offbeat.rollout import calls
from offbeat.rollout.calls import GroupCalls, key_of
from offbeat.rollout.episode import Episode
from offbeat.rollout.executor import RolloutExecutor
from offbeat.rollout.outcomes import RolloutListener
from offbeat.rollout.player import RolloutParts
from offbeat.rollout.staleness import Gate
from offbeat.rollout.workflows.single_turn import single_turn
from waiting import until

SAMPLING = Sampling(8)


@dataclass
class Heard(RolloutListener):
    entries: list[CallEntry] = field(default_factory=list)
    again: list[tuple[str, int, int, int]] = field(default_factory=list)
    anew: list[tuple[str, str]] = field(default_factory=list)

    def on_heard(self, call: CallEntry) -> None:
        self.entries.append(call)

    def on_played_again(self, prompt_id: str, *, num_again: int, num_left: int, num_tokens: int) -> None:
        self.again.append((prompt_id, num_again, num_left, num_tokens))

    def on_played_anew(self, prompt_id: str, reason: str) -> None:
        self.anew.append((prompt_id, reason))


@dataclass
class Engine:
    """Answers each call with a number that rises."""

    asked: list[tuple[int, ...]] = field(default_factory=list)

    async def generate(self, prompt: tuple[int, ...], _sampling: Sampling, *, n: int, session: str = "") -> list[Sample]:
        self.asked.append(prompt)
        routes = np.full((len(prompt) + 1, 2), len(self.asked), np.uint8) if len(self.asked) > 1 else None
        supports = Supports.of_pieces([(LEFT_OUT, np.array([9])), (LEFT_OUT, np.zeros(0, np.int32))]) if len(self.asked) > 1 else None
        return [
            Sample(
                (len(self.asked), index), (-0.5, -1.5), (3, 4), f"{len(self.asked)}{session}", "stop", routes=routes, supports=supports)
            for index in range(n)]

    @property
    def episode(self) -> Episode:
        return Episode(Row("", ""), (), 2, SAMPLING, self.generate, no_score, character_tokenizer())


async def no_score(_completions: Sequence[str], _row: Row) -> list[float]:
    return []


def open_groups(entries: list[CallEntry]) -> dict[str, OpenGroup]:
    found: dict[str, OpenGroup] = {}
    for entry in entries:
        before = found.get(entry.prompt_id, OpenGroup(entry.version, ()))
        found[entry.prompt_id] = OpenGroup(entry.version, (*before.calls, HeardCall(entry.key, entry.answers)))
    return found


async def play(log: GroupCalls, engine: Engine, *prompts: tuple[int, ...], prompt_id: str = "0:1", version: int = 3) -> list[list[Sample]]:
    log.open(prompt_id, version)
    episode = log.watched(prompt_id, engine.episode)
    return [await episode.generate(prompt, SAMPLING, n=2) for prompt in prompts]


def test_answers_are_recorded_once_if_their_group_still_runs_and_given_again_to_the_same_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "RECORD_AFTER_S", 0.0)

    async def body() -> None:
        heard, engine = Heard(), Engine()
        log = GroupCalls(heard)
        first = await play(log, engine, (1, 2), (1, 2), (7,))
        await play(log, engine, (9,), prompt_id="0:2")
        log.close("0:2")  # it has ended before the record was due
        await asyncio.sleep(0.01)
        assert [(each.prompt_id, each.number) for each in heard.entries] == [("0:1", 0), ("0:1", 1), ("0:1", 2)]
        log.close("0:1")
        assert not heard.again and not log.entries

        then, later = Heard(), Engine()
        log = GroupCalls(then)
        log.take_over(open_groups(heard.entries))
        assert log.admitted("0:1") == 3 and log.admitted("0:2") is None
        assert [each.number for each in log.entries] == [0, 1, 2]
        second = await play(log, later, (1, 2), (1, 2), (8,))
        for before, now in zip(first[0] + first[1], second[0] + second[1], strict=True):
            assert np.array_equal(before.tokens, now.tokens) and np.array_equal(before.token_logprobs, now.token_logprobs)
            assert np.array_equal(before.routes, now.routes) and (before.supports is None) == (now.supports is None)
            assert before.supports is None or np.array_equal(before.supports.words, now.supports.words)
            assert (before.versions, before.text, before.finish_reason) == (now.versions, now.text, now.finish_reason)
        assert later.asked == [(8,)]  # the conversation has gone another way
        assert [each.number for each in log.entries] == [0, 1, 2, 3]  # for a checkpoint
        await asyncio.sleep(0.01)
        assert not then.entries  # whoever has asked for all of them has recorded them
        log.close("0:1")
        assert then.again == [("0:1", 2, 1, 0)]

    asyncio.run(body())


def test_a_group_that_would_be_too_stale_is_played_anew_and_the_reason_is_told() -> None:

    async def body() -> None:
        heard, engine = Heard(), Engine()
        log = GroupCalls(heard)
        [answers] = await play(log, engine, (1, 2))
        entries = log.entries
        log = GroupCalls(heard)
        log.take_over(open_groups(entries))
        [now] = await play(log, engine, (1, 2), version=5)
        assert now[0].token_ids != answers[0].token_ids and len(engine.asked) == 2
        assert heard.anew == [("0:1", "its first tokens, of version 3, would be too stale")]
        log.stop_recording()

    asyncio.run(body())


def test_calls_differ_by_prompt_settings_and_number_of_samples() -> None:
    keys = [key_of((1, 2), SAMPLING, n=2), key_of((1, 3), SAMPLING, n=2), key_of((1, 2), Sampling(9), n=2), key_of((1, 2), SAMPLING, n=1)]
    assert len(set(keys)) == 4 and key_of((np.int32(1), np.int64(2)), SAMPLING, n=2) == keys[0]


def test_an_executor_plays_a_group_of_an_earlier_process_at_its_version_with_the_answers_that_it_had() -> None:

    async def score(completions: Sequence[str], _row: Row) -> list[float]:
        return [1.0] * len(completions)

    async def body() -> None:
        heard, engine = Heard(), Engine()
        stream = PromptStream(ListDataset([Row(f"{index}", "") for index in range(9)]), seed=0, shuffle=False)
        prompt_id, _ = stream.next()
        stream.give_back(prompt_id)
        gate = Gate(batch_size=1, max_running=1, eta=1, version=4, last_version=5)
        parts = RolloutParts(
            single_turn, lambda row, n, sampling: Episode(row, (1, 2), n, sampling, engine.generate, score, character_tokenizer()))
        executor = RolloutExecutor(gate, stream, parts, config=RolloutConfig(group_size=2), sampling=SAMPLING, listener=heard)
        answers = tuple(HeardSample(np.array([5 + each]), np.array([-0.5]), np.array([3]), 0, "stop", "x") for each in range(2))
        call = HeardCall(key_of((1, 2), SAMPLING, n=2), answers)
        executor.take_over(HeldGroups(open={prompt_id: OpenGroup(3, (call,))}))
        assert [each.prompt_id for each in executor.calls] == [prompt_id]
        async with executor:
            [group] = await executor.prepare_batch()
        assert (group.prompt_id, group.admitted_version) == (prompt_id, 3) and not engine.asked and not executor.calls
        assert [t.tokens.tolist() for t in group.trajectories] == [[1, 2, 5], [1, 2, 6]]
        assert [t.versions.tolist()[-1] for t in group.trajectories] == [3, 3] and heard.again == [(prompt_id, 1, 0, 0)]

    asyncio.run(body())


@dataclass
class Slow(Engine):
    """Generates two tokens of the first sample, and three of the second, until it is let go on."""

    rest: asyncio.Event = field(default_factory=asyncio.Event)
    begun: list[list[int]] = field(default_factory=list)

    async def generate(self, prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "") -> list[Sample]:
        hearing = sampling.hearing
        assert hearing is not None
        self.begun = [list(each.tokens) for each in hearing.samples]
        for index, each in enumerate(hearing.samples):
            for token in range(2 + index):
                each.hear(len(each.tokens), [10 + token], [-1.0], [3])
                hearing.looked()
        await self.rest.wait()
        return [
            Sample((*each.tokens, 2), (*each.logprobs, -2.0), (*each.versions, 4), "whole", "stop") for each in hearing.samples]


def test_a_call_that_was_not_answered_goes_on_from_the_tokens_that_were_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "RECORD_AFTER_S", 0.0)

    async def body() -> None:
        heard, engine = Heard(), Slow()
        log = GroupCalls(heard, running_s=0.001)
        playing = asyncio.create_task(play(log, engine, (1, 2)))
        await until(lambda: bool(heard.entries))
        await asyncio.sleep(0.01)
        [entry] = heard.entries  # tokens are recorded once
        assert [each.tokens.tolist() for each in entry.answers] == [[10, 11], [10, 11, 12]]
        assert [each.finish_reason for each in entry.answers] == ["", ""]
        recorded = list(heard.entries)
        engine.rest.set()
        await playing
        await until(lambda: len(heard.entries) == 2)
        assert [(each.start, each.tokens.tolist(), each.finish_reason) for each in heard.entries[1].answers] == [
            (2, [2], "stop"), (3, [2], "stop")]
        whole = recorded[0].answers[1].followed_by(heard.entries[1].answers[1])
        assert (whole.tokens.tolist(), whole.versions.tolist(), whole.text) == ([10, 11, 12, 2], [3, 3, 3, 4], "whole")
        log.stop_recording()

        then, later = Heard(), Slow()
        log = GroupCalls(then, running_s=0.001)
        log.take_over(open_groups(recorded))
        assert log.admitted("0:1") == 3 and [each.start for each in log.entries[0].answers] == [0, 0]
        later.rest.set()
        [now] = await play(log, later, (1, 2))
        assert later.begun == [[10, 11], [10, 11, 12]] and now[0].token_ids == (10, 11, 10, 11, 2)
        [entry] = log.entries
        assert entry.answers[0].tokens.tolist() == [10, 11, 10, 11, 2] and not entry.answers[0].start
        log.close("0:1")
        assert then.again == [("0:1", 0, 0, 5)]

        log = GroupCalls(then)  # the engines of this process cannot go on
        log.take_over(open_groups(recorded))
        [anew] = await play(log, Engine(), (1, 2))
        assert anew[0].token_ids == (1, 0)
        log.close("0:1")
        log.stop_recording()

    asyncio.run(body())


def test_a_checkpoint_that_is_saved_after_the_rollouts_have_ended_has_the_tokens_of_calls_that_were_cancelled_with_them() -> None:

    async def body() -> None:
        heard, engine = Heard(), Slow()
        log = GroupCalls(heard, running_s=0.001)
        playing = asyncio.create_task(play(log, engine, (1, 2)))
        await until(lambda: bool(heard.entries))
        log.stop_recording()
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        [entry] = log.entries
        assert [each.tokens.tolist() for each in entry.answers] == [[10, 11], [10, 11, 12]]

    asyncio.run(body())
