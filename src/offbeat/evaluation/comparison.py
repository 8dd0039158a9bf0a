"""Compares two evaluations prompt by prompt: differences with intervals, paired tests, and the prompts that changed most. Pure.

Prompts that both have asked are pairs, which takes the difficulty of prompts out of the comparison: it needs far fewer of them than two
intervals that do not overlap (Miller 2024, arXiv:2411.00640, section 4).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from offbeat.data.row import Prompt
from offbeat.errors import DataError
from offbeat.evaluation.intervals import Interval, mean_interval
from offbeat.evaluation.samples import EvaluatedPrompt, EvaluatedSet
from offbeat.evaluation.scores import pass_at_k_of_each

_Z = 1.959964
_MOST_ENUMERATED = 12
"""Largest number of differing pairs for which all choices of signs are tried."""
_NUM_FLIPS = 20_000
_MOST_DRAWN = 1 << 21
"""Signs drawn at a time, which bounds the memory of a test."""


@dataclass(frozen=True)
class Difference:
    """How far two evaluations differ in one score, over the prompts that both have asked.

    Attributes:
        score: "accuracy", "pass@K" or "mean reward".
        first, second: the score of each.
        interval: of `second - first` on all prompts of this kind, with 95 % confidence.
        p_value: chance of a difference at least as large, on either side, if neither were better on any prompt.
        num_better, num_worse: prompts on which the second is better, and on which it is worse; the others are equal.
    """

    score: str
    first: float
    second: float
    interval: Interval
    p_value: float
    num_better: int
    num_worse: int

    @property
    def difference(self) -> float:
        """The second score less the first."""
        return self.second - self.first


@dataclass(frozen=True)
class RewardChange:
    """A prompt whose mean reward has changed, with an answer of each evaluation."""

    prompt: Prompt
    answer: str
    first: float
    second: float
    first_text: str
    second_text: str

    @property
    def difference(self) -> float:
        """The second mean reward less the first."""
        return self.second - self.first


@dataclass(frozen=True)
class SetComparison:
    """Two evaluations of one set.

    Attributes:
        num_prompts: prompts that both have asked, which alone are compared.
        num_only_first, num_only_second: prompts that one of them has asked.
        changes: the prompts with the largest changes of the mean reward, the largest first.
    """

    name: str
    num_prompts: int
    num_only_first: int
    num_only_second: int
    differences: tuple[Difference, ...]
    changes: tuple[RewardChange, ...]

    @property
    def title(self) -> str:
        """Name of the set for people, such as "held-out"."""
        return self.name or "held-out"

    @property
    def mismatch(self) -> str:
        """One sentence where both have not asked the same prompts; else empty."""
        if not (self.num_only_first or self.num_only_second):
            return ""
        return (
            f"{self.title}: the two evaluations did not ask the same prompts; the {self.num_prompts} that both asked are compared, and"
            f" {self.num_only_first} of the first alone and {self.num_only_second} of the second alone are left out")


def compare(first: Mapping[str, EvaluatedSet], second: Mapping[str, EvaluatedSet], *, num_changes: int = 5) -> list[SetComparison]:
    """Compare all sets that both evaluations have, by name; of each, `num_changes` changed prompts are reported.

    Raises DataError if no set is in both, or the sets of a name have no prompt in common.
    """
    if not (common := [name for name in first if name in second]):
        sets = ("; the other has ".join(", ".join(each.title for each in own.values()) for own in (first, second)))
        raise DataError(f"the two evaluations have no set in common: one has {sets}; evaluate both with the same configuration")
    return [compare_sets(first[name], second[name], num_changes=num_changes) for name in common]


def compare_sets(first: EvaluatedSet, second: EvaluatedSet, *, num_changes: int = 5) -> SetComparison:
    """Compare two evaluations of one set; see `compare`."""
    pairs = _pairs(first.prompts, second.prompts)
    if not pairs:
        raise DataError(
            f"{first.title}: the two evaluations have no prompt in common, of {len(first.prompts)} and {len(second.prompts)}; evaluate both"
            " on the same data")
    left, right = (np.array(indices, int) for indices in zip(*pairs, strict=True))
    ks = sorted({*first.pass_at, *second.pass_at, min(first.num_samples, second.num_samples)} - {1})
    scores = {
        "accuracy": (first.accuracies, second.accuracies),
        **{f"pass@{k}": (pass_at_k_of_each(first, k), pass_at_k_of_each(second, k))
           for k in ks if k <= min(first.num_samples, second.num_samples)},
        "mean reward": (first.rewards, second.rewards)}
    differences = tuple(_difference(name, one[left], other[right]) for name, (one, other) in scores.items())
    return SetComparison(
        first.name, len(pairs), len(first.prompts) - len(pairs), len(second.prompts) - len(pairs), differences,
        _largest_changes(first, second, pairs, most=num_changes))


def _pairs(first: Sequence[EvaluatedPrompt], second: Sequence[EvaluatedPrompt]) -> list[tuple[int, int]]:
    """Return the indices of the prompts that both have, such as [(0, 2), (1, 0)]; repeated prompts are paired one to one."""
    places: dict[str, list[int]] = {}
    for place, prompt in reversed(list(enumerate(second))):
        places.setdefault(prompt.key, []).append(place)
    return [(place, places[prompt.key].pop()) for place, prompt in enumerate(first) if places.get(prompt.key)]


def _difference(score: str, first: np.ndarray, second: np.ndarray) -> Difference:
    changes = np.where(_are_equal(first, second), 0.0, second - first)
    return Difference(
        score, float(first.mean()), float(second.mean()), difference_interval(first, second), sign_flip_test(changes),
        int((changes > 0).sum()), int((changes < 0).sum()))


def _are_equal(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return [P] bool: whether the values of a pair differ by no more than rounding, as sums of the same rewards in another order may."""
    return np.isclose(first, second, rtol=1e-9, atol=1e-12)


def difference_interval(first: np.ndarray, second: np.ndarray) -> Interval:
    """Return an interval for the mean difference of pairs, `second - first`, [P] float each, a value of each prompt.

    Where every value is 0 or 1 it is Wald's with half a pair added to each of the four outcomes, which also holds where few pairs differ,
    or none; otherwise a bootstrap over pairs.

    Source: Agresti and Min 2005, Statistics in Medicine 24; Efron 1979.
    """
    if not np.isin(np.concatenate((first, second)), (0.0, 1.0)).all():
        return mean_interval(second - first)
    count = len(first) + 2
    gained, lost = float(((second > first).sum()) + 0.5), float(((second < first).sum()) + 0.5)
    centre = (gained - lost) / count
    half = _Z * (gained + lost - (gained - lost) ** 2 / count) ** 0.5 / count
    return max(centre - half, -1.0), min(centre + half, 1.0)


def sign_flip_test(changes: np.ndarray) -> float:
    """Return the two-sided p-value of a paired permutation test: how often random signs of [P] changes give a sum as far from 0.

    Where all changes are of one size it is exact, and the same as the sign test and McNemar's exact test. So it is for up to 12 changes of
    different sizes; for more, signs are drawn 20,000 times with a fixed seed, and the observed signs count with the drawn ones.

    Source: Fisher 1935; McNemar 1947; counting the observed signs: Phipson and Smyth 2010.
    """
    sizes = np.abs(changes[changes != 0])
    if not len(sizes):
        return 1.0
    if np.allclose(sizes, sizes[0], rtol=1e-9):
        return _sign_test(len(sizes), int((changes > 0).sum()))
    observed = abs(float(changes.sum())) * (1 - 1e-9)  # sums that are equal may differ by rounding
    if len(sizes) <= _MOST_ENUMERATED:
        signs = 1 - 2 * ((np.arange(2 ** len(sizes))[:, None] >> np.arange(len(sizes))) & 1)
        return float((np.abs(signs @ sizes) >= observed).mean())
    random, at_once = np.random.default_rng(0), max(1, _MOST_DRAWN // len(sizes))
    reached = sum(
        int((np.abs((2 * random.integers(2, size=(min(at_once, _NUM_FLIPS - begun), len(sizes))) - 1) @ sizes) >= observed).sum())
        for begun in range(0, _NUM_FLIPS, at_once))
    return (reached + 1) / (_NUM_FLIPS + 1)


def _sign_test(count: int, positive: int) -> float:
    """Return the two-sided p-value of `positive` heads in `count` throws of a fair coin, such as 0.0625 for 5 in 5."""
    tail = sum(comb(count, k) for k in range(min(positive, count - positive) + 1))
    return min(1.0, 2 * tail / 2**count)


def _largest_changes(first: EvaluatedSet, second: EvaluatedSet, pairs: Sequence[tuple[int, int]], *, most: int) -> tuple[RewardChange, ...]:
    changes = [
        RewardChange(prompt.row.prompt, prompt.row.answer, float(first.rewards[i]), float(second.rewards[j]), _text(prompt),
               _text(second.prompts[j]))
        for i, j in pairs for prompt in [first.prompts[i]] if not _are_equal(first.rewards[i], second.rewards[j])]
    ranked = sorted(changes, key=lambda change: -abs(change.difference))
    return tuple(ranked[:most])


def _text(prompt: EvaluatedPrompt) -> str:
    """Return the first answer, or why there is none."""
    return prompt.samples[0].text if prompt.samples else prompt.failure
