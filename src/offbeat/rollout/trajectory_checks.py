"""Checks the trajectories that a workflow returns before anything computes with them. Pure; called by the executor.

Workflows are user code and cannot be trusted. `members` takes their result apart, and `TrajectoryChecks` marks each trajectory that
cannot be trained on with the reason, so that only its episode is left out of its group. The others have tokens of the vocabulary,
log-probabilities that a sampler can have returned, versions that engines served in the meantime, a finite reward, and a length that fits.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from offbeat.data.image_store import is_image
from offbeat.data.trajectory import Trajectory, Unusable
from offbeat.errors import CodeError, shorten
from offbeat.types import Version

MOST_CHAINS = 1000
"""Most trajectories of an episode, on average over a group: a workflow may return an endless iterator."""

LEAST_LOGPROB, MOST_LOGPROB = -104.0, 1e-3
"""The smallest positive float32 is near exp(-103.3), and a sampler that normalizes in low precision may return slightly more than 0."""

_LIKELY = 1e-3
"""Smallest probability of another sample's token that disproves the certainty; a lower one may itself have been rounded to 0."""


def members(returned: object, group_size: int, *, workflow: str) -> tuple[Trajectory, ...]:
    """Return the trajectories of a group's episodes; an element that is not a trajectory is replaced by one marked malformed.

    So are trajectories of one agent in one episode whose rewards differ.

    Raises:
        CodeError: it is not an iterable of the trajectories of `group_size` episodes.
    """
    wanted = f"the workflow {workflow} must return {group_size} trajectories, one for each sample"
    if not isinstance(returned, Iterable) or isinstance(returned, str | bytes | dict):
        raise CodeError(f"{wanted}, got {shorten(returned)}")
    found, episodes = [], set()
    for thing in returned:
        trajectory = thing if isinstance(thing, Trajectory) else _no_trajectory(thing)
        episodes.add(("alone", len(found)) if trajectory.episode is None else trajectory.episode)
        found.append(trajectory)
        if len(episodes) > group_size or len(found) > group_size * MOST_CHAINS:
            break
    if len(found) > len(episodes):
        wanted = f"the workflow {workflow} must return the trajectories of {group_size} episodes, at most {MOST_CHAINS} of each"
    if len(episodes) != group_size or len(found) > group_size * MOST_CHAINS:
        got = "more" if len(episodes) >= group_size else len(episodes)
        raise CodeError(f"{wanted}, got {got}; one without a reward has the reward NaN")
    return _with_equal_rewards(found)


def _with_equal_rewards(trajectories: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
    """Mark trajectories that have another reward than the first of the same episode and agent."""
    firsts: dict[tuple[int, str], Trajectory] = {}
    checked = []
    for t in trajectories:
        if t.episode is not None and t.unusable is None:
            first = firsts.setdefault((t.episode, t.agent), t)
            if (t.reward, t.named_rewards) != (first.reward, first.named_rewards):
                t = _mark(t, "malformed", (
                    f"its reward is {t.reward:g}, but another trajectory of the same episode and agent has {first.reward:g}; give all of"
                    " them the episode's reward, and what one earned alone to its turns"))
        checked.append(t)
    return tuple(checked)


def _no_trajectory(thing: object) -> Trajectory:
    empty = np.zeros(0)
    return Trajectory(empty, empty, empty, empty, 0.0, f"malformed: the workflow returned {shorten(thing)} in the place of a Trajectory")


@dataclass(frozen=True)
class TrajectoryChecks:
    """Requirements that trajectories must meet.

    Attributes:
        vocab_size: vocabulary size of the model; upper bound (exclusive) of token IDs.
        max_row_tokens: most tokens of a trajectory's row, `train.max_tokens_per_microbatch`.
        context: most of them that the model reads.
    """

    vocab_size: int = 2**31 - 1
    max_row_tokens: int = sys.maxsize
    context: int = sys.maxsize

    def check(self, trajectories: Sequence[Trajectory], *, oldest: Version, newest: Version) -> tuple[Trajectory, ...]:
        """Return a group's trajectories; each that cannot be trained on is marked with the reason.

        Args:
            oldest: version that engines served when the group was admitted; the gate counts the age of its tokens from there.
            newest: latest version that engines may serve by now.
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
        # Minima and maxima of whole arrays are fast, and clear nearly all trajectories; in the others, each token is checked.
        if t.tokens.view(np.uint32).max() >= self.vocab_size:  # a negative one is large without a sign
            wrong = (t.tokens < 0) | ((t.tokens >= self.vocab_size) & ~(is_image(t.tokens) & ~t.loss_mask))
            at = np.argmax(wrong)
        if t.tokens.min() < 0 or (t.tokens.max() >= self.vocab_size and wrong.any()):
            return "wrong tokens", f"token {at} has the id {t.tokens[at]}, which is not in the vocabulary of {self.vocab_size} tokens"
        logprobs, versions = t.rollout_logprobs, t.versions
        within = logprobs.min() >= LEAST_LOGPROB and logprobs.max() <= MOST_LOGPROB  # not if one is NaN
        if not within and (wrong := t.loss_mask & ~((logprobs >= LEAST_LOGPROB) & (logprobs <= MOST_LOGPROB))).any():
            at = np.argmax(wrong)
            return "wrong logprobs", (
                f"generated token {at} has the log-probability {logprobs[at]:g}, where a sampled one has {LEAST_LOGPROB:g} to 0; take what"
                " the engine gave for it")
        within = t.head_version >= oldest and versions.max() <= newest
        if not within and (wrong := t.loss_mask & ((versions < oldest) | (versions > newest))).any():
            at = np.argmax(wrong)
            return "wrong versions", (
                f"generated token {at} is of version {versions[at]}, where engines served {oldest} to {newest} while its group was played;"
                " take what the engine gave for it")
        return "too long", self._too_long(t.row_tokens)

    def _too_long(self, needed: int) -> str:
        """Return why a row of this many tokens cannot be trained on; empty if it can."""
        if needed > self.max_row_tokens:
            return f"a row of {needed} tokens exceeds train.max_tokens_per_microbatch = {self.max_row_tokens}"
        return f"a row of {needed} tokens exceeds the model's context of {self.context}" if needed > self.context else ""


ANY = TrajectoryChecks()
"""Accepts any vocabulary and any length."""


def _mark(trajectory: Trajectory, kind: Unusable, why: str) -> Trajectory:
    return replace(trajectory, reason=f"{kind}: {why}") if why else trajectory


def _false_certainties(group: Sequence[Trajectory]) -> list[tuple[int, str]]:
    """Find trajectories whose log-probabilities are all 0 although that is impossible; return their positions, each with the proof.

    A log-probability of 0 is a probability of 1. A confident policy, top_k = 1 or a single choice produce it, so by itself it is no error,
    even for a whole answer. But then no other sample can have drawn a different token after the same tokens and under the same version.
    """
    certain = [i for i, t in enumerate(group) if not t.unusable and _is_certain(t)]
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


def _is_certain(t: Trajectory) -> bool:
    """Whether something was generated, and all of it with a log-probability of 0."""
    first = t.prompt_len
    return first < len(t) and t.rollout_logprobs[first] >= 0 and bool((t.rollout_logprobs[t.loss_mask] >= 0).all())


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
