"""When to save, and what a run goes on from. In SPMD mode every rank calls it, and the leader's view of the disk counts."""

from dataclasses import dataclass
from pathlib import Path

from offbeat.checkpoint.recover import CheckpointIndex
from offbeat.cluster.session import Session
from offbeat.controller.state import SavedState
from offbeat.data import wire
from offbeat.errors import ConfigError


@dataclass(frozen=True)
class _Found:
    folder: str
    saved: SavedState


class Checkpoints:
    """The resumable checkpoints of a run, and its final export."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._trainers = session.trainers
        self._config = session.config
        self._index = CheckpointIndex(session.config.run_dir / "checkpoints")

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

    async def save(self, saved: SavedState) -> None:
        """Write the ranks' part, then the loop's, which declares the whole complete: not before engines serve its version.

        Raises:
            PublishError: none does.
            StorageError: a disk is full; earlier checkpoints are intact.
        """

        async def complete() -> None:
            await self._session.publisher.settle()
            self._index.complete(saved.global_step, wire.encode_json(saved))
            self._index.prune(self._config.checkpoint.keep)

        await self._trainers.save(self._index.folder(saved.global_step) / "ranks")
        await self._session.peers.lead("save_complete", complete, None)

    async def export(self) -> None:
        """Write the model and the tokenizer as a Hugging Face folder, if configured."""
        if self._config.checkpoint.export:
            await self._trainers.export(self._config.run_dir / "export", tokenizer=self._session.material.tokenizer_folder)

    async def _find(self) -> _Found | None:
        newest = self._index.newest()
        return None if newest is None else _Found(str(newest.folder), wire.decode_json(SavedState, newest.payload))
