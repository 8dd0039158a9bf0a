"""The client and the publisher against a real engine.

Generation, staging and switching, and the proof that catches an engine that did not switch.
"""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch

from heard import Heard
from offbeat.config.weights import WeightsConfig
from offbeat.engine.request import Event
from offbeat.engine.server import EngineServer
from offbeat.errors import BusyError, DeadlineError, EngineError, PublishError, RefusedError
from offbeat.fleet.pool import EnginePool
from offbeat.fleet.publication import PublishReport
from offbeat.fleet.publishers import WeightsPublisher
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.inference.sampling import Sampling
from offbeat.model.fingerprint import fingerprint
from offbeat.model.hf_io import read_safetensors
from offbeat.model.load import load_causal_lm
from offbeat.weights.proof import ProofJudge
from offbeat.weights.protocol import Manifest
from small_run import build_small_model
from waiting import until

CANARY = (13, 14, 15, 5, 6, 7, 0)
PROMPT = (13, 14, 15)


def using(url: str, body: Callable[[EngineClient], Awaitable[None]], *, api_key: str = "") -> None:
    async def main() -> None:
        async with EngineSession() as http:
            await body(EngineClient("engine 0", url, http.session, api_key=api_key))

    asyncio.run(main())


@torch.inference_mode()
def reference_logprobs(folder: str, tokens: tuple[int, ...]) -> list[float]:
    """Log-probability of each token after the first, by Hugging Face's own modules."""
    logits = load_causal_lm(folder, attention="sdpa")(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    return logits[:-1].log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1).tolist()


def manifest_of(folder: str, version: int) -> Manifest:
    """What a trainer that holds the weights of `folder` publishes."""
    logprobs = reference_logprobs(folder, CANARY)
    name = fingerprint((name, tensor.contiguous().view(-1).view(torch.uint8).numpy()) for name, tensor in read_safetensors(folder))
    return Manifest(version, folder, name, CANARY, tuple(logprobs))


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return manifest_of(build_small_model(tmp_path_factory.mktemp("newer"), seed=2), 5)


def test_samples_carry_tokens_logprobs_and_versions(start_engine, model_dir) -> None:
    _, url = start_engine(version=3)

    async def body(client: EngineClient) -> None:
        samples = await client.generate(PROMPT, Sampling(6), n=3, timeout_s=60)
        assert len(samples) == 3
        for sample in samples:
            assert 1 <= len(sample.token_ids) == len(sample.logprobs) == len(sample.versions) <= 6
            assert set(sample.versions) == {3}
            expected = reference_logprobs(model_dir, PROMPT + sample.token_ids)[len(PROMPT) - 1 :]
            assert sample.logprobs == pytest.approx(expected, abs=1e-4)
        assert (await client.health(timeout_s=60))["version"] == 3

    using(url, body)


def test_a_staged_version_is_served_after_the_switch_and_proves_itself(start_engine, newer) -> None:
    _, url = start_engine(version=0)

    async def body(client: EngineClient) -> None:
        await client.stage(newer, timeout_s=60)
        assert (await client.prove(CANARY, timeout_s=60)).version == 0
        await client.switch(newer, interrupt="recompute", timeout_s=60)
        proof = await client.prove(CANARY, timeout_s=60)
        assert (proof.version, proof.fingerprint) == (5, newer.fingerprint)
        assert fmean(proof.canary_logprobs) == pytest.approx(fmean(newer.canary_logprobs), abs=1e-4)
        (sample,) = await client.generate(PROMPT, Sampling(4), n=1, timeout_s=60)
        assert set(sample.versions) == {5}

    using(url, body)


class Channel:
    """Gives one manifest."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    async def write(self, version: int, *, num_receivers: int = 0) -> Manifest:
        assert version == self._manifest.version
        return self._manifest

    async def rewrite(self, manifest: Manifest) -> Manifest | None:
        return None

    def prune(self, served: int) -> None:
        pass


def keep_old_weights(server: EngineServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: the engine takes a switch, says that it serves the new version, and goes on with the old weights."""
    monkeypatch.setattr(server._engine._forward, "install", lambda prepared: None)


def publish(urls: dict[str, str], manifest: Manifest, *, min_engines: int) -> tuple[PublishReport, dict[str, int], dict[str, str]]:
    heard = Heard()

    async def main() -> tuple[PublishReport, dict[str, int]]:
        async with EngineSession() as http:
            clients = [EngineClient(name, url, http.session) for name, url in urls.items()]
            pool = EnginePool(clients, min_engines=min_engines, listener=heard)
            publisher = WeightsPublisher(pool, Channel(manifest), WeightsConfig(), judge=ProofJudge(tolerance=1e-3))
            reports: list[PublishReport] = []
            await publisher.publish(manifest.version, on_served=reports.append)
            await publisher.settle()
            (report,) = reports
            return report, {name: member.version for name, member in pool.members.items() if member.version is not None}

    report, serving = asyncio.run(main())
    return report, serving, heard.quarantines


def test_a_publish_that_leaves_old_weights_in_an_engine_is_caught_by_the_proof(start_engine, newer, monkeypatch) -> None:
    _, good = start_engine()
    faulty, bad = start_engine()
    keep_old_weights(faulty, monkeypatch)
    report, serving, quarantined = publish({"good": good, "bad": bad}, newer, min_engines=1)
    assert serving == {"good": 5}
    assert list(quarantined) == ["bad"]
    assert "fingerprint" in quarantined["bad"] and f"instead of {newer.fingerprint[:12]}" in quarantined["bad"]
    assert report.canary_gap < 1e-4


def test_weights_that_are_right_and_a_forward_that_is_not_are_caught_by_the_canary(start_engine, newer, monkeypatch) -> None:
    faulty, bad = start_engine()
    compute = faulty._engine._scorer.compute

    def off(*args: Any, **kwargs: Any) -> list[Event]:
        (event,) = compute(*args, **kwargs)
        return [replace(event, result=replace(event.result, logprobs=[logprob - 0.01 for logprob in event.result.logprobs]))]

    monkeypatch.setattr(faulty._engine._scorer, "compute", off)
    with pytest.raises(PublishError, match=r"its canary log-probabilities are off by 0\.01, more than 0\.001"):
        publish({"bad": bad}, newer, min_engines=1)


def test_a_wrong_request_is_refused_with_the_engines_words(start_engine, newer) -> None:
    _, url = start_engine(api_key="secret")

    async def body(client: EngineClient) -> None:
        with pytest.raises(RefusedError, match="engine 0 answered /v1/completions with 400: .*999"):
            await client.generate((999,), Sampling(4), n=1, timeout_s=60)
        with pytest.raises(RefusedError, match="version 9 is not staged"):
            await client.switch(replace(newer, version=9), interrupt="recompute", timeout_s=60)

    async def unknown(client: EngineClient) -> None:
        with pytest.raises(RefusedError, match="401"):
            await client.health(timeout_s=60)

    using(url, body, api_key="secret")
    using(url, unknown)


def test_a_full_queue_is_told_apart_from_a_refusal(start_engine) -> None:
    server, url = start_engine(max_running=1, max_queued=1)

    async def body(client: EngineClient) -> None:
        server._loop.pause("keep").result()
        waiting = [asyncio.create_task(client.generate(PROMPT, Sampling(2), n=1, timeout_s=60)) for _ in range(3)]
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        with pytest.raises(BusyError, match="429"):
            done.pop().result()
        server._loop.call(server._engine.resume).result()
        await asyncio.gather(*waiting, return_exceptions=True)

    using(url, body)


def test_a_late_answer_is_a_missed_deadline_and_frees_the_engine(start_engine) -> None:
    server, url = start_engine()

    async def body(client: EngineClient) -> None:
        server._loop.pause("keep").result()
        with pytest.raises(DeadlineError, match=r"waiting for generate on engine 0 \(http://127.*\) passed its deadline of 0.2 s"):
            await client.generate(PROMPT, Sampling(2), n=4, timeout_s=0.2)
        server._loop.call(server._engine.resume).result()
        await until(lambda: server._engine.num_running + server._engine.num_waiting == 0)

    using(url, body)


def test_an_engine_that_is_gone_is_named(start_engine) -> None:
    server, url = start_engine()

    async def body(client: EngineClient) -> None:
        await client.health(timeout_s=60)
        await asyncio.to_thread(server.stop)
        with pytest.raises(EngineError, match=r"engine 0 \(http://127.* cannot be reached"):
            await client.health(timeout_s=60)

    using(url, body)


def test_folders_are_delivered_to_an_engine_before_it_is_told_of_them_and_broadcasts_are_not() -> None:
    told: list[tuple[str, str]] = []

    class Told:
        async def stage(self, _wire: object, manifest: Manifest) -> None:
            told.append(("stage", manifest.folder))

        async def switch(self, _wire: object, manifest: Manifest, _interrupt: str) -> None:
            told.append(("switch", manifest.folder))

        async def load_adapter(self, _wire: object, name: str, folder: str) -> None:
            told.append((name, folder))

    async def deliver(engine: str, folder: str, timeout_s: float) -> str:
        if folder == "/run/gone":
            raise EngineError("engine 0 could not be sent /run/gone: it is gone")
        assert (engine, timeout_s) == ("engine 0", 5)
        return f"/scratch{folder}"

    async def main() -> None:
        async with EngineSession() as http:
            client = EngineClient("engine 0", "http://127.0.0.1:9", http.session, dialect=Told(), deliver=deliver)
            manifest = Manifest(1, "/run/v1", "", (), ())
            await client.stage(manifest, timeout_s=5)
            await client.switch(manifest, interrupt="keep", timeout_s=5)
            await client.stage(replace(manifest, broadcast="host:1"), timeout_s=5)
            await client.load_adapter("alice@1", "/run/alice", timeout_s=5)
            with pytest.raises(EngineError, match="could not be sent"):
                await client.load_adapter("alice@2", "/run/gone", timeout_s=5)

    asyncio.run(main())
    assert told == [("stage", "/scratch/run/v1"), ("switch", "/scratch/run/v1"), ("stage", "/run/v1"), ("alice@1", "/scratch/run/alice")]


@contextmanager
def answering(status: int, body: bytes, *, content_type: str = "text/html") -> Iterator[str]:
    """A server that is no engine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if content_type:
                self.send_header("Content-Type", content_type)
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(("status", "body", "reason"), [
    (200, b"<html>welcome</html>", "not JSON: <html>welcome"),
    (502, b"bad gateway", "with 502: bad gateway"),
    (500, json.dumps({"error": {"message": "out of memory"}}).encode(), "with 500: out of memory"),
    (500, json.dumps({"error": "plain"}).encode(), "with 500: plain"),
])
def test_answers_of_something_else_are_errors_of_the_engine(status: int, body: bytes, reason: str) -> None:
    async def ask(client: EngineClient) -> None:
        with pytest.raises(EngineError, match=reason):
            await client.health(timeout_s=60)

    with answering(status, body) as url:
        using(url, ask)


@pytest.mark.parametrize(("body", "reason"), [
    (b"{}", "without 'max_adapter_rank'"),
    (b"[]", "without 'max_adapter_rank'"),
    (b'{"max_adapter_rank": "?", "data": 3}', "in a form that cannot be read \\(TypeError: "),
])
def test_a_url_that_answers_json_and_is_no_engine_is_told_in_a_sentence(body: bytes, reason: str) -> None:
    async def ask(client: EngineClient) -> None:
        with pytest.raises(EngineError, match=rf"engine 0 \(http://.*\) answered check {reason}.*is it really an engine of kind"):
            await client.check(timeout_s=60)

    with answering(200, body, content_type="application/json") as url:
        using(url, ask)


@pytest.mark.parametrize(("body", "reason"), [
    (b"{}", r"engine 0 .* answered generate in a form that cannot be read \(ValidationError: .*`choices`.*is it really an engine"),
    (b"<html>" * 30_000, "answered /v1/completions with something that is not JSON"),
    (b'{"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [-1]}, "text": ""}]}', "answered generate without 'versions'"),
    (b'{"choices": [{"token_ids": [2147483648], "versions": [1], "logprobs": {"token_logprobs": [-1]}, "text": ""}]}', "OverflowError"),
])
def test_samples_that_cannot_be_read_are_errors_of_the_engine(body: bytes, reason: str) -> None:
    async def ask(client: EngineClient) -> None:
        with pytest.raises(EngineError, match=reason):
            await client.generate(PROMPT, Sampling(4), n=1, timeout_s=60)

    with answering(200, body, content_type="application/json") as url:
        using(url, ask)


def test_numbers_of_numpy_are_sent_and_what_cannot_be_is_no_mistake_of_the_engine() -> None:
    async def ask(client: EngineClient) -> None:
        sampling: Any = replace(Sampling(4), temperature=np.float64(0.5), top_k=np.int64(3), stop_token_ids=tuple(np.array([1, 2])))
        with pytest.raises(EngineError, match=r"answered generate in a form that cannot be read \(ValidationError"):  # it was sent
            await client.generate(PROMPT, sampling, n=1, timeout_s=60)
        with pytest.raises(RefusedError, match="a request for /v1/completions cannot be sent: object has no form in JSON"):
            await client.generate(PROMPT, replace(sampling, temperature=object()), n=1, timeout_s=60)

    with answering(200, b"{}", content_type="application/json") as url:
        using(url, ask)


@pytest.mark.parametrize("content_type", ["text/plain; charset=utf-8", ""])
def test_a_word_of_success_is_an_empty_answer(content_type: str) -> None:
    async def ask(client: EngineClient) -> None:
        assert await client.call("GET", "/") == {}

    with answering(200, b"Success: adapter 'alice@3' added", content_type=content_type) as url:
        using(url, ask)


