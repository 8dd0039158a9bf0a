"""What was acknowledged is kept, whatever happens to the server, its disk or its database; and what is lost is said."""

import asyncio
import shutil
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from http_serving import Answer, Client
from protocol import PROTOBUF, datum, finished, model_of, pass_body, session_of
from sdk.server import MODEL_NAME, Server
from support.powercut import Disk, PowerCut
from support.probing import Probe, StartServer, run_probe
from waiting import wait_until


class Trainee:
    """A model, and its next number."""

    def __init__(self, client: Client, model: str) -> None:
        self.client, self.model, self.seq = client, model, 0

    @classmethod
    async def make(cls, client: Client) -> "Trainee":
        return cls(client, await model_of(client, await session_of(client), base_model=MODEL_NAME))

    async def ask(self, name: str, **body: Any) -> Answer:
        self.seq += 1
        if name in ("forward", "forward_backward"):
            data = pass_body(self.model, self.seq, [datum([5, 6, 7, 8])], forward_only=name == "forward")
            return await self.client.post("forward_backward", data, headers=PROTOBUF)
        return await self.client.post(name, {"model_id": self.model, "seq_id": self.seq, **body})

    async def do(self, name: str, **body: Any) -> Any:
        return await finished(self.client, await self.ask(name, **body))

    async def step(self) -> None:
        await self.do("forward_backward")
        assert "error" not in await self.do("optim_step", adam_params={"learning_rate": 0.01})

    async def save(self, name: str) -> str:
        return (await self.do("save_weights", path=name, overwrite=True))["path"]

    async def resumed(self, path: str) -> tuple["Trainee", Any]:
        """Another model, which begins with a checkpoint, and what came of that."""
        other = await Trainee.make(self.client)
        return other, await other.do("load_weights", path=path, optimizer=True)

    async def loss(self) -> float:
        return next(value for name, value in (await self.do("forward"))["metrics"].items() if name == "loss:sum")


async def saved_until(client: Client, stop: Callable[[], None], *, after: int) -> dict[str, float]:
    """Clients save and overwrite until the server is gone; the loss of each checkpoint's weights, as acknowledged, by path."""
    known: dict[str, float] = {}

    async def go_on(worker: int) -> None:
        trainee = await Trainee.make(client)
        for number in range(100):
            await trainee.step()
            loss = await trainee.loss()
            for name in ("latest", f"{worker}-{number}"):
                known[await trainee.save(name)] = loss
            if sum(map(bool, known)) >= after:
                stop()

    gone = await asyncio.gather(*(go_on(worker) for worker in range(2)), return_exceptions=True)
    assert all(isinstance(error, aiohttp.ClientError) for error in gone), gone
    return known


async def demand(client: Client, known: dict[str, float]) -> None:
    """All that was acknowledged is there, as it was; what has a name that is overwritten may be the one after it."""
    trainee = await Trainee.make(client)
    assert len(known) >= 6
    for path, loss in known.items():
        resumed, loaded = await trainee.resumed(path)
        assert loaded.get("path") == path, loaded
        assert path.endswith("latest") or await resumed.loss() == pytest.approx(loss, rel=1e-5)


def kill_all(server: Server) -> None:
    children = server.children()
    server.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, f"left behind: {alive}"


def run(server: Server, body: Callable[[Client], Awaitable[Any]]) -> Any:
    """What a body gives that is given a client of a server."""
    found = []

    async def noted(client: Client) -> None:
        found.append(await body(client))

    run_probe(server, noted)
    return found[0]


def test_a_database_of_another_folder_is_refused_and_nothing_is_touched(
    start_server: StartServer, served_model: Path, tmp_path: Path,
) -> None:
    server, other = start_server(), tmp_path / "other.db"
    path = run(server, lambda client: saved(client, "one"))
    server.stop()
    before = {file: file.read_bytes() for file in (tmp_path / "data" / "checkpoints").rglob("*") if file.is_file()}
    wrong = Server(served_model, tmp_path, "--database", f"sqlite:///{other}")
    with pytest.raises(RuntimeError, match=r"other\.db does not belong to the data folder .*; nothing was changed; give the --database"):
        wrong.start()
    assert wrong.process is not None and wrong.process.wait() == 2 and not other.exists()
    assert {file: file.read_bytes() for file in (tmp_path / "data" / "checkpoints").rglob("*") if file.is_file()} == before
    assert path and len(before) >= 2


async def saved(client: Client, *names: str) -> list[str]:
    trainee = await Trainee.make(client)
    await trainee.step()
    return [await trainee.save(name) for name in names]


def aside_of(data: Path) -> set[str]:
    """Names of the whole folders that were put aside."""
    return {path.name for path in (data / "checkpoints" / "orphans").glob("*/*") if (path / "manifest.json").exists()}


def test_a_restored_backup_of_the_database_takes_no_files_of_newer_checkpoints(start_server: StartServer, tmp_path: Path) -> None:
    server, data, backup = start_server(), tmp_path / "data", tmp_path / "backup.db"

    async def body(client: Client) -> None:
        await saved(client, "older")
        with closing(sqlite3.connect(data / "service.db")) as source, closing(sqlite3.connect(backup)) as target:
            source.backup(target)
        await saved(client, "newer")

    run(server, body)
    server.stop()
    newer = {path.name for path in (data / "checkpoints").iterdir()}
    shutil.copy(backup, data / "service.db")
    server.start()
    listed = run(server, lambda client: client.get("checkpoints")).json["checkpoints"]
    assert [checkpoint["checkpoint_id"] for checkpoint in listed] == ["weights/older"]
    wait_until(lambda: "put the newer one back" in (data / "log" / "service.jsonl").read_text(), timeout_s=60)  # beside its first requests
    assert aside_of(data) and {path.name for path in (data / "checkpoints").iterdir()} - {"orphans"} | aside_of(data) >= newer


def test_the_failure_of_a_killed_rank_says_what_is_lost(start_server: StartServer) -> None:
    server = start_server()

    async def body(client: Client) -> None:
        trainee = await Trainee.make(client)
        await trainee.step()
        await trainee.save("kept")
        loss = await trainee.loss()
        for _ in range(3):
            await trainee.step()
        (rank,) = [child for child in server.children() if "rank 0" in " ".join(child.cmdline())]
        rank.kill()
        only = await trainee.do("forward_backward")
        assert "went back to its last checkpoint (step 1, where it had come to step 4) because the trainers failed" in only["error"]
        assert "go on from there, or create another model from a checkpoint" in only["error"] and only["category"] == "server"
        assert await trainee.loss() == pytest.approx(loss, rel=1e-5), "and it is true"

    run(server, body)


def test_a_copy_beside_a_delete_is_whole_or_refused(probe: Probe, server: Server) -> None:
    async def body(client: Client) -> None:
        session, trainee = await session_of(client), await Trainee.make(client)
        path, other = await trainee.save("source"), await trainee.save("other")  # the model needs the files of the last one

        async def copy(source: str, number: int) -> Answer:
            return await client.post("copy_weights", {"source_path": source, "session_id": session, "model_seq_id": number})

        asking = []
        with closing(sqlite3.connect(server.data / "service.db", isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")  # a disk that is slow for a moment: what comes waits, one behind the other
            for ask in (copy(other, 1), copy(other, 2), copy(path, 0),
                        client.ask("DELETE", f"/api/v1/training_runs/{trainee.model}/checkpoints/weights/source")):
                asking.append(asyncio.create_task(ask))
                await asyncio.sleep(0.3)
            database.rollback()
        *others, copied, deleted = await asyncio.gather(*asking)
        assert [answer.status for answer in others] == [200, 200] and deleted.status in (200, 204) and copied.status in (200, 404)
        if copied.status == 200:
            _, loaded = await trainee.resumed(copied.json["tinker_path"])
            assert loaded.get("path") == copied.json["tinker_path"], loaded

    probe(body)


def test_a_step_whose_answer_is_gone_is_not_carried_out_again(start_server: StartServer, tmp_path: Path) -> None:
    server, trainees = start_server(), []

    async def before(client: Client) -> float:
        trainee = await Trainee.make(client)
        trainees.append(trainee)
        await trainee.step()
        return await trainee.loss()

    async def after(client: Client) -> float:
        trainee = Trainee(client, trainees[0].model)
        asked = await client.post("retrieve_future", {"request_id": f"{trainee.model}:2"})
        assert asked.status == 410 and "was carried out" in asked.detail and "send it again" not in asked.detail
        for name in ("forward_backward", "optim_step"):
            again = await trainee.ask(name, adam_params={"learning_rate": 0.01})
            assert again.status == 410 and "was carried out" in again.detail
        trainee.seq = 3
        return await trainee.loss()

    loss = run(server, before)
    server.stop()
    with closing(sqlite3.connect(tmp_path / "data" / "service.db")) as database:
        database.execute("DELETE FROM futures")  # as after an hour
        database.commit()
    server.start()
    assert run(server, after) == pytest.approx(loss, rel=1e-5)


def test_a_damaged_checkpoint_is_said_and_changes_nothing(probe: Probe, server: Server) -> None:
    folder = server.data / "checkpoints"

    async def body(client: Client) -> None:
        before = set(folder.iterdir()) if folder.exists() else set()
        trainee = await Trainee.make(client)
        await trainee.step()
        path, loss = await trainee.save("broken"), await trainee.loss()
        (made,) = set(folder.iterdir()) - before
        for file in made.iterdir():
            intact = file.read_bytes()
            file.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
            _, told = await trainee.resumed(path)
            assert "damaged" in told["error"] and str(folder) not in told["error"]
            file.write_bytes(intact)
        assert await trainee.loss() == pytest.approx(loss, rel=1e-5)
        assert (await trainee.resumed(path))[1].get("path") == path

    probe(body)


def test_kill_9_takes_nothing_that_was_acknowledged(start_server: StartServer) -> None:
    server = start_server()
    known = run(server, lambda client: saved_until(client, lambda: kill_all(server), after=8))
    server.start()
    run(server, lambda client: demand(client, known))


def test_a_power_cut_takes_nothing_that_was_acknowledged(
    start_server: StartServer, served_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "data").mkdir()
    power = PowerCut(tmp_path / "power", tmp_path / "data")
    with monkeypatch.context() as patch:
        for name, value in power.environment.items():
            patch.setenv(name, value)
        server = start_server()
    known = run(server, lambda client: saved_until(client, lambda: kill_all(server), after=8))
    power.cut(tmp_path / "after" / "data", Disk.STRICT)
    with Server(served_model, tmp_path / "after") as again:
        run(again, lambda client: demand(client, known))
