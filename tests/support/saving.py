"""Saves, overwrites and deletes checkpoints as fast as it can until it is killed, and says on standard output what is acknowledged.

Usage: saving.py FOLDER
"""

import asyncio
import hashlib
import itertools
import sys
from pathlib import Path

from offbeat.service.checkpoints import Checkpoints
from offbeat.service.ids import CheckpointPath
from offbeat.service.limits import Limits, Usage
from offbeat.service.serve import open_store
from offbeat.service.tables import CheckpointRow
from offbeat.service.types import Caller, LoraSpec

RUN = "00000000-0000-4000-8000-000000000000:train:0"
ALICE = Caller("alice")


def weights(name: str, number: int) -> bytes:
    """What a checkpoint must hold."""
    return hashlib.sha256(f"{name} {number}".encode()).digest() * 1000


async def save_until_killed(folder: Path) -> None:
    store = open_store("", folder)
    checkpoints = Checkpoints((), store=store, usage=Usage(lambda _: Limits()), folder=folder / "checkpoints")

    async def save(name: str, number: int) -> None:
        async with checkpoints.making() as made:
            checkpoints.path(made).mkdir()
            (checkpoints.path(made) / "weights").write_bytes(weights(name, number))
            size = await checkpoints.seal(made)
            await checkpoints.add(
                CheckpointRow(RUN, "training", name, "alice", made, 1.0, None, size, False, {}, LoraSpec(4, 8.0, 1), "base", step=number),
                overwrite=True)
        print("saved", name, number, flush=True)

    async def go_on(worker: int) -> None:
        for number in itertools.count():
            await save(f"latest-{worker}", number)
            if number % 3 == 0:
                await save(f"kept-{worker}-{number}", number)
            if number % 5 == 4:
                name = f"kept-{worker}-{(number - 3) // 3 * 3}"
                print("deleting", name, number, flush=True)
                await checkpoints.delete(checkpoints.owned(ALICE, CheckpointPath(RUN, "training", name)))
                print("deleted", name, number, flush=True)

    await asyncio.gather(*map(go_on, range(3)))


if __name__ == "__main__":
    asyncio.run(save_until_killed(Path(sys.argv[1])))
