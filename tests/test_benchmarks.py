"""Benchmarks that need nothing but this package: their smoke runs say all of their figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("kind", ["embedded", "vllm"])
def test_the_controllers_benchmark_plays_its_groups_and_prints_one_line(kind: str) -> None:
    command = [sys.executable, str(BENCHMARKS / "controller.py"), "--quick", "--kind", kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    figures = json.loads(done.stdout)
    assert (figures["benchmark"], figures["kind"], figures["groups"], figures["batch_samples"]) == ("controller", kind, 24, 64)
    assert figures["tokens"] > 24 * 8 * 32 and figures["us_per_token"] > 0 and figures["batch_cpu_s"] > 0
    assert {"longest_callback_ms", "longest_late_ms", "rss_growth_mb"} <= figures.keys()


@pytest.mark.drill
def test_the_benchmark_of_publishing_to_many_engines_says_its_ratios() -> None:
    command = [sys.executable, str(BENCHMARKS / "publish_fleet.py"), "--quick", "--engines", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    many, cpu, beside, idle = map(json.loads, done.stdout.splitlines())
    assert many["case"] == "publish to 16 engines vs 4" and many["aim"] == pytest.approx(1 / 1.2) and cpu["ours"] > 0
    assert beside["ours"] < beside["peer"] and idle["ours"] < idle["peer"], "a slow engine held up the others"


@pytest.mark.drill
def test_compiled_blocks_are_counted_with_the_same_products_and_fewer_bytes() -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu" / "counts.py"), "--models", "tiny", "--tokens", "2048"]
    done = subprocess.run([*command, "--variants", "bf16", "bf16, compiled"], capture_output=True, text=True, timeout=240, check=True)
    plain, compiled = map(json.loads, done.stdout.splitlines())
    assert plain["launches"] / 3 < compiled["launches"] < plain["launches"] * 3 / 4
    assert compiled["bytes_moved"] < 0.7 * plain["bytes_moved"] and compiled["activation_bytes"] is None
    moved, seconds = (plain[name] - compiled[name] for name in ("bytes_moved", "roofline_s"))
    assert seconds == pytest.approx(moved / 3.35e12, rel=0.1), "what a compiled block saves is memory's time"
    assert compiled["roofline_mfu"] * compiled["roofline_s"] == pytest.approx(plain["roofline_mfu"] * plain["roofline_s"])
