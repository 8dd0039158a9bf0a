"""Finishes requests as fast as it can until it is killed, and says on standard output which it has finished.

Usage: finishing.py FOLDER URL
"""

import asyncio
import hashlib
import itertools
import sys
from pathlib import Path

from offbeat.service.futures import Futures
from offbeat.service.limits import Limits, Usage
from offbeat.service.results import Results
from offbeat.service.store import Store
from offbeat.service.types import ModelCreated, Outcome, Payload

SESSION = "123e4567-e89b-42d3-a456-426614174000"


def answer_of(request_id: str) -> bytes:
    """What the answer of a request must be: 32 bytes to 32 KiB."""
    digest = hashlib.sha256(request_id.encode()).digest()
    return digest * (1 + int.from_bytes(digest[:2]) % 1024)


def encode(outcome: Outcome) -> Payload:
    assert isinstance(outcome, ModelCreated)
    return Payload("application/json", answer_of(outcome.model_id))


async def finish_until_killed(folder: Path, url: str) -> None:
    store = Store.open(url)
    results = Results(folder / "results", segment_bytes=2**20)
    futures = Futures(store, results, encode=encode, owner_of={SESSION: "alice"}.get, usage=Usage(lambda _: Limits()))
    numbers = itertools.count()

    async def finish_one_after_another() -> None:
        while True:
            request_id = f"{SESSION}:sample:0:{next(numbers)}"
            future, is_new = futures.open(request_id, owner="alice", kind="Sample")
            assert is_new
            await futures.finish(future, ModelCreated(request_id))
            print(request_id, flush=True)

    await asyncio.gather(*(finish_one_after_another() for _ in range(16)))


if __name__ == "__main__":
    asyncio.run(finish_until_killed(Path(sys.argv[1]), sys.argv[2]))
