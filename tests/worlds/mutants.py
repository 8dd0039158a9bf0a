"""Planted defects, by name: each replaces a piece of the product in the process of a life, and the worlds have to find it."""

import os
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from offbeat import disk
from offbeat.checkpoint import recover
from offbeat.controller.rescue import Rescue
from offbeat.engine.inside.owners import Owners
from offbeat.errors import EngineError
from offbeat.fleet.dispatch import Dispatcher
from offbeat.fleet.publication import PublishReport
from offbeat.fleet.publishers import Fanouts
from offbeat.inference import client
from offbeat.inference.dialects import embedded
from offbeat.journal.run_journal import RunJournal
from offbeat.loading import load_module
from offbeat.rollout.calls import _WatchedCall
from offbeat.rollout.executor import RolloutExecutor
from offbeat.rollout.staleness import Gate
from offbeat.weights.proof import Outcome, ProofJudge, Verdict
from worlds import stand_in_child, stand_in_trainer


def gate_without_deadlines() -> None:
    """The gate takes groups although others will miss their deadlines."""
    Gate._first_missed_deadline = lambda _self, _chosen, _version: None  # type: ignore[method-assign]


def bound_off_by_one() -> None:
    """A group may be one version staler than `max_head_offpolicyness`."""
    real = Gate.__init__

    def init(self: Any, *, eta: int, **named: Any) -> None:
        real(self, eta=eta + 1, **named)

    Gate.__init__ = init  # type: ignore[method-assign]


def served_at_once() -> None:
    """Engines count as serving a version as soon as it is written."""
    real = Fanouts.fan_out

    def fan_out(self: Any, written: Any, on_served: Any) -> None:
        on_served(PublishReport(written.manifest.version, 0, 0, 0, 0, 0, (), {}))
        real(self, written, lambda _report: None)

    Fanouts.fan_out = fan_out  # type: ignore[method-assign]


def requeued_prompt_lost() -> None:
    """A prompt whose group would have become too stale is not drawn again."""
    real = RolloutExecutor._requeue

    def requeue(self: Any, prompt_ids: Any) -> None:
        stream, self._stream = self._stream, SimpleNamespace(give_back=lambda _prompt: None, next=self._stream.next)
        try:
            real(self, prompt_ids)
        finally:
            self._stream = stream

    RolloutExecutor._requeue = requeue  # type: ignore[method-assign]


def trained_prompt_returns() -> None:
    """A checkpoint takes the prompts of the step that it saves for prompts in flight."""
    def end_step(self: Any, step: Any) -> None:
        self._whole = step

    Rescue.end_step = end_step  # type: ignore[method-assign]


def running_prompts_forgotten() -> None:
    """A checkpoint does not record the prompts whose groups still run."""
    RolloutExecutor.in_flight = property(lambda self: (*self._ahead, *self._gate.ready))  # type: ignore[assignment]


def newest_version_stamped() -> None:
    """All tokens of a sample are stamped with the version of its last one."""
    real = embedded.read_samples

    def read(*args: Any, **named: Any) -> Any:
        return [
            replace(each, token_versions=np.full_like(each.token_versions, each.token_versions.max())) for each in real(*args, **named)]

    embedded.read_samples = read


def proof_ignored() -> None:
    """Every proof is believed."""
    ProofJudge.judge = lambda _self, _engine, _wanted, _proof: Verdict(Outcome.PROVEN, 0.0)  # type: ignore[method-assign]


def proof_not_awaited() -> None:
    """An answer is taken before its engine has proven the weights that gave it."""
    real = Dispatcher._ask

    async def ask(self: Any, member: Any, request: Any, wanted: Any) -> Any:
        if wanted is not None:
            return await real(self, member, request, wanted)
        return await member.while_in_service(request.ask(member.client, ""))

    Dispatcher._ask = ask  # type: ignore[method-assign]


def journal_not_read() -> None:
    """A run that goes on does so from its checkpoint alone."""
    RunJournal.read = lambda _self, _base: None  # type: ignore[method-assign, assignment]


def running_tokens_forgotten() -> None:
    """Samples that were not finished at a kill begin anew."""
    real = _WatchedCall.hear

    def hear(self: Any, every_s: float, n: int) -> Any:
        self.answers = ()
        return real(self, every_s, n)

    _WatchedCall.hear = hear  # type: ignore[method-assign]


def sync_forgotten() -> None:
    """Files are not synced when they are said to be saved."""
    real = disk.sync

    def sync(path: Any) -> None:
        if not os.fspath(path).endswith((".json", ".part")):
            real(path)

    disk.sync = recover.sync = stand_in_trainer.sync = sync


def waits_without_deadlines() -> None:
    """Requests to engines and calls of processes have no deadline."""
    @asynccontextmanager
    async def deadline(_name: str, _timeout_s: float, *, clock: Any = None) -> Any:
        del clock
        yield

    client.deadline = stand_in_child.deadline = deadline


def verdict_not_heard() -> None:
    """In SPMD mode, other ranks use an engine again that says it has the version, though rank 0 has refused its weights.

    They did until the change "Let an engine serve the other ranks only once it has proven the version to rank 0".
    """
    followed = load_module("offbeat.spmd.peers").Followed

    async def look(self: Any, engine: Any) -> Any:
        if (await engine.health(timeout_s=15.0)).get("version") != self._version:
            raise EngineError(f"{engine.name} serves another version")
        return self._version

    followed._look = look


def failure_not_told() -> None:
    """In SPMD mode, a rank that fails does not tell the others."""
    load_module("offbeat.sync.sync").Sync._give_up = lambda _self, _verdict: None


def owner_ignored() -> None:
    """An engine lets anybody publish to it."""
    Owners.refusal = lambda _self, _header, *, now_s: ""  # type: ignore[method-assign]


def earlier_start_let_in() -> None:
    """An engine lets an earlier start of the run that owns it publish to it."""
    real = Owners.refusal

    def refusal(self: Any, header: str, *, now_s: float) -> str:
        for user in self._users.values():
            user.start = 0
        return real(self, header, now_s=now_s)

    Owners.refusal = refusal  # type: ignore[method-assign]


IN_SPMD = ("verdict_not_heard", "failure_not_told")
"""Mutants that worlds of SPMD mode have to find."""

MUTANTS: dict[str, Callable[[], None]] = {each.__name__: each for each in (
    gate_without_deadlines, bound_off_by_one, served_at_once, requeued_prompt_lost, trained_prompt_returns, running_prompts_forgotten,
    newest_version_stamped, proof_ignored, proof_not_awaited, journal_not_read, running_tokens_forgotten, sync_forgotten,
    waits_without_deadlines, owner_ignored, earlier_start_let_in, verdict_not_heard, failure_not_told)}
