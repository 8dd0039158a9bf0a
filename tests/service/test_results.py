"""Records on disk: read back, refused when damaged, deleted with their file."""

import os
from pathlib import Path

import pytest

from offbeat.errors import StorageError
from offbeat.service.results import Location, Results


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_read_back_after_reopening_too(tmp_path: Path) -> None:
    results = Results(tmp_path / "results")
    records = [b"", b"one", bytes(range(256)) * 1000]
    places = [results.append(data) for data in records]
    assert [results.read(place) for place in places] == records
    results.close()
    again = Results(tmp_path / "results")
    assert [again.read(place) for place in places] == records


def test_a_new_file_is_begun_when_one_is_full_and_at_each_start(tmp_path: Path) -> None:
    results = Results(tmp_path, segment_bytes=100)
    places = [results.append(bytes([number]) * 60) for number in range(5)]
    assert [place.segment for place in places] == [1, 1, 2, 2, 3]
    results.close()
    assert Results(tmp_path).append(b"x").segment == 4
    assert [Results(tmp_path).read(place)[:1] for place in places] == [bytes([number]) for number in range(5)]


def test_the_number_of_a_file_that_is_lost_is_not_used_again(tmp_path: Path) -> None:
    """Else its place in the database would lead to another request's answer."""
    place = Results(tmp_path / "lost").append(b"alice's")
    again = Results(tmp_path / "empty", after=place.segment)
    assert again.append(b"carol's").segment == 2
    with pytest.raises(StorageError, match="cannot be read"):
        again.read(place)


def test_the_name_of_a_new_file_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr("offbeat.disk.os.fsync", lambda number: synced.append(Path(f"/proc/self/fd/{number}").readlink()))
    results = Results(tmp_path, segment_bytes=1)
    results.append(b"x")
    results.append(b"x")
    assert synced == [tmp_path] * 2


def test_any_changed_byte_is_noticed(tmp_path: Path) -> None:
    results = Results(tmp_path)
    place = results.append(b"some data")
    path = tmp_path / "00000001.results"
    intact = path.read_bytes()
    for position in range(len(intact)):
        path.write_bytes(intact[:position] + bytes([intact[position] ^ 1]) + intact[position + 1:])
        with pytest.raises(StorageError, match="damaged"):
            results.read(place)
    path.write_bytes(intact)
    assert results.read(place) == b"some data"


def test_a_torn_record_and_a_wrong_place_are_noticed(tmp_path: Path) -> None:
    results = Results(tmp_path)
    first, second = results.append(b"first"), results.append(b"second")
    path = tmp_path / "00000001.results"
    path.write_bytes(path.read_bytes()[:-1])
    assert results.read(first) == b"first"
    for place in (second, first._replace(length=4), first._replace(start=1), Location(1, 10**6, 5)):
        with pytest.raises(StorageError, match="damaged"):
            results.read(place)
    with pytest.raises(StorageError, match="cannot be read"):
        results.read(Location(7, 0, 5))


def test_a_failed_write_leaves_what_was_there_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results(tmp_path)
    place = results.append(b"first")
    write = os.pwrite
    calls = []

    def full(fd: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 1:
            return write(fd, data[:3], offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("offbeat.service.results.os.pwrite", full)
    with pytest.raises(StorageError, match="No space left on device; free space"):
        results.append(b"second")
    monkeypatch.undo()
    again = results.append(b"third")
    assert (results.read(place), results.read(again)) == (b"first", b"third")


def test_a_file_that_cannot_be_begun_closes_nothing_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results(tmp_path, segment_bytes=10)
    results.append(b"x" * 20)

    def full(*_args: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("offbeat.service.results.os.open", full)
        with pytest.raises(StorageError, match="No space left"):
            results.append(b"second")
    with (tmp_path / "others").open("wb") as others:  # it gets the lowest descriptor that is free
        place = results.append(b"third")
        others.write(b"still open")
    assert results.read(place) == b"third" and place.segment == 2


def test_old_files_are_deleted_but_not_the_one_that_grows_nor_others(tmp_path: Path) -> None:
    results = Results(tmp_path, segment_bytes=10)
    places = [results.append(b"x" * 20) for _ in range(4)]
    (tmp_path / "notes.txt").write_text("mine")
    results.delete_before(3)
    assert files(tmp_path) == ["00000003.results", "00000004.results", "notes.txt"]
    results.delete_before(99)
    assert files(tmp_path) == ["00000004.results", "notes.txt"]
    assert results.read(places[3]) == b"x" * 20


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="results cannot be written to"):
        Results(tmp_path / "file")
