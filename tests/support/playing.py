"""Agents, tools and environments for tests, as users would write them."""

import asyncio
import contextlib
import json
import os
import threading
import time
import urllib.request


async def answer(task):
    """Ask once, and be rewarded for asking."""
    await asyncio.to_thread(ask, task, [{"role": "user", "content": str(task.row.prompt)}])
    return {"asked": 1.0, "seed": task.seed % 2}


async def measuring(task):
    """Ask once, and measure what is no reward."""
    await asyncio.to_thread(ask, task, [{"role": "user", "content": str(task.row.prompt)}])
    return {"reward": 0.5, "metrics": {"words": 3, "found": True, "where": "nowhere"}}


def blocking_agent(task):
    """Ask twice, as a plain function."""
    messages = [{"role": "user", "content": str(task.row.prompt)}]
    for _ in range(2):
        messages += [ask(task, messages), {"role": "user", "content": "again"}]


async def misbehave(task):
    """Do what the row's answer says."""
    match task.row.answer:
        case "raise":
            raise ValueError("no idea")
        case "exit":
            os._exit(3)
        case "block":
            time.sleep(60)  # noqa: ASYNC251 - that is the mistake
        case "wait":
            await asyncio.sleep(60)
        case "nothing":
            return 1.0
        case "text":
            return "much"
    return float(task.row.answer)


async def asks_and_waits(task):
    """Ask once, and then wait for nothing."""
    await answer(task)
    await asyncio.sleep(60)


async def asks_for_ever(task):
    """Ask again whatever comes, as an agent does that swallows all errors."""
    while True:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(ask, task, [{"role": "user", "content": str(task.row.prompt)}])


def hang(task):
    """Block a thread for good, or return a reward."""
    if task.row.answer == "hang":
        threading.Event().wait()
    return float(task.row.answer)


def ask(task, messages):
    """Call the model through the standard library alone; returns its message."""
    body = json.dumps({"model": task.model, "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{task.base_url}/chat/completions", body, headers)) as response:
        return json.load(response)["choices"][0]["message"]


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first number,
            which may be negative
        b (int): the second one

    Returns:
        their sum
    """
    return a + b


async def look_up(words: list[str]) -> dict[str, int]:
    """Count letters."""
    return {word: len(word) for word in words}


def slow(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "done"


def untyped(a):
    return a


class Counter:
    """A class in the manner of TRL."""

    def __init__(self):
        self.reward = 0.0

    def reset(self, start: str = "0", **row) -> str:
        self._at = int(start)
        return f" It is {self._at}."

    def increment(self, by: int) -> str:
        """Add to the counter.

        Args:
            by: how much
        """
        self._at += by
        self.reward = float(self._at)
        return f"It is {self._at}."


class Guess:
    """Guess the seed's last digit: an environment of a user."""

    def __init__(self, tries=3):
        self._left = tries

    def reset(self, row, seed):
        self._digit = str(seed % 10)
        return [{"role": "system", "content": "guess"}, {"role": "user", "content": str(row.prompt)}]

    async def step(self, text):
        self._left -= 1
        right = text.strip() == self._digit
        return "no", 0.25 if text.strip().isdigit() else 0.0, right or not self._left


class Wrong:
    """Returns what no environment may."""

    def reset(self, row, seed):
        return row.prompt

    def step(self, text):
        return "no"


class Digits:
    """A second try for digits, with few words."""

    def reset(self, row, seed):
        self._tries = 0
        return str(row.prompt)

    def step(self, text):
        self._tries += 1
        return "no", sum(character.isdigit() for character in text) / 10, self._tries == 2


async def digits(task):
    """Ask twice, and count digits."""
    messages = [{"role": "user", "content": str(task.row.prompt)}]
    for _ in range(2):
        said = await asyncio.to_thread(ask, task, messages)
        messages += [said, {"role": "user", "content": "no"}]
    return sum(character.isdigit() for character in said["content"] or "") / 10
