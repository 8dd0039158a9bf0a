"""Ranks that do not see this process's files save, load, publish and export as if they did, whoever does and on whichever machine."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from far import far_disk
from offbeat.errors import ConfigError, DeathError, StorageError
from offbeat.model.hf_io import read_safetensors
from offbeat.ranks.folder_transfer import FolderTransfer, FolderUse, use_of
from offbeat.ranks.ranks import WorkerRanks, start_ranks
from offbeat.ranks.trainers import Trainers
from offbeat.trainer.messages import BroadcastRequest, BuildRequest, ExportRequest, Folder, NewAdapter, WriteRequest, Written
from offbeat.workers.disks import place_of
from offbeat.workers.local import LocalLauncher
from offbeat.workers.worker import Nothing, WorkerSpec
from small_run import small_config
from train_samples import make_batch

LAYOUTS = [(None, None), (None, "b"), ("a", None), ("a", "b"), ("a", "a")]
"""Machine of each of two ranks; None for this one."""


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.drill
def test_ranks_on_other_machines_write_and_read_the_folders_of_this_one(tmp_path: Path, model_dir: str) -> None:
    config = small_config(tmp_path, model_dir, train__max_tokens_per_microbatch="64", train__num_ranks="2", train__parallel__shard="2")
    far = {name: far_disk(tmp_path / name, name) for name in ("a", "b")}

    async def main() -> None:
        async with LocalLauncher(stop_timeout_s=5) as launcher:
            ranks = await WorkerRanks.start(launcher, config.for_ranks, model=model_dir, build=None, log_dir=tmp_path)
            group = Trainers(ranks, config.for_ranks)
            await group.restart_optimizer(config.train.optimizer, total_steps=10)
            written, exported, saved = [], [], []
            for number, layout in enumerate(LAYOUTS):
                for worker, name in zip(ranks.workers, layout, strict=True):
                    worker.disk = far[name] if name else None  # pyright: ignore[reportAttributeAccessIssue]
                here = tmp_path / "run" / str(number)
                await group.train_step(make_batch(5, 3, seed=number))
                before = await group.write_weights(number, here / "v1", canary=(3, 4, 5))
                await group.save(here / "ranks")
                await group.save(here / "ranks")  # over what is there
                await group.train_step(make_batch(5, 3, seed=9))
                assert await group.load(here / "ranks") == number + 1
                after = await group.write_weights(number, here / "v2", canary=(3, 4, 5))
                assert (after.fingerprint, after.folder) == (before.fingerprint, str(here / "v2"))
                for _ in range(2):
                    await group.export(here / "export", tokenizer=model_dir)
                saved.append(files_below(here / "ranks"))
                exported.append(files_below(here / "export"))
                written.append({name for name, _ in read_safetensors(here / "v2")})
                assert {path.name for path in here.iterdir()} == {"v1", "v2", "ranks", "export"}
                assert not files_below(tmp_path / "a") | files_below(tmp_path / "b")
            assert saved == saved[:1] * len(LAYOUTS) and {".metadata", "__0_0.distcp", "__1_0.distcp"} <= saved[0]
            assert exported == exported[:1] * len(LAYOUTS) and "tokenizer.json" in exported[0]
            assert written == written[:1] * len(LAYOUTS)

    asyncio.run(main())


def worker(name: str, disk: object = None) -> SimpleNamespace:
    return SimpleNamespace(name=name, disk=disk)


def test_what_each_call_reads_and_writes(tmp_path: Path) -> None:
    whole, one = Folder("/run/ranks"), Folder("/run/alice", "alice")
    assert use_of("save", whole) == use_of("critic.save", whole) == FolderUse(writes=(Path("/run/ranks"),), by_parts=True)
    assert use_of("save", one) == FolderUse(writes=(Path("/run/alice"),))
    assert use_of("load", whole) == use_of("critic.load", whole) == FolderUse(reads=((Path("/run/ranks"), ()),))
    assert use_of("add", NewAdapter("a", 1, 1.0, 0, (), "/f")).folders == (Path("/f"),)
    assert use_of("add", NewAdapter("a", 1, 1.0, 0, ())) == use_of("train_step", Nothing()) == FolderUse()
    broadcast = BroadcastRequest("host", 1, 1.0)
    assert use_of("write_weights", WriteRequest("/v1", "float32", (), broadcast=broadcast)) == FolderUse()
    assert use_of("write_weights", WriteRequest("/v1", "float32", ())) == FolderUse(writes=(Path("/v1"),))
    export = ExportRequest("/e", str(tmp_path), "float32")
    assert use_of("export", export).folders == (tmp_path, Path("/e")) and "config.json" in use_of("export", export).reads[0][1]
    assert use_of("export", replace(export, tokenizer="org/model")).folders == (Path("/e"),)


def test_each_rank_is_told_the_paths_of_its_own_machine(tmp_path: Path) -> None:
    a, b = far_disk(tmp_path / "a", "a"), far_disk(tmp_path / "b", "b")
    workers = [worker("rank 0"), worker("rank 1", a), worker("rank 2", a), worker("rank 3", b), worker("rank 4")]
    transfer = FolderTransfer(shared=Path("/mnt/weights"))

    async def placed(method: str, request: object) -> list:
        async with transfer.around(workers, method, [request] * 5, timeout_s=60) as requests:
            return requests

    saves = asyncio.run(placed("save", Folder("/run/ranks")))
    far = place_of(Path("/run/ranks"))
    assert [save.path for save in saves] == ["/run/ranks", a.path(far), a.path(far), b.path(far), "/run/ranks"]
    assert [save.keeps for save in saves] == [True, True, False, True, False]
    writes = asyncio.run(placed("write_weights", WriteRequest("/run/v2", "float32", (), base="/run/v1")))
    assert Path(writes[1].folder).parent == Path(writes[1].base).parent and Path(writes[1].base).name == "v1"
    answers = transfer.answers([WriteRequest("/run/v2", "float32", (), base="/run/v1")], [Written("", (), base=writes[1].base)])
    assert answers[0].base == "/run/v1"
    shared = asyncio.run(placed("write_weights", WriteRequest("/mnt/weights/v2", "float32", (), base="/mnt/weights/v1")))
    assert {(write.folder, write.base) for write in shared} == {("/mnt/weights/v2", "/mnt/weights/v1")}
    offers = asyncio.run(placed(
        "write_weights", WriteRequest("/run/v2", "float32", (), broadcast=BroadcastRequest("h", 1, 1.0), base="/run/v1")))
    assert {(offer.folder, offer.base) for offer in offers} == {("/run/v2", "/run/v1")}
    assert [offer.broadcast.by_folder for offer in offers] == [True, False, False, False, True]


def test_where_all_see_the_same_files_requests_are_as_they_were() -> None:
    async def main() -> None:
        requests = [Folder("/run/ranks"), Folder("/run/ranks")]
        async with FolderTransfer(shared=None).around([worker("rank 0"), worker("rank 1")], "save", requests, timeout_s=1) as placed:
            assert placed == requests

    asyncio.run(main())


def test_ranks_that_have_written_nothing_are_an_error(tmp_path: Path) -> None:
    async def main() -> None:
        workers = [worker("rank 0", far_disk(tmp_path / "a"))]
        async with FolderTransfer(shared=None).around(workers, "save", [Folder(str(tmp_path / "ranks"))], timeout_s=60):
            pass

    with pytest.raises(StorageError, match="no train rank has written .*ranks, though all were asked to"):
        asyncio.run(main())


def test_what_was_saved_before_stays_if_a_machine_dies_while_its_part_is_fetched(tmp_path: Path) -> None:
    def die(method: str, _payload: bytes) -> None:
        if method == "read":
            raise DeathError("rank 1 died with its Ray actor in read on its disk")

    disk, folder = far_disk(tmp_path / "a", meddle=die), tmp_path / "run" / "ranks"
    folder.mkdir(parents=True)
    (folder / "before").touch()

    async def main() -> None:
        async with FolderTransfer(shared=None).around([worker("rank 0", disk)], "save", [Folder(str(folder))], timeout_s=60) as (request,):
            Path(request.path).mkdir(parents=True)
            (Path(request.path) / "__0_0.distcp").touch()

    with pytest.raises(DeathError):
        asyncio.run(main())
    assert files_below(tmp_path / "run") == {"ranks/before"} and not files_below(tmp_path / "a")


def test_a_tiny_model_is_not_built_where_ranks_would_not_see_it(tmp_path: Path) -> None:
    class Elsewhere(LocalLauncher):
        async def start(self, spec: WorkerSpec, *, timeout_s: float):
            started = await super().start(spec, timeout_s=timeout_s)
            started.disk = far_disk(tmp_path / "a")  # pyright: ignore[reportAttributeAccessIssue]
            return started

    async def main() -> None:
        async with Elsewhere(stop_timeout_s=5) as launcher:
            build = BuildRequest(str(tmp_path / "model"), "{}", 10, 1, None, 0)
            await start_ranks(launcher, small_config(tmp_path).for_ranks, model=str(tmp_path / "model"), build=build, log_dir=tmp_path)

    with pytest.raises(ConfigError, match=r"\[model\.tiny\] makes a model in the run's folder .*, which rank 0 cannot see; give model"):
        asyncio.run(main())
