"""A made-up run folder of plausible shape, written through the same telemetry that a real run uses."""

import math
import random
import time
from pathlib import Path

from offbeat.config.dump import dump_toml
from offbeat.config.load import load_config
from offbeat.telemetry.events import EventLog
from offbeat.telemetry.sinks import JsonLinesSink
from offbeat.telemetry.stats import StatsLogger
from offbeat.telemetry.trace import Tracer


def write_synthetic_run(run_dir: Path, *, num_steps: int = 60, num_engines: int = 2, num_ranks: int = 2) -> None:
    """Steps of about 0.8 s in which engines generate while the trainer trains, with a pause at each publish."""
    rng = random.Random(0)
    run_dir.mkdir(parents=True)
    settings = {
        "run.name": run_dir.name,
        "run.total_steps": str(num_steps),
        "data.task": "sort_digits",
        "rollout.max_head_offpolicyness": "2",
        "inference.num_engines": str(num_engines),
        "train.num_ranks": str(num_ranks),
    }
    (run_dir / "config.toml").write_text(dump_toml(load_config(None, list(settings.items()))))
    stats = StatsLogger([JsonLinesSink(run_dir / "metrics.jsonl")])
    events = EventLog(run_dir / "events.jsonl")
    tracer = Tracer(run_dir / "trace.json")
    stats.commit(0, 0, 0, {"eval/accuracy": 0.35})
    now = time.time() - num_steps
    for step in range(1, num_steps + 1):
        learned = 1 / (1 + math.exp(-(step - num_steps / 3) / (num_steps / 9)))
        wait = 0.5 if step == 1 else rng.uniform(0.02, 0.16)
        train, publish = rng.uniform(0.36, 0.46), rng.uniform(0.07, 0.11)
        begin = now
        for name, seconds in (("rollout", wait), ("score", 0.04), ("advantage", 0.004), ("train", train), ("publish", publish)):
            tracer.add(name, "controller", now, now + seconds, {"step": step})
            if name == "train":
                for rank in range(num_ranks):
                    tracer.add("train_step", f"rank {rank}", now + 0.01, now + seconds - rng.uniform(0.005, 0.03), {"step": step})
            now += seconds
        events.record("publish", version=step, engines=num_engines, seconds=publish)
        for engine in range(num_engines):
            cut = now - rng.uniform(0.02, 0.05)
            tracer.add("generate", f"engine {engine}", begin + rng.uniform(0.0, 0.02), cut - rng.uniform(0, 0.08), {"version": step - 1})
        row = {
            "reward/mean": 0.2 + 0.65 * learned + rng.gauss(0, 0.03),
            "rollout/staleness_mean_versions": min(2.0, 0.3 * step) * rng.uniform(0.55, 0.75),
            "rollout/staleness_max_versions": min(step - 1, 2),
            "rollout/generated_tokens": 9000 + rng.randint(-500, 500),
            "policy/logprob_gap_mean": 2e-5 * math.exp(rng.gauss(0, 0.3)),
            "policy/logprob_gap_max": 1e-3 * math.exp(rng.gauss(0, 0.5)),
            "policy/canary_gap": 1e-7 * math.exp(rng.gauss(0, 0.5)),
            "throughput/generated_tokens_per_s": 14000 + rng.gauss(0, 700),
            "throughput/trained_tokens_per_s": 11500 + rng.gauss(0, 500),
            "train/loss": -0.01 * learned + rng.gauss(0, 0.006),
            "train/grad_norm": 0.9 * math.exp(-step / num_steps) * math.exp(rng.gauss(0, 0.15)),
            "train/entropy": 1.4 - 1.1 * learned + rng.gauss(0, 0.02),
            "train/lr": 1e-4 * min(1, step / 6),
        }
        if step % 10 == 0:
            tracer.add("evaluate", "controller", now, now + 0.35, {"step": step})
            for engine in range(num_engines):
                tracer.add("generate", f"engine {engine}", now, now + 0.33)
            now += 0.35
            row["eval/accuracy"] = 0.35 + 0.55 * learned
        row |= {"step/total_s": now - begin, "step/rollout_wait_s": wait, "step/train_s": train, "step/publish_s": publish}
        stats.commit(0, step, step, row)
        if step == num_steps // 2:
            events.record("quarantine", engine="engine 1", reason="canary log-probability off by 0.02")
    tracer.close()
    stats.close()
    events.close()
