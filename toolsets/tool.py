"""Tools: typed functions, the schemas that the model sees, and the check of arguments."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import ToolError
from batch_trajectories.basics.validation import UNKNOWN_KEY, Mistake, mistakes_in
from toolsets.context import ToolContext

MAX_RESULT_CHARS = 100_000
"""Maximum length of a tool result; the middle of a longer one is cut out."""

TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""The form of tool names that every endpoint accepts."""

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


Effects = Literal["none", "workspace", "elsewhere"]
"""The place of a tool's effects: nowhere, only the files of the conversation's workspace and its
sandbox, or anywhere."""

ASKS = "asks"
"""Key in the details of a result for the tool's question to the user, if it is still unanswered."""


class ArgumentsError(ValueError):
    """The model's arguments are not a JSON object that fits the tool's schema."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of one call."""

    content: str
    """The text that the model reads."""
    is_error: bool = False
    """Whether the call failed; never inferred from the content."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Facts for the record; the model never sees them."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    """The name by which the model calls the tool."""
    description: str
    """The description for the model."""
    parameters: dict[str, Any]
    """JSON Schema of the arguments object."""
    function: Callable[..., Any]
    """The function; called as `function(context, **arguments)`, or without the context; sync or
    async."""
    arguments_model: type[BaseModel] | None
    """Checks and converts the arguments; None: `check` or the function does that."""
    idempotent: bool = False
    """Whether a call may be repeated after a crash, because its effect is the same."""
    effects: Effects = "elsewhere"
    """The place of the effects. After a crash, calls with effects in the workspace are undone and
    run again."""
    sequential: bool = False
    """Whether a call must not run at the same time as other calls of its turn."""
    takes_context: bool = True
    """Whether the function's first argument is the `ToolContext`."""
    check: Callable[[dict[str, Any]], None] | None = None
    """Checks the arguments if there is no model; raises `ArgumentsError`."""
    is_async: bool = field(init=False, repr=False)
    """Whether the function is a coroutine function."""
    quick: bool = False
    """Whether the function takes only microseconds and runs in the event loop, not in a thread. All
    conversations of the worker wait for it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_async", inspect.iscoroutinefunction(self.function))

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
        # Not `model_fields`, which pydantic looks up anew each time.
        return {
            name.removeprefix(PREFIX): getattr(checked, name)
            for name in self.arguments_model.__pydantic_fields__
        }


def tool(
    *,
    name: str | None = None,
    idempotent: bool = False,
    effects: Effects = "elsewhere",
    sequential: bool = False,
    quick: bool = False,
) -> Callable[[F], Tool]:
    """Make a `Tool` from a typed function.

    A first parameter annotated as `ToolContext` gets the context of the task. The other parameters
    become the schema; `Annotated[T, "TEXT"]`, `Annotated[T, Field(description="TEXT")]` or an
    "Args:" section of the docstring describes them. A default that is no JSON is not in the schema.
    The docstring's text before that section describes the tool. The function returns a string, a
    `ToolResult`, or any value that JSON can express. A tool without effects is idempotent. Raises
    `TypeError` if the function cannot be described.
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
            parameters=make_schema(model, tool_name),
            function=function,
            arguments_model=model,
            idempotent=idempotent or effects == "none",
            effects=effects,
            sequential=sequential,
            takes_context=takes_context,
            quick=quick,
        )

    return build


def as_result(returned: object) -> ToolResult:
    """Convert the return value of a tool function; raises `ToolError` if it is not JSON.

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
        content = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
        if b"null" in content and (problem := exact_json.infinite_number_in(value)) is not None:
            raise ValueError(problem)
        return content.decode()
    except TypeError:
        if (problem := exact_json.infinite_number_in(value)) is not None:
            raise ValueError(problem) from None
        # The standard library also writes integers beyond 64 bits and lone surrogates.
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _explain(error: ValidationError) -> str:
    # In pydantic's words: calls that are repeated to rebuild a workspace must give the same text as
    # in runs of earlier versions.
    messages = [p["msg"] for p in error.errors(include_url=False, include_context=False)]
    lines = [
        _explain_one(mistake._replace(reason=message.removeprefix("Value error, ")))
        for mistake, message in zip(mistakes_in(error), messages, strict=True)
    ]
    shown = lines[:_MAX_REPORTED_FIELDS]
    if len(lines) > len(shown):
        shown.append(f"and {len(lines) - len(shown)} more")
    return "\n".join(shown)


def _explain_one(mistake: Mistake) -> str:
    where = ".".join(key[:80] for key in mistake.keys) or "arguments"
    return f"{where}: {'unknown argument' if mistake.kind == UNKNOWN_KEY else mistake.reason}"


PREFIX = "arg_"
"""Prefix of the model's fields, so that parameters can have names that pydantic uses itself."""


def arguments_model(
    function: Callable[..., Any], tool_name: str, descriptions: Mapping[str, str]
) -> tuple[type[BaseModel], bool]:
    """Return the model of a function's arguments, and whether it takes a `ToolContext`.

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
        own = _find_description(hint) or getattr(default, "description", None)
        field = Field(alias=name, description=own or descriptions.get(name))
        missing = default is inspect.Parameter.empty
        fields[PREFIX + name] = (Annotated[hint, field], ... if missing else default)
    try:
        return create_model(f"{tool_name}_arguments", __config__=config, **fields), takes_context
    except PydanticUserError as error:
        raise TypeError(f"tool {tool_name}: {error.message.splitlines()[0]}") from error


def make_schema(model: type[BaseModel], tool_name: str) -> dict[str, Any]:
    """Return the JSON Schema of a model of arguments; raises `TypeError` if it has none."""
    try:
        schema = model.model_json_schema(by_alias=True, schema_generator=_SchemaGenerator)
        return _remove_titles(schema)
    except PydanticUserError as error:
        raise TypeError(f"tool {tool_name}: {error.message.splitlines()[0]}") from error


def _find_description(hint: Any) -> str | None:
    """The description of a parameter in its hint: that of a `Field`, else a text in `Annotated`."""
    if (described := FieldInfo.from_annotation(hint).description) is not None:
        return described
    return next((mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, str)), None)


class _SchemaGenerator(GenerateJsonSchema):
    """Leaves out a default that is no JSON without a warning: its parameter stays optional."""

    ignored_warning_kinds = GenerateJsonSchema.ignored_warning_kinds | {"non-serializable-default"}


def _hints(function: Callable[..., Any], tool_name: str) -> dict[str, Any]:
    """Return the type hints of all parameters by name, in order."""
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


def _remove_titles(schema: dict[str, Any]) -> dict[str, Any]:
    """Drop the titles that pydantic adds, but keep a property called "title"."""
    cleaned: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "title" and isinstance(value, str):
            continue
        if key in ("properties", "$defs") and isinstance(value, dict):
            cleaned[key] = {name: _remove_titles(inner) for name, inner in value.items()}
        elif key in ("default", "const", "enum", "examples"):
            cleaned[key] = value
        elif isinstance(value, dict):
            cleaned[key] = _remove_titles(value)
        elif isinstance(value, list):
            cleaned[key] = [_remove_titles(v) if isinstance(v, dict) else v for v in value]
        else:
            cleaned[key] = value
    return cleaned


_ARGUMENTS = frozenset({"args", "arguments", "params", "parameters"})

_SECTION = re.compile(
    r"^(args|arguments|params|parameters|returns|raises|yields|examples?):[ \t]*\n(?=\s*^[ \t]+\S)",
    re.MULTILINE | re.IGNORECASE,
)
"""The heading of a section with indented lines below it."""


def read_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """Return the text before the sections, and the descriptions of the parameters by name.

    Each paragraph becomes one line.
    """
    arguments: dict[str, str] = {}
    sections = list(_SECTION.finditer(docstring))
    for section in sections:
        if section[1].lower() in _ARGUMENTS:
            arguments |= _items(docstring[section.end() :])
    text = docstring[: sections[0].start()] if sections else docstring
    return _unwrap(text), arguments


def _items(block: str) -> dict[str, str]:
    """Return the items `name: text` or `name (type): text` at the beginning of a block.

    Lines with a deeper indent continue an item. A line without an indent ends the block.
    """
    lines: dict[str, list[str]] = {}
    item: list[str] = []
    first = None
    for line in block.split("\n"):
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        if text and not indent:
            break
        first = indent if first is None and text else first
        if text and indent == first:
            head, colon, text = text.partition(":")
            item = [text]
            if colon:
                lines[head.partition("(")[0].strip()] = item
        else:
            item.append(text)
    return {name: _unwrap("\n".join(texts)) for name, texts in lines.items()}


def _unwrap(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n"))
