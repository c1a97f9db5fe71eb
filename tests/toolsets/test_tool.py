"""The tool decorator, the schema it derives and the check of a model's arguments."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from batch_trajectories.basics.errors import ToolError
from toolsets.context import ToolContext
from toolsets.tool import ArgumentsError, as_result, tool


class Point(BaseModel):
    """A place."""

    x: int
    title: str = "here"


@tool(idempotent=True)
def mark(
    context: ToolContext,
    text: Annotated[str, Field(description="What to write.")],
    title: str = "",
    times: int = 1,
    point: Point | None = None,
) -> str:
    """Write a text."""
    return text * times


def test_schema_has_names_descriptions_and_no_pydantic_titles() -> None:
    function = mark.schema["function"]
    assert (function["name"], function["description"]) == ("mark", "Write a text.")
    parameters = function["parameters"]
    assert parameters["properties"]["text"] == {"description": "What to write.", "type": "string"}
    assert parameters["required"] == ["text"]
    assert parameters["additionalProperties"] is False
    assert "space" not in parameters["properties"]


def test_a_property_called_title_stays_in_the_schema() -> None:
    assert mark.parameters["properties"]["title"] == {"default": "", "type": "string"}
    assert set(mark.parameters["$defs"]["Point"]["properties"]) == {"x", "title"}
    assert "title" not in {k for k in mark.parameters if k != "properties"}


def test_arguments_are_converted_and_defaults_filled_in() -> None:
    parsed = mark.parse_arguments('{"text": "é", "times": "3", "point": {"x": 1}}')
    assert parsed == {"text": "é", "title": "", "times": 3, "point": Point(x=1)}


def test_a_text_in_the_hint_describes_a_parameter() -> None:
    @tool()
    def add(
        one: Annotated[int, "The number."],
        two: Annotated[int, 2, "The other.", Field(ge=0)] = 0,
        three: Annotated[int, "Not this.", Field(description="A third.")] = 0,
        four: int = 0,
    ) -> int:
        """Add numbers.

        Args:
            one: Not this.
            four: A fourth.
        """
        return one + two + three + four

    properties = add.parameters["properties"]
    described = [properties[name]["description"] for name in ("one", "two", "three", "four")]
    assert described == ["The number.", "The other.", "A third.", "A fourth."]
    assert properties["two"]["minimum"] == 0


def test_a_default_that_is_no_json_is_left_out_without_a_warning() -> None:
    nothing = object()

    @tool()
    def find(text: str, limit: int = nothing) -> str:  # type: ignore[assignment]
        """Find a text."""
        return str(limit is nothing)

    assert find.parameters["properties"]["limit"] == {"type": "integer"}
    assert find.parameters["required"] == ["text"]
    assert find.parse_arguments('{"text": "a"}')["limit"] is nothing


@pytest.mark.parametrize("blank", ["", "  \n", "{}"])
def test_blank_arguments_mean_none(blank: str) -> None:
    @tool()
    def noop(context: ToolContext, count: int = 2) -> str:
        """Do nothing."""
        return ""

    assert noop.parse_arguments(blank) == {"count": 2}


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        ("{", ["not valid JSON"]),
        ("[1]", ["JSON object", "an array"]),
        ("null", ["JSON object", "null"]),
        ('{"times": 1}', ["text: Field required"]),
        ('{"text": 1, "times": "x"}', ["text: ", "times: "]),
        ('{"text": "a", "colour": 1}', ["colour: unknown argument"]),
        ('{"text": "a", "point": {"x": "?"}}', ["point.x: "]),
        ('{"text": "\ud800"}', ["not valid JSON"]),
    ],
)
def test_bad_arguments_name_what_is_wrong(raw: str, parts: list[str]) -> None:
    with pytest.raises(ArgumentsError) as caught:
        mark.parse_arguments(raw)
    for word in parts:
        assert word in str(caught.value)
    assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize("depth", [200, 2_000, 200_000])
def test_deeply_nested_json_is_an_arguments_error(depth: int) -> None:
    raw = '{"text": ' + "[" * depth + "]" * depth + "}"
    with pytest.raises(ArgumentsError):
        mark.parse_arguments(raw)


def test_names_that_pydantic_reserves_work_as_parameters() -> None:
    @tool()
    def odd(context: ToolContext, schema: str, copy: int, model_x: str = "m") -> str:
        """Take odd names."""
        return ""

    assert set(odd.parameters["properties"]) == {"schema", "copy", "model_x"}
    parsed = odd.parse_arguments('{"schema": "s", "copy": 1}')
    assert parsed == {"schema": "s", "copy": 1, "model_x": "m"}


def test_decoration_refuses_what_it_cannot_describe() -> None:
    def untyped(context: ToolContext, path):  # type: ignore[no-untyped-def]  # the point of the test
        """Lack a hint."""

    def silent(context: ToolContext) -> str:
        return ""

    def greedy(context: ToolContext, *rest: str) -> str:
        """Take anything."""
        return ""

    def lazy(context: ToolContext) -> Iterator[str]:
        """Give piece after piece."""
        yield ""

    def foreign(context: ToolContext, lock: threading.Lock) -> str:
        """Take what JSON cannot hold."""
        return ""

    def hidden(city: str, /) -> str:
        """Cannot be called by name."""
        return ""

    with pytest.raises(TypeError, match=r"untyped.*'path'"):
        tool()(untyped)
    with pytest.raises(TypeError, match=r"silent.*docstring"):
        tool()(silent)
    with pytest.raises(TypeError, match=r"greedy.*'rest'"):
        tool()(greedy)
    with pytest.raises(TypeError, match=r"lazy.*generator"):
        tool()(lazy)
    with pytest.raises(TypeError, match=r"foreign.*lock"):
        tool()(foreign)
    with pytest.raises(TypeError, match=r"hidden.*'city'.*positional"):
        tool()(hidden)
    with pytest.raises(TypeError, match=r"'a\.b': not a valid tool name"):
        tool(name="a.b")(silent)


@pytest.mark.parametrize(
    ("returned", "content"),
    [
        ("plain", "plain"),
        ({"k": "日本", 1: [None, True]}, '{"k":"日本","1":[null,true]}'),
        (2**80, str(2**80)),
        (None, "null"),
    ],
)
def test_returned_values_become_json_text(returned: Any, content: str) -> None:
    assert as_result(returned).content == content


def test_a_value_json_cannot_hold_is_a_tool_error() -> None:
    circle: list[Any] = []
    circle.append(circle)
    for value in (object(), {"s": {1}}, circle):
        with pytest.raises(ToolError, match="not JSON"):
            as_result(value)
