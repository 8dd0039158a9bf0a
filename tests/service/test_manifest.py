"""A sealed folder is known byte by byte, and on the disk before anybody is told of it. Damage is told in `test_checkpoints.py`."""

from pathlib import Path

import pytest

from offbeat.service.manifest import CheckpointError, read_manifest, seal, sealed_folders, verify


def folder_with_files(root: Path, name: str = "one") -> Path:
    (root / name).mkdir(parents=True)
    (root / name / "weights").write_bytes(b"x" * 40)
    (root / name / "config").write_bytes(b"{}")
    return root / name


def test_sealing_syncs_each_file_then_the_manifest_then_the_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, synced = folder_with_files(tmp_path), []
    monkeypatch.setattr("offbeat.disk.os.fsync", lambda number: synced.append(Path(f"/proc/self/fd/{number}").readlink()))
    assert seal(folder, None) == 42
    assert synced == [folder / "config", folder / "weights", folder / "manifest.json", folder, tmp_path]
    assert set(verify(folder).files) == {"weights", "config"} == set(read_manifest(folder).files)


def test_a_disk_that_fails_while_it_is_synced_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("offbeat.disk.os.fsync", fail)
    with pytest.raises(CheckpointError, match="the checkpoint folder one could not be written: Input/output error"):
        seal(folder_with_files(tmp_path), None)


def test_folders_that_were_put_aside_count_as_sealed_and_those_that_were_cut_off_do_not(tmp_path: Path) -> None:
    seal(folder_with_files(tmp_path), None)
    folder_with_files(tmp_path, "half")
    seal(folder_with_files(tmp_path / "orphans" / "2027-01-15T08-00-00Z", "two"), None)
    assert sealed_folders(tmp_path) == {"one", "two"} and sealed_folders(tmp_path / "none") == set()
