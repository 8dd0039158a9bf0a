"""An engine in memory, and the network in front of it. Its tokens say which weights it really had when it sampled them.

A token at an even position of its sample is `version_token` of the version, one at an odd position `weights_token` of the weights'
fingerprint, so that a wrong stamp and a version of the right number with other weights both show in training. Answers are those of the
embedded engine. An engine by URL asks the real `Owners` whether a run may use it, and is there before and after the run.
"""

import asyncio
import hashlib
import json
import random
from array import array
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import aiohttp
import msgspec

from offbeat.engine.inside import owners
from offbeat.engine.options import EngineAddress, EngineStart
from offbeat.weights.adapters import split_adapter_name
from offbeat.workers.worker import Nothing
from worlds.drawn import url_of

if TYPE_CHECKING:
    from worlds.life import Life

T = TypeVar("T")

WEIGHTS = "weights.json"
"""File of a published version: the fingerprint of its weights."""

_FIRST, _NUM = 5, 45


def version_token(version: int) -> int:
    """Return the token that a version is written as."""
    return _FIRST + version % _NUM


def weights_token(fingerprint: str) -> int:
    """Return the token that a fingerprint is written as."""
    return _FIRST + int(fingerprint[:8] or "0", 16) % _NUM


class _RefusedError(Exception):
    """A request that the engine answers with an error."""

    def __init__(self, status: int, text: str) -> None:
        self.status, self.text = status, text


@dataclass
class _Running:
    """A request for samples.

    Attributes:
        prompt: without the tokens that the only sample has from before, which are `num_begun`.
        tokens, versions: what was generated of each.
        num_told: tokens of all that the run was told of.
    """

    prompt: str
    num_begun: int
    tokens: list[list[int]]
    versions: list[list[int]]
    num_told: int = 0


class StandInEngine:
    """Service of an engine's process, and the server in it."""

    def __init__(self, life: "Life", name: str) -> None:
        self._life = life
        self.name = name
        self._weights = (-1, "")
        self._staged: dict[int, tuple[int, str]] = {}
        self._adapters: dict[str, tuple[str, str]] = {}
        self._running: dict[str, _Running] = {}
        self._owners = owners.Owners()
        self._awake = asyncio.Event()
        self._awake.set()

    # -- by URL --------------------------------------------------------------------------------------------------------------------------

    def check_owner(self, headers: Mapping[str, str]) -> None:
        """Refuse a run that may not use this engine.

        Raises:
            _RefusedError: it may not.
        """
        header = next((value for name, value in headers.items() if name.lower() == owners.HEADER), "")
        if foreign := self._owners.refusal(header, now_s=self._life.loop.now_s):
            raise _RefusedError(409, foreign)

    def publish_from_outside(self, header: str) -> None:
        """Take other weights under the same version from somebody with this header, if the owner lets them."""
        refused = self._owners.refusal(header, now_s=self._life.loop.now_s)
        self._life.note(foreign=self.name, refused=refused)
        if not refused:
            foreign = digest("somebody else's")
            self._weights = self._weights[0], foreign
            self._adapters = {name: (foreign, folder) for name, (_, folder) in self._adapters.items()}

    def state(self) -> dict[str, Any]:
        """Return what it holds between two starts of the run, as JSON."""
        now_s = self._life.loop.now_s
        users = {run: [user.start, user.exclusive, now_s - user.seen_s] for run, user in self._owners._users.items()}
        return {"weights": self._weights, "staged": list(self._staged.values()), "adapters": self._adapters, "users": users}

    def restore(self, state: Mapping[str, Any], after_s: float) -> None:
        """Hold a `state` of this many seconds ago."""
        self._weights = tuple(state["weights"])
        self._staged = {version: (version, fingerprint) for version, fingerprint in state["staged"]}
        self._adapters = {name: tuple(held) for name, held in state["adapters"].items()}
        self._owners._users = {
            run: owners._User(start, exclusive, -silent_s - after_s) for run, (start, exclusive, silent_s) in state["users"].items()}

    # -- the server ----------------------------------------------------------------------------------------------------------------------

    async def start(self, request: EngineStart) -> EngineAddress:
        """Serve."""
        del request
        await self._life.takes(self._life.world.start_s)
        return EngineAddress(self._life.network.listen(self))

    async def ping(self, _request: Nothing) -> Nothing:
        """Answer."""
        return Nothing()

    async def answer(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request as JSON.

        Raises:
            _RefusedError: it is refused.
        """
        match path:
            case "/health":
                return {"version": self._weights[0], "max_adapter_rank": 64}
            case "/v1/completions":
                return await self._complete(body)
            case "/v1/running":
                return self._tell_running(body["requests"])
            case "/v1/weights/stage":
                await self._life.takes(self._life.world.stage_s)
                self._staged[body["version"]] = body["version"], _read(body["folder"])
            case "/v1/weights/switch":
                await self._life.takes(0.1)
                if body["version"] not in self._staged and body["version"] != self._weights[0]:
                    raise _RefusedError(400, f"version {body['version']} is not staged")
                version, fingerprint = self._staged.get(body["version"], self._weights)
                self._weights, self._staged = (version, self._weights[1] if self._lies else fingerprint), {}
                self._awake.set()
            case "/v1/weights/prove":
                return await self._prove(body)
            case "/v1/weights/sleep":
                self._awake.clear()
            case "/v1/weights/wake":
                self._awake.set()
            case "/v1/load_lora_adapter":
                await self._life.takes(self._life.world.stage_s)
                fingerprint, before = _read(body["lora_path"]), [each for each, _ in self._adapters.values()]
                self._adapters[body["lora_name"]] = before[-1] if before and self._lies else fingerprint, body["lora_path"]
            case "/v1/unload_lora_adapter":
                self._adapters.pop(body["lora_name"], None)
            case "/v1/models":
                adapters = [{"id": name, "root": folder, "parent": "base"} for name, (_, folder) in self._adapters.items()]
                return {"data": [{"id": "model", "root": "model"}, *adapters]}
            case "/resume":
                pass
            case _:
                raise _RefusedError(404, f"there is no {path}")
        return {"done": True}

    @property
    def _lies(self) -> bool:
        return self._life.lasts("engine_lies", int(self.name.rpartition(" ")[2]))

    def _tell_running(self, requests: Mapping[str, list[int]]) -> dict[str, Any]:
        if self._life.world.keeps_running:
            for name in requests.keys() & self._running.keys():
                request = self._running[name]
                if request.num_told == (num_told := sum(map(len, request.tokens))):
                    continue
                request.num_told = num_told
                self._life.note(told=name, prompt=request.prompt, num_begun=request.num_begun, versions=request.versions)
        return {"requests": {name: [{
            "first": first, "token_ids": _packed(tokens[first:], "i"), "logprobs": _packed([-1.0] * len(tokens[first:]), "f"),
            "versions": _packed(versions[first:], "i")}
            for first, tokens, versions in zip(have, self._running[name].tokens, self._running[name].versions, strict=True)]
            for name, have in requests.items() if name in self._running}}

    async def _complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        world, rng = self._life.world, self._life.rng
        adapter = body.get("model", "")
        if adapter and adapter not in self._adapters:
            raise _RefusedError(404, f"there is no adapter {adapter}")
        # The lengths and texts are the request's alone, as where sampling is seeded.
        own = random.Random(json.dumps([body["prompt"], body.get("seed", 0)]))
        most = body["max_tokens"]
        lengths = [own.randint(1, most) if most else 0 for _ in range(body["n"])]  # none: the sample that goes on has its end
        token_s = world.token_s * (10 if rng.random() < world.straggler else 1)
        tokens: list[list[int]] = [[] for _ in lengths]
        versions: list[list[int]] = [[] for _ in lengths]
        begun = body.get("begun_tokens", 0)
        if name := body.get("request_id"):
            prompt = " ".join(map(str, body["prompt"][: len(body["prompt"]) - begun]))
            self._running[name] = _Running(prompt, begun, tokens, versions)
            if world.keeps_running:
                self._life.note(
                    asked=name, begun=[begun] * len(lengths), prompt=prompt, engine=self.name,
                    version=split_adapter_name(adapter)[1] if adapter else self._weights[0])
        for at in range(max(lengths)):
            await self._awake.wait()
            await self._life.takes(token_s)
            await self._awake.wait()
            version, fingerprint = self._weights
            if adapter:
                version = split_adapter_name(adapter)[1]
                fingerprint = self._adapters[adapter][0] if adapter in self._adapters else fingerprint
            for index, length in enumerate(lengths):
                if at < length:
                    tokens[index].append(weights_token(fingerprint) if (begun + at) % 2 else version_token(version))
                    versions[index].append(version)
        if name and world.keeps_running:
            self._life.note(answered=name)
        return {"choices": [
            {"token_ids": tokens[index], "logprobs": {"token_logprobs": [-1.0] * length}, "versions": versions[index],
             "text": f"{own.randrange(10**6)}", "finish_reason": "length" if length == most else "stop"}
            for index, length in enumerate(lengths)]}

    async def _prove(self, body: Mapping[str, Any]) -> dict[str, Any]:
        await self._life.takes(self._life.world.prove_s)
        version, fingerprint = self._weights
        if adapter := body.get("adapter"):
            if adapter not in self._adapters:
                raise _RefusedError(404, f"there is no adapter {adapter}")
            fingerprint = self._adapters[adapter][0]
        elif self._life.world.keeps_running:
            self._life.note(proven=version, engine=self.name)
        return {"version": version, "fingerprint": fingerprint, "logprobs": [-1.0] * (len(body["tokens"]) - 1)}


def _packed(values: list[Any], kind: str) -> bytes:
    return array(kind, values).tobytes()


def _read(folder: str) -> str:
    try:
        return json.loads((Path(folder) / WEIGHTS).read_text())["fingerprint"]
    except (OSError, ValueError) as exc:
        raise _RefusedError(400, f"{folder} cannot be loaded: {exc}") from exc


class Network:
    """Carries requests to the engines by their URLs, and loses, delays or doubles them while a fault says so."""

    def __init__(self, life: "Life") -> None:
        self._life = life
        self._servers: dict[str, StandInEngine] = {}
        self._late: set[asyncio.Task[Any]] = set()

    def listen(self, engine: StandInEngine, number: int | None = None) -> str:
        """Return the URL of an engine's server: a new one, or the one of that number, whose former engine has ended."""
        url = url_of(len(self._servers) if number is None else number)
        self._servers[url] = engine
        return url

    async def carry(self, url: str, data: bytes | None, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Return status and body of the answer to a request.

        Raises:
            aiohttp.ClientError: no answer comes.
        """
        host, path = url[: url.index("/", 8)], url[url.index("/", 8):]
        engine, life = self._servers[host], self._life
        child = life.process_of(engine)
        number = int(engine.name.rpartition(" ")[2])
        await life.takes(0.002)
        if life.lasts("partition", number):
            if life.rng.random() < 0.5:
                await asyncio.sleep(life.left_s("partition", number))
            raise aiohttp.ClientConnectionError("no route to host")
        if child is None:
            raise aiohttp.ClientConnectionError("connection refused")
        if life.lasts("lost") and life.rng.random() < 0.2:
            raise aiohttp.ServerDisconnectedError
        body = msgspec.json.decode(data) if data else {}
        changes = path not in ("/health", "/v1/completions", "/v1/running", "/v1/weights/prove", "/v1/models")
        asking = asyncio.ensure_future(self._ask(engine, path, body, headers, life.world.goes_on and changes))
        if changes and life.lasts("twice"):
            self._keep(asyncio.create_task(self._again(engine, path, body, headers)))
        self._keep(asking)
        try:
            await asyncio.wait((asking, child.gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            answered = asking.done()
            asking.cancel()
        if not answered:
            raise aiohttp.ServerDisconnectedError
        if life.lasts("lost") and life.rng.random() < 0.2:
            raise aiohttp.ServerDisconnectedError
        return asking.result()

    async def _ask(
        self, engine: StandInEngine, path: str, body: Mapping[str, Any], headers: Mapping[str, str], goes_on: bool,
    ) -> tuple[int, bytes]:
        if not goes_on:
            return await self._answer(engine, path, body, headers)
        task = asyncio.create_task(self._answer(engine, path, body, headers))
        self._keep(task)
        return await asyncio.shield(task)

    async def _answer(
        self, engine: StandInEngine, path: str, body: Mapping[str, Any], headers: Mapping[str, str],
    ) -> tuple[int, bytes]:
        await self._life.hung(engine.name)
        try:
            engine.check_owner(headers)
            return 200, msgspec.json.encode(await engine.answer(path, body))
        except _RefusedError as exc:
            return exc.status, msgspec.json.encode({"error": {"message": exc.text}})

    async def _again(self, engine: StandInEngine, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        await asyncio.sleep(self._life.rng.choice([0.05, 1, 20]) * self._life.rng.random())
        await self._answer(engine, path, body, headers)

    async def kept(self, carrying: Coroutine[Any, Any, T]) -> T:
        """Carry a request of another process than that of the loop."""
        task = asyncio.current_task()
        assert task is not None, "runs inside a task"
        self._keep(task)
        return await carrying

    def _keep(self, task: "asyncio.Task[Any]") -> None:
        """Let a task of another machine go on beside the run."""
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    @property
    def own_tasks(self) -> set["asyncio.Task[Any]"]:
        """Tasks of engines, not of the run."""
        return set(self._late)


class StandInSession:
    """Stands in for `aiohttp.ClientSession`."""

    def __init__(self, network: Network, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop` is that of the engines, if it may be another one than that of the caller."""
        self._network = network
        self._loop = loop

    def request(self, _method: str, url: str, *, data: bytes | None, headers: Mapping[str, str]) -> "_Exchange":
        """Return the exchange, to be entered."""
        return _Exchange(self._network, url, data, headers, self._loop)

    async def close(self) -> None:
        """Do nothing."""


class _Exchange:
    headers = {"Content-Type": "application/json"}  # noqa: RUF012

    def __init__(
        self, network: Network, url: str, data: bytes | None, sent: Mapping[str, str], loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        self._network, self._url, self._data, self._sent, self._loop = network, url, data, sent, loop
        self.status = 0

    async def __aenter__(self) -> Self:
        if self._loop is not None and self._loop.is_closed():  # that of rank 0, which has ended
            raise aiohttp.ClientConnectionError("connection refused")
        carrying = self._network.carry(self._url, self._data, self._sent)
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            carrying = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._network.kept(carrying), self._loop))
        self.status, self._answer = await carrying
        return self

    async def __aexit__(self, *_exc: object) -> None:
        pass

    async def read(self) -> bytes:
        return self._answer


def digest(*parts: object) -> str:
    """Return a fingerprint of values."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()
