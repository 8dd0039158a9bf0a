"""Base of all configuration sections, and the declaration of a setting: its default, a sentence, and the meaning of a change on resume.

A section is frozen and refuses unknown keys. The call of `field` has all facts about a setting; `declared` reads them back, for
`config.load` and `config.resume`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticKnownError

from offbeat.config.training_kinds import TrainingKind

NUMBER_OR_AUTO = float | Literal["auto"]
"""Type of a setting whose number a run can choose."""

Part = str
"""A part of a run that reads settings: "rl", or another kind of training by its section, such as "sft", which is also the warm-up."""

EXAMPLES: Part = "examples"
"""All parts but "rl", in `read_by`: they train on examples."""


class Change(Enum):
    """Meaning of a setting that differs from its value at the checkpoint from which a run resumes."""

    FREE = "nothing: where and how fast things are done, never what is learnt"
    TOLD = "the run continues with the new value, which is said in a line"
    REFUSED = "the run is refused: the checkpoint does not fit, or the data would be drawn in another order"
    CONTENT = "the run is refused if it now stands for other data or another model"
    ROWS = "the run is refused if other rows are trained on now, or in another order, and goes on otherwise, which is said in a line"
    CODE = "the run continues with the other code, which is said in a line, also where only its source is another"


def value_at(values: Any, key: str) -> Any:
    """Return the setting with a dotted name, such as "train.optimizer.lr", of a configuration or of its tables as dictionaries."""
    for name in key.split("."):
        values = values[name] if isinstance(values, Mapping) else getattr(values, name)
    return values


class Section(BaseModel):
    """One table of a configuration file.

    Attributes:
        on_resume: meaning of a change of fields without their own; None leaves it to the field that holds the table.
        read_by: parts of a run that read the fields without their own; None as above.
        training: the kind of training that the table is the section of; None of all other tables.
    """

    on_resume: ClassVar[Change | None] = None
    read_by: ClassVar[tuple[Part, ...] | None] = None
    training: ClassVar[TrainingKind | None] = None

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_for_number(cls, value: Any, info: ValidationInfo) -> Any:
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and kind in (int, float):  # otherwise pydantic would read true as 1
            raise PydanticKnownError("int_type" if kind is int else "float_type")
        return value


def check_number(given: Any, *, above: float, below: float) -> float:
    """Return a number between bounds, which may be given as text. Raises pydantic's errors for a number with these bounds."""
    try:
        number = float(given)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or isinstance(given, bool):
        raise PydanticKnownError("float_type")
    if not math.isfinite(number):
        raise PydanticKnownError("finite_number")
    if number <= above:
        raise PydanticKnownError("greater_than", {"gt": above})
    if number >= below:
        raise PydanticKnownError("less_than", {"lt": below})
    return number


def field(
    default: Any, text: str, *, on_resume: Change | None = None, read_by: tuple[Part, ...] | None = None, basic: bool | None = None,
    **bounds: Any,
) -> Any:
    """Define a configuration field, or a table of fields.

    Example:
        num_ranks: int = field(1, "Train processes.", ge=1, on_resume=Change.FREE, basic=True)

    Args:
        default: its value in a run that does not give it.
        text: a sentence that gives its unit and the reason for the default.
        on_resume: meaning of a change when a run resumes; None takes the section's.
        read_by: the parts of a run that read it, such as ("rl",); None takes the section's, and all parts read it without one.
        basic: whether a first run needs it. False of a table hides the basic settings in it.
        bounds: such as ge=0, as pydantic's Field takes them.
    """
    said = {"on_resume": on_resume and on_resume.name, "read_by": read_by and [*read_by], "basic": basic}
    return Field(default=default, description=text, json_schema_extra=said, **bounds)


@dataclass(frozen=True)
class Setting:
    """A field of a configuration, with its section's `on_resume` and `read_by` filled in.

    Attributes:
        key: "section.name", such as "train.optimizer.lr".
        info: its type, default, sentence and bounds.
        on_resume: meaning of a change; None if neither field nor section has one, which a test refuses.
        read_by: the parts of a run that read it; None if all do.
        basic: whether a first run needs it.
    """

    key: str
    info: FieldInfo
    on_resume: Change | None
    read_by: tuple[Part, ...] | None
    basic: bool

    def is_read_by(self, part: Part) -> bool:
        """Whether this part of a run reads it."""
        return self.read_by is None or part in self.read_by or (EXAMPLES in self.read_by and part != "rl")


def declared(
    section: type[Section], prefix: str = "", *, on_resume: Change | None = None, read_by: tuple[Part, ...] | None = None,
    basic: bool = True,
) -> Iterator[Setting]:
    """Yield the settings of a section and of the tables in it, in the order of the files.

    Args:
        prefix: of keys, such as "train.".
        on_resume, read_by: defaults where neither a field nor its section has one.
        basic: False if no setting in it is to be basic.
    """
    on_resume, read_by = section.on_resume or on_resume, section.read_by or read_by
    for name, info in section.model_fields.items():
        said: Any = info.json_schema_extra or {}
        change = Change[said["on_resume"]] if said.get("on_resume") else on_resume
        parts = tuple(said["read_by"]) if said.get("read_by") else read_by
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            shows = basic and said.get("basic") is not False
            yield from declared(info.annotation, f"{prefix}{name}.", on_resume=change, read_by=parts, basic=shows)
        else:
            yield Setting(f"{prefix}{name}", info, change, parts, basic and bool(said.get("basic")))


def shown(value: object) -> str:
    """Return a value as it is written in TOML: true, 0.5, 'text'."""
    return str(value).lower() if isinstance(value, bool) else repr(value)
