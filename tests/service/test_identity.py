"""A database and a data folder that do not belong together are refused, before anything is changed; those that do are not."""

import asyncio
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from offbeat.errors import ConfigError
from offbeat.service.identity import Known, agree, keep
from offbeat.service.serve import open_store
from offbeat.service.store import Store
from offbeat.service.tables import CheckpointRow, ModelRow, SamplerRow, SessionRow
from small_service import LORA

RUN = "00000000-0000-4000-8000-000000000000:train:0"


def checkpoint(folder: str) -> CheckpointRow:
    return CheckpointRow(RUN, "training", folder, "alice", folder, 1.0, None, 1, False, {}, LORA, "base")


def seal(data: Path, *names: str) -> None:
    """Folders that look complete."""
    for name in names:
        (data / "checkpoints" / name).mkdir(parents=True)
        (data / "checkpoints" / name / "manifest.json").write_text("{}")


def use(data: Path, *rows: CheckpointRow, url: str = "") -> str:
    """A server's start, in which rows are stored; the identity."""
    data.mkdir(exist_ok=True)
    with closing(open_store(url, data)) as store:
        if rows:
            asyncio.run(store.put(*rows))
        return store.identity


def everything(*folders: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}


def test_both_get_an_identity_at_their_first_start_and_agree_from_then(tmp_path: Path) -> None:
    first = use(tmp_path / "data", checkpoint("one"))
    seal(tmp_path / "data", "one")
    assert len(first) == 32 and (tmp_path / "data" / "identity").read_text() == f"{first}\n"
    assert use(tmp_path / "data") == first
    assert use(tmp_path / "data", url=f"sqlite:///{tmp_path}/data/service.db") == first
    assert use(tmp_path / "other") != first


def test_a_database_of_another_folder_or_a_new_one_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    use(tmp_path / "ours", checkpoint("one"))
    use(tmp_path / "theirs", checkpoint("two"))
    seal(tmp_path / "ours", "one")
    before = everything(tmp_path)
    for name in ("theirs/service", "elsewhere/missing"):
        with pytest.raises(ConfigError, match=r"does not belong to the data folder .*/ours': .*; nothing was changed; give the --database"):
            use(tmp_path / "ours", url=f"sqlite:///{tmp_path}/{name}.db")
    after = everything(tmp_path)
    assert {path: data for path, data in after.items() if not path.name.endswith(("-wal", "-shm"))} == before
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize(("named", "sealed", "why"), [
    ((), ("a", "b"), "it names no checkpoint, and 2 are there"), (("a", "b", "c"), (), "it names 3 checkpoint folders, and none of them"),
    (("a",), ("b",), "it names 1 checkpoint folders, and none"), (("a", "b"), ("b", "c"), ""), ((), (), "")])
@pytest.mark.parametrize("known", ["none", "database", "folder"])
def test_where_an_identity_is_missing_what_is_named_and_what_is_there_decide(
    tmp_path: Path, named: tuple[str, ...], sealed: tuple[str, ...], why: str, known: str,
) -> None:
    seal(tmp_path, *sealed)
    (tmp_path / "checkpoints" / "half").mkdir(parents=True)  # as a server that was killed has left it
    if known == "folder":
        keep(tmp_path, "theirs")
    database = Known("the database x", "mine" if known == "database" else "", frozenset(named))
    if why:
        with pytest.raises(ConfigError, match=why):
            agree(database, tmp_path)
    else:
        found = agree(database, tmp_path)
        assert len(found) == 32 if known == "none" else found == ("mine" if known == "database" else "theirs")


def test_a_restored_database_belongs_to_its_folder_whatever_has_come_since(tmp_path: Path) -> None:
    data = tmp_path / "data"
    use(data, checkpoint("one"))
    shutil.copy(data / "service.db", tmp_path / "backup.db")
    seal(data, "two", "three")
    shutil.copy(tmp_path / "backup.db", data / "service.db")
    use(data)


def test_a_folder_from_before_there_were_identities_gets_one(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    url = f"sqlite:///{tmp_path}/data/service.db"
    with closing(Store.open(url)) as store:
        asyncio.run(store.put(checkpoint("one"), checkpoint("gone")))
    seal(tmp_path / "data", "one", "orphan")
    assert use(tmp_path / "data") == (tmp_path / "data" / "identity").read_text().strip()


def test_a_first_start_that_was_cut_off_is_repeated(tmp_path: Path) -> None:
    first = use(tmp_path)
    (tmp_path / "identity").unlink()
    assert use(tmp_path) == first


def test_a_database_names_the_folders_of_checkpoints_states_and_snapshots(tmp_path: Path) -> None:
    url, seen = f"sqlite:///{tmp_path}/x.db", []

    def note(known: Known) -> str:
        seen.append(known)
        return known.identity or "id"

    with closing(Store.open(url, identify=note)) as store:
        asyncio.run(store.put(
            SessionRow("s", "alice", 1.0, 1.0), checkpoint("c"), ModelRow(RUN, "s", "alice", 1.0, 1.0, "base", LORA, state_folder="m"),
            ModelRow(RUN + "0", "s", "alice", 1.0, 1.0, "base", LORA), SamplerRow("s:sample:0", "s", "alice", "base", folder="e"),
            SamplerRow("s:sample:1", "s", "alice", "base", path="tinker://x", folder="deleted")))
    Store.open(url, identify=note).close()
    assert (seen[0].identity, seen[0].folders) == ("", frozenset())
    assert (seen[1].identity, seen[1].folders) == ("id", {"c", "m", "e"}) and seen[1].database.endswith("x.db")
