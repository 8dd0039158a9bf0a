"""Files that only hosts and tools read: they parse, agree with the package, and run what exists."""

import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
YAML = [".pre-commit-config.yaml", "CITATION.cff", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / ".github").rglob("*.yml")))]


@pytest.mark.parametrize("name", YAML)
def test_a_file_is_yaml_with_something_in_it(name: str) -> None:
    assert isinstance(yaml.safe_load((ROOT / name).read_text(encoding="utf-8")), dict)


def test_the_citation_has_the_version_and_the_licence_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])


def test_the_workflow_runs_what_continuous_integration_runs_here() -> None:
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]["run"]
    script = ROOT / ".ci" / "run"
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert script.stat().st_mode & 0o111, ".ci/run must be executable"


def test_hooks_before_a_commit_fetch_nothing_and_name_files_that_exist() -> None:
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]
    words = [word for repo in repos for hook in repo["hooks"] for word in hook["entry"].split()]
    assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))


def test_a_bug_form_asks_for_what_a_maintainer_needs() -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text(encoding="utf-8"))
    needed = {field["id"] for field in form["body"] if field.get("validations", {}).get("required")}
    assert needed == {"what", "command", "doctor"}
