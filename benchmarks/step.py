"""A whole GRPO step: Offbeat's, asynchronous through its real processes, against TRL's GRPOTrainer.

Both start from one checkpoint (a supervised warm-up on sorting 8 digits, made once by `offbeat sft`), draw the same prompts in the same
order, 64 per step with 8 samples each of at most 10 new tokens, reward an exact match, and take one AdamW update per step with the same
learning rates, no KL term. Ours is the quick start's configuration: a train process and an engine process that share the cores, one
version of staleness. TRL runs in one process, on --peer-threads threads. The sides take turns, each turn in fresh processes.

Figures: seconds per step, from the first step on, without start-up and evaluation, and without the last step, which also saves the model;
then held-out accuracy after the steps, both measured by `offbeat eval`.

    python benchmarks/step.py [--quick] [--steps 20] [--repeats 2] [--peer-threads 2]

TRL's environment is `.venv-trl`, or --trl-python:
    python -m venv .venv-trl
    .venv-trl/bin/pip install torch==2.13.0 trl==1.16.0 transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0 psutil
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from measure import BENCHMARKS, ROOT, WORK, emit, note, take_turns

from offbeat.config.load import load_config
from offbeat.config.root import Config
from offbeat.data.dataset import open_datasets
from offbeat.data.stream import PromptStream

AIM = 1.9
CONFIG = ROOT / "src" / "offbeat" / "cli" / "quickstart.toml"
START = WORK / "sort-digits-sft" / "export"
RUNS = WORK / "step"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: 5 steps, once")
    parser.add_argument("--steps", type=int, default=20, help="steps that count, per turn (default: 20)")
    parser.add_argument("--repeats", type=int, default=2, help="turns of each side; the median counts (default: 2)")
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
    emit("step", "GRPO, sort 8 digits, 64 x 8 samples, vs TRL", ours=ours["s/step"], peer=peer["s/step"], unit="s/step", aim=AIM,
         less_is_better=True)
    emit("step", f"held-out accuracy after {steps + 1} steps, vs TRL", ours=ours["accuracy"], peer=peer["accuracy"], unit="accuracy")


def warm_up() -> None:
    """Make the checkpoint from which both sides start, unless it is there."""
    if not START.exists():
        note("supervised warm-up, once")
        offbeat("sft", "--run.dir", WORK, "--run.name", START.parent.name)


def run_offbeat(turn: int, *, steps: int) -> dict[str, float]:
    """`offbeat train` for `steps` steps and one that saves."""
    name = f"offbeat-{turn}"
    offbeat(
        "train", "--run.dir", RUNS, "--run.name", name, "--run.warm_up", "false", "--run.total_steps", steps + 1, "--run.seed", turn,
        "--model.path", START, "--evaluate.every_steps", 0)
    rows = [json.loads(line) for line in (RUNS / name / "metrics.jsonl").read_text().splitlines()]
    seconds = [row["step/total_s"] for row in rows if "step/total_s" in row]
    assert len(seconds) == steps + 1, f"{name} made {len(seconds)} steps instead of {steps + 1}"
    return {"s/step": mean(seconds[:-1]), "accuracy": accuracy(RUNS / name / "export")}


def run_trl(turn: int, *, steps: int, python: Path, threads: int) -> dict[str, float]:
    """The same with TRL."""
    config = load_config(str(CONFIG), [("run.seed", str(turn))])
    prompts, output, optimizer = RUNS / f"prompts-{turn}.jsonl", RUNS / f"trl-{turn}", config.train.optimizer
    write_prompts(prompts, config, count=(steps + 1) * config.rollout.consumer_batch_size)
    job = {
        "model": str(START), "prompts": str(prompts), "output": str(output), "steps": steps + 1, "seed": turn, "lr": optimizer.lr,
        "min_lr": optimizer.lr * optimizer.min_lr_ratio, "warmup_steps": optimizer.warmup_steps, "beta2": optimizer.beta2,
        "group_size": config.rollout.group_size, "max_new_tokens": config.rollout.max_new_tokens, "reward": "exact_match"}
    answer = run([python, BENCHMARKS / "trl_step.py", json.dumps(job)], log=f"trl-{turn}", threads=threads)
    return {"s/step": mean(json.loads(answer)["seconds"]), "accuracy": accuracy(output)}


def write_prompts(path: Path, config: Config, *, count: int) -> None:
    """The prompts that our run draws, in order."""
    train, _ = open_datasets(config.data, seed=config.run.seed)
    stream = PromptStream(train, seed=config.run.seed, shuffle=config.data.shuffle)
    rows = [stream.next()[1] for _ in range(count)]
    path.write_text("".join(json.dumps({"prompt": row.prompt, "answer": row.answer}) + "\n" for row in rows))


def accuracy(model: Path) -> float:
    """Held-out accuracy of a model's folder; the held-out prompts are those of seed 0."""
    answer = offbeat("eval", "--run.dir", RUNS, "--model.path", model, "--model.tokenizer", START, "--json")
    return json.loads(answer.splitlines()[-1])["eval/accuracy"]


def offbeat(command: str, *overrides: object) -> str:
    return run([sys.executable, "-m", "offbeat", command, CONFIG, *overrides], log=f"offbeat-{command}", threads=1)


def run(command: Sequence[object], *, log: str, threads: int) -> str:
    """A command's stdout.

    Raises:
        RuntimeError: it failed; names its log.
    """
    path = WORK / f"step-{log}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    env: Mapping[str, str] = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    with path.open("w") as stderr:
        done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, stderr=stderr, text=True, env=os.environ | env)
    if done.returncode:
        raise RuntimeError(f"{Path(str(command[0])).name} {log} failed with exit code {done.returncode}; see {path}")
    return done.stdout


if __name__ == "__main__":
    main()
