"""A tool: a typed function, the schema that the model sees, and the check of its arguments."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import ToolError
from batch_trajectories.basics.validation import UNKNOWN_KEY, Mistake, mistakes_in
from toolsets.docstring import read_docstring
from toolsets.signature import PREFIX, arguments_model, schema_of

MAX_RESULT_CHARS = 100_000
"""Longest content of a tool result; a longer one loses its middle."""

TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Tool names that every endpoint accepts."""

_MAX_REPORTED_FIELDS = 10

_JSON_TYPES: Mapping[type, str] = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "an array",
}

F = TypeVar("F", bound=Callable[..., Any])


ASKS = "asks"
"""Key in the details of a result: the tool's question to the user, still unanswered."""


class ArgumentsError(ValueError):
    """The model's arguments are not a JSON object that fits the tool's schema."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of one call."""

    content: str
    """The text that the model reads."""
    is_error: bool = False
    """Set where the call failed; never inferred from the content."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Facts for the record, never shown to the model."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call."""

    name: str
    """The name by which the model calls it."""
    description: str
    """Its description for the model."""
    parameters: dict[str, Any]
    """JSON Schema of the arguments object."""
    function: Callable[..., Any]
    """Called as `function(context, **arguments)`, or without the context; sync or async."""
    arguments_model: type[BaseModel] | None
    """Checks and converts the arguments; None leaves that to `check`, or to the function."""
    idempotent: bool = False
    """A call may be repeated after a crash: its effect is the same."""
    sequential: bool = False
    """A call must not run at the same time as other calls of its turn."""
    takes_context: bool = True
    """The function's first argument is the `ToolContext`."""
    check: Callable[[dict[str, Any]], None] | None = None
    """Checks the arguments if there is no model; raises `ArgumentsError`."""
    quick: bool = False
    """A plain function that takes microseconds and waits for nothing: it runs in the event loop,
    while others run in a thread. All conversations of the worker wait for it."""

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI form."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": self.parameters,
            },
        }

    def parse_arguments(self, raw: str) -> dict[str, Any]:
        """Return the keyword arguments in the model's JSON text `raw`, with defaults filled in.

        A blank text means no arguments. Raises `ArgumentsError` with one line per problem.
        """
        try:
            loaded = exact_json.loads(raw) if raw.strip() else {}
        except RecursionError:
            raise ArgumentsError("the JSON is nested too deeply") from None
        except ValueError as error:
            raise ArgumentsError(f"not valid JSON ({error})") from None
        if not isinstance(loaded, dict):
            raise ArgumentsError(f"expected a JSON object, got {_JSON_TYPES[type(loaded)]}")
        if self.arguments_model is None:
            if self.check is not None:
                self.check(loaded)
            return loaded
        try:
            checked = self.arguments_model.model_validate(loaded)
        except RecursionError:
            raise ArgumentsError("the JSON is nested too deeply") from None
        except ValidationError as error:
            raise ArgumentsError(_explain(error)) from None
        return {
            name.removeprefix(PREFIX): getattr(checked, name)
            for name in self.arguments_model.model_fields
        }


def tool(
    *,
    name: str | None = None,
    idempotent: bool = False,
    sequential: bool = False,
    quick: bool = False,
) -> Callable[[F], Tool]:
    """Make a `Tool` from a typed function.

    A first parameter annotated as `ToolContext` gets the context of the task. The other parameters
    become the schema; `Annotated[T, Field(description=...)]` or an "Args:" section of the docstring
    describes them. The docstring's text before that section describes the tool. The function
    returns a string, a `ToolResult`, or any value that JSON can hold. Raises `TypeError` if the
    function cannot be described.
    """

    def build(function: F) -> Tool:
        tool_name = name or function.__name__
        if not TOOL_NAME.fullmatch(tool_name):
            raise TypeError(
                f"tool {tool_name!r}: not a valid tool name; use 1 to 64 letters, digits, '_' "
                "and '-'"
            )
        description, arguments = read_docstring(inspect.getdoc(function) or "")
        if not description:
            raise TypeError(f"tool {tool_name}: the function has no docstring")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"tool {tool_name}: a generator cannot be a tool; return a list")
        model, takes_context = arguments_model(function, tool_name, arguments)
        return Tool(
            name=tool_name,
            description=description,
            parameters=schema_of(model, tool_name),
            function=function,
            arguments_model=model,
            idempotent=idempotent,
            sequential=sequential,
            takes_context=takes_context,
            quick=quick,
        )

    return build


def as_result(returned: object) -> ToolResult:
    """Make a result of a tool function's return value; raises `ToolError` if JSON cannot hold it.

    A string is the content; any other value becomes JSON text. An object with a true
    `requiresConfirmation` or `requiresInput` asks the user its `message`.
    """
    if isinstance(returned, ToolResult):
        return returned
    if isinstance(returned, str):
        return ToolResult(returned)
    try:
        content = _encode(returned)
    except (TypeError, ValueError, RecursionError) as error:
        kind = type(returned).__name__
        raise ToolError(f"its result, a {kind}, is not JSON: {error}") from error
    if isinstance(returned, Mapping) and (
        returned.get("requiresConfirmation") or returned.get("requiresInput")
    ):
        return ToolResult(content, details={ASKS: str(returned.get("message") or content)})
    return ToolResult(content)


def _encode(value: object) -> str:
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:
        # The standard library also writes integers beyond 64 bits and lone surrogates.
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _explain(error: ValidationError) -> str:
    lines = [_explain_one(mistake) for mistake in mistakes_in(error)]
    shown = lines[:_MAX_REPORTED_FIELDS]
    if len(lines) > len(shown):
        shown.append(f"and {len(lines) - len(shown)} more")
    return "\n".join(shown)


def _explain_one(mistake: Mistake) -> str:
    where = ".".join(key[:80] for key in mistake.keys) or "arguments"
    return f"{where}: {'unknown argument' if mistake.kind == UNKNOWN_KEY else mistake.reason}"
