"""What supports (`model.support_replay`) take: bytes per sampled token, and time of decode steps of the embedded engine.

One engine in this process on SmolLM2-135M (`make smollm2`), in float32, answers chats with and without supports in turns, at several
settings that leave tokens out:

    python benchmarks/supports.py [--model .models/smollm2-135m-instruct] [--rows 8] [--tokens 64] [--repeats 2]

A line per setting: tokens in a support (mean, median and largest), words of 4 bytes per token in memory, bytes per token as they travel
and lie in the journal, and the CPU seconds of all steps, the least of some rounds. `--repeats 0` counts bytes alone.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import numpy as np
from measure import ROOT

from offbeat.data.sample_supports import BITS, LEFT_OUT, pack_supports
from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.loader import load_engine
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import Output, SamplingParams

SETTINGS = {
    "top_p 0.9": {"top_p": 0.9}, "top_p 0.95": {"top_p": 0.95}, "top_p 0.99": {"top_p": 0.99}, "top_k 20": {"top_k": 20},
    "top_p 0.95, top_k 20": {"top_p": 0.95, "top_k": 20}, "top_p 0.95, temperature 1.5": {"top_p": 0.95, "temperature": 1.5}}

QUESTIONS = (
    "Why is the sky blue?", "Write a short story about a fox and a river.", "What is 17 times 23? Think step by step.",
    "Explain how a bicycle stays upright.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / ".models" / "smollm2-135m-instruct")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2, help="rounds that are timed (default: 2)")
    args = parser.parse_args()
    engine = load_engine(EngineOptions(model=str(args.model)))
    prompts = [engine.tokenizer.chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    for name, settings in SETTINGS.items():
        params = {supports: SamplingParams(max_new_tokens=args.tokens, seed=1, supports=supports, **settings) for supports in (False, True)}
        ask = partial(_answers, engine, prompts, n=args.rows // len(prompts))
        print(f"{name}: {_sizes(ask(params[True])[0], engine)}", flush=True)
        if args.repeats:
            rounds = [[ask(params[supports])[1] for supports in (False, True)] for _ in range(args.repeats)]
            without, with_them = map(min, zip(*rounds, strict=True))
            print(f"  {without:.1f} CPU seconds without, {with_them:.1f} with", flush=True)


def _answers(engine: EmbeddedEngine, prompts: list[list[int]], params: SamplingParams, *, n: int) -> tuple[list[Output], float]:
    start_s = time.process_time()
    outputs = [output for own in engine.generate(prompts, params, n=n) for output in own]
    return outputs, time.process_time() - start_s


def _sizes(outputs: list[Output], engine: EmbeddedEngine) -> str:
    vocab, counts, words, packed = engine.tokenizer.vocab_size, list[int](), 0, 0
    for supports in (output.supports for output in outputs):
        assert supports is not None, "they were asked for"
        packed += len(pack_supports(supports))
        words += len(supports.words)
        for form, own in supports.forms_and_words:
            counts.append(
                vocab - len(own) if form == LEFT_OUT else int(np.unpackbits(own.view(np.uint8)).sum()) if form == BITS else len(own))
    num = len(counts)
    return (f"{num} tokens, {np.mean(counts):.1f} in a support, {np.median(counts):.0f} the median, {max(counts)} the largest;"
            f" {words / num:.1f} words, {packed / num:.1f} bytes packed")


if __name__ == "__main__":
    main()
