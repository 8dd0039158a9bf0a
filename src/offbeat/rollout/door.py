"""Where trajectories come in: what a workflow returned is checked here before anything computes with it. Pure; the executor calls it.

What a workflow returns is user code's word. `members` takes it apart, and `Door` marks each trajectory that cannot be trained on with the
reason, so that it alone is left out of its group. What is left has tokens of the vocabulary, log-probabilities that a sampler may have
given, versions that engines served meanwhile, a finite reward, and a length that fits.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from offbeat.data.trajectory import Trajectory, Unusable
from offbeat.errors import CodeError, shorten
from offbeat.types import Version

LEAST_LOGPROB, MOST_LOGPROB = -104.0, 1e-3
"""The least float32 probability is exp(-103.3); and a sampler that normalises in a coarse format may come out a little above 0."""

_LIKELY = 1e-3
"""What another sample was drawn with, where the first is said to have been certain; below it might be a probability that rounds to 0."""


def members(returned: object, group_size: int, *, workflow: str) -> tuple[Trajectory, ...]:
    """The trajectories of a group; what is none is malformed.

    Args:
        returned: what the workflow of this name gave.

    Raises:
        CodeError: it is no series of `group_size` things.
    """
    wanted = f"the workflow {workflow} must return {group_size} trajectories, one for each sample"
    if not isinstance(returned, Iterable) or isinstance(returned, str | bytes | dict):
        raise CodeError(f"{wanted}, got {shorten(returned)}")
    things = tuple(islice(returned, group_size + 1))
    if len(things) != group_size:
        raise CodeError(f"{wanted}, got {'more' if len(things) > group_size else len(things)}; one without a reward has the reward NaN")
    return tuple(thing if isinstance(thing, Trajectory) else _no_trajectory(thing) for thing in things)


def _no_trajectory(thing: object) -> Trajectory:
    empty = np.zeros(0)
    return Trajectory(empty, empty, empty, empty, 0.0, f"malformed: the workflow returned {shorten(thing)} in the place of a Trajectory")


@dataclass(frozen=True)
class Door:
    """What trajectories have to be like.

    Attributes:
        vocab_size: of the model; token ids are below it.
        too_long: why a trajectory cannot be trained on for its length; empty where it can.
    """

    vocab_size: int = 2**31 - 1
    too_long: Callable[[Trajectory], str] = lambda _trajectory: ""

    def check(self, trajectories: Sequence[Trajectory], *, oldest: Version, newest: Version) -> tuple[Trajectory, ...]:
        """A group's trajectories, those that cannot be trained on marked with the reason.

        Args:
            oldest: version that engines served when the group was admitted; the gate counts the age of its tokens from there.
            newest: version that they may serve by now.
        """
        checked = [t if t.unusable else _mark(t, *self._fault(t, oldest, newest)) for t in trajectories]
        for index, why in _false_certainties(checked):
            checked[index] = _mark(checked[index], "wrong logprobs", why)
        return tuple(checked)

    def _fault(self, t: Trajectory, oldest: Version, newest: Version) -> tuple[Unusable, str]:
        if not len(t):
            return "malformed", "it has no tokens"
        if t.loss_mask[0]:
            return "malformed", "it begins with a generated token; put its prompt first"
        if (outside := (t.tokens < 0) | (t.tokens >= self.vocab_size)).any():
            at = np.argmax(outside)
            return "wrong tokens", f"token {at} has the id {t.tokens[at]}, which is not in the vocabulary of {self.vocab_size} tokens"
        logprobs, versions = t.rollout_logprobs, t.versions
        if (wrong := t.loss_mask & ~((logprobs >= LEAST_LOGPROB) & (logprobs <= MOST_LOGPROB))).any():  # also NaN
            at = np.argmax(wrong)
            return "wrong logprobs", (
                f"generated token {at} has the log-probability {logprobs[at]:g}, where a sampled one has {LEAST_LOGPROB:g} to 0; take what"
                " the engine gave for it")
        if (wrong := t.loss_mask & ((versions < oldest) | (versions > newest))).any():
            at = np.argmax(wrong)
            return "wrong versions", (
                f"generated token {at} is of version {versions[at]}, where engines served {oldest} to {newest} while its group was played;"
                " take what the engine gave for it")
        return "too long", self.too_long(t)


ANY = Door()
"""Knows no vocabulary and no length."""


def _mark(trajectory: Trajectory, kind: Unusable, why: str) -> Trajectory:
    return replace(trajectory, reason=f"{kind}: {why}") if why else trajectory


def _false_certainties(group: Sequence[Trajectory]) -> list[tuple[int, str]]:
    """Positions of trajectories whose log-probabilities are all 0 and cannot be, each with the proof.

    A log-probability of 0 is a probability of 1. That is what a sure policy, top_k = 1 or a single choice give, so it is no fault by
    itself, even of a whole answer. But after the same tokens and under the same version, no other sample can then have drawn another token
    with any probability.
    """
    certain = [i for i, t in enumerate(group) if not t.unusable and t.loss_mask.any() and (t.rollout_logprobs[t.loss_mask] >= 0).all()]
    if not certain:
        return []
    different = {t.tokens.tobytes(): t for t in group if not t.unusable}
    found = []
    for index in certain:
        for other in different.values():
            if why := _contradiction(group[index], other):
                found.append((index, why))
                break
    return found


def _contradiction(certain: Trajectory, other: Trajectory) -> str:
    shared = min(len(certain), len(other))
    differs = certain.tokens[:shared] != other.tokens[:shared]
    if not differs.any():
        return ""
    at = int(np.argmax(differs))
    both_drawn = certain.loss_mask[at] and other.loss_mask[at] and certain.versions[at] == other.versions[at]
    probability = float(np.exp(other.rollout_logprobs[at]))
    if not both_drawn or probability < _LIKELY:
        return ""
    return (
        f"all log-probabilities are 0, as if each token had been certain, but another sample drew another token {at} with a probability of"
        f" {min(probability, 1.0):.2g}; take what the engine gave")
