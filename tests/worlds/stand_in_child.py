"""Stands in for child processes: services on the run's own event loop, which answer one call after another, hang and die."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, get_type_hints

from offbeat import errors
from offbeat.aio import deadline
from offbeat.data import wire
from offbeat.data.reward import FailedReward
from offbeat.rollout.reward_worker import GroupRequest, RewardRequest, RewardsLoaded, ScoredCompletion, ScoredGroup

if TYPE_CHECKING:
    from worlds.life import Life

_REQUESTS: dict[Any, Any] = {}


class StandInReward:
    """Service of the reward process. The reward of a text is the same whenever it is asked for."""

    def __init__(self, life: "Life", _name: str) -> None:
        self._life = life

    async def load(self, _request: bytes) -> RewardsLoaded:
        return RewardsLoaded(of_group=False)

    async def score(self, request: RewardRequest) -> ScoredCompletion:
        await self._life.takes(0.1)
        return self._scored(request.completion)

    async def score_group(self, request: GroupRequest) -> ScoredGroup:
        await self._life.takes(0.1)
        return ScoredGroup(tuple(map(self._scored, request.completions)))

    def _scored(self, text: str) -> ScoredCompletion:
        if self._life.rng.random() < self._life.world.reward_fails:
            return ScoredCompletion(float("nan"), FailedReward("it failed").reason)
        return ScoredCompletion(float(sum(map(int, text)) % 2))


class StandInChild:
    """See `offbeat.process.child.Child`."""

    host = "127.0.0.1"
    disk = None
    pid = 1

    def __init__(self, life: "Life", name: str, service: Any) -> None:
        self.name = name
        self.service = service
        self.alive = True
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._life = life
        self._turn = asyncio.Lock()
        self._computed_s = 0.0
        self.calls: set[asyncio.Task[None]] = set()

    @property
    def cpu_s(self) -> float:
        """A process that hangs does not compute."""
        if not self._life.lasts_of(self.name):
            self._computed_s = self._life.loop.now_s
        return self._computed_s

    async def call(self, method: str, payload: Any = b"", *, timeout_s: float, patience_s: float | None = None) -> bytes:
        answer = self._send(method, payload)
        return await self._wait(answer, method, timeout_s, patience_s)

    async def call_each(self, method: str, payloads: Sequence[bytes], *, timeout_s: float) -> AsyncIterator[bytes]:
        for answer in [self._send(method, payload) for payload in payloads]:
            yield await self._wait(answer, method, timeout_s, None)

    async def stack(self) -> str:
        return f"stack of {self.name}"

    async def ended(self) -> None:
        await asyncio.wait([self.gone])

    async def stop(self, *, timeout_s: float) -> None:
        if self.alive and self._life.lasts_of(self.name):
            await asyncio.sleep(timeout_s)
        self.die()

    async def kill(self) -> None:
        self.die()

    def die(self) -> None:
        """End at once."""
        if self.alive:
            self.alive = False
            self.gone.set_result(None)
            for call in self.calls:
                call.cancel()

    def _send(self, method: str, payload: Any) -> "asyncio.Future[bytes]":
        if not self.alive:
            raise errors.DeathError(f"{self.name} (process 1) was killed by SIGKILL before {method}")
        data = payload if isinstance(payload, bytes) else b"".join(bytes(piece) for piece in payload)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        call = asyncio.create_task(self._serve(method, data, answer), name=f"{self.name} in {method}")
        self.calls.add(call)
        call.add_done_callback(self.calls.discard)
        return answer

    async def _wait(self, answer: "asyncio.Future[bytes]", method: str, timeout_s: float, patience_s: float | None) -> bytes:
        async with deadline(f"{method} on {self.name}", timeout_s):
            waited_s = 0.0
            while not answer.done() and not self.gone.done():
                await asyncio.wait((answer, self.gone), timeout=5.0, return_when=asyncio.FIRST_COMPLETED)
                waited_s = waited_s + 5.0 if self._life.lasts_of(self.name) else 0.0
                if patience_s is not None and waited_s > patience_s:
                    raise errors.StuckError(f"{self.name} has done nothing for {waited_s:.0f} s in {method}")
        if not answer.done():
            raise errors.DeathError(f"{self.name} (process 1) was killed by SIGKILL in {method}")
        return answer.result()

    async def _serve(self, method: str, data: bytes, answer: "asyncio.Future[bytes]") -> None:
        async with self._turn:
            try:
                await self._life.hung(self.name)
                function = getattr(self.service, method)
                reply = await function(_decode(type(self.service), method, data))
                await self._life.hung(self.name)
                if not answer.done():
                    answer.set_result(wire.encode(reply))
            except (errors.OffbeatError, OSError) as exc:
                if not answer.done():
                    told = exc if isinstance(exc, errors.OffbeatError) else errors.of_disk(exc) or errors.WorkerError(str(exc))
                    answer.set_exception(told)
                    answer.exception()


def _decode(kind: type, method: str, data: bytes) -> Any:
    key = kind, method
    if key not in _REQUESTS:
        function = getattr(kind, method)
        _, name = inspect.signature(function).parameters
        _REQUESTS[key] = get_type_hints(function)[name]
    return data if _REQUESTS[key] is bytes else wire.decode(_REQUESTS[key], data)
