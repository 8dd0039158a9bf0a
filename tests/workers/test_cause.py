"""The root cause among several errors, and one line for each of the others."""

import itertools

import pytest

from offbeat.errors import DeadlineError, DeathError, ModelError, PeerError, RunError, StuckError, SyncMismatch, SyncTimeout, WorkerError
from offbeat.workers.cause import Cause, cause_of, consequences, root_cause

BY_CAUSE = {
    Cause.RAISED: [WorkerError("rank 1 failed in save: ValueError: x"), ModelError("no weights"), RunError("x")],
    Cause.DIED: [DeathError("rank 1 (process 7) was killed by SIGKILL in save")],
    Cause.MISSED: [
        SyncTimeout("rank 1 did not come"), SyncMismatch("rank 1 came to 'a', rank 0 to 'b'"), StuckError("rank 1 is stopped")],
    Cause.LOST_PEER: [
        PeerError("rank 1 died"),
        WorkerError("rank 0 failed in join: DistNetworkError: Connection was likely closed"),
        WorkerError("rank 0 failed in train_step: RuntimeError: Operation timed out!"),
        WorkerError("rank 0 failed in train_step: RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out"),
        WorkerError("rank 0 failed in save: RuntimeError: [/pytorch/third_party/gloo/transport/tcp/pair.cc:553] Connection closed by peer"),
    ],
    Cause.LATE: [DeadlineError("save on rank 0 passed its deadline")],
}


def test_causes_are_told_from_the_errors_and_only_two_have_another_behind_them() -> None:
    for cause, errors in BY_CAUSE.items():
        assert [cause_of(error) for error in errors] == [cause] * len(errors)
    assert [cause for cause in Cause if cause.is_consequence] == [Cause.LOST_PEER, Cause.LATE]


@pytest.mark.parametrize(("likelier", "other"), itertools.combinations(Cause, 2))
def test_the_likelier_cause_is_the_root_whichever_came_first(likelier: Cause, other: Cause) -> None:
    root, consequence = BY_CAUSE[likelier][0], BY_CAUSE[other][-1]
    assert root_cause({"rank 0": consequence, "rank 1": root}) == "rank 1"
    assert root_cause({"rank 1": root, "rank 0": consequence}) == "rank 1"


def test_among_equals_the_first_to_fail_is_the_root() -> None:
    assert root_cause({"rank 2": RunError("a"), "rank 0": RunError("b")}) == "rank 2"


def test_each_other_error_is_one_line_and_what_all_say_is_said_once() -> None:
    verdict = "rank 2 did not come to 'save' within 5 s\n  its stack"
    failures = {"rank 0": SyncTimeout(verdict), "rank 1": SyncTimeout(verdict), "rank 3": PeerError("rank 2 failed\nmore")}
    failures["rank 4"] = WorkerError("rank 4 failed in save: RuntimeError: x")
    assert consequences(failures, root="rank 0") == ["rank 3: rank 2 failed", "rank 4 failed in save: RuntimeError: x"]
    assert len(consequences({"a": RunError("x"), "b": RunError("y" * 1000)}, root="a")[0]) < 400
