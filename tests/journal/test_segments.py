"""Reading a journal: whatever happens to its files, a prefix of the written records comes back, and nothing else."""

import random
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ConfigError
from offbeat.journal import segments
from offbeat.journal.segments import FORMAT, HEADER_BYTES, MAGIC, Reader, find, frame, header, numbers, path_of


def write(folder: Path, *records: list[bytes], base: int | None = 0) -> None:
    """One segment for each list of records."""
    following = 0
    for number, payloads in enumerate(records):
        parts = [header(number, base=base if number == 0 else None, first=following)]
        for payload in payloads:
            parts += [frame(following, payload), payload]
            following += 1
        path_of(folder, number).write_bytes(b"".join(parts))


def read(folder: Path) -> list[bytes]:
    return [stored.payload for stored in Reader(find(folder))]


def test_records_come_back_in_order_over_segments_and_again_from_their_places(tmp_path: Path) -> None:
    write(tmp_path, [b"one", b""], [], [b"three" * 1000])
    (tmp_path / "notes.txt").write_text("of somebody else")
    assert numbers(tmp_path) == [0, 1, 2]
    reader = Reader(find(tmp_path))
    stored = list(reader)
    assert [each.payload for each in stored] == [b"one", b"", b"three" * 1000] and reader.cut is None
    assert [each.place.read() for each in stored] == [each.payload for each in stored]
    assert [each.base for each in find(tmp_path)] == [0, None, None]
    assert read(tmp_path / "nowhere") == []


def test_a_file_cut_off_at_any_byte_gives_the_whole_records_before_it(tmp_path: Path) -> None:
    payloads = [b"", b"a", b"bc" * 20, b"d"]
    write(tmp_path, payloads)
    path = path_of(tmp_path, 0)
    whole = path.read_bytes()
    ends = [HEADER_BYTES]
    for payload in payloads:
        ends.append(ends[-1] + segments.FRAME_BYTES + len(payload))
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        found = find(tmp_path)
        reader = Reader(found)
        got = [stored.payload for stored in reader]
        assert got == payloads[: max(sum(end <= length for end in ends) - 1, 0)]
        assert (reader.cut is None) == (length < HEADER_BYTES or length in ends)
        assert reader.cut is None or reader.cut.torn
        assert len(found) == (length >= HEADER_BYTES)


def test_a_record_that_continues_in_the_next_segment_after_a_torn_one_is_read_on(tmp_path: Path) -> None:
    write(tmp_path, [b"one", b"two"], [b"three"])
    with path_of(tmp_path, 0).open("ab") as file:
        file.write(frame(2, b"thr")[:11])
    reader = Reader(find(tmp_path))
    assert [stored.payload for stored in reader] == [b"one", b"two", b"three"] and reader.cut is None


@pytest.mark.parametrize("seed", range(20))
def test_any_flipped_bit_leaves_a_prefix_and_is_told(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    lists = [[chance.randbytes(chance.randrange(60)) for _ in range(chance.randrange(1, 5))] for _ in range(3)]
    write(tmp_path, *lists)
    flat = [payload for each in lists for payload in each]
    for _ in range(60):
        path = path_of(tmp_path, chance.randrange(3))
        whole = path.read_bytes()
        position = chance.randrange(len(whole))
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1 << chance.randrange(8)]) + whole[position + 1:])
        found = find(tmp_path)
        if found and found[0].number == 0:  # without its first segment, a journal has no base
            reader = Reader(found)
            got = [stored.payload for stored in reader]
            assert got == flat[: len(got)] and len(got) < len(flat)
            assert reader.cut is not None or path == path_of(tmp_path, 2)  # a last segment whose header is gone is not known of
        path.write_bytes(whole)
    assert read(tmp_path) == flat


@given(noise=st.binary(max_size=200))
def test_noise_behind_the_records_is_never_taken_for_one(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    folder = tmp_path_factory.mktemp("noise")
    write(folder, [b"one", b"two"])
    with path_of(folder, 0).open("ab") as file:
        file.write(noise)
    assert read(folder) == [b"one", b"two"]


def test_a_segment_that_is_gone_ends_the_reading(tmp_path: Path) -> None:
    write(tmp_path, [b"one"], [b"two"], [b"three"])
    path_of(tmp_path, 1).unlink()
    reader = Reader(find(tmp_path))
    assert [stored.payload for stored in reader] == [b"one"]
    assert reader.cut is not None and not reader.cut.torn and "begins with record 2 instead of 1" in reader.cut.reason


def test_a_newer_format_is_refused_and_a_foreign_file_is_no_segment(tmp_path: Path) -> None:
    start = MAGIC + struct.pack("<I", FORMAT + 1)
    path_of(tmp_path, 0).write_bytes(start + struct.pack("<I", zlib.crc32(start)) + b"whatever it holds")
    with pytest.raises(ConfigError, match=r"00000000\.log has format 3, made by a newer Offbeat .* remove the folder .* to continue"):
        find(tmp_path)
    path_of(tmp_path, 0).write_bytes(b"PK\x03\x04 an archive of somebody's, under the name of a segment")
    assert find(tmp_path) == []
    write(tmp_path, [b"one"])
    path_of(tmp_path, 0).rename(path_of(tmp_path, 7))
    assert find(tmp_path) == [], "it is another segment's file"
