"""Each file of a run truncated, emptied, flipped in one bit or gone, before the run is resumed: a table in docs/faults.md.

`python tests/faults/damage.py` makes it, in some minutes. Every row is the real command on a copy of a small run with two checkpoints.
"""

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.sections import write_section
from faults.workshop import Done, Workshop, workshop
from offbeat.checkpoint.recover import CheckpointIndex
from small_run import SmallRun, build_small_model

STEPS = 3
"""Of the run that is damaged; it has checkpoints of the last two, and is resumed for one step more."""

Damage = Callable[[Path], None]


def truncate(path: Path) -> None:
    """Leave the first half."""
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    """Leave nothing."""
    os.truncate(path, 0)


def flip(path: Path) -> None:
    """Change one bit in the middle."""
    data = bytearray(path.read_bytes())
    if data:
        data[len(data) // 2] ^= 4
    path.write_bytes(data)


def scribble(path: Path) -> None:
    """Put 64 bytes that are no text, and a line of other JSON, into the middle."""
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(data[:middle] + bytes(range(192, 256)) + b'\n{"ph": "X", "global_step": "seven"}\n[1]\n' + data[middle:])


KINDS: dict[str, Damage] = {"truncated": truncate, "emptied": empty, "flipped": flip, "rubbish": scribble, "gone": os.unlink}


_OF_EVERY_RUN = ("held-out", "resumed", "continues with", "prompts are plain text")
"""Beginnings of what a run says whose files are whole."""


@dataclass(frozen=True)
class Row:
    """One row: what was done to the run, what its report and its resumption came to, and what is wrong with that."""

    what: str
    how: str
    report: Done
    done: Done
    went_on_from: int | None
    problems: tuple[str, ...]

    @property
    def outcome(self) -> str:
        """In words."""
        if self.done.code:
            return f"exit code {self.done.code}: {self.done.error.strip().removeprefix('offbeat: ')}"
        went_on = "starts over" if self.went_on_from is None else f"continues from step {self.went_on_from}"
        return "; ".join([went_on, *(line for line in self.done.said if not line.startswith(_OF_EVERY_RUN))])


class Bench:
    """A run of `STEPS` steps, copies of which are damaged."""

    def __init__(self, shop: Workshop, root: Path, model: str, *, keep: int = 2) -> None:
        self._shop = shop
        self._root = root
        self._settings = {"checkpoint__every_steps": "1", "checkpoint__keep": str(keep), "train__num_ranks": "2"}
        self._number = 0
        self.whole = SmallRun(root / "whole", model)
        self.whole.root.mkdir(parents=True)
        done = shop.train(self.whole, run__total_steps=str(STEPS), **self._settings)
        assert done.code == 0, done
        self.weights = {step: self._weights_of(step) for step in range(STEPS - keep + 1, STEPS + 1)}

    def files(self) -> list[str]:
        """Every file of the run, by its name in the run's folder."""
        paths = (path for path in self.whole.folder.rglob("*") if path.is_file() and path.parent.name != "logs")
        return sorted(str(path.relative_to(self.whole.folder)) for path in paths)

    def row(self, what: str, how: str, damage: Callable[[Path], None], *, newest: bool = False) -> Row:
        """Damage a copy of the run by `damage(folder)`, and see. `newest`: its newest checkpoint cannot be resumed from then."""
        run = self._copy()
        damage(run.folder)
        report = self._shop.command("report", str(run.folder))
        done = self._resume(run)
        events = run.events("resumed")
        step = events[-1]["global_step"] if done.code == 0 and events else None
        shutil.rmtree(run.root)
        return Row(what, how, report, done, step, tuple(self._problems(report, done, step, newest=newest)))

    def _problems(self, report: Done, done: Done, step: int | None, *, newest: bool) -> Iterator[str]:
        for name, each in (("report", report), ("resume", done)):
            if "unexpected" in each.error or each.error.count("\n") > 1:
                yield f"{name}: {each.error}"
            if each.code not in (0, 2):
                yield f"{name}: exit code {each.code}"
        if done.code == 0 and step is not None and done.first_weights != self.weights.get(step):
            yield f"went on from step {step} with other weights"
        if newest and step == STEPS:
            yield "went on from the damaged checkpoint"
        if newest and done.code == 0 and not any("continues from" in line or "starts over" in line for line in done.said):
            yield "did not say so"

    def _copy(self) -> SmallRun:
        self._number += 1
        run = SmallRun(self._root / str(self._number), self.whole.model)
        shutil.copytree(self.whole.root, run.root)
        return run

    def _resume(self, run: SmallRun) -> Done:
        return self._shop.train(run, run__total_steps=str(STEPS + 1), **self._settings)

    def _weights_of(self, step: int) -> str:
        """Fingerprint of the weights of a checkpoint: those that a run publishes first that has no newer one."""
        run = self._copy()
        for later in range(step + 1, STEPS + 1):
            shutil.rmtree(index_of(run.folder).folder(later))
        done = self._resume(run)
        assert done.code == 0 and done.first_weights, done
        shutil.rmtree(run.root)
        return done.first_weights


def index_of(folder: Path) -> CheckpointIndex:
    """The checkpoints of a run's folder."""
    return CheckpointIndex(folder / "checkpoints")


def on_file(name: str, damage: Damage) -> Callable[[Path], None]:
    """Damage of one file."""
    return lambda folder: damage(folder / name)


def older_ranks(folder: Path) -> None:
    """Put the ranks' files of the checkpoint before into the newest."""
    index = index_of(folder)
    shutil.rmtree(index.folder(STEPS) / "ranks")
    shutil.copytree(index.folder(STEPS - 1) / "ranks", index.folder(STEPS) / "ranks")


def empty_folder(folder: Path) -> None:
    """A checkpoint of a step that was never done, without a file."""
    index_of(folder).folder(99).mkdir()


def empty_marker(folder: Path) -> None:
    """A checkpoint of a step that was never done, with a marker that says nothing."""
    empty_folder(folder)
    (index_of(folder).folder(99) / "complete.json").touch()


def another_marker(folder: Path) -> None:
    """The newest checkpoint, copied to a step that was never done."""
    shutil.copytree(index_of(folder).folder(STEPS), index_of(folder).folder(99))


WHOLE_FOLDER: dict[str, Callable[[Path], None]] = {
    "its ranks' files are those of the checkpoint before": older_ranks,
    "an empty folder `step-00000099` beside it": empty_folder,
    "a `step-00000099` with an empty `complete.json` beside it": empty_marker,
    "a copy of it named `step-00000099` beside it": another_marker,
}


def rows(bench: Bench, alone: Bench) -> Iterator[Row]:
    """All rows. `alone` is a run with a single checkpoint."""
    newest = f"checkpoints/step-{STEPS:08d}/"
    for name in bench.files():
        for how, damage in KINDS.items():
            yield bench.row(f"`{name}`", how, on_file(name, damage), newest=name.startswith(newest))
    for how, change in WHOLE_FOLDER.items():
        yield bench.row("the newest checkpoint", how, change, newest=change is older_ranks)
    for name in alone.files():
        if name.startswith(newest):
            for how, damage in KINDS.items():
                yield alone.row(f"`{name}`, without an older checkpoint", how, on_file(name, damage), newest=True)


def render(found: list[Row]) -> str:
    """The section of docs/faults.md."""
    failed = [row for row in found if row.problems]
    lines = [
        "## Damaged files",
        "",
        f"A run of {STEPS} steps on two ranks, with checkpoints of the last two, is copied, and one file of the copy damaged:",
        "*truncated* to its first half, *emptied*, *flipped* in one bit in its middle, with *rubbish* in its middle (64 bytes that are no",
        "text, and lines that are no records), or *gone*. Then `offbeat report` is run on it, and `offbeat train` for one step more.",
        "`python tests/faults/damage.py` makes this table, each row with the real command on ranks and engines that are started once. A",
        "row passes when both end with exit code 0, or with 2 and one sentence; when the weights that the run publishes first are those",
        "of the step that it continues from, by their fingerprint; and when a damaged newest checkpoint is told and never resumed from.",
        "Files of `logs` are left out; nobody reads them.",
        "",
        f"{len(found) - len(failed)} of {len(found)} rows pass.",
        "",
    ]
    if failed:
        lines += ["Rows that do not pass:", "", *(f"- {row.what}, {row.how}: {'; '.join(row.problems)}" for row in failed), ""]
    lines += ["| what | damage | `offbeat report` | what the run does |", "|---|---|---|---|"]
    lines += [f"| {what} | {how} | {report} | {outcome} |" for what, how, report, outcome in _merged(found)]
    return "\n".join(lines) + "\n"


def _merged(found: list[Row]) -> list[tuple[str, str, str, str]]:
    """Rows as text; those of one file that came to the same are one."""
    merged: dict[tuple[str, str, str], list[str]] = {}
    for row in found:
        report = "written" if row.report.code == 0 else row.report.error.strip().removeprefix("offbeat: ")
        merged.setdefault((row.what, report, row.outcome), []).append(row.how)
    return [(what, ", ".join(hows), _cell(report), _cell(outcome)) for (what, report, outcome), hows in merged.items()]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def collect(root: Path) -> list[Row]:
    """All rows, as they come to be on the terminal."""
    model = build_small_model(root / "model", seed=1)
    found = []
    with workshop(root / "shop", model, num_ranks=2) as shop:
        for row in rows(Bench(shop, root / "two", model), Bench(shop, root / "one", model, keep=1)):
            print(f"{row.what}, {row.how}: {'; '.join(row.problems) or 'ok'}", flush=True)
            found.append(row)
    return [_without_paths(row, root) for row in found]


def _without_paths(row: Row, root: Path) -> Row:
    """Names of folders that were made for this say nothing."""
    def clean(text: str) -> str:
        return re.sub(rf"{re.escape(str(root))}/(two|one)/\w+", "runs", text)

    def cleaned(done: Done) -> Done:
        return Done(done.code, clean(done.error), tuple(map(clean, done.said)), done.first_weights)

    return Row(row.what, row.how, cleaned(row.report), cleaned(row.done), row.went_on_from, row.problems)


def main() -> int:
    """Make the table."""
    with tempfile.TemporaryDirectory(prefix="offbeat-damage-") as folder:
        found = collect(Path(folder))
    write_section("damaged files", render(found))
    return 1 if any(row.problems for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
