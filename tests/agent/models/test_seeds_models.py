"""Behaviours of tests/seeds.md at the border to the endpoint, where no other test proves them."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import orjson
import pytest

from agent.messages.message import Message
from agent.models.client.retrying import MAX_WAIT_S, RetryingModel
from agent.models.dialects import anthropic_messages, openai_chat
from agent.models.errors import ModelError
from agent.models.model import Completion, ModelSettings, Request
from agent.models.prices import has_known_price, price
from agent.models.resolve import resolve_model
from tests.helpers.builders import chat_reply

GO = Request([Message(role="user", content="Go.")])
SETTINGS = ModelSettings(name="m", api="openai_chat", base_url="http://x", key_env=None)


def resolve(name: str) -> ModelSettings:
    return resolve_model(name, base_url=None, api=None, key_env=None)


def openai_reply(**message: Any) -> Completion:
    body = chat_reply(message)
    return openai_chat.read_reply(orjson.dumps(body))


def read_usage(**usage: int) -> Completion:
    counts = {"input_tokens": 0, "output_tokens": 0, **usage}
    body = {"content": [{"type": "text", "text": "x"}], "stop_reason": "end_turn", "usage": counts}
    return anthropic_messages.read_reply(orjson.dumps(body))


def test_only_what_was_set_is_sent() -> None:
    """Without a system message, tools or sampling there is no field for them."""
    assert openai_chat.request_body(SETTINGS, GO).keys() == {"model", "messages", "stream"}
    body = anthropic_messages.request_body(
        dataclasses.replace(SETTINGS, api="anthropic_messages"), GO
    )
    assert body.keys() == {"model", "messages", "max_tokens", "stream"}
    assert body["max_tokens"] == 16_000
    zero = dataclasses.replace(SETTINGS, temperature=0.0)
    assert openai_chat.request_body(zero, GO)["temperature"] == 0.0


def test_reasoning_of_all_fields_is_joined_and_identical_parts_stand_once() -> None:
    """A detail gives its summary; without one its content; else its text."""
    details = [
        {"summary": "C", "text": "not this"},
        {"content": "D", "text": "nor this"},
        {"text": "A"},
        {"data": "sealed"},
    ]
    read = openai_reply(
        content="x", reasoning="A", reasoning_content="A", reasoning_details=details
    )
    assert read.message["reasoning"] == "A\n\nC\n\nD"
    assert "reasoning" not in openai_reply(content="x", reasoning=" ").message


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}], "ab"),
        ({"type": "text", "text": "a"}, "a"),
        (None, ""),
    ],
)
def test_content_that_is_not_text_is_flattened(content: Any, text: str) -> None:
    """Content that came as a list or object is flattened to text."""
    assert openai_reply(content=content).message["content"] == text


class Failing:
    """An endpoint that fails as the test says, then answers."""

    settings = SETTINGS

    def __init__(self, *errors: ModelError) -> None:
        self.errors = list(errors)
        self.asked = 0

    async def complete(self, request: Request) -> Completion:
        self.asked += 1
        if self.errors:
            raise self.errors.pop(0)
        return openai_reply(content="hi")

    async def close(self) -> None:
        """Nothing to release."""


def ask_patiently(adapter: Failing, **settings: Any) -> Completion:
    patient = RetryingModel(
        adapter,
        dataclasses.replace(SETTINGS, **settings),
        api_key="k",
        on_retry=lambda message: None,
    )
    return asyncio.run(patient.complete(GO))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that would have been made, in seconds."""
    made: list[float] = []

    async def note(seconds: float) -> None:
        made.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", note)
    return made


def test_retries_back_off_up_to_a_minute(waits: list[float]) -> None:
    """Transient API errors are retried with back-off and Retry-After; others fail at once."""
    adapter = Failing(*(ModelError("overloaded", "busy") for _ in range(9)))
    ask_patiently(adapter, call_attempts=10)
    assert adapter.asked == 10
    least = [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert all(low <= wait <= low + 1 for low, wait in zip(least, waits, strict=True))


def test_pauses_after_broken_replies_stay_short_and_lengthen_no_others(waits: list[float]) -> None:
    broken = [ModelError("malformed", "no choices") for _ in range(6)]
    ask_patiently(Failing(*broken, ModelError("overloaded", "busy")))
    least = [1, 2, 4, 8, 8, 8, 1]
    assert all(low <= wait <= low + 1 for low, wait in zip(least, waits, strict=True))


def test_a_broken_reply_is_soon_asked_for_again_while_the_endpoint_answers_others(
    waits: list[float],
) -> None:
    adapter = Failing()
    model = RetryingModel(adapter, SETTINGS, api_key="k", on_retry=lambda message: None)

    async def ask() -> None:
        await model.complete(Request([]))
        adapter.errors += [ModelError("malformed", "cut") for _ in range(7)]
        await model.complete(Request([]))

    asyncio.run(ask())
    assert len(waits) == 7
    assert max(waits) <= 0.5


def test_a_failure_by_load_that_others_do_not_meet_begins_with_half_a_second(
    waits: list[float],
) -> None:
    adapter = Failing()
    model = RetryingModel(adapter, SETTINGS, api_key="k", on_retry=lambda message: None)

    async def ask() -> None:
        await model.complete(GO)
        adapter.errors += [ModelError("overloaded", "busy") for _ in range(7)]
        await model.complete(GO)
        adapter.errors += [ModelError("overloaded", "busy", retry_after_s=7.0)]
        adapter.errors += [ModelError("rate_limited", "slow down") for _ in range(2)]
        await model.complete(GO)

    asyncio.run(ask())
    most = [0.5, 1, 2, 4, 8, 16, 30]
    assert all(high / 2 <= wait <= high for high, wait in zip(most, waits[:7], strict=True))
    asked_for, limited, again = waits[7:]
    assert 5 <= asked_for <= 6
    assert 1 <= limited <= 2
    assert 2 <= again <= 3


def test_retry_after_is_honoured_within_reason(waits: list[float]) -> None:
    """Transient API errors are retried with back-off and Retry-After; others fail at once."""
    seconds = [7.0, 300.0]
    ask_patiently(Failing(*(ModelError("rate_limited", "x", retry_after_s=s) for s in seconds)))
    assert 7 <= waits[0] <= 8
    assert MAX_WAIT_S <= waits[1] <= MAX_WAIT_S + 1


def test_a_long_retry_after_is_believed_if_nobody_is_answered_or_it_is_repeated(
    waits: list[float],
) -> None:
    """A lone refusal that asks for an hour would hold a conversation while all others go on."""
    adapter = Failing()
    model = RetryingModel(adapter, SETTINGS, api_key="k", on_retry=lambda message: None)

    def refused(seconds: float) -> ModelError:
        return ModelError("rate_limited", "slow down", retry_after_s=seconds)

    async def ask() -> None:
        await model.complete(GO)
        adapter.errors += [refused(3600), refused(3600), refused(2)]
        await model.complete(GO)
        adapter.errors += [refused(2), refused(30)]
        await model.complete(GO)

    asyncio.run(ask())
    least = [5, MAX_WAIT_S, 2, 2, 30]
    assert all(low <= wait <= low + 1 for low, wait in zip(least, waits, strict=True)), waits


def test_rate_limits_use_up_no_attempts(waits: list[float]) -> None:
    limited = [ModelError("rate_limited", "slow down", retry_after_s=0.0) for _ in range(9)]
    adapter = Failing(*limited, ModelError("overloaded", "busy"), *limited)
    ask_patiently(adapter, call_attempts=2)
    assert adapter.asked == 20
    twice = Failing(*limited, *(ModelError("overloaded", "busy") for _ in range(2)))
    with pytest.raises(ModelError, match="busy"):
        ask_patiently(twice, call_attempts=2)


@pytest.mark.parametrize("kind", ["bad_request", "not_found", "forbidden", "auth"])
def test_other_client_errors_fail_at_once(kind: Any, waits: list[float]) -> None:
    """The error carries the provider's message."""
    adapter = Failing(ModelError(kind, "no such thing"))
    with pytest.raises(ModelError, match="no such thing"):
        ask_patiently(adapter)
    assert (adapter.asked, waits) == (1, [])


def test_the_cost_is_the_sum_of_four_kinds_of_tokens() -> None:
    """Each kind of token has its own price, and none is counted twice."""
    settings = resolve("anthropic:claude-sonnet-4-20250514")
    kinds = (
        "input_tokens",
        "output_tokens",
        "cache_read_input_tokens",
        "cache_creation_input_tokens",
    )
    first = price(read_usage(input_tokens=1000), settings)
    assert first is not None
    parts = {first}
    for kind in kinds[1:]:
        both = price(read_usage(input_tokens=1000, **{kind: 1000}), settings)
        assert both is not None
        parts.add(both - first)
    assert len(parts) == 4
    assert price(read_usage(**dict.fromkeys(kinds, 1000)), settings) == pytest.approx(sum(parts))


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("anthropic:claude-sonnet-4-0", True),
        ("anthropic:claude-sonnet-4-20250514", True),
        ("openai:gpt-4.1", True),
        ("openai:gpt-4.1-2025-04-14", True),
        ("openai:gpt-4.1x", False),
        ("openai:nonsense", False),
    ],
)
def test_prices_are_found_by_id_with_and_without_a_date(name: str, known: bool) -> None:
    """Prices are found by id, dated ones too where the table lists them."""
    assert has_known_price(resolve(name)) is known


def test_an_unknown_price_is_warned_about_once_for_each_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The cost of such a call is unknown, not zero."""
    for name in ("seeds-model-1", "seeds-model-1", "seeds-model-2"):
        assert price(read_usage(input_tokens=1), resolve(f"openai:{name}")) is None
    assert [record.args for record in caplog.records] == [("seeds-model-1",), ("seeds-model-2",)]
