"""The package as `pip install .` leaves it in an environment that has what it depends on, and nothing else: no torch, no transformers."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def with_dependencies(requirements: Iterable[str]) -> set[str]:
    """The names of these distributions and of all that they need."""
    found: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        wanted = waiting.pop()
        key = wanted.name, frozenset(wanted.extras)
        if key in found:
            continue
        found.add(key)
        for text in distribution(wanted.name).requires or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in {"", *wanted.extras}):
                waiting.append(needed)
    return {re.sub("[-_.]+", "-", name).lower() for name, _ in found}


def make_environment(folder: Path) -> str:
    """Make an environment with the package and its plain dependencies; return where its programs are."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    run(*PIP, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, source, cwd=folder)
    (wheel,) = folder.glob("offbeat-*.whl")
    environment = folder / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    run(*PIP, "--python", environment, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    (packages,) = (environment / "lib").glob("python*/site-packages")
    for name in with_dependencies(PROJECT["dependencies"]):
        there = distribution(name)
        for top in {file.parts[0] for file in there.files or ()} - {"..", "__pycache__"}:
            (packages / top).symlink_to(Path(str(there.locate_file(top))))
    return str(environment / "bin")


def run(*command: object, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(cwd)}
    return subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=check)


@pytest.fixture(scope="module")
def programs(make_once) -> Path:
    return Path(make_once("installed", make_environment))


def test_what_is_installed_starts_in_any_folder_and_says_its_version(programs: Path, tmp_path: Path) -> None:
    assert run(programs / "offbeat", "--version", cwd=tmp_path).stdout == f"offbeat {PROJECT['version']}\n"
    listed = run(programs / "offbeat", "--help", cwd=tmp_path).stdout
    assert "train with reinforcement learning" in listed and "write a run's report" in listed


def test_there_is_nothing_large_in_it(programs: Path, tmp_path: Path) -> None:
    names = ["torch", "transformers", "tokenizers", "safetensors", "sqlalchemy", "prometheus_client"]
    code = f"import importlib.util; print([name for name in {names} if importlib.util.find_spec(name)])"
    assert run(programs / "python", "-c", code, cwd=tmp_path).stdout == "[]\n"


def test_configurations_are_checked_and_runs_are_read_without_torch(programs: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[data]\ntask = "sort_digits"\n')
    checked = run(programs / "offbeat", "config", "check", "run.toml", cwd=tmp_path)
    assert checked.stdout.startswith("run.toml is valid")
    assert "data, rewards and workflow were not tried, which needs torch, " in checked.stdout
    (tmp_path / "past").mkdir()
    (tmp_path / "past" / "metrics.jsonl").write_text(json.dumps({"global_step": 1, "reward/mean": 0.5}) + "\n")
    assert run(programs / "offbeat", "report", "past", cwd=tmp_path).stdout == "past/report.html\n"
    assert "<html" in (tmp_path / "past" / "report.html").read_text()


@pytest.mark.parametrize("words", [
    "quickstart", "train run.toml", "sft run.toml", "dpo run.toml", "reward-model run.toml", "eval run.toml", "engine --model m",
    "serve --model m", "launch slurm run.toml"])
def test_a_command_that_trains_or_serves_says_in_one_sentence_what_is_missing(programs: Path, tmp_path: Path, words: str) -> None:
    done = run(programs / "offbeat", *words.split(), cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"offbeat: {words.split()[0]} needs torch, transformers, tokenizers, safetensors, sqlalchemy, prometheus_client and"
        " math_verify, which are not installed; run pip install 'offbeat[train]'\n")


def test_parts_of_checks_that_need_torch_say_so_too(programs: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[data]\ntask = "sort_digits"\n[model]\npath = "m"\n')
    done = run(programs / "offbeat", "config", "check", "run.toml", "--memory", cwd=tmp_path, check=False)
    assert done.returncode == 2 and "offbeat: config check --memory needs torch, " in done.stderr
    checks = json.loads(run(programs / "offbeat", "doctor", "--json", cwd=tmp_path, check=False).stdout)
    (torch,) = (check for check in checks if check["name"] == "torch")
    assert torch["status"] == "fail" and "pip install 'offbeat[train]'" in torch["advice"]


def test_images_install_what_trains() -> None:
    for path in (ROOT / "deploy").glob("Dockerfile*"):
        assert '".[train,' in path.read_text(), path.name
