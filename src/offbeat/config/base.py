"""The base of every configuration section: frozen, unknown keys refused, a sentence under each field."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """One table of a configuration file."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


def field(default: Any, text: str, **bounds: Any) -> Any:
    """A configuration field: its default, and one sentence with its unit and the reason for the default."""
    return Field(default=default, description=text, **bounds)
