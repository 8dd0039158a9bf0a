"""What owners see of runs and checkpoints, and of those that others have made public."""

from pathlib import Path

import pytest

from offbeat.service.errors import RequestError
from offbeat.service.types import CheckpointSaved, WeightsLoaded
from small_service import ALICE, BASE, BOB, LORA, SmallCluster


def test_a_public_checkpoint_is_seen_by_others_until_it_is_private_again(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            library, model = running.service.library, await running.model()
            saved, _ = await model.both(model.save("one"), model.save("two"))
            assert isinstance(saved, CheckpointSaved)
            await library.set_public(ALICE, saved.path, public=True)
            assert library.runs(BOB, limit=10, offset=0, accessible=True)[1] == 1 and library.runs(BOB, limit=10, offset=0) == ([], 0)
            assert library.run_info(BOB, model.model_id, accessible=True).owner == "alice"
            assert library.weights_info(BOB, saved.path) == (BASE, LORA)
            (info,), total = library.list_checkpoints(BOB, run_id=model.model_id)
            assert (info.name, total) == ("one", 1) and library.newest_checkpoints(BOB, model.model_id)["training"].name == "one"
            assert library.list_checkpoints(ALICE, limit=1)[1] == 2
            await library.set_public(ALICE, saved.path, public=False)
            assert library.runs(BOB, limit=10, offset=0, accessible=True) == ([], 0)

    cluster.run(body)


def test_files_are_those_of_the_kind_of_checkpoint_that_is_asked_for(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            library, model = running.service.library, await running.model()
            saved, exported = await model.both(model.save("one"), model.export("out"))
            assert isinstance(saved, CheckpointSaved) and isinstance(exported, CheckpointSaved)
            assert library.adapter_files(ALICE, exported.path) == (library.external_files(ALICE, exported.path), BASE)
            assert Path(library.external_folder(ALICE, exported.path)).name
            with pytest.raises(RequestError, match="which cannot be downloaded as an adapter"):
                library.adapter_files(ALICE, saved.path)
            with pytest.raises(RequestError, match="training checkpoint, where one that is external"):
                library.external_files(ALICE, saved.path)
            assert library.list_checkpoints(ALICE, exports=False)[1] == 1

    cluster.run(body)


def test_a_copy_of_a_checkpoint_is_a_checkpoint_of_the_other_run(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            library, model = running.service.library, await running.model()
            (saved,) = await model.both(model.save("one"))
            assert isinstance(saved, CheckpointSaved)
            session = await running.service.create_session(ALICE, metadata={}, tags=(), display_name="mine")
            path = await library.copy_weights(ALICE, path=saved.path, session_id=session, model_seq_id=2, ttl_s=None)
            assert path == f"tinker://{session}:train:2/weights/one"
            await library.set_ttl(ALICE, path, 3600)
            (info, _), _ = library.list_checkpoints(ALICE)
            assert info.expires == pytest.approx(info.created + 3600, abs=30) and info.run_id.startswith(session)
            await library.delete_checkpoint(ALICE, saved.path)
            assert running.service.list_sessions(ALICE, limit=1, offset=0) == [session]
            fresh = await running.model()
            assert (await fresh.both(fresh.load(path)))[0] == WeightsLoaded(path, fresh.model_id)

    cluster.run(body)
