"""The hierarchy of errors: who is to mend it, and which standard error it refines."""

import inspect

import pytest

from offbeat import errors

ALL = [cls for _, cls in inspect.getmembers(errors, inspect.isclass)]


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_every_error_is_documented_and_has_the_exit_code_of_who_is_to_mend_it(error: type[errors.OffbeatError]) -> None:
    assert error.__doc__
    assert error.exit_code == (2 if issubclass(error, errors.UserError) else 1)
    assert not (issubclass(error, errors.UserError) and issubclass(error, errors.RunError))


@pytest.mark.parametrize(("error", "standard"), [
    (errors.ConfigError, ValueError), (errors.DataError, ValueError), (errors.ModelError, ValueError),
    (errors.MissingExtraError, ImportError), (errors.PortBusyError, OSError), (errors.StorageError, OSError),
    (errors.DeadlineError, TimeoutError), (errors.RunError, RuntimeError),
])
def test_an_error_is_also_the_standard_one(error: type[errors.OffbeatError], standard: type[Exception]) -> None:
    with pytest.raises(standard, match="what to do"):
        raise error("what to do")


def test_what_another_library_says_is_cut_to_its_first_line() -> None:
    assert errors.first_line(RuntimeError("\n no such kernel.\n\n  at aten/native")) == "no such kernel"
    assert errors.first_line(KeyError()) == "KeyError"
