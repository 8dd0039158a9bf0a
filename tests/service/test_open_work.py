"""Requests that have not ended: who waits hears how things are, and each comes to one outcome, stored with its model's progress."""

import asyncio
from pathlib import Path

from offbeat.service.futures import Future
from offbeat.service.ids import training_request
from offbeat.service.models import Model
from offbeat.service.open_work import OpenWork
from offbeat.service.types import Failed, Pending, StepDone
from offbeat.service.work import Leave, OptimizerStep, Work
from small_service import ALICE, STEP, Open, SmallCluster


def open_work(running: Open) -> OpenWork:
    service = running.service
    return OpenWork(futures=service._futures, usage=running.usage, models=service._models)


async def a_model(running: Open) -> Model:
    model = running.service._models.get((await running.model()).model_id)
    assert model is not None
    return model


def begin(running: Open, model: Model, seq: int, work: OpenWork) -> tuple[Work, Future]:
    """A step that was accepted and charged."""
    future, _ = running.service._futures.open(training_request(model.id, seq), owner="alice", kind="optim_step")
    step = Work(seq, model, seq, OptimizerStep(STEP), future)
    step.charged = {"queued_tokens": 5, "queued_bytes": 7}
    running.usage.add("alice", **step.charged)
    work.add(step)
    return step, future


def test_a_request_has_one_outcome_which_releases_what_it_was_charged(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            work, model = open_work(running), await a_model(running)
            step, future = begin(running, model, 1, work)
            assert work.has(model) and work.models == {model} and step.request_name == future.request_id
            assert (work.standing().jobs, work.standing().tokens) == (1, 5) and running.usage.of("alice").queued_tokens == 5
            work.end_soon(step, Failed("not this time", "server"))
            work.end_soon(step, StepDone({}))
            await work.wait_for_tails()
            assert await running.outcome(future.request_id) == Failed("not this time", "server"), "the first outcome stands"
            assert not work.has(model) and running.usage.of("alice").queued_tokens == 0
            assert [(failure.request_id, failure.owner) for failure in work.failures] == [(future.request_id, "alice")]
            assert model.row.last_seq == 1, "its number is used, and that is stored"

    cluster.run(body)


def test_whoever_waits_hears_how_things_are(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            work, model = open_work(running), await a_model(running)
            paused = Pending("paused_capacity", "for a while")
            before, _ = begin(running, model, 1, work)
            work.tell(paused)
            after, future = begin(running, model, 2, work)
            for seq in (1, 2):
                assert await running.service.retrieve(ALICE, training_request(model.id, seq), timeout_s=0) == paused
            work.tell(Pending())
            assert await running.service.retrieve(ALICE, future.request_id, timeout_s=0) == Pending()
            for step in (before, after):
                work.end_soon(step, StepDone({}))
            await work.wait_for_tails()

    cluster.run(body)


def test_a_request_for_whose_outcome_nobody_waits_just_ends(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            work, model = open_work(running), await a_model(running)
            leave = Work(1, model, 0, Leave(ends=False), None)
            work.add(leave)
            assert work.is_leaving(model) and leave.request_name == model.id
            work.end_soon(leave, Failed("the trainers failed", "server"))
            assert not work.is_leaving(model) and not work.failures and work.standing().jobs == 0

    cluster.run(body)


def test_settling_waits_for_tails_of_tails_and_cancelling_ends_them(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            work, done = open_work(running), []

            async def tail(left: int) -> None:
                await asyncio.sleep(0)
                done.append(left)
                if left:
                    work.spawn(tail(left - 1))

            work.spawn(tail(2))
            await work.wait_for_tails()
            assert done == [2, 1, 0]
            endless = work.spawn(asyncio.Event().wait())  # pyright: ignore[reportArgumentType]
            work.cancel()
            await work.wait_for_tails()
            assert endless.cancelled()

    cluster.run(body)
