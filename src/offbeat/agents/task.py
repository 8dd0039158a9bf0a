"""The input of an agent, `AgentTask`, and its result, `Played`. Cross to the processes of user code."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from offbeat.chat.image_parts import messages_to_send
from offbeat.data.reward import FailedReward, NamedReward, check_reward
from offbeat.data.row import Row
from offbeat.errors import shorten
from offbeat.rollout.measures import numbers_of

_LONGEST_VARIABLE = 128 << 10
"""Largest size in bytes of an environment variable on Linux, with its name and its last byte (MAX_ARG_STRLEN)."""


@dataclass(frozen=True)
class AgentTask:
    """Argument of an agent's function: one episode.

    Attributes:
        row: the dataset's row, with its `prompt`, `answer` and `extra`.
        base_url: for clients of OpenAI, and of most others; such as "http://127.0.0.1:40123/v1".
        anthropic_base_url: the same without /v1, for clients of Anthropic.
        api_key: belongs to this episode alone; whoever uses it takes part in it.
        model: name of the model to ask for.
        seed: equal for all episodes of a group.
        timeout_s: seconds after which the episode is given up; those of its requests to the model do not count.
    """

    row: Row
    base_url: str
    anthropic_base_url: str
    api_key: str
    model: str
    seed: int
    timeout_s: float

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The row's prompt as messages for chat completions, with its images as parts; raises DataError if one cannot be read."""
        return messages_to_send(self.row)

    def row_text(self) -> str:
        """Return the row as the JSON object that commands read, such as '{"prompt": "1+1=", "answer": "2", "solution": ""}'.

        The prompt of a row with images is `messages`.
        """
        row, prompt = self.row, self.messages if self.row.images else self.row.prompt
        return json.dumps({"prompt": prompt, "answer": row.answer, "solution": row.solution, **row.extra})

    def environment(self) -> dict[str, str]:
        """Return the task as environment variables for a command; a row that is too large for `OFFBEAT_ROW` is in a file alone."""
        row = self.row_text()
        fits = len(f"OFFBEAT_ROW={row}".encode()) < _LONGEST_VARIABLE
        return {
            "OPENAI_BASE_URL": self.base_url, "OPENAI_API_BASE": self.base_url, "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url, "ANTHROPIC_API_KEY": self.api_key, "OFFBEAT_MODEL": self.model,
            "OFFBEAT_SEED": str(self.seed), **({"OFFBEAT_ROW": row} if fits else {})}


@dataclass(frozen=True)
class Played:
    """Result of an agent's episode.

    Attributes:
        reward: None leaves it to `rollout.reward` and the last answer.
        parts: the reward as several by name, such as {"correct": 1.0, "format": 0.2}.
        failure: the reason why the returned value is no reward; empty if it is one.
        metrics: further measurements by name.
    """

    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    failure: str = ""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def outcome(self) -> float | None:
        """The reward as trajectories take it."""
        return FailedReward(self.failure) if self.failure else NamedReward(self.parts) if self.parts else self.reward


def played(returned: Any, *, of: str) -> Played:
    """Read the return value of user code: None, a number, or a mapping of names to numbers.

    A mapping may hold "metrics", such as {"reward": 1.0, "metrics": {"tool_calls": 3}}; the reward is then the rest of the mapping, or the
    rest's only entry "reward".
    """
    returned, metrics = _parted(returned)
    if metrics is not None and set(returned) <= {"reward"}:
        returned = returned.get("reward")
    if returned is None:
        return Played(metrics=metrics or {})
    reward = check_reward(returned)
    if isinstance(reward, FailedReward):
        failure = f"{of} returned {shorten(returned)}, which is not a reward: {reward.reason}"
        return Played(math.nan, failure=failure, metrics=metrics or {})
    return Played(float(reward), reward.parts if isinstance(reward, NamedReward) else {}, metrics=metrics or {})


def printed(text: str, *, of: str) -> Played:
    """Read the reward that a command printed as its last line: a number, true or false, or a JSON object of names and numbers.

    An object may hold the reward under "reward" alone, with other entries beside it, among them an object "metrics".
    A "reward" that is none, such as a text, is a failure; null leaves it to `rollout.reward`.
    """
    last = text.strip().rpartition("\n")[2].strip()  # a line of JSON may hold other characters that splitlines takes for its end
    try:
        value = json.loads(last)
    except ValueError:
        return Played()
    value, metrics = _parted(value)
    if isinstance(value, Mapping) and ("reward" in value or (metrics is not None and not value)):
        value = value.get("reward")
    elif not isinstance(value, int | float | Mapping):  # a text or a list as the last line is output, not a reward
        value = None
    return replace(played(value, of=of), metrics=metrics or {})


def _parted(returned: Any) -> tuple[Any, dict[str, float] | None]:
    """Return a mapping without its "metrics", and the metrics; None if it has none."""
    if not isinstance(returned, Mapping) or not isinstance(metrics := returned.get("metrics"), Mapping):
        return returned, None
    return {name: value for name, value in returned.items() if name != "metrics"}, numbers_of(metrics)
