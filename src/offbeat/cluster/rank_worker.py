"""What every rank's process does, whatever it trains: serves or finds the store, joins its peers, and tells them when it fails.

`train_worker` and `tenant_worker` add what is trained. Torch lives here.
"""

from offbeat.cluster.group import Nothing, Service
from offbeat.cluster.messages import BuildRequest, JoinRequest, StoreAddress
from offbeat.cluster.rank_engine import build_model
from offbeat.config.root import Config
from offbeat.dist.mesh import ProcessGroups, connect_store, host_store, join
from offbeat.dist.peers import own_card
from offbeat.errors import SyncError, UserError

_STORE_TIMEOUT_S = 60.0


class RankWorker(Service):
    """One rank."""

    def __init__(self) -> None:
        self._store = None
        self._groups: ProcessGroups | None = None

    def handle(self, method: str, payload: bytes) -> bytes:
        """Answer one call; the other ranks hear of a failure of this one at their next sync point, or where they wait."""
        try:
            return super().handle(method, payload)
        except (SyncError, UserError):  # raised by every rank alike, or by one outside of collectives: the ranks are in step
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
        self._load(request.model, config, self._groups)
        return Nothing()

    def _load(self, model: str, config: Config, groups: ProcessGroups) -> None:
        """Build what this rank trains; collective."""
        raise NotImplementedError
