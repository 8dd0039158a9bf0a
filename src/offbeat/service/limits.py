"""What one owner may take up at a time, and the accounting of it.

The core charges before it takes work on and releases when that is done. A queue that is full is a matter of time, and clients wait; too
many models or too much on disk lasts until the owner mends it, so that is refused for good. For one event loop.
"""

from collections.abc import Callable
from dataclasses import dataclass

from offbeat.service.errors import OverLimitError, RequestError, TooLargeError


@dataclass(frozen=True)
class Limits:
    """Of one owner.

    Attributes:
        max_models: that have not ended.
        max_queued_tokens: of all requests that have not ended.
        max_disk_bytes: of all checkpoints and unnamed samplers.
    """

    max_models: int = 64
    max_queued_tokens: int = 16 * 2**20
    max_disk_bytes: int = 100 * 2**30


@dataclass
class Use:
    """What an owner takes up now."""

    models: int = 0
    queued_tokens: int = 0
    disk_bytes: int = 0


class Usage:
    """What all owners take up."""

    def __init__(self, limits_of: Callable[[str], Limits]) -> None:
        self._limits_of = limits_of
        self._uses: dict[str, Use] = {}

    def of(self, owner: str) -> Use:
        """What an owner takes up; to be read only."""
        return self._uses.get(owner, Use())

    def charge(self, owner: str, *, models: int = 0, queued_tokens: int = 0, disk_bytes: int = 0) -> None:
        """Add to what an owner takes up, or raise and add nothing.

        Raises:
            OverLimitError: the queue is full for now.
            TooLargeError: the queue will never hold that many tokens.
            RequestError: there is no room for more models, or on disk.
        """
        use, limits = self.of(owner), self._limits_of(owner)
        if queued_tokens > limits.max_queued_tokens:
            raise TooLargeError(
                f"the request has {queued_tokens} tokens, where you may have {limits.max_queued_tokens} under way; send smaller ones")
        if queued_tokens and use.queued_tokens + queued_tokens > limits.max_queued_tokens:
            raise OverLimitError(
                f"you have {use.queued_tokens} tokens under way and may have {limits.max_queued_tokens}; the request will be taken later")
        if models and use.models + models > limits.max_models:
            raise RequestError(
                f"you have {use.models} of {limits.max_models} models that you may have; close the ServiceClient of one that you do not "
                "need any more, or wait until its session has been silent for a while")
        if disk_bytes and use.disk_bytes + disk_bytes > limits.max_disk_bytes:
            raise RequestError(
                f"your checkpoints and samplers take up {use.disk_bytes} bytes, {disk_bytes} more would exceed the {limits.max_disk_bytes} "
                "that you may have; delete checkpoints, or finish sessions whose unnamed samplers you do not need any more")
        self.add(owner, models=models, queued_tokens=queued_tokens, disk_bytes=disk_bytes)

    def add(self, owner: str, *, models: int = 0, queued_tokens: int = 0, disk_bytes: int = 0) -> None:
        """Add what is there anyway, as at a start, even beyond the limits; negative numbers release."""
        use = self._uses.setdefault(owner, Use())
        use.models += models
        use.queued_tokens += queued_tokens
        use.disk_bytes += disk_bytes
        assert min(use.models, use.queued_tokens, use.disk_bytes) >= 0, f"owner {owner} released more than was charged: {use}"
        if use == Use():
            del self._uses[owner]

    def release(self, owner: str, *, models: int = 0, queued_tokens: int = 0, disk_bytes: int = 0) -> None:
        """Take back what was charged."""
        self.add(owner, models=-models, queued_tokens=-queued_tokens, disk_bytes=-disk_bytes)
