"""`make faults`: every fault at every named sync point in every mode, and the table in docs/faults.md.

Results go to build/faults.jsonl, a line per row; a row that passed there is not done again, so the whole can be done in parts.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.drill import Chain, Outcome
from faults.points import KINDS, MODES, POINTS, Drill, all_drills
from faults.report import render
from faults.sections import other_sections
from small_run import build_small_model

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "faults.jsonl"
DOCUMENT = ROOT / "docs" / "faults.md"


def main() -> int:
    """Do what is not done yet, and write the table."""
    args = parse_arguments()
    drills = [
        drill for drill in all_drills()
        if drill.mode in args.modes and drill.kind in args.kinds and drill.point.name in args.points and drill.rank in args.ranks]
    if not args.again:
        passed = {drill_key(outcome) for outcome in read_results() if not outcome.problems}
        drills = [drill for drill in drills if drill.key not in passed]
    if not args.write_only:
        with tempfile.TemporaryDirectory(prefix="offbeat-faults-") as folder:
            run_all(drills, Path(folder))
    results = read_results()
    DOCUMENT.write_text("\n".join([render(results), other_sections(DOCUMENT.read_text(), MODES)]).rstrip() + "\n")
    failed = [outcome for outcome in results if outcome.problems]
    print(f"{len(results)} of {len(all_drills())} rows, {len(failed)} do not pass; {DOCUMENT.relative_to(ROOT)}")
    return 1 if failed or len(results) < len(all_drills()) else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--points", nargs="+", choices=[point.name for point in POINTS], default=[point.name for point in POINTS])
    parser.add_argument("--ranks", nargs="+", type=int, choices=[0, 1], default=[0, 1], help="which rank misbehaves")
    parser.add_argument("--again", action="store_true", help="do rows that passed before once more")
    parser.add_argument("--write-only", action="store_true", help="write the table from the results there are")
    return parser.parse_args()


def run_all(drills: Iterable[Drill], folder: Path) -> None:
    """Run the drills, a chain for each mode and way of drawing data."""
    model = build_small_model(folder / "model", seed=1)
    for (mode, heads), group in groupby(sorted(drills, key=_chain_of), key=_chain_of):
        root = folder / f"{mode}{'-heads' if heads else ''}"
        root.mkdir()
        chain = Chain(root, model, mode=mode, heads=heads)
        record(chain.go_on())
        try:
            for drill in group:
                start = time.monotonic()
                record(chain.strike(drill))
                outcome = chain.pending[-1]
                verdict = "; ".join(outcome.problems) or "ok"
                print(f"{drill.key}: {verdict} (named after {outcome.named_s} s, {time.monotonic() - start:.1f} s)", flush=True)
        finally:
            record(chain.go_on())


def _chain_of(drill: Drill) -> tuple[str, bool]:
    return drill.mode, drill.point.heads


def record(outcomes: Iterable[Outcome]) -> None:
    """Append to the results."""
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("ab") as file:
        for outcome in outcomes:
            file.write(msgspec.json.encode(outcome) + b"\n")


def read_results() -> list[Outcome]:
    """The newest outcome of each row, in the order of `all_drills`."""
    lines = RESULTS.read_bytes().splitlines() if RESULTS.exists() else []
    newest = {drill_key(outcome): outcome for outcome in (msgspec.json.decode(line, type=Outcome) for line in lines)}
    return [newest[drill.key] for drill in all_drills() if drill.key in newest]


def drill_key(outcome: Outcome) -> str:
    return f"{outcome.mode} rank {outcome.rank} {outcome.kind} {outcome.point}"


if __name__ == "__main__":
    sys.exit(main())
