"""The calls of engines that running groups make: their answers are recorded while the groups run, and given again after a restart.

    watched        consumes a group's calls; produces their answers, those of an earlier process where it has made the same call
    _tell          consumes what is not recorded yet, of groups that still run; produces records; called `RECORD_AFTER_S` after an answer,
                   or `running_s` where that is less, and after each look at the tokens of unfinished samples

Called by `executor`. A group that ran when a process was killed is played again by the next one. Where its workflow makes the same calls,
as it does until something outside of it has answered otherwise, the recorded answers are given, with the versions that sampled them. A call
that was not answered goes on from the recorded tokens.
"""

import asyncio
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from offbeat.data.sample_supports import pack_supports, unpack_supports
from offbeat.inference.hearing import Hearing, KnownSample
from offbeat.inference.sampling import Sample, Sampling
from offbeat.journal.records import CallEntry, HeardSample
from offbeat.journal.standing import HeardCall, OpenGroup
from offbeat.rollout.episode import Episode
from offbeat.rollout.outcomes import RolloutListener
from offbeat.types import Version

RECORD_AFTER_S = 0.2
"""Seconds after which answers of groups that still run are recorded. Most groups end before, and are recorded whole."""


@dataclass(eq=False)
class _WatchedCall:
    """A call of a group.

    Attributes:
        answers: its samples; unfinished ones of an earlier process; () where nothing is known.
        hearing: the samples as far as they are known, while engines generate them.
        num_recorded: number of the tokens of each of the `answers` that are recorded.
        is_recorded: whether the whole answer is.
    """

    key: bytes
    answers: tuple[HeardSample, ...] = ()
    hearing: Hearing | None = None
    num_recorded: list[int] = field(default_factory=list)
    is_recorded: bool = False

    @classmethod
    def of_earlier(cls, call: HeardCall) -> "_WatchedCall":
        """Return a recorded call of an earlier process."""
        made = cls(call.key, call.answers, num_recorded=[len(each.tokens) for each in call.answers])
        made.is_recorded = made.is_answered
        return made

    @property
    def is_answered(self) -> bool:
        """Whether all of its samples are finished."""
        return bool(self.answers) and all(each.finish_reason for each in self.answers)

    def hear(self, every_s: float, n: int) -> Hearing:
        """Begin to hear of its n samples, which go on from the recorded tokens where there are some."""
        begun = [KnownSample(each.tokens, each.logprobs, each.versions, num_recorded=len(each.tokens)) for each in self.answers]
        self.answers, self.hearing = (), Hearing(every_s, begun or [KnownSample() for _ in range(n)])
        return self.hearing

    def answer(self, samples: Sequence[Sample]) -> None:
        self.num_recorded = [0] * len(samples) if self.hearing is None else [each.num_recorded for each in self.hearing.samples]
        self.answers, self.hearing = tuple(map(_answer, samples)), None

    def forget(self) -> None:
        """Drop its answer, and the tokens from which its samples would go on."""
        self.answers, self.hearing = (), None

    def news(self) -> tuple[HeardSample, ...]:
        """Return what is not recorded yet of its samples, and take it as recorded; () if that is nothing."""
        if self.hearing is not None:
            return _running(self.hearing)
        news = tuple(map(_from, self.answers, self.num_recorded))
        self.num_recorded = [len(each.tokens) for each in self.answers]
        was, self.is_recorded = self.is_recorded, self.is_answered
        return news if self.is_recorded > was or any(len(each.tokens) for each in news) else ()

    def record_anew(self) -> None:
        """Let all of its answer be recorded once more."""
        self.is_recorded, self.num_recorded = False, [0] * len(self.answers)
        for sample in self.hearing.samples if self.hearing is not None else ():
            sample.num_recorded = 0


@dataclass(eq=False)
class _OpenCalls:
    """A running group, admitted at `version`.

    Attributes:
        num_told: how many of them, from the first on, are recorded whole.
        again: those of an earlier process that it has not made yet, by their keys.
        num_again: answers of an earlier process that it was given.
        num_tokens: tokens of unfinished samples from which it went on.
    """

    version: Version
    calls: list[_WatchedCall] = field(default_factory=list)
    num_told: int = 0
    again: dict[bytes, list[_WatchedCall]] = field(default_factory=dict)
    num_again: int = 0
    num_tokens: int = 0

    def next_call(self, key: bytes, *, goes_on: bool) -> _WatchedCall:
        """Return the call of an earlier process, or a new one; one that is not answered only if its samples can go on."""
        while found := self.again.get(key):
            call = found.pop(0)
            if not found:
                del self.again[key]
            if call.is_answered or goes_on:
                return call
            call.forget()
        self.calls.append(_WatchedCall(key))
        return self.calls[-1]

    def news(self) -> Iterator[tuple[int, _WatchedCall, tuple[HeardSample, ...]]]:
        """Yield what is not recorded yet, with each call and its number."""
        while self.num_told < len(self.calls) and self.calls[self.num_told].is_recorded:
            self.num_told += 1
        for number in range(self.num_told, len(self.calls)):
            if news := self.calls[number].news():
                yield number, self.calls[number], news


class GroupCalls:
    """The calls of all running groups of a process, with their answers."""

    def __init__(self, listener: RolloutListener, *, running_s: float = 0.0) -> None:
        """`running_s` are seconds between looks at the tokens of unfinished samples; 0 records none, as where engines do not tell them."""
        self._listener = listener
        self._after_s = min(RECORD_AFTER_S, running_s) if running_s else RECORD_AFTER_S
        self._ended = False
        self._running_s = running_s
        self._groups: dict[str, _OpenCalls] = {}
        self._before: dict[str, OpenGroup] = {}
        self._timer: asyncio.Handle | None = None
        self._look: asyncio.Handle | None = None

    def take_over(self, before: Mapping[str, OpenGroup]) -> None:
        """Take over the groups that an earlier process has played, by prompt."""
        self._before = dict(before)

    def admitted(self, prompt_id: str) -> Version | None:
        """Return the version at which an earlier process has admitted a group; None if nothing is known of its calls."""
        before = self._before.get(prompt_id)
        return None if before is None else before.version

    def open(self, prompt_id: str, version: Version) -> None:
        """Begin a group that is admitted at a version; what an earlier process knew of its calls counts if it is the same one."""
        group = self._groups[prompt_id] = _OpenCalls(version)
        before = self._before.pop(prompt_id, None)
        if before is None:
            return
        if before.version != version:
            self._listener.on_played_anew(prompt_id, f"its first tokens, of version {before.version}, would be too stale")
            return
        group.calls = list(map(_WatchedCall.of_earlier, before.calls))
        for call in group.calls:
            group.again.setdefault(call.key, []).append(call)

    def close(self, prompt_id: str) -> None:
        """End a group, whose calls are no longer needed."""
        group = self._groups.pop(prompt_id, None)
        if group is None or not (group.num_again or group.num_tokens or group.again):
            return
        self._listener.on_played_again(
            prompt_id, num_again=group.num_again, num_left=sum(map(len, group.again.values())), num_tokens=group.num_tokens)

    def stop_recording(self) -> None:
        """Record nothing further."""
        self._ended = True
        for handle in (self._timer, self._look):
            if handle is not None:
                handle.cancel()

    @property
    def entries(self) -> list[CallEntry]:
        """All that is known of the calls of groups that run, or are to be played again; whoever asks for it records it."""
        before = [
            CallEntry(prompt_id, each.version, number, call.key, call.answers)
            for prompt_id, each in self._before.items() for number, call in enumerate(each.calls)]
        for group in self._groups.values():
            group.num_told = 0
            for call in group.calls:
                call.record_anew()
        return [*before, *self._news()]

    def _news(self) -> list[CallEntry]:
        return [
            CallEntry(prompt_id, group.version, number, call.key, news)
            for prompt_id, group in self._groups.items() for number, call, news in group.news()]

    def watched(self, prompt_id: str, episode: Episode) -> Episode:
        """Return an episode whose calls are recorded, and answered from the record."""
        group = self._groups[prompt_id]

        async def generate(prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "") -> list[Sample]:
            if sampling.top_logprobs:
                return await episode.generate(prompt, sampling, n=n, session=session)
            goes_on = self._running_s > 0 and sampling.shaping.is_plain and not (sampling.routes or sampling.asks_supports)
            call = group.next_call(key_of(prompt, sampling, n=n), goes_on=goes_on)
            if call.is_answered:
                group.num_again += 1
                return list(map(_sample, call.answers))
            if goes_on:
                sampling = replace(sampling, hearing=(hearing := call.hear(self._running_s, n)))
                group.num_tokens += hearing.num_tokens
                hearing.listener = self
            try:
                samples = await episode.generate(prompt, sampling, n=n, session=session)
            except BaseException:
                if not self._ended:  # else it is cancelled with the rollouts, and a checkpoint that is saved now has what it knows
                    call.forget()
                raise
            call.answer(samples)
            if self._timer is None and self._groups.get(prompt_id) is group and not self._ended:
                self._timer = asyncio.get_running_loop().call_later(self._after_s, self._tell)
            return samples

        return replace(episode, generate=generate)

    def _tell(self) -> None:
        self._timer = None
        self._record()

    def on_look(self) -> None:
        """Record soon what a look has brought, once for all requests that it has looked at; see `LookListener`."""
        if self._look is None and not self._ended:
            self._look = asyncio.get_running_loop().call_soon(self._tell_running)

    def _tell_running(self) -> None:
        self._look = None
        self._record()

    def _record(self) -> None:
        for entry in self._news():
            self._listener.on_heard(entry)


def key_of(prompt: tuple[int, ...], sampling: Sampling, *, n: int) -> bytes:
    """Return a digest of a call, which equal calls share."""
    return hashlib.blake2b(repr((tuple(map(int, prompt)), sampling, n)).encode(), digest_size=16).digest()


def _answer(sample: Sample) -> HeardSample:
    heard = HeardSample(sample.tokens, sample.token_logprobs, sample.token_versions, 0, sample.finish_reason, sample.text)
    beside = {} if sample.routes is None else {"routes": sample.routes}
    return replace(heard, **beside, supports=b"" if sample.supports is None else pack_supports(sample.supports))


def _sample(heard: HeardSample) -> Sample:
    routes = heard.routes if heard.routes.size else None
    supports = unpack_supports(heard.supports) if heard.supports else None
    return Sample(heard.tokens, heard.logprobs, heard.versions, heard.text, heard.finish_reason, routes=routes, supports=supports)


def _from(answer: HeardSample, first: int) -> HeardSample:
    """Return a sample without its first tokens, which are recorded."""
    return replace(answer, tokens=answer.tokens[first:], logprobs=answer.logprobs[first:], versions=answer.versions[first:], start=first)


def _running(hearing: Hearing) -> tuple[HeardSample, ...]:
    """Return the tokens that are not recorded yet, and take them as recorded; () if there are none."""
    news = []
    for sample in hearing.samples:
        first, proven = sample.num_recorded, hearing.num_proven(sample)
        news.append(HeardSample(*sample.columns(first, proven), first))
        sample.num_recorded = max(first, proven)
    return tuple(news) if any(len(each.tokens) for each in news) else ()
