"""Rows and their tables agree."""

from dataclasses import fields
from typing import get_args

import sqlalchemy as sa

from offbeat.service.tables import TABLES, CheckpointRow, Row, SessionRow


def test_every_row_has_a_table_with_its_fields_as_columns() -> None:
    assert set(TABLES) == set(get_args(Row))
    for row, table in TABLES.items():
        assert table.columns.keys() == [field.name for field in fields(row)]


def test_keys_and_what_may_be_empty_follow_from_the_row() -> None:
    checkpoints, sessions = TABLES[CheckpointRow], TABLES[SessionRow]
    assert checkpoints.primary_key.columns.keys() == ["run_id", "kind", "name"]
    assert [column.name for column in checkpoints.columns if column.nullable] == ["expires"]
    assert [column.name for column in sessions.columns if column.nullable] == ["ended"]


def test_numbers_are_wide_enough_for_what_clients_count() -> None:
    integers = [column for table in TABLES.values() for column in table.columns if isinstance(column.type, sa.Integer)]
    assert integers
    assert all(isinstance(column.type, sa.BigInteger) for column in integers)
    times = [column for table in TABLES.values() for column in table.columns if isinstance(column.type, sa.Float)]
    assert all(isinstance(column.type, sa.Double) for column in times)
