"""The process of one train rank: joins its peers and answers the controller. Torch lives here; started by name, imported by nobody else.

Every method but `host_store` and `build_model` is collective: the controller calls it on all ranks at once.
"""

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
from offbeat.cluster.rank_engine import RankEngine, build_model
from offbeat.config.root import Config
from offbeat.dist.mesh import ProcessGroups, connect_store, host_store, join
from offbeat.dist.peers import own_card
from offbeat.errors import StorageError, SyncError

_STORE_TIMEOUT_S = 60.0


class TrainWorker(Service):
    """One rank."""

    def __init__(self) -> None:
        self._store = None
        self._groups: ProcessGroups | None = None
        self._engine: RankEngine | None = None

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
        return StoreAddress(address.host, self._store.port, own_card(0, hosts_store=True))

    def build_model(self, request: BuildRequest) -> Nothing:
        """Rank 0: make the tiny model that all ranks and engines then load."""
        build_model(request)
        return Nothing()

    def join(self, request: JoinRequest) -> Nothing:
        """Meet the other ranks and load the model."""
        config = Config.model_validate_json(request.config)
        at = request.store
        store = self._store or connect_store(at.host, at.port, timeout_s=config.dist.init_timeout_s, server=at.server)
        self._groups = join(rank=request.rank, world=request.world, store=store, config=config.dist, server=at.server)
        self._engine = RankEngine.build(request.model, config, self._groups)
        return Nothing()

    def set_objective(self, objective: Objective) -> Nothing:
        """Start over with a fresh optimizer; the weights stay."""
        self._rank.set_objective(objective)
        return Nothing()

    def train_step(self, shard: Shard) -> Trained:
        """One training step on this rank's share."""
        return self._rank.train_step(shard)

    def publish(self, request: PublishRequest) -> Published:
        """All score the canary, and rank 0 writes the weights."""
        return self._rank.publish(request)

    def save(self, folder: Folder) -> Nothing:
        """Write a resumable checkpoint."""
        self._rank.save(Path(folder.path))
        return Nothing()

    def load(self, folder: Folder) -> Loaded:
        """Go on from a checkpoint."""
        self._rank.load(Path(folder.path))
        return Loaded(self._rank.step)

    def export(self, request: ExportRequest) -> Nothing:
        """Write a Hugging Face folder, tokenizer included."""
        self._rank.export(request)
        return Nothing()

    @property
    def _rank(self) -> RankEngine:
        assert self._engine is not None, "a rank was called before it joined"
        return self._engine
