"""Filters and orders of a run's rollouts, as conditions in SQL on the tables of `rollout_index`."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from offbeat.data.stored_rollouts import Address
from offbeat.errors import ConfigError

Order = Literal["newest", "oldest", "best", "worst", "longest", "shortest"]
ORDERS: tuple[Order, ...] = get_args(Order)

Status = Literal["trained", "left out", "rejected"]
STATUSES: tuple[Status, ...] = get_args(Status)

ORDER_BY = {
    "newest": "step DESC, rejected, position, place", "oldest": "step, rejected, position, place",
    "best": "reward DESC, step DESC", "worst": "reward IS NULL, reward, step DESC",
    "longest": "length DESC, step DESC", "shortest": "length, step DESC"}


@dataclass(frozen=True)
class Filter:
    """A filter of rollouts; None and "" let everything pass, and bounds are included.

    Attributes:
        prompt: a part of the row's prompt, in any case of its letters.
        text: words that follow each other in the text from the first generated token on, such as "the answ*"; punctuation and case do
            not count, and a last `*` stands for any end of a word.
        reason: how it ended, such as "stop" or "too long", or why its group was rejected, such as "equal rewards".
        same_prompt: address of a rollout with the wanted prompt.
    """

    min_step: int | None = None
    max_step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    min_version: int | None = None
    max_version: int | None = None
    prompt: str = ""
    text: str = ""
    reason: str = ""
    status: Status | Literal[""] = ""
    same_prompt: Address | None = None

    def condition(self) -> tuple[str, list[Any]]:
        """Return the condition in SQL with its values; raises ConfigError if the text has no word."""
        parts, values = [], []
        for column in ("step", "reward", "length", "version"):
            for bound, sign in ((f"min_{column}", ">="), (f"max_{column}", "<=")):
                if (value := getattr(self, bound)) is not None:
                    parts.append(f"{column} {sign} ?")
                    values.append(value)
        if self.prompt:
            parts.append("prompt IN (SELECT id FROM prompts WHERE instr(folded(text), ?))")
            values.append(self.prompt.casefold())
        if self.text:
            parts.append("samples.id IN (SELECT rowid FROM words WHERE words MATCH ?)")
            values.append(_phrase(self.text))
        for column in ("reason", "status"):
            if value := getattr(self, column):
                parts.append(f"{column} = ?")
                values.append(value)
        if (same := self.same_prompt) is not None:
            parts.append("prompt = (SELECT prompt FROM samples WHERE step = ? AND rejected = ? AND position = ? AND place = ?)")
            values += [same.step, int(same.is_rejected), same.group, same.place]
        return " AND ".join(parts) or "1", values


def _phrase(text: str) -> str:
    """Return a query for words that follow each other."""
    words = text.rstrip("*").replace('"', " ").replace("\0", " ").strip()  # with a NUL the query would end
    if not any(letter.isalnum() for letter in words):
        raise ConfigError(f"rollouts are searched for words, and {text[:40]!r} has none; give letters or digits")
    return f'"{words}"{"*" if text.endswith("*") else ""}'
