"""The live page beside a run, as a process: it is there while the run is, and never longer."""

import io
import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

from offbeat.dashboard.live_page import LivePage
from offbeat.telemetry.console import Console
from rollout_samples import write_small_run
from waiting import wait_until


def address(text: str) -> str:
    found = re.search(r"watch this run at (http://127\.0\.0\.1:\d+/)$", text.strip())
    return found[1] if found else ""


def get(url: str) -> object:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)


def test_the_page_shows_this_run_until_the_end_and_its_address_is_told_once(tmp_path: Path) -> None:
    for name in ("mine", "another"):
        write_small_run(tmp_path / name)
    shown = io.StringIO()
    with LivePage(tmp_path / "mine") as page, Console("quiet", stream=shown, on_open=page.open) as console:
        assert not shown.getvalue()
        console.open("mine")
        console.open("mine, its next part")
        wait_until(lambda: "\n" in shown.getvalue(), timeout_s=60)
        url = address(shown.getvalue())
        assert [run["name"] for run in get(f"{url}api/runs")] == ["mine"]
        [child] = [each for each in psutil.Process().children() if "page_process" in " ".join(each.cmdline())]
        assert child.nice() >= 10
        child.terminate()  # as all processes of a job are, while the run goes on
        assert [run["name"] for run in get(f"{url}api/runs")] == ["mine"]
    assert not child.is_running() and shown.getvalue().count("\n") == 1
    with pytest.raises(OSError):
        get(f"{url}api/runs")
    assert (tmp_path / "mine" / "logs" / "dashboard.log").read_text() == ""


def test_a_run_without_a_folder_or_without_the_wish_has_no_page(tmp_path: Path) -> None:
    with LivePage(tmp_path / "none") as page:
        Console("quiet").open("mine")
        page.open(Console("quiet"))
    assert not list(tmp_path.iterdir())


def test_a_page_that_cannot_be_served_is_one_line_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    console = Console("plain", stream=shown)
    write_small_run(tmp_path / "mine")
    monkeypatch.setattr("sys.executable", str(tmp_path / "no-python"))
    with LivePage(tmp_path / "mine") as page:
        page.open(console)
    assert shown.getvalue() == "  the live page cannot be started, and the run goes on without it: No such file or directory\n"
    shown.truncate(0)
    shown.seek(0)
    broken = tmp_path / "broken-python"
    broken.write_text("#!/bin/sh\necho 'no such thing' >&2\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(broken))
    with LivePage(tmp_path / "mine") as page:
        page.open(console)
        wait_until(shown.getvalue, timeout_s=60)
    assert shown.getvalue() == "  the live page has ended, and the run goes on without it: no such thing\n"


RUN = """
import sys, time
from pathlib import Path
from offbeat.dashboard.live_page import LivePage
from offbeat.telemetry.console import Console
with LivePage(Path(sys.argv[1])) as page:
    page.open(Console("quiet"))
    sys.stdin.read()
"""


def test_the_page_does_not_outlive_a_run_that_is_killed(tmp_path: Path) -> None:
    write_small_run(tmp_path / "mine")
    with subprocess.Popen(
            [sys.executable, "-c", RUN, str(tmp_path / "mine")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert address(run.stdout.readline())
        children = psutil.Process(run.pid).children(recursive=True)
        run.send_signal(signal.SIGKILL)
    assert len(children) == 1
    gone, alive = psutil.wait_procs(children, timeout=30)
    assert gone == children and not alive
