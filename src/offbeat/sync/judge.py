"""The thread of a rank that finds out why a point was not passed, and tells all ranks.

    SyncJudge  consumes missed and doubtful waits, announcements and broken collectives from the other threads of its rank, and deaths of
               processes on its machine; produces verdicts: a point's result, or a failure in every rank's mail; waits for any of these;
               woken by the caller, by Arrivals, or by the system

Between cases it supervises its rank's waits: a collective does not end by itself where a rank is stopped or does not join it, and some
points have long deadlines.

One of all judges gives the verdict: the first to poison a point's count, or to write the failure. If it is stopped before it has
written, the next judge does; of several results the first one stands.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch.distributed as dist

from offbeat import pulse
from offbeat.data.wire import decode_json, encode_json
from offbeat.sync import points
from offbeat.sync.board import Announcement, Board, Renewed, Wait, breakage
from offbeat.sync.links import SyncPeers
from offbeat.sync.peers import Deaths, ProcessState, observe
from offbeat.sync.points import GO, StoreKeys
from offbeat.sync.verdict import Evidence, RankStatus, SyncVerdict, judge, judge_broken, judge_standstill, judge_stopped
from offbeat.sync.watcher import Mail

_LOOK_S = 0.01
"""Interval between two looks for answers."""

STORE_S = 0.5
"""Grace for the store's own answers, on top of the watchers' grace; beyond it the store's host is to blame."""

_LINGER_S = 1.0
"""Time that the store's host stays so that others can read their last verdict."""

_MEET_S = 0.1
"""Interval between two checks whether all ranks have started; from then on their processes are watched."""

_LOOK_AFTER_S = 0.25
"""Interval between two checks of this rank's wait."""

_MARGIN_S = 0.25
"""Added to the patience with a stopped process, because a wait at a point may end meanwhile, and its verdict says more."""

_SETTLE_S = 0.2
"""Delay between the breaking of a collective and the inquiry into it: peers need it to die, or to notice that theirs broke."""


@dataclass(frozen=True, eq=False)
class Broken:
    """A collective behind a passed point has raised; `verdict` receives the reason, or None when no rank stands out."""

    name: str
    n: int
    reason: str
    verdict: "queue.SimpleQueue[SyncVerdict | None]" = field(default_factory=queue.SimpleQueue)


@dataclass(frozen=True)
class Departure:
    """This rank leaves the group, `in_order` if deliberately, and not by just exiting; ends the thread."""

    in_order: bool


Case = Wait | Announcement | Broken | Departure


class SyncJudge:
    """Handles cases one after the other until `Departure`."""

    def __init__(
        self, client: dist.TCPStore, *, board: Board, peers: SyncPeers, keys: StoreKeys, answer_timeout_s: float, patience_s: float,
    ) -> None:
        """`patience_s` bounds the wait for a stopped process of this machine, and for ranks that make no progress in a collective."""
        self._client = client
        self._board = board
        self._peers = peers
        self._keys = keys
        self._answer_timeout_s = answer_timeout_s
        self._patience_s = patience_s
        self._cases: deque[Case] = deque()
        self._deaths = Deaths()
        self._stopped: dict[int, tuple[str, float]] = {}  # by rank: the text of its state, and the seconds since it stopped
        self._looked_s = time.monotonic()
        self._inquiries = 0
        self._questions = 0
        self.thread = threading.Thread(target=self._run, name="sync judge", daemon=True)

    def post(self, case: Case) -> None:
        """Hand in a case; never blocks."""
        self._cases.append(case)
        self._deaths.wake()

    def _run(self) -> None:
        leaving = watching = False
        while not leaving:
            # One wait for deaths, new cases (`post` wakes it) and the next look, so that none of them delays another.
            died = self._deaths.wait(_LOOK_AFTER_S if watching else _MEET_S)
            try:
                watching = watching or self._watch()
                for rank in died:
                    self._on_death(rank)
                self._look_after_wait()
                while self._cases and not leaving:
                    case = self._cases.popleft()
                    leaving = isinstance(case, Departure)
                    self._take(case)
            except dist.DistError:  # the store does not answer: its host is dead, stopped, or cut off
                self._board.fail(self._peers.store_lost())
            except Exception as exc:  # of whatever kind: the peers must hear that this rank is out
                announcement = breakage(self._board.rank, exc)
                if not self._board.failure:  # once only, because the announcement itself may break
                    self._board.fail(announcement.verdict)
                    self.post(announcement)
        self._deaths.close()

    def _watch(self) -> bool:
        """Watch the processes of this machine once all ranks have one; a rank may die before it reaches its first point."""
        if len(self._peers.cards) < self._peers.world:
            self._peers.read_cards(self._client, self._keys)
        if len(self._peers.cards) < self._peers.world:
            return False
        self._deaths.add(self._peers.neighbours())
        return True

    def _take(self, case: Case) -> None:
        match case:
            case Wait():
                self._on_missed(case)
            case Announcement():
                try:
                    self._announce(case.verdict)
                finally:
                    case.done.set()  # even if the peers could not be told: the caller has an error of its own to raise
            case Broken():
                case.verdict.put(self._on_broken(case))
            case Departure():
                self._leave(in_order=case.in_order)

    def _on_death(self, rank: int) -> None:
        state = observe(self._peers.cards[rank])
        if not self._peers.store_gone and not self._client.check([self._keys.left(rank)]):
            self._announce(SyncVerdict("failed", f"rank {rank} {state.text}"))
            return
        # It left in good order, which matters only to ranks that wait for it.
        self._peers.departed = True
        if wait := self._board.wait:
            self._on_missed(wait)

    def _look_after_wait(self) -> None:
        """Fail if a process of this machine has been stopped for too long, or if no rank makes progress any more."""
        now_s = time.monotonic()
        seconds, self._looked_s = min(now_s - self._looked_s, 2 * _LOOK_AFTER_S), now_s  # capped: it may itself have been stopped
        board, patience_s, wait = self._board, self._patience_s, self._board.wait
        stopped = {state.rank: state.text for state in self._peers.states() if state.kind == "stopped"}
        self._stopped = {rank: (text, self._stopped.get(rank, (text, 0.0))[1] + seconds) for rank, text in stopped.items()}
        if board.failure or not (wait or board.inside):
            self._inquiries = 0
            return
        if any(stopped_s >= patience_s + _MARGIN_S for _, stopped_s in self._stopped.values()):
            self._announce(judge_stopped(self._stopped, where=wait.name if wait else board.last))
            return
        # Nobody is asked while a process is stopped or a point is waited for: both have verdicts of their own, which say more. Each
        # inquiry in the same collective comes one patience after the one before.
        work = pulse.current()
        if work is None or stopped or wait or work.still_s < (self._inquiries + 1) * patience_s + _MARGIN_S or not work.waits:
            return
        self._inquiries += 1
        self._inquire(board.last, board.inside)

    def _inquire(self, name: str, n: int) -> None:
        """Ask all ranks whether any of them still makes progress; only the first rank whose patience with a collective has ended asks.

        It does not ask where ranks are on several machines: while bytes cross a slow network, ranks compute little and look stuck.
        """
        if len(self._peers.neighbours()) + 1 < self._peers.world or self._client.add(self._keys.inquiry(n, self._inquiries), 1) > 1:
            return
        evidence = self._collect(Broken(name, n, ""), timeout_s=self._patience_s, arrived=self._peers.world)
        if verdict := judge_standstill(evidence):
            self._announce(verdict)

    def _leave(self, *, in_order: bool) -> None:
        if self._peers.store_gone:
            return
        if in_order:
            self._client.set(self._keys.left(self._board.rank), "")
        # Release the thread that waits for the last point's result, should none have come.
        verdict = self._board.failure or SyncVerdict("failed", f"rank {self._board.rank} has left")
        self._write(self._board.arrivals, verdict)
        others = [rank for rank in range(self._peers.world) if rank != self._board.rank] if self._peers.own.hosts_store else []
        give_up_s = time.monotonic() + _LINGER_S
        while not all(map(self._has_left, others)) and time.monotonic() < give_up_s:
            time.sleep(_LOOK_S)
        # After this the host takes the store away. Close the watchers first: one that still waited there would log long complaints.
        for rank in (*others, self._board.rank):
            self._client.queue_push(self._keys.mail(rank), encode_json(Mail("close")).decode())

    def _has_left(self, rank: int) -> bool:
        return self._client.check([self._keys.left(rank)]) or rank in self._unable({rank})

    def _on_missed(self, wait: Wait) -> None:
        if wait is not self._board.wait and wait.abandoned is None:
            return  # its result came meanwhile
        if self._is_patient(wait) and wait.abandoned is None:  # in this order, since asking may take longer than the caller waits
            wait.messages.put(Renewed())
            return
        count = self._count(wait, points.POISON)  # from here on, a rank that comes late sees that the point was missed
        # Another judge owns the verdict, or the last rank came just now: either way the result will appear, unless its owner is stopped.
        if (count.poisons > 1 or (count.agreed and count.arrived == self._peers.world)) and self._is_decided(wait):
            return
        # An abandoned point needs no inquiry, because the caller has said why it left.
        verdict = wait.abandoned or judge(self._collect(wait, timeout_s=wait.timeout_s, arrived=count.arrived))
        verdict = wait.abandoned or verdict  # the caller may have left meanwhile
        if verdict.kind == "failed":
            verdict = self._announce(verdict)
        self._write(wait.n, verdict)

    def _is_decided(self, wait: Wait) -> bool:
        """Whether the point's result appears as soon as its owner can be expected to write it."""
        key = self._keys.result(wait.n)
        give_up_s = time.monotonic() + self._answer_timeout_s + STORE_S
        while not self._client.check([key]):
            if wait is not self._board.wait and wait.abandoned is None:
                return True
            if time.monotonic() > give_up_s:
                return False
            time.sleep(_LOOK_S)
        if wait.abandoned and self._client.get(key).decode() == GO:  # the others have entered a collective without this rank
            self._announce(SyncVerdict("failed", wait.abandoned.text))
        return True

    def _count(self, wait: Wait, added: int) -> points.Count:
        total = self._client.add(self._keys.count(wait.n), added)
        wait.heard = True  # the store answers, so the caller need not suspect it
        return points.read(total, wait.signature)

    def _write(self, n: int, verdict: SyncVerdict) -> None:
        """Decide the n-th point, unless it is decided already."""
        self._client.compare_set(self._keys.result(n), "", encode_json(verdict).decode())

    def _is_patient(self, wait: Wait) -> bool:
        """Whether a rank whose beats extend this wait is elsewhere, and each of them there, or has beaten within the wait's timeout."""
        if not wait.patient_with or not self._count(wait, 0).agreed:  # patience does not resolve a mismatch
            return False
        statuses = self._ask(wait.patient_with)
        elsewhere = [status for status in statuses.values() if status.n != wait.n]
        return (
            statuses.keys() == wait.patient_with and bool(elsewhere)
            and all(status.beat_age_s < wait.timeout_s for status in elsewhere))

    def _on_broken(self, case: Broken) -> SyncVerdict | None:
        time.sleep(_SETTLE_S)
        if self._board.failure:  # another rank's judge found the reason meanwhile
            return self._board.failure
        if self._peers.host_is_stopped():  # nobody else can be asked
            stopped = {state.rank: (state.text, 0.0) for state in self._peers.states() if state.kind == "stopped"}
            return self._announce(judge_stopped(stopped, where=case.name))
        verdict = judge_broken(self._collect(case, timeout_s=self._patience_s, arrived=self._peers.world), reason=case.reason)
        return self._announce(verdict) if verdict else None

    def _announce(self, verdict: SyncVerdict) -> SyncVerdict:
        """Tell every rank that no point will be passed again; returns the first such verdict, which stands.

        Where the store's host is stopped, the others cannot be told; the ranks on its machine each see that for themselves.
        """
        if self._peers.host_is_stopped():
            self._board.fail(verdict)
            return self._board.failure or verdict
        # The store keeps the first verdict, so all ranks tell the same story however many judges have one.
        first = decode_json(SyncVerdict, self._client.compare_set(self._keys.failed, "", encode_json(verdict).decode()))
        if first == verdict:  # only the judge that was first tells the others
            mail = encode_json(Mail("failed", verdict=first)).decode()
            for rank in range(self._peers.world):
                if rank != self._board.rank:
                    self._client.queue_push(self._keys.mail(rank), mail)
        if wait := self._board.fail(first):
            self._write(wait.n, first)
        return first

    def _collect(self, case: Wait | Broken, *, timeout_s: float, arrived: int) -> Evidence:
        own = self._board.status()
        answers = self._ask([rank for rank in range(self._peers.world) if rank != self._board.rank])
        self._peers.read_cards(self._client, self._keys)
        states = {state.rank: state for status in answers.values() for state in status.states}
        states |= {state.rank: state for state in self._peers.states()}  # seen by this rank itself, and so the latest
        silent = set(range(self._peers.world)) - {own.rank, *answers}  # their states come from their neighbours
        # These left in good order, even if their processes continue.
        states |= {rank: ProcessState(rank, "dead", "has left") for rank in silent if self._client.check([self._keys.left(rank)])}
        return Evidence(
            name=case.name, keys=case.keys if isinstance(case, Wait) else (), n=case.n, world=self._peers.world, timeout_s=timeout_s,
            arrived=arrived, answers={**answers, own.rank: own}, started=frozenset(self._peers.cards), states=states)

    def _ask(self, ranks: Iterable[int]) -> dict[int, RankStatus]:
        """Ask the watchers of ranks; returns the answers that come in time, and does not wait for processes that are stopped or dead."""
        silent = set(ranks)
        self._questions += 1
        reply = self._keys.reply(self._board.rank, self._questions)  # a queue for this question alone, as answers may come late
        mail = encode_json(Mail("status", reply=reply)).decode()
        for rank in silent:
            self._client.queue_push(self._keys.mail(rank), mail)
        answers: dict[int, RankStatus] = {}
        give_up_s = time.monotonic() + self._answer_timeout_s
        while silent - self._unable(silent) and time.monotonic() < give_up_s:
            if not self._client.queue_len(reply):
                time.sleep(_LOOK_S)
                continue
            status = decode_json(RankStatus, self._client.queue_pop(reply))
            answers[status.rank] = status
            silent.discard(status.rank)
        return answers

    def _unable(self, ranks: set[int]) -> set[int]:
        """Return the ranks whose processes are known to be stopped or dead, and so cannot answer."""
        return {state.rank for state in self._peers.states(ranks) if state.kind != "alive"}
