"""`offbeat watch`, as a process and in a real browser."""

import json
import re
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from offbeat.cli.main import main
from rollout_samples import group, trajectory, write_rollouts, write_small_run
from small_run import start_offbeat

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NASTY = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


@contextmanager
def watching(*argv: str) -> Iterator[str]:
    """The address of a server, which is stopped at the end."""
    process = start_offbeat("watch", *argv, "--port", "0")
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r" at (http://\S+); Ctrl-C ends it", line)
        assert match, line + (process.stderr.read() if process.stderr and process.poll() is not None else "")
        yield match[1]
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0 and not errors, errors


def get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode()


def test_a_run_is_served_until_interrupted_to_this_machine_alone(tmp_path: Path) -> None:
    write_small_run(tmp_path / "mine")
    with watching(str(tmp_path / "mine")) as url:
        assert url.startswith("http://127.0.0.1:")
        assert [run["name"] for run in json.loads(get(f"{url}api/runs")[1])] == ["mine"]
        assert get(url, Host="evil.example")[0] == 403
    assert not (tmp_path / "mine" / "rollouts" / "index.sqlite").exists(), "nobody asked for rollouts"


def test_another_host_gets_a_key_that_is_part_of_the_printed_address(tmp_path: Path) -> None:
    write_small_run(tmp_path / "mine")
    with watching(str(tmp_path), "--host", "0.0.0.0") as url:
        found = re.fullmatch(r"http://\S+:(\d+)/\?key=(\S{32})", url)
        assert found, url
        base = f"http://127.0.0.1:{found[1]}"
        assert get(f"{base}/api/runs")[0] == get(f"{base}/")[0] == 401
        assert get(f"{base}/api/runs", Authorization=f"Bearer {found[2]}")[0] == 200


def test_a_key_of_one_s_own_is_demanded_even_of_this_machine(tmp_path: Path) -> None:
    write_small_run(tmp_path / "mine")
    (tmp_path / "key").write_text("my-own-key\n")
    with watching(str(tmp_path / "mine"), "--key-file", str(tmp_path / "key")) as url:
        assert url.endswith("/?key=my-own-key")
        assert get(url.partition("?")[0])[0] == 401


def test_a_key_of_any_characters_is_whole_in_the_printed_address(tmp_path: Path) -> None:
    write_small_run(tmp_path / "mine")
    (tmp_path / "key").write_text("a+b/c&d#e==\n")
    with watching(str(tmp_path / "mine"), "--key-file", str(tmp_path / "key")) as url:
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open(url, timeout=30) as page:
            assert page.status == 200 and "offbeat watch" in page.read().decode()


@pytest.mark.parametrize(("argv", "said"), [
    (["nowhere"], "folder nowhere does not exist"), (["--port", "99999"], "--port must be between 0 and 65535"),
    (["--key-file", "nowhere"], "--key-file nowhere cannot be read"), (["--run.name", "x"], "takes no settings, got --run.name")])
def test_what_cannot_be_served_is_one_sentence(
    argv: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["watch", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and line.count("offbeat") == 1 + line.count("see offbeat")


def test_a_port_that_is_taken_is_told_with_the_name_of_the_program_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_small_run(tmp_path / "mine")
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        assert main(["watch", "mine", "--port", str(taken.getsockname()[1])]) == 2
    assert capsys.readouterr().err.startswith("offbeat: the live page cannot listen on 127.0.0.1:")


def rendered(url: str, profile: Path) -> str:
    """The page as a browser has it after its scripts have run."""
    assert BROWSER is not None
    done = subprocess.run(
        [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}",
         "--window-size=1400,1000", "--virtual-time-budget=15000", "--dump-dom", url],
        capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
def test_a_browser_shows_the_rollouts_as_text_and_runs_nothing_that_a_model_wrote(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "mine"
    write_small_run(run_dir)
    written = trajectory("What? ", NASTY, 1.0)
    write_rollouts(run_dir, 5, [group(f"What? {NASTY}", written, ("no", 0.0), named_rewards={})])
    (run_dir / "metrics.jsonl").write_text('{"global_step": 5, "reward/mean": 0.5, "time_s": 1.0}\n')
    (run_dir / "events.jsonl").write_text(json.dumps({"kind": NASTY, "time_s": 1.0, "reason": NASTY}) + "\n")
    with watching(str(tmp_path / "runs")) as url:
        page = rendered(f"{url}#run=mine&view=rollouts", tmp_path / "profile")
        assert "owned" not in re.sub(r"document\.title='owned'", "", page) and "<title>mine · offbeat watch</title>" in page
        assert "13 of 13 rollouts" in page and 'data-id="5.0.0"' in page and 'data-id="2r.1.0"' in page
        assert page.count("<script") == 1 and "<img" not in page
        tokens = re.findall(r'<span data-at="\d+"[^>]*>(.*?)</span>', page)
        assert len(tokens) == len(NASTY) and "&lt;" in tokens and 'style="background-color' in page
        assert re.search(r'class="sample" aria-current="true"', page) and page.count('class="sample"') == 2
        filtered = rendered(f"{url}#run=mine&view=rollouts&text=is+42&order=oldest&rollout=1.0.0", tmp_path / "profile")
        assert re.findall(r'class="item[^"]*" role="option" data-id="([^"]*)"', filtered) == ["1.0.0", "2.0.0"]
        assert "2 of 13 rollouts" in filtered and re.search(r">step 2 <small>", filtered), "the same prompt in a later step"
        assert "0 of 13 rollouts" in rendered(f"{url}#run=mine&view=rollouts&text=newest", tmp_path / "profile"), "a word like any other"
        records = rendered(f"{url}#run=mine&view=records", tmp_path / "profile")
        assert "Events (1)" in records and "<img" not in records and "<title>mine" in records
        step = rendered(f"{url}#run=mine&view=step&step=2", tmp_path / "profile")
        assert "step 2 of 5" in step and "forty-two is 42" in re.sub(r"<[^>]*>", "", step) and 'title="version 3"' in step
        overview = rendered(f"{url}#run=mine&view=overview", tmp_path / "profile")
        assert 'aria-label="Reward"' in overview and 'class="problem" role="alert" hidden' in overview
