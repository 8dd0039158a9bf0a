"""What a person sees while a run goes on."""

import contextlib
import io
import json
import math
import os
import re
import sys
from functools import partial

import pytest

from offbeat.phase import phase, waiting_for
from offbeat.telemetry.console import Console, choose_mode, compact, doing, plain_line, sparkline
from offbeat.telemetry.notebook import CellOutput
from offbeat.telemetry.pace import Pace

METRICS = {
    "step/total_s": 0.5,
    "step/rollout_wait_s": 0.1,
    "reward/mean": 0.512,
    "eval/accuracy": 0.34,
    "rollout/staleness_mean_versions": 0.8,
    "rollout/staleness_max_versions": 1,
    "throughput/generated_tokens_per_s": 12_345.0,
    "policy/logprob_gap_mean": 1.2e-5,
    "policy/logprob_gap_max": 3e-4,
    "train/loss": -0.0123,
    "train/grad_norm": 0.51,
}


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


def written(stream):
    """What a terminal was given, without what acts on it."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


def play(mode, stream):
    with Console(mode, stream=stream) as console:
        console.start("sort8 · tiny · local", 100)
        console.update(1, METRICS)
        console.note("checkpoint saved")
        console.update(2, {"reward/mean": 0.6})
        console.show_result({"held-out accuracy": 0.88, "report": "runs/x/report.html"})
    return stream.getvalue()


def test_plain_shows_one_aligned_line_per_step_with_a_dash_for_what_is_missing_now():
    lines = play("plain", io.StringIO()).splitlines()
    assert lines[0] == "sort8 · tiny · local"
    assert [line.split(":")[0] for line in lines[1:3]] == ["  stale", "  gap"]
    del lines[1:3]
    assert " ".join(lines[1].split()) == (
        "step 1/100 reward 0.512 stale 1 gap 3.0e-04 loss -0.012 s/step 0.50 20% wait"
    )
    assert lines[2] == "  checkpoint saved"
    assert " ".join(lines[3].split()).startswith("step 2/100 reward 0.600 stale - gap - loss - s/step -")
    for label in ("reward", "stale", "gap", "loss", "s/step"):
        assert lines[1].index(label) == lines[3].index(label)
    assert "held-out accuracy  0.88" in lines[4]


def test_the_use_of_devices_is_shown_where_their_peak_is_known():
    used = METRICS | {"train/mfu": 0.384, "train/peak_memory_bytes": 1.5 * 2**30}
    stream = Terminal()
    with Console("live", stream=stream) as console:
        console.start("run", 100)
        console.update(1, used)
    assert re.search(r"memory +1\.5 GiB peak +MFU +38%", written(stream))
    stream = Terminal()
    with Console("live", stream=stream) as console:
        console.start("run", 100)
        console.update(1, METRICS)
        assert "MFU" not in written(stream) and "memory" not in written(stream)
        console.update(2, METRICS | {"train/peak_memory_bytes": 2**30})
        assert "1.0 GiB peak" in written(stream) and "MFU" not in written(stream)


def test_a_narrow_terminal_shows_whole_explanations_and_the_newest_values(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    with Console("live", stream=stream) as console:
        console.start("run", 100)
        for step in range(1, 31):
            console.update(step, METRICS | {"reward/mean": float(step == 30)})
    last = written(stream)[written(stream).rindex("reward") :]
    assert last.splitlines()[0].split()[2].endswith("▁█") and "…" not in last
    assert "\nstaleness: age in versions of the weights that sampled a token; mean and max" in last
    assert "\nlog-prob gap: log-probability of a token, trainer vs. engine; mean and max" in last


def test_what_is_not_self_evident_is_explained_once_and_only_where_it_is_shown():
    stream = io.StringIO()
    with Console("plain", stream=stream) as console:
        console.start("warm-up", 1)
        console.update(1, {"train/loss": 1.0})
        assert "gap:" not in stream.getvalue()
        console.start("grpo", 2)
        console.update(1, METRICS)
        console.update(2, METRICS)
    assert stream.getvalue().count("gap: ") == stream.getvalue().count("stale: ") == 1
    lines = stream.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["warm-up", "step", "grpo", "stale:", "gap:", "step", "step"]


def test_before_the_first_step_a_terminal_shows_what_is_going_on_and_others_show_nothing():
    stream, quiet = Terminal(), io.StringIO()
    with Console("live", stream=stream) as console, Console("plain", stream=quiet) as plain:
        for each in (console, plain):
            each.hint("run: reading the data")
        assert stream.getvalue() == "run: reading the data"
        with waiting_for("engines load the model", ["engine 0", "engine 1"]) as done:
            for each in (console, plain):
                each.open("run")
            assert "engines load the model: waiting for engine 0, engine 1 (0 s)" in written(stream)
            done("engine 0")
            console.note("a note")
            assert "engines load the model: waiting for engine 1 (0 s)" in written(stream)
        console.start("run · grpo", 3)
        assert "run · grpo" in written(stream) and "0/3" in written(stream)
    assert quiet.getvalue() == ""
    assert not written(stream).rstrip().splitlines()[-1].startswith("now")


def test_lines_say_what_is_started_and_a_terminal_shows_it_anyway() -> None:
    said = {}
    for mode in ("plain", "live", "json", "quiet"):
        stream = Terminal() if mode == "live" else io.StringIO()
        with Console(mode, stream=stream) as console:
            console.starting("starting 1 train rank")
        said[mode] = written(stream) if isinstance(stream, Terminal) else stream.getvalue()
    assert said.pop("plain") == "  starting 1 train rank\n"
    assert not any("starting" in text for text in said.values())


def test_spans_of_the_time_line_are_shown_in_words_and_waits_before_what_surrounds_them():
    assert doing() == ""
    with phase("train"):
        assert doing() == "training (0 s)"
        with phase("waiting for rollouts", describe=lambda: "3 of 8 groups are ready"), phase("inner"):
            assert doing() == "waiting for rollouts: 3 of 8 groups are ready (0 s)"


def test_lines_say_how_long_the_rest_takes(monkeypatch):
    now = 50.0
    monkeypatch.setattr("offbeat.telemetry.console.Pace", partial(Pace, clock=lambda: now))
    stream = io.StringIO()
    with Console("plain", stream=stream) as console:
        console.start("run", 31)
        for step in (1, 2, 31):
            console.update(step, {})
            now += 2.0
    lines = stream.getvalue().splitlines()
    assert "left" not in lines[1] + lines[3] and lines[2].endswith("  left 58 s")


def test_samples_are_shown_when_someone_asks():
    stream = io.StringIO()
    with Console("plain", stream=stream) as console:
        console.show_samples()
        console.offer(lambda: "best\n  given │ 31>")
        console.show_samples()
        console.offer(lambda: 1 // 0)
        console.show_samples()
    assert stream.getvalue().splitlines() == [
        "  no step is done yet, so there are no samples to show", "  best", "    given │ 31>",
        "  the samples cannot be shown: ZeroDivisionError: integer division or modulo by zero"]


def test_in_a_notebook_one_output_has_all_notes_and_the_newest_steps(monkeypatch):
    shown = []

    def show(text):
        shown.append([text])
        return shown[-1].append

    monkeypatch.setattr("offbeat.telemetry.console.CellOutput", lambda: CellOutput(show, clock=lambda: 0.0))
    with Console("notebook", stream=io.StringIO()) as console:
        console.start("sort8 · grpo", 30)
        assert shown == [["sort8 · grpo"]]
        for step in range(1, 31):
            if step == 3:
                console.note("checkpoint saved")
            console.update(step, METRICS)
        assert [text.count("\nstep ") for text in shown[0]] == [0, 0, 0, 1, 2], (
            "the first step is shown at once, and those that follow at once wait for what comes next")
        console.show_result({"held-out accuracy": 0.88})
    [versions] = shown
    lines = versions[-1].splitlines()
    assert [line.split("  ")[0].split(":")[0] for line in lines if not line.startswith("  ")] == [
        "sort8 · grpo", *(f"step {step}/30" for step in range(23, 31))]
    assert [line.split()[0] for line in lines if line.startswith("  ")] == ["stale:", "gap:", "checkpoint", "held-out"]


def test_a_step_that_was_evaluated_says_how_much_of_its_time_that_took():
    stream = io.StringIO()
    with Console("plain", stream=stream) as console:
        console.start("sort8 · grpo", 30)
        console.update(1, METRICS | {"step/evaluate_s": 0.3})
    assert "s/step 0.50 20% wait 60% eval" in stream.getvalue()


def test_json_shows_one_object_per_line():
    events = [json.loads(line) for line in play("json", io.StringIO()).splitlines()]
    assert [event["event"] for event in events] == ["start", "step", "note", "step", "finish"]
    assert events[1]["metrics"] == METRICS
    assert events[4]["held-out accuracy"] == 0.88


def test_json_has_null_for_what_json_cannot_say():
    stream = io.StringIO()
    Console("json", stream=stream).update(1, {"train/loss": math.nan})
    assert json.loads(stream.getvalue())["metrics"] == {"train/loss": None}


def test_quiet_shows_nothing():
    assert play("quiet", io.StringIO()) == ""


def test_live_shows_title_figures_and_the_last_held_out_accuracy():
    stream = Terminal()
    play("live", stream)
    shown = written(stream)
    last = shown[shown.rindex("held-out  ") :]
    assert "sort8 · tiny · local" in shown and "2/100" in shown and "checkpoint saved" in shown
    assert last.startswith("held-out  0.340")
    assert "▁█" in shown  # two rewards, rising


def test_leaving_a_live_console_by_an_exception_restores_the_cursor():
    stream = Terminal()
    with pytest.raises(KeyboardInterrupt), Console("live", stream=stream) as console:
        console.start("run", 3)
        raise KeyboardInterrupt
    shown = stream.getvalue()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_the_mode_follows_what_was_asked_and_where_it_is_shown():
    assert choose_mode(Terminal()) == "live"
    assert choose_mode(io.StringIO()) == "plain"
    assert choose_mode(Terminal(), as_json=True, enabled=False) == "json"
    assert choose_mode(Terminal(), enabled=False) == "quiet"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (math.nan, "-"), (0.0, "0"), (3, "3"), (0.5124, "0.512"),
        (123.4, "123"), (12_345, "12.3k"), (2.5e6, "2.5M"), (1.2e-5, "1.2e-05"),
    ],
)
def test_numbers_are_shown_in_few_characters(value, text):
    assert compact(value) == text


def test_sparklines_span_the_heights():
    assert sparkline([]) == ""
    assert sparkline([1, 1]) == "▄▄"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"


def test_a_line_has_no_columns_for_what_a_run_does_not_measure_and_100_at_most():
    assert plain_line(3, 7, {}) == "step 3/7"
    imitation = {"train/loss": 4.0582, "train/grad_norm": 8.2, "step/total_s": 0.22}
    assert re.sub(" +", " ", plain_line(3, 300, imitation, left_s=65)) == "step 3/300 loss 4.058 s/step 0.22 left 1 min"
    widest = {
        "reward/mean": -0.123, "rollout/staleness_max_versions": 12, "policy/logprob_gap_max": 1.2e-5, "train/loss": -1.2e-4,
        "step/total_s": 123.4, "step/rollout_wait_s": 123.4}
    lines = [plain_line(1, 1000, widest | {"step/evaluate_s": share}, left_s=99 * 3600) for share in (0.0, 123.4)]
    assert max(map(len, lines)) <= 100 and plain_line(1, 100, METRICS, left_s=700).endswith("20% wait  left 12 min")


def test_whoever_waits_for_the_run_s_folder_is_called_with_the_console_and_what_it_announces_is_always_shown() -> None:
    for mode, shown in (("quiet", "here\n"), ("plain", "  here\n"), ("json", '{"event": "note", "text": "here"}\n')):
        stream = io.StringIO()
        console = Console(mode, stream=stream, on_open=lambda console: console.announce("here"))
        assert not stream.getvalue()
        console.open("run")
        assert stream.getvalue() == shown


def test_a_console_without_a_stream_or_a_reader_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert choose_mode(None) == "quiet"
    reader, writer = os.pipe()
    os.close(reader)
    pipe = os.fdopen(writer, "w", encoding="ascii")
    for mode, stream in (("quiet", None), ("plain", pipe), ("json", pipe)):
        with Console(mode, stream=stream) as console:
            console.start("a · b", 1)
            console.update(1, {})
            console.announce("saved")
            console.show_result({})
    with contextlib.suppress(BrokenPipeError):
        pipe.close()
