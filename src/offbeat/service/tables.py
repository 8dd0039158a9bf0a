"""Database schema of the service: a frozen row class for each kind of object, and the table that stores it.

The database holds metadata only: results of requests and weights are files, and rows have their places. Each table is derived from its row
class, field by field; mappings, tuples and nested records are stored as JSON text. Times are seconds since the epoch, such as 1760000000.5.
Tables are used by `store`, and rows by the core.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_args, get_type_hints

import msgspec
import sqlalchemy as sa

from offbeat.service.types import CheckpointKind, LoraSpec

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class SessionRow:
    """A client's session; `ended` is None while it is active."""

    id: str
    owner: str
    created: float
    last_seen: float
    ended: float | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    display_name: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelRow:
    """A model, which is also a training run.

    Attributes:
        step: number of optimizer steps in the saved state, including the steps of the checkpoints from which it came.
        state_folder: folder of its last saved state, from which it continues; empty for a fresh adapter.
        last_seq: highest number of a request that has an outcome; at least all requests whose effects are in the saved state are included.
        next_version: version of the next adapter made from it.
        dirty: whether it was trained since its last saved state.
    """

    id: str
    session_id: str
    owner: str
    created: float
    last_request: float
    base_model: str
    lora: LoraSpec
    metadata: Mapping[str, str] = field(default_factory=dict)
    step: int = 0
    state_folder: str = ""
    last_seq: int = 0
    next_version: int = 0
    ended: bool = False
    dirty: bool = False


@dataclass(frozen=True)
class CheckpointRow:
    """A checkpoint of a run: a complete folder.

    Attributes:
        expires: None if it is kept until it is deleted.
        public: whether anybody may load or sample it.
        step: number of optimizer steps in these weights.
        version: version of the adapter, for sampler checkpoints.
    """

    run_id: str
    kind: CheckpointKind
    name: str
    owner: str
    folder: str
    created: float
    expires: float | None
    size_bytes: int
    public: bool
    metadata: Mapping[str, str]
    lora: LoraSpec
    base_model: str
    step: int = 0
    version: int = 0


@dataclass(frozen=True)
class SamplerRow:
    """A sampler of the base model if `run_id` is empty, else of the adapter in `folder`; an ephemeral one has `size_bytes` and no path."""

    id: str
    session_id: str
    owner: str
    base_model: str
    path: str = ""
    run_id: str = ""
    version: int = 0
    folder: str = ""
    size_bytes: int = 0
    created: float = 0.0
    ended: bool = False


@dataclass(frozen=True)
class FutureRow:
    """A request that has ended, and the place of its answer in the results files."""

    request_id: str
    owner: str
    kind: str
    created: float
    finished: float
    content_type: str
    segment: int
    start: int
    length: int


Row = SessionRow | ModelRow | CheckpointRow | SamplerRow | FutureRow


class _Json(sa.types.TypeDecorator[Any]):
    """A value of a Python type, stored as JSON text."""

    impl = sa.Text
    cache_ok = True

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> str:  # noqa: ARG002
        return msgspec.json.encode(value).decode()

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> Any:  # noqa: ARG002
        return msgspec.json.decode(value, type=self.kind)


_COLUMN_TYPES: dict[Any, Any] = {
    str: sa.Text, CheckpointKind: sa.Text, int: sa.BigInteger, float: sa.Double, float | None: sa.Double, bool: sa.Boolean}


def _table(row: type[Row], name: str, *, key: int = 1, indexed: tuple[str, ...] = ()) -> sa.Table:
    """Return the table of a row class, whose first `key` fields are the primary key."""
    hints = get_type_hints(row)
    columns = [
        sa.Column(
            column.name, _COLUMN_TYPES.get(hints[column.name]) or _Json(hints[column.name]),
            primary_key=place < key, nullable=type(None) in get_args(hints[column.name]), index=column.name in indexed, autoincrement=False)
        for place, column in enumerate(fields(row))]
    return sa.Table(name, METADATA, *columns)


METADATA = sa.MetaData()
SCHEMA = sa.Table("schema_version", METADATA, sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False))
IDENTITY = sa.Table("identity", METADATA, sa.Column("id", sa.Text, primary_key=True))
TABLES: Mapping[type[Row], sa.Table] = {
    SessionRow: _table(SessionRow, "sessions"),
    ModelRow: _table(ModelRow, "models"),
    CheckpointRow: _table(CheckpointRow, "checkpoints", key=3),
    SamplerRow: _table(SamplerRow, "samplers"),
    FutureRow: _table(FutureRow, "futures", indexed=("finished", "segment")),
}
