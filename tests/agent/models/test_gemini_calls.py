"""Calls whose arguments come in parts, as Vertex AI streams them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.models.dialects.dialect import read_reply
from agent.models.dialects.gemini import GeminiAssembly
from agent.models.errors import ModelError

JSON = dict[str, Any]

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=6)
TEXTS = st.text(max_size=8)
SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | TEXTS
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(NAMES, inner, min_size=1, max_size=3)
    ),
    max_leaves=6,
)


def event(*parts: JSON, finish: str | None = None) -> JSON:
    """A part of a stream with these parts of its content."""
    ending = {} if finish is None else {"finishReason": finish}
    return {"candidates": [{"content": {"role": "model", "parts": list(parts)}, **ending}]}


def piece(path: str, *, more: bool = True, **value: Any) -> JSON:
    """A further part of a call, with a value at a path."""
    partial = [{"jsonPath": path, **value}]
    return {"functionCall": {"partialArgs": partial, **({"willContinue": True} if more else {})}}


def stream_value(path: str, value: Any, cut: int) -> Iterator[JSON]:
    """The parts that stream a value; texts are cut after each `cut` characters."""
    if isinstance(value, dict):
        for key, inner in value.items():
            step = f".{key}" if key.isidentifier() else f"[{quote(key)}]"
            yield from stream_value(path + step, inner, cut)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from stream_value(f"{path}[{number}]", inner, cut)
    elif isinstance(value, str):
        for at in range(0, len(value), cut):
            yield piece(path, stringValue=value[at : at + cut], willContinue=True)
        end: JSON = {} if value else {"stringValue": ""}
        yield piece(path, **end)
    elif value is None:
        yield piece(path, nullValue="NULL_VALUE")
    elif isinstance(value, bool):
        yield piece(path, boolValue=value)
    else:
        yield piece(path, numberValue=value)


def quote(key: str) -> str:
    """A name as it stands in a path (RFC 9535)."""
    escaped = key.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def read_stream(*events: JSON) -> Any:
    """The message of a stream."""
    assembly = GeminiAssembly(lambda delta: None)
    for one in events:
        assembly.add(one)
    return read_reply("gemini", assembly.finish()).message


BEGIN = {"functionCall": {"name": "look", "id": "c1", "willContinue": True}}
END = event({"functionCall": {}}, finish="STOP")


@given(st.dictionaries(NAMES, VALUES, max_size=4), st.integers(1, 4))
def test_a_stream_of_arguments_is_the_whole_call(arguments: JSON, cut: int) -> None:
    parts = [event(part) for part in stream_value("$", arguments, cut)]
    whole = {"functionCall": {"name": "look", "id": "c1", "args": arguments}}
    assert read_stream(event(BEGIN), *parts, END) == read_stream(event(whole, finish="STOP"))


def test_calls_after_each_other_and_what_is_beside_them() -> None:
    second = {"functionCall": {"name": "read", "willContinue": True}}
    message = read_stream(
        event({"text": "Look."}),
        event({**BEGIN, "thoughtSignature": "one"}),
        event(piece("$.a", numberValue=1)),
        event({"functionCall": {}}),
        event(second, piece("$.b", stringValue="x", more=False)),
        event({"functionCall": {"name": "look", "args": {"c": 3}}}, finish="STOP"),
    )
    calls = [call["function"] for call in message["tool_calls"]]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("look", {"a": 1}),
        ("read", {"b": "x"}),
        ("look", {"c": 3}),
    ]
    assert message["content"] == "Look."
    signed = message["provider_blocks"]["blocks"][1]
    assert signed["thoughtSignature"] == "one"
    assert "partialArgs" not in json.dumps(message)


@pytest.mark.parametrize(
    "parts",
    [
        [piece("a", numberValue=1)],
        [piece("$", numberValue=1)],
        [piece("$[0]", numberValue=1)],
        [piece("$.a[", numberValue=1)],
        [piece("$..a", numberValue=1)],
        [piece("$.a[*]", numberValue=1)],
        [piece("$.a[1]", numberValue=1)],
        [piece("$.a", numberValue=1), piece("$.a.b", numberValue=1)],
        [piece("$.a", numberValue=1), piece("$.a", stringValue="x")],
        [{"functionCall": {"partialArgs": "x", "willContinue": True}}],
        [{"functionCall": {"partialArgs": [{"stringValue": "x"}], "willContinue": True}}],
    ],
    ids=str,
)
def test_parts_that_make_no_arguments_are_malformed(parts: list[JSON]) -> None:
    with pytest.raises(ModelError) as caught:
        read_stream(event(BEGIN), *map(event, parts), END)
    assert caught.value.kind == "malformed"


def test_a_call_that_does_not_end_is_malformed_unless_the_reply_was_cut() -> None:
    part = event(piece("$.a", stringValue="x"))
    with pytest.raises(ModelError, match="do not end"):
        read_stream(event(BEGIN), part, event(finish="STOP"))
    message = read_stream(event(BEGIN), part, event(finish="MAX_TOKENS"))
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a":"x"}'
