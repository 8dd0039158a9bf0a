"""`make soak-hours`: the soak for six hours, in as many sittings as one likes. See docs/soak.md.

It runs in the background of other work: tenants pause longer than in `make soak`, a fault is planted every minute, and engines hold fewer
adapters than there are versions. Every minute is a line of benchmarks/soak_hours.jsonl. Ctrl-C, or SIGTERM, ends a sitting with its checks;
the next call begins another, until the hours are full. A sitting that is killed counts up to its last minute, without its faults.

When the hours are full, and with --write-docs at any time, the section of docs/soak.md and its charts are written. Exit 1 if anything is
not as promised or grows, 3 if hours are left.
"""

import argparse
import asyncio
import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from offbeat.runs.adapters import open_adapters
from offbeat.telemetry.console import Console
from offbeat.telemetry.jsonl import read_json_lines
from offbeat.telemetry.record import RunRecord
from small_run import build_small_model, small_config
from soak.hours_page import Sitting, growing, write_page
from soak.ledger import ADAPTER_FAULTS, COMPLAINTS, ENGINE_FAULTS, Fault, Ledger
from soak.reference import Reference
from soak.run import ROOT, SETTINGS
from soak.saboteur import FaultInjector
from soak.watch import Row, Watch
from soak.work import GREEDY, PROMPT, Work

ROWS, SITTINGS = ROOT / "benchmarks" / "soak_hours.jsonl", ROOT / "benchmarks" / "soak_sittings.jsonl"
RUNS = ROOT / "build" / "soak-hours"
PLACES = 6
"""Adapters that an engine holds; tenants sample from two versions each."""
PACE = 10.0
"""Pauses of tenants, as multiples of those of `make soak`."""
FAULT_PAUSE_S = 50.0
KEEP = 12
"""Versions of a tenant whose answers are known; older ones are gone from the engines."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=6.0, help="of all sittings together (default: 6)")
    parser.add_argument("--sitting-minutes", type=float, default=0.0, help="end this sitting after so long (default: with the hours)")
    parser.add_argument("--tenants", type=int, default=16)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--fresh", action="store_true", help="forget earlier sittings")
    parser.add_argument("--write-docs", action="store_true", help="write the page of the sittings so far, and run none")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.fresh:
        ROWS.unlink(missing_ok=True)
        SITTINGS.unlink(missing_ok=True)
    rows = _rows()
    left_s = 3600 * args.hours - sum(_lengths(rows))
    if left_s > 0 and not args.write_docs:
        number = 1 + max((row.sitting for row in rows), default=-1)
        seconds = min(left_s, 60 * args.sitting_minutes or left_s)
        _append(SITTINGS, asyncio.run(sit(number, seconds=seconds, num_tenants=args.tenants, num_engines=args.engines)))
        rows = _rows()
    sittings, done_s = [Sitting(**fields) for fields in read_json_lines(SITTINGS)], sum(_lengths(rows))
    if done_s >= 3600 * args.hours or args.write_docs:
        write_page(ROOT / "docs", rows, sittings)
    complaints = [text for sitting in sittings for text in sitting.complaints]
    grown = growing(rows)
    print(json.dumps({"hours": round(done_s / 3600, 2), "complaints": complaints, "growing": grown}))
    if complaints or grown or any(row.complaints for row in rows):
        return 1
    return 3 if done_s < 3600 * args.hours else 0


async def sit(number: int, *, seconds: float, num_tenants: int, num_engines: int) -> Sitting:
    """Let tenants work for so long, or until a signal; appends a row for each minute."""
    root = RUNS / f"sitting-{number}"
    shutil.rmtree(root, ignore_errors=True)
    model = build_small_model(root / "model", seed=number)
    config = small_config(root, model, inference__num_engines=str(num_engines), inference__max_adapters=str(PLACES), **SETTINGS)
    ledger, begun_s = Ledger(keep=KEEP), time.monotonic()
    with RunRecord(config.run_dir, trace=False, console=Console("plain", stream=sys.stderr)) as record:
        async with open_adapters(config, record) as adapters:
            reference = Reference(
                model, prompt=PROMPT, length=GREEDY.max_new_tokens, eos_token_id=adapters.tokenizer.eos_token_id)
            work = Work(adapters, ledger, reference, seed=number, pace=PACE)
            lasting = adapters.fleet.engines.workers[0].name
            saboteur = FaultInjector(
                adapters, work, ledger, kinds=(*ENGINE_FAULTS, *ADAPTER_FAULTS), seed=number, pause_s=FAULT_PAUSE_S, never_killed=lasting)
            for sign in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(sign, saboteur.stop.set)
            await work.begin(num_tenants)
            watch = Watch(adapters, ledger, folder=config.run_dir, sitting=number, lasting=lasting)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(work.run())
                watching = tasks.create_task(_watch(watch))
                tasks.create_task(_stop_at(saboteur.stop, seconds))
                await saboteur.run(until_s=begun_s + 2 * seconds)
                saboteur.stop.set()
                watching.cancel()
                work.over.set()
            await saboteur.see_all_back("the last fault")
            await work.check_all(everywhere=False)
    ledger.judge_faults(read_json_lines(config.run_dir / "events.jsonl"))
    shutil.rmtree(root)
    return Sitting(
        number, round(time.monotonic() - begun_s, 1), num_tenants, num_engines, PLACES, ledger.num_versions, ledger.num_tokens,
        ledger.num_idle, [text for name in COMPLAINTS for text in getattr(ledger, name)], _count(ledger.faults))


async def _watch(watch: Watch) -> None:
    with suppress(asyncio.CancelledError):
        while True:
            _append(ROWS, await watch.row())


async def _stop_at(stop: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()
    stop.set()


def _rows() -> list[Row]:
    return [Row(**fields) for fields in read_json_lines(ROWS)]


def _append(file: Path, row: Row | Sitting) -> None:
    with file.open("a") as out:
        out.write(json.dumps(asdict(row)) + "\n")


def _lengths(rows: Sequence[Row]) -> list[float]:
    """Seconds of each sitting."""
    return [max(row.at_s for row in rows if row.sitting == number) for number in {row.sitting for row in rows}]


def _count(faults: Sequence[Fault]) -> list[dict[str, float | str | None]]:
    kept = ("kind", "noticed_s", "healed_s")
    return [{name: value for name, value in asdict(fault).items() if name in kept} for fault in faults]


if __name__ == "__main__":
    sys.exit(main())
