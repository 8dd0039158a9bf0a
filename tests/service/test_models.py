"""A model is the same wherever it was meanwhile, and what it has lost is told before more is done."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.errors import ModelError, StorageError
from offbeat.service.errors import RequestError
from offbeat.service.limits import Limits
from offbeat.service.models import Loss, Model
from offbeat.service.service import ServiceSettings
from offbeat.service.tables import ModelRow
from offbeat.service.types import CheckpointSaved, Failed, PassDone, StepDone
from small_service import ALICE, BASE, LORA, Client, Open, SmallCluster, training_data
from waiting import until


async def losses(model: Client) -> np.ndarray:
    (outcome,) = await model.both(model.learn(training_data(9), forward_only=True))
    assert isinstance(outcome, PassDone), outcome
    return outcome.losses


def test_a_loss_concerns_what_was_sent_before_its_client_heard() -> None:
    loss = Loss("gone")
    assert loss.concerns(5)
    loss.heard_at = 7
    assert loss.concerns(6) and not loss.concerns(7)


def test_a_stored_model_that_was_being_trained_has_lost_something() -> None:
    row = ModelRow("m", "s", "alice", 0.0, 0.0, BASE, LORA, step=3)
    clean = Model(row, counted=False)
    assert clean.loss is None and clean.step == 3 and not clean.is_dirty
    dirty = Model(ModelRow("m", "s", "alice", 0.0, 0.0, BASE, LORA, step=3, dirty=True), counted=False)
    assert dirty.loss is not None and "step 3" in dirty.loss.message and dirty.is_dirty


def test_the_model_of_a_silent_session_is_parked_and_comes_back_as_it_was(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path, settings=ServiceSettings(session_timeout_s=-1.0)) as running:
            model = await running.model()
            await model.both(model.learn(training_data(1)), model.step())
            before, bits = await losses(model), cluster.adapters.step_of(model.model_id.replace(":", "."))
            assert running.usage.of("alice").models == 1
            await until_parked(running)
            assert running.service.status().models[0].step == bits == 1 and running.usage.of("alice").models == 0
            np.testing.assert_array_equal(await losses(model), before)
            assert running.service.status().models[0].resident and running.usage.of("alice").models == 1
            await model.both(model.learn(training_data(1)))
            await until_parked(running)
            (told,) = await model.both(model.step())
            assert isinstance(told, Failed) and "nothing was heard of its session" in told.message
            np.testing.assert_array_equal(await losses(model), before)

    async def until_parked(running: Open) -> None:
        async with asyncio.timeout(120):
            while running.service.status().models[0].resident:
                await running.service.sweep()
                await asyncio.sleep(0.01)

    cluster.run(body)


def test_more_models_than_there_is_room_for_take_turns_in_the_trainers_and_lose_nothing(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        straight = []
        for name, most in (("a", 100), ("b", 2)):
            (tmp_path / name).mkdir()
            async with cluster.open(tmp_path / name, settings=ServiceSettings(patience_s=30, max_resident_models=most)) as running:
                models = [await running.model() for _ in range(5)]
                for seed in range(2):
                    ids = [(model, [await model.learn(training_data(seed)), await model.step()]) for model in models]
                    for model, requests in ids:
                        outcomes = [await model.outcome(request) for request in requests]
                        assert not any(isinstance(outcome, Failed) for outcome in outcomes), outcomes
                        assert sum(model.resident for model in running.service.status().models) <= most
                straight.append(np.stack([await losses(model) for model in models]))
                assert running.usage.of("alice").models == 5, "a model that made room is still one"
        np.testing.assert_allclose(*straight, rtol=1e-5)

    cluster.run(body)


def test_who_is_parked_is_idle_and_without_a_gradient_if_there_is_any(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path, settings=ServiceSettings(patience_s=30, max_resident_models=3)) as running:
            held, idle, newer = [await running.model() for _ in range(3)]
            await held.both(held.learn(training_data(1)))
            for model in (idle, newer):
                await model.both(model.learn(training_data(1)), model.step())
            late, last = await running.model(), await running.model()
            await losses(late)
            resident = {model.model_id for model in running.service.status().models if model.resident}
            assert resident == {held.model_id, newer.model_id, late.model_id}, "the one that was idle for longest has left"
            await losses(last)
            (stepped,) = await held.both(held.step())
            assert isinstance(stepped, StepDone) and stepped.metrics["grad_norm"] > 0, "the gradient was not touched"

    cluster.run(body)


def test_a_parked_model_of_a_client_that_left_ends_and_its_checkpoints_stay(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        settings = ServiceSettings(session_timeout_s=-1.0, parked_retention_s=0.3, session_retention_s=0.6)
        async with cluster.open(tmp_path, settings=settings) as running:
            model, other = await running.model(), await running.model()
            (saved,) = await model.both(model.save("kept"))
            await model.both(model.learn(training_data(1)), model.step())
            await other.both(other.learn(training_data(1)), other.step())
            assert isinstance(saved, CheckpointSaved)
            async with asyncio.timeout(120):
                while running.service._models.get(other.model_id) is not None or len(running.service.sessions._rows):
                    await running.service.sweep()
                    await asyncio.sleep(0.05)
            assert len(list((tmp_path / "checkpoints").iterdir())) == 1, "no state is left but the checkpoint"
            library = running.service.library
            assert library.run_info(ALICE, model.model_id).model_id == model.model_id, "a run with checkpoints is remembered"
            assert [info.name for info in library.list_checkpoints(ALICE)[0]] == ["kept"]
            assert len(running.store.load().models) == 1 and running.store.load().sessions == ()
            again = await running.model()
            (loaded,) = await again.both(again.load(saved.path))
            assert not isinstance(loaded, Failed)

    cluster.run(body)


def test_a_checkpoint_that_is_complete_after_its_session_has_ended_is_no_models_state(
    cluster: SmallCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            model, checkpoints, gate = await running.model(), running.service.checkpoints, asyncio.Event()
            seal = checkpoints.seal

            async def slow(folder: str) -> int:
                await gate.wait()
                return await seal(folder)

            monkeypatch.setattr(checkpoints, "seal", slow)
            saving = await model.save("late")
            await running.service.finish_session(ALICE, model.model_id.split(":")[0], "success")
            await until(lambda: not running.service.status().models)
            gate.set()
            saved = await running.outcome(saving)
            assert isinstance(saved, CheckpointSaved)
            await running.service.library.delete_checkpoint(ALICE, saved.path)
            assert not list((tmp_path / "checkpoints").iterdir())

    cluster.run(body)


def test_what_the_database_did_not_take_is_not_taken_for_stored(
    cluster: SmallCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def full(*_rows: object) -> None:
        raise StorageError("the disk is full")

    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            client, models = await running.model(), running.service._models
            model = models.get(client.model_id)
            assert model is not None
            with monkeypatch.context() as patch:
                patch.setattr(running.store, "put", full)
                with pytest.raises(StorageError):
                    await models.mark([model])
            await models.mark([model])
            assert running.store.load().models[0].dirty, "else a restart would lose what comes next in silence"
            await client.both(client.learn(training_data(1)), client.step())
            with monkeypatch.context() as patch:
                patch.setattr(running.store, "put", full)
                with pytest.raises(StorageError):
                    await models.save_state(model)
            assert model.row.state_folder == "" and model.is_dirty and not list((tmp_path / "checkpoints").iterdir())
            await models.save_state(model)
            assert running.store.load().models == (model.row,) and not model.is_dirty and model.row.step == 1

    cluster.run(body)


def test_models_of_ended_sessions_are_runs_that_take_nothing_more(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path, limits=Limits(max_models=1)) as running:
            model = await running.model()
            await model.both(model.learn(training_data(1)), model.step(), model.save("kept"))
            session = model.model_id.split(":")[0]
            refused = await running.service.create_model(
                ALICE, session_id=session, model_seq_id=1, base_model=BASE, lora=LORA, metadata={})
            outcome = await running.outcome(refused)
            assert isinstance(outcome, Failed) and "you have 1 of 1 models" in outcome.message and outcome.category == "user"
            late = await model.sampler(number=0)
            await running.service.finish_session(ALICE, session, "success")
            outcome = await running.outcome(late)
            assert isinstance(outcome, Failed) and "has ended" in outcome.message
            assert running.service.session_info(ALICE, session).sampler_ids == ()
            await until(lambda: running.usage.of("alice").models == 0)
            with pytest.raises(RequestError, match="has ended"):
                await model.step()
            assert running.service.library.run_info(ALICE, model.model_id).model_id == model.model_id
            assert running.service.status().models == ()
            another = await running.model()
            loaded = await another.both(another.load(f"tinker://{model.model_id}/weights/kept"))
            assert not isinstance(loaded[0], Failed)

    cluster.run(body)


@pytest.mark.parametrize(("rank", "sentence"), [(9, "must be 1 to 8 on this server, got 9")])
def test_an_adapter_that_cannot_be_trained_is_not_admitted(cluster: SmallCluster, tmp_path: Path, rank: int, sentence: str) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            models = running.service._models
            with pytest.raises(ModelError, match=sentence):
                models.admit(ModelRow("m", "s", "alice", 0.0, 0.0, BASE, LORA.__class__(rank, 1.0, 0)))
            assert running.usage.of("alice").models == 0

    cluster.run(body)


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"rank": 9}, "must be 1 to 8 on this server, got 9"), ({"rank": 0}, "must be 1 to 8"),
    ({"train_attn": False, "train_mlp": False}, "needs train_attn or train_mlp")])
def test_an_adapter_that_cannot_be_trained_is_refused_in_one_sentence(
    cluster: SmallCluster, tmp_path: Path, changes: dict[str, Any], sentence: str,
) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            session_id = await running.service.create_session(ALICE, metadata={}, tags=(), display_name="")
            refused = await running.outcome(await running.service.create_model(
                ALICE, session_id=session_id, model_seq_id=0, base_model=BASE, lora=replace(LORA, **changes), metadata={}))
            assert isinstance(refused, Failed) and refused.category == "user" and sentence in refused.message

    cluster.run(body)
