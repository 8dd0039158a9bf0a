"""Functions that a Python program gives to a run as objects, where a configuration would name them.

`give` returns the name that stands for a function in the configuration: `module:function` where the function can be imported, else
`python:function`. As long as it is given, `functions.resolve` finds it by that name in this process. Child processes that call it,
of rewards and of agents, get it over their pipe: `pack` makes the bytes in the parent, `receive` unpickles them in the child. No bytes are
ever unpickled that come from elsewhere, so a file, such as a configuration or a checkpoint, can name a function and never carry one.
"""

import inspect
import pickle
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from offbeat.errors import CodeError, shorten
from offbeat.user_code.boundary import told_as

PREFIX = "python:"
"""Marks the name of a function that cannot be imported, such as one of a script or a notebook."""

_MOST_BYTES = 1 << 28
_GIVEN: dict[str, Callable[..., Any]] = {}
"""Functions given to this process, by name."""
_TIMES: Counter[str] = Counter()
"""How often each of them has been given and not yet withdrawn: a run and a call in its callback may be given the same function."""


@dataclass(frozen=True)
class Given:
    """A function on its way from a process to its own child.

    Attributes:
        pickled: the function, by reference where it can be imported, else by value.
        search_path: `sys.path` of the parent, since the function may import modules beside the program that gave it.
    """

    name: str
    pickled: bytes
    search_path: tuple[str, ...]


def give(function: object, *, kind: str) -> str:
    """Keep a function, class or other callable for this process and its children, and return its name for the configuration.

    Messages name its purpose, `kind`, such as "rollout.reward". Raises CodeError if it cannot be called, or sent to another process.
    """
    if not callable(function):
        raise CodeError(f"{kind} must be a function, or text that names one, such as 'rewards.py:mine', got {shorten(function)}")
    name = import_name(function) or _free_name(function)
    _pickle(name, function, kind)
    _GIVEN[name] = function
    _TIMES[name] += 1
    return name


def withdraw(names: Iterable[str]) -> None:
    """Forget the functions of these names, once each is withdrawn as often as it was given."""
    for name in names:
        _TIMES[name] -= 1
        if _TIMES[name] <= 0:
            del _TIMES[name]
            _GIVEN.pop(name, None)


def find_given(name: str) -> Callable[..., Any] | None:
    """Return the function given under this name, or None; raises CodeError for a name that was given to another process."""
    if name not in _GIVEN and name.startswith(PREFIX):
        raise CodeError(
            f"{name!r} is a function that a Python program gave to its run, and this process has not been given it; name the file of the"
            " function instead, path/to/file.py:function, or start the run from that program")
    return _GIVEN.get(name)


def source_of(name: str) -> str:
    """Return the source text of a given function whose name cannot be imported, such as "python:score"; empty if unknown."""
    try:
        return inspect.getsource(_GIVEN[name]) if name in _GIVEN and name.startswith(PREFIX) else ""  # type: ignore[arg-type]
    except (OSError, TypeError):
        return ""


def pack(names: Iterable[str]) -> tuple[Given, ...]:
    """Return the named functions that were given as objects, for a child process of this one."""
    return tuple(Given(name, _pickle(name, _GIVEN[name], name), tuple(sys.path)) for name in names if name in _GIVEN)


def receive(given: Iterable[Given]) -> None:
    """Take functions that the parent process has packed; from then on `find_given` finds them here.

    Raises CodeError if a module or object that a function needs is missing in this process.
    """
    for each in given:
        sys.path.extend(folder for folder in each.search_path if folder not in sys.path)
        with told_as(f"{each.name!r} cannot be loaded in a process of its own: "):
            _GIVEN[each.name] = pickle.loads(each.pickled)  # noqa: S301 - the parent made these bytes from its own memory


def import_name(function: Any) -> str:
    """Return "module:function", or "path/to/file.py:function" for a module that is not installed; empty if neither finds the function."""
    module_name, name = getattr(function, "__module__", None) or "", getattr(function, "__qualname__", "")
    module = sys.modules.get(module_name)
    if module is None or module_name == "__main__" or not name.isidentifier() or getattr(module, name, None) is not function:
        return ""
    file = getattr(module, "__file__", None) or ""
    installed = Path(file).is_relative_to(sys.prefix) or Path(file).is_relative_to(sys.base_prefix)
    beside = "." not in module_name and file.endswith(".py") and not installed
    return f"{file if beside else module_name}:{name}"


def _free_name(function: object) -> str:
    """Return a name that no other function has that is given now."""
    own = re.sub(r"\W", "", getattr(function, "__name__", type(function).__name__)) or "function"
    name, number = f"{PREFIX}{own}", 1
    while _GIVEN.get(name, function) is not function:
        number += 1
        name = f"{PREFIX}{own}_{number}"
    return name


def _pickle(name: str, function: object, kind: str) -> bytes:
    with told_as(
            f"{kind}: {name.removeprefix(PREFIX)!r} cannot be sent to the process that calls it (",
            "); make what it needs, such as an open file or a connection, inside of it, or move it to a file of its own and import it"):
        pickled = cloudpickle.dumps(function)
    if len(pickled) > _MOST_BYTES:
        raise CodeError(
            f"{kind}: {name.removeprefix(PREFIX)!r} refers to {len(pickled) >> 20} MiB of data, and at most {_MOST_BYTES >> 20} are sent"
            " to the process that calls it; let it read them from a file")
    return pickled
