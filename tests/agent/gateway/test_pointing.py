"""What a request only points at under a budget: an upper bound, or a refusal that names it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from agent.gateway.pointing import MAX_PICTURE_TOKENS, check_pointed, count_pointed
from agent.messages.message import ExchangeEvent
from agent.models.model import ModelSettings, PointedTokens, requested_replies
from agent.wires.wire import WireError
from agent.wires.wires import WIRES

CHAT, RESPONSES, MESSAGES, GEMINI = (
    "openai_chat",
    "openai_responses",
    "anthropic_messages",
    "gemini",
)
JPEG = "https://example.com/a.jpg"


def settings(api: str, name: str = "m") -> ModelSettings:
    return ModelSettings(name=name, api=api, base_url="http://x", key_env=None, needs_bound=True)


def recorded_call(id: str, read: int | None, written: int | None, **body: Any) -> ExchangeEvent:
    """A recorded call with its usage."""
    usage = {"input_tokens": read, "output_tokens": written}
    return cast(ExchangeEvent, {"body": {"id": id, **body}, "reply": {"usage": usage}})


def most(api: str, body: dict[str, Any], *replies: ExchangeEvent, name: str = "m") -> int:
    """The bound of a request that may be made under a budget."""
    calls: Sequence[ExchangeEvent] = replies
    check_pointed(WIRES[api], body, settings(api, name), lambda: calls)
    return count_pointed(WIRES[api], body, settings(api, name), lambda: calls).most


def user(api: str, *parts: Any) -> dict[str, Any]:
    """A request with a user's message of these parts."""
    if api == GEMINI:
        return {"contents": [{"role": "user", "parts": list(parts)}]}
    field = "input" if api == RESPONSES else "messages"
    return {field: [{"role": "user", "content": list(parts)}]}


PICTURES = {
    "chat, URL": (CHAT, {"type": "image_url", "image_url": {"url": JPEG}}),
    "chat, inline": (CHAT, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}),
    "responses, URL": (RESPONSES, {"type": "input_image", "image_url": JPEG}),
    "responses, id": (RESPONSES, {"type": "input_image", "file_id": "file-1"}),
    "messages, URL": (MESSAGES, {"type": "image", "source": {"type": "url", "url": JPEG}}),
    "messages, id": (MESSAGES, {"type": "image", "source": {"type": "file", "file_id": "f"}}),
    "gemini, URI": (GEMINI, {"fileData": {"mimeType": "image/png", "fileUri": "files/1"}}),
    "gemini, URI, snake": (GEMINI, {"file_data": {"mime_type": "image/png", "file_uri": "f"}}),
    "gemini, inline": (GEMINI, {"inlineData": {"mimeType": "image/png", "data": "AA"}}),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_have_a_bound_each(name: str) -> None:
    api, picture = PICTURES[name]
    text = {"text": "Look."} if api == GEMINI else {"type": "text", "text": "Look."}
    assert most(api, user(api, text, *[picture] * 30)) == 30 * MAX_PICTURE_TOKENS
    body = user(api, picture)
    assert count_pointed(WIRES[api], body, settings(api), tuple) == PointedTokens(
        MAX_PICTURE_TOKENS, 1500
    )


def test_pictures_in_results_count_too() -> None:
    picture = {"type": "image", "source": {"type": "url", "url": JPEG}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [picture, picture]}
    document = {"type": "document", "source": {"type": "content", "content": [picture]}}
    assert most(MESSAGES, user(MESSAGES, result, document)) == 3 * MAX_PICTURE_TOKENS
    shot = {"type": "computer_screenshot", "file_id": "f"}
    output = {"type": "computer_call_output", "call_id": "c", "output": shot}
    plain = {"type": "function_call_output", "call_id": "c", "output": "text"}
    assert most(RESPONSES, {"input": [output, plain]}) == MAX_PICTURE_TOKENS
    parts = [{"fileData": {"mimeType": "image/png", "fileUri": "f"}}]
    response = {"functionResponse": {"name": "f", "response": {}, "parts": parts}}
    assert most(GEMINI, user(GEMINI, response)) == MAX_PICTURE_TOKENS


def test_a_models_documentation_says_how_many() -> None:
    body = user(CHAT, {"type": "image_url", "image_url": {"url": JPEG}})
    assert most(CHAT, body, name="gpt-4o-mini-2024-07-18") == 50_000
    assert most(CHAT, body, name="claude-sonnet-4-5") == 5_000


TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": "file_id"}]}),
    "calls": (
        CHAT,
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"function": {"name": "f", "arguments": '{"file_id": "x"}'}, "id": "1"}
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "y"}]},
            ],
            "tools": [{"type": "function", "function": {"name": "file", "parameters": {}}}],
        },
    ),
    "responses": (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "abc"},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "y"},
                {"type": "custom_tool_call", "call_id": "2", "name": "g", "input": "z"},
            ],
            "tools": [
                {"type": "function", "name": "f"},
                {"type": "custom", "name": "g"},
                {"type": "local_shell"},
                {"type": "shell", "environment": {"type": "local"}},
                {"type": "namespace", "tools": [{"type": "function", "name": "h"}]},
            ],
            "service_tier": "auto",
        },
    ),
    "messages": (
        MESSAGES,
        {
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": "s"},
                        {"type": "tool_use", "id": "1", "name": "f", "input": {"file_id": "x"}},
                    ],
                },
                *user(
                    MESSAGES,
                    {"type": "tool_result", "tool_use_id": "1", "content": "y"},
                    {"type": "document", "source": {"type": "text", "data": "d"}},
                )["messages"],
            ],
        },
    ),
    "gemini": (
        GEMINI,
        {
            "contents": [
                {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {"url": "x"}}}]},
                {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {}}}]},
                {"role": "user", "parts": [{"text": "x"}, {}]},
                {"role": "user", "parts": [{"inlineData": {"mimeType": "text/csv", "data": "A"}}]},
            ],
            "generationConfig": {"responseModalities": ["TEXT"]},
        },
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_point_at_nothing(name: str) -> None:
    """Whatever keys arguments and schemas of tools have."""
    api, body = TEXTS[name]
    assert most(api, body) == 0


def test_a_followed_reply_costs_its_input_and_output() -> None:
    replies = (recorded_call("resp_1", 1000, 200), recorded_call("resp_2", 70_000, 5000))
    body = {"input": "Go on.", "previous_response_id": "resp_2"}
    assert most(RESPONSES, body, *replies) == 75_000
    assert count_pointed(
        WIRES[RESPONSES], body, settings(RESPONSES), lambda: replies
    ) == PointedTokens(75_000, 75_000)
    held = recorded_call("resp_3", 10, 20, conversation={"id": "conv_1"})
    for conversation in ("conv_1", {"id": "conv_1"}):
        assert most(RESPONSES, {"input": "Go.", "conversation": conversation}, held) == 30


def test_a_named_item_costs_the_output_of_its_reply() -> None:
    reply = recorded_call("resp_1", 1000, 200, output=[{"id": "rs_1"}, {"id": "msg_1"}])
    items = [
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "item_reference", "id": "msg_1"},
        {"role": "user", "content": "Go on."},
    ]
    assert most(RESPONSES, {"input": items}, reply) == 400


FILES = {
    "chat, file id": (CHAT, {"type": "file", "file": {"file_id": "f"}}),
    "chat, inline PDF": (CHAT, {"type": "file", "file": {"file_data": "data:application/pdf,A"}}),
    "chat, audio": (CHAT, {"type": "input_audio", "input_audio": {"data": "AA"}}),
    "chat, video": (CHAT, {"type": "video_url", "video_url": {"url": "https://x/v.mp4"}}),
    "responses, file id": (RESPONSES, {"type": "input_file", "file_id": "f"}),
    "responses, file URL": (RESPONSES, {"type": "input_file", "file_url": "https://x/a.pdf"}),
    "messages, document URL": (
        MESSAGES,
        {"type": "document", "source": {"type": "url", "url": "https://x/a.pdf"}},
    ),
    "messages, document id": (
        MESSAGES,
        {"type": "document", "source": {"type": "file", "file_id": "f"}},
    ),
    "messages, inline PDF": (
        MESSAGES,
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}},
    ),
    "messages, upload": (MESSAGES, {"type": "container_upload", "file_id": "f"}),
    "gemini, PDF": (GEMINI, {"fileData": {"mimeType": "application/pdf", "fileUri": "files/1"}}),
    "gemini, video": (GEMINI, {"fileData": {"fileUri": "https://youtu.be/x"}}),
    "gemini, text by URI": (GEMINI, {"fileData": {"mimeType": "text/plain", "fileUri": "f"}}),
    "gemini, inline video": (GEMINI, {"inlineData": {"mimeType": "video/mp4", "data": "AA"}}),
    "gemini, unknown": (GEMINI, {"somethingNew": {}}),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_refused_with_its_place(name: str) -> None:
    api, part = FILES[name]
    text = {"text": "Read."} if api == GEMINI else {"type": "text", "text": "Read."}
    with pytest.raises(WireError, match=r"\[0\]\.(content|parts)\[1\].*budget of the run"):
        most(api, user(api, text, part))
    count_pointed(WIRES[api], user(api, part), settings(api), tuple)  # without a budget


OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "stored prompt": (RESPONSES, {"prompt": {"id": "pmpt_1"}}, "prompt"),
    "unknown response": (RESPONSES, {"previous_response_id": "resp_9"}, "resp_9"),
    "unknown conversation": (RESPONSES, {"conversation": "conv_9"}, "conv_9"),
    "unknown item": (RESPONSES, {"input": [{"type": "item_reference", "id": "i_9"}]}, "i_9"),
    "reasoning by id": (RESPONSES, {"input": [{"type": "reasoning", "id": "rs_9"}]}, "rs_9"),
    "item of a new type": (RESPONSES, {"input": [{"type": "mystery"}]}, "mystery"),
    "hosted shell": (
        RESPONSES,
        {"tools": [{"type": "shell", "environment": {"type": "container_auto"}}]},
        "shell",
    ),
    "tool of a new type": (RESPONSES, {"tools": [{"type": "x_search"}]}, "x_search"),
    "tool in a namespace": (
        RESPONSES,
        {"tools": [{"type": "namespace", "tools": [{"type": "x_search"}]}]},
        r"tools\[0\]\.tools\[0\]",
    ),
    "priority": (RESPONSES, {"service_tier": "priority"}, "service_tier"),
    "fast": (MESSAGES, {"speed": "fast"}, "speed"),
    "container": (MESSAGES, {"container": {"skills": [{}]}}, "container"),
    "reference without its type": (RESPONSES, {"input": [{"id": "msg_9"}]}, "msg_9"),
    "Azure's data": (CHAT, {"data_sources": [{"type": "azure_search"}]}, "data_sources"),
    "connectors": (CHAT, {"connectors": [{"id": "web-search"}]}, "connectors"),
    "Qwen's search": (CHAT, {"enable_search": True}, "enable_search"),
    "files beside": (CHAT, {"file_ids": ["file-1"]}, "file_ids"),
    "template": (CHAT, {"chat_template": "{{ 'x' * 10**9 }}"}, "chat_template"),
    "size of pictures": (CHAT, {"mm_processor_kwargs": {"max_pixels": 1}}, "mm_processor_kwargs"),
    "dearer providers": (CHAT, {"provider": {"order": ["fast"]}}, "provider"),
    "dearer place": (MESSAGES, {"inference_geo": "us"}, "inference_geo"),
    "another call": (
        MESSAGES,
        {"context_management": {"edits": [{"type": "compact_20260112"}]}},
        r"context_management\[0\]",
    ),
    "compaction": (RESPONSES, {"context_management": [{"type": "compaction"}]}, "context_man"),
    "pictures of a message": (
        CHAT,
        {"messages": [{"role": "user", "content": "x", "images": ["AA"]}]},
        r"messages\[0\]\.images",
    ),
    "nested parts": (CHAT, user(CHAT, [{"type": "image_url"}]), "list in a list"),
    "part without a type": (
        CHAT,
        user(CHAT, {"text": "x", "file_id": "f"}),
        "file_id",
    ),
    "pictures, snake": (
        GEMINI,
        {"generation_config": {"response_modalities": ["IMAGE"]}},
        "responseModalities",
    ),
    "one part of a result": (
        GEMINI,
        user(
            GEMINI,
            {"functionResponse": {"name": "f", "parts": {"fileData": {"mimeType": "video/mp4"}}}},
        ),
        "fileData",
    ),
    "plugins": (CHAT, {"plugins": [{"id": "web"}]}, "plugins"),
    "live search": (CHAT, {"search_parameters": {"mode": "on"}}, "search_parameters"),
    "prediction": (CHAT, {"prediction": {"content": "x"}}, "prediction"),
    "other models": (CHAT, {"models": ["a", "b"]}, "models"),
    "audio": (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    "stored audio": (
        CHAT,
        {"messages": [{"role": "assistant", "audio": {"id": "a"}}]},
        r"messages\[0\]\.audio",
    ),
    "cached content": (GEMINI, {"cachedContent": "cachedContents/1"}, "cachedContent"),
    "images": (
        GEMINI,
        {"generationConfig": {"responseModalities": ["TEXT", "IMAGE"]}},
        "responseModalities",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_has_no_bound_is_refused_by_name(name: str) -> None:
    api, body, named = OTHERS[name]
    with pytest.raises(WireError, match=f"{named}.*budget of the run cannot be kept"):
        most(api, body)


@pytest.mark.parametrize(
    "name",
    ["gpt-4o-search-preview", "openai/gpt-4o:online", "o3-deep-research", "groq/compound-mini"],
)
def test_a_model_that_searches_by_itself_is_refused(name: str) -> None:
    with pytest.raises(WireError, match=f"{name} uses tools"):
        most(CHAT, user(CHAT, {"type": "text", "text": "x"}), name=name)


def test_a_reply_without_its_tokens_has_no_bound() -> None:
    with pytest.raises(WireError, match="without its number of tokens"):
        most(RESPONSES, {"previous_response_id": "resp_1"}, recorded_call("resp_1", None, 5))


def test_other_fields_stay_allowed() -> None:
    """Whose names only resemble those of files, or that make a request cheaper."""
    edits = [{"type": "clear_tool_uses_20250919"}, {"type": "clear_thinking_20251015"}]
    assert most(MESSAGES, {"context_management": {"edits": edits}, "messages": []}) == 0
    message = {"role": "assistant", "content": "x", "profile": "a", "annotations": [{"url": "x"}]}
    assert most(CHAT, {"messages": [message]}) == 0
    part = {"image_url": {"url": JPEG}}
    assert most(CHAT, user(CHAT, part)) == MAX_PICTURE_TOKENS, "servers take it without a type"


def test_limits_of_gemini_hold_in_both_spellings() -> None:
    for config in (
        {"generation_config": {"max_output_tokens": 9000, "candidate_count": 4}},
        {"generationConfig": {"max_output_tokens": 9000, "candidateCount": 4}},
    ):
        body = {"contents": [], **config}
        wire, path = WIRES[GEMINI], "/v1beta/models/m:generateContent"
        assert wire.read_fields(path, body).max_tokens == 9000
        assert requested_replies(body) == 4
        _, sent = wire.rewrite(path, body, max_tokens=100)
        assert sent == {
            "contents": [],
            "generationConfig": {"maxOutputTokens": 100, "candidateCount": 4},
        }
