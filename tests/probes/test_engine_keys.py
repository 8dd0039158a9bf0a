"""Engines, files and messages, as a user of the server's machine without any key finds them, and one who has an engine's key."""

import asyncio
import json
import re
import stat
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from http_serving import Client
from protocol import base_sampler, finished, sample_body
from sdk.server import MODEL_NAME, PYTHON, Server
from support.probing import Probe, StartServer, run_probe

KEY = re.compile(rb"Bearer ([A-Za-z0-9_-]{43})")
PROMPT = [5, 6, 7]


def engine_of(server: Server) -> psutil.Process:
    """The process of its engine."""
    return next(child for child in server.children() if any("EngineWorker" in word for word in child.cmdline()))


def address_of(engine: psutil.Process) -> str:
    """Where it listens, as everybody on this machine can find out."""
    port = next(connection.laddr.port for connection in engine.net_connections() if connection.status == psutil.CONN_LISTEN)
    return f"http://127.0.0.1:{port}"


def key_of(server: Server) -> str:
    """The key of the run, out of the memory of the server, which only its user can read."""
    assert server.process is not None
    root = Path("/proc") / str(server.process.pid)
    with (root / "mem").open("rb", buffering=0) as memory:
        for line in (root / "maps").read_text().splitlines():
            where, rights, *_ = line.split()
            if not rights.startswith("rw"):
                continue
            start, end = (int(part, 16) for part in where.split("-"))
            memory.seek(start)
            if match := KEY.search(memory.read(end - start)):
                return match[1].decode()
    raise AssertionError("the server sends no key to its engines")


def ask(url: str, method: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Status and answer of one request to an engine."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"} | headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as exc:
        return exc.code, json.loads(exc.read() or b"null")


def test_a_local_user_without_the_key_cannot_sample_probe_folders_or_pause_an_engine(server: Server) -> None:
    url = address_of(engine_of(server))
    attempts: list[tuple[str, str, Any]] = [
        ("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 4}), ("POST", "/v1/score", {"tokens": PROMPT}),
        ("POST", "/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": "/etc"}),
        ("POST", "/v1/weights/stage", {"version": 9, "folder": "/etc"}), ("POST", "/v1/weights/switch", {"version": 9}),
        ("POST", "/pause", {}), ("POST", "/resume", {}), ("GET", "/v1/models", None), ("GET", "/health", None), ("GET", "/metrics", None)]
    for method, path, body in attempts:
        status, answer = ask(url + path, method, body)
        assert (status, answer["error"]["message"]) == (401, "this engine wants its key; send it as 'Authorization: Bearer KEY'"), path
        assert ask(url + path, method, body, Authorization="Bearer tml-guessed")[0] == 401
    assert ask(f"{url}/pause", "POST", {}, Host="evil.example", Origin="https://evil.example")[0] == 401


def test_the_engines_key_stands_on_no_command_line_and_in_no_file(server: Server) -> None:
    key = key_of(server)
    assert ask(f"{address_of(engine_of(server))}/health", "GET", Authorization=f"Bearer {key}")[0] == 200, "it is the key"
    assert server.process is not None
    for process in (psutil.Process(server.process.pid), *server.children()):
        assert key not in " ".join(process.cmdline())
    folder = server._folder
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {"service.db", "events.jsonl", "engine-0.log", "service.jsonl"} <= {path.name for path in files}
    assert not [path for path in files if key.encode() in path.read_bytes()]


def test_each_start_of_a_server_draws_another_key(server: Server, start_server: StartServer) -> None:
    assert key_of(server) != key_of(start_server())


def test_no_other_user_of_the_machine_can_read_what_a_server_keeps(server: Server, probe: Probe) -> None:
    async def body(client: Client) -> None:
        sampled = await client.post("asample", sample_body(await base_sampler(client, base_model=MODEL_NAME), 0, PROMPT, max_tokens=2))
        assert len((await finished(client, sampled))["sequences"]) == 1

    probe(body)  # so that there is a result
    data = server._folder / "data"
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in (data, *data.rglob("*"))}
    assert len(modes) > 10
    assert not {str(path): oct(mode) for path, mode in modes.items() if mode & 0o077}


def test_an_engine_that_an_old_controller_pauses_is_seen_and_healed(server: Server, probe: Probe) -> None:
    url, key = address_of(engine_of(server)), key_of(server)

    async def body(client: Client) -> None:
        sampler = await base_sampler(client, base_model=MODEL_NAME)
        pause = {"mode": "keep", "by": "an old controller"}
        assert (await asyncio.to_thread(ask, f"{url}/pause", "POST", pause, Authorization=f"Bearer {key}"))[0] == 200
        start = time.monotonic()
        sampled = await finished(client, await client.post("asample", sample_body(sampler, 0, PROMPT, max_tokens=2)))
        assert len(sampled["sequences"]) == 1 and time.monotonic() - start < 60
        assert (await asyncio.to_thread(ask, f"{url}/health", "GET", Authorization=f"Bearer {key}"))[1]["status"] == "ok"

    probe(body)
    events = [json.loads(line) for line in (server._folder / "data" / "cluster" / "events.jsonl").read_text().splitlines()]
    reasons = [event["reason"] for event in events if event["kind"] == "quarantine"]
    assert re.fullmatch(r"it was paused by an old controller, \d+ s ago, and not by this run", reasons[-1])
    assert events[-1]["kind"] == "healed"


def test_what_engines_say_when_they_fail_is_for_the_log_alone(start_server: StartServer) -> None:
    server = start_server("--inference.heal_timeout_s", "0.2")

    async def body(client: Client) -> None:
        sampler = await base_sampler(client, base_model=MODEL_NAME)
        engine_of(server).kill()
        failed = await finished(client, await client.post("asample", sample_body(sampler, 0, PROMPT, max_tokens=2)))
        assert failed["category"] == "server"
        assert re.fullmatch(
            r"the engines could not do this, and the server's log has the reason under \S+; send it again", failed["error"])
        logged = (server._folder / "data" / "log" / "service.jsonl").read_text()
        assert "no engine can serve" in logged

    run_probe(server, body)


def test_a_password_of_the_database_does_not_get_onto_a_command_line_that_runs(served_model: Path, tmp_path: Path) -> None:
    command = [
        PYTHON, "-m", "offbeat", "serve", "--model", served_model, "--data-dir", tmp_path / "data", "--database",
        "postgresql://alice:hunter2@127.0.0.1:1/offbeat"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 2 and "hunter2" not in done.stdout + done.stderr
    assert "the database's URL must not contain a password" in done.stderr and "PGPASSWORD" in done.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_engine_beyond_this_machine_does_not_start_without_a_key(served_model: Path, host: str) -> None:
    command = [PYTHON, "-m", "offbeat", "engine", "--model", served_model, "--host", host, "--port", "0"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 2
    assert f"--host {host} can be reached by other machines, so this engine needs a key" in done.stderr
