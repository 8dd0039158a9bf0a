"""Plays groups of episodes while the trainer learns. The gate decides how many and which; this module carries that out.

    _admit         consumes capacity and prompts; produces running groups; waits for nothing; called after every event that frees capacity
    _play          consumes a group that a `GroupPlayer` plays; produces one settled group; waits for it, under the episode's deadline
    prepare_batch  consumes ready groups; produces a step's batch; woken by every settled group
    take_ahead     consumes ready groups while a step trains; produces the groups of the step after it; woken by every settled group, or
                   cancelled before `prepare_batch` is called

There is no producer loop that could miss a wake-up: the code that frees capacity also admits. Results of user code are checked, and a
sample (an episode) that cannot be trained on is left out alone. A group that failed, or has fewer than two samples left, is drawn again at
most `rollout.max_retries` times. Otherwise failures of engines, deadlines and rewards would mostly remove long and hard prompts. Only a
prompt that cannot be asked is rejected at once.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Self

from offbeat.config.rollout import RolloutConfig
from offbeat.data.row import Row
from offbeat.data.stream import PromptStream
from offbeat.data.trajectory import Group
from offbeat.ending import ended
from offbeat.errors import CodeError, DeadlineError, OffbeatError, RolloutError, RunError
from offbeat.inference.sampling import Sampling
from offbeat.journal.records import CallEntry
from offbeat.journal.standing import HeldGroups
from offbeat.phase import phase
from offbeat.raised import describe_at
from offbeat.rollout.accounts import Accounts
from offbeat.rollout.calls import GroupCalls
from offbeat.rollout.holdup import HoldupGuard
from offbeat.rollout.idle import IdleListener, IdleMeter, NoListener
from offbeat.rollout.outcomes import GroupFailure, GroupListener, Kind, Outcomes, RolloutListener, Settled, screen
from offbeat.rollout.player import CALLERS, GroupPlayer, RolloutParts
from offbeat.rollout.randomness import mixed
from offbeat.rollout.staleness import Gate
from offbeat.telemetry.tracker import StatsPart, combine
from offbeat.types import Version
from offbeat.user_code.boundary import Caught

_ADMITTED_AT_ONCE = 128
"""Groups that one callback of the event loop admits: thousands, for which a new version may make room, would hold it up."""


class RolloutExecutor:
    """Asynchronous rollouts over one prompt stream. Use as `async with`; on leaving, groups that still run are cancelled."""

    def __init__(
        self, gate: Gate, stream: PromptStream, parts: RolloutParts, *, config: RolloutConfig, sampling: Sampling,
        listener: RolloutListener | None = None, idle_listener: IdleListener | None = None,
    ) -> None:
        """`listener` hears of lost groups and of warnings, `idle_listener` for how long engines idle; admission starts on entering it."""
        self._gate = gate
        self._stream = stream
        self._config = config
        self._dynamic = parts.dynamic
        self._seed = parts.seed
        self._checks = parts.checks
        self._accounts = parts.accounts
        self._listener = listener = listener or RolloutListener()
        self._outcomes = Outcomes(listener)
        self._holdups = HoldupGuard(timeout_s=config.blocked_timeout_s, callers=CALLERS, tell=listener.warn)
        self.idle = IdleMeter(gate, idle_listener or NoListener(), has_places=parts.has_places)
        self._player = GroupPlayer(parts, config=config, idle=self.idle, listener=listener)
        self._calls = GroupCalls(listener, running_s=parts.running_s)
        self._exits = ExitStack()
        self._num_tries: Counter[str] = Counter()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ready: dict[str, Group] = {}
        self._ahead: dict[str, Group] = {}
        self._changed = asyncio.Event()
        self._failures: list[Exception] = []
        self._crash: BaseException | None = None
        self._num_rejected = 0
        self._left = False
        self.sampling = sampling

    async def __aenter__(self) -> Self:
        self._exits.enter_context(self._holdups.on())
        self._admit()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._left = True
        self._calls.stop_recording()
        tasks = list(self._tasks.values())
        self._tasks.clear()
        await ended(tasks)
        self._exits.close()

    @property
    def in_flight(self) -> tuple[str, ...]:
        """Prompts drawn and neither trained on nor rejected, oldest first; a checkpoint records them so that none is lost."""
        return (*self._ahead, *self._gate.ready, *self._gate.running)

    @property
    def held(self) -> tuple[Group, ...]:
        """Finished groups that no step trains on yet."""
        return (*self._ahead.values(), *self._ready.values())

    @property
    def calls(self) -> Sequence[CallEntry]:
        """Answered calls of groups that run, or that an earlier process has played in part."""
        return self._calls.entries

    @property
    def num_tries(self) -> Mapping[str, int]:
        """How often prompts in flight have failed, by id."""
        return self._num_tries

    def take_over(self, held: HeldGroups) -> None:
        """Begin with the groups that an earlier process has finished; called before the executor is entered."""
        self._gate.take_over({group.prompt_id: group.admitted_version for group in held.ready}, training=len(held.taken))
        self._ready = {group.prompt_id: group for group in held.ready}
        self._ahead = {group.prompt_id: group for group in held.taken}
        self._num_tries.update(held.num_tries)
        self._calls.take_over(held.open)

    @property
    def num_flat_rejected(self) -> int:
        """Groups of equal rewards rejected for the batch that is being filled; a checkpoint records them."""
        return 0 if self._dynamic is None else self._dynamic.num_rejected

    async def prepare_batch(self) -> list[Group]:
        """Return the groups of the next step as soon as the gate releases them, or the groups that `take_ahead` returned.

        Raises:
            RolloutError: `max_failures_in_a_row` groups failed in a row, not because of user code; shows the first failure.
            CodeError: likewise, but the user's reward or workflow was at fault.
            DeadlineError: no group finished within `batch_timeout_s`.
        """
        with phase("waiting for rollouts", describe=self._progress):
            return await self._take_batch()

    async def take_ahead(self) -> list[Group]:
        """Return the groups of the step after the one in training as soon as the gate releases them, which may be never.

        None are released once that step has been trained, nor with dynamic sampling, which counts rejected groups by the batch that is
        being filled. Groups count as in flight until `prepare_batch` returns them. Cancel this before calling `prepare_batch`.
        """
        while self._dynamic is not None or (keys := self._gate.take_ahead()) is None:
            self._changed.clear()
            await self._changed.wait()
        self._ahead = {key: self._ready.pop(key) for key in keys}
        return list(self._ahead.values())

    @property
    def has_ahead(self) -> bool:
        """Whether `take_ahead` has released groups that `prepare_batch` has not returned yet."""
        return bool(self._ahead)

    def _progress(self) -> str:
        gate = self._gate
        return f"{len(gate.ready)} of {gate.batch_size} groups are ready and {len(gate.running)} run"

    async def _take_batch(self) -> list[Group]:
        settled, idle_since = self._num_settled, time.monotonic()
        while True:
            self._raise_if_hopeless()
            if self._ahead:
                ahead, self._ahead = self._ahead, {}
                return self._hand_out(list(ahead.values()))
            if (keys := self._gate.take()) is not None:
                return self._hand_out([self._ready.pop(key) for key in keys])
            if self._config.on_stale == "requeue" and (slow := self._gate.too_slow()):
                self._requeue(slow)
                continue  # without the slow groups, the batch may be taken now
            if self._num_settled > settled:
                settled, idle_since = self._num_settled, time.monotonic()
            await self._wait_for_change(idle_since)

    @property
    def _num_settled(self) -> int:
        # Groups of equal rewards are progress, too: there is a bound on them.
        return len(self._gate.ready) + self.num_flat_rejected

    def _hand_out(self, groups: list[Group]) -> list[Group]:
        if self._dynamic is not None:
            self._dynamic.start_batch()
        for group in groups:
            self._stream.note(group)
        return groups

    async def _wait_for_change(self, idle_since: float) -> None:
        left_s = self._config.batch_timeout_s - (time.monotonic() - idle_since)
        self._changed.clear()
        try:
            async with asyncio.timeout(max(left_s, 0)):
                await self._changed.wait()
        except TimeoutError as exc:
            raise DeadlineError(
                f"no group of rollouts was finished and accepted for rollout.batch_timeout_s = {self._config.batch_timeout_s:g} s;"
                f" {self._num_rejected} were rejected in this run, events.jsonl says why") from exc

    def advance(self, version: Version) -> None:
        """Note that the step in training has made `version`: the next step may take groups."""
        self._gate.advance(version)

    def serve(self, version: Version) -> None:
        """Note that engines serve `version`, and admit groups for it unless the executor was left meanwhile."""
        self._gate.serve(version)
        self._admit()

    def take_stats(self) -> StatsPart:
        """Return statistics since the last call, those of `Outcomes`, `DynamicSampling`, `PromptStream` and `Accounts`."""
        dynamic = StatsPart() if self._dynamic is None else self._dynamic.take_stats()
        return combine([self._outcomes.take_stats(), dynamic, self._stream.stats(), self._accounts.take_stats()])

    async def rollout_batch(
        self, rows: Iterable[Row], *, group_size: int, sampling: Sampling, listener: GroupListener | None = None,
    ) -> list[Group]:
        """Play the given rows now, bypassing the gate, and wait for all, for evaluation and debugging. Groups are in the rows' order.

        Groups without a usable trajectory keep the played ones, too, so that they can be shown. `listener` hears of each group as it ends.
        """
        slots = asyncio.Semaphore(self._config.max_concurrent_rollouts)

        async def play_row(index: int, row: Row) -> Group:
            async with slots:
                for tries in itertools.count(1):
                    played, failure = await self._player.play(
                        f"batch:{index}", row, group_size, sampling, version=self._gate.served, accounts=Accounts())
                    group, failure = screen(played, failure, fewest=1)
                    if failure is None or not failure.is_ours or tries > self._config.max_retries:
                        whole = replace(group, trajectories=played.trajectories)
                        if listener is not None:
                            listener.on_played(whole)
                        return whole
                raise AssertionError("a count has no end")

        with self._holdups.on():
            async with asyncio.TaskGroup() as tasks:
                playing = [tasks.create_task(play_row(index, row)) for index, row in enumerate(rows)]
        return [task.result() for task in playing]

    def _admit(self) -> None:
        for _ in range(_ADMITTED_AT_ONCE):
            if not self._gate.capacity or self._left:
                break
            prompt_id, row = self._stream.next()
            version = self._gate.admit(prompt_id, since=self._calls.admitted(prompt_id))
            self._listener.on_drawn(prompt_id, version)
            self._calls.open(prompt_id, version)
            task = self._tasks[prompt_id] = asyncio.create_task(self._play(prompt_id, row, version), name=f"group {prompt_id}")
            task.add_done_callback(self._notice_crash)
        else:
            asyncio.get_running_loop().call_soon(self._admit_rest)
        self.idle.look()

    def _admit_rest(self) -> None:
        with Caught() as caught:  # a callback of the loop has nobody to raise to
            self._admit()
        if caught.error is not None:
            self._crash = caught.error
            self._changed.set()

    def _notice_crash(self, task: asyncio.Task[None]) -> None:
        """Let the next batch raise an unexpected exception: not a failed episode, but a defect, or a prompt that cannot be drawn."""
        if not task.cancelled() and (crash := task.exception()) is not None:
            self._crash = crash
            self._changed.set()

    async def _play(self, prompt_id: str, row: Row, version: Version) -> None:
        sampling = self.sampling
        if self._seed is not None:  # another try samples other tokens, as the same ones may fail again
            sampling = replace(sampling, seed=mixed(self._seed, prompt_id, self._num_tries[prompt_id]))
        group, failure = await self._player.play(
            prompt_id, row, self._config.group_size, sampling, version=version, accounts=self._accounts, calls=self._calls)
        if self._tasks.get(prompt_id) is not asyncio.current_task():
            return  # cancelled, but user code swallowed that; by now this prompt belongs to another task
        played = self._check(group)
        group, failure = screen(played, failure)
        refused: Kind | None = None
        if failure is None:
            group, failure, refused = self._judge(group)
            if refused is not None:
                self._stream.note(played)
        if failure is not None:
            self._failures.append(failure.error)
        else:
            self._failures.clear()
        del self._tasks[prompt_id]
        self._calls.close(prompt_id)
        if failure is not None:
            self._drop(group, failure.kind, played=played, again=failure.again)
        elif refused is not None:
            self._drop(group, refused, played=played, again=False)
        else:
            self._keep(group)
        if len(self._failures) < self._config.max_failures_in_a_row:
            self._admit()
        self._changed.set()

    def _check(self, group: Group) -> Group:
        checked = replace(group, trajectories=self._checks.check(
            group.trajectories, oldest=group.admitted_version, newest=self._gate.version))
        self._outcomes.played(group.prompt_id, checked.verdicts)
        return checked

    def _keep(self, group: Group) -> None:
        self._ready[group.prompt_id] = group
        self._gate.finish(group.prompt_id)
        self._listener.on_finished(group)
        self._outcomes.settled(group.prompt_id, None)
        del self._num_tries[group.prompt_id]
        if unusable := [t.reason for t in group.verdicts if t.unusable is not None]:
            self._listener.on_unusable(group.prompt_id, unusable)

    def _drop(self, group: Group, kind: Kind, *, played: Group, again: bool) -> None:
        """Draw the prompt of a group again if that may help and has not been done too often; otherwise reject it for good."""
        prompt_id, reason = group.prompt_id, str(group.rejected)
        self._gate.release(prompt_id)
        self._num_tries[prompt_id] += 1
        if again and self._num_tries[prompt_id] <= self._config.max_retries:
            self._stream.give_back(prompt_id)
            self._outcomes.drawn_again()
            self._listener.on_rejected(Settled(prompt_id, reason, kind, drawn_again=True, played=played))
            return
        if self._num_tries[prompt_id] > 1:
            reason = f"{reason} (the last of {self._num_tries[prompt_id]} tries)"
        del self._num_tries[prompt_id]
        self._num_rejected += 1
        self._outcomes.settled(prompt_id, kind, reason)
        self._listener.on_rejected(Settled(prompt_id, reason, kind, played=played))

    def _judge(self, group: Group) -> tuple[Group, GroupFailure | None, Kind | None]:
        """Ask the user's filter, then dynamic sampling; returns why the group is refused, if it is."""
        group, failure, refused = self._player.ask_filter(group)
        if failure is None and refused is None and self._dynamic is not None and (reason := self._dynamic.rejects(group)):
            return replace(group, trajectories=(), rejected=reason), None, "equal rewards"
        return group, failure, refused

    def _requeue(self, prompt_ids: Sequence[str]) -> None:
        for prompt_id in prompt_ids:
            self._tasks.pop(prompt_id).cancel()
            self._calls.close(prompt_id)
            self._gate.release(prompt_id)
            self._stream.give_back(prompt_id)
            self._outcomes.requeued()
            self._listener.on_rejected(Settled(prompt_id, "it would have become too stale", "too stale", drawn_again=True))
        self._admit()

    def _raise_if_hopeless(self) -> None:
        if self._crash is not None:
            raise self._crash
        if len(self._failures) < self._config.max_failures_in_a_row:
            return
        first = self._failures[0]
        # An error that is not a RunError was raised by user code: the reward, or the workflow itself.
        kind = RolloutError if isinstance(first, RunError) else CodeError
        said = f"{type(first).__name__}: {first}" if isinstance(first, OffbeatError) else describe_at(first)
        raise kind(f"the last {len(self._failures)} groups of rollouts failed; the first with {said}") from first
