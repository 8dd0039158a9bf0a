"""The index of a run's rollouts."""

import sqlite3
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from offbeat.dashboard.rollout_filter import Filter
from offbeat.dashboard.rollout_index import RolloutIndex
from offbeat.data.stored_rollouts import Address, find_group
from rollout_samples import addresses, group, write_rollouts, write_small_run


def test_the_newest_come_first_and_each_is_found_again_by_its_address(index: RolloutIndex) -> None:
    found = index.find_rollouts(Filter())
    assert [each.address for each in found] == [
        "3.0.0", "3.0.1", "2.0.0", "2.0.1", "2r.0.0", "2r.0.1", "2r.1.0", "1.0.0", "1.0.1", "1.1.0", "1.1.1"]
    for each in found:
        kept = find_group(index.run_dir, Address.parse(each.address))
        assert (kept.prompt, kept.prompt_id, kept.step) == (each.prompt, each.prompt_id, each.step)
        if kept.trajectories:
            t = kept.trajectories[Address.parse(each.address).place]
            assert (t.reward, t.num_generated, t.completion, t.advantage) == (each.reward, each.length, each.preview, each.advantage)


def test_pages_follow_each_other(index: RolloutIndex) -> None:
    pages = [index.find_rollouts(Filter(), limit=4, offset=offset) for offset in (0, 4, 8)]
    assert [each for page in pages for each in page] == index.find_rollouts(Filter())


def test_reasons_are_counted_and_details_kept(index: RolloutIndex) -> None:
    assert set(index.reasons()) == {
        ("stop", "trained", 7), ("equal rewards", "rejected", 2), ("prompt refused", "rejected", 1), ("too long", "left out", 1)}
    (left_out,) = index.find_rollouts(Filter(status="left out"))
    assert left_out.why == "too long: 999 tokens" and left_out.reward is None and left_out.advantage is None
    assert index.find_rollouts(Filter(reason="equal rewards"))[0].why == "all rewards are 0"


def test_what_a_run_adds_changes_and_removes_is_seen_by_the_next_update(index: RolloutIndex) -> None:
    assert index.update().num_rollouts == 11
    write_rollouts(index.run_dir, 4, [group("New? ", ("yes", 1.0))])
    write_rollouts(index.run_dir, 1, [group("Other? ", ("rewritten", 0.0))])
    (index.run_dir / "rollouts" / "rejected-000002.jsonl.zst").unlink()
    progress = index.update()
    assert (progress.num_files, progress.num_indexed, progress.num_rollouts, progress.damage) == (4, 4, 6, ())
    assert addresses(index) == ["4.0.0", "3.0.0", "3.0.1", "2.0.0", "2.0.1", "1.0.0"]
    assert addresses(index, text="apple") == [] and addresses(index, text="rewritten") == ["1.0.0"]


def test_the_newest_steps_are_there_first_and_a_reader_may_stop(tmp_path: Path) -> None:
    write_small_run(tmp_path)
    index = RolloutIndex(tmp_path)
    assert index.progress().num_indexed == 0 and index.find_rollouts(Filter()) == []
    assert index.update(most_files=1).num_indexed == 1 and addresses(index) == ["3.0.0", "3.0.1"]
    stop = threading.Event()
    stop.set()
    assert index.update(stop=stop).num_indexed == 1
    assert index.update().num_indexed == index.update().num_files == 4


def test_a_damaged_file_of_rollouts_is_told_and_the_others_are_read(tmp_path: Path) -> None:
    write_small_run(tmp_path)
    (tmp_path / "rollouts" / "step-000002.jsonl.zst").write_bytes(b"nothing of the kind")
    write_rollouts(tmp_path, 3, [{"prompt_id": 7}])
    index = RolloutIndex(tmp_path)
    progress = index.update()
    assert len(progress.damage) == 2 and "step-000002" in progress.damage[0] and "no rollouts" in progress.damage[1]
    assert progress.num_rollouts == 4 + 3 and index.update().damage == progress.damage


@pytest.mark.parametrize("damage", [b"", b"SQLite format 3\0" + b"x" * 5000, b"rubbish" * 1000])
def test_a_damaged_index_is_made_again(tmp_path: Path, damage: bytes) -> None:
    write_small_run(tmp_path)
    (tmp_path / "rollouts" / "index.sqlite").write_bytes(damage)
    index = RolloutIndex(tmp_path)
    assert index.update().num_rollouts == 11


def test_an_index_of_another_version_is_made_again(tmp_path: Path) -> None:
    write_small_run(tmp_path)
    with sqlite3.connect(tmp_path / "rollouts" / "index.sqlite") as db:
        db.execute("CREATE TABLE files (x)")
    assert RolloutIndex(tmp_path).update().num_rollouts == 11


def test_where_the_run_cannot_be_written_the_index_is_elsewhere_and_goes_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_small_run(tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    (tmp_path / "run" / "rollouts" / "index.sqlite").mkdir()  # no file can be there, whoever asks
    index = RolloutIndex(tmp_path / "run")
    assert index.update().num_rollouts == 11
    (folder,) = (tmp_path / "elsewhere").iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    index.close()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_two_readers_may_build_at_the_same_time(tmp_path: Path) -> None:
    write_small_run(tmp_path)
    with ThreadPoolExecutor(3) as pool:
        readers = list(pool.map(RolloutIndex, [tmp_path] * 3))
        list(pool.map(RolloutIndex.update, readers))
    assert [reader.num_found(Filter()) for reader in readers] == [11] * 3
    with sqlite3.connect(tmp_path / "rollouts" / "index.sqlite") as db:
        assert db.execute("SELECT count(*) FROM samples").fetchone() == (11,)


def test_an_index_that_somebody_else_holds_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_small_run(tmp_path)
    RolloutIndex(tmp_path).update()
    monkeypatch.setattr("offbeat.dashboard.rollout_index._BUSY_S", 0.01)
    with closing(sqlite3.connect(tmp_path / "rollouts" / "index.sqlite", isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        index = RolloutIndex(tmp_path)
        assert index.update().num_rollouts == 11
        index.close()
        holder.execute("ROLLBACK")
    assert RolloutIndex(tmp_path).num_found(Filter()) == 11


def test_a_run_without_rollouts_has_an_empty_index(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    index = RolloutIndex(tmp_path)
    assert index.update().num_files == 0 and index.find_rollouts(Filter()) == []
    index.close()


def test_an_index_that_goes_away_while_it_is_read_is_made_again(index: RolloutIndex) -> None:
    (index.run_dir / "rollouts" / "index.sqlite").unlink()
    assert index.find_rollouts(Filter()) == [] and index.update().num_rollouts == 11
    index.run_dir.rename(index.run_dir.with_name("older"))  # as a run that begins anew does
    write_rollouts(index.run_dir, 1, [group("Anew? ", ("yes", 1.0))])
    assert index.progress().num_rollouts == 0
    assert index.update().num_rollouts == 1 and addresses(index) == ["1.0.0"]
    assert (index.run_dir / "rollouts" / "index.sqlite").is_file()
