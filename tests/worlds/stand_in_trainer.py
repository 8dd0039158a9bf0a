"""A train rank in memory. Its weights are the list of all that it was trained on, so that what a run has learnt can be read at the end.

The state of the model after a step is a digest of the one before and of the step's sequences with their losses, in any order: redoing a
step from the same groups gives the same weights. All ranks of a life share one model; each adds its share of a step.
"""

import asyncio
import hashlib
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np

from offbeat.data.batch import Batch
from offbeat.disk import make_folder, sync
from offbeat.errors import PeerError, StorageError, WorkerError
from offbeat.trainer.messages import (
    BuildRequest,
    ExportRequest,
    Folder,
    JoinRequest,
    LoadedStep,
    ScoredShare,
    ScoreShare,
    StoreAddress,
    TargetScores,
    Trained,
    TrainStep,
    WriteRequest,
    Written,
)
from offbeat.workers.worker import Nothing
from worlds.stand_in_engine import WEIGHTS, digest

if TYPE_CHECKING:
    from offbeat.sync.mesh import ProcessGroups
    from worlds.life import Life
    from worlds.spmd_life import SpmdLife


@dataclass
class Model:
    """What all ranks hold.

    Attributes:
        fingerprints: one for the initial weights, and one after each step.
        steps: groups of each step, as `Life.taken` has them.
    """

    fingerprints: list[str] = field(default_factory=lambda: [digest("initial")])
    steps: list[Any] = field(default_factory=list)
    num_ranks: int = 1
    shares: list[str] = field(default_factory=list)
    arrived: int = 0
    met: "asyncio.Event" = field(default_factory=asyncio.Event)


class StandInRank:
    """Service of a train rank's process."""

    def __init__(self, life: "Life", name: str) -> None:
        self._life = life
        self._rank = int(name.rpartition(" ")[2])

    @property
    def _model(self) -> Model:
        return self._life.model

    async def host_store(self, address: StoreAddress) -> StoreAddress:
        return StoreAddress(address.host, 1)

    async def build_model(self, request: BuildRequest) -> Nothing:
        _write(Path(request.folder), digest("initial"))
        return Nothing()

    async def join(self, request: JoinRequest) -> Nothing:
        if self._rank == 0:
            self._life.model = Model(num_ranks=request.world)
        await self._meet()
        return Nothing()

    async def load_model(self, _request: Nothing) -> Nothing:
        return Nothing()

    async def restart_optimizer(self, _request: NoneType) -> None:
        await self._meet()

    async def train_step(self, share: TrainStep) -> Trained:
        life, model = self._life, self._model
        start_s = life.wall_s()
        model.shares += _digests(share.batch)
        await life.takes(life.world.train_s)
        await self._meet()
        if self._rank == 0:
            number = len(model.steps) + 1
            [groups] = life.taken[number].values()
            model.fingerprints.append(digest(model.fingerprints[-1], sorted(model.shares)))
            model.steps.append(groups)
            model.shares = []
            life.note(trained=number, prompts=[group["prompt"] for group in groups])
        await self._meet()
        return Trained({"train/loss": 0.5, "train/grad_norm": 1.0, "train/tokens": 1.0}, start_s, life.wall_s(), life.world.train_s)

    async def score(self, share: ScoreShare) -> ScoredShare:
        await self._life.takes(self._life.world.train_s / 3)
        await self._meet()
        now_s = self._life.wall_s()
        return ScoredShare(share.sequences, TargetScores({"logprobs": np.full(share.batch.num_targets, -1.0, np.float32)}), now_s, now_s)

    async def write_weights(self, request: WriteRequest) -> Written:
        await self._life.takes(self._life.world.write_s)
        await self._meet()
        fingerprint = self._model.fingerprints[-1]
        if self._rank == 0 and not request.is_there:
            _write(Path(request.folder), fingerprint)
        await self._meet()
        return Written(fingerprint if self._rank == 0 else "", (-1.0,) * (len(request.canary) - 1), num_bytes=8)

    async def save(self, request: Folder) -> None:
        make_folder(request.folder)
        file = request.folder / f"rank-{self._rank}.json"
        model = self._model
        file.write_text(json.dumps({"fingerprints": model.fingerprints, "steps": model.steps}))
        await self._life.takes(self._life.world.write_s)
        sync(file)
        await self._meet()

    async def load(self, request: Folder) -> LoadedStep:
        await self._life.takes(self._life.world.write_s)
        saved = json.loads((request.folder / "rank-0.json").read_text())
        await self._meet()
        if self._rank == 0:
            self._model.fingerprints, self._model.steps = saved["fingerprints"], saved["steps"]
        await self._meet()
        return LoadedStep(len(saved["steps"]))

    async def export(self, request: ExportRequest) -> None:
        await self._life.takes(self._life.world.write_s)
        _write(Path(request.path), self._model.fingerprints[-1])

    async def _meet(self) -> None:
        """Wait for all ranks, as a collective does; the others hear of a rank that has died."""
        model = self._model
        if model.num_ranks == 1:
            return
        model.arrived += 1
        met = model.met
        if model.arrived == model.num_ranks:
            model.arrived, model.met = 0, asyncio.Event()
            met.set()
            return
        peers = [self._life.children[f"rank {rank}"].gone for rank in range(model.num_ranks) if rank != self._rank]
        waiting = asyncio.ensure_future(met.wait())
        try:
            done, _ = await asyncio.wait((waiting, *peers), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if waiting not in done:
            raise PeerError(f"rank {self._rank} has lost a peer")


class SpmdTrainer:
    """The trainer of one rank of SPMD mode; its methods run on the rank's thread and meet the others at the real one's sync points."""

    def __init__(self, life: "SpmdLife", groups: "ProcessGroups") -> None:
        self.groups = groups
        self._life = life
        self._rank = groups.rank
        self._sync = groups.sync

    @property
    def _model(self) -> Model:
        return self._life.models[self._rank]

    def restart_optimizer(self, _request: None) -> None:
        """Do nothing."""

    def train_step(self, share: TrainStep) -> Trained:
        life, model, start_s = self._life, self._model, time.time()
        with self._sync.region("train_step"):
            self._take(life.world.train_s)
        shares = self._sync.gather("stand_in_shares", _digests(share.batch))
        number = len(model.steps) + 1
        model.fingerprints.append(digest(model.fingerprints[-1], sorted(each for own in shares for each in own)))
        model.steps.append([group for _, groups in sorted(life.taken[number].items()) for group in groups])
        if self._rank == 0:
            life.note(trained=number, prompts=[group["prompt"] for group in model.steps[-1]])
        return Trained({"train/loss": 0.5, "train/grad_norm": 1.0, "train/tokens": 1.0}, start_s, time.time(), life.world.train_s)

    def score(self, share: ScoreShare) -> ScoredShare:
        start_s = time.time()
        with self._sync.region("score"):
            self._take(self._life.world.train_s / 3)
        scores = TargetScores({"logprobs": np.full(share.batch.num_targets, -1.0, np.float32)})
        return ScoredShare(share.sequences, scores, start_s, time.time())

    def write_weights(self, request: WriteRequest) -> Written:
        fingerprint = self._model.fingerprints[-1]
        with self._sync.region("publish"):
            self._take(self._life.world.write_s)
            if self._rank == 0 and not request.is_there:
                _write(Path(request.folder), fingerprint)
        return Written(fingerprint if self._rank == 0 else "", (-1.0,) * (len(request.canary) - 1), num_bytes=8)

    def save(self, request: Folder) -> None:
        error = None
        with self._sync.region("save_recover"):
            self._take(self._life.world.write_s)
            try:
                make_folder(request.folder)
                file = request.folder / f"rank-{self._rank}.json"
                file.write_text(json.dumps({"fingerprints": self._model.fingerprints, "steps": self._model.steps}))
                sync(file)
            except OSError as exc:
                error = exc
        if self._sync.sum_scalars("save_recover_done", {"failed": error is not None})["failed"]:
            raise StorageError(f"checkpoint {request.folder} could not be put in place: {error}") from error

    def load(self, request: Folder) -> LoadedStep:
        with self._sync.region("load_recover_read"):
            self._take(self._life.world.write_s)
            saved = json.loads((request.folder / "rank-0.json").read_text())
        self._model.fingerprints, self._model.steps = saved["fingerprints"], saved["steps"]
        return LoadedStep(len(saved["steps"]))

    def export(self, request: ExportRequest) -> None:
        with self._sync.region("save_hf"):
            self._take(self._life.world.write_s)
            if self._rank == 0:
                _write(Path(request.path), self._model.fingerprints[-1])

    def _take(self, mean_s: float) -> None:
        life = self._life
        time.sleep(mean_s * life.rng.uniform(0.5, 1.5))
        if self._rank in life.failing:
            life.note(failed=self._rank)
            raise WorkerError("its device was lost")


def _write(folder: Path, fingerprint: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS).write_text(json.dumps({"fingerprint": fingerprint}))


def _digests(batch: Batch) -> list[str]:
    """Return a digest of each sequence with all that its loss depends on."""
    offsets, targets = batch.offsets.tolist(), batch.target_offsets.tolist()
    found = []
    for index in range(len(batch)):
        own = hashlib.sha256(batch.tokens[offsets[index] : offsets[index + 1]].tobytes())
        for name in sorted(batch.columns):
            own.update(batch.columns[name][targets[index] : targets[index + 1]].tobytes())
        found.append(own.hexdigest())
    return found
