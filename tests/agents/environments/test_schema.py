"""Typed functions as tools."""

from pathlib import Path
from typing import Literal

import pytest

from offbeat.agents.environments.schema import arguments_of, read_arguments, tool_of
from offbeat.errors import CodeError
from offbeat.user_code.functions import resolve

CODE = Path(__file__).parents[2] / "support" / "playing.py"


def test_annotations_and_docstring_make_the_schema() -> None:
    tool = tool_of(resolve(f"{CODE}:add", kind="tool"))
    assert tool.name == "add" and tool.description == "Add two numbers."
    assert tool.parameters == {
        "type": "object", "additionalProperties": False, "required": ["a"], "properties": {
            "a": {"type": "integer", "description": "the first number, which may be negative"},
            "b": {"type": "integer", "default": 1, "description": "the second one"}}}


def test_arguments_are_converted_or_refused_in_words_for_the_model() -> None:
    def order(size: Literal["s", "m"], extras: list[str] | None = None) -> str: ...

    model = arguments_of(order)
    assert read_arguments(model, '{"size": "m", "extras": ["x"]}') == {"size": "m", "extras": ["x"]}
    with pytest.raises(ValueError, match="^size: Input should be 's' or 'm'; color: Extra inputs are not permitted$"):
        read_arguments(model, '{"size": "l", "color": "red"}')
    assert read_arguments(arguments_of(resolve(f"{CODE}:add", kind="tool")), '{"a": "3"}') == {"a": 3, "b": 1}


def test_functions_that_cannot_be_called_by_name_are_refused() -> None:
    def anything(*args: int) -> int: ...

    def handle(file: CodeError) -> int: ...

    with pytest.raises(CodeError, match="argument 'a' of tool untyped has no type; write one, such as a: str"):
        tool_of(resolve(f"{CODE}:untyped", kind="tool"))
    with pytest.raises(CodeError, match=r"tool anything must name all of its arguments, got \*args: int"):
        tool_of(anything)
    with pytest.raises(CodeError, match="the types of tool handle have no JSON schema"):
        tool_of(handle)
