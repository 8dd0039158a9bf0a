"""When to save, and that a checkpoint is complete or does not exist. Real ranks save and resume in `test_run.py`."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from offbeat.controller.checkpoints import TRAINING, WARM_UP, RunCheckpoints
from offbeat.controller.parts import SingleProcess
from offbeat.controller.state import HeadState, Highlights, SavedState
from offbeat.data.identity import Identity
from offbeat.data.stream import StreamState
from offbeat.data.wire import encode_json
from offbeat.errors import ConfigError, PublishError, StorageError
from offbeat.journal.run_journal import NoJournal
from small_run import small_config

IDENTITY = Identity({"train.optimizer.lr": 1e-3}, "rows", 10, "weights", "tokens", {})


class Ranks:
    """Writes one file for all ranks."""

    full = False

    def __init__(self) -> None:
        self.loaded: list[Path] = []
        self.exported: list[tuple[Path, str]] = []
        self.steps_less = 0

    async def save(self, folder: Path) -> None:
        if self.full:
            raise StorageError("no space left on device")
        folder.mkdir(parents=True)
        (folder / "part").write_text(folder.parent.name.rpartition("-")[2])

    async def load(self, folder: Path) -> int:
        self.loaded.append(folder)
        return int((folder / "part").read_text()) - self.steps_less

    async def export(self, folder: Path, *, tokenizer: str) -> None:
        self.exported.append((folder, tokenizer))


class Engines:
    """Serve the version published last, or fail it."""

    failed = False

    async def settle(self) -> None:
        if self.failed:
            raise PublishError("the adapter policy@5 is served by no engine")


def saved(step: int) -> SavedState:
    return SavedState(step, step + 1, (HeadState(StreamState(0, 2 * step), (f"0:{step}",)),), identity=IDENTITY)


def save(checkpoints: RunCheckpoints, step: int) -> None:
    state = saved(step)
    asyncio.run(checkpoints.save(step, version=state.version, head=state.heads[0], highlights=Highlights()))


def checkpoints_of(
    ranks: Ranks, root: Path, *, kind: str = TRAINING, num_heads: int = 1, engines: Engines | None = None,
    notes: list[str] | None = None, identity: Identity = IDENTITY, **changes: str,
) -> RunCheckpoints:
    said, config = [] if notes is None else notes, small_config(root, **changes)
    parts = SimpleNamespace(
        trainers=ranks, critic=None, config=config, peers=SingleProcess(), num_heads=num_heads, journal=NoJournal(),
        publisher=engines or Engines(),
        inputs=SimpleNamespace(tokenizer=SimpleNamespace(has_own_template=False), tokenizer_folder="tokenizer", identity=identity),
        record=SimpleNamespace(run_dir=config.run_dir, writes=True, note=lambda _kind, text: said.append(text)))
    return RunCheckpoints(parts, config.checkpoint, kind=kind)


def test_a_run_goes_on_from_its_newest_checkpoint_and_keeps_as_many_as_it_is_told(tmp_path: Path) -> None:
    ranks = Ranks()
    checkpoints = checkpoints_of(ranks, tmp_path, checkpoint__keep="2")
    assert asyncio.run(checkpoints.restore()) is None
    for step in (2, 4, 6):
        save(checkpoints, step)
    assert asyncio.run(checkpoints.restore()) == saved(6)
    folder = tmp_path / "small" / "checkpoints"
    assert ranks.loaded == [folder / "step-00000006" / "ranks"]
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000004", "step-00000006"]


def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    ranks = Ranks()
    checkpoints = checkpoints_of(ranks, tmp_path)
    save(checkpoints, 2)
    ranks.full = True
    with pytest.raises(StorageError, match="no space"):
        save(checkpoints, 4)
    assert asyncio.run(checkpoints.restore()) == saved(2)


def test_a_checkpoint_whose_version_no_engine_serves_is_not_complete(tmp_path: Path) -> None:
    engines = Engines()
    checkpoints = checkpoints_of(Ranks(), tmp_path, engines=engines)
    save(checkpoints, 2)
    engines.failed = True
    with pytest.raises(PublishError, match="served by no engine"):
        save(checkpoints, 4)
    assert asyncio.run(checkpoints.restore()) == saved(2)


def test_another_number_of_processes_that_draw_data_is_refused(tmp_path: Path) -> None:
    save(checkpoints_of(Ranks(), tmp_path), 2)
    with pytest.raises(ConfigError, match="written by 1 processes that draw data, and now there are 2; resume with the same"):
        asyncio.run(checkpoints_of(Ranks(), tmp_path, num_heads=2).restore())


@pytest.mark.parametrize(("every", "due"), [("0", [6]), ("2", [2, 4, 6]), ("4", [4, 6])])
def test_saves_are_due_every_few_steps_and_at_the_end(tmp_path: Path, every: str, due: list[int]) -> None:
    checkpoints = checkpoints_of(Ranks(), tmp_path, checkpoint__every_steps=every)
    assert [step for step in range(1, 7) if checkpoints.due(step, last=step == 6)] == due


def test_a_save_is_overdue_after_some_minutes_and_not_before_it_is_worth_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr("offbeat.controller.checkpoints.time.monotonic", lambda: now_s[0])

    class Slow(Ranks):
        takes_s = 0.0

        async def save(self, folder: Path) -> None:
            now_s[0] += self.takes_s
            await super().save(folder)

    def overdue_after_s(checkpoints: RunCheckpoints) -> float:
        begun_s = now_s[0]
        while not checkpoints.overdue():
            now_s[0] += 10
        return now_s[0] - begun_s

    ranks = Slow()
    checkpoints = checkpoints_of(ranks, tmp_path, checkpoint__every_minutes="2")
    assert overdue_after_s(checkpoints) == 120 and checkpoints.overdue(), "it stays so until a save"
    save(checkpoints, 2)
    assert overdue_after_s(checkpoints) == 120
    ranks.takes_s = 30.0
    save(checkpoints, 4)
    assert overdue_after_s(checkpoints) == 600, "a save of 30 s is worth it once in ten minutes"
    never = checkpoints_of(ranks, tmp_path, checkpoint__every_minutes="0")
    now_s[0] += 1e9
    assert not never.overdue()


def test_reinforcement_learning_and_fine_tuning_keep_out_of_each_others_checkpoints(tmp_path: Path) -> None:
    by_kind = {kind: checkpoints_of(Ranks(), tmp_path, kind=kind) for kind in ("sft", WARM_UP, TRAINING)}
    save(by_kind["sft"], 2)
    save(by_kind[WARM_UP], 4)
    found = {kind: asyncio.run(checkpoints.restore()) for kind, checkpoints in by_kind.items()}
    assert found == {"sft": saved(2), WARM_UP: saved(4), TRAINING: None}
    save(by_kind[TRAINING], 1)
    assert asyncio.run(by_kind[WARM_UP].restore()) is None, "a run that has trained does not go back to its warm-up"
    assert asyncio.run(by_kind["sft"].restore()) == saved(2)


def test_exports_in_between_come_at_their_steps(tmp_path: Path) -> None:
    for every, expected in (("0", []), ("2", [2, 4])):
        ranks = Ranks()
        checkpoints = checkpoints_of(ranks, tmp_path, checkpoint__export_every_steps=every)
        for step in range(1, 6):
            asyncio.run(checkpoints.export_step(step))
        assert ranks.exported == [(tmp_path / "small" / "exports" / f"step-{step:08d}", "tokenizer") for step in expected]


def test_the_export_can_be_turned_off(tmp_path: Path) -> None:
    for export, expected in (("true", [(tmp_path / "small" / "export", "tokenizer")]), ("false", [])):
        ranks = Ranks()
        asyncio.run(checkpoints_of(ranks, tmp_path, checkpoint__export=export).export())
        assert ranks.exported == expected


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_taken_and_both_are_said(tmp_path: Path) -> None:
    ranks, notes = Ranks(), []
    checkpoints = checkpoints_of(ranks, tmp_path, notes=notes)
    for step in (2, 4):
        save(checkpoints, step)
    folder = tmp_path / "small" / "checkpoints"
    (folder / "step-00000004" / "ranks" / "part").write_text("2".zfill(8))  # of another step, with as many bytes
    assert asyncio.run(checkpoints.restore()) == saved(2)
    assert ranks.loaded == [folder / "step-00000002" / "ranks"]
    assert notes == [
        "step-00000004 is damaged: ranks/part has other bytes than were written, and kept as step-00000004.damaged; the run continues from"
        " step-00000002"]
    assert (folder / "step-00000004.damaged" / "ranks" / "part").exists()


def test_where_all_are_damaged_nothing_is_loaded_or_renamed(tmp_path: Path) -> None:
    ranks = Ranks()
    checkpoints = checkpoints_of(ranks, tmp_path)
    save(checkpoints, 2)
    (tmp_path / "small" / "checkpoints" / "step-00000002" / "ranks" / "part").write_text("2".zfill(8)[::-1])
    for _ in range(2):
        with pytest.raises(StorageError, match=r"step-00000002 is damaged: ranks/part has other bytes.*give run.name a new name"):
            asyncio.run(checkpoints.restore())
    assert ranks.loaded == []


def test_ranks_of_another_step_under_a_checkpoint_without_checksums_are_refused(tmp_path: Path) -> None:
    checkpoints = checkpoints_of(Ranks(), tmp_path)
    save(checkpoints, 4)
    folder = tmp_path / "small" / "checkpoints" / "step-00000004"
    (folder / "complete.json").write_bytes(encode_json(saved(4)))  # as an older version wrote it
    assert asyncio.run(checkpoints.restore()) == saved(4)
    (folder / "ranks" / "part").write_text("2")
    with pytest.raises(StorageError, match=r"is of step 4, but the files of its ranks are of step 2; rename it"):
        asyncio.run(checkpoints.restore())


def test_ranks_may_have_fewer_steps_than_their_run_because_a_critic_was_trained_first_or_came_later(tmp_path: Path) -> None:
    ranks = Ranks()
    checkpoints = checkpoints_of(ranks, tmp_path)
    save(checkpoints, 4)
    ranks.steps_less = 3
    assert asyncio.run(checkpoints.restore()) == saved(4)


def test_what_has_changed_since_the_checkpoint_is_said_or_refused(tmp_path: Path) -> None:
    notes: list[str] = []
    save(checkpoints_of(Ranks(), tmp_path), 2)
    faster = replace(IDENTITY, settings={"train.optimizer.lr": 2e-3})
    assert asyncio.run(checkpoints_of(Ranks(), tmp_path, notes=notes, identity=faster).restore()) == saved(2)
    assert notes == ["continues with train.optimizer.lr = 0.002, was 0.001"]
    ranks = Ranks()
    with pytest.raises(ConfigError, match="cannot resume from step 2 with other data"):
        asyncio.run(checkpoints_of(ranks, tmp_path, identity=replace(IDENTITY, data="reversed")).restore())
    assert ranks.loaded == []
