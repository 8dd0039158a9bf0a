"""Base of all configuration sections: frozen, refuses unknown keys, and has a sentence for each field."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticKnownError


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


def field(default: Any, text: str, **bounds: Any) -> Any:
    """Define a configuration field with its default and one sentence that gives its unit and the reason for the default."""
    return Field(default=default, description=text, **bounds)


def shown(value: object) -> str:
    """Return a value as it is written in TOML: true, 0.5, 'text'."""
    return str(value).lower() if isinstance(value, bool) else repr(value)
