"""Notebooks run as they are written in a real Jupyter kernel, and are stored without their outputs."""

import ast
import asyncio
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from offbeat.telemetry.jsonl import read_json_lines
from small_run import ENVIRONMENT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The folder in which a kernel has executed the tutorial, and its cells of code with their outputs."""
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
            patch.setenv(name, str(folder / name.lower()))
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        notebook = nbformat.read(FOLDER / "tutorial.ipynb", as_version=4)
        client = nbclient.NotebookClient(notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
        asyncio.run(client.async_execute())
    return folder, [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(cell: Any) -> str:
    """What a cell has shown, as text."""
    return "".join(each.get("text", "") or each.get("data", {}).get("text/plain", "") for each in cell.outputs)


@pytest.mark.drill
@pytest.mark.timeout(450)
def test_a_function_of_a_cell_and_what_it_refers_to_reach_the_reward_processes(executed: tuple[Path, list[Any]]) -> None:
    folder, cells = executed
    config = tomllib.loads((folder / "runs" / "notebook" / "config.toml").read_text())
    assert config["rollout"]["reward"] == "python:reward"
    rows = read_json_lines(folder / "runs" / "notebook" / "metrics.jsonl")
    assert [row["global_step"] for row in rows][-1] == 24 and all(0 < row["reward/mean"] < 1 for row in rows[-10:])
    shown = [re.fullmatch(r"(\d\.\d\d)  reverse (\w+): (['\"].*)", line) for line in text_of(cells[5]).splitlines()]
    assert len(shown) > 2 and None not in shown
    for match in filter(None, shown):
        answer, written = match[2][::-1], ast.literal_eval(match[3])
        in_place = sum(a == b for a, b in zip(written, answer, strict=False)) / max(len(written), len(answer))
        assert float(match[1]) == pytest.approx(1.0 if written == answer else 0.5 * in_place, abs=0.006)


@pytest.mark.drill
@pytest.mark.timeout(450)
def test_a_run_shows_its_progress_beside_the_kernel_s_loop_and_what_it_made_is_there_for_the_next_cells(
    executed: tuple[Path, list[Any]],
) -> None:
    folder, cells = executed
    assert "step 24/24" in text_of(cells[3]) and "held-out accuracy after " in text_of(cells[3])
    assert [each.output_type for each in cells[3].outputs] == ["display_data", "stream", "execute_result"], (
        "progress in one place, where the report is, and the run")
    assert "Run('runs/notebook'" in text_of(cells[3])
    assert re.search(r"held-out accuracy: 0\.\d\d before reinforcement learning, \d\.\d\d after", text_of(cells[4]))
    assert "reward/mean" in text_of(cells[6]) and "report.html" in text_of(cells[7]) and (folder / "runs/notebook/report.html").is_file()
    answers = ast.literal_eval(text_of(cells[8]))
    assert [prompt for prompt, _, _ in answers] == [f"reverse {answer[::-1]}: " for _, answer, _ in answers]
    assert all(isinstance(written, str) and written for _, _, written in answers)


def test_progress_is_one_output_of_the_cell_from_another_thread_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = nbformat.v4.new_code_cell(
        "import sys, threading\nfrom offbeat.telemetry.console import Console, choose_mode\n"
        "def body():\n    with Console(choose_mode(sys.stdout)) as console:\n        console.start('mine', 40)\n"
        "        for step in range(1, 41):\n            console.update(step, {})\n        console.note('saved')\n"
        "thread = threading.Thread(target=body)\nthread.start()\nthread.join()")
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    notebook = nbformat.v4.new_notebook(cells=[cell])
    client = nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    asyncio.run(client.async_execute())
    (output,) = notebook.cells[0].outputs
    lines = output["data"]["text/plain"].splitlines()
    assert lines[0] == "mine" and lines[-1] == "  saved" and lines[-2].startswith("step 40/40") and len(lines) == 10


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_stored_without_outputs_and_valid(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = json.loads(path.read_text())["cells"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")


def test_links_of_notebooks_lead_to_files() -> None:
    for path in NOTEBOOKS:
        for target in re.findall(r"\]\((\.\.?/[^)#]*)", path.read_text()):
            assert (path.parent / target).resolve().is_file(), f"{path.name}: {target}"
