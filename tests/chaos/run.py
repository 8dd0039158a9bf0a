"""`make chaos`: small runs are killed 200 times, and every group and token is accounted for against their journals.

Kills go to build/chaos.jsonl, a line each; those that are there are not done again, so the whole can be done in parts. It writes
docs/chaos.md. The folder of a run that is not as promised is kept in build/chaos. With `--again` such runs are done again, after a mend;
their rows go to build/chaos-before.jsonl, and the page names them.
"""

import argparse
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.kills import MODES, Life, build_model, draw, num_rows, parts, tokens_of_group
from chaos.ledger import Ledger
from chaos.report import document
from chaos.tokens import count
from offbeat.checkpoint.recover import CheckpointIndex
from offbeat.telemetry.jsonl import read_json_lines
from small_run import SmallRun, offbeat

ROOT = Path(__file__).parents[2]
RESULTS, BEFORE = ROOT / "build" / "chaos.jsonl", ROOT / "build" / "chaos-before.jsonl"
FAILED, DOCUMENT = ROOT / "build" / "chaos", ROOT / "docs" / "chaos.md"
_SHARES = {"local": 60, "lora": 30, "spmd": 30, "spmd, all draw": 20, "agents": 50, "ray": 10}
"""Kills in each mode, of 200."""
_CHAIN = 10
"""Kills of one run folder; its end and its replay take as long as some kills."""
_STOPPED, _TORCHRUN = (0, 130), (0, 1, 130, 143, -15)
"""Exit codes of a command that was asked to stop before its last step, and of `torchrun`."""
_REPLAY_S = 900.0
_MOST_ENDED = 3
_CLEANING_S = 5.0
_LIFE = 5
"""Most kills of one command."""
_recording = threading.Lock()


@dataclass(frozen=True)
class Row:
    """A kill, and what came of it.

    Attributes:
        chain: number of the run among those of its mode.
        wanted, was: the moment that was waited for, and the one that was met.
        steps: steps done afterwards, in all.
        counts: what was not as promised, by kind: "lost", "doubled", "tokens", "versions", "processes", "files", "other".
        num_tokens, num_again: tokens that engines have generated for training since the kill before, and how many of them they had
            generated before, or for groups that failed and were drawn again.
        num_replayed, num_gone_on: of a run, at its last kill: steps that were trained again and came out equal, and tokens of unfinished
            samples that went on after a kill.
        sitting: the one in which it was done, as seconds since 1970, and how long that had lasted, in seconds.
    """

    seed: int
    chain: int
    mode: str
    victims: tuple[str, ...]
    wanted: str
    was: str
    names: tuple[str, ...]
    went_on: bool
    exit_code: int | None
    steps: int
    counts: dict[str, int]
    problems: tuple[str, ...]
    num_tokens: int
    num_again: int
    wall_s: float
    num_replayed: int = 0
    num_gone_on: int = 0
    sitting: tuple[float, float] = (0.0, 0.0)


def main() -> int:
    """Kill as often as is left, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="in all (default: 200)")
    parser.add_argument("--seed", type=int, default=None, help="of all choices (default: drawn, and printed)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side (default: 2); each takes up to 3 GB")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no further run after this time; 0 for no end")
    parser.add_argument("--again", action="store_true", help="do runs again that were not as promised, after a mend")
    parser.add_argument("--write-only", action="store_true", help="write the page from the results there are")
    args = parser.parse_args()
    if args.again:
        set_aside()
    rows = read_rows() or read_rows(BEFORE)
    seed = args.seed if args.seed is not None else rows[0].seed if rows else random.SystemRandom().randrange(10**6)
    print(f"seed {seed}", flush=True)
    if not args.write_only:
        kill_all(
            plan(args.kills, args.modes), seed, jobs=args.jobs,
            end_s=time.monotonic() + 60 * args.minutes if args.minutes else float("inf"))
    rows = read_rows()
    DOCUMENT.write_text(document(rows, wanted=args.kills, before=read_rows(BEFORE)))
    failed = [row for row in rows if row.problems]
    print(f"{len(rows)} of {args.kills} kills, {len(failed)} not as promised; {DOCUMENT.relative_to(ROOT)}")
    return 1 if failed or len(rows) < args.kills else 0


def plan(kills: int, modes: list[str]) -> list[tuple[str, int, int]]:
    """Return the chains to do, each with its mode, its number in it and its number of kills, the modes in turn."""
    total = sum(_SHARES[mode] for mode in modes)
    left = {mode: round(kills * _SHARES[mode] / total) for mode in modes}
    left[modes[0]] += kills - sum(left.values())
    chains, number = [], 0
    while any(left.values()):
        for mode in modes:
            if num := min(left[mode], _CHAIN):
                chains.append((mode, number, num))
                left[mode] -= num
        number += 1
    return chains


def kill_all(chains: list[tuple[str, int, int]], seed: int, *, jobs: int, end_s: float) -> None:
    """Do the chains, or what is left of them, so many side by side."""
    done = Counter((row.mode, row.chain) for row in read_rows())
    with tempfile.TemporaryDirectory(prefix="offbeat-chaos-") as folder, ThreadPoolExecutor(jobs) as pool:
        model = build_model(Path(folder) / "model")

        def do(mode: str, number: int, left: int) -> None:
            if time.monotonic() > end_s:
                return
            root = Path(folder) / f"{mode} {number}"
            root.mkdir()
            rows = kill_one(root, model, mode=mode, number=number, num=left, seed=seed)
            if any(row.problems for row in rows):
                shutil.copytree(root, FAILED / f"{root.name} {int(time.time())}")
            shutil.rmtree(root, ignore_errors=True)

        doing = [
            pool.submit(do, mode, number, left) for mode, number, num in chains if (left := num - done[mode, number]) > 0]
        for each in doing:
            each.result()


def kill_one(
    root: Path, model: str, *, mode: str, number: int, num: int, seed: int, results: Path = RESULTS,
) -> list[Row]:
    """Kill one run so many times, and let it come to its end; returns the kills, which are recorded."""
    chance, eta = random.Random(f"{seed} {mode} {number} {num}"), (number + 1) % 3
    settings = {"run.seed": str(number), "rollout.max_head_offpolicyness": str(eta)}
    run, shared = SmallRun(root, model), set(Path("/dev/shm").iterdir())
    ledger = Ledger(run.folder, eta, heads=2 if mode == "spmd, all draw" else 1)
    rows: list[Row] = []
    life: Life | None = None
    of_life = num_ended = 0
    tokens = (0, 0)
    while len(rows) < num:
        start_s = time.monotonic()
        if life is None or not life.alive:
            life, of_life = Life(run, mode, **{"run.total_steps": "1000000"} | settings), 0
        kill = draw(chance, mode, first=of_life == 0)
        struck, of_life = life.strike(kill), of_life + 1
        if not struck.names:  # it had ended by itself, as on an overloaded machine
            print(f"{mode}: the command ended before the kill: {life.said}", flush=True)
            num_ended += 1
            if num_ended > _MOST_ENDED:
                raise RuntimeError(f"{num_ended} commands ended by themselves; the last said: {life.said}")
            ledger.audit()
            continue
        if life.alive and (of_life == _LIFE or len(rows) == num - 1):
            life.end_now()
        before = Counter(ledger.counts), len(ledger.problems)
        if not life.alive:
            ledger.audit()
        problems = (*struck.problems, *ledger.problems[before[1]:])
        counts = dict(ledger.counts - before[0])
        for text in struck.problems:
            counts["processes" if text.startswith("left") else "other"] = 1
        before_tokens, tokens = tokens, tokens_of(run, mode)
        rows.append(Row(
            seed, number, mode, kill.victims, kill.moment, struck.was, struck.names, struck.went_on, struck.exit_code,
            max(num_rows(run.folder) - 1, 0), counts, problems, tokens[0] - before_tokens[0], tokens[1] - before_tokens[1],
            round(time.monotonic() - start_s, 1), sitting=_now()))
        if len(rows) < num:
            record(rows[-1], results)
    rows[-1] = finish(run, mode, rows[-1], ledger, shared, settings)
    last = tokens_of(run, mode)
    rows[-1] = replace(
        rows[-1], num_tokens=rows[-1].num_tokens + last[0] - tokens[0], num_again=rows[-1].num_again + last[1] - tokens[1], sitting=_now())
    record(rows[-1], results)
    return rows


def tokens_of(run: SmallRun, mode: str) -> tuple[int, int]:
    """Return how many tokens a run's engines have generated for training, and how many of them again.

    Those of a group that failed and is drawn again count as if it had been whole, as another try has other random numbers.
    """
    num, again = count(run.root / "tokens")
    events = read_json_lines(run.folder / "events.jsonl") if (run.folder / "events.jsonl").exists() else []
    failed = sum(each["kind"] == "drawn_again" and each["why"] != "too stale" for each in events)
    return num, again + failed * tokens_of_group(mode)


def _now() -> tuple[float, float]:
    return _began_s, round(time.time() - _began_s, 1)


_began_s = round(time.time(), 1)


def finish(run: SmallRun, mode: str, row: Row, ledger: Ledger, shared: set[Path], settings: dict[str, str]) -> Row:
    """Let the run do three more steps and end when it is asked to; what is not as promised then is added to its last kill."""
    life = Life(run, mode, **{"run.total_steps": "1000000"} | settings)
    code = life.stop_after(ledger.last + 3)
    before, num = (Counter(ledger.counts), len(ledger.problems)), ledger.last
    ledger.audit()
    problems = [*row.problems, *ledger.problems[before[1]:]]
    counts = Counter(row.counts) + (ledger.counts - before[0])
    steps = [each["global_step"] for each in run.metrics()]
    if code not in (_TORCHRUN if mode.startswith("spmd") else _STOPPED) or ledger.last < num + 3 or steps != list(range(1, len(steps) + 1)):
        counts["other"] += 1
        problems.append(f"the run did not come to its end: exit code {code}, step {steps[-1:]}: {life.said}")
    elif (saved := CheckpointIndex(run.folder / "checkpoints").newest()) is None or saved.step != len(steps):
        counts["other"] += 1
        problems.append(f"a run that was asked to stop after step {len(steps)} has no checkpoint of it: {life.said}")
    if life.command.left:
        counts["processes"] += 1
        problems.append(f"left: {'; '.join(life.command.left)}")
    # Other programs of the machine have memory there, too, under names of theirs.
    new = [path for path in set(Path("/dev/shm").iterdir()) - shared if path.name.startswith(("torch_", "offbeat", "sem.", "psm_"))]
    if mode != "ray" and any(not in_use(path) for path in new):
        time.sleep(_CLEANING_S)  # it may be of a run beside this one, whose process was killed just now
    memory = [] if mode == "ray" else [path for path in new if not in_use(path)]
    # Besides the versions that are kept, there is the one that was on its way to the engines.
    left = [*parts(run.folder), *memory, *sorted(run.folder.glob("weights/*"))[3:], *sorted(run.folder.glob("checkpoints/*"))[2:]]
    if left:
        counts["files"] += 1
        problems.append(f"files left: {', '.join(map(str, left[:5]))}")
    replayed, difference = (0, "") if ledger.heads > 1 else replay(run)
    if difference:
        counts["replay"] += 1
        problems.append(f"its replay differs: {difference}")
    gone_on = sum(each["tokens_from_journal"] for each in run.events("played_again"))
    return replace(row, counts=dict(counts), problems=tuple(problems), num_replayed=replayed, num_gone_on=gone_on)


def in_use(path: Path) -> bool:
    """Whether a process that lives has memory, as others on this machine may; those of the run have ended."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if str(path) in maps.read_text(errors="replace"):
                return True
    return path.is_dir() or not path.exists()


def replay(run: SmallRun) -> tuple[int, str]:
    """Train all steps again from the journal; returns the number of equal ones, and the first difference or error, else ""."""
    done = offbeat("replay", str(run.folder), "--json", timeout_s=_REPLAY_S)
    steps = [each for each in map(msgspec.json.decode, done.stdout.splitlines()) if "global_step" in each]
    different = [f"step {each['global_step']}: {each['difference']}" for each in steps if each["difference"]]
    missing = [] if done.returncode != 2 and steps and steps[0]["global_step"] == 1 else [done.stderr[-300:] or done.stdout[-300:]]
    return len(steps) - len(different), next(iter([*different, *missing]), "")


def record(row: Row, results: Path) -> None:
    """Append to the results."""
    results.parent.mkdir(exist_ok=True)
    with _recording, results.open("ab") as file:
        file.write(msgspec.json.encode(row) + b"\n")
    verdict = "; ".join(row.problems) or "as promised"
    print(f"{row.mode}: {' and '.join(row.names)} at {row.was}, {row.steps} steps, {row.wall_s:.0f} s: {verdict}", flush=True)


def read_rows(path: Path = RESULTS) -> list[Row]:
    """The kills so far."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=Row) for line in lines]


def set_aside(results: Path = RESULTS, before: Path = BEFORE) -> None:
    """Move all rows of runs with one that is not as promised to a file of their own, so that these runs are done again."""
    rows = read_rows(results)
    failed = {(row.mode, row.chain) for row in rows if row.problems}
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for row in rows:
        parts[(row.mode, row.chain) in failed].append(msgspec.json.encode(row) + b"\n")
    with before.open("ab") as file:
        file.writelines(parts[True])
    results.write_bytes(b"".join(parts[False]))


if __name__ == "__main__":
    sys.exit(main())
