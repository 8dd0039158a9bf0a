"""A representative part of `make faults`, and a guard that no point is forgotten there."""

import ast
import shutil
from pathlib import Path

import pytest

from faults.drill import Chain
from faults.points import OTHER_PLACES, OTHER_POINTS, PLACES, POINTS, TENANT_POINTS, Drill
from small_run import SmallRun

SOURCE = Path(__file__).parents[2] / "src" / "offbeat"
METHODS = {
    "arrive", "barrier", "sum_scalars", "max_scalars", "gather", "broadcast", "scatter", "region", "lead", "meet", "all_ready", "_on_all"}
BY_NAME = {point.name: point for point in (*POINTS, *PLACES)}


def test_every_sync_point_of_the_source_is_drilled() -> None:
    names = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS and node.args:
                names |= _text(node.args[0])
            for point in (word.value for word in node.keywords if word.arg == "point"):  # statistics reduce at two points
                names |= {f"{name}_{part}" for name in _text(point) for part in ("maxima", "sums")}
    assert names == {point.name for point in POINTS} | set(OTHER_POINTS) | set(TENANT_POINTS)


def test_every_place_inside_of_the_source_is_drilled() -> None:
    calls = [node for path in SOURCE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    names = [_text(call.args[0]) for call in calls if isinstance(call.func, ast.Name) and call.func.id == "progress"]
    assert set().union(*names) == {place.name for place in PLACES} | set(OTHER_PLACES)


def _text(node: ast.expr) -> set[str]:
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()


@pytest.mark.parametrize(("mode", "drills"), [
    pytest.param("spmd", [(1, "train_step", "kill"), (1, "backward", "hang"), (1, "evaluate", "stop")], marks=pytest.mark.whole_run),
    pytest.param(
        "local", [(1, "save_recover", "slow"), (1, "publish", "mismatch"), (0, "backward", "stop"), (0, "train_step", "kill")],
        marks=pytest.mark.drill),
    pytest.param("ray", [(1, "train_step", "exception")], marks=pytest.mark.ray),
])
def test_a_rank_that_misbehaves_is_named_and_the_run_resumes(
    mode: str, drills: list[tuple[int, str, str]], tmp_path: Path, finished_run: SmallRun, monkeypatch: pytest.MonkeyPatch,
) -> None:
    # On a machine that may be busy; `make faults` measures how soon they are named.
    for name, seconds in (("SYNC_TIMEOUT_S", 4.0), ("ANSWER_TIMEOUT_S", 10.0), ("WRITE_TIMEOUT_S", 10.0), ("GRACE_S", 30.0),
            ("_COMMAND_TIMEOUT_S", 150.0)):
        monkeypatch.setattr(f"faults.drill.{name}", seconds)
    shutil.copytree(finished_run.folder, tmp_path / finished_run.folder.name)
    chain = Chain(tmp_path, finished_run.model, mode=mode)
    outcomes = [outcome for rank, point, kind in drills for outcome in chain.strike(Drill(mode, rank, BY_NAME[point], kind))]
    assert [problem for outcome in (*outcomes, *chain.pending) for problem in outcome.problems] == []
    assert all(outcome.resumed for outcome in outcomes) and len(outcomes) == len(drills) - 1
