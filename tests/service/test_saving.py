"""Checkpoints of models: what is loaded is what was saved, by whoever may, or one sentence says why not."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyrage
import pytest

from offbeat.inference.sampling import Sampling
from offbeat.service.errors import RequestError, UnknownError
from offbeat.service.ids import CheckpointPath
from offbeat.service.limits import Limits
from offbeat.service.types import CheckpointSaved, Failed, Outcome, PassDone, SamplerSaved, WeightsLoaded
from small_service import ALICE, BASE, BOB, LORA, STEP, Client, Open, SmallCluster, training_data


async def losses(model: Client) -> np.ndarray:
    (outcome,) = await model.both(model.learn(training_data(9), forward_only=True))
    assert isinstance(outcome, PassDone), outcome
    return outcome.losses


async def trained(running: Open) -> Client:
    model = await running.model()
    await model.both(model.learn(training_data(1)), model.step())
    return model


def reason(outcome: Outcome, category: str = "user") -> str:
    assert isinstance(outcome, Failed) and outcome.category == category, outcome
    return outcome.message


def test_training_goes_on_exactly_from_a_checkpoint_and_with_a_fresh_optimizer_if_asked(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            model = await trained(running)
            (saved,) = await model.both(model.save(None))
            assert isinstance(saved, CheckpointSaved) and saved.path.endswith("/weights/000003") and saved.size_bytes > 1000
            await model.both(model.learn(training_data(2)), model.step())
            straight = await losses(model)
            for seq, optimizer in enumerate((True, False), start=1):
                other, resumed = await running.model(), await model.resumed(saved.path, optimizer=optimizer, seq=seq)
                await other.both(other.load(saved.path, optimizer=optimizer))
                for again in (other, resumed):
                    await again.both(again.learn(training_data(2)), again.step())
                    assert np.array_equal(await losses(again), straight) is optimizer

    cluster.run(body)


def test_a_model_is_loaded_into_as_its_first_request_only(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            model = await trained(running)
            (saved,) = await model.both(model.save("one"))
            assert isinstance(saved, CheckpointSaved)
            before = await losses(model)
            with pytest.raises(RequestError, match="not permitted as request 5 of a model, only as its first; create") as told:
                await model.load(saved.path)
            assert told.value.status == 400
            with pytest.raises(UnknownError):
                await replace(model, caller=BOB).load(saved.path)
            np.testing.assert_array_equal(await losses(model), before)

    cluster.run(body)


def test_an_export_for_recipients_is_read_by_them_alone_and_is_what_a_plain_one_holds(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            model = await trained(running)
            ours, theirs, stranger = (pyrage.x25519.Identity.generate() for _ in range(3))
            recipients = (str(ours.to_public()), str(theirs.to_public()))
            plain, secret = await model.both(model.export("plain"), model.export("secret", recipients=recipients))
            assert isinstance(plain, CheckpointSaved) and isinstance(secret, CheckpointSaved)
            files, encrypted = (running.service.library.external_files(ALICE, saved.path) for saved in (plain, secret))
            assert set(files) == {"adapter_config.json", "adapter_model.safetensors"}
            assert set(encrypted) == {f"{name}.age" for name in files}
            folder = next(iter(encrypted.values())).parent
            assert {path.suffix for path in folder.iterdir()} == {".age", ".json"}, "and the manifest"
            for name, file in files.items():
                data = encrypted[f"{name}.age"].read_bytes()
                assert data.startswith(b"age-encryption.org/v1\n")
                for identity in (ours, theirs):
                    assert pyrage.decrypt(data, [identity]) == file.read_bytes()
                with pytest.raises(pyrage.DecryptError):
                    pyrage.decrypt(data, [stranger])

    cluster.run(body)


def test_what_cannot_be_loaded_or_saved_is_one_sentence_and_changes_nothing(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path, limits=Limits(max_disk_bytes=200_000)) as running:
            model, other = await trained(running), await running.model(BOB)
            saved, sampler = await model.both(model.save("one"), model.sampler("one"))
            assert isinstance(saved, CheckpointSaved) and isinstance(sampler, SamplerSaved)
            before = await losses(model)
            small = await running.model(lora=replace(LORA, rank=2))
            others, fresh = await running.model(BOB), await running.model()
            taken, kind, rank, foreign, missing = [
                *(await model.both(model.save("one"))), *(await fresh.both(fresh.load(sampler.path))),
                *(await small.both(small.load(saved.path))), *(await other.both(other.load(saved.path))),
                *(await others.both(others.load(f"{saved.path}-not")))]
            assert "already; choose another name" in reason(taken)
            assert "holds no state to train on from" in reason(kind)
            assert "rank 4 and the model one of rank 2" in reason(rank)
            assert reason(foreign).replace("one,", "one-not,") == reason(missing)
            full = reason((await model.both(*(model.save(f"more-{i}") for i in range(20))))[-1])
            assert "your checkpoints, samplers and answers take up" in full and running.usage.of("alice").disk_bytes <= 200_000
            row = running.service.checkpoints.readable(ALICE, CheckpointPath.parse(saved.path))
            (running.service.checkpoints.path(row.folder) / "adapter_state.safetensors").write_bytes(b"broken")
            broken = await running.model()
            assert "is not what was written" in reason((await broken.both(broken.load(saved.path)))[0], "server")
            np.testing.assert_array_equal(await losses(model), before)

    cluster.run(body)


def test_a_failed_creation_from_a_checkpoint_leaves_no_model(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            model = await trained(running)
            (sampler,) = await model.both(model.sampler("one"))
            assert isinstance(sampler, SamplerSaved)
            session = await running.service.create_session(ALICE, metadata={}, tags=(), display_name="")
            for seq, path in enumerate((sampler.path, sampler.path.replace("one", "two"))):
                request = await running.service.create_from_weights(
                    ALICE, session_id=session, model_seq_id=seq, path=path, optimizer=True, base_model=None, metadata={})
                reason(await running.outcome(request))
            assert running.service.session_info(ALICE, session).run_ids == () and running.usage.of("alice").models == 1
            request = await running.service.create_from_weights(
                ALICE, session_id=session, model_seq_id=5, path=sampler.path, optimizer=True, base_model="org/other", metadata={})
            assert "no base model 'org/other', only 'org/small'" in reason(await running.outcome(request))

    cluster.run(body)


def test_public_checkpoints_are_for_everybody_and_outlive_their_deletion_where_they_are_used(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            model = await trained(running)
            (saved,) = await model.both(model.save("one"))
            assert isinstance(saved, CheckpointSaved)
            await running.service.library.set_public(ALICE, saved.path, public=True)
            session = await running.service.create_session(BOB, metadata={}, tags=(), display_name="")
            request = await running.service.create_from_weights(
                BOB, session_id=session, model_seq_id=0, path=saved.path, optimizer=True, base_model=BASE, metadata={})
            assert isinstance(await running.outcome(request, BOB), WeightsLoaded)
            await running.service.library.delete_checkpoint(ALICE, saved.path)
            copy = Client(running, BOB, f"{session}:train:0")
            np.testing.assert_array_equal(await losses(copy), await losses(model))
        async with cluster.open(tmp_path) as running:
            copy.open = running
            assert len(await losses(copy)) == 3  # from the files of what was deleted

    cluster.run(body)


def test_each_sampler_has_a_version_of_its_own_that_engines_know(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            model = await trained(running)
            await model.both(model.sampler("a"), model.learn(training_data(3)), model.step(STEP), model.sampler("b"))
            names = {}
            for name in "ab":
                row = running.service.checkpoints.readable(ALICE, CheckpointPath(model.model_id, "sampler", name))
                names[row.version] = (await running.service.checkpoints.adapter(row.folder)).name
            assert sorted(names) == [0, 1]
            generate = cluster.adapters.fleet.dispatcher.generate
            samples = [(await generate((7, 8), Sampling(8), n=1, adapter=name))[0] for name in names.values()]
            assert [set(sample.versions) for sample in samples] == [{0}, {1}]
            status = running.service.status()
            (engine,) = status.engines
            assert set(names.values()) <= set(engine.adapters) and engine.outstanding_tokens == 0 and status.sampled_tokens >= 2
            await running.service.library.delete_checkpoint(ALICE, f"tinker://{model.model_id}/sampler_weights/a")
            assert not running.service.checkpoints.path(row.folder).parent.joinpath("nothing").exists()
            assert len(list((tmp_path / "checkpoints").iterdir())) == 1

    cluster.run(body)
