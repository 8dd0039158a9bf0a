"""Results that a benchmark keeps: runs as lines of a JSON Lines file, and the table of a page in docs/ that is made from them."""

import json
import resource
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")


def cpu_seconds() -> float:
    """CPU time of all processes that have ended and were waited for, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def record(results: Path, run: "DataclassInstance") -> None:
    """Append a run to the results."""
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(run)) + "\n")


def read_results(results: Path, kind: type[R]) -> list[R]:
    """Return all runs of the results, in the order in which they were done; none if the file does not exist."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    fields: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [kind(**values) for values in fields]


def write_section(page: Path, text: str, *, begin: str, end: str) -> None:
    """Put text between two lines of a page, in the place of the text that is there; ends the program if the page lacks the first line."""
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    if not found:
        sys.exit(f"{page} has no line {begin.strip()}, after which the table is to stand")
    page.write_text(before + begin + text + end + rest.partition(end)[2], encoding="utf-8")
