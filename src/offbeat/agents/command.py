"""Runs agents that are commands: one process group for each episode, ended together with the episode."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Self

from offbeat.agents import launch
from offbeat.agents.task import AgentTask, Played, printed
from offbeat.errors import CodeError, printable
from offbeat.hosts import LOOPBACK
from offbeat.rollout.clock import EpisodeClock, agent_clock
from offbeat.user_code.places import Places, Waiting, on_the_clock
from offbeat.user_code.variables import environment_of_programs

_KEPT_BYTES = 64 << 10
"""Bytes kept of the end of an episode's output."""

_LOG_BYTES = 8 << 20
_LAST_WORDS_S = 1.0


class CommandPlayer:
    """Runs one command for each episode, at most `num_episodes` at a time."""

    def __init__(
        self, command: Sequence[str], *, num_episodes: int, log_dir: Path | None, memory_bytes: int = 0, allowed: Collection[str] = (),
        host: str = LOOPBACK,
    ) -> None:
        """Prepare to run a command.

        Args:
            log_dir: folder of agent.log, which gets the end of each episode's output; old output is dropped.
            memory_bytes: memory limit of each process; 0 for none.
            allowed: environment variables that it sees although they look like secrets.
            host: name or address under which it reaches the proxy.
        """
        self._command = list(command)
        self._places = Places(num_episodes)
        self._memory_bytes = memory_bytes
        self._environment = environment_of_programs(os.environ, allowed=allowed, host=host)
        self._log = logging.Logger("agents")
        if log_dir is not None:
            self._log.addHandler(RotatingFileHandler(log_dir / "agent.log", maxBytes=_LOG_BYTES, backupCount=1, delay=True))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for handler in self._log.handlers:
            handler.close()

    async def play(self, task: AgentTask, off_the_clock: Waiting = on_the_clock, clock: EpisodeClock | None = None) -> Played:
        """Run the command to its end; raises CodeError, which quotes the end of its output, if it ended with an error."""
        with tempfile.TemporaryDirectory(prefix="offbeat-row-", ignore_cleanup_errors=True) as folder:
            file = Path(folder) / "row.json"
            async with self._places.taken(off_the_clock), clock or agent_clock(task.timeout_s):
                await asyncio.to_thread(file.write_text, task.row_text(), encoding="utf-8")
                environment = self._environment | task.environment() | {"OFFBEAT_ROW_FILE": str(file)}
                code, output, errors = await run(self._command, environment, memory_bytes=self._memory_bytes, log=self._log)
        name = Path(self._command[0]).name
        if code:
            said = printable((errors or output).strip()[-300:], most=300)
            raise CodeError(f"the command {name} of agent.command ended with code {code}: {said or 'it wrote nothing'}")
        return printed(output, of=f"the command {name}")


async def run(command: Sequence[str], environment: Mapping[str, str], *, memory_bytes: int, log: logging.Logger) -> tuple[int, str, str]:
    """Run a command in a process group of its own; returns its exit code and the ends of its stdout and stderr, such as (0, "0.5", "")."""
    # Pipes of our own: with asyncio's, the end of a process is not seen as long as a process that it started holds one.
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *launcher(memory_bytes), *command, stdin=subprocess.DEVNULL, stdout=out_end, stderr=err_end, env=environment,
            start_new_session=True)
    except BaseException:
        os.close(out)
        os.close(err)
        raise
    finally:
        os.close(out_end)
        os.close(err_end)
    kept: list[deque[bytes]] = [deque(), deque()]
    reading = [asyncio.create_task(_keep_end(pipe, end)) for pipe, end in zip((out, err), kept, strict=True)]
    code: int | None = None
    try:
        code = await process.wait()
    finally:
        end_group(process.pid)  # also processes that it left running, which may hold its pipes
        await asyncio.shield(process.wait())
        await asyncio.wait(reading, timeout=_LAST_WORDS_S)  # a process that has left the group may hold them for ever
        for each in reading:
            each.cancel()
        output, errors = (b"".join(end)[-_KEPT_BYTES:].decode(errors="replace") for end in kept)
        log.info("-- %s\n%s%s", "gave up" if code is None else f"ended with code {code}", output, errors)
    assert code is not None, "it has ended"
    return code, output, errors


def launcher(memory_bytes: int, python: str = sys.executable) -> list[str]:
    """Return the words to put before a command, so that it ends with this process and has a memory limit."""
    return [python, "-S", "-E", launch.__file__, str(os.getpid()), str(memory_bytes)]


def end_group(pid: int) -> None:
    """Kill a process group at once."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


async def _keep_end(pipe: int, end: deque[bytes]) -> None:
    stream, num_bytes = asyncio.StreamReader(), 0
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(pipe, "rb", 0))
    try:
        while data := await stream.read(1 << 16):
            end.append(data)
            num_bytes += len(data)
            while num_bytes - len(end[0]) >= _KEPT_BYTES:
                num_bytes -= len(end.popleft())
    finally:
        transport.close()
