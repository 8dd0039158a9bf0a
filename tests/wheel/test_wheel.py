"""The wheel as a newcomer gets it: built, checked, and installed with its own dependencies in an empty environment outside the clone.

    make test-wheel

What is installed comes from pip's index, in the versions of constraints.txt.
"""

import ast
import email
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
# The first start compiles what was installed without bytecode, in several processes at once.
_PATIENT = ("--cluster.start_timeout_s", "600", "--inference.start_timeout_s", "600")


def run(*command: object, cwd: Path, timeout: float = 900) -> str:
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=_ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout,
        check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}"
    return done.stdout


def environment(folder: Path) -> Path:
    """Make an empty environment, and return where its programs are."""
    run(sys.executable, "-m", "venv", folder, cwd=ROOT)
    return folder / "bin"


def install(programs: Path, *what: object) -> None:
    run(programs / "python", "-m", "pip", "install", "--quiet", "--no-compile", "-c", ROOT / "constraints.txt", *what, cwd=programs)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the source distribution, which twine has found to be in order: those of the folder OFFBEAT_DIST, or new ones."""
    folder = tmp_path_factory.mktemp("dist")
    programs = environment(folder / "tools")
    install(programs, "build", "twine")
    if given := os.environ.get("OFFBEAT_DIST"):
        folder = Path(given)
    else:
        run(programs / "python", "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    [wheel], [source] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    assert run(programs / "twine", "check", "--strict", wheel, source, cwd=folder).count("PASSED") == 2
    return wheel, source


@pytest.fixture(scope="module")
def programs(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Programs of an empty environment with the wheel and what it needs at least."""
    folder = tmp_path_factory.mktemp("elsewhere")
    made = environment(folder / "environment")
    install(made, built[0])
    yield made


def test_the_wheel_holds_the_package_alone_and_describes_itself_without_links_that_lead_nowhere(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        names = wheel.namelist()
        (described,) = (name for name in names if name.endswith("/METADATA"))
        metadata = email.message_from_bytes(wheel.read(described))
    assert {name.split("/")[0] for name in names} == {"offbeat", described.split("/")[0]}
    held = {str(Path(name)) for name in names}
    package = ROOT / "src" / "offbeat"
    wanted = {path for path in package.rglob("*") if path.suffix in {".py", ".html", ".css", ".js", ".toml", ".typed"}}
    assert {str(path.relative_to(ROOT / "src")) for path in wanted} <= held
    assert {f"offbeat/pages/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= held
    text = str(metadata.get_payload())
    assert text.startswith("# Offbeat") and metadata["Description-Content-Type"] == "text/markdown"
    assert [link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith(("#", "https://"))] == []


def test_what_trains_is_asked_for_in_a_sentence_and_then_learns_from_the_wheel_alone(programs: Path, tmp_path: Path, built) -> None:
    offbeat = programs / "offbeat"
    assert run(offbeat, "--version", cwd=tmp_path).startswith("offbeat ")
    assert run(offbeat, "docs", "debugging", cwd=tmp_path) == (ROOT / "docs" / "debugging.md").read_text()
    assert "task.toml is valid" in run(offbeat, "init", "mine", cwd=tmp_path) + run(
        offbeat, "config", "check", "task.toml", cwd=tmp_path / "mine")
    missing = subprocess.run([offbeat, "quickstart"], cwd=tmp_path, env=_ENVIRONMENT, capture_output=True, text=True, check=False)
    assert missing.returncode == 2 and missing.stderr.endswith("run pip install 'offbeat[train]'\n")
    install(programs, f"{built[0]}[train]")
    assert re.search(r"^held-out accuracy: 0\.\d+ before, 0\.\d+ after", run(offbeat, "quickstart", *_PATIENT, cwd=tmp_path), re.MULTILINE)
    assert (tmp_path / "runs" / "quickstart" / "report.html").stat().st_size > 10_000
    words = ["--data", "mine/data.jsonl", "--reward", "mine/reward.py:digits_in_place", "--model", "runs/quickstart/export"]
    assert "training steps                              1\n" in run(
        offbeat, "train", *words, "--name", "own", "--run.total_steps", "1", "--rollout.max_new_tokens", "10", *_PATIENT, cwd=tmp_path)
    told = "import offbeat; run = offbeat.Run('runs/own'); print([offbeat.__version__, run.steps, bool(run.model)])"
    assert ast.literal_eval(run(programs / "python", "-c", told, cwd=tmp_path))[1:] == [1, True]
