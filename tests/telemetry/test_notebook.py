"""Text in one output of a notebook's cell. tests/test_notebooks.py shows it in a real one."""

import io
import sys
import types

import pytest

from offbeat.telemetry.notebook import CellOutput, is_notebook


class Cell:
    """Outputs of a cell: each is the list of texts that it has had."""

    def __init__(self) -> None:
        self.outputs: list[list[str]] = []
        self.now_s = 0.0
        self.output = CellOutput(self.show, clock=lambda: self.now_s)

    def show(self, text: str):
        self.outputs.append([text])
        return self.outputs[-1].append


def test_lines_stay_in_one_output_and_of_passing_ones_the_newest() -> None:
    cell = Cell()
    cell.output.add("begun")
    for step in range(12):
        cell.now_s += 1.0
        cell.output.add(str(step), passing=True)
    cell.output.add("saved")
    [versions] = cell.outputs
    assert len(versions) == 14 and versions[-1].split() == ["begun", *map(str, range(4, 12)), "saved"]


def test_quick_steps_are_shown_together_and_none_is_lost_at_the_end() -> None:
    cell = Cell()
    for step in range(3):
        cell.output.add(str(step), passing=True)
        cell.now_s += 0.1
    assert cell.outputs == [["0"]]
    cell.now_s = 0.35
    cell.output.add("3", passing=True)
    cell.output.add("4", passing=True)
    assert cell.outputs == [["0", "0\n1\n2\n3"]]
    cell.output.flush()
    cell.output.flush()
    assert cell.outputs == [["0", "0\n1\n2\n3", "0\n1\n2\n3\n4"]]


def test_a_long_run_keeps_its_newest_lines() -> None:
    cell = Cell()
    for number in range(300):
        cell.output.add(str(number))
    assert cell.outputs[0][-1].split() == [str(number) for number in range(100, 300)]


def test_a_notebook_is_told_by_where_its_cells_write(monkeypatch: pytest.MonkeyPatch) -> None:
    stream_of_cells = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    assert is_notebook(stream_of_cells()) and not is_notebook(io.StringIO())
