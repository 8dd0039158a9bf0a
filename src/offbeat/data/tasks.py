"""Tasks that generate their own rows: sorting digits, addition, countdown, and reasoning-gym's. They need no file and no download.

A row depends on (task, size, seed, stream, index) alone and is made in constant time, so a resumed run sees the rows it would have seen.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from offbeat.config.data import DataConfig
from offbeat.data.reasoning import PREFIX, open_reasoning
from offbeat.data.row import Row
from offbeat.errors import DataError

_LARGEST_NUMBER = 99
_LARGEST_TARGET = 999


class Task(Protocol):
    """An endless sequence of rows.

    Attributes:
        name: name of the task, for messages.
        reward: dotted name of the reward that fits it.
        remedy: advice for getting more different rows.
    """

    @property
    def name(self) -> str: ...

    @property
    def reward(self) -> str: ...

    @property
    def remedy(self) -> str: ...

    def row(self, index: int, *, seed: int, stream: str = "train") -> Row:
        """Return the row at `index`; streams of different names are independent."""
        ...


@dataclass(frozen=True)
class BuiltInTask:
    """A family of generated rows; see `Task`.

    Attributes:
        size: difficulty: digits to sort, digits per addend, or numbers to combine.
        make: draws one row from a random generator, given the size.
    """

    name: str
    size: int
    make: Callable[[random.Random, int], Row]
    reward: str
    remedy: str = "raise data.task_size"

    def row(self, index: int, *, seed: int, stream: str = "train") -> Row:
        return self.make(random.Random(f"{self.name}/{self.size}/{seed}/{stream}/{index}"), self.size)


def find_task(config: DataConfig) -> Task:
    """Return the task that [data] names; raises DataError for an unknown task or option, MissingExtraError if it needs an extra."""
    if config.task.startswith(PREFIX):
        return open_reasoning(config.task, config.task_options)
    if config.task_options:
        raise DataError(f"data.task_options are for {PREFIX} tasks, got {config.task_options[0]!r}; {config.task} has data.task_size")
    make, reward = _TASKS[config.task]
    return BuiltInTask(config.task, config.task_size, make, reward)


def _sort_digits(rng: random.Random, size: int) -> Row:
    digits = [rng.choice("0123456789") for _ in range(size)]
    return Row("".join(digits) + ">", "".join(sorted(digits)))


def _addition(rng: random.Random, size: int) -> Row:
    a, b = rng.randrange(10**size), rng.randrange(10**size)
    return Row(f"{a}+{b}=", str(a + b))


def _countdown(rng: random.Random, size: int) -> Row:
    """Combine random pairs until one number is left: its value is the target, so every target can be reached with all numbers."""
    numbers = [rng.randint(1, _LARGEST_NUMBER) for _ in range(size)]
    pool = [(n, str(n)) for n in numbers]
    while len(pool) > 1:
        (a, a_text), (b, b_text) = sorted((pool.pop(rng.randrange(len(pool))) for _ in range(2)), reverse=True)
        value, sign = rng.choice(_moves(a, b))
        pool.append((value, f"({a_text}{sign}{b_text})"))
    target, expression = pool[0]
    if size > 1:
        expression = expression[1:-1]
    shown = " ".join(map(str, numbers))
    return Row(f"{shown} -> {target}?", expression, {"numbers": shown, "target": str(target)})


def _moves(a: int, b: int) -> list[tuple[int, str]]:
    """Return the results of a and b, a >= b >= 1, that are whole, positive and small, e.g. (8, "+") of 6 and 2. There always is one."""
    moves = [(a + b, "+"), (a - b, "-"), (a * b, "*")] + ([(a // b, "/")] if a % b == 0 else [])
    return [(value, sign) for value, sign in moves if 0 < value <= _LARGEST_TARGET]


def _seeds(rng: random.Random, size: int) -> Row:  # noqa: ARG001 - a seed has no difficulty
    number = str(rng.randrange(10**9))
    return Row(number, "", {"seed": number})


_TASKS: dict[str, tuple[Callable[[random.Random, int], Row], str]] = {
    "sort_digits": (_sort_digits, "offbeat.rollout.rewards.exact_match:exact_match"),
    "addition": (_addition, "offbeat.rollout.rewards.exact_match:exact_match"),
    "seeds": (_seeds, "offbeat.rollout.rewards.exact_match:exact_match"),
    "countdown": (_countdown, "offbeat.rollout.rewards.countdown:countdown"),
}
