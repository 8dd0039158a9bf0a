"""How fast the rollout viewer opens a long run and answers filters, compared with a scan of the run's files.

A made-up run of --rollouts samples in 1,000 steps (25 groups of 8, about 70 tokens each) lies in build/benchmarks and is used again, with
its index, by the next call with as many. Opening is what a browser asks for first, over HTTP without a network: page, script, list of runs,
first rollouts and the newest of them as a conversation, by a server that has just started and an index that exists. Building that index is
a figure of its own (null where it was there), as is opening without one. A filter is one request for the first rollouts that pass and their
number; wall-clock and CPU time of the process are medians. The scan parses every line with `data.stored_rollouts` and asks all filters
in one pass, so a scan for one filter takes about as long; its counts must be those of the index.

    python benchmarks/rollout_index.py [--rollouts 200000] [--quick]
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from starlette.testclient import TestClient

from offbeat.dashboard.library import RunLibrary
from offbeat.dashboard.rollout_index import RolloutIndex
from offbeat.dashboard.site import make_site
from offbeat.data.stored_rollouts import KeptGroup, KeptTrajectory, read_rollouts
from offbeat.telemetry.rollout_log import RolloutLog

FOLDER = Path("build/benchmarks/rollout_index")
OPEN_AIM_S, FILTER_AIM_MS = 2.0, 300.0
NUM_STEPS, GROUP_SIZE, NUM_PROMPTS, POOL = 1000, 8, 4000, 4000
RARE = "chrysoprase"

Passes = Callable[[KeptGroup, KeptTrajectory], bool]

FILTERS: dict[str, tuple[dict[str, str], Passes]] = {
    "everything": ({}, lambda _g, _t: True),
    "one step": ({"min_step": "500", "max_step": "500"}, lambda g, _t: g.step == 500),
    "reward of 1": ({"min_reward": "1"}, lambda _g, t: t.reward is not None and t.reward >= 1),
    "a rare word": ({"text": RARE}, lambda _g, t: RARE in t.completion),
    "a word of half of them": ({"text": "carry"}, lambda _g, t: " carry " in t.completion),
    "part of a prompt": ({"prompt": "123"}, lambda g, _t: "123" in g.prompt),
    "cut off, longest first": ({"reason": "length", "order": "longest"}, lambda _g, t: t.reason == "length"),
    "words, reward, length, version and steps": (
        {"text": "carry", "max_reward": "0.5", "min_length": "50", "max_version": "600", "min_step": "100"},
        lambda g, t: " carry " in t.completion and (t.reward or 0) <= 0.5 and t.num_generated >= 50 and (t.version or 0) <= 600
        and g.step >= 100),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=200_000, help="number of samples (default: 200,000)")
    parser.add_argument("--quick", action="store_true", help="a smoke run of 8,000 samples")
    args = parser.parse_args()
    num_rollouts = 8000 if args.quick else args.rollouts
    print(json.dumps(measure(FOLDER / f"run-{num_rollouts}", num_rollouts)), flush=True)


def measure(run_dir: Path, num_rollouts: int) -> dict[str, object]:
    if not (run_dir / "metrics.jsonl").exists():  # which is written last
        shutil.rmtree(run_dir, ignore_errors=True)
        seconds = timed(lambda: write_run(run_dir, num_rollouts))
        tell(f"{num_rollouts} rollouts written in {seconds:.1f} s")
    is_new = not (run_dir / "rollouts" / "index.sqlite").exists()
    first_open_s = timed(lambda: browse(run_dir))  # which builds the index on in the background until it is closed
    index = RolloutIndex(run_dir)
    start = time.perf_counter()
    progress = index.update()
    index_s = time.perf_counter() - start
    assert progress.num_rollouts == num_rollouts and progress.num_indexed == progress.num_files, progress
    tell(f"index built in {index_s:.1f} s, {run_dir.joinpath('rollouts', 'index.sqlite').stat().st_size / 1e6:.0f} MB")
    open_s = statistics.median(timed(lambda: browse(run_dir)) for _ in range(3))
    counts, filter_ms, filter_cpu_ms = ask_filters(run_dir)
    start = time.perf_counter()
    scanned = scan(run_dir)
    scan_s = time.perf_counter() - start
    assert counts == scanned, (counts, scanned)
    slowest = max(filter_ms.values())
    return {
        "benchmark": "rollout_index", "rollouts": num_rollouts, "open_s": round(open_s, 3),
        "first_open_s": round(first_open_s, 3) if is_new else None, "index_s": round(index_s, 1) if is_new else None,
        "filter_ms": filter_ms, "filter_cpu_ms": filter_cpu_ms, "slowest_filter_ms": slowest, "scan_s": round(scan_s, 1),
        "ratio": round(scan_s * 1e3 / slowest, 1), "found": counts, "aim": {"open_s": OPEN_AIM_S, "filter_ms": FILTER_AIM_MS},
        "met": open_s < OPEN_AIM_S and slowest < FILTER_AIM_MS}


def write_run(run_dir: Path, num_rollouts: int) -> None:
    """Write a run whose trajectories are drawn from a pool of different ones."""
    rng = random.Random(0)
    run_dir.mkdir(parents=True)
    log = RolloutLog(run_dir / "rollouts")
    num_groups = num_rollouts // GROUP_SIZE
    pool = [trajectory(rng, rare=i == 0) for i in range(POOL)]
    for step in range(NUM_STEPS):
        lines = []
        for _ in range(num_groups * step // NUM_STEPS, num_groups * (step + 1) // NUM_STEPS):
            row = rng.randrange(NUM_PROMPTS)
            prompt = f"What is {row} times {row + 7}?"
            head = json.dumps({"prompt_id": f"0:{row}", "admitted_version": step, "step": step, "prompt": prompt})
            version = str(step).encode()
            members = b",".join(rng.choice(pool).replace(b'"VERSION"', version) for _ in range(GROUP_SIZE))
            lines.append(head[:-1].encode() + b', "trajectories": [' + members + b"]}")
        if lines:
            log.write(step, lines)
    rows = (json.dumps({"global_step": step, "reward/mean": step / NUM_STEPS}) + "\n" for step in range(NUM_STEPS))
    (run_dir / "metrics.jsonl").write_text("".join(rows))


def trajectory(rng: random.Random, *, rare: bool) -> bytes:
    """Return a trajectory as JSON, whose version is to be filled in."""
    words = ["the", "product", "sum", "is", "now", "we", "so", "then", "two", "nine", "digit", "result"]
    pieces = ["What", " is", " it", "?"]
    num_given = len(pieces)
    for _ in range(rng.randint(30, 110)):
        pieces.append(" " + rng.choice(words))
    if rng.random() < 0.5:
        pieces[len(pieces) // 2] = " carry"
    if rare:
        pieces[-2] = " " + RARE
    mask = [i >= num_given for i in range(len(pieces))]
    reward = round(rng.random() * 1.25, 2)
    fields = {
        "tokens": [rng.randrange(50_000) for _ in pieces], "loss_mask": mask,
        "rollout_logprobs": [round(-rng.expovariate(2), 5) if wrote else 0 for wrote in mask],
        "versions": ["VERSION" if wrote else -1 for wrote in mask], "reward": reward, "reason": "length" if rng.random() < 0.05 else "stop",
        "text": "".join(pieces), "lengths": list(map(len, pieces)), "trained": True,
        "advantages": [round(reward - 0.6, 2) if wrote else 0 for wrote in mask]}
    return json.dumps(fields).encode()


def browse(run_dir: Path) -> None:
    """Ask for what a browser asks first, of a server that has just started."""
    with closing(RunLibrary([run_dir])) as library:
        http = TestClient(make_site(library, key=""), base_url="http://localhost")
        for path in ("/", "/watch.css", "/watch.js", "/api/runs", f"/api/stamp?run={run_dir.name}", f"/api/overview?run={run_dir.name}"):
            assert http.get(path).status_code == 200, path
        found = http.get("/api/rollouts", params={"run": run_dir.name}).json()["rollouts"]
        assert http.get("/api/rollout", params={"run": run_dir.name, "id": found[0]["address"]}).status_code == 200


def ask_filters(run_dir: Path) -> tuple[dict[str, int], dict[str, float], dict[str, float]]:
    """Ask each filter five times; returns the counts, and the median milliseconds by the clock and of CPU time."""
    counts, taken, worked = {}, {}, {}
    with closing(RunLibrary([run_dir])) as library:
        http = TestClient(make_site(library, key=""), base_url="http://localhost")
        for name, (asked, _) in FILTERS.items():
            seconds, cpu_seconds = [], []
            for _ in range(5):
                start, cpu_start = time.perf_counter(), time.process_time()
                answer = http.get("/api/rollouts", params={"run": run_dir.name, **asked})
                seconds.append(time.perf_counter() - start)
                cpu_seconds.append(time.process_time() - cpu_start)
                counts[name] = answer.json()["total"]
            taken[name], worked[name] = (round(statistics.median(each) * 1e3, 1) for each in (seconds, cpu_seconds))
            tell(f"{name}: {counts[name]} in {taken[name]} ms, of which {worked[name]} ms of CPU time")
    return counts, taken, worked


def scan(run_dir: Path) -> dict[str, int]:
    """Count what passes each filter, from the files."""
    counts = dict.fromkeys(FILTERS, 0)
    for group in read_rollouts(run_dir):
        for t in group.trajectories:
            for name, (_, passes) in FILTERS.items():
                counts[name] += passes(group, t)
    return counts


def timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
