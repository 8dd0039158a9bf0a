#!/usr/bin/env python3
"""Measures the structure and the prose of the sources, and fails where a figure has become worse than the one in `structure.json`.

    python tools/structure.py                  # the table; exit code 1 if a figure is beyond its ceiling
    python tools/structure.py --list MEASURE   # its cases
    python tools/structure.py --tighten        # store today's figures where they are not worse than the stored ones
    python tools/structure.py --allow MEASURE  # store today's figure of this measure, even if it is worse

`make check` runs it, in a few seconds. `source_figures.py` and `config_paths.py` say what each measure counts.
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import config_paths
import source_figures
from source_figures import Found, Modules, Spot, read_modules

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "offbeat"
CEILINGS = ROOT / "tools" / "structure.json"
_MOST_SHOWN = 10


@dataclass(frozen=True)
class Measure:
    """A row of the table.

    Attributes:
        name: what the options and `structure.json` call it.
        title: its words in the table.
        find: counts it.
        aim: the figure to reach; None where today's shall only not become worse.
        more_is_better: whether `ceiling` and `aim` bound it from below.
        digits: decimals; figures are compared as they are printed.
        keeps_names: whether `structure.json` has its cases, so that new ones can be told.
        bounded: whether it may not become worse; what grows with each feature is only shown.
    """

    name: str
    title: str
    find: Callable[[Modules], Found]
    aim: float | None = None
    more_is_better: bool = False
    digits: int = 0
    keeps_names: bool = True
    bounded: bool = True

    def is_worse(self, figure: float, than: float) -> bool:
        """Whether a figure is beyond another."""
        return figure < than if self.more_is_better else figure > than

    def ceiling(self, figure: float) -> float:
        """Return the figure to hold from now on; a share or rate that has reached its aim holds the aim, e.g. 2.0 where 3.8 was found."""
        if self.aim is None or not self.digits or self.is_worse(figure, self.aim):
            return figure
        return self.aim

    def show(self, figure: float) -> str:
        """Return a figure with its decimals."""
        return f"{figure:.{self.digits}f}"


MEASURES = (
    Measure("class-twins", "class names defined in two modules or more", source_figures.class_twins, 10),
    Measure("function-twins", "function names defined in 8 files or more", source_figures.function_twins, 20),
    Measure("file-twins", "file names that occur twice or more", source_figures.file_twins),
    Measure("callables", "parameters annotated as callables", source_figures.callables, 90),
    Measure("constructor-callables", "callables that one constructor takes, at most", source_figures.callables_of_constructor),
    Measure("parameters", "functions with more than 7 parameters", source_figures.many_parameters, 15),
    Measure("config-files", "files below run_training that hold the whole Config", config_paths.config_files, 20),
    Measure("config-climbs", "times that a lower module hands the whole Config up", config_paths.config_climbs, 5),
    Measure("name-tests", "tests for an objective, engine or training by name", source_figures.name_tests, 0),
    Measure("whats", '"what" in 1,000 words of prose', source_figures.whats, 2, digits=1, keeps_names=False),
    Measure("examples", "examples in 1,000 words of prose", source_figures.examples, 2, more_is_better=True, digits=1, keeps_names=False),
    Measure("shapes", "docstrings of functions of arrays that say a shape, %", source_figures.shapes, 80, more_is_better=True, digits=1),
    Measure("broad-handlers", "broad except that convert or swallow, % of all", source_figures.broad_handlers, 4, digits=1),
    Measure("lines", "source lines, in thousands", source_figures.source_lines, 69.5, digits=1, keeps_names=False, bounded=False),
    Measure("long-functions", "functions over 60 lines", source_figures.long_functions),
    Measure("long-files", "files over 400 lines", source_figures.long_files),
)


Ceilings = Mapping[str, dict[str, Any]]
"""Figures and names of cases by measure, as `structure.json` has them: `{"callables": {"figure": 1, "names": ["aio.py wait.on_end"]}}`."""


def main(argv: Sequence[str] | None = None, *, source: Path = SOURCE, ceilings: Path = CEILINGS) -> int:
    """Print the table and a sentence for each figure that is worse; returns the exit code."""
    by_name = {measure.name: measure for measure in MEASURES}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", choices=by_name, metavar="MEASURE", help=f"print the cases of a measure: {', '.join(by_name)}")
    parser.add_argument("--tighten", action="store_true", help="store today's figures where they are not worse")
    parser.add_argument(
        "--allow", action="append", choices=by_name, default=[], metavar="MEASURE", help="store today's figure of it, even if worse")
    args = parser.parse_args(argv)
    gc.disable()  # which halves the time of parsing
    modules = read_modules(source)
    if args.list:
        spots = by_name[args.list].find(modules).spots
        print("\n".join(f"{spot.where}  {spot.name}" for spot in spots))
        return 0
    found = {measure: _rounded(measure, measure.find(modules)) for measure in MEASURES}
    stored: Ceilings = json.loads(ceilings.read_text(encoding="utf-8")) if ceilings.exists() else {}
    if args.tighten or args.allow:
        stored = _tightened(found, stored, tightens=args.tighten, allowed=args.allow)
        ceilings.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    _print_table(found, stored)
    complaints = list(_complaints(found, stored))
    for each in complaints:
        print(each)
    return int(bool(complaints))


def _rounded(measure: Measure, found: Found) -> Found:
    return found._replace(figure=round(found.figure, measure.digits))


def _tightened(found: Mapping[Measure, Found], stored: Ceilings, *, tightens: bool, allowed: Sequence[str]) -> Ceilings:
    """Return the ceilings with today's figures: of the allowed measures, and of the others only where they are not worse."""
    new = {}
    for measure, (figure, spots) in found.items():
        if not measure.bounded:
            continue
        old = stored.get(measure.name)
        better = tightens and (old is None or not measure.is_worse(figure, old["figure"]))
        if better or measure.name in allowed:
            names = sorted({spot.name for spot in spots} if measure.keeps_names else ())
            new[measure.name] = {"figure": measure.ceiling(figure), "names": names}
        elif old is not None:
            new[measure.name] = old
    return new


def _print_table(found: Mapping[Measure, Found], stored: Ceilings) -> None:
    rows: list[tuple[str, ...]] = [("measure", "today", "ceiling", "aim")]
    for measure, (figure, _) in found.items():
        limits = [stored.get(measure.name, {}).get("figure"), measure.aim]
        bounds = ["-" if each is None else (">= " if measure.more_is_better else "") + measure.show(each) for each in limits]
        rows.append((f"{measure.name}: {measure.title}", measure.show(figure), *bounds))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *figures in rows:
        print(" | ".join([first.ljust(widths[0]), *(text.rjust(width) for text, width in zip(figures, widths[1:], strict=True))]))


def _complaints(found: Mapping[Measure, Found], stored: Ceilings) -> Iterator[str]:
    """Yield a sentence for each figure that is worse than its ceiling."""
    for measure, (figure, spots) in found.items():
        ceiling = stored.get(measure.name)
        if not measure.bounded:
            continue
        if ceiling is None:
            yield f"{measure.name}: structure.json has no figure; store today's: python tools/structure.py --tighten"
        elif measure.is_worse(figure, ceiling["figure"]):
            new = [spot for spot in spots if spot.name not in ceiling["names"]] if measure.keeps_names else []
            bound = "at least" if measure.more_is_better else "at most"
            yield (
                f"{measure.name}: {measure.title} must be {bound} {measure.show(ceiling['figure'])}, got {measure.show(figure)};"
                f" {_told(new)}`python tools/structure.py --list {measure.name}` lists all")


def _told(spots: Sequence[Spot]) -> str:
    """Return new cases in words; "" for none."""
    words = [spot.where if spot.name in spot.where else f"{spot.name} at {spot.where}" for spot in spots[:_MOST_SHOWN]]
    more = f", and {len(spots) - _MOST_SHOWN} more" if len(spots) > _MOST_SHOWN else ""
    return f"new are {', '.join(words)}{more}; " if words else ""


if __name__ == "__main__":
    sys.exit(main())
