"""The account of `make chaos` finds what is not as promised."""

from dataclasses import replace
from pathlib import Path

from chaos.kills import MODES
from chaos.ledger import Ledger, Seen
from chaos.report import document
from chaos.run import Row, plan

ROW = Row(7, 0, "local", ("engine",), "save", "any time", ("engine 0",), True, None, 9, {}, (), 100, 20, 3.0)


def test_the_kills_are_spread_over_the_modes_and_every_run_gets_ten_at_most() -> None:
    chains = plan(200, list(MODES))
    assert sum(num for _, num in chains) == 200 and max(num for _, num in chains) == 10
    assert {mode for mode, _ in chains[:6]} == set(MODES)


def test_the_account_finds_what_is_lost_doubled_or_of_a_wrong_version(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, eta=1, last=2)
    ledger.trained = {1: [(0, "0:1")], 2: [(0, "0:1")]}
    ledger.finished = {(0, "0:1"): "a", (0, "0:2"): "b", (0, "0:3"): "c"}
    ledger.waiting = {(0, "0:4"), (0, "0:5")}
    ledger._where({(0, "0:3")}, {(0, "0:5")})
    assert ledger.counts == {"doubled": 1, "lost": 2}
    ledger._step(2, [(0, "0:6")])
    ledger._groups(0, [Seen("0:3", 0, "c", ((0, 0),)), Seen("0:3", 0, "d", ())], None)
    ledger._groups(0, [Seen("0:7", 2, "e", ((1,),)), Seen("0:8", 0, "f", ((0,),)), Seen("0:9", 1, "g", ((2, 1),))], 3)
    assert ledger.counts == {"doubled": 2, "lost": 2, "tokens": 1, "versions": 3}


def test_the_page_says_how_many_kills_are_as_promised_and_names_the_others() -> None:
    page = document([ROW, replace(ROW, problems=("it did not go on",), counts={"other": 1})], wanted=2)
    assert "1 of 2 are as promised" in page and "- local, engine 0 at any time: it did not go on" in page and "40 of 240, 16.7%" in page
    assert "1 of 2 kills" in document([ROW], wanted=2)
