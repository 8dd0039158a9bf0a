"""Decides whether an engine's proof of a version is believed. Publishers and the fleet call it; it does no I/O.

The canary's log-probabilities of an engine differ from the trainer's, because it computes by other kernels and often in another number
format: by a bias that stays, and by rounding that changes as the weights move. One training step may move the canary by far less than that.
So an engine that cannot show its weights is judged by *differences*: how far it moved since a version that it is known to have served,
against how far the trainer moved, token by token. A bias cancels, be it the same for all tokens or different for each. The noise is the
part of the engine's move across the trainer's, which no step that it took or missed explains: two proofs of one version would not show it,
because an engine that computes the same again rounds the same way. A move that is smaller than the noise shows nothing, and no engine is
refused for it; moves add up until they are larger.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from offbeat.data.image_store import FIRST_ID
from offbeat.types import Version
from offbeat.weights.protocol import Manifest, Proof

TOLERANCES: dict[str, float] = {"float32": 1e-3, "bfloat16": 0.5, "int8": 2.0, "fp8": 2.0, "int4": 6.0, "nf4": 6.0}
"""Largest root mean square, over the canary's tokens, of the difference between trainer and engine in nats, by number format or form of the
weights. The file docs/weights.md has the measurements."""

_SEPARATION = 5.0
"""Standard deviations of the noise between "it moved" and the threshold half-way, and from there to "it did not"."""
_DEPARTURE = 4.0
_DEPARTED_SHARE = 0.02
"""An engine has departed from the trainer if it is off by more than _DEPARTURE times its noise, and by more than _DEPARTED_SHARE of the way
that the trainer itself has gone."""
_NUM_NOISES = 8
_NOISE_GROWTH = 3.0
"""Largest noise as a multiple of the first: noise changes with the policy, but an engine that goes wrong a little at a time must not pass
for a noisy one."""
_RESOLUTION = 1 / 16
"""Smallest noise of a move as a share of the spread: where weights move by less than an engine rounds, it may not move at all."""
_LEAST_NOISE = 2e-6
"""Smallest noise in nats: float32 kernels differ by it, although a canary of few tokens may happen to show less."""


BY_WEIGHTS, BY_CANARY, NOT_PROVEN = MEANS = ("by_weights", "by_canary", "not_proven")
"""What the versions that engines serve are proven by: the weights that they compute with, the canary's moves, or nothing."""


class Outcome(Enum):
    """Result of a proof: the engine serves the version; that is not certain; it serves something else."""

    PROVEN = "proven"
    UNSURE = "inconclusive"
    REFUSED = "refused"


@dataclass(frozen=True)
class Verdict:
    """Result of a proof, with its reason.

    Attributes:
        gap: absolute difference of the canary's mean log-probability between trainer and engine, in nats.
        reason: why the engine is refused, or why its proof shows nothing; empty if it is proven.
        by_weights: whether it is proven by the fingerprint of the weights in use, rather than by its canary.
    """

    outcome: Outcome
    gap: float
    reason: str = ""
    by_weights: bool = False

    @property
    def refused(self) -> bool:
        return self.outcome is Outcome.REFUSED

    @property
    def means(self) -> str:
        """What it is proven by, one of `MEANS`."""
        return NOT_PROVEN if self.outcome is not Outcome.PROVEN else BY_WEIGHTS if self.by_weights else BY_CANARY


@dataclass(frozen=True, eq=False)
class _Point:
    """The canary's log-probabilities at one version: `trainer` and `engine` are [N] float64."""

    version: Version
    trainer: np.ndarray
    engine: np.ndarray

    @property
    def off(self) -> np.ndarray:
        """[N] float64: difference of the engine from the trainer in each log-probability, in nats."""
        return self.engine - self.trainer

    @property
    def bias(self) -> float:
        """Mean of `off` over all tokens, in nats."""
        return float(np.mean(self.off))

    @property
    def spread(self) -> float:
        """Root mean square of `off` without its mean, in nats: an upper bound of the engine's noise in one token.

        A difference of kernels that stays, but is not the same for all tokens, is in it.
        """
        return _rms(self.off - self.bias)


@dataclass
class _Standing:
    """The proofs of an engine that later ones are compared with.

    Attributes:
        last: its proof of the last version that it was proven to serve.
        noises: its spread at the latest versions that it was proven to serve, at most 8.
        offs: root mean square of `_Point.off` at these versions, bias included.
    """

    first: _Point
    last: _Point
    noises: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_NOISES))
    offs: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_NOISES))

    @property
    def noise(self) -> float:
        """Bound of the noise in one token's log-probability, in nats, from its spread; a move may show that it is less."""
        return max(min(max(self.noises), _NOISE_GROWTH * self.first.spread), _LEAST_NOISE)

    @property
    def off(self) -> float:
        """Difference that the engine may have in one token, in nats: its noise, and a bias, which may change as the weights move."""
        return max(min(max(self.offs), _NOISE_GROWTH * _rms(self.first.off)), _LEAST_NOISE)

    def proven(self, point: _Point) -> None:
        """Note that the engine serves the version of this proof."""
        self.last = point
        self.noises.append(point.spread)
        self.offs.append(_rms(point.off))


class ProofJudge:
    """Judges the proofs of all engines, and remembers earlier proofs of each."""

    def __init__(self, *, tolerance: float) -> None:
        """`tolerance` is the largest root mean square, in nats, of the difference between trainer and engine at any version."""
        self.tolerance = tolerance
        self._standings: dict[tuple[str, str], _Standing] = {}

    @classmethod
    def of(cls, tolerance: float, *forms: str) -> "ProofJudge":
        """Return a judge with a configured tolerance; 0 takes that of the coarsest form of weights, such as 1e-3 for "float32".

        The forms are number formats, and those to which the engine's or the trainer's weights are rounded; "none" counts for nothing.
        """
        return cls(tolerance=tolerance or max(TOLERANCES[form] for form in forms if form != "none"))

    def judge(self, engine: str, wanted: Manifest, proof: Proof) -> Verdict:
        """Judge an engine's proof of a version of the whole weights or of an adapter."""
        told, expected = (_of_text(wanted.canary, logprobs) for logprobs in (proof.canary_logprobs, wanted.canary_logprobs))
        gap = float(abs(np.mean(told) - np.mean(expected)))

        def refuse(reason: str) -> Verdict:
            return Verdict(Outcome.REFUSED, gap, reason)

        if proof.version != wanted.version:
            return refuse(f"serves version {proof.version} instead of {wanted.version}")
        if proof.fingerprint is not None and proof.fingerprint != wanted.fingerprint:
            what = "its weights have" if proof.live else "the weights that it has read have"
            return refuse(f"{what} fingerprint {proof.fingerprint[:12]} instead of {wanted.fingerprint[:12]}")
        if reason := self.objection(expected, told):
            return refuse(reason)
        if proof.fingerprint is not None and proof.live:
            return Verdict(Outcome.PROVEN, gap, by_weights=True)
        point = _Point(wanted.version, np.asarray(expected), np.asarray(told))
        if point.trainer.shape != point.engine.shape:
            return Verdict(Outcome.UNSURE, gap, "inconclusive: only the mean of its canary is known")
        outcome, reason = self._compare((engine, wanted.adapter), point)
        return Verdict(outcome, gap, reason)

    def objection(self, expected: Sequence[float], told: Sequence[float]) -> str:
        """Return why a canary is refused without regard to earlier ones; empty if it is not.

        Both are [n] log-probabilities, the trainer's and those that the engine told; of either, the mean alone will do.
        """
        off = np.asarray(told) - np.asarray(expected) if len(told) == len(expected) else np.array([np.mean(told) - np.mean(expected)])
        size = _rms(off)
        if size <= self.tolerance:  # false for NaN, which is no proof either
            return ""
        return f"its canary log-probabilities are off by {size:.3g}, more than {self.tolerance:g}"

    def forget(self, engine: str) -> None:
        """Forget an engine that was started anew: its noise has to be measured again, and it has not served any version yet."""
        self._standings = {key: standing for key, standing in self._standings.items() if key[0] != engine}

    def forget_adapter(self, adapter: str) -> None:
        """Forget all proofs of an adapter: another one may come under its name."""
        self._standings = {key: standing for key, standing in self._standings.items() if key[1] != adapter}

    def _compare(self, key: tuple[str, str], point: _Point) -> tuple[Outcome, str]:
        standing = self._standings.get(key)
        if standing is None or standing.first.trainer.shape != point.trainer.shape:
            standing = self._standings[key] = _Standing(point, point)
            standing.proven(point)
            bias = f" and its bias of {point.bias:.2g}" if abs(point.bias) > _SEPARATION * point.spread / len(point.off) ** 0.5 else ""
            return Outcome.UNSURE, f"inconclusive: its first proof shows its noise of {standing.noise:.2g} a token{bias}, and no more"
        # The difference of two proofs has the noise of both.
        outcome, reason = _movement(standing.last, point, standing.noise * 2**0.5)
        if outcome is not Outcome.REFUSED and (departed := _departure(standing.first, point, standing.off * 2**0.5)):
            return Outcome.REFUSED, departed
        if outcome is Outcome.PROVEN:
            standing.proven(point)
        return outcome, reason


def _of_text(canary: Sequence[int], logprobs: Sequence[float]) -> Sequence[float]:
    """Return the log-probabilities of a canary's tokens but the first without those of images' placeholders, which mean nothing.

    If the mean alone is known, it is returned.
    """
    if len(logprobs) != len(canary) - 1:
        return logprobs
    return [logprob for token, logprob in zip(canary[1:], logprobs, strict=True) if token < FIRST_ID]


def _movement(before: _Point, point: _Point, noise: float) -> tuple[Outcome, str]:
    """Decide whether the engine moved with the trainer since the version that it was proven to serve last; returns a reason, too.

    `noise` bounds the noise of a move in one token, in nats, by the engine's spread.
    """
    way, moved = point.trainer - before.trainer, point.engine - before.engine
    length = float(np.linalg.norm(way))
    noise = min(noise, max(_across(moved, way), _RESOLUTION * noise, _LEAST_NOISE))
    if length < 2 * _SEPARATION * noise:
        return Outcome.UNSURE, (
            f"inconclusive, within noise: version {point.version} moves the canary by {_rms(way):.2g} a token from version "
            f"{before.version}, and two proofs of this engine differ by {noise:.2g} for no reason")
    # The engine's move along the trainer's: 1 if it took all steps since, 0 if it took none. Its move across is noise.
    share = float(moved @ way) / length**2
    if share < 0.5:
        return Outcome.REFUSED, (
            f"its canary went {share:.0%} of the way from version {before.version} to {point.version}, {_rms(way):.2g} a token at a noise "
            f"of {noise:.2g}: it samples older weights")
    return Outcome.PROVEN, ""


def _across(moved: np.ndarray, way: np.ndarray) -> float:
    """Return the root mean square per degree of freedom of `moved` [N] without its part along `way` [N], in nats."""
    length = float(np.linalg.norm(way))
    along = way * (float(moved @ way) / length**2) if length else np.zeros_like(way)
    return float(np.linalg.norm(moved - along)) / max(len(way) - 1, 1) ** 0.5


def _departure(first: _Point, point: _Point, noise: float) -> str:
    """Return why an engine that left the trainer's way is refused, e.g. as it took a part of new weights; empty if it did not."""
    off, way = _rms(point.off - first.off), _rms(point.trainer - first.trainer)
    if off <= max(_DEPARTURE * noise, _DEPARTED_SHARE * way):
        return ""
    return (
        f"its canary is off by {off:.2g} a token more than at version {first.version}, at a noise of {noise:.2g} and a way of {way:.2g}: "
        "it samples weights of which a part is not this version's")


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
