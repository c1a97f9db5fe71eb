"""Makes the pydantic model of a tool's arguments from the signature of its function."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo

from toolsets.context import ToolContext

PREFIX = "arg_"
"""Prefix of the model's fields: without it, parameters could not have names that pydantic uses."""


def arguments_model(
    function: Callable[..., Any], tool_name: str, descriptions: Mapping[str, str]
) -> tuple[type[BaseModel], bool]:
    """Return the model of a function's arguments, and whether its first one is the `ToolContext`.

    `descriptions` are used for parameters whose hint has none. Raises `TypeError` for a function
    that cannot be described.
    """
    hints = _hints(function, tool_name)
    takes_context = _takes_context(hints)
    if takes_context:
        del hints[next(iter(hints))]
    parameters = inspect.signature(function).parameters
    config = ConfigDict(extra="forbid", protected_namespaces=(), arbitrary_types_allowed=False)
    fields: dict[str, Any] = {}
    for name, hint in hints.items():
        default = parameters[name].default
        own = FieldInfo.from_annotation(hint).description or getattr(default, "description", None)
        field = Field(alias=name, description=own or descriptions.get(name))
        missing = default is inspect.Parameter.empty
        fields[PREFIX + name] = (Annotated[hint, field], ... if missing else default)
    try:
        return create_model(f"{tool_name}_arguments", __config__=config, **fields), takes_context
    except PydanticUserError as error:
        raise TypeError(f"tool {tool_name}: {error.message.splitlines()[0]}") from error


def schema_of(model: type[BaseModel], tool_name: str) -> dict[str, Any]:
    """Return the JSON Schema of a model of arguments; raises `TypeError` if it has none."""
    try:
        return _without_titles(model.model_json_schema(by_alias=True))
    except PydanticUserError as error:
        raise TypeError(f"tool {tool_name}: {error.message.splitlines()[0]}") from error


def _hints(function: Callable[..., Any], tool_name: str) -> dict[str, Any]:
    """The type hints of all parameters by name, in order."""
    parameters = inspect.signature(function).parameters
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(f"tool {tool_name}: unknown type in a hint: {error}") from error
    for parameter in parameters.values():
        where = f"tool {tool_name}: parameter {parameter.name!r}"
        if parameter.annotation is inspect.Parameter.empty:
            raise TypeError(f"{where} has no type hint")
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(f"{where} must not be *args or **kwargs")
    hints = {name: hints[name] for name in parameters}
    for parameter in list(parameters.values())[int(_takes_context(hints)) :]:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            where = f"tool {tool_name}: parameter {parameter.name!r}"
            raise TypeError(f"{where} must not be positional-only")
    return hints


def _takes_context(hints: Mapping[str, Any]) -> bool:
    return next(iter(hints.values()), None) is ToolContext


def _without_titles(schema: dict[str, Any]) -> dict[str, Any]:
    """Drop the titles that pydantic adds, but keep a property called "title"."""
    cleaned: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "title" and isinstance(value, str):
            continue
        if key in ("properties", "$defs") and isinstance(value, dict):
            cleaned[key] = {name: _without_titles(inner) for name, inner in value.items()}
        elif key in ("default", "const", "enum", "examples"):
            cleaned[key] = value
        elif isinstance(value, dict):
            cleaned[key] = _without_titles(value)
        elif isinstance(value, list):
            cleaned[key] = [_without_titles(v) if isinstance(v, dict) else v for v in value]
        else:
            cleaned[key] = value
    return cleaned
