"""A part of `check.py`: a training step of Offbeat beside one of a plain torch loop, and one of TRL where that is installed.

All train the same model on the same samples: policy gradients with the mean reward of a group as its baseline, AdamW, clipping. Sides are
processes that take turns, so that each has the device to itself meanwhile, and its own peak of memory. A side that fails is reported as
such, and the others go on. Their first gradients must have the same norm.
"""

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from counts import model_config
from measure import SOURCES, Answer, Contestant
from transformers import AutoModelForCausalLM

from offbeat.data.tokenizer import character_tokenizer
from offbeat.workers.worker import library_environment

HERE = Path(__file__).parent
ROUNDS = 3
STEPS = 3
"""Steps of a turn, of which the first one is not counted: memory is mapped in it."""
READY_S, TURN_S = 120.0, 60.0
NORMS_DIFFER = {"cpu": 1e-3, "cuda": 0.1}
"""Most that first gradients differ in their norms, as a share of them, in float32 and in bfloat16."""


def step_times(device: torch.device, trl_python: str) -> dict[str, Any]:
    """Return seconds per step and peak memory of each side.

    Raises:
        RuntimeError: Offbeat's side failed, or a side computes another gradient.
    """
    with TemporaryDirectory() as folder:
        work = make_work(Path(folder), device)
        commands = {"offbeat": [sys.executable, "steps_ours.py"], "plain": [sys.executable, "steps_plain.py"]}
        found: dict[str, Any] = {name: work[name] for name in ("tokens", "padded_tokens")}
        if has_trl(trl_python):
            commands["trl"] = [trl_python, "steps_trl.py"]
        else:
            found["trl"] = "not installed"
        return found | take_turns(commands, Path(folder) / "work.json", device)


def has_trl(python: str) -> bool:
    """Return whether that interpreter finds TRL."""
    code = "import sys; from importlib.util import find_spec; sys.exit(find_spec('trl') is None)"
    return subprocess.run([python, "-c", code], check=False, timeout=READY_S).returncode == 0


def take_turns(commands: dict[str, list[str]], work: Path, device: torch.device) -> dict[str, Any]:
    """Start all sides, and let them train in turns; returns what is to be told of each."""
    on_cpu = library_environment(1) | {"CUDA_VISIBLE_DEVICES": ""} if device.type == "cpu" else {}
    env = {"PYTHONPATH": SOURCES, "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"} | on_cpu
    sides = {
        name: Contestant(f"gpu-steps-{name}", [python, HERE / script, work], env=env) for name, (python, script) in commands.items()}
    failed: dict[str, str] = {}

    def ask(name: str, job: dict[str, Any], limit_s: float) -> dict[str, Any] | None:
        if name in failed:
            return None
        try:
            answer: Answer = sides[name].ask(job, limit_s=limit_s)
        except RuntimeError as exc:
            if name == "offbeat":
                raise
            failed[name] = f"failed: {exc}"
            return None
        return answer.values

    try:
        for name in sides:
            ask(name, {"do": "ready"}, READY_S)
        norms = {name: told["grad_norm"] for name in sides if (told := ask(name, {"steps": 1}, TURN_S))}
        turns = [(name, ask(name, {"steps": STEPS}, TURN_S)) for _ in range(ROUNDS) for name in sides]
    finally:
        for side in sides.values():
            side.close()
    check_norms(norms, most=NORMS_DIFFER[device.type])
    found: dict[str, Any] = dict(failed)
    for name in [name for name in sides if name not in failed]:
        own = [told for other, told in turns if other == name and told is not None]
        found[f"{name}_s"] = median(seconds for told in own for seconds in told["seconds"][1:])
        found[f"{name}_peak_bytes"] = max(told["peak_bytes"] for told in own)
        found[f"{name}_grad_norm"] = norms[name]
    return found


def check_norms(norms: dict[str, float], *, most: float) -> None:
    """Check that all sides have computed a gradient of the norm that Offbeat's has."""
    ours = norms["offbeat"]
    if not all(abs(norm - ours) <= most * ours for norm in norms.values()):
        raise RuntimeError(f"the sides do not train alike: the norms of their first gradients are {norms}")


def make_work(folder: Path, device: torch.device) -> dict[str, Any]:
    """Write a random model, and samples in groups of 8 of skewed lengths, half of which are right; returns what `work.json` holds."""
    tiny = device.type == "cpu"
    config, rng, group_size, rows = model_config("tiny" if tiny else "0.6B"), np.random.default_rng(0), 8, 8
    num_groups, prompt, middle, longest = (2, 16, 3.0, 48) if tiny else (8, 256, 5.8, 1024)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    character_tokenizer().save(folder / "model")
    del model
    if not tiny:
        torch.cuda.empty_cache()
    lengths = rng.lognormal(middle, 0.6, (num_groups, group_size)).astype(int).clip(8, longest)
    work = {
        "model": str(folder / "model"), "output": str(folder / "output"), "device": device.type, "rows": rows,
        "max_tokens": 256 if tiny else 8192, "lr": 1e-6, "beta2": 0.95,
        "prompts": rng.integers(5, config.vocab_size, (num_groups, prompt)).tolist(),
        "answers": [[rng.integers(5, config.vocab_size, length).tolist() for length in row] for row in lengths.tolist()],
        "rewards": [[float(place % 2) for place in range(group_size)]] * num_groups,
        "tokens": int((prompt + lengths).sum()), "padded_tokens": int((prompt + lengths.max(axis=1)).sum() * group_size)}
    (folder / "work.json").write_text(json.dumps(work))
    return work
