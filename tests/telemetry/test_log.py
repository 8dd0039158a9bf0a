"""Logging of processes."""

import json
import logging
import re

import pytest

from offbeat.errors import StorageError
from offbeat.telemetry.log import current_request, set_up_logging


def test_a_record_is_one_line_with_utc_time_level_and_origin(tmp_path, capsys):
    path = tmp_path / "logs" / "engine-0.log"
    set_up_logging(path)
    logging.getLogger("offbeat.inference").info("loaded version %d", 3)
    logging.getLogger("offbeat.inference").debug("not shown")
    logging.getLogger("somelibrary").info("not shown either")
    (line,) = path.read_text().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO offbeat\.inference: loaded version 3", line)
    assert capsys.readouterr().err == ""


def test_a_process_that_says_nothing_leaves_no_file(tmp_path):
    set_up_logging(tmp_path / "a.log")
    assert not (tmp_path / "a.log").exists()
    logging.getLogger("offbeat").info("begun")
    set_up_logging(tmp_path / "b.log")
    assert [path.name for path in tmp_path.iterdir()] == ["a.log"]


def test_debug_records_everything_and_shows_it(tmp_path, capsys):
    path = tmp_path / "x.log"
    set_up_logging(path, debug=True)
    logging.getLogger("offbeat").debug("detail")
    assert "DEBUG offbeat: detail" in path.read_text()
    assert "DEBUG offbeat: detail" in capsys.readouterr().err


def test_setting_up_again_moves_to_the_new_file(tmp_path):
    for name in ("a", "b"):
        set_up_logging(tmp_path / name)
        logging.getLogger("offbeat").info(name)
    assert (tmp_path / "a").read_text().count("\n") == (tmp_path / "b").read_text().count("\n") == 1


def test_without_a_file_warnings_go_to_stderr(capsys):
    set_up_logging(None)
    logging.getLogger("offbeat").info("quiet")
    logging.getLogger("offbeat").warning("loud")
    err = capsys.readouterr().err
    assert "loud" in err and "quiet" not in err


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        set_up_logging(tmp_path / "file" / "x.log")


def test_a_service_writes_json_lines_that_carry_the_request(tmp_path):
    path = tmp_path / "log" / "service.jsonl"
    set_up_logging(path, as_json=True)
    log = logging.getLogger("offbeat.service")
    token = current_request.set("r1")
    log.info("took %s", "ä", extra={"fields": {"status": 200}})
    current_request.reset(token)
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("failed")
    first, second = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert first.items() >= {"level": "info", "logger": "offbeat.service", "message": "took ä", "request": "r1", "status": 200}.items()
    assert "request" not in second and second["traceback"].endswith("ValueError: why")


def test_json_lines_go_on_in_another_file_when_one_is_large(tmp_path, monkeypatch):
    monkeypatch.setattr("offbeat.telemetry.log._FILE_BYTES", 1000)
    path = tmp_path / "service.jsonl"
    set_up_logging(path, as_json=True)
    for number in range(100):
        logging.getLogger("offbeat").info("line %d", number)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 9 and all(file.stat().st_size <= 1000 for file in files)
    assert json.loads(path.read_text().splitlines()[-1])["message"] == "line 99"


def test_what_fails_on_a_full_disk_is_told_although_the_log_cannot_be_written(tmp_path):  # world 61 of tests/worlds
    path = tmp_path / "logs" / "controller.log"
    set_up_logging(path)
    path.parent.rmdir()  # as little can be written there as on a full disk
    logging.getLogger("offbeat.runs.run").error("the run failed")
    path.parent.mkdir()
    logging.getLogger("offbeat.runs.run").error("once more")
    assert path.read_text(encoding="utf-8").endswith("once more\n")
