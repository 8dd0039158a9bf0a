"""A representative part of `tests/faults/user_code.py`, and what keeps its table whole."""

import asyncio
from pathlib import Path

import pytest

from faults.sections import DOCUMENT
from faults.user_code import CODE, HEADING, SETTINGS, all_cases, play_all
from offbeat.errors import CodeError
from offbeat.user_code.functions import resolve

SAMPLE = (
    "calls `sys.exit`", "a token id that is the vocabulary's size", "log-probabilities that are all 0", "versions of 38 steps before",
    "a reward that raises on every sample")


@pytest.mark.drill
def test_wrong_code_is_left_out_alone_in_a_real_run_or_ends_it_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("reward_timeout_s", "20"), ("episode_timeout_s", "40"), ("blocked_timeout_s", "40")):  # none of these hangs
        monkeypatch.setitem(SETTINGS, f"rollout.{name}", seconds)
    cases = {case.what: case for case in all_cases()}
    played = asyncio.run(play_all(tmp_path, [cases[what] for what in SAMPLE]))
    assert [(case.what, outcome.problems) for case, outcome in played] == [(what, []) for what in SAMPLE]


def test_every_case_has_its_code() -> None:
    cases = all_cases()
    assert len({(case.part, case.what) for case in cases}) == len(cases) > 60
    for case in cases:
        for name in case.settings.values():
            try:
                assert callable(resolve(name, kind="reward"))
            except CodeError as exc:
                assert case.said in str(exc)
            assert name.startswith(str(CODE))


def test_the_table_in_the_documentation_has_a_row_for_every_case_and_all_pass() -> None:
    text = DOCUMENT.read_text().partition(f"## {HEADING}\n")[2]
    cases = all_cases()
    assert f"\n{len(cases)} of {len(cases)} rows pass." in text
    for case in cases:
        assert f"\n| {case.what} |" in text, case.what
