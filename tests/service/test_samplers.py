"""Samplers: each bound to its weights from the first use to the last, and to its owner."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from offbeat.errors import StorageError
from offbeat.service.base_models import BaseModels
from offbeat.service.errors import BadRequestError, RequestError, UnknownError
from offbeat.service.limits import Limits, Usage
from offbeat.service.samplers import Samplers
from offbeat.service.store import Store
from offbeat.service.tables import ModelRow, SamplerRow
from offbeat.service.types import Caller, LoraSpec
from sampler_world import ALICE, BOB, CHECKPOINT, PATH, RUN, SESSION, World


def run(tmp_path: Path, body: Callable[[World, Samplers], Awaitable[None]], world: World | None = None) -> None:
    """A test's body on samplers that remember those of an earlier `run` in the same folder."""
    world = world or World()

    async def main(store: Store) -> None:
        await body(world, Samplers(
            store.load().samplers, engines=world, base_models=world.base_models, store=store, usage=world.usage, sessions=world,
            checkpoints=world, timeout_s=60.0,
            clock=lambda: world.now))

    with closing(Store.open(f"sqlite:///{tmp_path / 'db'}")) as store:
        asyncio.run(main(store))


async def used(samplers: Samplers, caller: Caller, sampler: str) -> str:
    async with samplers.using(samplers.find(caller, sampler)) as adapter:
        return adapter


async def snapshot(samplers: Samplers, seq: int, version: int) -> str:
    model = ModelRow(RUN, SESSION, "alice", 0.0, 0.0, "base", LoraSpec(1, 1.0, 0))
    return await samplers.add_ephemeral(model, seq=seq, version=version, folder=f"snapshot-{version}", size_bytes=40)


def test_samplers_of_the_base_and_of_a_checkpoint_are_made_once_and_sampled_by_their_owner_alone(tmp_path: Path) -> None:
    async def body(world: World, samplers: Samplers) -> None:
        base = await samplers.create(ALICE, session_id=SESSION, seq=0, base_model="base", model_path=None)
        named = await samplers.create(ALICE, session_id=SESSION, seq=1, base_model=None, model_path=PATH)
        assert (base, named) == (f"{SESSION}:sample:0", f"{SESSION}:sample:1")
        assert await samplers.create(ALICE, session_id=SESSION, seq=1, base_model=None, model_path=PATH) == named
        assert samplers.info(ALICE, base).model_path is None and samplers.info(ALICE, named).model_path == PATH
        assert (await used(samplers, ALICE, base), world.pinned) == ("", [])
        assert set(await asyncio.gather(*(used(samplers, ALICE, named) for _ in range(5)))) == {"t.folder-one@3"}
        assert world.reads == 1 and world.pinned == ["t.folder-one@3"]
        for caller, sampler in ((BOB, base), (ALICE, f"{SESSION}:sample:7")):
            with pytest.raises(UnknownError, match="there is no sampler"):
                samplers.find(caller, sampler)
        with pytest.raises(BadRequestError, match="another sampler already"):
            await samplers.create(ALICE, session_id=SESSION, seq=1, base_model="base", model_path=None)
        with pytest.raises(BadRequestError, match="another sampler already"):
            await snapshot(samplers, 1, 4)

    run(tmp_path, body)


@pytest.mark.parametrize(("arguments", "error", "sentence"), [
    ({"base_model": "other", "model_path": None}, BadRequestError, "no base model 'other', only 'base'"),
    ({"base_model": "other", "model_path": PATH}, BadRequestError, "no base model 'other'"),
    ({"base_model": None, "model_path": "tinker://x"}, BadRequestError, "is not the path of a checkpoint"),
    ({"base_model": None, "model_path": f"tinker://{RUN}/sampler_weights/two"}, UnknownError, "no such checkpoint"),
    ({"base_model": None, "model_path": PATH.replace("sampler_weights", "weights")}, BadRequestError, "save_weights_for_sampler"),
])
def test_what_cannot_be_sampled_is_refused_in_one_sentence(tmp_path: Path, arguments: dict, error: type[Exception], sentence: str) -> None:
    async def body(world: World, samplers: Samplers) -> None:
        training = PATH.replace("sampler_weights", "weights")
        world.checkpoints[training] = replace(CHECKPOINT, kind="training")
        with pytest.raises(error, match=sentence):
            await samplers.create(ALICE, session_id=SESSION, seq=0, **arguments)
        with pytest.raises(UnknownError, match="no such session"):
            await samplers.create(BOB, session_id=SESSION, seq=0, base_model="base", model_path=None)
        assert not samplers.ids_of(SESSION)

    run(tmp_path, body)


@pytest.mark.parametrize("change", [
    lambda world: world.checkpoints.clear(), lambda world: world.checkpoints.update({PATH: replace(CHECKPOINT, folder="folder-two")})])
def test_a_checkpoint_that_is_deleted_or_replaced_ends_its_samplers(tmp_path: Path, change: Callable[[World], None]) -> None:
    async def body(world: World, samplers: Samplers) -> None:
        named = await samplers.create(ALICE, session_id=SESSION, seq=1, base_model=None, model_path=PATH)
        async with samplers.using(samplers.find(ALICE, named)):
            change(world)
            assert samplers.uses("folder-one")
            await samplers.sweep()
            assert world.pinned == ["t.folder-one@3"], "a sample is being made of it"
        assert not samplers.uses("folder-one") and world.pinned == [] and world.released == ["folder-one"]
        with pytest.raises(RequestError, match=r"sampler_weights/one was deleted, replaced or made private"):
            await used(samplers, ALICE, named)

    run(tmp_path, body)


def test_a_public_checkpoint_is_sampled_by_others_until_it_is_private_again(tmp_path: Path) -> None:
    async def body(world: World, samplers: Samplers) -> None:
        world.checkpoints[PATH] = replace(CHECKPOINT, owner="bob", public=True)
        named = await samplers.create(ALICE, session_id=SESSION, seq=1, base_model="base", model_path=PATH)
        assert await used(samplers, ALICE, named) == "t.folder-one@3"
        world.checkpoints[PATH] = replace(CHECKPOINT, owner="bob")
        with pytest.raises(RequestError, match="made private"):
            await used(samplers, ALICE, named)
        await samplers.sweep()
        assert world.pinned == []

    run(tmp_path, body)


def test_snapshots_end_with_their_session_or_when_they_are_old_and_unused(tmp_path: Path) -> None:
    async def body(world: World, samplers: Samplers) -> None:
        base = await samplers.create(ALICE, session_id=SESSION, seq=9, base_model="base", model_path=None)
        ids = [await snapshot(samplers, seq, version=10 + seq) for seq in range(3)]
        for sampler in ids:
            await used(samplers, ALICE, sampler)
        assert len(world.pinned) == 3 and samplers.uses("snapshot-10")
        world.now += 50
        await used(samplers, ALICE, ids[0])
        world.now += 50
        await samplers.sweep()
        assert list(samplers.ids_of(SESSION)) == [base, ids[0], ids[2]], "one is in use, and one is the newest"
        assert world.released == ["snapshot-11"] and len(world.pinned) == 2 and not samplers.uses("snapshot-11")
        await samplers.end_session(SESSION)
        assert list(samplers.ids_of(SESSION)) == [base] and world.pinned == []
        with pytest.raises(UnknownError, match="ends with its session"):
            samplers.find(ALICE, ids[2])

    run(tmp_path, body)


def test_the_newest_snapshot_of_a_session_that_is_silent_ends_when_it_is_old(tmp_path: Path) -> None:
    async def body(world: World, samplers: Samplers) -> None:
        sampler = await snapshot(samplers, 0, version=4)
        world.now += 100
        await samplers.sweep()
        assert list(samplers.ids_of(SESSION)) == [sampler]
        world.silent = True
        await used(samplers, ALICE, sampler)
        await samplers.sweep()
        assert list(samplers.ids_of(SESSION)) == [sampler]
        world.now += 100
        await samplers.sweep()
        assert not samplers.ids_of(SESSION) and world.released == ["snapshot-4"]

    run(tmp_path, body)


def test_samplers_of_silent_sessions_that_nobody_uses_end_whatever_they_sample(tmp_path: Path) -> None:
    async def body(world: World, samplers: Samplers) -> None:
        base = await samplers.create(ALICE, session_id=SESSION, seq=0, base_model="base", model_path=None)
        named = await samplers.create(ALICE, session_id=SESSION, seq=1, base_model=None, model_path=PATH)
        await used(samplers, ALICE, named)
        assert samplers.session_ids == {SESSION} and world.usage.of("alice").samplers == 2
        world.now += 2 * 86400
        await samplers.sweep()
        assert len(samplers.ids_of(SESSION)) == 2, "its session is heard of"
        world.silent = True
        await used(samplers, ALICE, base)
        await samplers.sweep()
        assert list(samplers.ids_of(SESSION)) == [base] and world.pinned == [] and world.usage.of("alice").samplers == 1
        with pytest.raises(UnknownError, match="when its session is silent and it has not been used for 86400 s"):
            samplers.find(ALICE, named)

    run(tmp_path, body)


def test_an_owner_has_no_more_samplers_than_he_may_and_old_ones_make_room(tmp_path: Path) -> None:
    async def body(world: World, samplers: Samplers) -> None:
        async def create(seq: int) -> str:
            return await samplers.create(ALICE, session_id=SESSION, seq=seq, base_model="base", model_path=None)

        ids = [await create(seq) for seq in range(3)]
        with pytest.raises(RequestError, match="you have 3 of 3 samplers that you may have"):
            await create(3)
        assert await create(0) == ids[0], "it is there already"
        world.now, world.silent = world.now + 100, True
        await used(samplers, ALICE, ids[1])
        await create(3)
        assert set(samplers.ids_of(SESSION)) == {ids[1], f"{SESSION}:sample:3"}

    world = World(usage=Usage(lambda _: Limits(max_samplers=3)))
    run(tmp_path, body, world)


def test_a_sample_that_waits_while_its_snapshot_ends_is_refused(tmp_path: Path) -> None:
    async def body(world: World, samplers: Samplers) -> None:
        row = samplers.find(ALICE, await snapshot(samplers, 0, version=4))
        await samplers.end_session(SESSION)
        with pytest.raises(UnknownError, match="there is no sampler"):
            async with samplers.using(row):
                pass
        assert world.pinned == [] and row.id not in samplers._last_used

    run(tmp_path, body)


def test_snapshots_count_as_their_owners_disk_while_they_last(tmp_path: Path) -> None:
    async def before(world: World, samplers: Samplers) -> None:
        await samplers.create(ALICE, session_id=SESSION, seq=9, base_model=None, model_path=PATH)
        for seq in (0, 1, 2, 2):
            await snapshot(samplers, seq, version=seq)
        with pytest.raises(RequestError, match="take up 120 bytes"):
            await snapshot(samplers, 3, version=3)
        assert len(samplers.ids_of(SESSION)) == 4

    async def after(world: World, samplers: Samplers) -> None:
        assert world.usage.of("alice").disk_bytes == 120
        await samplers.end_session(SESSION)
        assert world.usage.of("alice").disk_bytes == 0

    run(tmp_path, before)
    run(tmp_path, after)


def test_a_sampler_that_could_not_be_stored_is_none_and_a_number_is_one_samplers_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(world: World, samplers: Samplers) -> None:
        async def full(*_rows: object) -> None:
            raise StorageError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(samplers._store, "put", full)
            for _ in range(2):
                with pytest.raises(StorageError):
                    await snapshot(samplers, 0, 1)
        assert not samplers.ids_of(SESSION) and world.usage.of("alice").disk_bytes == 0
        made = await asyncio.gather(
            samplers.create(ALICE, session_id=SESSION, seq=0, base_model="base", model_path=None),
            samplers.create(ALICE, session_id=SESSION, seq=0, base_model=None, model_path=PATH),
            samplers.create(ALICE, session_id=SESSION, seq=0, base_model="base", model_path=None), return_exceptions=True)
        assert made[0] == made[2] == f"{SESSION}:sample:0" and isinstance(made[1], BadRequestError)
        assert [row.path for row in samplers._store.load().samplers] == [""] and not samplers._adding

    run(tmp_path, body)


def test_samplers_are_there_after_a_restart_and_pin_their_weights_again(tmp_path: Path) -> None:
    async def before(world: World, samplers: Samplers) -> None:
        await samplers.create(ALICE, session_id=SESSION, seq=0, base_model=None, model_path=PATH)
        await snapshot(samplers, 1, version=4)
        await snapshot(samplers, 2, version=5)
        await samplers._end_rows([samplers.find(ALICE, f"{SESSION}:sample:1")])

    async def after(world: World, samplers: Samplers) -> None:
        assert set(samplers.ids_of(SESSION)) == {f"{SESSION}:sample:0", f"{SESSION}:sample:2"}
        assert await used(samplers, ALICE, f"{SESSION}:sample:0") == "t.folder-one@3"
        assert await used(samplers, ALICE, f"{SESSION}:sample:2") == "t.snapshot-5@3"
        row = samplers.find(ALICE, f"{SESSION}:sample:2")
        assert row == SamplerRow(row.id, SESSION, "alice", "base", "", RUN, 5, "snapshot-5", 40, 1000.0)

    run(tmp_path, before)
    run(tmp_path, after)


def test_a_model_that_is_only_sampled_has_samplers_until_this_server_has_it_no_more(tmp_path: Path) -> None:
    async def make(world: World, samplers: Samplers) -> None:
        teacher = await samplers.create(ALICE, session_id=SESSION, seq=0, base_model="teacher", model_path=None)
        alias = await samplers.create(ALICE, session_id=SESSION, seq=1, base_model="alias", model_path=None)
        assert (samplers.info(ALICE, teacher).base_model, samplers.info(ALICE, alias).base_model) == ("teacher", "base")
        assert await used(samplers, ALICE, teacher) == "" and samplers.count_by_owner() == {"alice": 2}
        with pytest.raises(BadRequestError, match="another sampler already"):
            await samplers.create(ALICE, session_id=SESSION, seq=0, base_model="base", model_path=None)
        with pytest.raises(BadRequestError, match="'teacher' can only be sampled"):
            await samplers.create(ALICE, session_id=SESSION, seq=2, base_model="teacher", model_path=PATH)
        assert await samplers.create(ALICE, session_id=SESSION, seq=2, base_model="alias", model_path=PATH)

    async def use(world: World, samplers: Samplers) -> None:
        with pytest.raises(BadRequestError, match="no base model 'teacher', only 'base'"):
            await used(samplers, ALICE, f"{SESSION}:sample:0")
        assert await used(samplers, ALICE, f"{SESSION}:sample:1") == ""

    run(tmp_path, make, World(base_models=BaseModels("base", ("alias",), ("teacher",))))
    run(tmp_path, use)


def test_what_a_chat_calls_a_model_is_one_sampler_of_the_weights_that_it_names_now(tmp_path: Path) -> None:
    async def body(world: World, samplers: Samplers) -> None:
        first, again = await asyncio.gather(*(samplers.of_model(ALICE, PATH) for _ in range(2)))
        assert first == again and (first.path, first.folder, first.version, first.run_id) == (PATH, "folder-one", 3, RUN)
        assert await used(samplers, ALICE, first.id) == "t.folder-one@3" and await samplers.of_model(ALICE, first.id) == first
        base = await samplers.of_model(ALICE, "base")
        assert (base.folder, base.path) == ("", "") and base.id != (await samplers.of_model(BOB, "base")).id
        assert world.usage.of("alice").samplers == 2
        world.checkpoints[PATH] = replace(CHECKPOINT, folder="folder-two", version=4)
        replaced = await samplers.of_model(ALICE, PATH)
        assert replaced.id != first.id and await used(samplers, ALICE, replaced.id) == "t.folder-two@3"
        world.silent, world.now = True, world.now + 2 * 86400
        await samplers.sweep()
        assert not samplers.session_ids and world.usage.of("alice").samplers == 0

    run(tmp_path, body)


def test_a_model_of_another_owner_is_answered_like_one_that_does_not_exist(tmp_path: Path) -> None:
    async def body(world: World, samplers: Samplers) -> None:
        theirs = await samplers.of_model(ALICE, PATH)
        for model in (PATH, PATH.replace("one", "two"), theirs.id, f"{SESSION}:sample:7", "tinker://nonsense", "other", ""):
            with pytest.raises(UnknownError) as refused:
                await samplers.of_model(BOB, model)
            assert str(refused.value) == (
                f"there is no model {model!r} here; name the path of weights that you have saved for sampling, the id of a sampler, or the"
                " base model 'base'")
        world.checkpoints[PATH] = replace(CHECKPOINT, kind="training")
        with pytest.raises(BadRequestError, match="holds no weights for sampling"):
            await samplers.of_model(ALICE, PATH)

    run(tmp_path, body)
