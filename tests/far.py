"""Disks of other machines, as folders of this one, for tests of what travels."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from offbeat.workers.disks import DiskService, FarDisk

Meddle = Callable[[str, bytes], None]


def far_disk(root: Path, name: str = "node a", *, meddle: Meddle = lambda _method, _payload: None) -> FarDisk:
    """A disk below `root`; `meddle(method, payload)` is called before each call is answered, and may fail it."""
    service = DiskService(root, durable=False)

    async def call(method: str, payload: bytes, _timeout_s: float) -> bytes:
        meddle(method, payload)
        return await asyncio.to_thread(service.handle, method, payload)

    return FarDisk(name, str(root), call)
