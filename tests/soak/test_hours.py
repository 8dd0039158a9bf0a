"""The long soak's own judgement: slopes, the section of the page and its pictures."""

import random
from pathlib import Path
from xml.etree import ElementTree

import pytest

from soak.growth import BLOCK_S, slope
from soak.hours_page import BEGIN, CHARTS, END, Sitting, growing, section, write_page
from soak.ledger import Expected, Ledger
from soak.watch import Row


def rows(sitting: int, *, minutes: int, leak_mb: float = 0.0, level_mb: float = 400.0, seed: int = 0) -> list[Row]:
    """A sitting whose train ranks take `leak_mb` more each hour, with noise."""
    draw = random.Random(seed)
    return [
        Row(
            sitting, 60.0 * minute, 410.0 + draw.gauss(0, 1), level_mb + leak_mb * minute / 60 + draw.gauss(0, 1), 415.0, 40, 83, 20, 0.5,
            0.01 * minute, 1800, 40, 0.02, 0.1, 0.1, 1.1, 0)
        for minute in range(1, minutes + 1)]


def test_a_leak_is_told_from_noise_over_sittings_of_different_levels() -> None:
    sound = [*rows(0, minutes=120), *rows(1, minutes=150, level_mb=500.0, seed=1)]
    assert growing(sound) == []
    leaking = [*rows(0, minutes=120, leak_mb=6.0), *rows(1, minutes=150, leak_mb=6.0, level_mb=500.0, seed=1)]
    assert growing(leaking) == ["ranks_mb"]
    found = slope([[(row.at_s, row.ranks_mb) for row in leaking if row.sitting == number] for number in (0, 1)])
    assert found is not None and 0 < found.low < found.per_hour == pytest.approx(6.0, abs=0.5)
    assert 3.9 < found.hours < 4.3  # 4.5 without two quarters of an hour


def test_the_interval_of_a_slope_holds_95_of_100_and_too_few_points_have_none() -> None:
    held = 0
    for seed in range(300):
        draw = random.Random(seed)
        points = [(900 + BLOCK_S * (number + 0.5), 2.0 * number * BLOCK_S / 3600 + draw.gauss(0, 3)) for number in range(12)]
        found = slope([points])
        assert found is not None
        held += found.low <= 2.0 <= found.high
    assert 275 <= held <= 294
    assert slope([[(1000.0, 1.0), (1400.0, 2.0), (1700.0, 2.0)]]) is None


def test_the_section_names_what_grows_and_keeps_the_rest_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "soak.md").write_text(f"before\n{BEGIN}old\n{END}after\n")
    sittings = [Sitting(0, 7300.0, 16, 4, 6, 4000, 1_000_000, 600, [], [{"kind": "kill", "noticed_s": 0.1, "healed_s": 5.0}])]
    leaking = rows(0, minutes=120, leak_mb=10.0)
    write_page(tmp_path, leaking, sittings)
    page = (tmp_path / "soak.md").read_text()
    assert page.startswith("before\n") and page.endswith("after\n") and "old" not in page
    assert "2.00 hours so far, by sittings 2.00: 16 tenants," in page and "All as promised." in page and "1.10 times the tokens" in page
    (told,) = [line for line in page.splitlines() if "memory of the two train ranks" in line]
    assert told.endswith("| grows |") and page.count("| no growth |") == 9
    for name in CHARTS:
        assert ElementTree.parse(tmp_path / "images" / f"{name}.svg").getroot().tag.endswith("svg")
    wrong = [Sitting(0, 1.0, 16, 4, 6, 1, 1, 0, ["sample of alice hangs"], [])]
    assert "Not as promised: sample of alice hangs" in section(leaking, wrong)


def test_a_ledger_of_hours_forgets_old_versions_and_hands_over_its_times() -> None:
    ledger = Ledger(keep=2)
    for version in range(5):
        ledger.expect(f"alice@{version}", Expected((), (), None, 0.0))  # type: ignore[arg-type]
        ledger.took("sample", 0.1)
    assert list(ledger.expected) == ["alice@3", "alice@4"] and ledger.num_versions == 5
    assert ledger.take_seconds() == {"sample": [0.1] * 5} and ledger.seconds == {}
