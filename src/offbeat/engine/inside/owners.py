"""The owner of an engine: keeps a run from publishing to an engine to which another run, or a later start of the same run, publishes.

A run sends its name and start in the header of every request. Runs that publish whole weights need the engine for themselves; runs that
publish adapters share it. Others, such as a program with the OpenAI client, send no header and are not counted. Used by the embedded
engine and, in vLLM's API server, by `vllm_inside`; imports nothing of `offbeat`.
"""

from dataclasses import dataclass

HEADER = "x-offbeat-owner"
"""For example "sort_digits-3fa9c1 7 exclusive": the run, the number of its start, and "exclusive", "shared" or, at its end, "leaves"."""

SILENT_S = 60.0
"""Seconds without a request after which a run is not counted any more, as it may have been killed."""


@dataclass
class _User:
    start: int
    exclusive: bool
    seen_s: float


class Owners:
    """The runs that use one engine."""

    def __init__(self) -> None:
        self._users: dict[str, _User] = {}

    def refusal(self, header: str, *, now_s: float) -> str:
        """Note a request at a time of `time.monotonic`; returns why it is refused, "" if it is not."""
        if not header:
            return ""
        run, start, kind = read(header)
        if not run:
            return f"{HEADER} must be a run, the number of its start and exclusive, shared or leaves, got {header[:100]!r}"
        own = self._users.get(run)
        if own is not None and start < own.start:
            return f"this engine is used by start {own.start} of the run {run}, and start {start} is an earlier one of it"
        if kind == "leaves":
            self._users.pop(run, None)
            return ""
        exclusive = kind == "exclusive"
        for other, user in [*self._users.items()]:
            silent_s = now_s - user.seen_s
            if other != run and silent_s < SILENT_S and (exclusive or user.exclusive):
                return (
                    f"this engine is used by start {user.start} of the run {other}, {silent_s:.0f} s ago, and cannot be shared with the run"
                    f" {run}, because {'that' if user.exclusive else 'this'} one publishes whole weights; end the other run, wait until it"
                    f" was silent for {SILENT_S:g} s, or use another engine")
        self._users[run] = _User(start, exclusive, now_s)
        return ""


def read(header: str) -> tuple[str, int, str]:
    """Return run, start and kind of a header; an empty run if it is malformed."""
    words = header.split(" ")
    if len(words) != 3 or not words[0] or not words[1].isdecimal() or words[2] not in ("exclusive", "shared", "leaves"):
        return "", 0, ""
    return words[0][:200], int(words[1][:18]), words[2]
