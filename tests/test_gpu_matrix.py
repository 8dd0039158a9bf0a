"""The table of versions that `make gpu-matrix` writes."""

import runpy
from pathlib import Path

TOOL = Path(__file__).parents[1] / "tools" / "gpu_matrix.py"


def found(torch, *differ):
    return {"versions": {"torch build": torch, "transformers": "5", "python": "3.11"}, "uses": 90, "attributes": 30, "differ": list(differ)}


def test_versions_stand_in_their_order_and_what_differs_is_told():
    with_table = runpy.run_path(str(TOOL))["with_table"]
    page = "before\n<!-- begin: interfaces -->\nold\n<!-- end: interfaces -->\nafter\n"
    known = {"2.13.0": found("2.13.0+cu130"), "2.9.0": found("2.9.0+cu128", "`name` (file.py): is not there")}
    written = with_table(page, known)
    rows = [line for line in written.splitlines() if line.startswith("| 2")]
    assert rows == [
        "| 2.9.0+cu128 | 5 | 3.11 | 90 | 30 | `name` (file.py): is not there |", "| 2.13.0+cu130 | 5 | 3.11 | 90 | 30 | nothing |"]
    assert written.startswith("before\n<!-- begin: interfaces -->\n| torch") and written.endswith("<!-- end: interfaces -->\nafter\n")
    assert with_table(written, known) == written
