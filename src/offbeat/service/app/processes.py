"""Memory of the server's process and of its child processes, for the status page and metrics. Called on a thread."""

from collections.abc import Iterator

import psutil

from offbeat.service.types import ProcessStatus

_CHILD = "offbeat.process"


def processes() -> tuple[ProcessStatus, ...]:
    """Return this process, and each worker including its descendants; processes that end meanwhile are left out."""
    this = psutil.Process()
    return (ProcessStatus("service", _memory([this])), *_workers(this))


def _workers(this: psutil.Process) -> Iterator[ProcessStatus]:
    for child in sorted(this.children(), key=lambda child: child.pid):
        try:
            name = _name(child.cmdline())
            if name:
                yield ProcessStatus(name, _memory([child, *child.children(recursive=True)]))
        except psutil.Error:
            continue


def _name(command: list[str]) -> str:
    """Return a worker's name, such as "rank 0", from its command line; empty for helper processes such as a resource tracker."""
    return command[command.index(_CHILD) + 2] if _CHILD in command[:-2] else ""


def _memory(members: list[psutil.Process]) -> int:
    total = 0
    for member in members:
        try:
            total += member.memory_info().rss
        except psutil.Error:
            continue
    return total
