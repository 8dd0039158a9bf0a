"""What the batch-invariant mode of the embedded engine costs, on one thread: the same requests with it and without it.

Both sides are engines in this process on SmolLM2-135M (`make smollm2`), in float32, and take turns on the same token ids:

- decode, R rows: R prompts of 16 tokens with answers of 48 tokens.
- prompts, L tokens: prompts of L tokens, 4,096 tokens in all, with answers of one token.

    python benchmarks/batch_invariant.py [--quick] [--model .models/smollm2-135m-instruct] [--repeats 3]

Figures are seconds and CPU seconds of the process; the cache of prefixes is off, so that each round computes the same.

With `--batches 1000` it counts bits instead of time: requests of random lengths are answered alone, then in the company of others that join
at random moments until so many batches were computed, and the log-probabilities that differ are counted, with the mode and without.
"""

import argparse
import operator
import os
import random
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from measure import ROOT, emit, take_turns

from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.loader import load_engine
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import Request, SamplingParams

FIRST, LAST = 1000, 40_000
"""Ids of ordinary tokens of SmolLM2."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: one row and short prompts, one round")
    parser.add_argument("--model", type=Path, default=ROOT / ".models" / "smollm2-135m-instruct")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; the median counts (default: 3)")
    parser.add_argument("--batches", type=int, default=0, help="compare log-probabilities over so many random batches, and measure nothing")
    args = parser.parse_args()
    if args.batches:
        for name, invariant in (("batch-invariant", True), ("as fast as it can", False)):
            print(f"{name}: {compared(args.model, args.batches, batch_invariant=invariant)}", flush=True)
        return
    rows, lengths, total, repeats = ((1,), (64,), 128, 1) if args.quick else ((1, 8, 64), (64, 512, 2048), 4096, args.repeats)
    engines = {
        name: load_engine(EngineOptions(model=str(args.model), prefix_caching=False, batch_invariant=name == "ours"))
        for name in ("ours", "peer")}
    works = {f"decode, {count} rows": (16, count, 48) for count in rows}
    works |= {f"prompts, {length} tokens": (length, total // length, 1) for length in lengths}
    for case, (length, count, answer) in works.items():
        rng = random.Random(case)
        prompts = [[rng.randrange(FIRST, LAST) for _ in range(length)] for _ in range(count)]
        sides = {name: partial(timed, engine, prompts, answer) for name, engine in engines.items()}
        figures = take_turns(sides, repeats=repeats, what=case)
        for figure in ("s", "cpu_s"):
            emit("batch_invariant", f"{case}, {figure}", ours=figures["ours"][figure], peer=figures["peer"][figure], unit="s",
                 less_is_better=True)


def timed(engine: EmbeddedEngine, prompts: Sequence[list[int]], answer: int, _round: int) -> dict[str, float]:
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    engine.generate(prompts, SamplingParams(max_new_tokens=answer, ignore_eos=True, seed=0))
    return {"s": time.perf_counter() - start_s, "cpu_s": time.process_time() - start_cpu_s}


def compared(model: Path, num_batches: int, *, batch_invariant: bool) -> str:
    """Answer requests alone and in random batches, and say how many of their log-probabilities differ."""
    rng = random.Random(0)
    engine = load_engine(EngineOptions(model=str(model), batch_invariant=batch_invariant, max_running=16))
    requests = [
        Request(id=str(index), prompt=[rng.randrange(FIRST, LAST) for _ in range(rng.choice((1, 3, 8, 33, 70, 130)))],
                params=SamplingParams(max_new_tokens=rng.choice((2, 5, 12, 24)), ignore_eos=True, seed=index))
        for index in range(24)]
    alone = {request.id: played(engine, [request], rng)[0][request.id] for request in requests}
    done = num_tokens = num_equal_tokens = num_equal = 0
    while done < num_batches:
        answers, batches = played(engine, rng.sample(requests, rng.randint(2, len(requests))), rng)
        done += batches
        for name, (tokens, logprobs) in answers.items():
            num_tokens += len(tokens)
            num_equal_tokens += sum(map(operator.eq, tokens, alone[name][0]))
            num_equal += sum(map(operator.eq, logprobs, alone[name][1]))
    differ = f"{num_tokens - num_equal_tokens} of them and {num_tokens - num_equal} log-probabilities differ"
    return f"{done} batches, {num_tokens} tokens; {differ}"


def played(engine: EmbeddedEngine, requests: list[Request], rng: random.Random) -> tuple[dict[str, tuple[list[int], list[float]]], int]:
    """Submit requests at random moments; returns tokens and log-probabilities by request, and how many batches were computed."""
    waiting, answers, batches = list(requests), {}, 0
    while waiting or engine.has_work:
        while waiting and (not engine.has_work or rng.random() < 0.3):
            engine.submit(waiting.pop())
        batches += 1
        for event in engine.step():
            if event.result is not None:
                answers[event.request_id] = event.result.token_ids, event.result.logprobs
    return answers, batches


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    main()
