"""Versions: the changelog is cut by them, and continuous integration lists the tests that needed a second run."""

import datetime
import os
import runpy
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RELEASE = runpy.run_path(str(ROOT / "tools" / "release.py"))
CHANGES = "# Changelog\n\n## Unreleased\n\n### Added\n\n- a thing\n\n## 0.1.0 (2026-01-02)\n\n### Added\n\n- the first\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "CHANGELOG.md").write_text(CHANGES)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "offbeat"\nversion = "0.1.0"\nother = "0.1.0"\n')
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 0.1.0\n")
    return tmp_path


def test_what_is_unreleased_becomes_a_version_in_every_file_that_names_it(tree: Path) -> None:
    RELEASE["cut"]("0.2.0", root=tree, today=datetime.date(2026, 3, 4))
    assert (tree / "CHANGELOG.md").read_text() == CHANGES.replace("## Unreleased\n", "## Unreleased\n\n## 0.2.0 (2026-03-04)\n")
    assert (tree / "pyproject.toml").read_text() == '[project]\nname = "offbeat"\nversion = "0.2.0"\nother = "0.1.0"\n'
    assert (tree / "CITATION.cff").read_text() == "cff-version: 1.2.0\nversion: 0.2.0\n"
    RELEASE["check"]("0.2.0", root=tree)
    assert RELEASE["notes"]("0.2.0", root=tree) == "### Added\n\n- a thing\n"
    assert RELEASE["notes"]("0.1.0", root=tree) == "### Added\n\n- the first\n"


@pytest.mark.parametrize(("do", "version", "why"), [
    ("cut", "0.1.0", "has a section of 0.1.0 already"), ("check", "0.2.0", "pyproject.toml names 0.1.0, not 0.2.0"),
    ("notes", "0.3.0", "has no section of 0.3.0")])
def test_what_cannot_be_a_release_is_refused_in_a_sentence(do: str, version: str, why: str, tree: Path) -> None:
    with pytest.raises(SystemExit, match=why):
        RELEASE[do](version, root=tree, **({"today": datetime.date(2026, 3, 4)} if do == "cut" else {}))
    assert (tree / "CHANGELOG.md").read_text() == CHANGES


def test_a_changelog_with_nothing_unreleased_is_not_cut(tree: Path) -> None:
    RELEASE["cut"]("0.2.0", root=tree, today=datetime.date(2026, 3, 4))
    with pytest.raises(SystemExit, match="nothing under"):
        RELEASE["cut"]("0.3.0", root=tree, today=datetime.date(2026, 3, 4))


def test_the_package_claims_the_versions_of_python_and_the_systems_that_its_tests_run_on() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    workflows = "".join(path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml"))
    claimed = [name.removeprefix("Programming Language :: Python :: ") for name in project["classifiers"] if "Python :: 3." in name]
    assert claimed and all(f'python-version: "{version}"' in workflows for version in claimed)
    assert [name for name in project["classifiers"] if name.startswith("Operating System")] == ["Operating System :: POSIX :: Linux"]


@pytest.mark.parametrize(("fails_again", "code"), [("", 0), ("yes", 2)])
def test_tests_that_needed_a_second_run_are_listed_at_the_end(fails_again: str, code: int, tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    cache = tmp_path / ".pytest_cache" / "v" / "cache"
    cache.mkdir(parents=True)
    (cache / "lastfailed").write_text('{\n  "tests/a/test_b.py::test_c[x-1]": true,\n  "tests/a/test_b.py::test_d": true\n}')
    again = 2 if fails_again else 0
    programs = {tmp_path / "bin" / "make": f'case "$PYTEST_ADDOPTS $1" in " test") exit 2;; *last-failed*) exit {again};; esac',
                tmp_path / ".venv" / "bin" / "python": "exit 0"}
    for path, text in programs.items():
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTEST_ADDOPTS": ""}
    done = subprocess.run([tmp_path / ".ci" / "run"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    listed = "" if fails_again else "tests/a/test_b.py::test_c[x-1]\ntests/a/test_b.py::test_d\n"
    assert (tmp_path / "build" / "second-runs.txt").read_text() == listed
    assert done.stdout.endswith(f"--- tests that needed a second run, also in build/second-runs.txt ---\n{listed}") or fails_again
