"""An index of checkpoints says what a list of all rows says."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from offbeat.service.index import CheckpointRows, path_of
from offbeat.service.tables import CheckpointRow
from small_service import LORA

RUNS = [f"00000000-0000-4000-8000-000000000000:train:{number}" for number in range(3)]
ROWS = st.builds(
    lambda run, name, owner, folder, public: CheckpointRow(
        run, "training", name, owner, folder, 0.0, None, 1, public, {}, LORA, "base"),
    st.sampled_from(RUNS), st.sampled_from("ab"), st.sampled_from(["alice", "bob"]), st.sampled_from("xyz"), st.booleans())


@given(st.lists(ROWS | st.integers(0, 9), max_size=30))
def test_whatever_is_put_and_deleted_every_question_has_the_answer_of_a_look_at_all(changes: list[CheckpointRow | int]) -> None:
    index, plain = CheckpointRows(), {}
    for change in changes:
        if isinstance(change, int):
            for path in list(plain)[change : change + 1]:
                del index[path], plain[path]
        else:
            index[path_of(change)] = plain[path_of(change)] = change
    rows = list(plain.values())
    assert dict(index) == plain and len(index) == len(plain)
    assert index.owners == {row.owner for row in rows} and sorted(map(id, index.public)) == sorted(id(row) for row in rows if row.public)
    assert [index.has_folder(folder) for folder in "xyz"] == [any(row.folder == folder for row in rows) for folder in "xyz"]
    for owner in (None, "alice", "bob"):
        for run in (None, *RUNS):
            wanted = [row for row in rows if owner in (None, row.owner) and run in (None, row.run_id)]
            assert sorted(map(id, index.of(owner=owner, run_id=run))) == sorted(map(id, wanted))


def test_a_question_costs_what_its_answer_holds() -> None:
    class Watched(CheckpointRow):
        asked = 0

        def __getattribute__(self, name: str) -> object:
            Watched.asked += name in ("run_id", "owner", "folder", "public")
            return super().__getattribute__(name)

    row = Watched("run", "training", "a", "alice", "folder", 0.0, None, 1, False, {}, LORA, "base")
    index = CheckpointRows(replace(row, run_id=f"run {number}", owner=f"owner {number}") for number in range(1000))
    Watched.asked = 0
    assert len(list(index.of(run_id="run 7"))) == len(list(index.of(owner="owner 7"))) == 1 and not list(index.public)
    assert index.has_folder("folder") and Watched.asked == 0
