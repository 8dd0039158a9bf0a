"""The calls of engines that running groups make: their answers are recorded while the groups run, and given again after a restart.

    watched    consumes a group's calls; produces their answers, those of an earlier process where it has made the same call
    _tell      consumes answers that are not recorded yet, of groups that still run; produces records; called `RECORD_AFTER_S` after one

Called by `executor`. A group that ran when a process was killed is played again by the next one. Where its workflow makes the same calls,
as it does until something outside of it has answered otherwise, the recorded answers are given, with the versions that sampled them.
"""

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from offbeat.inference.sampling import Sample, Sampling
from offbeat.journal.records import CallEntry, HeardSample
from offbeat.journal.standing import HeardCall, OpenGroup
from offbeat.rollout.episode import Episode
from offbeat.rollout.outcomes import RolloutListener
from offbeat.types import Version

RECORD_AFTER_S = 0.2
"""Seconds after which answers of groups that still run are recorded. Most groups end before, and are recorded whole."""


@dataclass(eq=False)
class _OpenCalls:
    """A running group.

    Attributes:
        version: at which it was admitted.
        calls: answered calls, in order.
        num_told: how many of them are recorded.
        again: answers of an earlier process that have not been asked for yet, by the call.
        num_again: answers that have been.
    """

    version: Version
    calls: list[HeardCall] = field(default_factory=list)
    num_told: int = 0
    again: dict[bytes, list[tuple[HeardSample, ...]]] = field(default_factory=dict)
    num_again: int = 0


class GroupCalls:
    """The answered calls of all running groups of a process."""

    def __init__(self, listener: RolloutListener) -> None:
        """`listener` hears of answers to be recorded."""
        self._listener = listener
        self._groups: dict[str, _OpenCalls] = {}
        self._before: dict[str, OpenGroup] = {}
        self._timer: asyncio.TimerHandle | None = None

    def take_over(self, before: Mapping[str, OpenGroup]) -> None:
        """Take over the groups that an earlier process has played, by prompt."""
        self._before = dict(before)

    def admitted(self, prompt_id: str) -> Version | None:
        """Return the version at which an earlier process has admitted a group; None if it has answered none of its calls."""
        before = self._before.get(prompt_id)
        return None if before is None else before.version

    def open(self, prompt_id: str, version: Version) -> None:
        """Begin a group that is admitted at a version; answers of an earlier process count if it is the same one."""
        group = self._groups[prompt_id] = _OpenCalls(version)
        before = self._before.pop(prompt_id, None)
        if before is None:
            return
        if before.version != version:
            self._listener.on_played_anew(prompt_id, f"its first tokens, of version {before.version}, would be too stale")
            return
        group.calls, group.num_told = list(before.calls), len(before.calls)
        for call in before.calls:
            group.again.setdefault(call.key, []).append(call.answers)

    def close(self, prompt_id: str) -> None:
        """End a group, whose calls are no longer needed."""
        group = self._groups.pop(prompt_id, None)
        if group is None or not (group.num_again or group.again):
            return
        self._listener.on_played_again(prompt_id, num_again=group.num_again, num_left=sum(map(len, group.again.values())))

    def end(self) -> None:
        """Record nothing further."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def entries(self) -> list[CallEntry]:
        """All answered calls of groups that run, or are to be played again."""
        before = [(prompt_id, each.version, each.calls) for prompt_id, each in self._before.items()]
        running = [(prompt_id, each.version, each.calls) for prompt_id, each in self._groups.items()]
        for group in self._groups.values():
            group.num_told = len(group.calls)  # whoever asks for all of them records them
        return [
            CallEntry(prompt_id, version, number, call.key, call.answers)
            for prompt_id, version, calls in (*before, *running) for number, call in enumerate(calls)]

    def watched(self, prompt_id: str, episode: Episode) -> Episode:
        """Return an episode whose calls are recorded, and answered from the record."""
        group = self._groups[prompt_id]

        async def generate(prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "") -> list[Sample]:
            if group.again and (found := group.again.get(key := key_of(prompt, sampling, n=n))):
                answers = found.pop(0)
                if not found:
                    del group.again[key]
                group.num_again += 1
                return list(map(_sample, answers))
            samples = await episode.generate(prompt, sampling, n=n, session=session)
            if self._groups.get(prompt_id) is group and not sampling.top_logprobs:
                group.calls.append(HeardCall(key_of(prompt, sampling, n=n), tuple(map(_answer, samples))))
                if self._timer is None:
                    self._timer = asyncio.get_running_loop().call_later(RECORD_AFTER_S, self._tell)
            return samples

        return replace(episode, generate=generate)

    def _tell(self) -> None:
        self._timer = None
        for prompt_id, group in self._groups.items():
            for number in range(group.num_told, len(group.calls)):
                call = group.calls[number]
                self._listener.on_heard(CallEntry(prompt_id, group.version, number, call.key, call.answers))
            group.num_told = len(group.calls)


def key_of(prompt: tuple[int, ...], sampling: Sampling, *, n: int) -> bytes:
    """Return a digest of a call, which equal calls share."""
    return hashlib.blake2b(repr((tuple(map(int, prompt)), sampling, n)).encode(), digest_size=16).digest()


def _answer(sample: Sample) -> HeardSample:
    heard = HeardSample(sample.tokens, sample.token_logprobs, sample.token_versions, 0, sample.finish_reason, sample.text)
    return heard if sample.routes is None else replace(heard, routes=sample.routes)


def _sample(heard: HeardSample) -> Sample:
    routes = heard.routes if heard.routes.size else None
    return Sample(heard.tokens, heard.logprobs, heard.versions, heard.text, heard.finish_reason, routes=routes)
