"""Errors of code that may raise anything are kept, or told in one sentence."""

import asyncio

import pytest

from offbeat.errors import CodeError, DataError
from offbeat.user_code.boundary import Caught, told_as


def test_an_error_is_kept_unless_it_is_of_another_kind_or_let_through() -> None:
    with Caught() as caught:
        raise KeyError("turns")
    assert isinstance(caught.error, KeyError)
    with Caught() as caught:
        found = 3
    assert caught.error is None and found == 3
    for error, kinds, passes in (
            (SystemExit(3), (), ()), (asyncio.CancelledError(), (), ()), (MemoryError(), (BaseException,), (MemoryError,))):
        with pytest.raises(type(error)), Caught(*kinds, passes=passes):
            raise error
    with Caught(BaseException) as caught:
        raise SystemExit(3)
    assert str(caught.error) == "3" and caught.failure is None
    with Caught() as caught:
        raise KeyError("turns")
    assert caught.failure is caught.error


def test_an_error_is_told_in_a_sentence_with_its_cause() -> None:
    with pytest.raises(CodeError, match=r"^my\.py failed on import: SystemExit: 3$") as told, told_as("my.py failed on import: "):
        raise SystemExit(3)
    assert isinstance(told.value.__cause__, SystemExit)
    with pytest.raises(CodeError, match=r"^it refuses: ValueError: no; change it$"), told_as("it refuses: ", "; change it"):
        raise ValueError("no")
    with pytest.raises(DataError, match="^mine$"), told_as("f raised ", passes=(DataError,)):
        raise DataError("mine")
