"""Preference training, `offbeat dpo`: the lesson in which chosen answers are to become likelier than rejected ones."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from offbeat.algorithms.objectives import first_of, preference_loss
from offbeat.algorithms.preference import PairEvaluation, answer_batch, answer_values, evaluate_pairs, pair_batch
from offbeat.config.objectives import OBJECTIVES
from offbeat.config.root import TRAINING_KINDS, Config
from offbeat.controller.checkpoints import index_of
from offbeat.controller.inputs import RunInputs, read_pair_inputs
from offbeat.controller.parts import RunParts
from offbeat.controller.reference import Reference, ReferenceFile, RowsToScore, open_reference
from offbeat.controller.state import RunState
from offbeat.controller.supervised import Lesson
from offbeat.data.batch import Batch
from offbeat.data.dataset import Dataset
from offbeat.data.identity import digest_of
from offbeat.data.pairs import EncodedPair, PairEncoder, Preference
from offbeat.data.stream import PromptStream
from offbeat.data.supervised import Sequence as Encoded


class PreferenceLesson(Lesson):
    """Training on the preferences of the run, by the loss of [preference].

    For losses that compare with the reference, its log-probabilities of every row are computed before the first step. KTO also scores each
    row's prompt with the answer of another row: the ratio of policy to reference there estimates how far the policy has moved.
    """

    kind = TRAINING_KINDS["dpo"]

    def __init__(self, parts: RunParts, state: RunState) -> None:
        super().__init__(parts, state)
        pairs, config = parts.inputs.pairs, parts.config
        assert pairs is not None, "a run of preference training has read preferences"
        self._settings = config.preference
        self.dataset = pairs.train
        self._encoder = pairs.encoder
        self._loss = preference_loss(config.preference)
        self._refers = OBJECTIVES[self._loss.name].refers
        single = OBJECTIVES[self._loss.name].takes_labels
        others = _derangement(pairs.train.num_rows or 0, seed=config.run.seed) if single else None
        self._mismatches = single
        self._rows = _TrainRows(pairs.train, pairs.encoder, others)
        self._reference = self._heldout_reference = Reference(np.zeros(0, np.float32), np.zeros(1, np.int64))
        self._heldout_rows = pairs.heldout
        count = min(config.evaluate.num_prompts, pairs.heldout.num_rows or 0)
        encoded = [self._encoder.encode(pairs.heldout.row(index), name=f"held-out row {index}") for index in range(count)]
        self._heldout = [pair for pair in encoded if pair is not None]

    @classmethod
    def read(cls, config: Config) -> RunInputs:
        return read_pair_inputs(config, unpaired=OBJECTIVES[config.preference.loss].takes_labels)

    async def prepare(self) -> None:
        """Compute the reference's log-probabilities, unless an earlier start has."""
        if self._refers:
            index = index_of(self._parts.record.run_dir, self.kind.checkpoints)
            self._reference = await self._open("train", self.dataset, self._rows, resumes=index.newest() is not None)
            self._heldout_reference = await self._open(
                "heldout", self._heldout_rows, [pair.sequences for pair in self._heldout], resumes=False)

    async def batch(self, stream: PromptStream[Preference]) -> Batch:
        drawn = self._encoder.draw(stream, self._settings.batch_size) if self._parts.source.draws else []
        loss, pairs = self._loss, [pair for _, pair in drawn]
        if self._mismatches:
            loss = replace(loss, constants={**loss.constants, "z": await self._divergence([index for index, _ in drawn])})
        if not self._refers:
            return pair_batch(pairs, loss)
        rows = [self._reference.row(index)[: _num_targets(pair.sequences)] for index, pair in drawn]
        return pair_batch(pairs, loss, ref_logprobs=_joined(rows))

    async def evaluate(self) -> PairEvaluation | None:
        """Compare the answers of held-out pairs under the present weights."""
        if not self._heldout:
            return None
        size, parts = self._settings.batch_size, self._parts
        with parts.record.tracer.span("evaluate", "controller"):
            logprobs = _joined([
                await self._score_answers(_sequences_of(self._heldout[start : start + size]))
                for start in range(0, len(self._heldout), size)])

            async def compare() -> PairEvaluation:
                reference = _joined([self._heldout_reference.row(at) for at in range(len(self._heldout))]) if self._refers else None
                lengths = [_num_targets([sequence]) for sequence in _sequences_of(self._heldout)]
                loss = first_of(self._loss)
                values = answer_values(lengths, logprobs, reference, loss=loss.name)
                return evaluate_pairs(values, self._heldout, loss)

            return await parts.peers.lead("evaluate_pairs", compare, PairEvaluation)

    async def _open(self, name: str, dataset: Dataset[Preference], rows: RowsToScore, *, resumes: bool) -> Reference:
        parts, encoder = self._parts, self._encoder
        data, identity, hf = parts.config.data, parts.inputs.identity, encoder.tokenizer.hf
        limits = [encoder.context, encoder.max_row_tokens, encoder.share_prefix] if encoder.too_long == "drop" else []
        others = [parts.config.run.seed] if self._mismatches else []
        key = digest_of([
            dataset.digest, len(rows), identity.model, identity.tokenizer, str(hf.chat_template), data.chat_template, data.system_prompt,
            data.chat_template_kwargs, limits, others])
        file = ReferenceFile(parts.config.run_dir / "reference" / f"{name}.safetensors", key, resumes)
        return await open_reference(
            file, rows, chunk=self._settings.batch_size, score=self._score_answers, peers=parts.peers, draws=parts.source.draws)

    async def _score_answers(self, sequences: Sequence[Encoded]) -> np.ndarray:
        """Return the log-probabilities, [M] float32, of all answer tokens under the present weights; collective."""
        return (await self._parts.trainers.score(answer_batch(sequences, self._loss))).columns["logprobs"]

    async def _divergence(self, indices: Sequence[int]) -> float:
        """Estimate how far the policy is from the reference, at least 0, by answers that belong to other prompts."""
        mismatched = [self._rows.mismatched(index) for index in indices]
        logprobs = await self._score_answers([sequence for sequences in mismatched for sequence in sequences])
        # In a row of the reference, the mismatched answer comes after the row's own.
        counts = [_num_targets(sequences) for sequences in mismatched]
        reference = _joined([self._reference.row(index)[-count:] for index, count in zip(indices, counts, strict=True) if count])
        lengths = [count for count in counts if count]
        values = answer_values(lengths, logprobs, reference, loss=self._loss.name)
        return max(float(values.mean()), 0.0) if lengths else 0.0


class _TrainRows:
    """Sequences of each training row that the reference scores: the row's own and, where there are `others`, the mismatched one."""

    def __init__(self, dataset: Dataset[Preference], encoder: PairEncoder, others: np.ndarray | None) -> None:
        """`others` are [N] int64: the row whose answer goes with each row's prompt; see `_derangement`."""
        self._dataset = dataset
        self._encoder = encoder
        self._others = others

    def __len__(self) -> int:
        return self._dataset.num_rows or 0

    def __getitem__(self, index: int, /) -> list[Encoded]:
        pair = self._encoder.encode(self._dataset.row(index), name=f"row {index}")
        return [] if pair is None else [*pair.sequences, *self.mismatched(index)]

    def mismatched(self, index: int) -> list[Encoded]:
        """Return a row's prompt with the answer of another row; nothing if it is too long, or a text and a chat do not go together."""
        if self._others is None:
            return []
        row, other = self._dataset.row(index), self._dataset.row(int(self._others[index]))
        if isinstance(row.prompt, str) != isinstance(other.prompt, str):
            return []
        single = replace(row, answers=other.answers[:1], liked=other.liked[:1], margin=0.0)
        pair = replace(self._encoder, too_long="drop").encode(single, name=f"row {index} with the answer of another")
        return [] if pair is None else list(pair.sequences)


def _derangement(count: int, *, seed: int) -> np.ndarray:
    """Return [N] int64 with N = `count`: another row for each row, each of them once, such as [2, 0, 1]."""
    order = np.random.default_rng([seed, count]).permutation(count)
    others = np.empty(count, np.int64)
    others[order] = np.roll(order, 1)
    return others


def _sequences_of(pairs: Sequence[EncodedPair]) -> list[Encoded]:
    return [sequence for pair in pairs for sequence in pair.sequences]


def _num_targets(sequences: Sequence[Encoded]) -> int:
    return sum(int(mask.sum()) for _, mask in sequences)


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.float32), *arrays])
