"""What samplers stand on, in memory: one checkpoint of alice's, her session, and engines that know what is pinned."""

import asyncio
from dataclasses import dataclass, field

from offbeat.service.base_models import BaseModels
from offbeat.service.errors import UnknownError
from offbeat.service.ids import CheckpointPath
from offbeat.service.limits import Limits, Usage
from offbeat.service.tables import CheckpointRow
from offbeat.service.types import Caller, LoraSpec
from offbeat.weights.protocol import Manifest

ALICE, BOB = Caller("alice"), Caller("bob")
SESSION = "00000000-0000-0000-0000-000000000001"
RUN = f"{SESSION}:train:0"
PATH = f"tinker://{RUN}/sampler_weights/one"
LORA = LoraSpec(rank=4, alpha=32.0, seed=0)
CHECKPOINT = CheckpointRow(RUN, "sampler", "one", "alice", "folder-one", 0.0, None, 10, False, {}, LORA, "base", version=3)


@dataclass
class World:
    """See the module."""

    base_models: BaseModels = BaseModels("base")
    now: float = 1000.0
    checkpoints: dict[str, CheckpointRow] = field(default_factory=lambda: {PATH: CHECKPOINT})
    pinned: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    reads: int = 0
    silent: bool = False
    usage: Usage = field(default_factory=lambda: Usage(lambda _: Limits(max_disk_bytes=120)))

    def check(self, caller: Caller, session_id: str) -> None:
        if (caller.owner, session_id) != ("alice", SESSION):
            raise UnknownError("there is no such session")

    def is_silent(self, session_id: str) -> bool:
        return self.silent

    def readable(self, caller: Caller, path: CheckpointPath) -> CheckpointRow:
        row = self.checkpoints.get(str(path))
        if row is None or not (row.public or row.owner == caller.owner):
            raise UnknownError("there is no such checkpoint")
        return row

    async def adapter(self, folder: str) -> Manifest:
        self.reads += 1
        await asyncio.sleep(0.01)
        return Manifest(3, folder, "fingerprint", (1, 2), (-1.0,), adapter=f"t.{folder}")

    async def release_folder(self, folder: str) -> None:
        self.released.append(folder)

    def pin(self, manifest: Manifest) -> None:
        self.pinned.append(manifest.name)

    def unpin(self, name: str) -> None:
        self.pinned.remove(name)
