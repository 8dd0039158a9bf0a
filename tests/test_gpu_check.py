"""`make gpu-check`, rehearsed on the CPU, and the page that it writes."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offbeat.sync.platform import current_platform

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPT = BENCHMARKS / "gpu" / "check.py"

SIDE = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from measure import answer_jobs, claim_stdout
answer_jobs(claim_stdout(), lambda job: {{"seconds": [9.0] + [0.5] * (job["steps"] - 1), "peak_bytes": 7, "grad_norm": %s}})
"""


@pytest.fixture
def load(monkeypatch):
    """Imports a module as the script does."""
    for folder in (BENCHMARKS, SCRIPT.parent):
        monkeypatch.syspath_prepend(folder)
    return importlib.import_module


def call(*arguments):
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def rehearse(folder, *parts):
    """Run parts on the CPU; returns their results."""
    out = folder / "gpu.json"
    done = call("--rehearse", "--out", str(out), "--parts", *parts)
    assert done.returncode == 0, done.stderr + out.read_text()
    found = json.loads(out.read_text())
    assert found["device"] == "CPU, a rehearsal"
    assert list(found["parts"]) == list(parts)
    return {name: part["result"] for name, part in found["parts"].items()}


def sides(folder, **scripts):
    """Write scripts; returns their commands by name."""
    for name, script in scripts.items():
        (folder / f"{name}.py").write_text(script)
    return {name: [sys.executable, str(folder / f"{name}.py")] for name in scripts}


@pytest.mark.drill
def test_its_parts_run_on_the_cpu_at_tiny_shapes(tmp_path):
    rehearse(tmp_path, "attention", "head", "adapters", "collectives")


@pytest.mark.whole_run
def test_its_parts_of_several_processes_run_on_the_cpu(tmp_path):
    results = rehearse(tmp_path, "publishing", "steps")
    assert all(results["publishing"][f"{way}_gb_per_s"] > 0 for way in ("handle", "file", "broadcast"))
    steps = results["steps"]
    assert steps["tokens"] < steps["padded_tokens"] and steps["trl"] == "not installed"
    assert all(steps[f"{side}_s"] > 0 and steps[f"{side}_peak_bytes"] > 0 for side in ("offbeat", "plain"))


@pytest.fixture
def publish_here(load, monkeypatch):
    """The module of the part `publishing`, with the engine in this process."""
    publishing, engine, measure = load("publishing"), load("publishing_engine"), load("measure")

    class Here:
        def __init__(self, *_command, **_settings):
            self._engine = engine.Engine(torch.device("cpu"))

        def ask(self, job, **_limit):
            return measure.Answer(self._engine.answer(json.loads(json.dumps(job))), 0.0)

        def close(self):
            pass

    monkeypatch.setattr(publishing, "Contestant", Here)
    return publishing


def test_weights_arrive_through_a_handle_a_file_and_a_broadcast(publish_here):
    found = publish_here.publishing(torch.device("cpu"))
    assert found["bytes"] == 362_112
    assert {name for name in found if name.endswith("_gb_per_s")} == {"handle_gb_per_s", "file_gb_per_s", "broadcast_gb_per_s"}


def test_weights_that_do_not_arrive_as_they_were_sent_fail_the_part(publish_here, monkeypatch):
    monkeypatch.setattr(publish_here, "by_file", lambda _weights, _ask: 1.0)
    with pytest.raises(RuntimeError, match="version 0 by file has the fingerprint"):
        publish_here.publishing(torch.device("cpu"))


def test_a_side_that_fails_is_reported_beside_the_others(load, tmp_path):
    commands = sides(tmp_path, offbeat=SIDE % 1.0, plain="raise MemoryError('no room')", trl=SIDE % 1.0005)
    found = load("steps").take_turns(commands, tmp_path, torch.device("cpu"))
    assert found.pop("plain").endswith("MemoryError: no room")
    assert found == {
        "offbeat_s": 0.5, "offbeat_peak_bytes": 7, "offbeat_grad_norm": 1.0, "trl_s": 0.5, "trl_peak_bytes": 7, "trl_grad_norm": 1.0005}


def test_sides_that_compute_other_gradients_fail_the_part(load, tmp_path):
    with pytest.raises(RuntimeError, match="the sides do not train alike"):
        load("steps").take_turns(sides(tmp_path, offbeat=SIDE % 1.0, plain=SIDE % 1.5), tmp_path, torch.device("cpu"))


def test_a_contestant_that_does_not_answer_in_time_is_killed(load, tmp_path):
    command = sides(tmp_path, silent="import sys; sys.stdin.readline(); sys.stdin.readline()")["silent"]
    silent = load("measure").Contestant("silent", command, env={})
    with pytest.raises(RuntimeError, match="silent ended with exit code -9"):
        silent.ask({}, limit_s=0.1)
    silent.close()


def test_a_part_that_fails_is_reported(load):
    check = load("check")
    found = check.guarded(lambda: 1 / 0)
    assert found["error"] == "ZeroDivisionError: division by zero"
    assert check.guarded(lambda: {"a": 1})["result"] == {"a": 1}


PARTS = """
import json, os, sys, time
for name in sys.argv[sys.argv.index("--parts") + 1:]:
    if name == "hangs":
        time.sleep(600)
    if name == "dies":
        os.abort()
    print(json.dumps({name: {"result": len(sys.argv)}}), flush=True)
"""


def test_a_part_that_hangs_or_dies_is_reported_and_hides_no_other(load, tmp_path):
    script = tmp_path / "parts.py"
    script.write_text(PARTS)
    names = ["first", "hangs", "second", "dies", "third"]
    found = dict(load("check").in_turn([sys.executable, str(script)], names, limit_s=10))
    assert list(found) == ["first", "hangs", "second", "dies", "third"]
    assert [found[name]["result"] for name in ("first", "second", "third")] == [7, 5, 3]
    assert found["hangs"] == {"error": "took longer than 10 s"} and found["dies"] == {"error": "ended its process with exit code -6"}


def test_what_is_missing_or_too_old_is_what_pyproject_asks_for(load):
    needed, pyproject = load("check").needed, (BENCHMARKS.parent / "pyproject.toml").read_text()
    everything = needed(pyproject, lambda _: None)
    assert {"zstandard>=0.23", "cloudpickle>=3.1", "transformers>=5.23"} <= set(everything)
    assert not any("torch" in requirement for requirement in everything)
    assert needed(pyproject, load("check").installed) == []
    there = {"transformers": "5.17.0", "numpy": "2.0", "zstandard": "0.23.0rc1", "pydantic": "2.9.2"}
    found = needed(pyproject, lambda name: there.get(name, "9999.0.1+cu130"))
    assert found == ["pydantic>=2.10", "transformers>=5.23"]


def test_without_a_gpu_it_says_so():
    if not current_platform.is_cpu:
        pytest.skip("there is a GPU")
    done = call()
    assert done.returncode == 2
    assert done.stderr == "gpu-check needs a GPU that torch can use, and found none; --rehearse rehearses it on the CPU\n"


def test_an_interpreter_for_trl_that_is_not_there_is_refused():
    done = call("--trl-python", "/nowhere/python")
    assert done.returncode == 2
    assert done.stderr.endswith(
        "--trl-python must be the Python of an environment that has TRL, and there is no /nowhere/python\n")


def test_the_page_is_what_its_program_writes(load, tmp_path, monkeypatch):
    page = load("page")
    text = (BENCHMARKS.parent / "docs" / "gpu.md").read_text()
    (tmp_path / "gpu.md").write_text(text)
    monkeypatch.setattr(page, "_DOCS", tmp_path)
    page.main([])
    assert (tmp_path / "gpu.md").read_text() == text
