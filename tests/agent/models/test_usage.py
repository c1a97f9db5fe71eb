"""What replies say that they used, in the spellings of servers, and what that costs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.messages.message import MAX_TOKEN_COUNT
from agent.models.dialects.dialect import get_dialect, read_reply
from agent.models.errors import ModelError
from agent.models.model import Completion, ModelSettings, Price
from agent.models.prices import price
from tests.agent.models.by_dialect import SAMPLES

CHAT, RESPONSES, MESSAGES = "openai_chat", "openai_responses", "anthropic_messages"
GEMINI: dict[str, Any] = {
    "candidates": [{"content": {"parts": [{"text": "Yes."}]}, "finishReason": "STOP"}]
}
BASE = {"prompt_tokens": 1000, "completion_tokens": 10, "total_tokens": 1010}
RESPONSES_BASE = {"input_tokens": 1000, "output_tokens": 10, "total_tokens": 1010}


def read_whole(api: str, usage: Any, **more: Any) -> Completion:
    """The completion of a reply in one piece with this usage."""
    body = SAMPLES[api].whole("Yes.", "{}") | {"usage": usage} | more
    return read_reply(api, json.dumps(body).encode())


def read_stream(api: str, usage: Any) -> Completion:
    """The completion of a stream whose last event has this usage."""
    events = SAMPLES[api].events(["Ye", "s."])
    if api == RESPONSES:
        events[-1]["response"]["usage"] = usage
    else:
        events[-1] = {**events[-1], "usage": usage}
    assembly = get_dialect(api).assembly(lambda _: None)
    for event in events:
        assembly.add(event)
    return read_reply(api, assembly.finish())


def counts(completion: Completion) -> tuple[int | None, ...]:
    """Input, output, cache reads, cache writes and reasoning."""
    assert completion.usage is not None
    return tuple(completion.usage.values())  # type: ignore[arg-type]


USAGES: list[tuple[str, str, Any, tuple[int | None, ...]]] = [
    (
        "no input is impossible",
        CHAT,
        {"prompt_tokens": 0, "completion_tokens": 20},
        (None, 20, None, None, None),
    ),
    (
        "no input in the total either",
        CHAT,
        {"prompt_tokens": 0, "completion_tokens": 20, "total_tokens": 20},
        (None, 20, None, None, None),
    ),
    (
        "no input, and nothing from the cache",
        MESSAGES,
        {"input_tokens": 0, "output_tokens": 20, "cache_read_input_tokens": 0},
        (None, 20, 0, None, None),
    ),
    (
        "no input of Responses",
        RESPONSES,
        {"input_tokens": 0, "output_tokens": 20, "total_tokens": 20},
        (None, 20, None, None, None),
    ),
    (
        "all input is from the cache",
        MESSAGES,
        {"input_tokens": 0, "output_tokens": 20, "cache_read_input_tokens": 900},
        (900, 20, 900, None, None),
    ),
    (
        "all input is beside the count, in the cache",
        CHAT,
        {
            "prompt_tokens": 0,
            "completion_tokens": 20,
            "prompt_tokens_details": {"cached_tokens": 900},
        },
        (900, 20, 900, None, None),
    ),
    (
        "xAI has reasoning beside the completion",
        CHAT,
        {
            "prompt_tokens": 32,
            "completion_tokens": 9,
            "total_tokens": 135,
            "completion_tokens_details": {"reasoning_tokens": 94},
        },
        (32, 103, None, None, 94),
    ),
    (
        "Gemini's OpenAI endpoint shows it in the total alone",
        CHAT,
        {"prompt_tokens": 20, "completion_tokens": 100, "total_tokens": 650},
        (20, 630, None, None, None),
    ),
    (
        "in Responses, too",
        RESPONSES,
        {"input_tokens": 20, "output_tokens": 100, "total_tokens": 650},
        (20, 630, None, None, None),
    ),
    (
        "more reasoning than completion is beside it, also without a total",
        CHAT,
        {
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "completion_tokens_details": {"reasoning_tokens": 40},
        },
        (5, 43, None, None, 40),
    ),
    (
        "OpenAI has it inside",
        CHAT,
        {
            "prompt_tokens": 20,
            "completion_tokens": 603,
            "total_tokens": 623,
            "completion_tokens_details": {"reasoning_tokens": 405},
        },
        (20, 603, None, None, 405),
    ),
    (
        "a total below the sum says nothing",
        CHAT,
        {"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 3},
        (20, 10, None, None, None),
    ),
    (
        "a total that counts the cache beside the prompt",
        CHAT,
        {
            "prompt_tokens": 40,
            "completion_tokens": 10,
            "total_tokens": 1010,
            "cache_read_input_tokens": 900,
            "cache_creation_input_tokens": 60,
        },
        (1000, 10, 900, 60, None),
    ),
    (
        "a total stands in for one missing count",
        CHAT,
        {"prompt_tokens": 20, "total_tokens": 25},
        (20, 5, None, None, None),
    ),
    (
        "DeepSeek",
        CHAT,
        {**BASE, "prompt_cache_hit_tokens": 960, "prompt_cache_miss_tokens": 40},
        (1000, 10, 960, None, None),
    ),
    ("Moonshot and Together", CHAT, {**BASE, "cached_tokens": 960}, (1000, 10, 960, None, None)),
    (
        "LiteLLM writes all of its spellings, which count once",
        CHAT,
        {
            **BASE,
            "prompt_tokens_details": {
                "cached_tokens": 700,
                "cache_creation_tokens": 200,
                "cache_write_tokens": 200,
                "cache_creation_token_details": {
                    "ephemeral_5m_input_tokens": 50,
                    "ephemeral_1h_input_tokens": 150,
                },
            },
            "cache_read_input_tokens": 700,
            "cache_creation_input_tokens": 200,
        },
        (1000, 10, 700, 200, None),
    ),
    (
        "of LiteLLM, the details may say 0",
        CHAT,
        {**BASE, "prompt_tokens_details": {"cached_tokens": 0}, "cache_read_input_tokens": 960},
        (1000, 10, 960, None, None),
    ),
    (
        "OpenRouter",
        CHAT,
        {**BASE, "prompt_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 90}},
        (1000, 10, 8, 90, None),
    ),
    (
        "DashScope",
        CHAT,
        {
            **BASE,
            "prompt_tokens_details": {
                "cached_tokens": 0,
                "cache_type": "ephemeral",
                "cache_creation_input_tokens": 800,
                "cache_creation": {"ephemeral_5m_input_tokens": 800},
            },
        },
        (1000, 10, 0, 800, None),
    ),
    (
        "Responses' names inside chat",
        CHAT,
        {
            **RESPONSES_BASE,
            "input_tokens_details": {"cached_tokens": 960},
            "output_tokens_details": {"reasoning_tokens": 4},
        },
        (1000, 10, 960, None, 4),
    ),
    (
        "chat's names inside Responses",
        RESPONSES,
        {**BASE, "prompt_tokens_details": {"cached_tokens": 960}},
        (1000, 10, 960, None, None),
    ),
    (
        "names of both that say the same",
        CHAT,
        {**BASE, **RESPONSES_BASE, "prompt_tokens_details": {"cached_tokens": 5}},
        (1000, 10, 5, None, None),
    ),
    (
        "Anthropic's usage inside chat: the input excludes the cache",
        CHAT,
        {
            "input_tokens": 40,
            "output_tokens": 10,
            "cache_read_input_tokens": 900,
            "cache_creation_input_tokens": 60,
        },
        (1000, 10, 900, 60, None),
    ),
    (
        "Perplexity has reasoning beside other counts",
        CHAT,
        {**BASE, "reasoning_tokens": 6, "citation_tokens": 3},
        (1000, 10, None, None, 6),
    ),
    (
        "Anthropic: only the lifetimes say what was written",
        MESSAGES,
        {
            "input_tokens": 10,
            "output_tokens": 5,
            "cache_creation": {"ephemeral_5m_input_tokens": 3, "ephemeral_1h_input_tokens": 7},
        },
        (20, 5, None, 10, None),
    ),
    (
        "Anthropic bills a compaction beside the other counts",
        MESSAGES,
        {
            "input_tokens": 23,
            "output_tokens": 10,
            "iterations": [
                {"type": "compaction", "input_tokens": 180, "output_tokens": 35},
                {"type": "message", "input_tokens": 23, "output_tokens": 10},
            ],
        },
        (203, 45, None, None, None),
    ),
    (
        "no reply has neither input nor output: the server does not count",
        CHAT,
        {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
        (None, None, None, None, None),
    ),
    (
        "what is no count is unknown",
        CHAT,
        {**BASE, "cached_tokens": "960", "total_tokens": True, "prompt_cache_hit_tokens": -1},
        (1000, 10, None, None, None),
    ),
]


@pytest.mark.parametrize("read", [read_whole, read_stream])
@pytest.mark.parametrize(
    ("api", "usage", "right"), [one[1:] for one in USAGES], ids=[one[0] for one in USAGES]
)
def test_counts_in_the_spellings_of_servers(read: Any, api: str, usage: Any, right: Any) -> None:
    assert counts(read(api, usage)) == right


@pytest.mark.parametrize(
    ("usage", "right"),
    [
        ({"promptTokenCount": 9, "totalTokenCount": 30}, (9, 21)),
        ({"promptTokenCount": 9, "candidatesTokenCount": 2, "totalTokenCount": 30}, (9, 21)),
        (
            {
                "promptTokenCount": 9,
                "candidatesTokenCount": 2,
                "thoughtsTokenCount": 10,
                "toolUsePromptTokenCount": 5,
                "totalTokenCount": 26,
            },
            (14, 12),
        ),
    ],
)
def test_gemini_counts_all_of_its_total(usage: Any, right: Any) -> None:
    completion = read_reply("gemini", json.dumps({**GEMINI, "usageMetadata": usage}).encode())
    assert counts(completion)[:2] == right
    kept = (completion.extra or {}).get("usage")
    assert kept == (None if usage.get("toolUsePromptTokenCount") else usage)


@pytest.mark.parametrize(("cached", "right"), [(None, (None, 20)), (0, (None, 20)), (9, (9, 20))])
def test_gemini_has_no_calls_without_input(cached: int | None, right: Any) -> None:
    usage = {
        "promptTokenCount": 0,
        "candidatesTokenCount": 20,
        "cachedContentTokenCount": cached,
    }
    completion = read_reply("gemini", json.dumps({**GEMINI, "usageMetadata": usage}).encode())
    assert counts(completion)[:2] == right


@pytest.mark.parametrize("read", [read_whole, read_stream])
def test_the_record_keeps_counts_as_they_came_where_its_own_say_something_else(read: Any) -> None:
    usage = {
        "prompt_tokens": 32,
        "completion_tokens": 9,
        "total_tokens": 135,
        "completion_tokens_details": {"reasoning_tokens": 94},
    }
    completion = read(CHAT, usage)
    plain = {"prompt_tokens": 32, "completion_tokens": 9, "total_tokens": 135}
    assert (completion.extra or {})["usage"] == plain
    assert "usage" not in (read(CHAT, BASE).extra or {})
    assert "usage" not in (read(RESPONSES, RESPONSES_BASE).extra or {})


MOONSHOT = {"prompt_tokens": 1000, "completion_tokens": 50, "cached_tokens": 960}


def test_usage_in_a_choice_or_in_x_groq_is_read_if_there_is_none_at_the_top() -> None:
    right = (1000, 50, 960, None, None)
    body = SAMPLES[CHAT].whole("Yes.", "{}")
    in_choice = {**body, "choices": [{**body["choices"][0], "usage": MOONSHOT}]}
    for reply in (in_choice, {**body, "x_groq": {"id": "q", "usage": MOONSHOT}}):
        tops: list[dict[str, Any]] = [{}, {"usage": None}, {"usage": {}}]
        for top in tops:
            read = read_reply(CHAT, json.dumps({**reply, **top}).encode())
            assert counts(read) == right
        read = read_reply(CHAT, json.dumps({**reply, "usage": BASE}).encode())
        assert counts(read)[:2] == (1000, 10)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_several_choices_with_a_usage_each_cost_their_sum(streamed: bool) -> None:
    """They have the prompt in common."""
    usages = [{**BASE, "completion_tokens": made, "total_tokens": 1000 + made} for made in (10, 7)]
    said = "delta" if streamed else "message"
    choices = [
        {"index": n, said: {"content": "Yes."}, "finish_reason": "stop", "usage": usage}
        for n, usage in enumerate(usages)
    ]
    body = json.dumps({"choices": choices}).encode()
    if streamed:
        assembly = get_dialect(CHAT).assembly(lambda _: None)
        for choice in choices:
            assembly.add({"choices": [choice]})
        body = assembly.finish()
    assert counts(read_reply(CHAT, body))[:2] == (1000, 17)


@pytest.mark.parametrize(
    ("usages", "right"),
    [
        ([BASE, {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}], (1000, 10)),
        ([{"prompt_tokens": 1000, "completion_tokens": 0}, {"completion_tokens": 10}], (1000, 10)),
        ([{"prompt_tokens": 1000, "completion_tokens": 1}, BASE], (1000, 10)),
    ],
    ids=["zeros at the end", "one count a part", "totals so far"],
)
def test_the_parts_of_a_chat_stream_do_not_take_counts_back(
    usages: list[Any], right: tuple[int, int]
) -> None:
    assembly = get_dialect(CHAT).assembly(lambda _: None)
    for usage in usages:
        delta = {"delta": {"content": "a"}, "finish_reason": "stop"}
        assembly.add({"choices": [delta], "usage": usage})
    assert counts(read_reply(CHAT, assembly.finish()))[:2] == right


@pytest.mark.parametrize("place", ["choice", "x_groq"])
def test_the_same_in_the_last_part_of_a_stream(place: str) -> None:
    events = SAMPLES[CHAT].events(["Yes."])
    if place == "choice":
        events[-1]["choices"][0]["usage"] = MOONSHOT
    else:
        events[-1]["x_groq"] = {"usage": MOONSHOT}
    assembly = get_dialect(CHAT).assembly(lambda _: None)
    for event in events:
        assembly.add(event)
    assert counts(read_reply(CHAT, assembly.finish())) == (1000, 50, 960, None, None)


COSTS: list[tuple[str, Any, float | None]] = [
    ("plain", {"cost": 0.25}, 0.25),
    ("nothing", {}, None),
    (
        "OpenRouter with one's own key: its fee, and what the provider bills",
        {"cost": 0.01, "is_byok": True, "cost_details": {"upstream_inference_cost": 0.2}},
        0.21,
    ),
    (
        "OpenRouter without: the cost has it already",
        {"cost": 0.2, "is_byok": False, "cost_details": {"upstream_inference_cost": 0.2}},
        0.2,
    ),
    ("no flag means no", {"cost": 0.2, "cost_details": {"upstream_inference_cost": 0.2}}, 0.2),
    ("what the provider bills is unknown", {"cost": 0, "is_byok": True}, None),
    (
        "null is unknown",
        {"cost": 0, "is_byok": True, "cost_details": {"upstream_inference_cost": None}},
        None,
    ),
    ("xAI: 10 billion ticks are a dollar", {"cost_in_usd_ticks": 37_756_000}, 0.0037756),
    ("DeepInfra", {"estimated_cost": 0.003}, 0.003),
    (
        "Perplexity",
        {"cost": {"input_tokens_cost": 0.1, "request_cost": 0.3, "total_cost": 0.4}},
        0.4,
    ),
    ("not dollars", {"cost": {"currency": "EUR", "total_cost": 0.4}}, None),
    (
        "several count once, as the largest",
        {"cost": 0.3, "estimated_cost": 0.2, "cost_in_usd_ticks": 10**9},
        0.3,
    ),
    ("no numbers", {"cost": "free", "estimated_cost": True, "cost_in_usd_ticks": -1}, None),
    ("no float holds it", {"cost": 10**18, "cost_in_usd_ticks": None}, 1e18),
]


@pytest.mark.parametrize("read", [read_whole, read_stream])
@pytest.mark.parametrize("api", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(("said", "right"), [one[1:] for one in COSTS], ids=[c[0] for c in COSTS])
def test_costs_in_the_spellings_of_servers(
    read: Any, api: str, said: Any, right: float | None
) -> None:
    base = BASE if api == CHAT else {"input_tokens": 5, "output_tokens": 5}
    cost = read(api, {**base, **said}).cost_usd
    assert cost == (None if right is None else pytest.approx(right))


CLAUDE = ModelSettings(
    name="claude-sonnet-4-5", api=MESSAGES, base_url=None, key_env=None, provider="anthropic"
)
HOUR = {
    "input_tokens": 10,
    "output_tokens": 10,
    "cache_read_input_tokens": 100,
    "cache_creation_input_tokens": 30_000,
    "cache_creation": {"ephemeral_5m_input_tokens": 2000, "ephemeral_1h_input_tokens": 28_000},
}
LITELLM_HOUR = {
    "prompt_tokens": 30_110,
    "completion_tokens": 10,
    "total_tokens": 30_120,
    "prompt_tokens_details": {
        "cached_tokens": 100,
        "cache_creation_tokens": 30_000,
        "cache_creation_token_details": HOUR["cache_creation"],
    },
}


@pytest.mark.parametrize("read", [read_whole, read_stream])
@pytest.mark.parametrize(("api", "usage"), [(MESSAGES, HOUR), (CHAT, LITELLM_HOUR)])
def test_what_is_cached_for_an_hour_costs_twice_the_input(read: Any, api: str, usage: Any) -> None:
    completion = read(api, usage)
    assert completion.hour_cache_writes == 28_000
    in_dollars = (10 * 3 + 100 * 0.3 + 2000 * 3.75 + 28_000 * 6 + 10 * 15) / 1e6
    assert price(completion, CLAUDE) == pytest.approx(in_dollars)
    assert price(completion, CLAUDE, by_batch=True) == pytest.approx(in_dollars / 2)
    own = {"claude-sonnet-4-5": Price(1.0, 2.0, 0.1, 1.2)}
    mine = ModelSettings(name="claude-sonnet-4-5", api=api, base_url=None, key_env=None, prices=own)
    by_own = (10 * 1 + 100 * 0.1 + 2000 * 1.2 + 28_000 * 2 + 10 * 2) / 1e6
    assert price(completion, mine) == pytest.approx(by_own)


def test_an_hour_of_a_long_request_costs_twice_its_own_input() -> None:
    """Beyond 200,000 tokens the table has a higher price for all input of this model."""
    usage = {"input_tokens": 0, "output_tokens": 0, "cache_creation_input_tokens": 300_000}
    for_an_hour = read_whole(
        MESSAGES, {**usage, "cache_creation": {"ephemeral_1h_input_tokens": 300_000}}
    )
    fresh = read_whole(MESSAGES, {"input_tokens": 300_000, "output_tokens": 0})
    one, other = price(for_an_hour, CLAUDE), price(fresh, CLAUDE)
    assert one is not None
    assert other is not None
    assert one == pytest.approx(2 * other)


NUMBER = st.one_of(
    st.none(), st.integers(-2, 5), st.integers(0, MAX_TOKEN_COUNT * 2), st.text("1a")
)
PLACE = st.dictionaries(
    st.sampled_from(
        [
            "prompt_tokens",
            "completion_tokens",
            "input_tokens",
            "output_tokens",
            "total_tokens",
            "cached_tokens",
            "cache_write_tokens",
            "reasoning_tokens",
            "cache_creation_input_tokens",
            "cache_read_input_tokens",
            "cost",
            "iterations",
            "ephemeral_1h_input_tokens",
        ]
    ),
    NUMBER,
)
USAGE = st.builds(
    lambda usage, objects: {**usage, **objects},
    PLACE,
    st.dictionaries(
        st.sampled_from(
            [
                "prompt_tokens_details",
                "output_tokens_details",
                "cache_creation",
                "cost_details",
                "completion_tokens_details",
                "iterations",
            ]
        ),
        st.one_of(PLACE, st.lists(PLACE, max_size=2), NUMBER),
    ),
)


@given(api=st.sampled_from([CHAT, RESPONSES, MESSAGES]), usage=USAGE)
def test_any_usage_is_counts_or_unknown_and_the_output_is_never_less_than_said(
    api: str, usage: Any
) -> None:
    completion = read_whole(api, usage)
    assert all(count is None or count >= 0 for count in counts(completion))
    for name in ("completion_tokens", "output_tokens"):
        said = usage.get(name)
        if isinstance(said, int) and 0 < said < MAX_TOKEN_COUNT:
            assert (counts(completion)[1] or 0) >= said


@pytest.mark.parametrize("api", [CHAT, RESPONSES, MESSAGES])
def test_an_unusable_reply_says_what_it_cost(api: str) -> None:
    usage = LITELLM_HOUR if api == CHAT else {**HOUR, "cost": 0.5}
    body = {"usage": usage, "model": "m", "choices": [], "output": [], "status": "x"}
    with pytest.raises(ModelError) as caught:
        read_reply(api, json.dumps(body).encode())
    assert caught.value.paid is not None
    assert caught.value.paid.hour_cache_writes == 28_000
    assert caught.value.paid.cost_usd == (None if api == CHAT else 0.5)
