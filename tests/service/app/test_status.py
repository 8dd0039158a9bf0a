"""The status page and what it shows, for this machine alone unless it is public."""

import asyncio
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from prometheus_client import CollectorRegistry

from http_serving import Client, Serve, serving
from offbeat.aio import beside
from offbeat.service.app import status
from offbeat.service.app.app import make_app
from offbeat.service.app.auth import HostNames
from offbeat.service.app.body import Bodies
from offbeat.service.app.journal import Journal
from offbeat.service.app.status import StatusPage, _name, processes
from offbeat.service.keys import Keys
from protocol import PROTOBUF, datum, finished, model_of, pass_body, sample_body, session_of
from service_status import busy_status
from waiting import until, wait_until

PAGE = (Path(status.__file__).parent / "status.html").read_text()


def test_the_page_needs_nothing_from_elsewhere_and_puts_no_text_in_as_markup() -> None:
    assert not re.findall(r"(?:src|href)=\"(?!data:)", PAGE) and "http://" not in PAGE and "https://" not in PAGE and "@import" not in PAGE
    assert [line for line in PAGE.splitlines() if "innerHTML" in line] == ['  svg.innerHTML = values.length < 2 ? "" :']


def test_a_narrow_screen_gets_the_columns_that_matter_and_parked_models_are_folded() -> None:
    assert 'name="viewport" content="width=device-width' in PAGE and ".opt { display: none; }" in PAGE
    assert re.search(r'<details id="parked-fold">.*<table id="parked">', PAGE) and "models.filter(m => m.resident)" in PAGE


def test_the_page_shows_the_service_and_its_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_EVERY_S", 0.02)

    async def body() -> None:
        journal = Journal(CollectorRegistry())
        journal.trouble("a1b2", "alice", "POST /api/v1/asample", "the prompt is wrong")
        page = StatusPage(lambda: busy_status(time.time()), journal, public=False)
        app = make_app([], page.routes, keys=Keys.open_house(), bodies=Bodies(2**20), journal=journal)
        async with serving(app) as client, beside(page.watch()):
            await until(lambda: len(page._history) > 2)
            answer = await client.of("").ask("GET", "/status.json")
            shown = answer.json
            assert len(shown["status"]["models"]) == 16 and shown["status"]["sampling"]["jobs"] == 112
            assert shown["troubles"][0]["sentence"] == "the prompt is wrong" and shown["rates"][0]["trained"] == 0
            html = await client.of("").ask("GET", "/")
            assert html.status == 200 and html.headers["content-type"].startswith("text/html") and html.body.decode() == PAGE

    asyncio.run(body())


def test_others_than_this_machine_see_nothing_but_health(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.service.app.auth.is_loopback", lambda _: False)
    (tmp_path / "keys.toml").write_text('[owners.alice]\nkey = "tml-alice-0123456789"\n')
    keys = Keys.load(tmp_path / "keys.toml")

    async def seen(*, public: bool) -> list[int]:
        journal = Journal(CollectorRegistry())
        page = StatusPage(lambda: busy_status(0.0), journal, public=public, names=HostNames(any_address=True))
        async with serving(make_app([], page.routes, keys=keys, bodies=Bodies(2**20), journal=journal)) as client:
            return [(await client.ask("GET", path)).status for path in ("/", "/status.json", "/api/v1/healthz")]

    assert asyncio.run(seen(public=False)) == [404, 404, 200] and asyncio.run(seen(public=True)) == [200, 200, 200]


def test_the_status_of_a_real_service_names_its_models_and_engines(serve: Serve) -> None:
    async def body(client: Client) -> None:
        model = await model_of(client, await session_of(client))
        await client.post("get_info", {})
        shown = (await client.ask("GET", "/status.json")).json
        assert [m["model_id"] for m in shown["status"]["models"]] == [model] and shown["status"]["engines"][0]["state"] == "serving"
        assert shown["status"]["owners"][0]["models"] == 1 and "model_id" in shown["troubles"][0]["sentence"]

    serve(body)


def test_the_status_of_a_real_service_tells_speed_memory_and_what_owners_have(serve: Serve) -> None:
    async def body(client: Client) -> None:
        session = await session_of(client)
        model = await model_of(client, session)
        await finished(client, await client.post("forward_backward", pass_body(model, 1, [datum([13, 14, 15, 9])]), headers=PROTOBUF))
        await finished(client, await client.post("save_weights", {"model_id": model, "seq_id": 2}))
        saved = await finished(client, await client.post("save_weights_for_sampler", {
            "model_id": model, "seq_id": 3, "sampling_session_seq_id": 0}))
        sampler = saved["sampling_session_id"]
        await finished(client, await client.post("asample", sample_body(sampler, 0, [13, 14], max_tokens=20, stop=[])))
        shown = (await client.ask("GET", "/status.json")).json["status"]
        (told,), (owner,) = shown["models"], shown["owners"]
        assert (told["trained_per_s"], told["sampled_per_s"]) == (0.3, 2.0), "over ten seconds"
        assert (owner["checkpoints"], owner["samplers"]) == (1, 1) and shown["incidents"] == [] and shown["counts"]["rank_deaths"] == 0
        names = {process["name"]: process["memory_bytes"] for process in shown["processes"]}
        assert {"service", "rank 0", "rank 1", "engine 0"} <= names.keys() and min(names.values()) > 10 << 20

    serve(body)


def memory() -> dict[str, int]:
    return {status.name: status.memory_bytes for status in processes()}


def test_a_worker_is_told_by_its_name_with_what_it_has_started() -> None:
    assert _name(["python", "-m", "offbeat.process", "a.b:C", "rank 0", "5", "77"]) == "rank 0"
    assert _name(["python", "-c", "from multiprocessing.resource_tracker import main"]) == "" == _name(["python", "-m", "offbeat.process"])
    code = "import subprocess, time; child = subprocess.Popen(['sleep', '60']); held = b'x' * (60 << 20); time.sleep(60)"
    worker = subprocess.Popen([sys.executable, "-c", code, "offbeat.process", "x:Y", "engine 7", "3", "1"])
    other = subprocess.Popen(["sleep", "60"])
    try:
        wait_until(lambda: memory().get("engine 7", 0) > 60 << 20, timeout_s=20)
        assert memory()["service"] > 1 << 20 and "" not in memory()
    finally:
        for child in psutil.Process(worker.pid).children():
            child.kill()
        for process in (worker, other):
            process.kill()
            process.wait()
