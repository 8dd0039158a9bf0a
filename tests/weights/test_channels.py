"""The disk channel: one folder per version, and which of them stay."""

import asyncio
from pathlib import Path

from offbeat.weights.channels import DiskChannel
from offbeat.weights.protocol import Manifest


def channel(directory: Path, *, keep: int = 2) -> DiskChannel:
    async def write(version: int, folder: Path, *, canary: tuple[int, ...]) -> Manifest:
        folder.mkdir(parents=True)
        (folder / "weights").write_text(f"new {version}")
        return Manifest(version, str(folder), "f", canary, -1.0)

    return DiskChannel(directory, keep=keep, canary=(1, 2), write=write)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def publish(to: DiskChannel, version: int) -> Manifest:
    manifest = asyncio.run(to.write(version))
    to.prune()
    return manifest


def test_each_version_has_a_folder_and_the_newest_stay(tmp_path: Path) -> None:
    disk = channel(tmp_path / "weights")
    manifests = [publish(disk, version) for version in range(4)]
    assert manifests[3] == Manifest(3, str(tmp_path / "weights" / "v00000003"), "f", (1, 2), -1.0)
    assert names(tmp_path / "weights") == ["v00000002", "v00000003"]


def test_versions_beyond_a_resumed_one_make_way_for_it(tmp_path: Path) -> None:
    for version in (7, 8, 9):
        asyncio.run(channel(tmp_path).write(version))
    publish(channel(tmp_path, keep=1), 8)
    assert names(tmp_path) == ["v00000008"]
    assert (tmp_path / "v00000008" / "weights").read_text() == "new 8"


def test_other_files_beside_the_versions_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "vocabulary.txt").touch()
    (tmp_path / "notes").mkdir()
    for version in range(3):
        publish(channel(tmp_path, keep=1), version)
    assert names(tmp_path) == ["notes", "v00000002", "vocabulary.txt"]
