"""What a checkpoint's marker says of its files, and what it tells of damage."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.checkpoint.manifest import MARKER, look, read_through, seal

STEP = 12


def make(folder: Path) -> Path:
    (folder / "ranks").mkdir(parents=True)
    (folder / "ranks" / ".metadata").write_bytes(b"where everything lies")
    (folder / "ranks" / "__0_0.distcp").write_bytes(bytes(range(256)) * 10)
    (folder / MARKER).write_bytes(seal(folder, STEP, b'{"global_step": 12, "version": 13, "loss": 0.1}'))
    return folder


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def test_a_sealed_checkpoint_is_sound_and_its_state_is_there(tmp_path: Path) -> None:
    folder = make(tmp_path / "step")
    assert look(folder, STEP) == read_through(folder) == ""
    marker = json.loads((folder / MARKER).read_text())
    assert (marker["version"], marker["step"], sorted(marker["files"])) == (13, STEP, ["ranks/.metadata", "ranks/__0_0.distcp"])


@pytest.mark.parametrize(("damage", "reason"), [
    (lambda path: path.unlink(), "ranks/__0_0.distcp is gone"),
    (lambda path: path.write_bytes(b""), "ranks/__0_0.distcp has 0 bytes, and was written with 2560"),
    (lambda path: path.write_bytes(path.read_bytes()[:1280]), "ranks/__0_0.distcp has 1280 bytes, and was written with 2560"),
])
def test_a_file_that_is_gone_or_of_another_size_is_seen_without_reading_it(
    damage: Callable[[Path], None], reason: str, tmp_path: Path,
) -> None:
    folder = make(tmp_path / "step")
    damage(folder / "ranks" / "__0_0.distcp")
    assert look(folder, STEP) == reason


def test_every_single_flipped_bit_of_a_file_is_seen_by_reading_it(tmp_path: Path) -> None:
    folder = make(tmp_path / "step")
    for at in (0, 1279, 2559):
        flip(folder / "ranks" / "__0_0.distcp", at)
        assert look(folder, STEP) == ""
        assert read_through(folder) == "ranks/__0_0.distcp has other bytes than were written"
        flip(folder / "ranks" / "__0_0.distcp", at)
    assert read_through(folder) == ""


def test_no_flipped_bit_of_the_marker_itself_changes_what_it_says_unseen(tmp_path: Path) -> None:
    folder = make(tmp_path / "step")
    whole = (folder / MARKER).read_bytes()
    said = json.loads(whole)
    for at in range(len(whole)):
        flip(folder / MARKER, at, bit=at % 7)
        reason = look(folder, STEP)
        assert reason or json.loads((folder / MARKER).read_bytes()) == said
        (folder / MARKER).write_bytes(whole)


@pytest.mark.parametrize("rubbish", [b"", b"{", b"\xff\xfe", b"[]", b"7", b"[" * 100_000, b'{"files": {}}', b"1" * 10_000])
def test_a_marker_with_rubbish_in_it_is_damage(rubbish: bytes, tmp_path: Path) -> None:
    folder = make(tmp_path / "step")
    (folder / MARKER).write_bytes(rubbish)
    assert look(folder, STEP) == f"{MARKER} is not as it was written"


def test_a_marker_under_another_step_is_damage(tmp_path: Path) -> None:
    assert look(make(tmp_path / "step"), 99) == f"{MARKER} is that of step 12"


def test_one_of_an_older_version_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = make(tmp_path / "step")
    (folder / MARKER).write_text('{"global_step":12,"version":12,"heads":[]}')
    (folder / "ranks" / "__0_0.distcp").write_bytes(b"")
    assert look(folder, STEP) == read_through(folder) == ""
    assert look(folder, 13) == f"{MARKER} is not that of step 13"
