"""The arithmetic of arriving at a sync point: one counter in the store per point says who is there, under which name, and who gave up.

Each rank adds its ticket when it arrives; a rank whose deadline has passed adds a poison. The store adds atomically and returns the sum,
so every rank reads a consistent count from the one operation that it needs anyway: the point is *passed* if and only if the last
ticket came before the first poison and all names agree, and the first poison's owner alone writes the verdict otherwise.

A sum, from the lowest bit: 13 bits of tickets, 13 bits of poisons, 37 bits of the sum of the 24-bit hashes of the names.
"""

import zlib
from dataclasses import dataclass

_COUNT_BITS = 13
_HASH_BITS = 24
MAX_WORLD = (1 << _COUNT_BITS) - 1
"""More ranks would spill from one field into the next."""

POISON = 1 << _COUNT_BITS


def ticket(name: str) -> int:
    """What a rank adds when it arrives at `name`."""
    return (_hash(name) << (2 * _COUNT_BITS)) + 1


@dataclass(frozen=True)
class Count:
    """What a sum says.

    Attributes:
        arrived: ranks that have come.
        poisons: ranks that gave up waiting; 1 for the one that owns the verdict.
        agreed: all came under the name that the reader uses.
    """

    arrived: int
    poisons: int
    agreed: bool


def read(total: int, name: str) -> Count:
    """Take a sum apart, as seen by a rank at `name`."""
    arrived = total & MAX_WORLD
    poisons = (total >> _COUNT_BITS) & MAX_WORLD
    return Count(arrived=arrived, poisons=poisons, agreed=total >> (2 * _COUNT_BITS) == arrived * _hash(name))


def _hash(name: str) -> int:
    return zlib.crc32(name.encode()) & ((1 << _HASH_BITS) - 1)


@dataclass(frozen=True)
class Keys:
    """Names in the store; `prefix` keeps one meeting apart from another that uses the same store."""

    prefix: str = ""

    def card(self, rank: int) -> str:
        """Who the process of a rank is; set once."""
        return f"{self.prefix}sync/card/{rank}"

    def count(self, n: int) -> str:
        """The sum of the n-th point."""
        return f"{self.prefix}sync/count/{n}"

    def result(self, n: int) -> str:
        """Set when the n-th point is decided: `GO`, or its verdict."""
        return f"{self.prefix}sync/result/{n}"

    def inquiry(self, n: int, number: int) -> str:
        """Counts who asks for the `number`-th time after the collective of the n-th point."""
        return f"{self.prefix}sync/inquiry/{n}/{number}"

    def mail(self, rank: int) -> str:
        """Queue that the watcher of a rank reads."""
        return f"{self.prefix}sync/mail/{rank}"

    def reply(self, rank: int, question: int) -> str:
        """Queue of the answers to a question of a rank."""
        return f"{self.prefix}sync/reply/{rank}/{question}"

    def left(self, rank: int) -> str:
        """Set when a rank has left in good order."""
        return f"{self.prefix}sync/left/{rank}"

    @property
    def failed(self) -> str:
        """The first failure of any rank; the group's last word."""
        return f"{self.prefix}sync/failed"


GO = "go"
