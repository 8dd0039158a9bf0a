"""When to save, and what a run goes on from."""

from collections.abc import Callable

from offbeat.checkpoint.recover import CheckpointIndex
from offbeat.cluster.train_group import TrainGroup
from offbeat.config.root import Config
from offbeat.controller.state import SavedState
from offbeat.data import wire


class Checkpoints:
    """The resumable checkpoints of a run, and its final export."""

    def __init__(self, trainers: TrainGroup, config: Config) -> None:
        self._trainers = trainers
        self._config = config
        self._index = CheckpointIndex(config.run_dir / "checkpoints")

    async def restore(self) -> SavedState | None:
        """Bring the train ranks to the newest checkpoint; None where there is none."""
        newest = self._index.newest()
        if newest is None:
            return None
        await self._trainers.load(newest.folder / "ranks")
        return wire.decode_json(SavedState, newest.payload)

    def due(self, global_step: int, *, last: bool) -> bool:
        """Whether to save after this step."""
        every = self._config.checkpoint.every_steps
        return last or (every > 0 and global_step % every == 0)

    async def save(self, state: Callable[[], SavedState]) -> None:
        """Write the ranks' part, then the controller's, which declares the whole complete.

        Raises:
            StorageError: a disk is full; earlier checkpoints are intact.
        """
        saved = state()
        await self._trainers.save(self._index.folder(saved.global_step) / "ranks")
        self._index.complete(saved.global_step, wire.encode_json(saved))
        self._index.prune(self._config.checkpoint.keep)

    async def export(self, *, tokenizer: str) -> None:
        """Write the model and the tokenizer of a folder as a Hugging Face folder, if configured."""
        if self._config.checkpoint.export:
            await self._trainers.export(self._config.run_dir / "export", tokenizer=tokenizer)
