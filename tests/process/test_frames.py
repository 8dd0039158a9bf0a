"""Exceptions that travel between parent and child."""

from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ConfigError, WorkerError
from offbeat.process.frames import CallFailure


@given(st.builds(CallFailure, st.text(), st.text(), st.lists(st.text()).map(tuple)))
def test_a_failure_survives_its_way(failure: CallFailure) -> None:
    assert CallFailure.unpack(failure.pack()) == failure


def test_text_that_is_no_unicode_is_told_all_the_same() -> None:
    assert CallFailure.unpack(CallFailure("ValueError", "bad \ud83d").pack()).text == "bad \\ud83d"


def test_our_errors_come_back_as_themselves_and_others_as_those_of_a_worker() -> None:
    ours = CallFailure.of(ConfigError("x must be 1, got 2"), "a note").to_exception("rank 0", "in build")
    assert type(ours) is ConfigError and str(ours) == "x must be 1, got 2" and ours.__notes__ == ["a note"]
    other = CallFailure.of(KeyError("x")).to_exception("rank 0", "in build")
    assert type(other) is WorkerError and str(other) == "rank 0 failed in build: KeyError: 'x'"
