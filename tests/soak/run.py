"""`make soak`: many tenants train, publish and sample for minutes while engines and adapters are hurt. See docs/soak.md.

The result goes to build/soak.json, to stdout as a line of JSON and a table, and to docs/soak.md. Exit 1 if anything is not as promised.
"""

import argparse
import asyncio
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from offbeat.config.root import Config
from offbeat.runs.adapters import open_adapters
from offbeat.telemetry.console import Console
from offbeat.telemetry.jsonl import read_json_lines
from offbeat.telemetry.record import RunRecord
from small_run import build_small_model, small_config
from soak.ledger import ADAPTER_FAULTS, ENGINE_FAULTS, Ledger
from soak.reference import Reference
from soak.report import document, table
from soak.saboteur import FaultInjector
from soak.work import GREEDY, PROMPT, Work

ROOT = Path(__file__).parents[2]
RUNS, RESULT, DOCUMENT = ROOT / "build" / "soak", ROOT / "build" / "soak.json", ROOT / "docs" / "soak.md"
HOURS = "\n## Hours beside other work\n"
"""Heading of what `hours.py` writes, which stays."""
SETTINGS = {
    "model__lora__rank": "4", "train__num_ranks": "2", "inference__probe_interval_s": "0.5", "inference__probe_timeout_s": "3",
    "inference__request_timeout_s": "20", "inference__heal_timeout_s": "60", "weights__stage_timeout_s": "20",
    "weights__keep": "3"}  # the version before the current one stays while the next is being published


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10); the faults under way are seen to their end")
    parser.add_argument("--tenants", type=int, default=16)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="of all choices (default: 0)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shutil.rmtree(RUNS, ignore_errors=True)
    console = Console("plain", stream=sys.stderr)
    result = asyncio.run(soak(
        RUNS, minutes=args.minutes, num_tenants=args.tenants, num_engines=args.engines, seed=args.seed, console=console))
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    _, heading, kept = DOCUMENT.read_text().partition(HOURS)
    DOCUMENT.write_text(document(result) + heading + kept)
    print(json.dumps(result))
    print(table(result))
    return 0 if result["passed"] else 1


async def soak(
    root: Path, *, minutes: float, num_tenants: int, num_engines: int, seed: int, console: Console,
    kinds: tuple[str, ...] = (*ENGINE_FAULTS, *ADAPTER_FAULTS),
) -> dict[str, Any]:
    """The result of one soak, whose files go below `root`."""
    model = build_small_model(root / "model", seed=seed)
    config = small_config(root, model, inference__num_engines=str(num_engines), **SETTINGS)
    ledger = Ledger()
    start = time.monotonic()
    await _work(config, ledger, model, seconds=60 * minutes, num_tenants=num_tenants, seed=seed, console=console, kinds=kinds)
    ledger.judge_faults(read_json_lines(config.run_dir / "events.jsonl"))
    return ledger.result(seconds=round(time.monotonic() - start, 1), tenants=num_tenants, engines=num_engines, seed=seed)


async def _work(
    config: Config, ledger: Ledger, model: str, *, seconds: float, num_tenants: int, seed: int, console: Console, kinds: tuple[str, ...],
) -> None:
    with RunRecord(config.run_dir, trace=False, console=console) as record:
        async with open_adapters(config, record) as adapters:
            eos = adapters.tokenizer.eos_token_id
            reference = Reference(model, prompt=PROMPT, length=GREEDY.max_new_tokens, eos_token_id=eos)
            work = Work(adapters, ledger, reference, seed=seed)
            saboteur = FaultInjector(adapters, work, ledger, kinds=kinds, seed=seed)
            await work.begin(num_tenants)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(work.run())
                await saboteur.run(until_s=time.monotonic() + seconds)
                work.over.set()
            await saboteur.see_all_back("the last fault")
            await work.check_all()


if __name__ == "__main__":
    sys.exit(main())
