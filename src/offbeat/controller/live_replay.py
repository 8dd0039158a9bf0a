"""Generates recorded answers again while a run is replayed, with an engine on each version of the weights, and compares the tokens.

Called by `controller.step_replay`, which computes the versions one after another. An answer whose weights were switched in its middle is
generated in parts: each version goes on after the recorded tokens of those before it. So one difference does not hide the next.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from offbeat.aio import gather_all
from offbeat.config.root import Config
from offbeat.controller.parts import Publishing
from offbeat.fleet.publication import PublishReport
from offbeat.inference.hearing import Hearing, KnownSample
from offbeat.inference.sampling import Sample, Sampling
from offbeat.journal.history import PastStep
from offbeat.rollout.episode import Generate
from offbeat.rollout.randomness import mixed
from offbeat.rollout.recorded_spans import RecordedSpan, spans_of
from offbeat.types import Version
from offbeat.weights.proof import TOLERANCES

_NUM_LIKELIEST = 20
_NEVER_S = 1e6


@dataclass(frozen=True)
class LiveStep:
    """Answers of a step that were generated again.

    Attributes:
        num_equal: tokens up to the first difference of each answer, or part of one, that an engine sampled again.
        num_missing: tokens that were not, because their version comes before the replay's first one.
        logprob_gap: largest difference of the log-probabilities of equal tokens, in nats.
        difference: the first token that came out otherwise, and why, as a sentence; "" if all are equal.
    """

    num_groups: int
    num_tokens: int
    num_equal: int
    num_missing: int
    logprob_gap: float
    difference: str


@dataclass(frozen=True)
class LiveEngines:
    """An engine that takes the versions of a replay, and samples with each."""

    publisher: Publishing
    generate: Generate


@dataclass(frozen=True)
class ComparedSpan:
    """A span and what an engine has sampled in its place; `gap` is the largest difference of equal tokens' log-probabilities, in nats."""

    span: RecordedSpan
    sampled: Sample
    num_equal: int
    gap: float
    is_equal: bool


@dataclass
class _Step:
    """The chosen groups of a step; `differences` has a sentence on the first span of each version that differs, by its place."""

    num_groups: int
    spans: list[RecordedSpan]
    compared: list[ComparedSpan] = field(default_factory=list)
    differences: dict[int, str] = field(default_factory=dict)


class LiveReplay:
    """Generates the first `num_groups` groups of each step again; 0 for all."""

    def __init__(self, engines: LiveEngines, steps: Sequence[PastStep], *, config: Config, sampling: Sampling, num_groups: int) -> None:
        self._engines = engines
        self._steps = {step.global_step: step for step in steps}
        self._open: dict[int, _Step] = {}
        self._config = config
        self._sampling = replace(sampling, routes=False, supports=False)
        self._num_groups = num_groups

    async def take_version(self, version: Version, *, step: int, changed: str = "") -> None:
        """Bring the weights of the ranks to the engine as a version, with which `step` begins, and generate what it has sampled.

        `changed` is the first difference of the step that made this version, as a sentence; "" if there is none.
        """
        await self._engines.publisher.publish(version, on_served=_served)
        await self._engines.publisher.settle()
        # A step trains on tokens of the version before it, and of as many older ones as the bound allows.
        for number in range(step, step + 1 + self._config.rollout.max_head_offpolicyness):
            if number in self._steps and number not in self._open:
                self._open[number] = await asyncio.to_thread(self._read_spans, self._steps[number])
        for each in self._open.values():
            await self._generate(each, version, changed)

    def of_step(self, number: int) -> LiveStep:
        """Return what came of a step, all of whose versions have been served."""
        step = self._open.pop(number)
        num_tokens = sum(len(each.span.tokens) - each.span.num_begun for each in step.compared)
        num_all = sum(len(span.tokens) - span.num_begun for span in step.spans)
        return LiveStep(
            step.num_groups, num_tokens, sum(each.num_equal for each in step.compared), num_all - num_tokens,
            max((each.gap for each in step.compared), default=0.0), step.differences[min(step.differences)] if step.differences else "")

    async def _generate(self, step: _Step, version: Version, changed: str) -> None:
        """Generate what a version has sampled for a step, and say of the first difference why, while the engine has this version."""
        places = [place for place, span in enumerate(step.spans) if span.version == version]
        spans = [step.spans[place] for place in places]
        samples = await gather_all(
            self._ask_engine(span, begun=span.num_begun, end=len(span.tokens), sampling=self._sampling) for span in spans)
        compared = list(map(compare_span, spans, samples))
        step.compared += compared
        first = next((place for place, each in zip(places, compared, strict=True) if not each.is_equal), None)
        if first is not None:
            step.differences[first] = await self._told(compared[places.index(first)], changed)

    def _read_spans(self, past: PastStep) -> _Step:
        chosen = past.groups[: self._num_groups or None]
        seed = self._config.run.seed if self._config.inference.seeded_requests else None
        spans = [
            span for stored in chosen
            for span in spans_of(
                stored.read(), seed=None if seed is None else mixed(seed, stored.prompt_id, past.num_tries.get(stored.prompt_id, 0)))]
        return _Step(len(chosen), spans)

    async def _ask_engine(self, span: RecordedSpan, *, begun: int, end: int, sampling: Sampling) -> Sample:
        """Sample an answer up to its token `end`, after its first `begun` recorded ones."""
        known = KnownSample(*(column[:begun].tolist() for column in (span.tokens, span.logprobs, span.versions)))
        [sample] = await self._engines.generate(span.prompt, replace(
            sampling, max_new_tokens=end, seed=span.seed, first_sample=span.first_sample,
            hearing=Hearing(_NEVER_S, [known]) if begun else None), n=1)
        return sample

    async def _told(self, found: ComparedSpan, changed: str) -> str:
        span, at = found.span, found.num_equal + found.span.num_begun
        now = int(found.sampled.tokens[at]) if at < len(found.sampled.tokens) else None
        was = int(span.tokens[at])
        where = f"in the group of prompt {span.prompt_id}, sample {span.sample}, token {span.start + at}"
        what = f"the engine ended the answer, and sampled {was} in the run" if now is None else (
            f"the engine sampled token {now}, and {was} in the run")
        return f"{where}: {what}, by version {span.version} of the weights; {await self._reason(found, at, was, changed)}"

    async def _reason(self, found: ComparedSpan, at: int, was: int, changed: str) -> str:
        """Say why a token differs: ask the engine how likely the recorded token is to it."""
        span = found.span
        if changed:
            return f"the step that made these weights was not equal: {changed}"
        sample = await self._ask_engine(span, begun=at, end=at + 1, sampling=replace(self._sampling, top_logprobs=_NUM_LIKELIEST))
        likeliest = dict(sample.top_logprobs[-1]) if sample.top_logprobs else {}
        return reason_of(found, was=was, now=likeliest.get(was), config=self._config)


def compare_span(span: RecordedSpan, sampled: Sample) -> ComparedSpan:
    """Compare an answer with what was sampled in its place, from the span's first token on."""
    wanted, found = span.tokens[span.num_begun :], sampled.tokens[span.num_begun :]
    length = min(len(wanted), len(found))
    unlike = np.flatnonzero(wanted[:length] != found[:length])
    num_equal = int(unlike[0]) if unlike.size else length
    equal = slice(span.num_begun, span.num_begun + num_equal)
    gaps = np.abs(span.logprobs[equal].astype(np.float64) - sampled.token_logprobs[equal])
    return ComparedSpan(span, sampled, num_equal, float(gaps.max(initial=0.0)), num_equal == len(wanted) == len(found))


def reason_of(found: ComparedSpan, *, was: int, now: float | None, config: Config) -> str:
    """Say why a token differs, of log-probability `now` in the replay; None if it is not among the 20 likeliest that can be drawn."""
    span, at, inference = found.span, found.span.num_begun + found.num_equal, config.inference
    before = float(span.logprobs[at])
    gap = abs(now - before) if now is not None else 0.0
    form = inference.quantization if inference.quantization != "none" else config.canary_dtype
    if max(gap, found.gap) > TOLERANCES[form]:
        told = f"the log-probabilities of the tokens before it differ by up to {found.gap:.2g}"
        if now is not None and gap > TOLERANCES[form]:
            told = f"{was} has the log-probability {now:.6g} now, and had {before:.6g}"
        if config.weights.interrupt == "keep" and span.num_begun:
            return f"{told}: the run's engine went on with the keys and values of an older version (weights.interrupt = 'keep')"
        return f"{told}: the run's engine had other weights, or computed with another kernel or number format"
    told = f"{was} has the same log-probability as then, up to {gap:.1g}" if now is not None else (
        f"{was} is not among the {_NUM_LIKELIEST} likeliest tokens that can be drawn now")
    if span.seed is None and config.rollout.temperature > 0:
        return f"{told}; engines drew random numbers that are not recorded, as inference.seeded_requests was off"
    if now is None:
        return f"{told}; top_p or top_k leaves it out by a rounding, or it is an unlikely one"
    if not config.for_engines.inference.batch_invariant:
        return f"{told}; rounding decided, as batches had other shapes (inference.batch_invariant was off)"
    return f"{told}; the request had another seed or other settings, as one of a workflow of your own may have"


def _served(_report: PublishReport) -> None:
    """Do nothing: `settle` waits for it."""
