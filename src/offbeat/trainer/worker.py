"""The process of one train rank: joins its peers, builds its trainers, and passes calls on to them. Imports torch; started by name.

Calls reach all ranks at once, in the same order. User errors are raised while no peer waits in a collective.
"""

import gc
from collections.abc import Mapping
from pathlib import Path

from offbeat.config.for_processes import RankConfig
from offbeat.config.model import TinyConfig
from offbeat.errors import SyncError, UserError
from offbeat.model.tiny import build_tiny
from offbeat.process.serving import Lifeline
from offbeat.pulse import work
from offbeat.sync.links import MeetingPlace
from offbeat.sync.mesh import MeshShape, ProcessGroups, connect_store, host_store, join
from offbeat.sync.peers import own_card
from offbeat.sync.platform import current_platform
from offbeat.trainer.bank_trainer import BankTrainer
from offbeat.trainer.frozen import TeacherModel
from offbeat.trainer.memory import check_memory
from offbeat.trainer.messages import BuildRequest, JoinRequest, StoreAddress, Trainee
from offbeat.trainer.model_trainer import ModelTrainer
from offbeat.trainer.reward_trainer import RewardTrainer
from offbeat.trainer.trainer import Trainer
from offbeat.trainer.value_trainer import ValueTrainer
from offbeat.workers.worker import Nothing, WorkerService, answer

_STORE_TIMEOUT_S = 60.0

Part = Trainer | TeacherModel


def build_model(request: BuildRequest) -> None:
    """Build the tiny model that all ranks and engines then load; runs on one rank."""
    build_tiny(
        Path(request.folder), tiny=TinyConfig.model_validate_json(request.tiny), vocab_size=request.vocab_size,
        eos_token_id=request.eos_token_id, pad_token_id=request.pad_token_id, seed=request.seed)


def build_trainers(model: str, config: RankConfig, groups: ProcessGroups, *, trains: Trainee = "policy") -> dict[str, Part]:
    """Load models, and build the trainers of a run by the part that they train; collective.

    `model` is the folder or hub id of the policy, or of the model that `trains` names; its trainer is the part "". The part "critic" is
    trained beside a policy, and "teacher" is the frozen model of `teacher.path`.

    Raises:
        ConfigError: a step of the policy's training cannot fit on the accelerator; nothing was loaded.
    """
    parts: dict[str, Part] = {}
    if not current_platform.is_cpu:
        check_memory(model, config, groups=groups, device=current_platform.total_memory())
    if trains == "adapters":
        parts[""] = BankTrainer.build_empty(model, config=config, groups=groups)
    elif trains == "rewards":
        parts[""] = RewardTrainer.build(model, config=config, groups=groups)
    else:
        policy = parts[""] = (BankTrainer if config.model.lora.rank else ModelTrainer).build(model, config=config, groups=groups)
        if config.algorithm.needs_critic:
            parts["critic"] = ValueTrainer.build_critic(
                config.critic.path or model, config=config, groups=groups,
                policy=policy if isinstance(policy, ModelTrainer) and not config.critic.path else None)
        if config.algorithm.teacher == "model" and config.teacher.path:
            parts["teacher"] = TeacherModel(config, groups)
    gc.freeze()  # objects of libraries stay forever; each collection that walks them costs 0.1 s
    return parts


def find_trainer(trainers: Mapping[str, Part], method: str) -> tuple[Part, str]:
    """Return a call's trainer and method: part "critic" and "train_step" for "critic.train_step"; raises LookupError without it."""
    part, _, verb = method.rpartition(".")
    if part not in trainers:
        raise LookupError(f"there is no trainer {part!r} for {method!r}")
    return trainers[part], verb


class TrainWorker(WorkerService):
    """One train rank."""

    lifeline: Lifeline | None = None

    def __init__(self) -> None:
        self._store = None
        self._groups: ProcessGroups | None = None
        self._request: JoinRequest | None = None
        self._trainers: dict[str, Part] = {}

    def handle(self, method: str, payload: bytes) -> bytes:
        """Answer one call; if it fails, the other ranks are told at their next sync point, or where they wait."""
        try:
            with work(method):
                if hasattr(TrainWorker, method) or not self._trainers:
                    return answer(self, method, payload)
                return answer(*find_trainer(self._trainers, method), payload)
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
        """Rank 0: build the tiny model that all ranks and engines then load."""
        build_model(request)
        return Nothing()

    def join(self, request: JoinRequest) -> Nothing:
        """Meet the other ranks. The controller hears by the lifeline of ranks that hang, since this thread may wait for one without end."""
        self._request = request
        config = RankConfig.model_validate_json(request.config)
        at = request.store
        store = self._store or connect_store(at.host, at.port, timeout_s=config.dist.init_timeout_s, server=at.server)
        self._groups = join(
            rank=request.rank, world=request.world, place=MeetingPlace(store, server=at.server), config=config.dist,
            shape=MeshShape.of(config.train, world=request.world), listener=self.lifeline)
        return Nothing()

    def load_model(self, _request: Nothing) -> Nothing:
        """Load the model that this rank joined for."""
        request, groups = self._request, self._groups
        assert request is not None and groups is not None, "a rank joins before it loads"
        self._trainers = build_trainers(request.model, RankConfig.model_validate_json(request.config), groups, trains=request.trains)
        return Nothing()
