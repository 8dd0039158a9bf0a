"""Limits of one owner's use at a time, and the accounting of it.

The core charges before it accepts work, and releases when the work is done. A full queue is temporary, so clients wait. Too many models,
sessions or samplers, or too much on disk, last until the owner acts, so such requests are refused for good. For one event loop.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

from offbeat.service.errors import OverLimitError, RequestError, TooLargeError

LimitsOf = Callable[[str], "Limits"]
"""Returns the limits of an owner."""


@dataclass(frozen=True)
class Limits:
    """Limits of one owner.

    Attributes:
        max_models: number of models that have not ended.
        max_queued_tokens: tokens of all requests that have not ended.
        max_disk_bytes: size of all checkpoints and unnamed samplers, and of answers until they are swept.
        max_queued_bytes: peak memory of all requests that have not ended.
        max_sessions: number of sessions that are remembered.
        max_samplers: number of samplers that have not ended.
    """

    max_models: int = 64
    max_queued_tokens: int = 16 * 2**20
    max_disk_bytes: int = 100 * 2**30
    max_queued_bytes: int = 2**30
    max_sessions: int = 4096
    max_samplers: int = 4096


@dataclass
class Use:
    """Amounts that an owner uses now."""

    models: int = 0
    queued_tokens: int = 0
    disk_bytes: int = 0
    queued_bytes: int = 0
    sessions: int = 0
    samplers: int = 0


class Usage:
    """Amounts that all owners use, given by the field names of `Use`; e.g. `charge("alice", queued_tokens=4096)`."""

    def __init__(self, limits_of: LimitsOf) -> None:
        self._limits_of = limits_of
        self._uses: dict[str, Use] = {}

    def of(self, owner: str) -> Use:
        """Return the amounts that an owner uses now; read only."""
        return self._uses.get(owner, Use())

    def is_full(self, owner: str, *, sessions: int = 0, samplers: int = 0) -> bool:
        """Whether this many more would be refused."""
        use, limits = self.of(owner), self._limits_of(owner)
        return use.sessions + sessions > limits.max_sessions or use.samplers + samplers > limits.max_samplers

    def charge(self, owner: str, **amounts: int) -> None:
        """Add amounts to an owner's use, or raise an error and add nothing.

        Raises:
            OverLimitError: the queue is full for now.
            TooLargeError: the queue could never hold this much.
            RequestError: no more models, sessions or samplers are allowed, or no more disk space.
        """
        use, limits = self.of(owner), self._limits_of(owner)
        for name, amount in amounts.items():
            if amount:
                _check_amount(name, getattr(use, name), amount, getattr(limits, f"max_{name}"))
        self.add(owner, **amounts)

    def add(self, owner: str, **amounts: int) -> None:
        """Add amounts that are in use already, as at a start, even beyond the limits; negative amounts release."""
        use = self._uses.setdefault(owner, Use())
        for name, amount in amounts.items():
            setattr(use, name, getattr(use, name) + amount)
        assert min(vars(use).values()) >= 0, f"owner {owner} released more than was charged: {use}"
        if use == Use():
            del self._uses[owner]

    def release_charge(self, owner: str, **amounts: int) -> None:
        """Subtract amounts that were charged."""
        self.add(owner, **{name: -amount for name, amount in amounts.items()})


_NEVER = {
    "queued_tokens": "the request costs {more} tokens, but you may have at most {most} under way; send smaller ones",
    "queued_bytes": (
        "the request may take {more} bytes of memory, but you may have at most {most} under way; send fewer datums, targets or samples"
        " at once, or ask for fewer likeliest tokens")}
"""Messages for a request that a queue could never hold, by field of `Use`."""

_FULL = {
    "queued_tokens": "you have {used} tokens under way and may have {most}; the request will be taken later",
    "queued_bytes": "your requests may take {used} bytes of memory and {most} are allowed; the request will be taken later",
    "disk_bytes": (
        "your checkpoints, samplers and answers take up {used} bytes, {more} more would exceed the {most} that you may have; delete"
        " checkpoints, finish sessions whose unnamed samplers you do not need any more, or wait until old answers are forgotten"),
    "models": (
        "you have {used} of {most} models that you may have; close the ServiceClient of one that you do not need any more, or wait"
        " until its session has been silent for a while"),
    "sessions": (
        "you have {used} of {most} sessions that you may have; close ServiceClients that you do not need any more, and delete the"
        " checkpoints of their runs"),
    "samplers": (
        "you have {used} of {most} samplers that you may have; use one again for the same weights, or close ServiceClients whose"
        " samplers you do not need any more")}
"""Messages for a reached limit, by field of `Use`."""

assert _FULL.keys() == {field.name for field in fields(Use)}, "every amount has its sentence"


def _check_amount(name: str, used: int, more: int, most: int) -> None:
    """Check that an owner may use `more` of an amount; queues empty by themselves, so that a request may be sent again."""
    if name in _NEVER and more > most:
        raise TooLargeError(_NEVER[name].format(more=more, most=most))
    if used + more > most:
        kind = OverLimitError if name in _NEVER else RequestError
        raise kind(_FULL[name].format(used=used, more=more, most=most))
