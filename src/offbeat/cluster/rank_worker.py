"""What every rank's process does, whatever it trains: serves or finds the store, joins its peers, and tells them when it fails.

`train_worker` and `tenant_worker` add what is trained. Torch lives here.
"""

from offbeat.cluster.group import Nothing, Service
from offbeat.cluster.messages import BuildRequest, JoinRequest, StoreAddress
from offbeat.cluster.rank_engine import build_model
from offbeat.config.root import Config
from offbeat.dist.mesh import ProcessGroups, connect_store, host_store, join
from offbeat.dist.peers import own_card
from offbeat.errors import StuckError, SyncError, UserError
from offbeat.process import Lifeline
from offbeat.pulse import work

_STORE_TIMEOUT_S = 60.0


class RankWorker(Service):
    """One rank."""

    lifeline: Lifeline | None = None

    def __init__(self) -> None:
        self._store = None
        self._groups: ProcessGroups | None = None
        self._request: JoinRequest | None = None

    def handle(self, method: str, payload: bytes) -> bytes:
        """Answer one call; the other ranks hear of a failure of this one at their next sync point, or where they wait."""
        try:
            with work(method):
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
        """Meet the other ranks."""
        self._request = request
        config = Config.model_validate_json(request.config)
        at = request.store
        store = self._store or connect_store(at.host, at.port, timeout_s=config.dist.init_timeout_s, server=at.server)
        self._groups = join(
            rank=request.rank, world=request.world, store=store, config=config.dist, server=at.server, on_stuck=self._give_up,
            on_beat=self._beat)
        return Nothing()

    def load_model(self, _request: Nothing) -> Nothing:
        """Load the model that this rank joined for."""
        assert self._request is not None, "a rank joins before it loads"
        assert self._groups is not None, "a rank joins before it loads"
        self._load(self._request.model, Config.model_validate_json(self._request.config), self._groups)
        return Nothing()

    def _give_up(self, error: StuckError) -> None:
        """The present call ends for the controller, though its thread may hang, or wait in a collective for one that does."""
        if self.lifeline is not None:
            self.lifeline.give_up(error)

    def _beat(self, text: str) -> None:
        if self.lifeline is not None:
            self.lifeline.beat(text)

    def _load(self, model: str, config: Config, groups: ProcessGroups) -> None:
        """Build what this rank trains; collective."""
        raise NotImplementedError
