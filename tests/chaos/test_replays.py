"""`make replays` draws the same kills again, goes on where it was interrupted, and says what is not equal."""

from dataclasses import replace
from pathlib import Path

from chaos import replays
from chaos.replays import BEGIN, END, Sitting, kept, moments, sit, spliced, table

SITTING = Sitting(
    "adapter", 30, 2, 8, at=((2, False), (5, True)), replayed=8, equal=8, metrics=300, weights=8, checkpoints=1, exports=1, wall_s=90.0)


def test_kills_are_drawn_from_the_seed_and_come_before_the_end_of_the_run() -> None:
    drawn = moments(Sitting("adapter", 30, 20, 60))
    assert drawn == moments(Sitting("adapter", 30, 20, 60)) and drawn != moments(Sitting("agents", 30, 20, 60))
    assert len(drawn) == 20 and [step for step, *_ in drawn] == sorted(step for step, *_ in drawn) and drawn[-1][0] < 54


def test_a_sitting_goes_on_after_its_last_kill_and_one_that_is_done_is_not_done_again(tmp_path: Path, monkeypatch) -> None:
    wanted, killed = Sitting("adapter", 30, 3, 8), []
    kept(tmp_path / "adapter.json", replace(wanted, at=((2, False),)))

    def kill_once(arguments: list[str], folder: Path, **moment: float) -> tuple[int, bool]:
        killed.append(moment["step"])
        return int(moment["step"]), False

    monkeypatch.setattr(replays, "arguments_of", lambda *_: [])
    monkeypatch.setattr(replays, "kill_once", kill_once)
    monkeypatch.setattr(replays, "finished", lambda _arguments, _folder, sitting: replace(sitting, replayed=8, equal=8, exports=1))
    first = sit(tmp_path, wanted)
    assert killed == [step for step, *_ in moments(wanted)[1:]] and len(first.at) == 3 and first.is_equal
    assert sit(tmp_path, wanted) == first and len(killed) == 2


def test_the_table_takes_the_place_of_the_one_before_and_names_what_differs() -> None:
    page = f"before\n{BEGIN}old\n{END}after\n"
    once = spliced(page, table([SITTING]))
    assert "| 2, 1 | 8, 8 | 300 | 8 | 1 | equal | 2 |" in once and once.startswith("before\n") and once.endswith("after\n")
    assert spliced(once, table([SITTING])) == once and "old" not in once
    told = table([replace(SITTING, equal=7, problems=("step 3: train/loss is 1.0, and was 2.0",))])
    assert "| 8, 7 |" in told and "differs" in told and told.endswith("\nadapter: step 3: train/loss is 1.0, and was 2.0\n")
