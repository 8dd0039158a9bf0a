"""Teachers: the engine's answers come to the right targets and its failures cost only their samples; contexts show the answer."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from offbeat.algorithms.experience import make_batch
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.data import DataConfig
from offbeat.config.teacher import TeacherConfig
from offbeat.controller.scoring import score_batch
from offbeat.controller.teaching import Contexts, EngineTeacher, RankTeacher, SelfTeacher
from offbeat.data.row import Row
from offbeat.data.tokenizer import character_tokenizer
from offbeat.data.trajectory import Group, Trajectory
from offbeat.errors import ConfigError, EngineError
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.trainer.messages import TargetScores

OPD = AlgorithmConfig(preset="opd")
TOKENIZER = character_tokenizer()
ROWS = [Row("31>", "13"), Row("52>", "25"), Row("9876>", "6789")]


def batch_of(rows, answers, *, turns=False):
    """A group of samples for each row; with `turns`, tokens in the middle of an answer are not the policy's."""
    groups = []
    for number, (row, texts) in enumerate(zip(rows, answers, strict=True)):
        prompt = TOKENIZER.encode(row.prompt)
        members = []
        for text in texts:
            own = TOKENIZER.encode(text)
            mask = np.repeat([False, True], [len(prompt), len(own)])
            if turns:
                mask[len(prompt) + 1] = False
            members.append(Trajectory(
                np.array(prompt + own), mask, np.where(mask, -1.0, 0.0), np.where(mask, 0, -1), float(len(text))))
        groups.append(Group(f"0:{number}", 0, tuple(members)))
    return make_batch(groups, config=OPD, max_new_tokens=8)


BATCH = batch_of(ROWS, [["13", "31"], ["2", "525"], ["6789", "98"]])


def contexts(**changes):
    return replace(Contexts(TOKENIZER, DataConfig(), "{answer}:{prompt}", 20), **changes)


def test_a_context_shows_the_answer_or_solution_in_its_place():
    texts = contexts()
    assert TOKENIZER.decode(texts.prompt(ROWS[0])) == "13:31>"
    assert TOKENIZER.decode(texts.prompt(Row("{answer}>", "{prompt}"))) == "".join(
        TOKENIZER.decode(TOKENIZER.encode(part)) for part in ("{prompt}", ":", "{answer}>")), "what a row holds is not replaced again"
    assert TOKENIZER.decode(texts.prompt(Row("31>", "13", solution="1 3"))) == "1 3:31>"
    chat = Row(({"role": "system", "content": "be"}, {"role": "user", "content": "31>"}, {"role": "tool", "content": "x"}), "13")
    result = "".join(TOKENIZER.decode(TOKENIZER.encode(line)) for line in ("<tool_response>\n", "x", "\n</tool_response>"))
    assert TOKENIZER.decode(texts.prompt(chat)) == f"system: be\nuser: 13:31>\nuser: {result}\nassistant: "
    assert "13:31>" in TOKENIZER.decode(texts.prompt(replace(chat, prompt=({"role": "tool", "content": "31>"},))))


@pytest.mark.parametrize("turns", [False, True])
def test_the_same_targets_follow_the_context_of_their_own_row(turns):
    batch = batch_of(ROWS, [["133", "3144"], ["252", "525"], ["6789", "989"]], turns=turns)
    shown, kept = contexts().batch(batch, ROWS.__getitem__)
    assert kept.tolist() == list(range(6))
    np.testing.assert_array_equal(shown.targets, batch.targets)
    np.testing.assert_array_equal(shown.tokens[shown.positions + 1], shown.targets)
    np.testing.assert_array_equal(shown.target_offsets, batch.target_offsets)
    for i, row in enumerate(np.repeat(np.array(ROWS, object), 2)):
        text = TOKENIZER.decode(shown.tokens[shown.offsets[i]:shown.offsets[i + 1]].tolist(), skip_special_tokens=False)
        plain = TOKENIZER.decode(batch.tokens[batch.offsets[i]:batch.offsets[i + 1]].tolist(), skip_special_tokens=False)
        assert text == f"{row.answer}:{plain}"
        assert shown.prefix_lens[i] == len(f"{row.answer}:{row.prompt}")
    first = shown.positions[shown.target_offsets[:-1]] - shown.offsets[:-1]
    np.testing.assert_array_equal(first + 1, shown.prefix_lens)


class Ranks:
    """Gives each target its token id as log-probability, and as likeliest tokens those after it."""

    def __init__(self, top_k=0):
        self.asked, self._top_k = [], top_k

    async def score(self, batch, of="policy"):
        self.asked.append((of, batch))
        columns = {"logprobs": -batch.targets.astype(np.float32)}
        for i in range(self._top_k):
            columns[f"top_tokens_{i}"] = (batch.targets + i).astype(np.float32)
            columns[f"top_logprobs_{i}"] = np.full(len(batch.targets), -1.0 - i)
        return TargetScores(columns)


def test_scores_in_a_context_are_carried_over_and_contexts_that_are_too_long_are_counted():
    ranks = Ranks()
    found = asyncio.run(SelfTeacher(ranks, contexts(max_tokens=10), of="reference").score(BATCH, ROWS.__getitem__))
    assert [of for of, _ in ranks.asked] == ["reference"]
    assert found.too_long.tolist() == [False] * 4 + [True, True]
    known = BATCH.target_sequences < 4
    np.testing.assert_array_equal(found.logprobs[known], -BATCH.targets[known])
    assert np.isnan(found.logprobs[~known]).all() and found.top_tokens.shape == (BATCH.num_targets, 0)
    nothing = asyncio.run(SelfTeacher(ranks, contexts(), of="policy").score(BATCH.select([]), ROWS.__getitem__))
    assert nothing.logprobs.shape == (0,) and len(ranks.asked) == 2, "a rank that has drawn nothing asks, too"


def test_the_columns_of_the_ranks_become_tokens_and_logprobs():
    found = asyncio.run(RankTeacher(Ranks(2), top_k=2).score(BATCH, ROWS.__getitem__))
    np.testing.assert_array_equal(found.top_tokens, np.stack([BATCH.targets, BATCH.targets + 1], axis=1))
    np.testing.assert_array_equal(found.top_logprobs[:, 1], np.full(BATCH.num_targets, -2.0, np.float32))
    assert asyncio.run(RankTeacher(Ranks(), top_k=0).score(BATCH, ROWS.__getitem__)).top_tokens.shape == (BATCH.num_targets, 0)


@pytest.mark.parametrize(("settings", "expected"), [
    ({}, lambda taught, task: taught), ({"teacher_credit": "added", "teacher_coefficient": 0.5}, lambda taught, task: task + 0.5 * taught)])
def test_the_score_step_gives_the_batch_what_the_teacher_says_and_counts_it(settings, expected):
    config, ranks = AlgorithmConfig(preset="sdft", **settings), Ranks()
    teacher = SelfTeacher(ranks, contexts(max_tokens=10), of="reference")
    parts = SimpleNamespace(trainers=ranks, critic=None, teacher=teacher)
    scored = asyncio.run(score_batch(BATCH, parts, config, seed=0, row_of=ROWS.__getitem__))
    found, stats = scored.batch, scored.stats
    known = BATCH.target_sequences < 4
    taught = np.clip(-BATCH.targets - BATCH.columns["rollout_logprobs"], -20, 20)
    np.testing.assert_allclose(found.columns["advantages"], np.where(known, expected(taught, BATCH.columns["advantages"]), 0), rtol=1e-6)
    assert stats.values()["teacher/missing_share"] == np.mean(~known) and stats.values()["teacher/too_long_share"] == pytest.approx(1 / 3)
    assert len(ranks.asked) == 1, "nobody but the teacher"


def asked(url, body, **settings):
    async def main():
        async with EngineSession() as http:
            return await body(EngineTeacher(EngineClient("the teacher", url, http.session), TeacherConfig(url=url, **settings)))

    return asyncio.run(main())


@pytest.mark.parametrize("top_k", [0, 3])
def test_an_engine_scores_what_it_scores_alone_and_one_at_a_time_gives_the_same(top_k, start_engine):
    _, url = start_engine()

    async def alone():
        async with EngineSession() as http:
            client = EngineClient("engine", url, http.session)
            return [await client.score(tuple(BATCH.tokens[a:b].tolist()), top_k=top_k, timeout_s=20)
                    for a, b in zip(BATCH.offsets[:-1], BATCH.offsets[1:], strict=True)]

    found, one_by_one = (
        asked(url, lambda teacher: teacher.score(BATCH, ROWS.__getitem__), top_k=top_k, max_concurrent=n) for n in (64, 1))
    np.testing.assert_allclose(found.logprobs, one_by_one.logprobs, atol=1e-5)
    expected = asyncio.run(alone())
    for m, (i, position) in enumerate(zip(BATCH.target_sequences, BATCH.positions, strict=True)):
        place = int(position - BATCH.offsets[i]) + 1
        assert found.logprobs[m] == pytest.approx(expected[i].logprobs[place], abs=1e-5)
        if top_k:
            assert found.top_logprobs[m].tolist() == pytest.approx([lp for _, lp in expected[i].top[place]], abs=1e-5)
            assert found.top_tokens[m].tolist() == [token for token, _ in expected[i].top[place]]
    assert found.top_tokens.shape == (BATCH.num_targets, top_k) and not found.too_long.any()


def test_an_engine_is_known_by_what_it_decodes(start_engine):
    _, url = start_engine()
    prompt = tuple(TOKENIZER.encode("31>"))
    asked(url, lambda teacher: teacher.check(TOKENIZER, prompt))
    other = character_tokenizer("zyxwvutsrqponmlkjihgfedcba9876543210 \n+-*/=()>,.?#:")
    with pytest.raises(ConfigError, match=r"teacher.url = 'http://.*' has another tokenizer than the policy: tokens that it reads as"):
        asked(url, lambda teacher: teacher.check(other, prompt))
    with pytest.raises(ConfigError, match=r"teacher.url names http://127.0.0.1:1, but the teacher .* cannot be reached"):
        asked("http://127.0.0.1:1", lambda teacher: teacher.check(TOKENIZER, prompt))


def test_a_request_that_fails_is_repeated_and_then_costs_its_sample_alone(start_engine, monkeypatch):
    monkeypatch.setattr("offbeat.controller.teaching._FIRST_PAUSE_S", 0.0)
    _, url = start_engine()
    long = len(BATCH.tokens[BATCH.offsets[4]:BATCH.offsets[5]])

    async def body(teacher):
        real, failures = teacher._client, []

        class Sometimes:
            async def score(self, tokens, **options):
                if len(tokens) == long or tokens not in failures:
                    failures.append(tokens)
                    raise EngineError("it is broken")
                return await real.score(tokens, **options)

        teacher._client = Sometimes()
        return await teacher.score(BATCH, ROWS.__getitem__), failures

    async def none_at_all(teacher):
        return await teacher.score(BATCH.select([4]), ROWS.__getitem__)

    found, failures = asked(url, body, max_retries=1)
    assert np.isnan(found.logprobs).tolist() == (BATCH.target_sequences == 4).tolist()
    assert len(failures) == len(BATCH) + 1
    with pytest.raises(EngineError, match=r"the teacher scored none of 1 samples; the first: the teacher .* cannot be reached"):
        asked("http://127.0.0.1:1", none_at_all, max_retries=0)
