"""Every configuration under examples/ is valid, and those that say they are runnable run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Qwen3Config

from memory_tables import MODELS, engine_weights
from offbeat.config.load import load_config
from offbeat.runs.memory import rank_memory
from offbeat.runs.slurm import SlurmJob, slurm_script
from offbeat.runs.threads import choose_threads, usable_cores
from offbeat.trainer.memory import estimate_memory
from small_run import build_small_model

_ROOT = Path(__file__).parents[1]
_EXAMPLES = sorted((_ROOT / "examples").glob("**/*.toml"))
_ON_GPUS = {"one": 1, "qwen3_1_7b_1": 1, "qwen3_8b_8": 8, "qwen3_32b_64": 64}
_RUNNABLE = [path for path in _EXAMPLES if "# runnable: two steps of this file are part of the tests" in path.read_text(encoding="utf-8")]
_SMALL = {
    "run.total_steps": 2, "sft.total_steps": 2, "sft.batch_size": 8, "rollout.consumer_batch_size": 4, "rollout.group_size": 2,
    "rollout.max_new_tokens": 6, "evaluate.num_prompts": 4, "checkpoint.export": "false",
}


@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_a_valid_configuration(path: Path) -> None:
    assert load_config(str(path)).run.name == path.stem


@pytest.mark.parametrize(("name", "gpus"), _ON_GPUS.items())
def test_an_example_for_gpus_takes_as_many_as_it_is_for(name: str, gpus: int) -> None:
    config = load_config(str(_ROOT / "examples" / "gpu" / f"{name}.toml"))
    ranks, engines = config.train.num_ranks, config.inference.num_engines * config.inference.devices_per_engine
    assert config.train.devices_per_rank == 1
    assert (max(ranks, engines) if config.cluster.share_devices else ranks + engines) == gpus
    shape = MODELS[config.model.path.removeprefix("Qwen/")]
    held = rank_memory(
        shape, tokens=config.train.max_tokens_per_microbatch, num_shards=config.train.parallel.shard,
        mixed=config.train.computes_in == "bf16_mixed", checkpointing=config.train.recomputes == "full").total
    room = 80e9 * (0.6 if config.cluster.share_devices else 1)
    assert held < 0.85 * room, f"{held / 1e9:.0f} GB leave too little of {room / 1e9:.0f}"
    assert engine_weights(shape, num_devices=config.inference.devices_per_engine) < 0.8 * 0.9 * 80e9
    job = slurm_script(config, Path("run.toml"), SlurmJob())
    assert f"#SBATCH --nodes={-(-gpus // 8)}\n" in job


def test_the_table_of_one_gpu_is_what_fake_tensors_count() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (_ROOT / "docs/scaling.md").read_text().splitlines()
            if line.startswith(("| 0.6B |", "| 1.7B |"))]
    assert len(rows) == 6
    shapes = {"0.6B": (1024, 3072), "1.7B": (2048, 6144)}
    for size, trained, options, stated, *rooms in rows:
        hidden, inner = shapes[size]
        shape = Qwen3Config(
            vocab_size=151_936, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, tie_word_embeddings=True)
        given = [("model.lora.rank", "0")] * (trained == "all weights")
        if "offload" in options:
            given += [("train.offload_optimizer", "true"), ("train.max_tokens_per_microbatch", "4096")]
        config = load_config(str(_ROOT / "examples/gpu/one.toml"), given)
        needed = estimate_memory(shape, config.for_ranks, num_ranks=1).total
        assert round(needed / 2**30, 1) == float(stated)
        assert rooms == ["yes" if needed <= 0.92 * 0.6 * card else "no" for card in (24e9, 40e9, 80e9)]


def test_there_are_examples_that_run() -> None:
    assert len(_RUNNABLE) >= 2


@pytest.mark.parametrize("path", [
    pytest.param(path, marks=() if path.stem == "sort_digits" else pytest.mark.whole_run, id=path.stem) for path in _RUNNABLE])
def test_two_steps_of_an_example_run(path: Path, tmp_path: Path) -> None:
    overrides = [word for key, value in {**_SMALL, "run.dir": tmp_path}.items() for word in (f"--{key}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "offbeat", "train", str(path), "--json", *overrides],
        cwd=_ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / path.stem
    result = json.loads((run_dir / "result.json").read_text())
    assert result["steps"] == result["warm_up_steps"] == 2
    assert result["max_staleness_seen"] <= 1
    assert (run_dir / "report.html").is_file()
    recorded, given = load_config(str(run_dir / "config.toml")), load_config(str(path))
    chosen = choose_threads(given.for_plan, cores=usable_cores())
    assert (recorded.train.threads, recorded.inference.threads) == (chosen.train.threads, chosen.inference.threads)
    told = f"CPU threads: {chosen.train.threads} for each train rank, {chosen.inference.threads} for each engine" in done.stdout
    assert told == (chosen != given.for_plan)


@pytest.mark.whole_run
def test_two_steps_of_the_reward_model_run_on_pairs_of_its_script(tmp_path: Path) -> None:
    model, pairs = build_small_model(tmp_path / "model", seed=0), tmp_path / "pairs.jsonl"
    settings = {
        "model.path": model, "data.path": pairs, "data.heldout_size": 8, "reward_model.total_steps": 2, "reward_model.batch_size": 8,
        "run.dir": tmp_path}
    for command in (
            ["examples/sort_digits_pairs.py", model, str(pairs), "--count", "64"],
            ["-m", "offbeat", "reward-model", "examples/reward_model.toml", *(f"--{key}={value}" for key, value in settings.items())]):
        done = subprocess.run(
            [sys.executable, *command], cwd=_ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200,
            check=False)
        assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    assert all(row["chosen"] == "".join(sorted(row["prompt"][:3])) != row["rejected"] for row in rows)
    assert json.loads((tmp_path / "reward_model" / "result.json").read_text())["steps"] == 2
    assert (tmp_path / "reward_model" / "export" / "model.safetensors").is_file()


@pytest.mark.whole_run
def test_the_loop_to_change_trains_and_evaluates(tmp_path: Path) -> None:
    model = build_small_model(tmp_path / "model", seed=0)
    done = subprocess.run(
        [sys.executable, str(_ROOT / "examples" / "loop.py"), "--model", model, "--steps", "20"], cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["accuracy before", "step 20/20", "accuracy after"]
