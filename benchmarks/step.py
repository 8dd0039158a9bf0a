"""A whole GRPO step: Offbeat's, asynchronous through its real processes, against TRL's GRPOTrainer.

Both start from one checkpoint (a supervised warm-up on sorting 8 digits, made once by `offbeat sft`), draw the same prompts in the same
order, 64 per step with 8 samples each of at most 10 new tokens, reward an exact match, and take one AdamW update per step with the same
learning rates, no KL term. Ours is the quick start's configuration: a train process and an engine process that share the cores, one
version of staleness. TRL runs in one process, on --peer-threads threads. The sides take turns, each turn in fresh processes.

Figures: seconds and CPU seconds per step of all processes, from the end of the first step on, without start-up and evaluation, and without
the last step, which also saves the model; the most memory of all processes; seconds from the command to the end of the first step; then
held-out accuracy after the steps, both measured by `offbeat eval`.

    python benchmarks/step.py [--quick] [--steps 20] [--repeats 3] [--peer-threads 2]

TRL's environment is `.venv-trl`, or --trl-python:
    python -m venv .venv-trl
    .venv-trl/bin/pip install torch==2.13.0 trl==1.16.0 transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0 psutil
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from measure import BENCHMARKS, ROOT, WORK, emit, note, take_turns
from trees import TreeRun, run_tree

from offbeat.config.load import load_config
from offbeat.config.root import Config
from offbeat.data.dataset import open_datasets
from offbeat.data.stream import PromptStream

AIM = 2.7
CONFIG = ROOT / "src" / "offbeat" / "cli" / "quickstart.toml"
START = WORK / "sort-digits-sft" / "export"
RUNS = WORK / "step"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: 5 steps, once")
    parser.add_argument("--steps", type=int, default=20, help="steps that count, per turn (default: 20)")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each side; the median counts (default: 3)")
    parser.add_argument("--peer-threads", type=int, default=os.cpu_count() or 1, help="CPU threads of TRL (default: all)")
    parser.add_argument("--trl-python", type=Path, default=ROOT / ".venv-trl" / "bin" / "python")
    args = parser.parse_args()
    steps, repeats = (5, 1) if args.quick else (args.steps, args.repeats)
    if not args.trl_python.exists():
        parser.error(f"there is no {args.trl_python}; see the top of this file for how to make TRL's environment")
    warm_up()
    shutil.rmtree(RUNS, ignore_errors=True)
    RUNS.mkdir(parents=True)
    results = take_turns(
        {
            "offbeat": lambda turn: run_offbeat(turn, steps=steps),
            "trl": lambda turn: run_trl(turn, steps=steps, python=args.trl_python, threads=args.peer_threads),
        },
        repeats=repeats, what=f"{steps} steps,")
    ours, peer = results["offbeat"], results["trl"]
    emit_steps("step", "GRPO, sort 8 digits, 64 x 8 samples, vs TRL", ours, peer, aim=AIM)
    emit("step", f"held-out accuracy after {steps + 1} steps, vs TRL", ours=ours["accuracy"], peer=peer["accuracy"], unit="accuracy")


def emit_steps(benchmark: str, case: str, ours: Mapping[str, float], peer: Mapping[str, float], *, aim: float | None) -> None:
    """Print the figures of `our_steps` and `trl_steps`."""
    for unit in ("s/step", "CPU-s/step", "GB", "s to step 1"):
        emit(benchmark, case, ours=ours[unit], peer=peer[unit], unit=unit, aim=aim if unit == "s/step" else None, less_is_better=True)


def warm_up() -> None:
    """Make the checkpoint from which both sides start, unless it is there."""
    if not START.exists():
        note("supervised warm-up, once")
        offbeat("sft", "--run.dir", WORK, "--run.name", START.parent.name)


def run_offbeat(turn: int, *, steps: int) -> dict[str, float]:
    """`offbeat train` for `steps` steps and one that saves."""
    name = f"offbeat-{turn}"
    run = offbeat(
        "train", "--run.dir", RUNS, "--run.name", name, "--run.warm_up", "false", "--run.total_steps", steps + 1, "--run.seed", turn,
        "--model.path", START, "--evaluate.every_steps", 0)
    return our_steps(run, RUNS / name, count=steps + 1) | {"accuracy": accuracy(RUNS / name / "export")}


def our_steps(run: TreeRun, folder: Path, *, count: int) -> dict[str, float]:
    """Figures of a run of `count` steps, of those between the first and the last."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ends = [row["time_s"] for row in rows if "step/total_s" in row]
    assert len(ends) == count, f"{folder.name} made {len(ends)} steps instead of {count}"
    return step_figures(run, ends[:-1])


def step_figures(run: TreeRun, ends: Sequence[float]) -> dict[str, float]:
    """Figures of the steps after the first one; `ends` are the wall-clock times at which steps ended."""
    counted = len(ends) - 1
    return {
        "s/step": (ends[-1] - ends[0]) / counted, "CPU-s/step": run.cpu_between(ends[0], ends[-1]) / counted,
        "GB": run.peak_bytes / 1e9, "s to step 1": ends[0] - run.began_s}


def run_trl(turn: int, *, steps: int, python: Path, threads: int) -> dict[str, float]:
    """The same with TRL."""
    config = load_config(str(CONFIG), [("run.seed", str(turn))])
    prompts, output, optimizer = RUNS / f"prompts-{turn}.jsonl", RUNS / f"trl-{turn}", config.train.optimizer
    write_prompts(prompts, config, count=(steps + 1) * config.rollout.consumer_batch_size)
    job = {
        "model": str(START), "prompts": str(prompts), "output": str(output), "steps": steps + 1, "seed": turn, "lr": optimizer.lr,
        "min_lr": optimizer.lr * optimizer.min_lr_ratio, "warmup_steps": optimizer.warmup_steps, "beta2": optimizer.beta2,
        "group_size": config.rollout.group_size, "max_new_tokens": config.rollout.max_new_tokens, "reward": "exact_match"}
    done = run([python, BENCHMARKS / "trl_step.py", json.dumps(job)], log=f"trl-{turn}", threads=threads)
    return step_figures(done, json.loads(done.stdout)["begins_s"][1:]) | {"accuracy": accuracy(output)}


def write_prompts(path: Path, config: Config, *, count: int) -> None:
    """The prompts that our run draws, in order."""
    train, _ = open_datasets(config.data, seed=config.run.seed)
    stream = PromptStream(train, seed=config.run.seed, shuffle=config.data.shuffle)
    rows = [stream.next()[1] for _ in range(count)]
    path.write_text("".join(json.dumps({"prompt": row.prompt, "answer": row.answer}) + "\n" for row in rows))


def accuracy(model: Path) -> float:
    """Held-out accuracy of a model's folder; the held-out prompts are those of seed 0."""
    answer = offbeat("eval", "--run.dir", RUNS, "--model.path", model, "--model.tokenizer", START, "--json").stdout
    return json.loads(answer.splitlines()[-1])["eval/accuracy"]


def offbeat(command: str, *overrides: object) -> TreeRun:
    return run([sys.executable, "-m", "offbeat", command, CONFIG, *overrides], log=f"offbeat-{command}", threads=1)


def run(command: Sequence[object], *, log: str, threads: int) -> TreeRun:
    """Run a command with this number of threads per process; see `run_tree`."""
    return run_tree(command, log=WORK / f"step-{log}.log", env={"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"})


if __name__ == "__main__":
    main()
