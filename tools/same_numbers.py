#!/usr/bin/env python3
"""Trains small runs at two commits, and says for each kind of run whether the numbers are the same bit for bit.

    python tools/same_numbers.py main                  # that commit against the working tree
    python tools/same_numbers.py v0.1.0 main           # two commits
    python tools/same_numbers.py main --only grpo,heads
    python tools/same_numbers.py main --settings inference.batch_invariant=false   # in every run

Compared are loss and gradient norm of each step, and the exported weights. Both sides use this environment's packages. A kind takes half a
minute of one core on each side. Exit code 1 if one differs; a kind that one side cannot run, as before a setting was there, counts so too.
For a change that is to move code and no numbers.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REWARD = "import hashlib\ndef score(completion, row):\n    return hashlib.md5((completion + row.prompt).encode()).digest()[0] / 255\n"
SETTINGS = {
    "run.name": "same", "run.total_steps": "3", "run.seed": "1", "sft.total_steps": "2", "evaluate.every_steps": "0",
    "data.task": "sort_digits", "data.task_size": "3", "data.heldout_size": "4", "rollout.group_size": "4", "rollout.max_new_tokens": "6",
    "rollout.consumer_batch_size": "4", "rollout.max_concurrent_rollouts": "8", "rollout.max_head_offpolicyness": "0",
    "train.optimizer.lr": "1e-3", "train.threads": "1", "inference.threads": "1",
    "model.tiny.hidden_size": "32", "model.tiny.num_layers": "1", "model.tiny.num_heads": "2", "model.tiny.num_kv_heads": "1",
    "model.tiny.head_dim": "16", "model.tiny.intermediate_size": "64", "model.tiny.max_positions": "64"}
_REPEATS = {"inference.seeded_requests": "true", "inference.batch_invariant": "true"}
"""Let a run repeat although the order in which its engine gets requests does not."""

KINDS: Mapping[str, dict[str, str]] = {
    "grpo": {}, "dapo": {"algorithm.preset": "dapo"}, "ppo with a critic": {"algorithm.preset": "ppo"},
    "gspo with an adapter": {"algorithm.preset": "gspo", "model.lora.rank": "4"},
    "spmd": {"run.mode": "spmd", **_REPEATS},
    "heads": {"run.mode": "spmd", "rollout.single_rank_load": "false", "rollout.balance_batch": "false", **_REPEATS},
}
"""Settings of each kind of run; those in SPMD mode have two ranks, and "heads" lets each of them draw data."""

_NUMBERS = ("train/loss", "train/grad_norm")


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each kind of run; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", help="a commit, such as main")
    parser.add_argument("after", nargs="?", default="", help="another one; by default the working tree")
    parser.add_argument("--only", default="", help=f"kinds, separated by commas: {', '.join(KINDS)}")
    parser.add_argument("--settings", nargs="*", default=[], metavar="NAME=VALUE", help="further settings of every run")
    args = parser.parse_args(argv)
    kinds = args.only.split(",") if args.only else list(KINDS)
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"there is no kind {unknown[0]!r}; there are {', '.join(KINDS)}")
    more = dict(each.split("=", 1) for each in args.settings)
    differs = False
    with tempfile.TemporaryDirectory() as folder, _tree(args.before, Path(folder) / "before") as before, _tree(
            args.after, Path(folder) / "after") as after:
        for kind in kinds:
            found = [train(tree, Path(folder) / f"{kind} {side}", KINDS[kind] | more) for side, tree in enumerate((before, after))]
            told = difference(*found)
            differs |= bool(told)
            print(f"{kind}: {told or 'equal'}", flush=True)
    return int(differs)


@contextmanager
def _tree(commit: str, folder: Path) -> Iterator[Path]:
    """Give a checkout of a commit; the working tree for ""."""
    if not commit:
        yield ROOT
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def train(tree: Path, folder: Path, settings: Mapping[str, str]) -> list[tuple[str, str]]:
    """Train with the sources of a tree; returns the names of what came out with the values, as they were written.

    The only one is "failed", with the last line that the run printed, where it failed.
    """
    folder.mkdir()
    reward = folder / "reward.py"
    reward.write_text(REWARD, encoding="utf-8")
    given = SETTINGS | {"run.dir": str(folder), "rollout.reward": f"{reward}:score"} | settings
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if given.get("run.mode") == "spmd" else []
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    done = subprocess.run(
        [sys.executable, *ranks, "-m", "offbeat", "train", *words], cwd=folder, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"})
    if done.returncode:
        return [("failed", ((done.stderr or done.stdout).strip().splitlines() or [""])[-1])]
    rows = [json.loads(line) for line in (folder / "same" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if _NUMBERS[0] in row]
    weights = hashlib.sha256((folder / "same" / "export" / "model.safetensors").read_bytes()).hexdigest()
    numbers = [(f"{name} of step {step}", repr(row[name])) for step, row in enumerate(rows, 1) for name in _NUMBERS]
    return [*numbers, ("weights", weights[:16])]


def difference(before: Sequence[tuple[str, str]], after: Sequence[tuple[str, str]]) -> str:
    """Return the first difference as a sentence, such as "train/loss of step 2 is 0.25, and was 0.125"; "" if there is none."""
    for side, found in (("before", before), ("after", after)):
        if found[0][0] == "failed":
            return f"the run fails {side} the change: {found[0][1]}"
    for (name, was), (_, now) in zip(before, after, strict=False):
        if was != now:
            return f"{name} is {now}, and was {was}"
    return "" if len(before) == len(after) else f"{len(after)} numbers, and were {len(before)}"


if __name__ == "__main__":
    sys.exit(main())
