"""The embedded engine with its prefix cache and without it, on one thread: turns of an agent, and an evaluation with a system prompt.

Both sides are engines in this process on SmolLM2-135M (`make smollm2`), in float32, and take turns on the same token ids:

- turns: 8 conversations of 8 turns, 60 tokens of a user's and 40 of the model's each; a turn begins when all have answered the one before.
- evaluation: 64 questions of 24 tokens behind one system prompt of 200 tokens, which come at once, with answers of 16 tokens.
- groups: 8 prompts of 64 tokens with 8 samples of 32 tokens each, which have nothing to gain; what is kept must cost them nothing.

    python benchmarks/prefixes.py [--quick] [--model .models/smollm2-135m-instruct] [--repeats 3]

Figures are seconds and CPU seconds of the process; the weights are switched before each round, so that nothing of the one before is known.
"""

import argparse
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from measure import ROOT, emit, take_turns

from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.loader import load_engine
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import SamplingParams
from offbeat.engine.versions import VersionSource

AIMS = {"turns": 3.0, "evaluation": 3.0, "groups": 0.98}
FIRST, LAST = 1000, 40_000
"""Ids of ordinary tokens of SmolLM2."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: a tenth of the samples, one round")
    parser.add_argument("--model", type=Path, default=ROOT / ".models" / "smollm2-135m-instruct")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; the median counts (default: 3)")
    args = parser.parse_args()
    share, repeats = (8, 1) if args.quick else (1, args.repeats)
    engines = {name: load_engine(EngineOptions(model=str(args.model), prefix_caching=name == "ours")) for name in ("ours", "peer")}
    works: dict[str, Callable[[EmbeddedEngine], None]] = {
        "turns": lambda engine: turns(engine, conversations=8 // share),
        "evaluation": lambda engine: evaluation(engine, questions=64 // share),
        "groups": lambda engine: groups(engine, prompts=8 // share)}
    for case, work in works.items():
        sides = {name: lambda _, engine=engine, work=work: timed(engine, work, str(args.model)) for name, engine in engines.items()}
        figures = take_turns(sides, repeats=repeats, what=case)
        for figure in ("s", "cpu_s"):
            emit("prefixes", f"{case}, {figure}", ours=figures["ours"][figure], peer=figures["peer"][figure], unit="s",
                 aim=AIMS[case], less_is_better=True)


def timed(engine: EmbeddedEngine, work: Callable[[EmbeddedEngine], None], model: str) -> dict[str, float]:
    version = engine.version + 1
    engine.stage(version, VersionSource(model, str(version)), engine.prepare(model))
    engine.switch(version, "recompute")
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    work(engine)
    return {"s": time.perf_counter() - start_s, "cpu_s": time.process_time() - start_cpu_s}


def turns(engine: EmbeddedEngine, *, conversations: int) -> None:
    rng = random.Random(1)
    talks: list[list[int]] = [[] for _ in range(conversations)]
    for _ in range(8):
        talks = [talk + words(rng, 60) for talk in talks]
        talks = [talk + said for talk, (said,) in zip(talks, answers(engine, talks, length=40), strict=True)]


def evaluation(engine: EmbeddedEngine, *, questions: int) -> None:
    rng = random.Random(2)
    system = words(rng, 200)
    answers(engine, [system + words(rng, 24) for _ in range(questions)], length=16)


def groups(engine: EmbeddedEngine, *, prompts: int) -> None:
    rng = random.Random(3)
    answers(engine, [words(rng, 64) for _ in range(prompts)], length=32, n=8)


def answers(engine: EmbeddedEngine, prompts: Sequence[list[int]], *, length: int, n: int = 1) -> list[list[list[int]]]:
    params = SamplingParams(max_new_tokens=length, ignore_eos=True, seed=0)
    return [[output.token_ids for output in outputs] for outputs in engine.generate(prompts, params, n=n)]


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST, LAST) for _ in range(count)]


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    main()
