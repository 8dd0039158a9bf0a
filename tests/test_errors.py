"""The hierarchy of errors: who is to mend it, and which standard error it refines."""

import errno
import inspect
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize(("number", "advice"), [(errno.ENOSPC, "free space there;"), (errno.EPERM, "let this user write there, or")])
def test_an_error_of_a_disk_is_told_in_a_sentence_with_what_to_do(number: int, advice: str) -> None:
    told = errors.of_disk(OSError(number, "said so", "runs/x/weights"))
    assert isinstance(told, errors.StorageError) and told.exit_code == 2
    assert str(told).startswith("runs/x/weights cannot be written: said so; ") and advice in str(told)
    assert errors.of_disk(ConnectionResetError(errno.ECONNRESET, "reset")) is None
    assert errors.of_disk(errors.StorageError(number, "told already")) is None


def test_a_command_whose_disk_is_full_says_so() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "offbeat", "config", "docs"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("offbeat: a file cannot be written: No space left on device; free space")
