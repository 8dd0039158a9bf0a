"""Base of all configuration sections: frozen, refuses unknown keys, and has a sentence for each field."""

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticKnownError

NUMBER_OR_AUTO = float | Literal["auto"]
"""Type of a setting whose number a run can choose."""


class Section(BaseModel):
    """One table of a configuration file."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_for_number(cls, value: Any, info: ValidationInfo) -> Any:
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and kind in (int, float):  # otherwise pydantic would read true as 1
            raise PydanticKnownError("int_type" if kind is int else "float_type")
        return value


def check_number(given: Any, *, above: float, below: float) -> float:
    """Return a number between bounds, which may be given as text. Raises what pydantic raises for a number with these bounds."""
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


def field(default: Any, text: str, **bounds: Any) -> Any:
    """Define a configuration field with its default and one sentence that gives its unit and the reason for the default."""
    return Field(default=default, description=text, **bounds)


def shown(value: object) -> str:
    """Return a value as it is written in TOML: true, 0.5, 'text'."""
    return str(value).lower() if isinstance(value, bool) else repr(value)
