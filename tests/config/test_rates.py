"""The table of learning rates."""

from pathlib import Path

import pytest

from offbeat.config.rates import RATES, WIDTHS, Task, choose_rate


@pytest.mark.parametrize(("task", "rates"), [
    ("sft", [2e-3, 3e-5, 2e-5, 1e-5, 5e-6]), ("preference", [2e-4, 5e-6, 1e-6, 5e-7, 2e-7]),
    ("reward_model", [1e-3, 3e-5, 1e-5, 5e-6, 3e-6]), ("rl", [2e-4, 1e-5, 2e-6, 1e-6, 5e-7]),
    ("distillation", [2e-4, 5e-5, 2e-5, 1e-5, 5e-6]), ("critic", [1e-3, 3e-5, 1e-5, 1e-5, 5e-6])])
def test_a_rate_is_that_of_the_task_and_the_width(task: Task, rates: list[float]) -> None:
    # A tiny model, SmolLM2-135M, Llama-3.2-1B, Llama-3.1-8B and Llama-3.1-70B.
    assert [choose_rate(task, width=width, adapter=False) for width in (128, 576, 2048, 4096, 8192)] == rates


@pytest.mark.parametrize(("width", "rate"), [
    (256, 2e-4), (257, 1e-5), (1024, 1e-5), (1025, 2e-6), (2560, 2e-6), (5120, 1e-6), (5121, 5e-7)])
def test_a_column_holds_up_to_its_width(width: int, rate: float) -> None:
    assert choose_rate("rl", width=width, adapter=False) == rate


@pytest.mark.parametrize("task", RATES)
def test_a_wider_model_never_has_a_higher_rate_and_an_adapter_has_ten_times_it(task: Task) -> None:
    assert len(RATES[task]) == len(WIDTHS) + 1
    assert sorted(RATES[task], reverse=True) == list(RATES[task])
    for width in (8, *WIDTHS, 16384):
        whole = choose_rate(task, width=width, adapter=False)
        assert choose_rate(task, width=width, adapter=True) == pytest.approx(10 * whole) and 0 < whole < 0.1


def test_rates_are_numbers_that_one_would_write() -> None:
    assert repr(choose_rate("preference", width=4096, adapter=True)) == "5e-06"


def test_the_table_of_the_page_is_this_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "choosing-settings.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if ".lr` |" in line]
    said = {row[1].strip(" `"): [float(cell) for cell in row[2:7]] for row in rows}
    assert said == {f"{'train' if task == 'rl' else task}.optimizer.lr": list(RATES[task]) for task in RATES if task != "distillation"}
    distilled = next(line for line in page.splitlines() if "of distillation" in line)
    assert [float(cell) for cell in distilled.split("|")[2:7]] == list(RATES["distillation"])
    widths = next(line for line in page.splitlines() if line.startswith("| width up to"))
    assert [int(cell) for cell in widths.split("|")[2:6]] == list(WIDTHS)
