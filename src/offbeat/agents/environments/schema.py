"""A typed Python function as a tool: its schema from annotations and docstring, and calls of it with arguments that a model has written."""

import inspect
import json
import re
from collections.abc import Callable
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from offbeat.chat.messages import Tool
from offbeat.errors import CodeError
from offbeat.user_code.boundary import Caught

_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^\s*\**(\w+)\s*(?:\([^)]*\))?\s*:\s*(.+)$")


def tool_of(function: Callable[..., Any]) -> Tool:
    """Describe a function.

    Its docstring is the description: the text before "Args:", below which each argument may have a line, such as `city: name of the city`.
    Raises CodeError if an argument has no type, or one that has no JSON schema; or if it takes any number of arguments.
    """
    schema = arguments_of(function).model_json_schema()
    schema.pop("title", None)
    for argument in schema.get("properties", {}).values():
        argument.pop("title", None)
    text = inspect.getdoc(function) or ""
    first = _SECTION.search(text)
    return Tool(function.__name__, text[: first.start() if first else None].strip(), {"properties": {}, **schema, "type": "object"})


def arguments_of(function: Callable[..., Any]) -> type[BaseModel]:
    """Return a model of a function's arguments, which converts and checks them; raises CodeError as `tool_of`."""
    name, notes, fields = function.__name__, _argument_notes(inspect.getdoc(function) or ""), {}
    hints: dict[str, Any] = {}
    with Caught() as caught:  # annotations are text that may say anything
        hints = get_type_hints(function, include_extras=True)
    if caught.error is not None:
        raise CodeError(f"the types of tool {name} cannot be read: {caught.error}") from caught.error
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise CodeError(f"tool {name} must name all of its arguments, got {parameter}; models call it by name")
        if parameter.name not in hints:
            raise CodeError(f"argument {parameter.name!r} of tool {name} has no type; write one, such as {parameter.name}: str")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], Field(default, description=notes.get(parameter.name)))
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False), **fields)
        model.model_json_schema()
    except (PydanticUserError, TypeError, NameError) as exc:
        raise CodeError(f"the types of tool {name} have no JSON schema: {str(exc).splitlines()[0]}") from exc
    return model


def read_arguments(model: type[BaseModel], text: str) -> dict[str, Any]:
    """Return the arguments of a call, JSON as a model wrote it, converted to the types of the function.

    Raises ValueError, whose message is for the model, if they do not fit.
    """
    try:
        arguments = model.model_validate(json.loads(text or "{}"))
    except ValidationError as exc:
        raise ValueError("; ".join(
            f"{'.'.join(map(str, error['loc'])) or 'arguments'}: {error['msg']}" for error in exc.errors(include_url=False))) from exc
    return {name: getattr(arguments, name) for name in type(arguments).model_fields}


def _argument_notes(doc: str) -> dict[str, str]:
    """Return each argument's text in the docstring's section "Args:", such as {"city": "name of the city"}."""
    start = next((found for found in _SECTION.finditer(doc) if found[1] in ("Args", "Arguments", "Parameters")), None)
    if start is None:
        return {}
    end = next((found.start() for found in _SECTION.finditer(doc, start.end())), None)
    notes: dict[str, str] = {}
    last = ""
    for line in doc[start.end() : end].splitlines():
        found = _ARGUMENT.match(line)
        if found:
            last = found[1]
            notes[last] = found[2].strip()
        elif last and line.strip():
            notes[last] += f" {line.strip()}"
    return notes
