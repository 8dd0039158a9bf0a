"""Decides who is to blame for a missed sync point: pure functions from reports of watchers and the system to one text.

The judge of one rank calls them and hands the verdict to all, so that every rank raises the same words. Each missing rank is slow (it
answers, but is elsewhere), stopped, dead, unresponsive (alive, but its interpreter does not answer), at another point, or not started.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from offbeat.errors import PeerError, StuckError, SyncError, SyncMismatch, SyncTimeout
from offbeat.sync.peers import ProcessState

_MAX_STACKS = 8
"""Most stacks in one verdict; further ranks are listed without theirs."""


@dataclass(frozen=True)
class RankStatus:
    """A watcher's answer about its rank.

    Attributes:
        phase, phase_s: text of the rank's current phase, and the seconds that it has lasted.
        point, n: name and number of the sync point at which it waits; "" and 0 when it does not wait.
        keys: keys of the values that it brings there; they must agree, as the point must.
        waited_s: seconds that it has waited there.
        last, last_s: the point that it left last, such as "step_times", and the seconds since then.
        inside: number of the point whose collective it has entered and not left; 0 when none.
        stack: stack of the thread that waits, else of the one that entered the phase; innermost call last.
        beat_age_s: seconds since the rank last said that it waits under a deadline of its own.
        states: process states of the ranks on its machine.
        still_s: seconds for which its work has shown no sign of life, see `offbeat.pulse`; 0 without work.
        waits: whether its work waits for other ranks.
    """

    rank: int
    phase: str
    phase_s: float
    point: str
    keys: tuple[str, ...]
    n: int
    waited_s: float
    last: str
    last_s: float
    inside: int
    stack: tuple[str, ...]
    beat_age_s: float
    states: tuple[ProcessState, ...]
    still_s: float = 0.0
    waits: bool = False


@dataclass(frozen=True)
class SyncVerdict:
    """Reason why a point was not passed; `text` is all that a person reads of it.

    "failed" and "stuck" are final. "stuck" is for a rank that is stopped or hangs while others wait, or for longer than allowed.
    """

    kind: Literal["missed", "mismatch", "failed", "stuck"]
    text: str

    def to_error(self, point: str) -> SyncError:
        """Convert to the error that every rank raises at `point`."""
        if self.kind == "failed":
            return PeerError(f"sync point {point!r} cannot be passed: {self.text}")
        if self.kind == "stuck":
            return StuckError(self.text)
        return SyncTimeout(self.text) if self.kind == "missed" else SyncMismatch(self.text)


@dataclass(frozen=True)
class Evidence:
    """Everything known when a point was missed.

    Attributes:
        arrived: number of ranks that had arrived when the deadline passed.
        answers: answers by rank; ranks without an entry did not answer.
        started: ranks whose process has joined.
        states: process states by rank, of the ranks that some machine can see.
    """

    name: str
    keys: tuple[str, ...]
    n: int
    world: int
    timeout_s: float
    arrived: int
    answers: Mapping[int, RankStatus]
    started: frozenset[int]
    states: Mapping[int, ProcessState]


def judge(evidence: Evidence) -> SyncVerdict:
    """Return the verdict on ranks that did not come in time, or came under different names."""
    states, answers, name = evidence.states, evidence.answers, evidence.name
    if dead := [f"rank {rank} {state.text}" for rank, state in sorted(states.items()) if state.kind == "dead"]:
        return SyncVerdict("failed", ", ".join(dead))
    if any((status.point, status.keys) != (name, evidence.keys) for status in answers.values() if status.n == evidence.n):
        return _mismatch(evidence)
    missing = _missing(evidence)
    parts = ", ".join(f"rank {rank} {_condition(rank, evidence)}" for rank in missing)
    there = f"{evidence.world - len(missing)} of {evidence.world} ranks there"
    head = f"sync point {name!r} timed out after {evidence.timeout_s:g} s with {there}"
    return SyncVerdict("missed", f"{head}: {parts}" + _stacks(missing, answers))


def judge_broken(evidence: Evidence, *, reason: str) -> SyncVerdict | None:
    """Return the verdict on a collective that broke after its point was passed; None when no rank stands out.

    The verdict is final: the group of a broken collective cannot be used again.

    Silent ranks are blamed first. If there are none, the blame falls on ranks that are still inside while the collective of others has
    ended, unless they wait there: a waiting rank is a victim whose own collective has not broken yet. Ranks without progress come
    before those that compute.
    """
    if dead := [f"rank {rank} {state.text}" for rank, state in sorted(evidence.states.items()) if state.kind == "dead"]:
        return SyncVerdict("failed", ", ".join(dead))
    silent = [rank for rank in range(evidence.world) if _is_silent(rank, evidence)]
    inside = [rank for rank in range(evidence.world) if rank not in silent and evidence.answers[rank].inside == evidence.n]
    elsewhere = [rank for rank in inside if not evidence.answers[rank].waits]
    standing = [rank for rank in elsewhere if evidence.answers[rank].still_s >= evidence.timeout_s > 0]
    suspects = silent or standing or elsewhere
    if not suspects or len(suspects) == evidence.world:
        return None
    parts = ", ".join(f"rank {rank} {_condition(rank, evidence)}" for rank in suspects)
    head = f"a collective after sync point {evidence.name!r} broke ({reason})"
    return SyncVerdict("failed", f"{head}: {parts}" + _stacks(suspects, evidence.answers))


def judge_standstill(evidence: Evidence) -> SyncVerdict | None:
    """Return the verdict on a collective in which this rank has waited for longer than `timeout_s`; None where a rank may progress.

    Stopped and hanging ranks are found by other means. This finds collectives that not all ranks join: either some have left the region,
    or all wait in it, each for another.
    """
    answers = evidence.answers
    if set(answers) != set(range(evidence.world)) or any(state.kind != "alive" for state in evidence.states.values()):
        return None
    inside = [rank for rank in range(evidence.world) if answers[rank].inside == evidence.n]
    if any(not answers[rank].waits or answers[rank].still_s < evidence.timeout_s for rank in inside):
        return None
    gone = [rank for rank in range(evidence.world) if rank not in inside]
    head = f"{_ranks(inside)} {'waits' if len(inside) == 1 else 'wait'} in a collective of region {evidence.name!r} and"
    least_s = min((answers[rank].still_s for rank in inside), default=0.0)
    if gone:
        left = "has left it" if len(gone) == 1 else "have left it"
        text = f"{head} {'has' if len(inside) == 1 else 'have'} not got on for {least_s:.1f} s: {_ranks(gone)} {left}"
    else:
        text = f"{head} have not got on for {least_s:.1f} s: they are not all in the same one"
    return SyncVerdict("stuck", text + _stacks(inside, answers))


def judge_stopped(stopped: Mapping[int, tuple[str, float]], *, where: str) -> SyncVerdict:
    """Return the verdict on ranks that are stopped while others wait for them, from each one's process state and stopped seconds."""
    who = ", ".join(f"rank {rank} {text}, for {seconds:.1f} s" for rank, (text, seconds) in sorted(stopped.items()))
    return SyncVerdict("stuck", f"{who}, while others wait for it in {where!r}")


def _mismatch(evidence: Evidence) -> SyncVerdict:
    at: dict[str, list[int]] = {}
    for rank, status in sorted(evidence.answers.items()):
        if status.n == evidence.n:
            at.setdefault(repr(status.point) + (f" with {', '.join(status.keys)}" if status.keys else ""), []).append(rank)
    parts = " while ".join(f"{_ranks(ranks)} came to {point}" for point, ranks in sorted(at.items(), key=lambda item: -len(item[1])))
    fewest = min(at.values(), key=len)
    return SyncVerdict("mismatch", f"ranks came to different sync points at once: {parts}" + _stacks(fewest, evidence.answers))


def _missing(evidence: Evidence) -> list[int]:
    """Return the ranks that were missing at the deadline; of ranks that came since, the latest ones, to match the count.

    For example, with 2 of 3 ranks there at the deadline and all there now, it is the rank that has waited least.
    """
    healthy = [rank for rank in range(evidence.world) if not _is_silent(rank, evidence) and evidence.answers[rank].n == evidence.n]
    healthy.sort(key=lambda rank: evidence.answers[rank].waited_s, reverse=True)
    return sorted(set(range(evidence.world)) - set(healthy[: evidence.arrived]))


def _is_silent(rank: int, evidence: Evidence) -> bool:
    state = evidence.states.get(rank)
    return rank not in evidence.answers or (state is not None and state.kind != "alive")


def _condition(rank: int, evidence: Evidence) -> str:
    state = evidence.states.get(rank)
    if rank not in evidence.started:
        return "has not started"
    if state is not None and state.kind == "stopped":
        return state.text
    if rank not in evidence.answers:
        known = f"its process {state.text}" if state else "nothing on its machine answers"
        return f"is unresponsive, so native code holds its interpreter ({known})" if state else f"is unresponsive ({known})"
    status = evidence.answers[rank]
    if status.n == evidence.n:
        return "came too late"
    return f"is slow, {_doing(status)}"


def _doing(status: RankStatus) -> str:
    if status.point:
        return f"for {status.waited_s:.1f} s at sync point {status.point!r}"
    if status.phase:
        return f"for {status.phase_s:.1f} s in phase {status.phase!r}"
    return f"for {status.last_s:.1f} s since sync point {status.last!r}"


def _stacks(ranks: list[int], answers: Mapping[int, RankStatus]) -> str:
    shown = [rank for rank in ranks if rank in answers and answers[rank].stack][:_MAX_STACKS]
    return "".join(f"\n  rank {rank}, innermost call last:" + "".join(f"\n    {line}" for line in answers[rank].stack) for rank in shown)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
