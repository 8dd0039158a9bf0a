"""The service's core from end to end, on real ranks and an engine."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.service.errors import BadRequestError, LostError, RequestError, UnknownError
from offbeat.service.ids import CheckpointPath
from offbeat.service.service import ServiceSettings
from offbeat.service.types import Caller, CheckpointSaved, Failed, PassDone, SamplerSaved, StepDone, WeightsLoaded
from small_service import ALICE, BASE, BOB, LORA, Client, SmallCluster, training_data
from waiting import until


async def losses(model: Client) -> np.ndarray:
    (outcome,) = await model.both(model.learn(training_data(9), forward_only=True))
    assert isinstance(outcome, PassDone), outcome
    return outcome.losses


def test_a_model_is_trained_saved_loaded_and_sampled(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            model = await running.model()
            data = training_data(1)
            first, step, second = await model.both(model.learn(data), model.step(), model.learn(data, forward_only=True))
            assert isinstance(first, PassDone) and isinstance(second, PassDone) and isinstance(step, StepDone)
            assert [row.shape for row in first.logprobs] == [(8,)] * 3
            assert first.metrics["loss:sum"] == pytest.approx(-sum(row.sum() for row in first.logprobs), rel=1e-5)
            assert second.metrics["loss:sum"] < first.metrics["loss:sum"] and step.metrics["grad_norm"] > 0
            saved, named, ephemeral, external = await model.both(
                model.save("one"), model.sampler("named"), model.sampler(number=0), model.export("out"))
            assert isinstance(saved, CheckpointSaved) and saved.path == f"tinker://{model.model_id}/weights/one"
            assert named == SamplerSaved(path=f"tinker://{model.model_id}/sampler_weights/named")
            assert isinstance(ephemeral, SamplerSaved) and ephemeral.sampling_session_id.endswith(":sample:0")
            assert isinstance(external, CheckpointSaved) and external.kind == "external"
            files = running.service.library.external_files(ALICE, external.path)
            assert set(files) == {"adapter_config.json", "adapter_model.safetensors"} and all(path.is_file() for path in files.values())
            await model.both(model.learn(data), model.step())
            with pytest.raises(RequestError, match="only as its first"):
                await model.load(saved.path)
            other = await running.model()
            loaded, again = await other.both(other.load(saved.path), other.learn(data, forward_only=True))
            assert loaded == WeightsLoaded(saved.path, other.model_id)
            assert isinstance(again, PassDone)
            np.testing.assert_allclose(again.losses, second.losses, atol=1e-6)
            session = await running.service.create_session(ALICE, metadata={}, tags=(), display_name="")
            request = await running.service.create_from_weights(
                ALICE, session_id=session, model_seq_id=3, path=saved.path, optimizer=True, base_model=BASE, metadata={})
            assert await running.outcome(request) == WeightsLoaded(saved.path, f"{session}:train:3")

    cluster.run(body)


def test_after_a_kill_all_is_as_it_was_when_it_was_last_acknowledged(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path, graceful=False) as running:
            model, idle = await running.model(), await running.model(BOB)
            finished = await model.learn(training_data(1))
            await running.outcome(finished)
            await model.both(model.step(), model.save("one"), model.sampler(number=7))
            answered = running.answers[(await running.service.retrieve(ALICE, finished, timeout_s=1)).data]  # pyright: ignore
            at_checkpoint, untouched = await losses(model), await losses(idle)
            await model.both(model.learn(training_data(2)), model.step())
        async with cluster.open(tmp_path) as running:
            model.open = idle.open = running
            assert await running.outcome(finished) is answered
            session = model.model_id.split(":")[0]
            assert running.service.session_info(ALICE, session).sampler_ids == (f"{session}:sample:7",)
            assert [info.name for info in running.service.library.list_checkpoints(ALICE)[0]] == ["one"]
            assert running.service.model_info(ALICE, model.model_id).lora == LORA
            lost = await model.both(model.learn(training_data(3)), model.step())
            assert all(isinstance(outcome, Failed) and outcome.category == "server" for outcome in lost)
            assert "went back to its last checkpoint (step 1) because the server was restarted" in lost[0].message  # pyright: ignore
            np.testing.assert_array_equal(await losses(model), at_checkpoint)
            np.testing.assert_array_equal(await losses(idle), untouched)
            assert (await running.service.create_model(
                ALICE, session_id=session, model_seq_id=0, base_model=BASE, lora=LORA, metadata={})) == f"{model.model_id}:create"

    cluster.run(body)


def test_a_request_that_a_restart_has_lost_holds_up_no_other_and_lost_training_is_told(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        patient = ServiceSettings(patience_s=30)
        async with cluster.open(tmp_path, graceful=False, settings=patient) as running:
            model = await running.model()
            await model.both(model.learn(training_data(1)))
            model.seq += 1
            unfinished = await model.learn(training_data(1))  # waits for the number before it
        async with cluster.open(tmp_path, settings=patient) as running:
            running.service.skip(ALICE, model.model_id, model.seq - 1)
            model.open = running
            with pytest.raises(LostError):
                await running.service.retrieve(ALICE, unfinished, timeout_s=1)
            told, also = await model.both(model.learn(training_data(1)), model.step())
            assert isinstance(told, Failed) and "went back" in told.message and told == also
            assert len(await losses(model)) == 3

    cluster.run(body)


def test_after_a_graceful_end_training_goes_on_exactly(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        straight = []
        for name, interrupted in (("a", False), ("b", True)):
            (tmp_path / name).mkdir()
            async with cluster.open(tmp_path / name) as running:
                model = await running.model()
                await model.both(model.learn(training_data(1)), model.step())
                if not interrupted:
                    await model.both(model.learn(training_data(2)), model.step())
                    straight.append(await losses(model))
            if interrupted:
                async with cluster.open(tmp_path / name) as running:
                    model.open = running
                    assert running.service.status().models[0].step == 1
                    await model.both(model.learn(training_data(2)), model.step())
                    straight.append(await losses(model))
        np.testing.assert_allclose(*straight, rtol=1e-5)

    cluster.run(body)


def test_nobody_sees_or_touches_what_is_anothers(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            service, library, model = running.service, running.service.library, await running.model()
            request = await model.learn(training_data(1))
            await running.outcome(request)
            (saved,) = await model.both(model.save("one"))
            assert isinstance(saved, CheckpointSaved)
            stranger = Client(running, BOB, model.model_id)
            session = model.model_id.split(":")[0]

            async def sentence(act: Callable[[], Any]) -> str:
                with pytest.raises(UnknownError) as error:
                    found = act()
                    await found if asyncio.iscoroutine(found) else None
                return str(error.value)

            for act in (
                stranger.step, lambda: service.model_info(BOB, model.model_id), lambda: service.session_info(BOB, session),
                lambda: service.heartbeat(BOB, session), lambda: service.finish_session(BOB, session, "success"),
                lambda: library.delete_checkpoint(BOB, saved.path), lambda: library.set_public(BOB, saved.path, public=True),
                lambda: library.set_ttl(BOB, saved.path, 5000), lambda: library.weights_info(BOB, saved.path),
                lambda: library.list_checkpoints(BOB, run_id=model.model_id), lambda: library.run_info(BOB, model.model_id),
                lambda: library.external_files(BOB, saved.path), lambda: service.retrieve(BOB, request, timeout_s=1),
                lambda: service.create_model(
                    BOB, session_id=session, model_seq_id=4, base_model=BASE, lora=LORA, metadata={}),
                lambda: library.copy_weights(
                    Caller("carol"), path=saved.path, session_id=session, model_seq_id=1, ttl_s=None)):
                await sentence(act)
            theirs, nothing = "22222222-2222-4222-8222-222222222222:train:0", model.model_id
            assert await sentence(lambda: service.model_info(BOB, theirs)) == (
                await sentence(lambda: service.model_info(BOB, nothing))).replace(nothing, theirs)
            assert library.runs(BOB, limit=10, offset=0) == ([], 0) and library.list_checkpoints(BOB) == ([], 0)

    cluster.run(body)


def test_what_is_wrong_with_a_request_is_said_at_once(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            service, model = running.service, await running.model()
            session = model.model_id.split(":")[0]
            for act, sentence in (
                (model.save("../up"), "name"), (model.load("/etc/passwd"), "not the path of a checkpoint"),
                (model.load(f"tinker://{model.model_id}/weights/.."), "name"), (model.sampler(), "give one"), (model.export(""), "name")):
                with pytest.raises(BadRequestError, match=sentence):
                    await act
            model.seq = -1
            with pytest.raises(BadRequestError, match="seq_id must be at least 1, got 0"):
                await model.step()
            for base, lora, sentence in (("org/other", LORA, "only 'org/small'"), (BASE, LORA.__class__(99, 1.0, 0), "must be 1 to 8")):
                request = await service.create_model(
                    ALICE, session_id=session, model_seq_id=len(sentence), base_model=base, lora=lora, metadata={})
                outcome = await running.outcome(request)
                assert isinstance(outcome, Failed) and outcome.category == "user" and sentence in outcome.message

    cluster.run(body)


def test_the_status_tells_what_everybody_takes_up(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            assert running.service.status().models == ()
            model = await running.model()
            await running.model(BOB)
            await model.both(model.learn(training_data(1)), model.step(), model.save("one"))
            await until(lambda: running.service.status().training.jobs == 0)
            status = running.service.status()
            assert status.base_model == BASE and status.trainers_alive and status.trained_tokens == 24 and status.failures == ()
            assert {(m.owner, m.step, m.resident, m.rank) for m in status.models} == {("alice", 1, True, 4), ("bob", 0, False, 4)}
            alice, bob = status.owners
            assert (alice.owner, alice.models, alice.queued_tokens, alice.queued_bytes, alice.sessions) == ("alice", 1, 0, 0, 1)
            assert alice.disk_bytes > 10_000 > bob.disk_bytes, "bob has no more than the answer to a creation"
            assert [engine.name for engine in status.engines] == ["engine 0"]

    cluster.run(body)


def test_no_acknowledged_checkpoint_is_lost_whenever_the_server_is_killed(cluster: SmallCluster, tmp_path: Path) -> None:
    """It is killed at random moments while three clients save; each checkpoint that a client has heard of is there, whole, as it was."""
    known: dict[str, np.ndarray] = {}

    async def train(model: Client) -> None:
        for number in range(100):
            *_, scored, saved = await model.both(
                model.learn(training_data(number)), model.step(), model.learn(training_data(9), forward_only=True), model.save(None))
            assert isinstance(scored, PassDone) and isinstance(saved, CheckpointSaved)
            known[saved.path] = scored.losses

    async def body() -> None:
        for seed in range(4):
            async with cluster.open(tmp_path, graceful=False) as running:
                clients = [asyncio.create_task(train(await running.model())) for _ in range(3)]
                await asyncio.sleep(0.3 + 0.37 * seed)
                await until(lambda least=2 * seed + 3: len(known) >= least)
                for client in clients:
                    client.cancel()
                await asyncio.gather(*clients, return_exceptions=True)
        async with cluster.open(tmp_path) as running:
            rows = {str(CheckpointPath(row.run_id, row.kind, row.name)): row for row in running.service.checkpoints.select()}
            assert known.keys() <= rows.keys()
            used = {row.folder for row in rows.values()}
            await until(lambda: {path.name for path in (tmp_path / "checkpoints").iterdir()} - {"orphans"} == used)
            for path in sorted(known)[::3]:
                model = await running.model()
                await model.both(model.load(path))
                np.testing.assert_allclose(await losses(model), known[path], rtol=1e-5)

    cluster.run(body)
