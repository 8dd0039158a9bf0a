"""`offbeat serve`: serves until interrupted, saves what there is, and says in one sentence what it cannot."""

import asyncio
import json
import re
import signal
import socket
import sqlite3
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any

import aiohttp
import psutil
import pytest

from http_serving import Client
from offbeat.cli.main import main
from protocol import PROTOBUF, datum, finished, model_of, pass_body, session_of
from signals import has_signal
from small_run import start_offbeat
from waiting import wait_until


def iter_until(start: str, stream: IO[str]) -> Iterator[str]:
    """The lines of a stream up to the first that begins so, or to its end."""
    for line in stream:
        yield line
        if line.startswith(start):
            return


@contextmanager
def server(model_dir: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that runs, and its URL."""
    arguments = ["--model", model_dir, "--port", "0", "--data-dir", str(folder), "--model-name", "org/small", "--max-lora-rank", "4"]
    with start_offbeat("serve", *arguments) as process:
        try:
            assert process.stdout is not None
            before = list(iter_until("serving ", process.stdout))
            found = re.search(r"at (http://127\.0\.0\.1:\d+);", before[-1])
            assert found, "".join(before) + process.communicate(timeout=90)[1]
            assert before[0].startswith("starting ") and all(line.startswith("  ") for line in before[1:-1]), "what it waits for"
            lines = [process.stdout.readline() for _ in range(3)]
            assert f"export TINKER_BASE_URL={found[1]}" in lines[0] and "TINKER_API_KEY=tml-" in lines[1] and "org/small" in lines[2]
            yield process, found[1]
        finally:
            process.kill()


def use(url: str, body: Callable[[Client], Awaitable[Any]]) -> Any:
    """What a test's body gives, given a client of the server."""
    async def main() -> Any:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as http:
            return await body(Client(url, http))

    return asyncio.run(main())


@pytest.mark.parametrize("number", [
    pytest.param(signal.SIGINT, id="ctrl-c"), pytest.param(signal.SIGTERM, id="sigterm to all processes of a job, twice")])
def test_a_signal_saves_every_model_and_leaves_nothing(number: signal.Signals, model_dir: str, tmp_path: Path) -> None:
    async def train(client: Client) -> str:
        model = await model_of(client, await session_of(client))
        await client.post("forward_backward", pass_body(model, 1, [datum([13, 14, 15, 9, 8, 7])]), headers=PROTOBUF)
        await finished(client, await client.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.01}}))
        return model

    folder = tmp_path / "data"
    with server(model_dir, folder) as (process, url):
        model = use(url, train)
        tree = psutil.Process(process.pid).children(recursive=True)
        assert main(["serve", "--model", model_dir, "--port", "0", "--data-dir", str(folder)]) == 2, "the folder is taken"
        if number == signal.SIGTERM:
            for child in tree:
                child.terminate()
            process.terminate()
            wait_until(lambda: not has_signal(process.pid, signal.SIGTERM, mask="ShdPnd"), timeout_s=30)  # two at once are one
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=120)
        assert (process.returncode, stderr) == (0, "") and "ending: saving every model" in stdout
        assert stdout.rstrip().endswith("and the same command serves them again")
        wait_until(lambda: not any(child.is_running() for child in tree), timeout_s=60)
    with closing(sqlite3.connect(folder / "service.db")) as database:
        ((state, step),) = database.execute("SELECT state_folder, step FROM models WHERE id = ?", (model,))
    assert step == 1 and (folder / "checkpoints" / state / "manifest.json").is_file()
    rows = [json.loads(line) for line in (folder / "log" / "service.jsonl").read_text().splitlines()]
    created = next(row for row in rows if row["message"] == "POST /api/v1/create_model")
    assert created["status"] == 200 and created["owner"].startswith("key-") and len(created["request"]) == 12


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str], model_dir: str, tmp_path: Path) -> Callable[..., str]:
    """Runs `offbeat serve` with more arguments, expects exit code 2, and gives the one line on stderr."""

    def run(*arguments: str) -> str:
        given = {"--model": model_dir, "--port": "0", "--data-dir": str(tmp_path / "data")}
        given |= dict(zip(arguments[::2], arguments[1::2], strict=True))
        assert main(["serve", *(word for pair in given.items() for word in pair)]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("offbeat: ")
        return line

    return run


KEYS = {
    "none.toml": "", "twice.toml": '[owners.a]\nkey = "tml-0123456789abcdef"\n[owners.b]\nkey = "tml-0123456789abcdef"\n',
    "plain.toml": '[owners.a]\nkey = "sk-1"\n'}


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--host", "0.0.0.0"], "can be reached by other machines, so serve.keys must name a file of API keys"),
    (["--model", "nowhere/at/all"], "model folder 'nowhere/at/all' does not exist"),
    (["--port", "70000"], "serve.port must be <= 65535, got 70000"),
    (["--keys", "absent.toml"], "absent.toml cannot be read"),
    (["--keys", "none.toml"], "none.toml cannot be used"),
    (["--keys", "twice.toml"], "have the same key"),
    (["--keys", "plain.toml"], "does not begin with tml-"),
    (["--database", "mysql://x/y"], "the database's URL cannot be used"),
    (["--max-lora-rank", "0"], "model.lora.rank must be at least 1 to train many adapters, got 0"),
    (["--num-engines", "0"], "inference.num_engines must be >= 1, got 0"),
    (["--serve.max_tokens_per_pas", "5"], "did you mean serve.max_tokens_per_pass?"),
    (["--data-dir", "none.toml"], "cannot be written"),
])
def test_what_cannot_be_served_is_one_sentence(
    fails: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in KEYS.items():
        (tmp_path / name).write_text(text)
    assert sentence in fails(*arguments)


def test_a_taken_port_and_a_newer_database_are_one_sentence(fails: Callable[..., str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        assert f"cannot listen on 127.0.0.1:{port}" in fails("--port", port)
    (tmp_path / "data").mkdir(exist_ok=True)
    with closing(sqlite3.connect(tmp_path / "data" / "service.db")) as database:
        database.executescript("CREATE TABLE schema_version (version BIGINT); INSERT INTO schema_version VALUES (999)")
    assert "made by a newer Offbeat" in fails()
