"""`offbeat engine`: serves until interrupted, and leaves nothing."""

import json
import re
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from offbeat.cli import main as cli
from small_run import start_offbeat
from waiting import wait_until


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def test_an_engine_answers_and_ends_at_ctrl_c(model_dir: str) -> None:
    room = str(2 * 32 * 128)  # two samples of 32 tokens
    with start_offbeat("engine", "--model", model_dir, "--port", "0", "--threads", "1", "--max-cache-bytes", room) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found and model_dir in line and "Ctrl-C" in line, line + process.communicate()[1]
        answer = post(f"{found[0]}/v1/completions", {"prompt": "321>", "max_tokens": 4, "temperature": 0, "ignore_eos": True})
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 4
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(f"{found[0]}/v1/completions", {"prompt": "321>", "max_tokens": 4, "n": 3})
        assert "take 96 places in the cache, which has 64" in refused.value.read().decode()
        tree = psutil.Process(process.pid).children(recursive=True)
        assert tree
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        assert (process.returncode, stderr) == (0, "")
        wait_until(lambda: not [child for child in tree if child.is_running()], timeout_s=30)


def test_an_engine_beyond_this_machine_wants_a_key_which_no_argument_shows(
    model_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OFFBEAT_API_KEY", raising=False)
    assert cli.main(["engine", "--model", model_dir, "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "--host 0.0.0.0 can be reached by other machines, so this engine needs a key: set OFFBEAT_API_KEY or give --key-file" in (
        capsys.readouterr().err)
    assert cli.main(["engine", "--model", model_dir, "--api-key", "secret"]) == 2
    assert "--api-key is not an option of 'offbeat engine'" in capsys.readouterr().err


def test_a_busy_port_is_a_mistake(model_dir: str, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert cli.main(["engine", "--model", model_dir, "--port", str(port), "--threads", "1"]) == 2
    error = capfd.readouterr().err
    assert f"offbeat: the engine cannot listen on 127.0.0.1:{port}: Address already in use; choose another port" in error
    assert "Traceback" not in error


def test_wrong_arguments_are_told_before_anything_starts(model_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["engine", "--model", model_dir, "--port", "70000"]) == 2
    assert cli.main(["engine", "--model", str(tmp_path)]) == 2
    assert cli.main(["engine", "--model", model_dir, "--train.num_ranks", "2"]) == 2
    assert cli.main(["engine", "--model", model_dir, "--max-adapters", "0"]) == 2
    assert cli.main(["engine", "--model", model_dir, "--max-adapter-rank", "0"]) == 2
    assert cli.main(["engine", "--model", model_dir, "--max-cache-bytes", "-1"]) == 2
    assert cli.main(["engine", "--model", model_dir, "--max-prefill-per-round", "0"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "--port must be between 0 and 65535, got 70000" in lines[0]
    assert str(tmp_path) in lines[1]
    assert "--train.num_ranks is not an option of offbeat engine" in lines[2]
    assert "max_adapters must be >= 1, got 0" in lines[3]
    assert "max_adapter_rank must be >= 1, got 0" in lines[4]
    assert "max_cache_bytes must be >= 0, got -1" in lines[5]
    assert "max_prefill_per_round must be >= 1, got 0" in lines[6]
