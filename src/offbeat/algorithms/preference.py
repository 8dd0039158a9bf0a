"""Batches and held-out metrics of preference training. Numpy only; called by the controller's lesson, which has the model score them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from offbeat.config.objectives import OBJECTIVES
from offbeat.data.batch import Batch, LossSpec, SharedPrompts
from offbeat.data.pairs import EncodedPair
from offbeat.data.ranges import bounds
from offbeat.data.supervised import Sequence as Encoded


@dataclass(frozen=True)
class PairEvaluation:
    """Held-out preferences under a model, compared as the loss does.

    Attributes:
        accuracy: share of pairs whose chosen answer has the larger value, e.g. 0.75; of single answers, share of all couples of a good one
            and a bad one whose good one has it. 0 without a couple.
        margin: mean lead of that value, times the loss's beta.
        chosen, rejected: mean value of chosen and of rejected answers; None without one.
        value: kind of the values: "logratio" to the reference, or "logprob".
    """

    accuracy: float
    margin: float
    chosen: float | None
    rejected: float | None
    value: str

    def metrics(self) -> dict[str, float]:
        means = {f"eval/chosen_{self.value}_mean": self.chosen, f"eval/rejected_{self.value}_mean": self.rejected}
        return {
            "eval/accuracy": self.accuracy, "eval/margin_mean": self.margin,
            **{name: mean for name, mean in means.items() if mean is not None}}


def pair_batch(pairs: Sequence[EncodedPair], loss: LossSpec, *, ref_logprobs: np.ndarray | None = None) -> Batch:
    """Make a batch whose loss is the mean over its P groups, which are pairs, or for kto single answers.

    It has a target for each answer token; one of a group with n targets weighs 1 / (P n). Losses that read them need `ref_logprobs`
    [M] float32, of all answer tokens in order.
    """
    sequences = [sequence for pair in pairs for sequence in pair.sequences]
    sizes = [len(pair.sequences) for pair in pairs]
    single = OBJECTIVES[loss.name].takes_labels
    groups = np.arange(len(sequences)) if single else np.repeat(np.arange(len(pairs)), sizes)
    prefixes = np.zeros(len(sequences), np.int64) if single else np.repeat([pair.prefix_len for pair in pairs], sizes)
    num_groups = len(sequences) if single else len(pairs)
    batch = answer_batch(sequences, loss, shared=SharedPrompts(groups, prefixes.astype(np.int64)))
    group_of_target = groups[batch.target_sequences].astype(np.int64)
    weights = 1.0 / (max(num_groups, 1) * np.bincount(group_of_target, minlength=num_groups)[group_of_target])
    batch = batch.with_columns(loss_weights=weights, **({} if ref_logprobs is None else {"ref_logprobs": ref_logprobs}))
    signs = np.array([1 if liked else -1 for pair in pairs for liked in pair.liked], np.int64)
    return replace(batch, sequences={**batch.sequences, "signs": signs}, denominator=float(num_groups))


def answer_batch(sequences: Sequence[Encoded], loss: LossSpec, *, shared: SharedPrompts | None = None) -> Batch:
    """Make a batch that is only scored: targets are the tokens in N sequences' masks, [L] each; `shared` are prompts that they share."""
    tokens = np.concatenate([np.zeros(0, np.int32), *(tokens for tokens, _ in sequences)], dtype=np.int32)
    trained = np.concatenate([np.zeros(0, np.bool_), *(mask for _, mask in sequences)], dtype=np.bool_)
    return Batch.of_next_tokens(
        tokens, trained, lengths=[len(tokens) for tokens, _ in sequences], columns={}, losses=(loss,), shared=shared)


def answer_values(lengths: Sequence[int], logprobs: np.ndarray, ref_logprobs: np.ndarray | None, *, loss: str) -> np.ndarray:
    """Return [N] float64, the value by which a loss, which is no mix, compares each answer: see `losses.pairs.Comparison`.

    Args:
        lengths: numbers of tokens of the N answers, such as [12, 7].
        logprobs, ref_logprobs: [M] of the answers' tokens, back to back.
    """
    values = logprobs.astype(np.float64)
    if OBJECTIVES[loss].refers:
        assert ref_logprobs is not None, f"{loss} compares with the reference"
        values = values - ref_logprobs
    counts = np.asarray(lengths, np.int64)
    sums = np.diff(np.concatenate([[0.0], np.cumsum(values)])[bounds(counts)])
    return sums / counts if OBJECTIVES[loss].by_token else sums


def evaluate_pairs(values: np.ndarray, pairs: Sequence[EncodedPair], loss: LossSpec) -> PairEvaluation:
    """Compare the answers of held-out preferences by a loss that is no mix; `values` are [N] float64, of all answers in order."""
    liked = np.array([liked for pair in pairs for liked in pair.liked], np.bool_)
    chosen, rejected = values[liked], values[~liked]
    paired = all(len(pair.liked) == 2 for pair in pairs)
    gaps = chosen - rejected if paired else (chosen[:, None] - rejected[None, :]).ravel()
    beta = float(loss.constants["beta"]) if OBJECTIVES[loss.name].scaled_margin else 1.0
    return PairEvaluation(
        float((gaps > 0).mean()) if len(gaps) else 0.0, float(beta * gaps.mean()) if len(gaps) else 0.0,
        float(chosen.mean()) if len(chosen) else None, float(rejected.mean()) if len(rejected) else None,
        "logratio" if OBJECTIVES[loss.name].refers else "logprob")
