"""Rewards for tests: one that gives random-looking numbers, and some that misbehave."""

import math
import os
import time
from collections import Counter
from pathlib import Path

import numpy as np

from offbeat.data.reward import FailedReward, of_group


def random_looking(completion, row):
    return float(sum(map(ord, completion)) % 3) / 2


def right(completion, row):
    return 1.0


def slow(completion, row):
    time.sleep(0.2)
    return random_looking(completion, row)


def now_and_then_slow(completion, row):
    """Takes 0.3 s for every fourth answer."""
    if sum(map(ord, completion)) % 4 == 0:
        time.sleep(0.3)
    return random_looking(completion, row)


def equal(completion, row):
    return float(completion == row.answer)


def by_name(completion, row):
    return {"right": completion == row.answer, "short": 0.5 / len(completion) if completion else math.nan}


_CALLS = Counter()


def varies_on_odd(completion, row):
    """By name; samples of even rows are all right, and of odd rows every second one."""
    _CALLS[row.answer] += 1
    return {"right": int(row.answer) % 2 == 0 or _CALLS[row.answer] % 2, "form": 0}


def rises(completion, row):
    """Wrong at the first six calls, which are the check and those of one evaluation and a bit; then right."""
    _CALLS["all"] += 1
    return float(_CALLS["all"] > 6)


def breaks_later(completion, row):
    """Raises from the fifteenth call on, unless the variable STAYS_WELL is set."""
    _CALLS["all"] += 1
    if _CALLS["all"] >= 15 and "STAYS_WELL" not in os.environ:
        raise ValueError("it broke")
    return random_looking(completion, row)


def raises_on_x(completion, row):
    if completion == "x":
        raise ValueError("x is no number")
    return 1.0


def hangs_on_x(completion, row):
    if completion == "x":
        time.sleep(60)
    return 1.0


def dies_on_x(completion, row):
    if completion == "x":
        os._exit(5)
    return 1.0


def dies_once(completion, row):
    """Ends its process at the first call that finds no file of the answer's name."""
    died = Path(row.answer)
    if not died.exists():
        died.touch()
        os._exit(5)
    return 1.0


def gives_text(completion, row):
    return "good"


def gives_nothing(completion, row):
    return None


def gives_nan(completion, row):
    return math.nan


def gives_too_much(completion, row):
    return 1e308


def gives_an_array(completion, row):
    return np.ones(1)


def applies_to_y(completion, row):
    return 1.0 if completion == "y" else None


async def answers_later(completion, row):
    return 1.0


def takes_memory_on_x(completion, row):
    held = []
    if completion == "x at once":
        held.append(bytearray(1_000_000_000))
    while completion == "x bit by bit":
        held.append(bytearray(1_000_000))
    return 1.0


KEPT = []


def keeps_memory(completion, row):
    KEPT.append(bytearray(200_000_000))
    return 1.0


def sees_variable(completion, row):
    return float(completion in os.environ)


def needs_a_key(completion, row):
    return float(len(os.environ["JUDGE_API_KEY"]))


def says_what_no_file_takes(completion, row):
    print("x" * 10**6)
    raise ValueError("\ud800" + "y" * 10**6)


def exits(completion, row):
    raise SystemExit(3)


def calls_itself(completion, row):
    return calls_itself(completion, row)


@of_group
def best_of_group(completions, row):
    if "x" in completions:
        raise ValueError("x is no number")
    if "few" in completions:
        return [1.0]
    if "hang" in completions:
        time.sleep(60)
    if "die" in completions:
        os._exit(3)
    longest = max(map(len, completions))
    return [FailedReward("no judgement") if not each else {"longest": len(each) == longest, "right": each == row.answer}
            for each in completions]


def forks(completion, row):
    """A copy of the process comes back from the call, too."""
    os.fork()
    return 1.0
