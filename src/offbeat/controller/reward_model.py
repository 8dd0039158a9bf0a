"""Reward models, `offbeat reward-model`: the lesson in which chosen answers are to have higher rewards than rejected ones."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from offbeat.algorithms.reward_model import RewardEvaluation, compare_rewards, reward_batch
from offbeat.config.root import TRAINING_KINDS, Config
from offbeat.controller.inputs import RunInputs, read_pair_inputs
from offbeat.controller.parts import RunParts
from offbeat.controller.state import RunState
from offbeat.controller.supervised import Lesson
from offbeat.data.batch import Batch
from offbeat.data.pairs import EncodedPair, Preference
from offbeat.data.reward_model import write_tokenizer
from offbeat.data.stream import PromptStream


class RewardLesson(Lesson):
    """A reward model on the preferences of the run, exported as a Hugging Face folder for sequence classification."""

    kind = TRAINING_KINDS["reward-model"]

    def __init__(self, parts: RunParts, state: RunState) -> None:
        super().__init__(parts, state)
        pairs = parts.inputs.pairs
        assert pairs is not None, "a run of a reward model has read pairs"
        self._settings = parts.config.reward_model
        self.dataset = pairs.train
        self._encoder = pairs.encoder
        count = min(parts.config.evaluate.num_prompts, pairs.heldout.num_rows or 0)
        encoded = [self._encoder.encode(pairs.heldout.row(index), name=f"held-out row {index}") for index in range(count)]
        self._heldout = [pair for pair in encoded if pair is not None]
        self._tokenizer_folder = parts.config.run_dir / "tokenizer"

    @classmethod
    def read(cls, config: Config) -> RunInputs:
        return read_pair_inputs(config, rewards=True)

    async def prepare(self) -> None:
        """Write the tokenizer as exports have it."""
        if self._parts.record.writes:
            write_tokenizer(self._encoder.tokenizer, self._tokenizer_folder)

    async def batch(self, stream: PromptStream[Preference]) -> Batch:
        drawn = self._encoder.draw(stream, self._settings.batch_size) if self._parts.source.draws else []
        return reward_batch([pair for _, pair in drawn], centring=self._settings.centring)

    async def evaluate(self) -> RewardEvaluation | None:
        """Compare the rewards of held-out pairs; None also on a rank that does not draw, whose ranks score with the others."""
        if not self._heldout:
            return None
        with self._parts.record.tracer.span("evaluate", "controller"):
            size = self._settings.batch_size
            found = [await self._rewards(self._heldout[start : start + size]) for start in range(0, len(self._heldout), size)]
        return compare_rewards(np.concatenate(found)) if self._parts.source.draws else None

    async def export(self, folder: Path) -> None:
        """Write the reward model as a folder for sequence classification."""
        await self._parts.trainers.export(folder, tokenizer=str(self._tokenizer_folder))

    async def _rewards(self, pairs: Sequence[EncodedPair]) -> np.ndarray:
        """Return [N * 2] float32, the rewards of N pairs, each chosen, rejected; meaningless on a rank that does not draw."""
        batch = reward_batch(pairs if self._parts.source.draws else [], centring=self._settings.centring)
        return (await self._parts.trainers.score(batch)).columns["values"]

