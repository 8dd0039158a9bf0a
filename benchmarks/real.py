"""A real pretrained model on a CPU: the embedded engine against vLLM, and a training step against TRL's GRPOTrainer.

    python benchmarks/real.py [--quick] [--model .models/smollm2-135m-instruct] [--parts engine step] [--in-flight 1 8 64] [--steps 6]

engine: all sides are processes that are ready before the first measurement and take turns on the same ragged requests, as in `engine.py`,
on --threads threads, each in float32 and, where the CPU has instructions for it, in bfloat16. vLLM runs in one process, its fastest way on
a CPU of few cores. The aims are for the better format of each side. Our int8 weights, whose numbers differ by more than rounding to either,
take turns with float32 and have rows of their own. `groups` are 8 prompts with 8 samples each, which share their prompt on
both sides.

step: GRPO on prompts of the task `addition`, 4 with 4 samples each of at most 48 new tokens, under a reward that differs from sample to
sample, since a group without a difference costs us nothing; one AdamW update per step, both from the same folder, trained in float32. TRL
runs in one process on --peer-threads threads. Ours is asynchronous: a train process of as many threads, and an engine process of one that
shares the cores with it, in the same formats. `trainer step` is what is not generation: our `step/train_s`, and TRL's step without
generating and scoring its completions.

vLLM takes part where `.venv-vllm` has it, TRL where `.venv-trl` has it; see `engine.py` and `step.py`.
"""

import argparse
import json
import os
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from statistics import mean

import numpy as np
from measure import BENCHMARKS, ROOT, WORK, Contestant, contest, emit, note, take_turns
from step import emit_steps, our_steps, run, step_figures, write_prompts

from engine import SETTLE_S, VLLM_ALONE, time_generation
from offbeat.config.load import load_config
from offbeat.cpu import this_cpu
from offbeat.data.model_folder import read_model_config
from offbeat.workers.worker import huge_page_environment, library_environment

RUNS = WORK / "real"
DTYPES = ("float32", "bfloat16") if this_cpu().has_bf16 else ("float32",)
"""Formats that are measured: without instructions for it, products in bfloat16 take ten times as long or more."""
PARTS = ("rollout_wait_s", "train_s", "publish_s")
ENGINE_AIMS = {"1": 1.0, "8": 1.1, "64": 1.1, "groups": 2.0}
TRAINER_AIM, STEP_AIM = 1.5, 2.2
SETTINGS = {
    "data.task": "addition", "rollout.group_size": 4, "rollout.consumer_batch_size": 4, "rollout.max_new_tokens": 48,
    "rollout.max_head_offpolicyness": 1, "weights.interrupt": "keep", "train.optimizer.lr": 1e-6, "run.warm_up": "false",
    "data.heldout_size": 0, "checkpoint.every_steps": 0, "checkpoint.export": "false"}  # the peer does not evaluate either


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: 8 in flight, two steps, once")
    parser.add_argument("--model", type=Path, default=ROOT / ".models" / "smollm2-135m-instruct")
    parser.add_argument("--parts", nargs="+", choices=("engine", "step"), default=["engine", "step"])
    parser.add_argument("--in-flight", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--threads", type=int, default=1, help="of our engine in the part `engine` (default: 1)")
    parser.add_argument("--steps", type=int, default=6, help="steps that count, per turn (default: 6)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; the median counts (default: 3)")
    parser.add_argument("--peer-threads", type=int, default=os.cpu_count() or 1, help="CPU threads of TRL (default: all)")
    parser.add_argument("--vllm-python", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    parser.add_argument("--trl-python", type=Path, default=ROOT / ".venv-trl" / "bin" / "python")
    args = parser.parse_args()
    if not (args.model / "config.json").exists():
        parser.error(f"there is no model in {args.model}; give a folder by --model")
    if args.quick:
        args.in_flight, args.steps, args.repeats = [8], 2, 1
    if "engine" in args.parts:
        compare_engines(args)
    if "step" in args.parts:
        compare_steps(args)


# -- engines ---------------------------------------------------------------------------------------------------------------------------


def compare_engines(args: argparse.Namespace) -> None:
    """Tokens per second of all sides in both formats. Both sides in one format are loaded at a time: two cores hold no four models."""
    threads = library_environment(args.threads)
    vocab_size = read_model_config(str(args.model))["vocab_size"]
    medians: dict[tuple[str, ...], dict[str, float]] = {}  # by side, format and load
    for dtype in DTYPES:
        forms = [dtype, "int8"] if dtype == "float32" else [dtype]
        sides = [
            Contestant(
                f"offbeat-{form}", [sys.executable, BENCHMARKS / "engine_ours.py", "inprocess", args.model, form],
                env=threads | huge_page_environment())
            for form in forms]
        if args.vllm_python.exists():
            command = [args.vllm_python, BENCHMARKS / "engine_vllm.py", args.model, dtype]
            sides.append(Contestant(f"vllm-{dtype}", command, env=threads | VLLM_ALONE))
        else:
            note(f"there is no {args.vllm_python}, so vLLM does not take part")
        with contest(sides) as contestants:
            for in_flight in args.in_flight:
                times = time_generation(
                    contestants, max(in_flight, 2 if in_flight == 1 else 8), vocab_size=vocab_size, in_flight=in_flight,
                    repeats=args.repeats, what=f"{in_flight} in flight,")
                medians |= {(*name.split("-"), str(in_flight)): figures for name, figures in times.items()}
            times = take_turns(
                {name: partial(time_groups, each, vocab_size) for name, each in contestants.items()}, repeats=args.repeats, what="groups,")
            medians |= {(*name.split("-"), "groups"): figures for name, figures in times.items()}
    for load in (*map(str, args.in_flight), "groups"):
        for unit in ("tokens/s", "tokens/CPU-s"):
            of = {(side, form): figures[unit] for (side, form, its_load), figures in medians.items() if its_load == load}
            emit("real", f"engine/{load}, int8 vs float32", ours=of["offbeat", "int8"], peer=of["offbeat", "float32"], unit=unit)
            if ("offbeat", "bfloat16") in of:
                ours = {dtype: of["offbeat", dtype] for dtype in DTYPES}
                emit("real", f"engine/{load}, bfloat16 vs float32", ours=ours["bfloat16"], peer=ours["float32"], unit=unit)
            if ("vllm", "float32") in of:
                for dtype in DTYPES:
                    emit("real", f"engine/{load} in {dtype} vs vLLM", ours=of["offbeat", dtype], peer=of["vllm", dtype], unit=unit)
                emit("real", f"engine/{load} in int8 vs vLLM in float32", ours=of["offbeat", "int8"], peer=of["vllm", "float32"], unit=unit)
                best = {side: max(of[side, dtype] for dtype in DTYPES) for side in ("offbeat", "vllm")}
                emit("real", f"engine/{load} vs vLLM, better format of each", ours=best["offbeat"], peer=best["vllm"], unit=unit,
                     aim=ENGINE_AIMS.get(load) if unit == "tokens/s" else None)


def time_groups(contestant: Contestant, vocab_size: int, turn: int) -> dict[str, float]:
    """8 prompts of 64 tokens, with 8 samples of 64 tokens each."""
    rng = np.random.default_rng([turn, 7])
    prompts = [rng.integers(3, vocab_size, 64).tolist() for _ in range(8)]
    time.sleep(SETTLE_S)
    answer = contestant.ask({"do": "generate", "prompts": prompts, "length": 64, "n": 8})
    tokens = sum(len(sample) for samples in answer.values["samples"] for sample in samples)
    assert tokens == 8 * 8 * 64, f"{contestant.name} generated {tokens} tokens"
    return {"tokens/s": tokens / answer.values["wall_s"], "tokens/CPU-s": tokens / answer.cpu_s}


# -- a training step ---------------------------------------------------------------------------------------------------------------------


def compare_steps(args: argparse.Namespace) -> None:
    """Seconds of a step, as a whole and of its training alone."""
    if not args.trl_python.exists():
        note(f"there is no {args.trl_python}, so TRL does not take part and the part `step` is left out")
        return
    shutil.rmtree(RUNS, ignore_errors=True)
    RUNS.mkdir(parents=True)
    sides = {f"offbeat {dtype}": partial(run_offbeat, args, dtype) for dtype in DTYPES}
    results = take_turns(sides | {"trl": partial(run_trl, args)}, repeats=args.repeats, what=f"{args.steps} steps,")
    peer = results["trl"]
    for dtype in DTYPES:
        ours, engine = results[f"offbeat {dtype}"], f"engine in {dtype}"
        emit("real", f"trainer step vs TRL, {engine}", ours=ours["train_s"], peer=peer["train_s"], unit="s/step", aim=TRAINER_AIM,
             less_is_better=True)
        emit_steps("real", f"whole step vs TRL, {engine}", ours, peer, aim=STEP_AIM)
        for part in PARTS:
            emit("real", f"share of our step: {part}, {engine}", ours=ours[part], peer=ours["s/step"], unit="s/step")


def settings(args: argparse.Namespace, turn: int) -> dict[str, object]:
    return SETTINGS | {
        "model.path": args.model.resolve(), "run.seed": turn, "run.total_steps": args.steps + 2, "train.threads": args.peer_threads,
        "inference.threads": 1, "rollout.reward": f"{BENCHMARKS / 'varied_reward.py'}:varied"}


def run_offbeat(args: argparse.Namespace, dtype: str, turn: int) -> dict[str, float]:
    """`offbeat train` with an engine of this number format: a step that fills the pipeline, those that count, and one that ends the run."""
    name = f"offbeat-{dtype}-{turn}"
    chosen = settings(args, turn) | {
        "model.dtype": dtype, "run.dir": RUNS, "run.name": name, "weights.dir": f"/dev/shm/offbeat-real-{os.getpid()}"}
    config = RUNS / "empty.toml"
    config.write_text("")
    try:
        overrides = [part for key, value in chosen.items() for part in (f"--{key}", value)]
        done = run([sys.executable, "-m", "offbeat", "train", config, *overrides], log=f"real-{name}", threads=1)
    finally:
        shutil.rmtree(str(chosen["weights.dir"]), ignore_errors=True)
    rows = [json.loads(line) for line in (RUNS / name / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "step/total_s" in row][1:-1]
    figures = our_steps(done, RUNS / name, count=args.steps + 2)
    return figures | {part: mean(row[f"step/{part}"] for row in rows) for part in PARTS}


def run_trl(args: argparse.Namespace, turn: int) -> dict[str, float]:
    """The same with TRL."""
    config = load_config(None, [(key, str(value)) for key, value in settings(args, turn).items()])
    prompts, output, optimizer = RUNS / f"prompts-{turn}.jsonl", RUNS / f"trl-{turn}", config.train.optimizer
    write_prompts(prompts, config, count=config.run.total_steps * config.rollout.consumer_batch_size)
    job = {
        "model": str(args.model), "prompts": str(prompts), "output": str(output), "steps": config.run.total_steps, "seed": turn,
        "lr": optimizer.lr, "min_lr": optimizer.lr * optimizer.min_lr_ratio, "warmup_steps": 0, "beta2": optimizer.beta2,
        "group_size": config.rollout.group_size, "max_new_tokens": config.rollout.max_new_tokens, "reward": "varied"}
    command = [args.trl_python, BENCHMARKS / "trl_step.py", json.dumps(job)]
    done = run(command, log=f"real-trl-{turn}", threads=args.peer_threads)
    answer = json.loads(done.stdout)
    figures = step_figures(done, answer["begins_s"][1:])
    return figures | {"train_s": figures["s/step"] - mean(answer["generation_s"][1:-1])}


if __name__ == "__main__":
    main()
