"""Where the time of episodes goes: waiting for a place, calls of the model, rewards, and the rest, which is tools and environments.

A workflow opens an `Account` for each episode (`Episode.account`) and tells it when the episode begins and ends to wait. `Accounts` adds up
the ended ones for the metrics of a step, such as `rollout/model_share`, and gives the turns of a few of them to the time line. Pure but for
the clock; driven by the executor.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from offbeat.rollout.measures import Measures
from offbeat.telemetry.tracker import StatsPart, combine
from offbeat.types import Clock, Tell

Doing = Literal["model", "queue", "reward", "tool"]
Settle = Callable[["Account", bool], None]
"""Called at the end of an account, with False if its episode raised or was cancelled."""

OnSpan = Callable[[str, str, float, float, Mapping[str, Any]], None]
"""Draws a span: its name, its track, its start and end in wall-clock seconds, and details."""

_TOLD: tuple[Doing, ...] = ("model", "queue", "reward")
"""Activities that an episode declares; of several at the same time the first in this order counts."""

_ELSE: Doing = "tool"

_COUNTED: tuple[Doing, ...] = ("model", "tool", "queue")

NUM_TRACKS = 8
MOST_TRACED = 16
"""Number of episodes of a step that are drawn: as many as show a pattern, in a file that grows with each step."""

_MOST_STRETCHES = 400
"""Number of stretches of an episode that are kept to be drawn; its sums have all of it."""


@dataclass(frozen=True)
class Stretch:
    """A time in which an episode did one thing, in seconds of the account's clock; `call` is the number of model calls until then."""

    doing: Doing
    start_s: float
    end_s: float
    call: int


@dataclass(eq=False)
class Account:
    """Where the time of one episode goes. Use as `with` while it is played.

    Attributes:
        most_stretches: largest number of `stretches` that are kept.
        seconds: seconds of each activity, such as {"model": 3.2, "tool": 0.8}; they add up to the episode's duration.
    """

    settle: Settle = lambda _account, _ended: None
    most_stretches: int = 0
    now_s: Clock = time.monotonic
    seconds: dict[Doing, float] = field(default_factory=dict)
    stretches: list[Stretch] = field(default_factory=list)
    num_calls: int = 0
    _now_doing: Doing = _ELSE
    _since_s: float = 0.0
    _num_at: dict[Doing, int] = field(default_factory=lambda: dict.fromkeys(_TOLD, 0))

    def __enter__(self) -> Self:
        self._since_s = self.now_s()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exc: object) -> None:
        self._close()
        self.settle(self, kind is None)

    @contextmanager
    def doing(self, what: Literal["model", "queue", "reward"]) -> Iterator[None]:
        """Count the time of the body as this activity; bodies may overlap."""
        self._change(what, +1)
        try:
            yield
        finally:
            self._change(what, -1)

    def _change(self, what: Doing, by: int) -> None:
        self._num_at[what] += by
        following: Doing = _ELSE
        for each in reversed(_TOLD):
            following = each if self._num_at[each] else following
        if following != self._now_doing:
            self._close()
            self._now_doing = following
        self.num_calls += what == "model" and by > 0

    def _close(self) -> None:
        """Add the time until now to the present activity."""
        now_s = self.now_s()
        self.seconds[self._now_doing] = self.seconds.get(self._now_doing, 0.0) + now_s - self._since_s
        if now_s > self._since_s and len(self.stretches) < self.most_stretches:
            self.stretches.append(Stretch(self._now_doing, self._since_s, now_s, self.num_calls))
        self._since_s = now_s


class Accounts:
    """The accounts and the measurements of all episodes between two steps; `measures` adds up measurements of programs."""

    def __init__(self, on_span: OnSpan | None = None, *, tell: Tell = lambda _text: None, now_s: Clock = time.monotonic) -> None:
        """Without `on_span`, nothing is drawn; `tell` is called once if a measurement is left out."""
        self.measures = Measures(tell)
        self._on_span, self._now_s = on_span, now_s
        self._free_tracks = list(range(NUM_TRACKS))[::-1] if on_span is not None else []
        self._num_traced = 0
        self._part = _Sums()

    def open(self, prompt_id: str, index: int) -> Account:
        """Return the account of one episode of a prompt's group; the first of a group is drawn if there is a free track."""
        drawn = index == 0 and self._num_traced < MOST_TRACED and bool(self._free_tracks)  # episodes of a group are alike
        track = self._free_tracks.pop() if drawn else None
        wall_s = time.time() - self._now_s()

        def end_account(account: Account, ended: bool) -> None:
            if ended:
                self._part.add(account)
            if track is None:
                return
            self._free_tracks.append(track)
            if ended and account.num_calls > 1 and self._num_traced < MOST_TRACED:
                self._num_traced += 1
                self._draw(account, f"episodes {track}", prompt_id, wall_s)

        return Account(end_account, _MOST_STRETCHES if drawn else 0, self._now_s)

    def take_stats(self) -> StatsPart:
        """Return the times and the mean measurements of the episodes that have ended since the last call."""
        part, self._part, self._num_traced = self._part, _Sums(), 0
        return combine([part.stats(), self.measures.take_stats()])

    def _draw(self, account: Account, track: str, prompt_id: str, wall_s: float) -> None:
        assert self._on_span is not None, "only then there are tracks"
        for each in account.stretches:
            self._on_span(each.doing, track, wall_s + each.start_s, wall_s + each.end_s, {"prompt": prompt_id, "call": each.call})


@dataclass
class _Sums:
    """Sums over episodes; the time of their rewards counts nowhere."""

    num: int = 0
    whole_s: float = 0.0
    longest_s: float = float("-inf")
    seconds: dict[Doing, float] = field(default_factory=dict)

    def add(self, account: Account) -> None:
        whole_s = sum(account.seconds.get(doing, 0.0) for doing in _COUNTED)
        self.num += 1
        self.whole_s += whole_s
        self.longest_s = max(self.longest_s, whole_s)
        for doing in _COUNTED:
            self.seconds[doing] = self.seconds.get(doing, 0.0) + account.seconds.get(doing, 0.0)

    def stats(self) -> StatsPart:
        if not self.num:
            return StatsPart()  # of workflows of one turn, which open no accounts
        return StatsPart(
            means={
                "rollout/episode_mean_s": (self.whole_s, float(self.num)),
                **{f"rollout/{doing}_share": (seconds, self.whole_s) for doing, seconds in self.seconds.items()}},
            maxima={"rollout/episode_max_s": self.longest_s})
