"""Results and errors of functions that are called for somebody else."""

import sys
from concurrent.futures import Future

import pytest

from offbeat.settling import outcome_of, settle


def test_a_result_is_in_the_future() -> None:
    assert outcome_of(lambda: 3).result(0) == 3
    assert outcome_of(lambda: 3).exception(0) is None


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt(), SystemExit(3), StopIteration()])
def test_an_error_of_any_kind_is_in_the_future_and_not_raised(error: BaseException) -> None:
    def fail() -> None:
        raise error

    assert outcome_of(fail).exception(0) is error


def test_an_exit_is_raised_where_the_result_is_awaited() -> None:
    future: Future[None] = Future()
    settle(future, lambda: sys.exit(3))
    with pytest.raises(SystemExit):
        future.result(0)
