"""The arithmetic of arriving at a sync point: per point, one counter in the store counts arrivals, their names, and ranks that gave up.

Each rank adds its ticket when it arrives; a rank whose deadline has passed adds a poison. The store adds atomically and returns the sum,
so every rank reads a consistent count from the one operation that it needs anyway. The point is *passed* if and only if the last ticket
came before the first poison and all names agree; otherwise the owner of the first poison alone writes the verdict.

A sum holds, from the lowest bit: 13 bits of tickets, 13 bits of poisons, 37 bits of the sum of the names' 24-bit hashes. For example, two
arrivals at a name of hash h and one poison are 2 + (1 << 13) + (2 * h << 26).
"""

import zlib
from dataclasses import dataclass

_COUNT_BITS = 13
_HASH_BITS = 24
MAX_WORLD = (1 << _COUNT_BITS) - 1
"""Largest number of ranks; more would overflow from one field into the next."""

POISON = 1 << _COUNT_BITS


def ticket(name: str) -> int:
    """Return the number that a rank adds when it arrives at `name`."""
    return (_hash(name) << (2 * _COUNT_BITS)) + 1


@dataclass(frozen=True)
class Count:
    """The decoded fields of a sum.

    Attributes:
        poisons: number of ranks that gave up waiting; the rank that reads 1 owns the verdict.
        agreed: whether all came under the name that the reader uses.
    """

    arrived: int
    poisons: int
    agreed: bool


def read(total: int, name: str) -> Count:
    """Decode a sum, as seen by a rank at `name`."""
    arrived = total & MAX_WORLD
    poisons = (total >> _COUNT_BITS) & MAX_WORLD
    # As 2**13 hashes of 24 bits fit into 37 bits, the sum cannot overflow.
    return Count(arrived=arrived, poisons=poisons, agreed=total >> (2 * _COUNT_BITS) == arrived * _hash(name))


def _hash(name: str) -> int:
    return zlib.crc32(name.encode()) & ((1 << _HASH_BITS) - 1)


@dataclass(frozen=True)
class StoreKeys:
    """Names of keys in the store; `prefix` separates one meeting from others that use the same store."""

    prefix: str = ""

    def card(self, rank: int) -> str:
        """Key of the card of a rank's process; set once."""
        return f"{self.prefix}sync/card/{rank}"

    def count(self, n: int) -> str:
        """Key of the sum of the n-th point."""
        return f"{self.prefix}sync/count/{n}"

    def result(self, n: int) -> str:
        """Key of the n-th point's result, set when it is decided: `GO`, or its verdict."""
        return f"{self.prefix}sync/result/{n}"

    def inquiry(self, n: int, number: int) -> str:
        """Counter of the ranks that ask for the `number`-th time after the collective of the n-th point."""
        return f"{self.prefix}sync/inquiry/{n}/{number}"

    def mail(self, rank: int) -> str:
        """Queue that the watcher of a rank reads."""
        return f"{self.prefix}sync/mail/{rank}"

    def reply(self, rank: int, question: int) -> str:
        """Queue of the answers to a rank's question."""
        return f"{self.prefix}sync/reply/{rank}/{question}"

    def left(self, rank: int) -> str:
        """Key set when a rank has left in good order."""
        return f"{self.prefix}sync/left/{rank}"

    @property
    def failed(self) -> str:
        """Key of the first failure of any rank, after which the group is unusable."""
        return f"{self.prefix}sync/failed"


GO = "go"
