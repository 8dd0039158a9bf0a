"""A run's records, opened and closed together, by one process at a time."""

import asyncio
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.errors import ConfigError, MissingExtraError, StorageError
from offbeat.telemetry.console import Console
from offbeat.telemetry.record import RunRecord, SilentRecord
from offbeat.telemetry.run_lock import lock_run
from offbeat.telemetry.trace import read_trace


def record(folder: Path, *, trace: bool = True, sinks: tuple[str, ...] = ()) -> RunRecord:
    return RunRecord(folder, trace=trace, console=Console("quiet", stream=io.StringIO()), sinks=sinks)


def test_everything_that_is_recorded_is_in_the_folder(tmp_path: Path) -> None:
    with record(tmp_path / "runs" / "a") as run:
        run.events.record("publish", version=1)
        run.stats.commit(0, 1, 1, {"reward/mean": 0.5})
        run.on_span("train_step", "rank 0", 1.0, 2.0)
        asyncio.run(run.rollouts(1, [b'{"prompt_id": "0:0"}']))
    folder = tmp_path / "runs" / "a"
    assert json.loads((folder / "events.jsonl").read_text())["kind"] == "publish"
    assert json.loads((folder / "metrics.jsonl").read_text())["reward/mean"] == 0.5
    assert [(span.name, span.track) for span in read_trace(folder / "trace.json")] == [("train_step", "rank 0")]
    assert (folder / "rollouts" / "step-000001.jsonl.zst").exists()
    assert run.log_dir.is_dir()


def test_files_that_a_killed_process_had_begun_are_removed(tmp_path: Path) -> None:
    part = tmp_path / "a" / "evaluations" / ".step-000032.jsonl.zst.part"
    part.parent.mkdir(parents=True)
    part.touch()
    with record(tmp_path / "a"):
        assert not part.exists()


def test_empty_logs_are_gone_at_the_end_and_others_stay(tmp_path: Path) -> None:
    with record(tmp_path / "a") as run:
        (run.log_dir / "sums").mkdir()
        for name in ("rank-0.log", "sums/reward-0.log"):
            (run.log_dir / name).touch()
        (run.log_dir / "engine-0.log").write_text("a warning\n")
    assert [path.name for path in run.log_dir.rglob("*.log")] == ["engine-0.log"]


def test_rollouts_are_stored_beside_the_run_one_sample_after_another_and_a_full_disk_is_told_by_the_next(tmp_path: Path) -> None:
    told, main = [], threading.get_ident()

    def lines(step: int) -> Iterator[bytes]:
        told.append((step, threading.get_ident() == main))
        yield b"{}"

    async def body(run: RunRecord) -> None:
        await run.rollouts(1, lines(1))
        await run.rollouts(2, lines(2))
        await run.stored()
        assert told == [(1, False), (2, False)] and len(list((tmp_path / "a" / "rollouts").iterdir())) == 2
        (tmp_path / "a" / "rollouts" / ".step-000003.jsonl.zst.part").mkdir()
        await run.rollouts(3, lines(3))
        with pytest.raises(StorageError, match="step-000003"):
            await run.rollouts(4, lines(4))

    with record(tmp_path / "a") as run:
        asyncio.run(body(run))


def test_rejected_groups_are_stored_with_the_next_step_and_a_silent_record_keeps_none(tmp_path: Path) -> None:
    for record_ in (record(tmp_path / "a"), SilentRecord(tmp_path / "b")):
        with record_ as run:
            run.reject(5, lambda step: b"%d" % step)
            asyncio.run(run.rollouts(7, [b"{}"]))
    assert {path.name for path in (tmp_path / "a" / "rollouts").iterdir()} == {"step-000007.jsonl.zst", "rejected-000007.jsonl.zst"}
    assert not (tmp_path / "b").exists()


def test_a_run_that_goes_on_drops_the_rollouts_of_steps_that_it_repeats(tmp_path: Path) -> None:
    with record(tmp_path / "a") as run:
        for step in (1, 2, 3):
            asyncio.run(run.rollouts(step, [b"{}"]))
    with record(tmp_path / "a") as run:
        run.resume_after(2)
    assert {path.name for path in (tmp_path / "a" / "rollouts").iterdir()} == {"step-000001.jsonl.zst", "step-000002.jsonl.zst"}


def test_a_last_write_that_fails_is_logged_when_the_record_is_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with record(tmp_path / "a") as run:
        (tmp_path / "a" / "rollouts" / ".step-000001.jsonl.zst.part").mkdir(parents=True)
        asyncio.run(run.rollouts(1, [b"{}"]))
    assert "the last rollouts could not be stored: " in caplog.text and "step-000001" in caplog.text


def test_without_a_time_line_no_file_is_made(tmp_path: Path) -> None:
    with record(tmp_path / "a", trace=False) as run:
        run.on_span("train_step", "rank 0", 1.0, 2.0)
    assert not (tmp_path / "a" / "trace.json").exists()


def test_metrics_go_to_the_sinks_that_were_asked_for(tmp_path: Path) -> None:
    with record(tmp_path / "a", sinks=("tensorboard", "tensorboard")) as run:
        run.stats.commit(0, 1, 1, {"reward/mean": 0.5})
    (written,) = (tmp_path / "a" / "tensorboard").iterdir()
    assert b"reward/mean" in written.read_bytes()
    assert (tmp_path / "a" / "events.jsonl").read_text() == ""


def test_a_sink_that_fails_is_an_event_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "tensorboard").touch()  # where the sink wants a folder
    with record(tmp_path / "a", sinks=("tensorboard",)) as run:
        for step in (1, 2):
            run.stats.commit(0, step, step, {"reward/mean": 0.5})
    (event,) = [json.loads(line) for line in (tmp_path / "a" / "events.jsonl").read_text().splitlines()]
    assert (event["kind"], event["sink"]) == ("sink_dropped", "tensorboard") and "FileExistsError" in event["reason"]
    assert len((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_sink_that_is_not_installed_is_told_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(MissingExtraError, match="offbeat.abacus"):
        record(tmp_path / "a", sinks=("abacus",))
    assert not (tmp_path / "a").exists()


def test_a_run_has_one_process_at_a_time(tmp_path: Path) -> None:
    with record(tmp_path / "a"):
        for take in (record, lock_run):
            with pytest.raises(ConfigError, match="a' is being run by another process; wait for it, or set run.name"):
                take(tmp_path / "a")
    with record(tmp_path / "a"):
        pass
    lock_run(tmp_path / "a").close()


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot write the run folder .*file/a"):
        record(tmp_path / "file" / "a")
