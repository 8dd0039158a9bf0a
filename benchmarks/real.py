"""A real pretrained model on a CPU: the embedded engine against vLLM, and a training step against TRL's GRPOTrainer.

    python benchmarks/real.py [--quick] [--model .models/smollm2-135m-instruct] [--parts engine step] [--in-flight 1 8 64] [--steps 6]

engine: all sides are processes that are ready before the first measurement and take turns on the same ragged requests, as in `engine.py`,
each in float32 and in bfloat16. Ours runs on --threads threads; vLLM as it comes, its worker bound to one core of two. The aim is for the
better format of each side at 64 in flight.

step: GRPO on prompts of the task `addition`, 4 with 4 samples each of at most 48 new tokens, under a reward that differs from sample to
sample, since a group without a difference costs us nothing; one AdamW update per step, both from the same folder, trained in float32. TRL
runs in one process on --peer-threads threads. Ours is asynchronous: a train process of as many threads, and an engine process of one that
shares the cores with it, in float32 as TRL's and in bfloat16. `trainer step` is what is not generation: our `step/train_s`, and TRL's step
without generating and scoring its completions.

vLLM takes part where `.venv-vllm` has it, TRL where `.venv-trl` has it; see `engine.py` and `step.py`.
"""

import argparse
import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from statistics import mean

from measure import BENCHMARKS, ROOT, WORK, Contestant, contest, emit, note, take_turns
from step import run, write_prompts

from engine import time_generation
from offbeat.config.load import load_config
from offbeat.data.model_folder import read_model_config
from offbeat.workers.worker import library_environment

RUNS = WORK / "real"
DTYPES = ("float32", "bfloat16")
PARTS = ("rollout_wait_s", "train_s", "publish_s")
ENGINE_AIM, TRAINER_AIM, STEP_AIM = 0.9, 1.5, 1.9
SETTINGS = {
    "data.task": "addition", "rollout.group_size": 4, "rollout.consumer_batch_size": 4, "rollout.max_new_tokens": 48,
    "rollout.max_head_offpolicyness": 1, "weights.interrupt": "keep", "train.optimizer.lr": 1e-6, "run.warm_up": "false",
    "evaluate.every_steps": 0, "checkpoint.every_steps": 0, "checkpoint.export": "false"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: 8 in flight, two steps, once")
    parser.add_argument("--model", type=Path, default=ROOT / ".models" / "smollm2-135m-instruct")
    parser.add_argument("--parts", nargs="+", choices=("engine", "step"), default=["engine", "step"])
    parser.add_argument("--in-flight", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--threads", type=int, default=1, help="of our engine in the part `engine` (default: 1)")
    parser.add_argument("--steps", type=int, default=6, help="steps that count, per turn (default: 6)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of the engines; the median counts (default: 3)")
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
    """Tokens per second of all sides in both formats. One contestant at a time is loaded: two cores hold no six models."""
    own = {"OMP_NUM_THREADS": "", "OMP_WAIT_POLICY": "", "VLLM_LOGGING_LEVEL": "WARNING"}  # vLLM chooses its threads and policy
    ours = library_environment(args.threads)
    vocab_size = read_model_config(str(args.model))["vocab_size"]
    medians: dict[tuple[str, str, int], dict[str, float]] = {}
    for dtype in DTYPES:
        sides = [Contestant(f"offbeat-{dtype}", [sys.executable, BENCHMARKS / "engine_ours.py", "inprocess", args.model, dtype], env=ours)]
        if args.vllm_python.exists():
            sides.append(Contestant(f"vllm-{dtype}", [args.vllm_python, BENCHMARKS / "engine_vllm.py", args.model, dtype], env=own))
        else:
            note(f"there is no {args.vllm_python}, so vLLM does not take part")
        with contest(sides) as contestants:
            for in_flight in args.in_flight:
                times = time_generation(
                    contestants, max(in_flight, 2 if in_flight == 1 else 8), vocab_size=vocab_size, in_flight=in_flight,
                    repeats=args.repeats, what=f"{in_flight} in flight,")
                for name, figures in times.items():
                    medians[name.partition("-")[0], dtype, in_flight] = figures
    for in_flight in args.in_flight:
        for unit in ("tokens/s", "tokens/CPU-s"):
            best = {}
            for side in ("offbeat", "vllm"):
                found = {dtype: medians[side, dtype, in_flight][unit] for dtype in DTYPES if (side, dtype, in_flight) in medians}
                best[side] = max(found.values(), default=float("nan"))
                for dtype, value in found.items():
                    emit("real", f"{side} {dtype}/{in_flight} vs offbeat float32", ours=value,
                         peer=medians["offbeat", "float32", in_flight][unit], unit=unit)
            aim = ENGINE_AIM if in_flight == 64 and unit == "tokens/s" else None
            if best["vllm"] == best["vllm"]:
                case = f"engine/{in_flight} vs vLLM, better format of each"
                emit("real", case, ours=best["offbeat"], peer=best["vllm"], unit=unit, aim=aim)


# -- a training step ---------------------------------------------------------------------------------------------------------------------


def compare_steps(args: argparse.Namespace) -> None:
    """Seconds of a step, as a whole and of its training alone."""
    if not args.trl_python.exists():
        note(f"there is no {args.trl_python}, so TRL does not take part and the part `step` is left out")
        return
    shutil.rmtree(RUNS, ignore_errors=True)
    RUNS.mkdir(parents=True)
    sides = {f"offbeat {dtype}": partial(run_offbeat, args, dtype) for dtype in DTYPES}
    results = take_turns(sides | {"trl": partial(run_trl, args)}, repeats=1, what=f"{args.steps} steps,")
    peer = results["trl"]
    for dtype in DTYPES:
        ours, engine = results[f"offbeat {dtype}"], f"engine in {dtype}"
        for case, unit, aim in (("trainer step", "train_s", TRAINER_AIM), ("whole step", "s/step", STEP_AIM)):
            emit("real", f"{case} vs TRL, {engine}", ours=ours[unit], peer=peer[unit], unit="s/step", aim=aim, less_is_better=True)
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
        run([sys.executable, "-m", "offbeat", "train", config, *overrides], log=f"real-{name}", threads=1)
    finally:
        shutil.rmtree(str(chosen["weights.dir"]), ignore_errors=True)
    rows = [json.loads(line) for line in (RUNS / name / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "step/total_s" in row][1:-1]
    return {"s/step": mean(row["step/total_s"] for row in rows), **{part: mean(row[f"step/{part}"] for row in rows) for part in PARTS}}


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
    answer = json.loads(run(command, log=f"real-trl-{turn}", threads=args.peer_threads))
    seconds = mean(answer["seconds"][1:])
    return {"s/step": seconds, "train_s": seconds - mean(answer["generation_s"][1:])}


if __name__ == "__main__":
    main()
