"""The process of one train rank: answers the train group. Torch lives here; started by name, imported by nobody else.

Every method is collective: the controller calls it on all ranks at once.
"""

from pathlib import Path

from offbeat.cluster.group import Nothing
from offbeat.cluster.messages import ExportRequest, Folder, Loaded, Objective, Published, PublishRequest, Shard, Trained
from offbeat.cluster.rank_engine import RankEngine
from offbeat.cluster.rank_worker import RankWorker
from offbeat.config.root import Config
from offbeat.dist.mesh import ProcessGroups


class TrainWorker(RankWorker):
    """One rank of one policy."""

    _engine: RankEngine | None = None

    def _load(self, model: str, config: Config, groups: ProcessGroups) -> None:
        self._engine = RankEngine.build(model, config, groups)

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
