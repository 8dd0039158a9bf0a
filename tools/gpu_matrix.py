#!/usr/bin/env python3
"""Checks private interfaces with several versions of torch, each in an environment of its own, and writes the table in docs/gpu.md.

    python tools/gpu_matrix.py [VERSION ...]

`make gpu-matrix` runs it. An environment takes several GB in build/matrix; one that is complete is not made again, so an interrupted run
goes on where it stopped. On Linux, PyPI's torch is built for CUDA, and can be imported without a driver. `===` leaves out builds for
CPUs, whose versions end in "+cpu".
"""

import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
_FOLDER = _ROOT / "build" / "matrix"
_PAGE, _RESULTS = _ROOT / "docs" / "gpu.md", _ROOT / "docs" / "gpu-interfaces.json"
_BEGIN, _END = "<!-- begin: interfaces -->", "<!-- end: interfaces -->"
VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1")
"""Of torch: the oldest that pyproject.toml allows, and the last patch of each later line."""


def main(versions: Sequence[str]) -> int:
    """Check the versions, and put what was found beside what is known of others; returns 1 if an interface does not fit."""
    failed = False
    for version in versions or VERSIONS:
        python = _environment(version)
        _say(f"torch {version}: checking")
        schemas = _answer(python, "operator_schemas.py", "--packages", "torch", "transformers", "--json")
        private = _answer(python, "private_interfaces.py", "--json")
        differ = [f"`{each['name']}` ({each['place']}): {each['fault']}" for each in schemas["faults"]]
        differ += [f"`{each['name']}` ({each['file']}): {text}" for each in private["interfaces"] for text in each["differences"]]
        known = json.loads(_RESULTS.read_text()) if _RESULTS.exists() else {}
        known[version] = {
            "versions": private["versions"], "uses": schemas["uses"], "attributes": len(private["interfaces"]), "differ": differ}
        _say(f"torch {version}: {len(differ)} of {schemas['uses'] + len(private['interfaces'])} differ")
        _RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
        _PAGE.write_text(with_table(_PAGE.read_text(), known))
        failed |= bool(differ)
    return int(failed)


def with_table(page: str, known: dict[str, Any]) -> str:
    """Return the page with a table of what was found in place of the one that it has."""
    before, _, rest = page.partition(f"{_BEGIN}\n")
    rows = [_row(known[version]) for version in sorted(known, key=lambda text: [int(part) for part in text.split(".")])]
    head = "| torch | transformers | Python | uses of names | private attributes | what differs |"
    table = "\n".join([head, "|---|---|---|---|---|---|", *rows])
    return f"{before}{_BEGIN}\n{table}\n{_END}{rest.partition(_END)[2]}"


def _row(found: dict[str, Any]) -> str:
    versions, differ = found["versions"], "; ".join(found["differ"]).replace("|", "/") or "nothing"
    return (
        f"| {versions['torch build']} | {versions['transformers']} | {versions['python']} | {found['uses']} | {found['attributes']}"
        f" | {differ} |")


def _answer(python: Path, tool: str, *arguments: str) -> Any:
    """Run a tool with a Python, and return what it prints as JSON."""
    done = subprocess.run(
        [python, "-W", "ignore", _ROOT / "tools" / tool, *arguments], capture_output=True, text=True, timeout=900, check=False)
    if not done.stdout:
        raise SystemExit(f"{tool} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def _environment(version: str) -> Path:
    """Return the Python of an environment with that version of torch, which is made if it is not complete."""
    folder = _FOLDER / version
    python, complete = folder / "bin" / "python", folder / ".installed"
    if complete.exists():
        return python
    began = time.monotonic()
    _say(f"torch {version}: installing into {folder.relative_to(_ROOT)}")
    constraints = _FOLDER / "constraints.txt"
    folder.mkdir(parents=True, exist_ok=True)
    pins = (_ROOT / "constraints.txt").read_text().splitlines()
    constraints.write_text("\n".join(line for line in pins if not line.startswith("torch==")) + "\n")
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    wanted = [each for each in project["optional-dependencies"]["train"] if not each.startswith("torch")]
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([
        python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", "--cache-dir", _FOLDER / "pip",
        "-c", constraints, f"torch==={version}", *project["dependencies"], *wanted], check=True)
    complete.touch()
    _say(f"torch {version}: installed in {time.monotonic() - began:.0f} s")
    return python


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
