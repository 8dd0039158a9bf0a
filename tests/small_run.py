"""The smallest run that has every part: one layer, three digits to sort, two groups of two samples per step.

Tests of whole runs use it.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from offbeat.config.load import load_config
from offbeat.config.model import TinyConfig
from offbeat.config.root import Config
from offbeat.data.tokenizer import character_tokenizer
from offbeat.model.tiny import build_tiny
from offbeat.telemetry.jsonl import read_json_lines

TINY = TinyConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64, max_positions=64)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
REWARDS = Path(__file__).parent / "support" / "rewards.py"
SETTINGS = {
    "run.name": "small", "run.total_steps": "2", "data.task": "sort_digits", "data.task_size": "3", "data.heldout_size": "4",
    "rollout.group_size": "2", "rollout.consumer_batch_size": "2", "rollout.max_concurrent_rollouts": "4", "rollout.max_new_tokens": "5",
    "rollout.reward": f"{REWARDS}:random_looking", "train.optimizer.lr": "1e-3", "evaluate.every_steps": "0",
    "telemetry.rollouts_every_steps": "1", "cluster.stop_timeout_s": "3",
    "train.threads": "1", "inference.threads": "1",  # the same numbers on every machine
}


def build_small_model(folder: Path, *, seed: int) -> str:
    """Write a model and its tokenizer into `folder`."""
    tokenizer = character_tokenizer()
    tokenizer.save(folder)
    build_tiny(
        folder, tiny=TINY, vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        seed=seed)
    return str(folder)


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """The groups of one file."""
    with zstandard.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def small_config(root: Path, model: str = "", **changes: str) -> Config:
    """The small run below `root`; `changes` are settings with "__" for the point."""
    settings = SETTINGS | {"run.dir": str(root), "model.path": model} | {name.replace("__", "."): value for name, value in changes.items()}
    return load_config(None, list(settings.items()))


@dataclass
class SmallRun:
    """A run folder, and what its command printed."""

    root: Path
    model: str
    done: subprocess.CompletedProcess[str] | None = None

    @property
    def folder(self) -> Path:
        return self.root / SETTINGS["run.name"]

    def metrics(self) -> list[dict[str, Any]]:
        """Rows of steps, without the evaluation before them."""
        return [row for row in read_json_lines(self.folder / "metrics.jsonl") if row["global_step"]]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Events of one kind."""
        return [event for event in read_json_lines(self.folder / "events.jsonl") if event["kind"] == kind]

    def groups(self, step: int) -> list[dict[str, Any]]:
        """What a step trained on."""
        return read_rollouts(self.folder / "rollouts" / f"step-{step:06d}.jsonl.zst")

    def arguments(self, **changes: str) -> list[str]:
        """CONFIG and overrides."""
        path = self.root / "empty.toml"
        path.touch()
        settings = SETTINGS | {"run.dir": str(self.root), "model.path": self.model}
        settings |= {name.replace("__", "."): value for name, value in changes.items()}
        return [str(path), *(word for name, value in settings.items() for word in (f"--{name}", value))]


def offbeat(*arguments: str, timeout_s: float = 200) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "offbeat", *arguments], capture_output=True, text=True, timeout=timeout_s, check=False,
        env=os.environ | ENVIRONMENT)


def start_offbeat(*arguments: str) -> subprocess.Popen[str]:
    """Run the command beside the test, in a process group of its own, as a terminal does."""
    return subprocess.Popen(
        [sys.executable, "-m", "offbeat", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | ENVIRONMENT, process_group=0)


def start_torchrun(*arguments: str, world: int, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Run the command in SPMD mode beside the test, on a free port."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "-m", "offbeat", *arguments,
         "--run.mode", "spmd"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | ENVIRONMENT | (env or {}))


def torchrun(*arguments: str, world: int, env: dict[str, str] | None = None, timeout_s: float = 200) -> subprocess.CompletedProcess[str]:
    """Run the command in SPMD mode to its end."""
    with start_torchrun(*arguments, world=world, env=env) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
