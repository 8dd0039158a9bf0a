"""Reward functions in the forms that users write them, called in one way by the reward process.

    def reward(completion: str, row: Row) -> float            called for each completion
    async def reward(completion: str, row: Row) -> float      called for all completions of a group at the same time
    @of_group / def reward(completions: list[str], row)       called once for a group
    def reward(completions, **columns) -> list[float]         the same, in TRL's form

Instead of a list, one of groups may return an array of numpy or torch of one dimension, or yield its rewards. Each may also be async.
TRL's form is told by its parameter `completions`: it is given `prompts` and `completions`, and the columns of the data that it names, or
all if it takes any; each is a list with an entry for every completion, and entries of a chat are lists of one message. `images` has those
of the prompt, as paths and data URIs. A number may be None, where the reward does not apply.

The first parameter is the completion, or the completions, and the second the row. Where `row` is the name of the first, it is the other way
round. A function in which a completion comes second without a `row` before it, such as `(prompt, completion)`, is refused.
"""

import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from offbeat.data.image_memory import as_uris
from offbeat.data.image_placeholders import with_parts
from offbeat.data.reward import JUDGE_PREFIX, FailedReward, check_reward, is_of_group
from offbeat.data.row import Row
from offbeat.errors import CodeError, printable, shorten
from offbeat.raised import FirstTracebacks, describe_at
from offbeat.rollout.judges import judge_reward
from offbeat.user_code.boundary import Caught
from offbeat.user_code.functions import check_takes, resolve

_LONGEST_REASON = 1000
_COMPLETIONS = {"completion", "completions"}


class RewardFunction:
    """A reward function, loaded by its name; async ones run on an event loop that lives as long as it."""

    def __init__(self, dotted: str, *, may_miss: bool = True) -> None:
        """Load the function.

        `may_miss` says whether None means that the reward does not apply, as there are others; else it is no reward.

        Raises:
            CodeError: there is none of that name, or its parameters do not say which is the completion.
        """
        self.dotted = dotted
        self._may_miss = may_miss
        is_judge = dotted.startswith(JUDGE_PREFIX)
        self._function: Callable[..., Any] = judge_reward(dotted.removeprefix(JUDGE_PREFIX)) if is_judge else resolve(dotted, kind="reward")
        parameters = _parameters(self._function)
        self._is_of_columns = "completions" in parameters and not is_of_group(self._function) and "row" not in parameters
        self._is_of_group = is_of_group(self._function) or "completions" in parameters
        self._takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        self._named = [name for name, each in parameters.items() if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
        self._required = [name for name in self._named if parameters[name].default is inspect.Parameter.empty]
        self._row_first = self._named[:1] == ["row"] and len(self._named) > 1
        if not self._is_of_columns and not self._row_first and _COMPLETIONS & set(self._named[1:]) and self._named[0] not in _COMPLETIONS:
            raise CodeError(
                f"the reward {dotted} takes ({', '.join(self._named)}), which does not say where the row goes; a reward takes"
                " (completion, row), or (completions, row) for all completions of a group at once")
        if not self._is_of_columns:
            taken = "completions" if self._is_of_group else "completion"
            check_takes(self._function, dotted, ("row", taken) if self._row_first else (taken, "row"), kind="reward")
        self._is_async = any(map(inspect.iscoroutinefunction, (self._function, type(self._function).__call__)))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tracebacks = FirstTracebacks()

    @property
    def takes_group(self) -> bool:
        """Whether all completions of a group are to be scored in one call."""
        return self._is_of_group or self._is_async

    def values(self, completions: Sequence[str], row: Row) -> list[float | None]:
        """Return for each completion a number, a `NamedReward`, a `FailedReward` that says why, or None where the reward does not apply.

        Raises:
            MemoryError: memory ran out; the process must be ended.
        """
        if not self._is_of_group:
            called = self._finish(self._together(completions, row)) if self._is_async else [
                self._called(completion, *self._given(completion, row)) for completion in completions]
            return [self._checked(value, completion) for value, completion in zip(called, completions, strict=True)]
        if self._is_of_columns:
            columns = _columns(row, completions)
            if missing := [name for name in self._required if name not in columns]:
                return self._failed_group(
                    f"takes {missing[0]!r}, which no column of the data is called; there are {', '.join(sorted(columns))}", completions)
            taken = columns if self._takes_any else {name: columns[name] for name in self._named if name in columns}
            found = self._called(completions[0], **taken)
        else:
            found = self._called(completions[0], *self._given(list(completions), row))
        if isinstance(found, FailedReward):
            return [found] * len(completions)
        listed = None
        with _called() as caught:  # a generator of user code may raise
            listed = _listed(found)
        if caught.error is not None:
            return [self._raised(caught.take(), completions[0])] * len(completions)
        if listed is None or len(listed) != len(completions):
            return self._failed_group(f"must return a list of {len(completions)} rewards, returned {shorten(found)}", completions)
        return [self._checked(value, completion) for value, completion in zip(listed, completions, strict=True)]

    def _given(self, written: str | list[str], row: Row) -> tuple[Any, Any]:
        """Return the two arguments in the order of the function's parameters."""
        return (row, written) if self._row_first else (written, row)

    def _called(self, shown: str, *arguments: Any, **columns: Any) -> Any:
        """Return the function's result, or a `FailedReward` if it raised; the reason quotes the completion `shown`."""
        with _called() as caught:
            found = self._function(*arguments, **columns)
            return self._finish(found) if inspect.isawaitable(found) else found
        return self._raised(caught.take(), shown)

    async def _together(self, completions: Sequence[str], row: Row) -> list[Any]:
        async def one(completion: str) -> Any:
            with _called() as caught:
                return await self._function(*self._given(completion, row))
            return self._raised(caught.take(), completion)

        return list(await asyncio.gather(*map(one, completions)))

    def _finish(self, awaitable: Any) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(awaitable)

    def _checked(self, value: Any, completion: str) -> float | None:
        if (value is None and self._may_miss) or (isinstance(value, FailedReward) and value.reason.startswith(self._prefix)):
            return value
        reward = check_reward(value)
        if isinstance(reward, FailedReward):
            return self._failed(f"returned what cannot be trained on: {reward.reason}", completion)
        return reward

    @property
    def _prefix(self) -> str:
        return f"the reward {self.dotted} "

    def _raised(self, exc: BaseException, completion: str) -> FailedReward:
        """Return the failed reward; the traceback goes to stderr, which is the log of the process, once for each kind."""
        sys.stderr.write(self._tracebacks.take(exc))
        sys.stderr.flush()
        return self._failed(f"raised {describe_at(exc)}", completion)

    def _failed(self, how: str, completion: str) -> FailedReward:
        return FailedReward(printable(f"{self._prefix}{how} (completion {completion[:60]!r})", most=_LONGEST_REASON))

    def _failed_group(self, how: str, completions: Sequence[str]) -> list[float | None]:
        return [self._failed(how, completions[0])] * len(completions)


def _called() -> Caught:
    """Keep an error of the reward: of `sys.exit()` too, since restarting a process takes a second, but not that memory ran out."""
    return Caught(BaseException, passes=(MemoryError,))


def _listed(found: Any) -> list[Any] | None:
    """Return the result of a function of groups as a list; None unless it is a sequence, an iterator, or an array of one dimension."""
    if getattr(found, "ndim", None) == 1 and callable(getattr(found, "tolist", None)):  # of numpy, torch, jax and pandas
        return list(found.tolist())
    if isinstance(found, str | bytes | bytearray | memoryview) or hasattr(found, "ndim"):
        return None
    return list(found) if isinstance(found, Sequence | Iterator) else None


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # of native code
        return {}


def _columns(row: Row, completions: Sequence[str]) -> dict[str, list[Any]]:
    """Return the arguments of a reward in TRL's form: lists of one entry for each completion, such as {"answer": ["4", "4"]}."""
    chat = not isinstance(row.prompt, str)
    columns: dict[str, Any] = {"answer": row.answer, **({"solution": row.solution} if row.solution else {})}
    columns |= {name: json.loads(text) if name in row.json_fields else text for name, text in row.extra.items()}
    prompt = row.shown_prompt if isinstance(row.prompt, str) else with_parts(row.prompt) if row.images else list(row.prompt)
    shared = {**columns, **({"images": as_uris(row.images)} if row.images else {}), "prompts": prompt}
    given = {name: [value] * len(completions) for name, value in shared.items()}
    given["completions"] = [[{"role": "assistant", "content": each}] if chat else each for each in completions]
    return given
