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


def test_the_benchmark_of_publishing_to_many_engines_says_its_ratios() -> None:
    command = [sys.executable, str(BENCHMARKS / "publish_fleet.py"), "--quick", "--engines", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    many, cpu, beside, idle = map(json.loads, done.stdout.splitlines())
    assert many["case"] == "publish to 16 engines vs 4" and many["aim"] == pytest.approx(1 / 1.2) and cpu["ours"] > 0
    assert beside["ours"] < beside["peer"] and idle["ours"] < idle["peer"], "a slow engine held up the others"
