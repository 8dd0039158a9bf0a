"""Confidence intervals of means over prompts, at 95 %. Pure.

Prompts are the units that are drawn at random: several answers to one prompt say more of that prompt, and little of others. So everything
here takes one value for each prompt, as clustered standard errors would (Miller 2024, arXiv:2411.00640, section 2.2).
"""

import numpy as np

Interval = tuple[float, float]

_Z = 1.959964
"""The 97.5 % quantile of the normal distribution."""
_NUM_RESAMPLES = 2000
_MOST_DRAWN = 1 << 20
"""Prompts drawn at a time, which bounds the memory of a resampling."""


def share_interval(values: np.ndarray, *, num_samples: int) -> Interval:
    """Return an interval, within 0 and 1, for the mean of [P] shares, such as the share of right answers or an estimate of pass@k.

    It is Wilson's score interval with an effective number of prompts: as many as would give the variance that was observed between prompts,
    if each were simply right or wrong. With one answer to each prompt these are the prompts. Several answers, `num_samples` to each, can
    add to it, up to the number of all answers.

    Source: Wilson 1927; the effective number as in Korn and Graubard 1998.
    """
    count, mean = len(values), float(values.mean())
    effective = float(count)
    if num_samples > 1 and count > 1 and 0 < mean < 1:
        of_mean = float(values.var(ddof=1)) / count
        effective = min(max(mean * (1 - mean) / of_mean if of_mean else np.inf, count), count * num_samples)
    return _wilson(mean, effective)


def has_fallen(before: float, after: float, *, num_prompts: int) -> bool:
    """Return whether a share of right prompts is lower than before by more than chance explains, with 95 % confidence.

    If both shares are of the same `num_prompts` prompts, or of several answers to each, it errs on the side of no.

    Source: Newcombe 1998, method 10: the interval of a difference from Wilson's intervals of both shares.
    """
    low, high = _wilson(before, num_prompts)[0], _wilson(after, num_prompts)[1]
    return before - after > ((before - low) ** 2 + (high - after) ** 2) ** 0.5


def _wilson(mean: float, count: float) -> Interval:
    centre = (mean + _Z * _Z / (2 * count)) / (1 + _Z * _Z / count)
    half = _Z / (1 + _Z * _Z / count) * (mean * (1 - mean) / count + _Z * _Z / (4 * count**2)) ** 0.5
    return max(centre - half, 0.0), min(centre + half, 1.0)


def mean_interval(values: np.ndarray) -> Interval:
    """Return an interval for the mean of any [P] numbers, such as rewards or differences of two models, by a bootstrap over prompts.

    Prompts are drawn with replacement 2000 times, with a fixed seed; the ends are the 2.5 % and 97.5 % quantiles of the means. It is
    somewhat too narrow below about 30 prompts, and says nothing where all values are equal.

    Source: percentile bootstrap, Efron 1979.
    """
    random, count = np.random.default_rng(0), len(values)
    at_once = max(1, _MOST_DRAWN // count)
    means = [
        values[random.integers(count, size=(min(at_once, _NUM_RESAMPLES - begun), count))].mean(axis=1)
        for begun in range(0, _NUM_RESAMPLES, at_once)]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return float(low), float(high)
