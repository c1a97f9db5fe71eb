"""Calls that a provider ran within a reply: a row without them is rejected by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent.messages.message import provider_call
from agent.models.dialects.dialect import read_reply
from batch_trajectories.export.conversation.validity import Rejected
from tests.helpers.builders import assistant, call, record_of, result, user
from tests.helpers.stored import ROW_FORMATS, tolerant_row

JSON = dict[str, Any]

ANSWER = "It is 5."


def responses(*items: JSON) -> JSON:
    """A reply of the Responses API with items before its answer."""
    answer = {"type": "output_text", "text": ANSWER, "annotations": []}
    message = {"type": "message", "id": "m", "role": "assistant", "content": [answer]}
    return {
        "id": "r",
        "status": "completed",
        "output": [*items, {**message, "status": "completed"}],
        "usage": {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2},
    }


def anthropic(*blocks: JSON) -> JSON:
    """A reply of Anthropic's API with blocks before its answer."""
    return {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "content": [*blocks, {"type": "text", "text": ANSWER}],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }


def gemini(*parts: JSON) -> JSON:
    """A reply of Gemini's API with parts before its answer."""
    content = {"role": "model", "parts": [*parts, {"text": ANSWER}]}
    usage = {"promptTokenCount": 1, "candidatesTokenCount": 1, "totalTokenCount": 2}
    return {"candidates": [{"content": content, "finishReason": "STOP"}], "usageMetadata": usage}


SEARCH = {"type": "search", "query": "x"}
TOOL_USE = {"id": "s", "name": "web_search", "input": {"query": "x"}}
REPLIES: dict[str, tuple[str, JSON, str]] = {
    "web search, Responses": (
        "openai_responses",
        responses({"type": "web_search_call", "id": "w", "status": "completed", "action": SEARCH}),
        "web_search",
    ),
    "code interpreter": (
        "openai_responses",
        responses({"type": "code_interpreter_call", "id": "c", "code": "2+3", "outputs": []}),
        "code_interpreter",
    ),
    "MCP at the provider, Responses": (
        "openai_responses",
        responses({"type": "mcp_call", "id": "c", "name": "look", "arguments": "{}"}),
        "look",
    ),
    "web search, Anthropic": (
        "anthropic_messages",
        anthropic(
            {"type": "server_tool_use", **TOOL_USE},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        ),
        "web_search",
    ),
    "MCP at the provider, Anthropic": (
        "anthropic_messages",
        anthropic(
            {"type": "mcp_tool_use", "server_name": "docs", **TOOL_USE},
            {"type": "mcp_tool_result", "tool_use_id": "s", "is_error": False, "content": []},
        ),
        "web_search",
    ),
    "code execution, Gemini": (
        "gemini",
        gemini(
            {"executableCode": {"language": "PYTHON", "code": "print(2 + 3)"}},
            {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "5\n"}},
        ),
        "executableCode",
    ),
}


def record_with(reply: JSON, api: str) -> JSON:
    """A record of one turn with a call of a tool, and this reply as its answer."""
    message = read_reply(api, json.dumps(reply).encode()).message
    return record_of(user(), assistant("", call()), result("r"), {**message})


@pytest.mark.parametrize("name", ROW_FORMATS)
@pytest.mark.parametrize("case", REPLIES)
def test_a_row_without_the_call_is_rejected_by_the_name_of_the_tool(case: str, name: str) -> None:
    api, reply, tool = REPLIES[case]
    record = record_with(reply, api)
    with pytest.raises(Rejected) as caught:
        tolerant_row(record, name)
    assert str(caught.value) == (
        f"provider_call: message 4: the provider ran {tool!r}, and rows cannot show it"
    )
    assert ANSWER in json.dumps(tolerant_row(record, name, "provider_call")), "a user can accept it"


@pytest.mark.parametrize("make", [responses, anthropic, gemini], ids=lambda make: make.__name__)
def test_other_replies_are_not_affected(make: Any) -> None:
    api = {responses: "openai_responses", anthropic: "anthropic_messages", gemini: "gemini"}[make]
    assert ANSWER in json.dumps(tolerant_row(record_with(make(), api), "openai"))


@pytest.mark.parametrize("kind", ["function", "custom_tool", "local_shell", "computer"])
def test_calls_that_the_program_makes_are_none_of_the_providers(kind: str) -> None:
    assert provider_call({"type": f"{kind}_call", "call_id": "c", "name": "f"}) is None
