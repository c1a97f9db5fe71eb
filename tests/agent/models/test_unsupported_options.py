"""Options that a model refuses: it is asked again without them, and nothing else is dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from agent.messages.message import Message
from agent.models.client.endpoint import open_model
from agent.models.errors import ModelError
from agent.models.model import Completion, ModelSettings, Request
from tests.helpers.answering import JSON, answering
from tests.helpers.builders import chat_reply

Refuse = Callable[[JSON], JSON | None]
"""The error for a request body; None where it is taken."""

REPLIES: dict[str, JSON] = {
    "/v1/chat/completions": chat_reply("hi"),
    "/v1/messages": {"content": [{"type": "text", "text": "hi"}], "stop_reason": "end_turn"},
    "/v1/responses": {
        "status": "completed",
        "output": [{"type": "message", "content": [{"type": "output_text", "text": "hi"}]}],
    },
}
PATHS = {
    "openai_chat": "/v1",
    "openai_responses": "/v1",
    "anthropic_messages": "",
}


def serving(refuse: Refuse, status: int = 400) -> AbstractContextManager[tuple[str, list[JSON]]]:
    """An endpoint of all three dialects: its root, and the bodies that it was sent."""

    def answer(path: str, body: JSON) -> tuple[int, JSON]:
        error = refuse(body)
        return (200, REPLIES[path]) if error is None else (status, {"error": error})

    return answering(answer)


QUESTION = Message(role="user", content="temperature is not supported")


def ask(
    root: str,
    api: str,
    *earlier: Message,
    times: int = 1,
    at_once: int = 1,
    **options: Any,
) -> Completion:
    """Ask one model some times in a row, each time so many at once; the last reply."""
    settings = ModelSettings(name="m", api=api, base_url=root + PATHS[api], key_env=None, **options)

    async def ask_all() -> Completion:
        model = open_model(
            settings, api_key="sk-canary-refusals", on_retry=lambda retry: pytest.fail(str(retry))
        )
        request = Request([*earlier, QUESTION])
        try:
            for _ in range(times):
                replies = await asyncio.gather(*(model.complete(request) for _ in range(at_once)))
            return replies[-1]
        finally:
            await model.close()

    return asyncio.run(ask_all())


def openai_error(code: str | None, param: str | None, message: str = "no") -> JSON:
    return {"type": "invalid_request_error", "code": code, "param": param, "message": message}


def anthropic_error(message: str) -> JSON:
    return {"type": "invalid_request_error", "message": message}


def refusing(field: str, error: JSON) -> Refuse:
    """Refuses `field`, a dotted path, wherever it is sent."""

    def refuse(body: JSON) -> JSON | None:
        value: Any = body
        for key in field.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return None if value is None else error

    return refuse


SENT: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "max_tokens": 7,
    "reasoning_effort": "low",
}

CASES: list[tuple[str, str, str, JSON]] = [
    (api, option, field, openai_error(code, field))
    for api, fields in {
        "openai_chat": {
            "temperature": "temperature",
            "top_p": "top_p",
            "reasoning_effort": "reasoning_effort",
        },
        "openai_responses": {
            "temperature": "temperature",
            "top_p": "top_p",
            "max_tokens": "max_output_tokens",
            "reasoning_effort": "reasoning.effort",
        },
    }.items()
    for option, field in fields.items()
    for code in ("unsupported_parameter", "unsupported_value")
]
TEXTS: list[tuple[str, str, str, str]] = [
    ("openai_chat", "temperature", "temperature", "m doesn't support temperature=0.5 here"),
    ("openai_chat", "temperature", "temperature", "'temperature' does not support 0.5 here."),
    (
        "openai_chat",
        "reasoning_effort",
        "reasoning_effort",
        "Unrecognized request argument supplied: reasoning_effort",
    ),
    (
        "openai_chat",
        "reasoning_effort",
        "reasoning_effort",
        "UnsupportedParamsError: openai does not support parameters: ['reasoning_effort'], for",
    ),
    (
        "openai_chat",
        "top_p",
        "top_p",
        "[{'loc': ('body', 'top_p'), 'msg': 'Extra inputs are not permitted'}]",
    ),
    (
        "anthropic_messages",
        "temperature",
        "temperature",
        "`temperature` is deprecated for this model.",
    ),
    (
        "anthropic_messages",
        "temperature",
        "temperature",
        "temperature: Extra inputs are not permitted",
    ),
    (
        "anthropic_messages",
        "temperature",
        "temperature",
        "`temperature` may only be set to 1 when thinking is enabled.",
    ),
    (
        "anthropic_messages",
        "top_p",
        "top_p",
        "`temperature` and `top_p` cannot both be specified for this model.",
    ),
    (
        "anthropic_messages",
        "reasoning_effort",
        "output_config.effort",
        "This model does not support the effort parameter.",
    ),
    (
        "anthropic_messages",
        "reasoning_effort",
        "thinking",
        "adaptive thinking is not supported on this model",
    ),
]
CASES += [
    (
        api,
        option,
        field,
        openai_error(None, None, text) if api == "openai_chat" else anthropic_error(text),
    )
    for api, option, field, text in TEXTS
]


@pytest.mark.parametrize(("api", "option", "field", "error"), CASES)
def test_a_refused_option_goes_and_all_else_stays(
    api: str, option: str, field: str, error: JSON, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(refusing(field, error)) as (root, requests):
        assert ask(root, api, times=3, **SENT).message["content"] == "hi"
    with serving(lambda body: None) as (other, expected):
        ask(other, api, **{key: value for key, value in SENT.items() if key != option})
    assert len(requests) == 4, "one request more, once"
    assert requests[1:] == expected * 3
    (warnings,) = [record.getMessage() for record in caplog.records if "refuses" in record.message]
    assert warnings.startswith(
        f"The model m at {root}{PATHS[api]} refuses --{option}={SENT[option]}. It is asked without"
    )


def test_max_tokens_is_tried_under_its_other_name_and_then_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = "'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."

    def refuse(body: JSON) -> JSON | None:
        return (
            openai_error("unsupported_parameter", "max_tokens", text)
            if "max_tokens" in body
            else None
        )

    with serving(refuse) as (root, requests):
        ask(root, "openai_chat", times=2, max_tokens=7)
    names = [body.keys() & {"max_tokens", "max_completion_tokens"} for body in requests]
    assert names == [{"max_tokens"}, {"max_completion_tokens"}, {"max_completion_tokens"}]
    assert "asked with max_completion_tokens from now on" in caplog.text

    def refuse_both(body: JSON) -> JSON | None:
        sent = sorted(body.keys() & {"max_tokens", "max_completion_tokens"})
        return openai_error("unknown_parameter", sent[0]) if sent else None

    def refuse_by_one_name(body: JSON) -> JSON | None:
        error = refuse_both(body)
        return error and openai_error("unsupported_parameter", "max_tokens")

    for refuse in (refuse_both, refuse_by_one_name):
        with serving(refuse) as (root, requests):
            ask(root, "openai_chat", max_tokens=7)
        assert len(requests) == 3
        assert not requests[-1].keys() & {"max_tokens", "max_completion_tokens"}


def test_a_max_tokens_that_is_always_refused_is_not_retried_forever() -> None:
    error = openai_error("unsupported_parameter", "max_tokens")
    with serving(lambda body: error) as (root, requests), pytest.raises(ModelError):
        ask(root, "openai_chat", max_tokens=7)
    assert len(requests) == 3


def test_options_are_refused_one_after_the_other_by_calls_at_the_same_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(body: JSON) -> JSON | None:
        sent = sorted(body.keys() & {"temperature", "top_p"})
        return openai_error("unsupported_parameter", sent[0]) if sent else None

    with serving(refuse) as (root, requests):
        ask(root, "openai_chat", times=2, at_once=5, **SENT)
    assert all(not body.keys() & {"temperature", "top_p"} for body in requests[-5:])
    assert len(requests) <= 5 * 3 + 5
    warnings = [record for record in caplog.records if "refuses" in record.message]
    assert len(warnings) == 2


@pytest.mark.parametrize(
    ("api", "options", "error"),
    [
        # About other things, about other fields, or out of range.
        ("openai_chat", SENT, openai_error(None, None, "messages.0: 'temperature' is too long")),
        ("openai_chat", SENT, openai_error("unknown_parameter", "tools[0]", "unknown temperature")),
        ("openai_chat", SENT, openai_error("decimal_above_max_value", "temperature")),
        ("openai_chat", SENT, openai_error(None, None, "messages.1.reasoning: not permitted")),
        ("openai_chat", SENT, openai_error(None, None, "unknown role. Have a good temperature")),
        ("anthropic_messages", SENT, anthropic_error("max_tokens: 7 > 5, the maximum")),
        # The API demands it.
        ("anthropic_messages", SENT, anthropic_error("max_tokens: Extra inputs are not permitted")),
        # Not sent because of an option.
        ("openai_chat", {"top_p": 0.9}, openai_error("unsupported_parameter", "temperature")),
        (
            "openai_chat",
            {"extra_body": {"temperature": 1}, "temperature": 0.5},
            openai_error("unsupported_parameter", "temperature"),
        ),
    ],
)
def test_nothing_else_is_dropped(
    api: str, options: Any, error: JSON, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(lambda body: error) as (root, requests), pytest.raises(ModelError) as caught:
        ask(root, api, **options)
    assert (caught.value.kind, len(requests)) == ("bad_request", 1)
    assert "refuses" not in caplog.text


def test_an_option_that_was_removed_in_vain_is_not_remembered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An endpoint that keeps refusing did not mean the option, and is not asked for ever."""
    error = openai_error("unsupported_parameter", "temperature")

    async def ask_twice(root: str) -> None:
        settings = ModelSettings(
            name="m", api="openai_chat", base_url=f"{root}/v1", key_env=None, temperature=0.5
        )
        model = open_model(settings, api_key="k", on_retry=lambda retry: pytest.fail(str(retry)))
        for _ in range(2):
            with pytest.raises(ModelError):
                await model.complete(Request([Message(role="user", content="x")]))
        await model.close()

    with serving(lambda body: error) as (root, requests):
        asyncio.run(ask_twice(root))
    assert ["temperature" in body for body in requests] == [True, False] * 2
    assert "refuses" not in caplog.text


@pytest.mark.parametrize(("status", "kind"), [(429, "rate_limited"), (403, "forbidden")])
def test_only_a_bad_request_refuses_an_option(status: int, kind: str) -> None:
    error = openai_error("unsupported_parameter", "temperature")
    with (
        serving(lambda body: error, status) as (root, requests),
        pytest.raises(ModelError) as caught,
    ):
        ask(root, "openai_chat", call_timeout_s=0.0, **SENT)
    assert (caught.value.kind, len(requests)) == (kind, 1)


def test_a_stream_asks_again_too() -> None:
    """The refusal comes before the stream; the reply here comes in one piece."""
    refuse = refusing("temperature", openai_error("unsupported_value", "temperature"))
    with serving(refuse) as (root, requests):
        settings = ModelSettings(
            name="m", api="openai_chat", base_url=f"{root}/v1", key_env=None, temperature=0.5
        )

        async def listen() -> Completion:
            model = open_model(
                settings, api_key="k", on_retry=lambda retry: pytest.fail(str(retry))
            )
            try:
                opening = [Message(role="user", content="x")]
                return await model.complete(Request(opening, on_delta=lambda event: None))
            finally:
                await model.close()

        assert asyncio.run(listen()).message["content"] == "hi"
    assert [body.get("stream") for body in requests] == [True, True]


@pytest.mark.parametrize(
    "message",
    [
        "thinking is enabled but reasoning_content is missing in assistant tool call message at "
        "index 2",
        "The `reasoning_content` in the thinking mode must be passed back to the API.",
    ],
    ids=["Moonshot", "DeepSeek"],
)
def test_an_endpoint_that_demands_reasoning_gets_a_blank_one(
    message: str, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(body: JSON) -> JSON | None:
        replies = [one for one in body["messages"] if one["role"] == "assistant"]
        has_all = all("reasoning_content" in reply for reply in replies)
        return None if has_all else openai_error("invalid_request_error", None, message)

    said = Message(role="assistant", content="a")
    thought = Message(role="assistant", content="b", reasoning="why")
    with serving(refuse) as (root, requests):
        ask(root, "openai_chat", QUESTION, said, QUESTION, thought, times=2)
    assert [reply["reasoning_content"] for reply in requests[1]["messages"][1:4:2]] == [" ", "why"]
    assert len(requests) == 3, "the second call asks with it at once"
    assert "refuses replies without reasoning. It is asked with a blank one" in caplog.text


def test_reasoning_that_an_endpoint_does_not_know_is_not_demanded() -> None:
    error = openai_error(None, None, "reasoning_content is not permitted in messages")
    with serving(lambda body: error) as (root, requests), pytest.raises(ModelError):
        ask(root, "openai_chat")
    assert len(requests) == 1
