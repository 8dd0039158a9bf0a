"""Loads functions named in the configuration: rewards, workflows, filters, and a user's own objective and credit.

A name is `package.module:function`, or `path/to/file.py:function` for code that is not installed; or it stands for a function that a
program gave as an object (`given`). Every error in a name is reported in one sentence, with the nearest name that exists.
"""

import difflib
import functools
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from offbeat.errors import CodeError, OwnCodeError, describe
from offbeat.raised import describe_at
from offbeat.user_code.boundary import Caught
from offbeat.user_code.given import find_given


def resolve(dotted: str, *, kind: str) -> Callable[..., Any]:
    """Return the function that a name refers to.

    Args:
        dotted: "module:function", "file.py:function" such as "my_reward.py:score", or a name of `given.give`.
        kind: its purpose ("reward", "workflow"), for messages.

    Raises:
        CodeError: the form is wrong, the module or function does not exist, importing fails, or the object is not callable.
    """
    if (given := find_given(dotted)) is not None:
        return given
    module_name, _, function_name = dotted.rpartition(":")
    if not module_name or not function_name.isidentifier():
        raise CodeError(f"{kind} must be 'module:function' or 'path/to/file.py:function', got {dotted!r}")
    if module_name.endswith(".py"):
        path = Path(module_name).resolve()
        if not path.is_file():
            raise CodeError(f"{kind} {dotted!r}: there is no file {str(path)!r}; a path is relative to the working directory")
        module = _load_file(path)
    else:
        module = _import(module_name, kind)
    if not hasattr(module, function_name):
        own = {name: value for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}
        names = [name for name, value in own.items() if callable(value) and not name.startswith("_")]
        near = difflib.get_close_matches(function_name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(names)) or 'no functions'}"
        raise CodeError(f"{kind} {dotted!r}: {module_name!r} has no function {function_name!r}; {hint}")
    function = getattr(module, function_name)
    if not callable(function):
        raise CodeError(f"{kind} {dotted!r} must be a function, got a {type(function).__name__}")
    return function


def check_takes(function: Callable[..., Any], dotted: str, given: Sequence[str], *, kind: str) -> None:
    """Refuse a function that cannot be called with so many arguments by position; one of unknown signature is accepted.

    `given` names the arguments in messages. Raises CodeError if it takes more or fewer.
    """
    try:
        signature = inspect.signature(function, follow_wrapped=False)  # a decorator may add arguments
    except (TypeError, ValueError):  # of native code
        return
    try:
        signature.bind(*given)
    except TypeError as exc:
        raise CodeError(
            f"{kind} {dotted!r} takes {re.sub(' ->.*', '', str(signature))}, but it is called with ({', '.join(given)}); {exc}") from exc


@contextmanager
def blaming(dotted: str, function: Callable[..., Any], *, kind: str) -> Iterator[None]:
    """Add file and line of the user's code to an exception from a function of `resolve`.

    Raises OwnCodeError if the code raised an exception, of any class but this one, or called `sys.exit`.
    """
    with Caught(Exception, SystemExit, passes=(OwnCodeError,)) as caught:
        yield
    if (exc := caught.error) is not None:
        frames = traceback.extract_tb(exc.__traceback__)
        file = getattr(getattr(function, "__code__", None), "co_filename", "")
        at = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
        raise OwnCodeError(f"{kind} {dotted!r} raised {describe(exc)} at {at.filename}, line {at.lineno}") from exc


@contextmanager
def at_step(step: int) -> Iterator[None]:
    """Add the training step to the message of an `OwnCodeError`."""
    try:
        yield
    except OwnCodeError as exc:
        raise OwnCodeError(f"{exc}, in step {step}") from exc


def _import(name: str, kind: str) -> ModuleType:
    with Caught(Exception, SystemExit) as caught:
        return importlib.import_module(name)
    exc = caught.take()
    if isinstance(exc, ModuleNotFoundError):
        # If a parent of `name` is missing, the name is wrong; otherwise an import inside the module failed.
        if exc.name is None or not f"{name}.".startswith(f"{exc.name}."):
            raise CodeError(f"{kind} module {name!r} needs the module {exc.name!r}, which is not installed") from exc
        raise CodeError(
            f"{kind} module {name!r} was not found; check the spelling, install it, or name its file: path/to/file.py:function") from exc
    raise CodeError(f"{kind} module {name!r} failed on import: {describe_at(exc)}") from exc


@functools.cache  # so that functions from one file share its state
def _load_file(path: Path) -> ModuleType:
    name = f"offbeat_user_{path.stem}_{abs(hash(path)):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"{path} ends in .py, so it has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up the module here
    with Caught(Exception, SystemExit) as caught:
        spec.loader.exec_module(module)
        return module
    del sys.modules[name]
    exc = caught.take()
    raise CodeError(f"file {str(path)!r} failed on import: {describe_at(exc)}") from exc
