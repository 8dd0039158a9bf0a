"""From what is known of each rank to the words that all raise."""

from dataclasses import replace

import pytest

from offbeat.data.wire import decode_json, encode_json
from offbeat.errors import PeerError, StuckError, SyncMismatch, SyncTimeout
from offbeat.sync.peers import ProcessState
from offbeat.sync.verdict import Evidence, RankStatus, SyncVerdict, judge, judge_broken, judge_standstill, judge_stopped


def _status(rank, **fields):
    """A rank that waits at the 5th point, "save"."""
    base = RankStatus(
        rank=rank, phase="", phase_s=9.0, point="save", keys=(), n=5, waited_s=2.0, last="step", last_s=3.0, inside=0, stack=(),
        beat_age_s=9.0, states=())
    return replace(base, **fields)


def _busy(rank, **fields):
    stack = ("a.py:1 in f: g()", "a.py:9 in g: wait()")
    return _status(rank, **{"point": "", "n": 0, "phase": "load", "phase_s": 7.25, "stack": stack, **fields})


def _evidence(*statuses, world=3, arrived=2, **fields):
    return Evidence(**{
        "name": "save", "keys": (), "n": 5, "world": world, "timeout_s": 2.0, "arrived": arrived, "answers": {s.rank: s for s in statuses},
        "started": frozenset(range(world)), "states": {}, **fields})


def test_what_crosses_the_store_comes_back_as_it_was():
    status = _busy(1, states=(ProcessState(0, "alive", "is running"),))
    assert decode_json(RankStatus, encode_json(status)) == status
    verdict = SyncVerdict("mismatch", "ranks came to …")
    assert decode_json(SyncVerdict, encode_json(verdict)) == verdict


@pytest.mark.parametrize(("kind", "error", "text"), [
    ("missed", SyncTimeout, "why"), ("mismatch", SyncMismatch, "why"), ("stuck", StuckError, "why"),
    ("failed", PeerError, "sync point 'save' cannot be passed: why")])
def test_each_kind_is_an_error_of_its_own(kind, error, text):
    raised = SyncVerdict(kind, "why").to_error("save")
    assert type(raised) is error
    assert str(raised) == text


def test_a_slow_rank_is_shown_with_its_phase_and_stack():
    assert judge(_evidence(_status(0), _busy(1), _status(2))).text == (
        "sync point 'save' timed out after 2 s with 2 of 3 ranks there: rank 1 is slow, for 7.2 s in phase 'load'\n"
        "  rank 1, innermost call last:\n    a.py:1 in f: g()\n    a.py:9 in g: wait()")


def test_without_a_phase_the_last_point_says_where_it_is():
    text = judge(_evidence(_status(0), _busy(1, phase="", stack=()), _status(2))).text
    assert text.endswith("rank 1 is slow, for 3.0 s since sync point 'step'")


def test_a_rank_at_an_earlier_or_later_point_is_shown_there():
    text = judge(_evidence(_status(0), _status(1, point="export", n=4, waited_s=1.0), _status(2))).text
    assert text.endswith("rank 1 is slow, for 1.0 s at sync point 'export'")


def test_silent_ranks_are_told_apart():
    evidence = _evidence(
        _status(0), world=5, arrived=1, started=frozenset({0, 1, 2, 3}),
        states={
            1: ProcessState(1, "stopped", "is stopped by a signal"), 2: ProcessState(2, "alive", "is running, after 3.0 s of CPU time")})
    assert judge(evidence).text == (
        "sync point 'save' timed out after 2 s with 1 of 5 ranks there: rank 1 is stopped by a signal, "
        "rank 2 is unresponsive, so native code holds its interpreter (its process is running, after 3.0 s of CPU time), "
        "rank 3 is unresponsive (nothing on its machine answers), rank 4 has not started")


def test_a_dead_rank_is_a_failure_whatever_else_is_missing():
    evidence = _evidence(_status(0), _busy(1), states={2: ProcessState(2, "dead", "was killed by SIGKILL")})
    assert judge(evidence) == SyncVerdict("failed", "rank 2 was killed by SIGKILL")


def test_names_that_differ_at_one_point_are_a_mismatch():
    verdict = judge(_evidence(_status(0), _status(1, point="evaluate", stack=("b.py:1 in h: i()",)), _status(2)))
    assert verdict == SyncVerdict(
        "mismatch", "ranks came to different sync points at once: ranks 0, 2 came to 'save' while rank 1 came to 'evaluate'\n"
        "  rank 1, innermost call last:\n    b.py:1 in h: i()")


def test_a_rank_that_came_after_the_deadline_is_still_the_one_that_was_missing():
    text = judge(_evidence(_status(0), _status(1, waited_s=0.1), _status(2))).text
    assert text.endswith("with 2 of 3 ranks there: rank 1 came too late")


def test_no_more_than_eight_stacks_are_shown():
    text = judge(_evidence(_status(0), *[_busy(rank) for rank in range(1, 20)], world=20, arrived=1)).text
    assert text.count("innermost call last") == 8
    assert text.count("is slow") == 19


def test_a_broken_collective_blames_the_silent_before_those_still_inside():
    inside = _busy(1, inside=5)
    silent = _evidence(_status(0), inside, states={2: ProcessState(2, "stopped", "is stopped by a signal")})
    text = judge_broken(silent, reason="closed").text
    assert text == "a collective after sync point 'save' broke (closed): rank 2 is stopped by a signal"
    assert "): rank 1 is slow, for 7.2 s in phase 'load'\n" in judge_broken(_evidence(_status(0), inside, _status(2)), reason="late").text
    dead = _evidence(_status(0), inside, states={2: ProcessState(2, "dead", "is gone")})
    assert judge_broken(dead, reason="closed") == SyncVerdict("failed", "rank 2 is gone")


def test_a_broken_collective_without_a_suspect_has_no_verdict():
    everybody = [_busy(rank, inside=5) for rank in range(3)]
    assert judge_broken(_evidence(*everybody), reason="late") is None
    assert judge_broken(_evidence(*[_busy(rank) for rank in range(3)]), reason="late") is None


def test_a_broken_collective_blames_who_stands_still_before_who_computes_and_nobody_who_waits():
    victim, slow = _busy(0, inside=5, still_s=9.0, waits=True), _busy(1, inside=5)
    hanging = _busy(2, inside=5, still_s=9.0)
    assert "): rank 2 is slow, for 7.2 s in phase 'load'\n" in judge_broken(_evidence(victim, slow, hanging), reason="late").text
    assert "): rank 1 is slow, for 7.2 s in phase 'load'\n" in judge_broken(_evidence(victim, slow, _status(2)), reason="late").text
    assert judge_broken(_evidence(victim, _status(1), _status(2)), reason="late") is None


def _waiting(rank, **fields):
    return _busy(rank, **{"inside": 5, "still_s": 2.5, "waits": True, **fields})


def test_a_collective_that_another_rank_never_joins_is_told_with_where_it_is_waited_for():
    verdict = judge_standstill(_evidence(_waiting(0), _waiting(1, still_s=3.0), _busy(2)))
    assert verdict.kind == "stuck"
    assert verdict.text.startswith(
        "ranks 0, 1 wait in a collective of region 'save' and have not got on for 2.5 s: rank 2 has left it\n"
        "  rank 0, innermost call last:\n")
    everybody = judge_standstill(_evidence(*[_waiting(rank) for rank in range(3)]))
    assert "and have not got on for 2.5 s: they are not all in the same one\n" in everybody.text
    assert everybody.text.count("innermost call last") == 3


@pytest.mark.parametrize("third", [
    _waiting(2, still_s=1.0),  # it still gets on
    _waiting(2, waits=False),  # it computes, or hangs, which it says itself
    None,
])
def test_while_somebody_may_get_on_there_is_no_standstill(third):
    assert judge_standstill(_evidence(_waiting(0), _waiting(1), *([third] if third else []))) is None


def test_who_is_stopped_is_no_standstill_but_named_with_its_time():
    stopped = ProcessState(2, "stopped", "is stopped by a signal")
    assert judge_standstill(_evidence(*[_waiting(rank) for rank in range(3)], states={2: stopped})) is None
    assert judge_stopped({2: (stopped.text, 5.25)}, where="train_step") == SyncVerdict(
        "stuck", "rank 2 is stopped by a signal, for 5.2 s, while others wait for it in 'train_step'")
