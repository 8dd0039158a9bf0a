"""When to save, and what a run goes on from. In SPMD mode every rank calls it, and the leader's view of the disk counts."""

from dataclasses import dataclass
from pathlib import Path

from offbeat.checkpoint.recover import CheckpointIndex
from offbeat.cluster.session import Session
from offbeat.config.root import Config
from offbeat.controller.state import HeadState, Highlights, SavedState
from offbeat.data import wire
from offbeat.errors import ConfigError
from offbeat.types import Version

TRAINING, FINE_TUNING, WARM_UP = "step", "sft", "warm-up"
"""What names of checkpoints begin with: of reinforcement learning, of `offbeat sft`, and of the warm-up of `offbeat train`."""


@dataclass(frozen=True)
class _Found:
    folder: str
    saved: SavedState


def index_of(config: Config, kind: str) -> CheckpointIndex:
    """The checkpoints of a kind in a run's folder."""
    return CheckpointIndex(config.run_dir / "checkpoints", kind)


class Checkpoints:
    """The resumable checkpoints of a run or of its warm-up, and its exports."""

    def __init__(self, session: Session, kind: str = TRAINING) -> None:
        self._session = session
        self._trainers = session.trainers
        self._config = session.config
        self._index = index_of(session.config, kind)

    async def restore(self) -> SavedState | None:
        """Bring the train ranks to the newest checkpoint; None where there is none.

        Raises:
            ConfigError: it was written by another number of processes that draw data.
        """
        found = await self._session.peers.lead("recover", self._find, _Found | None)
        if found is None:
            return None
        if len(found.saved.heads) != self._session.num_heads:
            raise ConfigError(
                f"the checkpoint {found.folder} was written by {len(found.saved.heads)} processes that draw data, and now there are"
                f" {self._session.num_heads}; resume with the same rollout.single_rank_load and number of ranks, or change run.name")
        await self._trainers.load(Path(found.folder) / "ranks")
        return found.saved

    def due(self, global_step: int, *, last: bool) -> bool:
        """Whether to save after this step."""
        every = self._config.checkpoint.every_steps
        return last or (every > 0 and global_step % every == 0)

    async def save(self, global_step: int, *, version: Version, head: HeadState, highlights: Highlights) -> None:
        """Write the ranks' part, then the loop's, which declares the whole complete: not before engines serve its version.

        Args:
            global_step: steps done.
            version: weights published.
            head: where this process stands in its data.
            highlights: of the steps done.

        Raises:
            PublishError: none does.
            StorageError: a disk is full; earlier checkpoints are intact.
        """
        heads = await self._session.peers.gather("save_heads", head)
        saved = SavedState(global_step, version, tuple(heads[: self._session.num_heads]), highlights)

        async def complete() -> None:
            await self._session.publisher.settle()
            self._index.complete(global_step, wire.encode_json(saved))
            self._index.prune(self._config.checkpoint.keep)
            if self._index.kind == TRAINING:
                index_of(self._config, WARM_UP).clear()  # nobody goes back to it

        await self._trainers.save(self._index.folder(global_step) / "ranks")
        await self._session.peers.lead("save_complete", complete, None)

    async def export(self) -> None:
        """Write the final model and the tokenizer as a Hugging Face folder, if configured."""
        if self._config.checkpoint.export:
            await self._export("export")

    async def export_step(self, global_step: int) -> None:
        """Write the model after this step, if one is due. Comes before its checkpoint, so that a resumed run leaves none out."""
        every = self._config.checkpoint.export_every_steps
        if every and global_step % every == 0:
            await self._export(f"exports/step-{global_step:08d}")

    async def _export(self, folder: str) -> None:
        await self._trainers.export(self._config.run_dir / folder, tokenizer=self._session.material.tokenizer_folder)

    async def _find(self) -> _Found | None:
        newest = self._index.newest()
        return None if newest is None else _Found(str(newest.folder), wire.decode_json(SavedState, newest.payload))
