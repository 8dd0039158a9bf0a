"""Plays environments of libraries that own their loop and the versions of their packages: under another Python, over a pipe.

The other end is a single file in `bridges`. Both write lines of JSON. The first line names the environment and its options. Each episode is
then a line such as {"id": 3, "row": ..., "base_url": ..., "api_key": ...}; the bridge answers in any order, by lines with the same "id",
the reward and metrics.

    BridgePlayer._read   consumes lines of the bridge; produces answers; woken by the bridge or its death
"""

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from offbeat.agents import bridges
from offbeat.agents.command import end_group, launcher
from offbeat.agents.environments.find import read_options
from offbeat.agents.pool import LostError
from offbeat.agents.task import AgentTask, Played, played
from offbeat.child_watch import log_tail
from offbeat.config.agent import AgentConfig
from offbeat.errors import CodeError, WorkerError, printable
from offbeat.rollout.clock import EpisodeClock, agent_clock
from offbeat.rollout.measures import numbers_of
from offbeat.user_code.places import Places, Waiting, on_the_clock
from offbeat.user_code.variables import environment_of_programs

_START_TIMEOUT_S = 300.0
"""Some libraries take tens of seconds to import."""

_LONGEST_LINE = 16 << 20


class BridgePlayer:
    """One process of a bridge, replaced when it dies. It plays as many episodes at a time as [agent] has places."""

    def __init__(self, config: AgentConfig, *, log_dir: Path | None) -> None:
        """Prepare the bridge to `agent.environment`, which is "LIBRARY:ENVIRONMENT", such as "verifiers:my_env"."""
        library, _, environment = config.environment.partition(":")
        self._file = Path(bridges.__file__).with_name(f"{library}_bridge.py")
        self._first = {
            "environment": environment, "options": read_options(config.options), "model": config.model, "max_turns": config.max_turns}
        self._name = config.environment
        self._python = config.python or sys.executable
        self._places = Places(config.processes * config.episodes_per_process)
        self._log = log_dir / "bridge.log" if log_dir is not None else None
        self._memory_bytes = config.memory_bytes
        self._environment = environment_of_programs(os.environ, allowed=config.env, host=config.reached_at)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._end()

    async def play(self, task: AgentTask, off_the_clock: Waiting = on_the_clock, clock: EpisodeClock | None = None) -> Played:
        """Play an episode; raises CodeError if the environment fails, LostError if the process ends, WorkerError if it does not restart."""
        async with self._places.taken(off_the_clock), clock or agent_clock(task.timeout_s):
            async with self._starting:
                if self._process is None or self._process.returncode is not None or self._reading is None or self._reading.done():
                    await self._start()
            number = next(self._numbers)
            row = {"prompt": task.row.prompt, "answer": task.row.answer, "solution": task.row.solution, **task.row.extra}
            answer = self._send(number, {
                "row": row, "seed": task.seed, "base_url": task.base_url, "api_key": task.api_key, "timeout_s": task.timeout_s})
            try:
                result = await answer
            except asyncio.CancelledError:
                self._write({"id": number, "cancel": True})
                raise
            finally:
                self._waiting.pop(number, None)
        if error := result.get("error"):
            raise CodeError(f"{self._name} failed: {printable(str(error))}")
        found = played(result.get("parts") or result.get("reward"), of=self._name)
        metrics = result.get("metrics")
        return replace(found, metrics=numbers_of(metrics)) if isinstance(metrics, Mapping) else found

    async def _start(self) -> None:
        await self._end()
        log = self._log.open("ab") if self._log is not None else subprocess.DEVNULL
        try:
            self._process = await asyncio.create_subprocess_exec(
                *launcher(self._memory_bytes), self._python, str(self._file), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env=self._environment, start_new_session=True, limit=_LONGEST_LINE)
        finally:
            if not isinstance(log, int):
                log.close()
        assert self._process.stdout is not None, "it is a pipe"
        self._reading = asyncio.create_task(self._read(self._process.stdout), name=f"read {self._name}")
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                ready = await self._send(0, self._first)
        except (TimeoutError, LostError) as exc:
            await self._end()
            error = WorkerError(f"the bridge to {self._name} under {self._python} did not start: {exc or 'it took too long'}")
            if tail := log_tail(self._log):
                error.add_note(f"last lines of {self._log}:\n{tail}")
            raise error from exc
        if why := ready.get("error"):
            await self._end()
            raise CodeError(f"agent.environment {self._name!r} cannot be loaded under {self._python}: {printable(str(why))}")

    async def _end(self) -> None:
        if self._process is not None:
            end_group(self._process.pid)
            await self._process.wait()
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)

    def _send(self, number: int, message: Mapping[str, Any]) -> "asyncio.Future[dict[str, Any]]":
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._write({"id": number, **message})
        return answer

    def _write(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None, "it has been started"
        with contextlib.suppress(ConnectionError, RuntimeError):  # the process is gone; `_read` fails the waiting episodes
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read(self, stream: asyncio.StreamReader) -> None:
        with contextlib.suppress(ValueError, ConnectionError):  # a line that is too long ends the bridge, too
            while line := await stream.readline():
                try:
                    message = json.loads(line)
                    answer = self._waiting.get(message["id"])
                except (ValueError, KeyError, TypeError):
                    continue  # output of the library
                if answer is not None and not answer.done():
                    answer.set_result(message)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(LostError(f"the bridge to {self._name} ended"))
                answer.exception()
