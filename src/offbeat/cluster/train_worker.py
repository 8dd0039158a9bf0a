"""The process of one train rank: joins its peers and answers the controller. Torch lives here; started by name, imported by nobody else.

Every method but `host_store` and `build_model` is collective: the controller calls it on all ranks at once.
"""

import gc
import time
from pathlib import Path

from offbeat.cluster.group import Nothing, Service
from offbeat.cluster.messages import (
    BuildRequest,
    ExportRequest,
    Folder,
    JoinRequest,
    Loaded,
    Objective,
    Published,
    PublishRequest,
    Shard,
    StoreAddress,
    Trained,
)
from offbeat.config.model import TinyConfig
from offbeat.config.root import Config
from offbeat.dist.mesh import ProcessGroups, connect_store, host_store, join
from offbeat.dist.platform import current_platform
from offbeat.errors import StorageError, SyncError
from offbeat.model.tiny import build_tiny
from offbeat.trainer.engine import TrainEngine

_STORE_TIMEOUT_S = 60.0


class TrainWorker(Service):
    """One rank."""

    def __init__(self) -> None:
        self._store = None
        self._config: Config | None = None
        self._groups: ProcessGroups | None = None
        self._engine: TrainEngine | None = None

    def handle(self, method: str, payload: bytes) -> bytes:
        """Answer one call; the other ranks hear of a failure of this one at their next sync point, or where they wait."""
        try:
            return super().handle(method, payload)
        except (SyncError, StorageError):  # raised by every rank alike; after a failed load or save the ranks are in step
            raise
        except Exception as exc:
            if self._groups is not None:
                self._groups.sync.fail(f"{type(exc).__name__} in {method}: {exc}")
            raise

    def host_store(self, address: StoreAddress) -> StoreAddress:
        """Rank 0: serve the store on a free port of the given host."""
        self._store = host_store(_STORE_TIMEOUT_S, host=address.host)
        return StoreAddress(address.host, self._store.port)

    def build_model(self, request: BuildRequest) -> Nothing:
        """Rank 0: make the tiny model that all ranks and engines then load."""
        build_tiny(
            Path(request.folder), tiny=TinyConfig.model_validate_json(request.tiny), vocab_size=request.vocab_size,
            eos_token_id=request.eos_token_id, pad_token_id=request.pad_token_id, seed=request.seed)
        return Nothing()

    def join(self, request: JoinRequest) -> Nothing:
        """Meet the other ranks and load the model."""
        self._config = config = Config.model_validate_json(request.config)
        store = self._store or connect_store(request.store.host, request.store.port, timeout_s=config.dist.init_timeout_s)
        self._groups = groups = join(rank=request.rank, world=request.world, store=store, config=config.dist)
        self._engine = TrainEngine.build(
            Path(request.model), config=config.train, algorithm=config.algorithm, optimizer=config.train.optimizer,
            total_steps=config.run.total_steps, groups=groups, temperature=config.rollout.temperature or 1.0)
        gc.freeze()  # what libraries loaded stays for good; walking it again and again costs 0.1 s each time
        return Nothing()

    def set_objective(self, objective: Objective) -> Nothing:
        """Start over with a fresh optimizer; the weights stay."""
        config = self._settings
        optimizer = config.sft.optimizer if objective.name == "sft" else config.train.optimizer
        self._trainer.set_objective(objective.name, algorithm=config.algorithm, optimizer=optimizer, total_steps=objective.total_steps)
        return Nothing()

    def train_step(self, shard: Shard) -> Trained:
        """One training step on this rank's share."""
        start_s, busy_before_s = time.time(), current_platform.busy_clock()
        stats = self._trainer.train_step(shard.batch, shard.minibatches)
        return Trained(stats.metrics, start_s, time.time(), current_platform.busy_clock() - busy_before_s)

    def publish(self, request: PublishRequest) -> Published:
        """Rank 0 writes the weights; all score the canary."""
        fingerprint = self._trainer.publish(Path(request.folder), dtype=request.dtype)
        return Published(fingerprint, self._trainer.canary(request.canary))

    def save(self, folder: Folder) -> Nothing:
        """Write a resumable checkpoint."""
        self._trainer.save(Path(folder.path))
        return Nothing()

    def load(self, folder: Folder) -> Loaded:
        """Go on from a checkpoint."""
        self._trainer.load(Path(folder.path))
        return Loaded(self._trainer.step)

    def export(self, request: ExportRequest) -> Nothing:
        """Write a Hugging Face folder, tokenizer included."""
        self._trainer.export(Path(request.path), tokenizer_folder=Path(request.tokenizer), dtype=self._settings.model.dtype)
        return Nothing()

    @property
    def _trainer(self) -> TrainEngine:
        assert self._engine is not None, "a rank was called before it joined"
        return self._engine

    @property
    def _settings(self) -> Config:
        assert self._config is not None, "a rank was called before it joined"
        return self._config
