"""The embedded engine with its prefix cache, without it, as it was before, and vLLM: turns of an agent, questions behind a system prompt.

All sides are processes of one thread on SmolLM2-135M (`make smollm2`), in float32, and take turns on the same token ids:

- turns: 8 conversations of 8 turns, 60 tokens of a user's and 40 of the model's each; a turn begins when all have answered the one before.
- evaluation: 64 questions of 24 tokens behind one system prompt of 200 tokens, which come at once, with answers of 16 tokens.
- groups: 8 prompts of 64 tokens with 8 samples of 32 tokens each, which have nothing to gain; what is kept must cost them nothing.

    python benchmarks/prefixes.py [--quick] [--model .models/smollm2-135m-instruct] [--repeats 3] [--sides ...] [--works ...]

`before` is the engine of the last commit without a prefix cache, or of another one, whose sources are read from this clone; a clone
without its history leaves it out. "No cache" is today's engine with the cache switched off. `int8` is today's engine with weights
rounded to int8, which the engine before could not do. Figures are seconds and CPU seconds; what is kept is forgotten before each round.
Turns are also timed without a cache up to the first token of each answer: the rest of their time is decoding, which no cache spares, and
bounds what any cache could give. vLLM takes part where `.venv-vllm` has it.
"""

import argparse
import io
import os
import random
import subprocess
import sys
import tarfile
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

from measure import BENCHMARKS, ROOT, WORK, Contestant, contest, emit, note, take_turns

from engine import AS_SERVED, ONE_THREAD, VLLM_ALONE

AIMS = {
    "before": {"turns": 3.0, "evaluation": 3.0}, "uncached": {"groups": 0.98}, "vllm": {"turns": 1.0, "evaluation": 1.0, "groups": 1.0}}
"""By peer and work."""
PEERS = {"before": "the engine before", "uncached": "no cache", "vllm": "vLLM with its cache"}
OURS = {"cached": "", "int8": " in int8"}
"""Today's engine with its cache, and what is added to the name of a case."""
WORKS = ("turns", "evaluation", "groups")
BEFORE = "04d52b3b"
"""The last commit without a prefix cache."""
ANSWER = 40
"""Tokens of the model in a turn."""
FIRST, LAST = 1000, 40_000
"""Ids of ordinary tokens of SmolLM2."""

Talks = list[list[int]]
"""Token ids of prompts or answers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: a tenth of the samples, one round")
    parser.add_argument("--model", type=Path, default=ROOT / ".models" / "smollm2-135m-instruct")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; the median counts (default: 3)")
    parser.add_argument("--before", default=BEFORE, metavar="COMMIT", help=f"commit of the engine before (default: {BEFORE})")
    parser.add_argument("--sides", nargs="+", choices=[*OURS, *PEERS], default=[*OURS, *PEERS], help="who takes part (default: all)")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=WORKS, help="what is timed (default: all)")
    parser.add_argument("--vllm-python", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    args = parser.parse_args()
    share, repeats = (8, 1) if args.quick else (1, args.repeats)
    ours = [sys.executable, BENCHMARKS / "engine_ours.py"]
    sides = {
        "cached": Command([*ours, "inprocess", args.model], AS_SERVED),
        "int8": Command([*ours, "inprocess", args.model, "int8"], AS_SERVED),
        "uncached": Command([*ours, "uncached", args.model], AS_SERVED)}
    if (sources := sources_of(args.before)) is not None:
        path = os.pathsep.join([str(sources), str(BENCHMARKS)])
        sides["before"] = Command([sys.executable, BENCHMARKS / "engine_before.py", args.model], ONE_THREAD | {"PYTHONPATH": path})
    else:
        note(f"this clone has no commit {args.before}, so the engine before does not take part")
    if args.vllm_python.exists():
        sides["vllm"] = Command([args.vllm_python, BENCHMARKS / "engine_vllm.py", args.model], ONE_THREAD | VLLM_ALONE)
    else:
        note(f"there is no {args.vllm_python}, so vLLM does not take part")
    works: dict[str, Callable[[Side], None]] = {
        "turns": lambda side: turns(side, conversations=8 // share),
        "evaluation": lambda side: evaluation(side, questions=64 // share),
        "groups": lambda side: groups(side, prompts=8 // share)}
    with contest([Contestant(name, line.words, env=line.env) for name, line in sides.items() if name in args.sides]) as contestants:
        for case in args.works:
            work = works[case]
            timed = {name: partial(time_work, each, work) for name, each in contestants.items()}
            figures = take_turns(timed, repeats=repeats, what=case)
            for unit, own, peer in product(("s", "CPU-s"), OURS, PEERS):
                if own in figures and peer in figures:
                    emit("prefixes", f"{case}{OURS[own]} vs {PEERS[peer]}", ours=figures[own][unit], peer=figures[peer][unit], unit=unit,
                         aim=AIMS[peer].get(case) if own == "cached" or peer == "before" else None, less_is_better=True)
            if case == "turns" and "uncached" in contestants:
                alone = partial(time_work, contestants["uncached"], partial(turns, conversations=8 // share, length=1))
                prompts = take_turns({"uncached": alone}, repeats=1, what="turns, first tokens alone")["uncached"]
                for unit, whole in figures["uncached"].items():
                    emit("prefixes", "turns vs no cache, if prompts took no time", ours=whole - prompts[unit], peer=whole, unit=unit,
                         less_is_better=True)


class Command(NamedTuple):
    """What starts a side."""

    words: list[str | Path]
    env: dict[str, str]


def sources_of(commit: str) -> Path | None:
    """Return the folder `src` of a commit, in the benchmarks' folder; None if this clone does not have the commit."""
    folder = WORK / f"sources-{commit}"
    if not folder.exists():
        archive = subprocess.run(["git", "-C", ROOT, "archive", "--format=tar", commit, "src"], capture_output=True, check=False)
        if archive.returncode:
            return None
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
    return folder / "src"


class Side:
    """A contestant that samples, and what it has spent on it."""

    def __init__(self, contestant: Contestant) -> None:
        self.s = self.cpu_s = 0.0
        self._contestant = contestant

    def answers(self, prompts: Talks, *, length: int, n: int = 1) -> list[Talks]:
        """Return `n` samples of `length` tokens for each prompt."""
        answer = self._contestant.ask({"do": "generate", "prompts": prompts, "length": length, "n": n})
        self.s += answer.values["wall_s"]
        self.cpu_s += answer.cpu_s
        return answer.values["samples"]


def time_work(contestant: Contestant, work: Callable[[Side], None], _turn: int) -> dict[str, float]:
    contestant.ask({"do": "forget"})
    work(side := Side(contestant))
    return {"s": side.s, "CPU-s": side.cpu_s}


def turns(side: Side, *, conversations: int, length: int = ANSWER) -> None:
    """Sample the first `length` tokens of each answer; its others are random words."""
    rng = random.Random(1)
    talks: Talks = [[] for _ in range(conversations)]
    for _ in range(8):
        talks = [talk + words(rng, 60) for talk in talks]
        answers = side.answers(talks, length=length)
        talks = [talk + said + words(rng, ANSWER - length) for talk, (said,) in zip(talks, answers, strict=True)]


def evaluation(side: Side, *, questions: int) -> None:
    rng = random.Random(2)
    system = words(rng, 200)
    side.answers([system + words(rng, 24) for _ in range(questions)], length=16)


def groups(side: Side, *, prompts: int) -> None:
    rng = random.Random(3)
    side.answers([words(rng, 64) for _ in range(prompts)], length=32, n=8)


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST, LAST) for _ in range(count)]


if __name__ == "__main__":
    main()
