"""Generation: the embedded engine, in process and over HTTP, against vLLM on CPU and transformers' `generate`.

All contestants are processes that are ready before the first measurement and take turns on the same ragged requests: prompts of 8 to 64
tokens, outputs of 16 to 112, sampled at temperature 1 with the log-probability of every token, in float32, with 1, 8, 64 and 256 requests
in flight. Two random models: "tiny" (0.6M parameters) and "27M". Ours and transformers run on one thread; vLLM runs as it comes, a worker
bound to one core beside its front-end processes. Figures are generated tokens per second, and per CPU second of all processes of a
contestant.

    python benchmarks/engine.py [--quick] [--models tiny 27M] [--in-flight 64 256] [--repeats 3]

vLLM takes part where `.venv-vllm` (or --vllm-python) has it.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from measure import BENCHMARKS, ROOT, WORK, Contestant, contest, emit, note, take_turns

from offbeat.config.model import TinyConfig
from offbeat.data.tokenizer import DEFAULT_ALPHABET, character_tokenizer
from offbeat.model.tiny import build_tiny
from offbeat.workers.worker import huge_page_environment, library_environment

MODELS = {
    "tiny": (TinyConfig(
        hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=256, max_positions=1024), 49),
    "27M": (TinyConfig(
        hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=4, head_dim=64, intermediate_size=1536, max_positions=1024), 4096),
}
"""Sizes and vocabulary of each model."""
AIMS = {"tiny": 1.5, "27M": 0.9}
AIMED_AT = (64, 256)
SHORTEST, LONGEST = 16, 112
"""Tokens that a request generates."""
SETTLE_S = 1.5
"""vLLM's processes spin for a second after their last request; nobody else is measured during that."""
ONE_THREAD = library_environment(1)
AS_SERVED = ONE_THREAD | huge_page_environment()
"""Environment of an embedded engine's process, as runs and `offbeat engine` start it."""
VLLM_ALONE = huge_page_environment() | {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING"}
"""Environment of vLLM in one process, whose threads the library's environment counts; its default takes a process more, and a core each.

It has the huge pages that our engines have.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: the tiny model, 8 and 64 in flight, one round")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--in-flight", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--repeats", type=int, default=3, help="rounds; the median counts (default: 3)")
    parser.add_argument("--vllm-python", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    args = parser.parse_args()
    if args.quick:
        args.models, args.in_flight, args.repeats = ["tiny"], [8, 64], 1
    for model in args.models:
        compare(model, in_flight=args.in_flight, repeats=args.repeats, vllm_python=args.vllm_python)


def compare(model: str, *, in_flight: list[int], repeats: int, vllm_python: Path) -> None:
    """All contestants on one model."""
    folder = build(model)
    ours = [sys.executable, BENCHMARKS / "engine_ours.py"]
    contestants = [
        Contestant("offbeat", [*ours, "inprocess", folder], env=AS_SERVED),
        Contestant("offbeat-http", [*ours, "http", folder], env=AS_SERVED),
        Contestant("transformers", [sys.executable, BENCHMARKS / "engine_transformers.py", folder], env=ONE_THREAD),
    ]
    if vllm_python.exists():
        # vLLM chooses its own threads and policy.
        own = {"OMP_NUM_THREADS": "", "OMP_WAIT_POLICY": "", "VLLM_LOGGING_LEVEL": "WARNING"}
        contestants.append(Contestant("vllm", [vllm_python, BENCHMARKS / "engine_vllm.py", folder], env=own))
    else:
        note(f"there is no {vllm_python}, so vLLM does not take part")
    with contest(contestants) as sides:
        for count in in_flight:
            compare_at(model, count, sides, repeats=repeats)


def compare_at(model: str, in_flight: int, sides: dict[str, Contestant], *, repeats: int) -> None:
    """All contestants on one model at one number of requests in flight."""
    # Long enough to time at the small end, short enough to wait for at the large.
    count = max(in_flight if model == "27M" else 2 * in_flight, 8)
    medians = time_generation(
        sides, count, vocab_size=MODELS[model][1], in_flight=in_flight, repeats=repeats, what=f"{model}, {in_flight} in flight,")
    aim = AIMS[model] if in_flight in AIMED_AT else None
    case = f"{model}/{in_flight}"
    for unit in ("tokens/s", "tokens/CPU-s"):
        for peer in [name for name in medians if not name.startswith("offbeat")]:
            aimed = aim if peer == "vllm" and unit == "tokens/s" else None
            emit("engine", f"{case} in process vs {peer}", ours=medians["offbeat"][unit], peer=medians[peer][unit], unit=unit, aim=aimed)
            emit("engine", f"{case} over HTTP vs {peer}", ours=medians["offbeat-http"][unit], peer=medians[peer][unit], unit=unit)
        emit("engine", f"{case} over HTTP vs in process", ours=medians["offbeat-http"][unit], peer=medians["offbeat"][unit], unit=unit)


def time_generation(
    contestants: dict[str, Contestant], count: int, *, vocab_size: int, in_flight: int, repeats: int, what: str,
) -> dict[str, dict[str, float]]:
    """Median "tokens/s" and "tokens/CPU-s" of every contestant, over equal jobs of `count` requests."""

    def side(contestant: Contestant) -> Callable[[int], dict[str, float]]:
        def turn(repeat: int) -> dict[str, float]:
            job = make_job(count, vocab_size=vocab_size, in_flight=in_flight, seed=repeat)
            time.sleep(SETTLE_S)
            answer = contestant.ask(job)
            assert answer.values["tokens"] == sum(job["lengths"]), f"{contestant.name} lost tokens: {answer.values}"
            return {"tokens/s": answer.values["tokens"] / answer.values["wall_s"], "tokens/CPU-s": answer.values["tokens"] / answer.cpu_s}

        return turn

    for contestant in contestants.values():
        # What is done once at this size, such as compilation, is not measured.
        contestant.ask(make_job(in_flight, vocab_size=vocab_size, in_flight=in_flight, seed=repeats, longest=SHORTEST))
    return take_turns({name: side(each) for name, each in contestants.items()}, repeats=repeats, what=what)


def make_job(count: int, *, vocab_size: int, in_flight: int, seed: int, longest: int = LONGEST) -> dict:
    """`count` random requests for SHORTEST to `longest` tokens; equal seeds give equal jobs."""
    rng = np.random.default_rng([seed, count])
    prompts = [rng.integers(3, vocab_size, length).tolist() for length in rng.integers(8, 65, count)]
    return {"prompts": prompts, "lengths": rng.integers(SHORTEST, longest + 1, count).tolist(), "in_flight": in_flight}


def build(model: str) -> Path:
    """The model's folder, built once."""
    tiny, vocab_size = MODELS[model]
    folder = WORK / f"model-{model}"
    tokenizer = character_tokenizer(DEFAULT_ALPHABET[:46])
    tokenizer.save(folder)
    build_tiny(
        folder, tiny=tiny, vocab_size=vocab_size, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, seed=0)
    return folder


if __name__ == "__main__":
    main()
