"""One folder per version, and which of them stay; and versions by broadcast: real trainers and engines, of which one dies."""

import asyncio
import errno
import os
import pickle
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from heard import Heard, TakenNotes
from offbeat.aio import both
from offbeat.config.root import Config
from offbeat.config.weights import WeightsConfig
from offbeat.errors import EngineError, StorageError
from offbeat.fleet.engine_group import EngineGroup
from offbeat.fleet.pool import EnginePool
from offbeat.fleet.publication import PublishReport
from offbeat.fleet.publishers import WeightsPublisher
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.process.child import Child
from offbeat.ranks.ranks import WorkerRanks
from offbeat.ranks.trainers import Trainers
from offbeat.types import Version
from offbeat.weights.channels import Channel, draw_incarnation
from offbeat.weights.proof import ProofJudge
from offbeat.weights.protocol import Manifest
from offbeat.workers.local import LocalLauncher
from small_run import small_config
from train_samples import make_batch

CANARY = (13, 14, 15, 5)


def channel(
    directory: Path, *, keep: int = 2, incarnation: str = "a", held: Version | None = None, notes: TakenNotes | None = None,
    way: str = "disk", whole_every: int = 1, large: frozenset[int] = frozenset(),
) -> Channel:
    config = WeightsConfig(channel=way, keep=keep, whole_every_versions=whole_every)
    return Channel(directory, config, canary=(1, 2), incarnation=incarnation, writer=Writer(held, large), notes=notes)


@dataclass
class Writer:
    """Writes small files: `large` versions whole, because their changes are not smaller."""

    held: Version | None = None
    large: frozenset[int] = frozenset()
    has_trained: bool = False

    async def write_weights(
        self, version: int, folder: Path, *, canary: tuple[int, ...], num_receivers: int = 0, base: str = "", is_there: bool = False,
    ) -> Manifest:
        if is_there:
            return Manifest(version, str(folder), "f", canary, (-1.0,))
        if num_receivers:
            return Manifest(version, str(folder), "f", canary, (-1.0,), f"host:{num_receivers}", base=base)
        folder.mkdir(parents=True)
        (folder / "weights").write_text(f"new {version}")
        return Manifest(version, str(folder), "f", canary, (-1.0,), base="" if version in self.large else base)

    def holds(self, version: int) -> bool:
        return version == self.held


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def publish(to: Channel, version: int, *, num_receivers: int = 0) -> Manifest:
    manifest = asyncio.run(to.write(version, num_receivers=num_receivers))
    to.prune(version)
    return manifest


def test_the_folder_of_the_model_is_a_version_until_the_first_step_and_is_never_touched(tmp_path: Path) -> None:
    model, written = tmp_path / "model", tmp_path / "weights"
    model.mkdir()
    (model / "weights").write_text("initial")
    writer = Writer(held=0)
    disk = Channel(
        written, WeightsConfig(keep=1, whole_every_versions=9), canary=(1, 2), incarnation="a", writer=writer, initial=str(model))
    manifest = publish(disk, 0)
    assert manifest.folder == str(model) and not written.exists()
    again = asyncio.run(disk.rewrite(manifest))
    assert again is not None and Path(again.folder).parent == written, "engines that cannot read it get a folder of their own"
    assert publish(disk, 0).folder == str(model)
    writer.has_trained = True
    assert publish(disk, 1).base == "" and publish(disk, 2).base.endswith("v00000001-a"), "no version builds on the model's folder"
    assert names(written) == ["v00000001-a", "v00000002-a"] and (model / "weights").read_text() == "initial"


def test_each_version_has_a_folder_and_the_newest_stay(tmp_path: Path) -> None:
    disk = channel(tmp_path / "weights")
    manifests = [publish(disk, version) for version in range(4)]
    assert manifests[3] == Manifest(3, str(tmp_path / "weights" / "v00000003-a"), "f", (1, 2), (-1.0,))
    assert names(tmp_path / "weights") == ["v00000002-a", "v00000003-a"]


def test_versions_stay_as_long_as_an_engine_may_be_reading_them(tmp_path: Path) -> None:
    disk = channel(tmp_path, keep=1)
    for version in (1, 2, 3, 4):
        asyncio.run(disk.write(version))
    disk.prune(2)  # engines that serve 2 or 3 may be at work on 3 or 4
    assert names(tmp_path) == ["v00000003-a", "v00000004-a"]
    disk.prune(4)
    assert names(tmp_path) == ["v00000004-a"]


def test_a_folder_that_cannot_be_removed_is_noted_once_and_removed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = TakenNotes()
    disk = channel(tmp_path, keep=1, notes=notes)
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", busy)
        for version in range(3):
            publish(disk, version)
        assert names(tmp_path) == ["v00000000-a", "v00000001-a", "v00000002-a"]
        assert notes.texts == [f"{tmp_path}/v0000000{version}-a cannot be removed: Directory not empty" for version in (0, 1)]
        with pytest.raises(StorageError, match="cannot be written, since what is there cannot be removed"):
            publish(disk, 2)
    publish(disk, 3)
    assert names(tmp_path) == ["v00000003-a"]


def test_versions_that_somebody_else_removes_are_not_remembered(tmp_path: Path) -> None:
    disk = channel(tmp_path)
    sizes = []
    for version in range(40):
        asyncio.run(disk.write(version))
        if version >= 8:  # as the fleet does with adapters, of which the channel is never asked to prune any
            shutil.rmtree(tmp_path / f"v{version - 8:08d}-a")
        sizes.append(len(pickle.dumps([value for value in vars(disk).values() if isinstance(value, dict | list | set)])))
    assert max(sizes[32:]) == max(sizes[8:16])


def busy(*_: object, **__: object) -> None:
    """Fail as on NFS, where a folder with a file that a process still has open stays."""
    raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))


def test_a_resumed_run_publishes_under_names_that_were_never_used_and_removes_what_it_has_left(tmp_path: Path) -> None:
    (tmp_path / "v00000006").mkdir()  # of a release whose names had no incarnation
    for version in (7, 8, 9):
        asyncio.run(channel(tmp_path).write(version))
    folder = Path(publish(channel(tmp_path, incarnation="b"), 8).folder)
    assert names(tmp_path) == [folder.name] == ["v00000008-b"]
    assert (folder / "weights").read_text() == "new 8"


def test_a_version_that_is_damaged_on_disk_is_written_again_while_the_trainer_has_it(tmp_path: Path) -> None:
    notes = TakenNotes()
    for held, expected in ((5, "new 5"), (6, "")):
        disk = channel(tmp_path / str(held), held=held, notes=notes)
        manifest = publish(disk, 5)
        assert asyncio.run(disk.rewrite(manifest)) is None, "it is as it was written"
        weights = Path(manifest.folder) / "weights"
        weights.write_text("")
        again = asyncio.run(disk.rewrite(manifest))
        assert weights.read_text() == expected
        assert again == (manifest if expected else None)
    assert notes.texts == ["v00000005-a is not on disk as it was written, and is written again"]


def test_changes_are_written_between_whole_versions_and_folders_stay_while_one_builds_on_them(tmp_path: Path) -> None:
    disk = channel(tmp_path, whole_every=3, keep=1, large=frozenset({8}))
    bases, left = [], []
    for version in range(1, 11):
        bases.append(Path(publish(disk, version).base).name)
        left.append([name[:9] for name in names(tmp_path)])
    assert bases == ["", "v00000001-a", "v00000002-a"] * 1 + ["", "v00000004-a", "v00000005-a", "", "", "v00000008-a", "v00000009-a"]
    assert [len(each) for each in left] == [1, 2, 3, 1, 2, 3, 1, 1, 2, 3] and left[-1] == ["v00000008", "v00000009", "v00000010"]


@pytest.mark.parametrize("whole_every", [1, 9])
def test_a_version_that_is_being_written_takes_the_place_of_none_that_engines_read(tmp_path: Path, whole_every: int) -> None:
    class Pruned(Writer):
        async def write_weights(self, version: int, folder: Path, **options: Any) -> Manifest:
            manifest = await super().write_weights(version, folder, **options)
            disk.prune(version - 1)  # as the publish of an earlier version does when it ends meanwhile
            return manifest

    disk = Channel(tmp_path, WeightsConfig(keep=1, whole_every_versions=whole_every), canary=(1, 2), incarnation="a", writer=Pruned())
    for version in (1, 2, 3):
        asyncio.run(disk.write(version))
        assert f"v{max(version - 1, 1):08d}-a" in names(tmp_path)
    disk.prune(3)
    assert len(names(tmp_path)) == (1 if whole_every == 1 else 3)


def test_there_are_never_more_folders_than_those_that_stay_and_the_one_that_is_being_written(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Pruned(Writer):
        async def write_weights(self, version: int, folder: Path, **options: Any) -> Manifest:
            manifest = await super().write_weights(version, folder, **options)
            seen.append(names(tmp_path))
            disk.prune(version - 1)  # as the publish of an earlier version does when it ends meanwhile
            return manifest

    disk = Channel(tmp_path, WeightsConfig(keep=2), canary=(1, 2), incarnation="a", writer=Pruned())
    for version in range(1, 7):
        asyncio.run(disk.write(version))
    assert [len(each) for each in seen] == [1, 2, 3, 3, 3, 3] and seen[-1] == ["v00000004-a", "v00000005-a", "v00000006-a"]


def test_a_version_is_written_whole_if_what_it_would_build_on_is_damaged(tmp_path: Path) -> None:
    notes = TakenNotes()
    disk = channel(tmp_path, whole_every=9, held=4, notes=notes)
    folders = [Path(publish(disk, version).folder) for version in (1, 2)]
    (folders[0] / "weights").write_text("")
    assert asyncio.run(disk.write(3)).base == ""
    fourth = asyncio.run(disk.write(4))
    assert fourth.base.endswith("v00000003-a") and asyncio.run(disk.rewrite(fourth)) is None
    (Path(fourth.base) / "weights").unlink()
    again = asyncio.run(disk.rewrite(fourth))
    assert again is not None and (again.base, again.folder) == ("", fourth.folder)
    assert notes.texts == ["v00000004-a is not on disk as it was written, and is written again"]


def test_what_a_version_was_built_on_goes_when_it_was_written_again_whole(tmp_path: Path) -> None:
    disk = channel(tmp_path, whole_every=9, keep=1, held=2)
    asyncio.run(disk.write(1))
    second = asyncio.run(disk.write(2))
    (Path(second.folder) / "weights").write_text("")
    assert asyncio.run(disk.rewrite(second)) is not None
    disk.prune(2)
    assert names(tmp_path) == ["v00000002-a"]


def test_what_is_no_folder_among_the_versions_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "v00000001-b").touch()
    publish(channel(tmp_path), 2)
    assert names(tmp_path) == ["v00000001-b", "v00000002-a"]


def test_every_start_of_a_run_has_a_name_of_its_own() -> None:
    drawn = {draw_incarnation() for _ in range(50)}
    assert len(drawn) == 50 and all(len(name) == 6 and int(name, 16) >= 0 for name in drawn)


def test_other_files_beside_the_versions_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "vocabulary.txt").touch()
    (tmp_path / "notes").mkdir()
    for version in range(3):
        publish(channel(tmp_path, keep=1), version)
    assert names(tmp_path) == ["notes", "v00000002-a", "vocabulary.txt"]


def test_a_broadcast_is_for_as_many_engines_as_are_healthy_and_a_folder_where_none_is(tmp_path: Path) -> None:
    collective = channel(tmp_path, keep=1, way="collective")
    assert asyncio.run(collective.write(0, num_receivers=3)).broadcast == "host:3"
    assert asyncio.run(collective.write(1)).broadcast == ""
    asyncio.run(collective.write(2))
    collective.prune(2)
    assert names(tmp_path) == ["v00000002-a"]


def test_changes_are_offered_to_whoever_has_the_version_before_but_written_only_onto_folders(tmp_path: Path) -> None:
    collective = channel(tmp_path, keep=9, way="collective", whole_every=3)
    bases = [
        Path(publish(collective, version, num_receivers=healthy).base).name for version, healthy in enumerate([1, 1, 0, 0, 1, 1, 0])]
    assert bases == ["", "v00000000-a", "", "v00000002-a", "v00000003-a", "", ""]
    assert names(tmp_path) == ["v00000002-a", "v00000003-a", "v00000006-a"]


@asynccontextmanager
async def cast(root: Path, config: Config, model: str) -> AsyncIterator[tuple[Trainers, dict[str, EngineClient], EngineGroup]]:
    """One trainer and two engines, in processes of their own."""
    async with LocalLauncher(stop_timeout_s=5) as launcher, EngineSession() as http:
        ranks, engines = await both(
            WorkerRanks.start(launcher, config.for_ranks, model=model, build=None, log_dir=root),
            EngineGroup.start(launcher, config.for_engines, log_dir=root))
        served = await engines.serve(model=model, tokenizer=model, version=-1)
        clients = {name: EngineClient(name, url, http.session, api_key=served.key) for name, url in served.urls.items()}
        yield Trainers(ranks, config.for_ranks), clients, engines


@pytest.mark.drill
def test_an_engine_that_heals_finds_a_damaged_version_whole_again(tmp_path: Path, model_dir: str) -> None:
    config = small_config(tmp_path, model_dir)
    notes = TakenNotes()

    async def main() -> None:
        async with cast(tmp_path, config, model_dir) as (trainers, clients, _):
            disk = Channel(
                config.weights_dir, config.weights, canary=CANARY, incarnation="a", writer=trainers, notes=notes)
            publisher = WeightsPublisher(EnginePool([], min_engines=0), disk, config.weights, judge=ProofJudge(tolerance=1e-3))
            (engine,) = clients.values()  # out of service, until it is brought back

            async def publish_and(damage: Callable[[Path], object], version: int) -> None:
                await publisher.publish(version)
                await publisher.settle()
                assert publisher.current is not None
                damage(Path(publisher.current.folder) / "model.safetensors")

            for version, damage in enumerate((Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:500]))):
                await publish_and(damage, version)
                assert await publisher.bring(engine) == version
            await publish_and(Path.unlink, 2)
            await trainers.restart_optimizer(config.train.optimizer, total_steps=2)  # from here on its weights may be others
            with pytest.raises(EngineError):
                await publisher.bring(engine)

    asyncio.run(main())
    assert notes.texts == [f"v0000000{version}-a is not on disk as it was written, and is written again" for version in (0, 1)]


@pytest.mark.drill
@pytest.mark.parametrize("way", ["disk", "collective"])
def test_an_engine_takes_changes_of_what_it_serves_and_one_that_was_away_all_of_it(tmp_path: Path, model_dir: str, way: str) -> None:
    config = small_config(
        tmp_path, model_dir, inference__num_engines="2", model__dtype="bfloat16", weights__whole_every_versions="4", weights__channel=way,
        weights__keep="1", train__optimizer__lr="1e-6")

    async def main() -> None:
        async with cast(tmp_path, config, model_dir) as (trainers, clients, _):
            written: list[Manifest] = []

            class Kept(Writer):
                async def write_weights(self, version: int, folder: Path, **options: Any) -> Manifest:
                    written.append(await trainers.write_weights(version, folder, **options))
                    return written[-1]

            disk = Channel(config.weights_dir, config.weights, canary=CANARY, incarnation="a", writer=Kept())
            steady, away = clients.values()
            async with WeightsPublisher(EnginePool([steady]), disk, config.weights, judge=ProofJudge(tolerance=0.5)) as publisher:
                for version in range(6):
                    if version:
                        await trainers.train_step(make_batch(2, 3, seed=version))
                    await publisher.publish(version)
                    await publisher.settle()
                    if version in (2, 5):
                        assert await publisher.bring(away) == version
            for engine in clients.values():
                proof = await engine.prove(CANARY, timeout_s=60)
                assert (proof.version, proof.fingerprint) == (5, written[5].fingerprint)
            assert [Path(manifest.base).name for manifest in written] == [
                "", "v00000000-a", "v00000001-a", "v00000002-a", "", "v00000004-a"]
            assert len({manifest.fingerprint for manifest in written}) == 6
            assert all(manifest.num_bytes < written[0].num_bytes for manifest in written if manifest.base)
            if way == "disk":
                assert names(config.weights_dir) == ["v00000004-a", "v00000005-a"]
            else:
                assert not config.weights_dir.exists(), "nothing is written"

    asyncio.run(main())


@pytest.mark.drill
def test_engines_receive_what_they_would_read_and_one_that_dies_meanwhile_takes_nobody_along(tmp_path: Path, model_dir: str) -> None:
    config = small_config(tmp_path, model_dir, inference__num_engines="2", weights__stage_timeout_s="40")
    heard = Heard()

    async def main() -> None:
        async with cast(tmp_path, config, model_dir) as (trainers, clients, engines):
            pool = EnginePool(clients.values(), listener=heard)

            async def publish(version: int) -> PublishReport:
                """Even versions in folders, odd ones by broadcast."""
                settings = config.weights.model_copy(update={"channel": ("disk", "collective")[version % 2]})
                to = Channel(config.weights_dir, settings, canary=CANARY, incarnation="a", writer=trainers)
                reports: list[PublishReport] = []
                async with WeightsPublisher(pool, to, config.weights, judge=ProofJudge(tolerance=1e-3)) as publisher:
                    await publisher.publish(version, on_served=reports.append)
                    await publisher.settle()
                return reports[0]

            proofs = []
            for version in (0, 1):
                assert set((await publish(version)).serving) == {"engine 0", "engine 1"}
                proofs.append(await clients["engine 1"].prove(CANARY, timeout_s=60))
            assert proofs[0].fingerprint == proofs[1].fingerprint and [proof.version for proof in proofs] == [0, 1]
            assert names(config.weights_dir) == ["v00000000-a"]  # what is broadcast is not written

            victim = engines.workers[1]
            assert isinstance(victim, Child)
            os.kill(victim.pid, signal.SIGSTOP)
            publishing = asyncio.create_task(publish(3))
            await asyncio.sleep(1)
            os.kill(victim.pid, signal.SIGKILL)
            assert (await publishing).serving == ("engine 0",)
            assert "cannot be reached" in heard.quarantines["engine 1"]

    asyncio.run(main())
