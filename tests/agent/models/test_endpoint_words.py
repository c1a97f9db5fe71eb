"""The words of endpoints: why a reply ended, and why a request is refused, in every form of error.

Bodies have the structure of what real servers send; their content is made up.
"""

# ruff: noqa: E501 - a body a line

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from agent.messages.message import FinishReason
from agent.models.dialects.dialect import read_reply
from agent.models.endpoint_words import find_phrase, load_tables, load_words
from agent.models.error_bodies import error_behind_200, find_error, read_error, read_refusal
from agent.models.errors import RULES, ModelError, blame_reply_limit

JSON = dict[str, Any]


def nested_error(message: str, **more: Any) -> JSON:
    """An error as OpenAI's API has it."""
    return {"error": {"message": message, **more}}


def raw(message: str, **more: Any) -> JSON:
    """An error as OpenRouter has it: the provider's own is a text inside of it."""
    inner = json.dumps(nested_error(message, **more))
    metadata = {"raw": inner, "provider_name": "Acme"}
    return {"error": {"message": "Provider returned error", "code": 400, "metadata": metadata}}


def test_every_word_has_a_source_and_a_meaning_that_exists() -> None:
    tables = load_tables()
    assert tables["ends"].keys() == {*get_args(FinishReason), "cut", "open"}
    for table in ("codes", "phrases"):
        assert tables[table].keys() <= RULES.keys()
    for table in ("ends", "codes", "phrases"):
        for words in tables[table].values():
            for word, source in words.items():
                assert word == word.lower(), "words are compared in lower case"
                assert source.strip(), word
    assert all(400 <= status < 600 for status in tables["statuses"].values())
    both = [word for words in tables["ends"].values() for word in words]
    assert len(both) == len(set(both)), "a word means one thing"


def test_each_phrase_finds_itself() -> None:
    """`*` stands for some words and `#` for a number."""
    for kind, phrases in load_tables()["phrases"].items():
        for phrase in phrases:
            said = f"Error: {phrase.replace('*', 'of that kind').replace('#', '(1,024)')}!"
            assert find_phrase(kind, said) is not None, phrase


CHAT_END: JSON = {"message": {"role": "assistant", "content": "text"}}


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("end_turn", "stop"),
        ("EOS_TOKEN", "stop"),
        ("stop-sequence", "stop"),
        (" Stop ", "stop"),
        ("TOOL_USE", "tool_calls"),
        ("MAX_TOKENS", "length"),
        ("Sensitive", "refusal"),
        ("PROHIBITED_CONTENT", "refusal"),
        ("context_window_exceeded", "context_exceeded"),
    ],
)
def test_endings_mean_the_same_in_every_dialect(word: str, reason: str) -> None:
    block: JSON = {"type": "text", "text": "text"}
    part, message = block, CHAT_END["message"]
    if reason == "tool_calls":
        block = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
        part = {"functionCall": {"name": "f", "args": {}}}
        message = {"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
    replies = {
        "openai_chat": {"choices": [{"message": message, "finish_reason": word}]},
        "anthropic_messages": {"content": [block], "stop_reason": word},
        "gemini": {"candidates": [{"content": {"parts": [part]}, "finishReason": word}]},
    }
    for api, reply in replies.items():
        assert read_reply(api, json.dumps(reply).encode()).finish_reason == reason


@pytest.mark.parametrize("word", ["abort", "network_error", "insufficient_system_resource"])
def test_a_reply_that_the_server_broke_off_is_no_reply(word: str) -> None:
    body = json.dumps({"choices": [{**CHAT_END, "finish_reason": word}]}).encode()
    with pytest.raises(ModelError, match="broke the reply off") as caught:
        read_reply("openai_chat", body)
    assert caught.value.kind == "malformed"


def test_an_unknown_word_is_kept() -> None:
    body = json.dumps({"choices": [{**CHAT_END, "finish_reason": "weary"}]}).encode()
    reply = read_reply("openai_chat", body)
    assert (reply.finish_reason, reply.unknown_ending) == ("stop", "weary")
    assert reply.extra == {"choice": {"finish_reason": "weary"}}
    empty = {"choices": [{"message": {"content": ""}, "finish_reason": "weary"}]}
    with pytest.raises(ModelError, match="weary"):
        read_reply("openai_chat", json.dumps(empty).encode())


REFUSALS: list[tuple[int, Any, str]] = [
    # The context is full.
    (400, {"message": "Input is too long for requested model."}, "context_exceeded"),
    (
        400,
        nested_error("Your request exceeded model token limit: 8192 (requested: 9000)"),
        "context_exceeded",
    ),
    (400, nested_error("Prompt exceeds max length", code="1261"), "context_exceeded"),
    (
        400,
        [
            nested_error(
                "The input token count (9000) exceeds the maximum number of tokens allowed (8192).",
                code=400,
            )
        ],
        "context_exceeded",
    ),
    (
        400,
        {
            "code": "Client specified an invalid argument",
            "error": "This model's maximum prompt length is 8192 but the request contains 9000 tokens.",
        },
        "context_exceeded",
    ),
    (
        422,
        {
            "error": "Input validation error: `inputs` must have less than 4096 tokens. Given: 5000",
            "error_type": "validation",
        },
        "context_exceeded",
    ),
    (
        400,
        {
            "object": "error",
            "message": "The input (9000 tokens) is longer than the model's context length (8192 tokens).",
            "code": 400,
        },
        "context_exceeded",
    ),
    (500, nested_error("context size has been exceeded"), "context_exceeded"),
    (
        400,
        nested_error("trying to keep the first 9000 tokens when context the overflows"),
        "context_exceeded",
    ),
    (400, nested_error("x", type="exceed_context_size_error"), "context_exceeded"),
    (
        413,
        nested_error(
            "Request too large for model `m`: TPM: Limit 6000, Requested 7000",
            code="rate_limit_exceeded",
        ),
        "context_exceeded",
    ),
    (400, raw("This endpoint's maximum context length is 8192 tokens."), "context_exceeded"),
    (
        400,
        nested_error(
            "litellm.ContextWindowExceededError: x - {'error': {'code': 'context_length_exceeded'}}"
        ),
        "context_exceeded",
    ),
    (
        400,
        nested_error("the number of input tokens 9000 cannot exceed the total tokens limit 8192"),
        "context_exceeded",
    ),
    (
        500,
        nested_error("Prompt length (9000) exceeds maximum input length (8192)"),
        "context_exceeded",
    ),
    (
        400,
        {"detail": "Input length 9000 exceeds maximum allowed token size 8192"},
        "context_exceeded",
    ),
    (
        400,
        {
            "errors": [
                {
                    "code": 5021,
                    "message": "The estimated number of tokens (9000) exceeded this model context window limit (8000).",
                }
            ],
            "success": False,
        },
        "context_exceeded",
    ),
    (
        400,
        nested_error("max_tokens must be at least 1, got -200.", type="BadRequestError"),
        "context_exceeded",
    ),
    # The account is empty.
    (429, nested_error("You have reached your monthly usage limit"), "no_credit"),
    (
        429,
        nested_error(
            "ExceededTokenBudget: Current spend: 12.5; Max Budget: 10.0", type="auth_error"
        ),
        "no_credit",
    ),
    (403, nested_error("Your account has run out of funds"), "no_credit"),
    (
        400,
        {
            "type": "error",
            "error": {
                "type": "invalid_request_error",
                "message": "You have reached your specified workspace API usage limits. You will regain access on 2027-01-01.",
            },
        },
        "no_credit",
    ),
    (
        429,
        nested_error("Insufficient balance or no resource package. Please recharge.", code="1113"),
        "no_credit",
    ),
    (
        429,
        nested_error(
            "Your account org-1 is suspended due to insufficient balance",
            type="exceeded_current_quota_error",
        ),
        "no_credit",
    ),
    (
        500,
        {"type": "error", "error": {"type": "api_error", "message": "insufficient balance (1008)"}},
        "no_credit",
    ),
    (
        400,
        {
            "code": "Arrearage",
            "message": "Access denied, please make sure your account is in good standing.",
        },
        "no_credit",
    ),
    (
        400,
        nested_error(
            "Budget has been exceeded! Current cost: 1.2, Max budget: 1.0",
            type="budget_exceeded",
            code="400",
        ),
        "no_credit",
    ),
    (403, nested_error("Key limit exceeded (total limit)", code=403), "no_credit"),
    (403, {"code": 30001, "message": "Sorry, your account balance is insufficient"}, "no_credit"),
    (
        429,
        {
            "code": "resource-exhausted",
            "error": "Your team has either used all available credits or reached its monthly spending limit.",
        },
        "no_credit",
    ),
    (
        412,
        nested_error(
            "Account acme is suspended, possibly due to reaching the monthly spending limit"
        ),
        "no_credit",
    ),
    (400, raw("Insufficient credits"), "no_credit"),
    # A filter.
    (
        400,
        nested_error(
            "The response was filtered due to the prompt triggering the content management policy.",
            code="content_filter",
        ),
        "filtered",
    ),
    (
        400,
        {
            "error": {
                "message": "x",
                "code": "400",
                "innererror": {"code": "ResponsibleAIPolicyViolation"},
            }
        },
        "filtered",
    ),
    (
        400,
        nested_error(
            "Input data may contain inappropriate content.", code="data_inspection_failed"
        ),
        "filtered",
    ),
    (
        400,
        {
            "type": "error",
            "error": {
                "type": "invalid_request_error",
                "message": "Output blocked by content filtering policy",
            },
        },
        "filtered",
    ),
    (
        403,
        nested_error("Your chosen model requires moderation and your input was flagged", code=403),
        "filtered",
    ),
    (400, nested_error("Content Exists Risk", type="invalid_request_error"), "filtered"),
    (400, nested_error("x", code="1301"), "filtered"),
    (400, raw("Content violates usage guidelines."), "filtered"),
    (400, {"message": "The content of your request was blocked by guardrail"}, "filtered"),
    (403, nested_error("Your request was flagged by moderation"), "filtered"),
    # What only looks so.
    (
        429,
        nested_error("You exceeded your current quota", code=429, status="RESOURCE_EXHAUSTED"),
        "rate_limited",
    ),
    (429, nested_error("Rate limit reached", code="rate_limit_exceeded"), "rate_limited"),
    (400, nested_error("'temperature' must be at most 2"), "bad_request"),
    (400, nested_error("x", code="base_resp:1008x"), "bad_request"),
    (404, nested_error("maximum context length"), "not_found"),
    # The model wrote a call that the server cannot read, or the server gave up: another try may do.
    (
        400,
        nested_error(
            "Failed to call a function. Please adjust your prompt. See 'failed_generation' for more details.",
            type="invalid_request_error",
            code="tool_use_failed",
            failed_generation="<function=f{>",
        ),
        "malformed",
    ),
    (
        400,
        raw("Failed to call a function.", type="invalid_request_error", code="tool_use_failed"),
        "malformed",
    ),
    (
        400,
        raw("Tool call validation failed: parameters for tool f did not match schema"),
        "malformed",
    ),
    (400, nested_error("Failed to call a function. Please adjust your prompt."), "malformed"),
    (
        499,
        nested_error("The operation was cancelled.", code=499, status="CANCELLED"),
        "overloaded",
    ),
    (499, "", "overloaded"),
    (
        424,
        {"error": "Request failed during generation: x", "error_type": "generation"},
        "overloaded",
    ),
    (424, nested_error("The MCP server failed"), "bad_request"),
    (413, nested_error("x", code="tokens_limit_reached"), "context_exceeded"),
]


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (400, "Prompt tokens (9000) exceeds context size (8192)", "context_exceeded"),
        (400, "tokens in request more than max tokens allowed", "context_exceeded"),
        (
            400,
            "The prompt (total length 9000) is too long to fit into the model (context length 8192)",
            "context_exceeded",
        ),
        (
            400,
            "The sum of prompt length (9000.0), query length (0) should not exceed max_num_tokens (8192)",
            "context_exceeded",
        ),
        (
            400,
            "Too many input tokens. Max input tokens: 8000, request input token count: 9000",
            "context_exceeded",
        ),
        (
            400,
            "You passed 3900 input tokens and requested 1000 output tokens. However, the model's context length is only 4096 tokens, resulting in a maximum input length of 3096 tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value=3900)",
            "context_exceeded",
        ),
        (
            400,
            "You passed 5000 input tokens. However, the model's context length is only 4096. Please reduce the length of the input messages.",
            "context_exceeded",
        ),
        (400, "The context is full. Reduce the length of the input messages.", "context_exceeded"),
        (
            400,
            "Unable to submit request because the input token count is 9000 but model only supports up to 8192.",
            "context_exceeded",
        ),
        (400, "input token count is 9000 but the model supports up to 8192", "context_exceeded"),
        (
            400,
            "length of prompt_tokens (9000) must be less than max_seq_len (8192)",
            "context_exceeded",
        ),
        (400, "Request length 9000 + 100 is greater than max_seq_len 8192", "context_exceeded"),
        (400, "Prompt length 9000 is greater than max_seq_len 8192.", "context_exceeded"),
        (400, "max_tokens (9000) is greater than max_seq_len (8192)", "bad_request"),
        (400, "Too many tokens in prompt: 9000 > 8192", "context_exceeded"),
        (
            400,
            "The maximum supported sequence length is just 8192 tokens, but 9000 were given",
            "context_exceeded",
        ),
        (400, "Prompt and generation tokens exceed the limit of 8192", "context_exceeded"),
        (413, "Request body too large for gpt-9 model. Max size: 8000 tokens.", "context_exceeded"),
        (413, "Request body too large", "bad_request"),
        (400, "Number of input tokens exceeds maximum length", "context_exceeded"),
        (
            400,
            "Total number of tokens (prompt+generation) exceeded the service limit of 2048 tokens.",
            "context_exceeded",
        ),
        (400, "Requested max_tokens exceeds the model output limit", "bad_request"),
        (429, "Too many tokens, please wait before trying again.", "rate_limited"),
        (
            429,
            "Your account org-x<ak-y> is suspended, please check your plan and billing details",
            "no_credit",
        ),
        (403, "用户额度不足, 剩余额度: ¥0.01", "no_credit"),
        (403, "user quota is not enough", "no_credit"),
        (403, "token quota is not enough, token remain quota: $0.1", "no_credit"),
        (403, "Your account has been suspended due to unpaid invoices", "no_credit"),
        (
            400,
            "The request failed because the input text may contain sensitive information.",
            "filtered",
        ),
        (400, "This request has been flagged for possible cybersecurity risk.", "filtered"),
    ],
)
def test_the_words_of_further_servers(status: int, message: str, kind: str) -> None:
    """A star in a phrase stands for a space alone, too, and for other marks."""
    assert (
        read_refusal(status, {}, json.dumps({"error": {"message": message}}).encode()).kind == kind
    )


@pytest.mark.parametrize(("status", "body", "kind"), REFUSALS)
def test_a_refusal_is_known_by_status_in_a_200_and_in_a_stream(
    status: int, body: Any, kind: str
) -> None:
    assert read_refusal(status, {}, json.dumps(body).encode()).kind == kind
    if kind in ("context_exceeded", "no_credit", "filtered", "malformed"):
        assert error_behind_200(body, "the stream").kind == kind


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        (1002, "rate limit", "rate_limited"),
        (1004, "login fail", "auth"),
        (1008, "x", "no_credit"),
        (1026, "x", "filtered"),
        (1039, "x", "context_exceeded"),
        (2013, "invalid params, tool result's tool id not found", "bad_request"),
        (2013, "invalid params, context window exceeds limit", "context_exceeded"),
    ],
)
def test_codes_of_base_resp(code: int, message: str, kind: str) -> None:
    base = {"status_code": code, "status_msg": message}
    body = {"id": "x", "choices": None, "usage": {"total_tokens": 0}, "base_resp": base}
    with pytest.raises(ModelError, match=message.split(",")[0]) as caught:
        read_reply("openai_chat", json.dumps(body).encode())
    assert caught.value.kind == kind
    whole = {"choices": [{**CHAT_END, "finish_reason": "stop"}]}
    fine = {**whole, "base_resp": {"status_code": 0, "status_msg": ""}}
    assert read_reply("openai_chat", json.dumps(fine).encode()).finish_reason == "stop"


def test_an_error_that_quotes_the_request_is_not_about_its_words() -> None:
    prompt = 'Explain: "the prompt is too long, 9 tokens" and when credits are exhausted, please.'
    request = json.dumps({"messages": [{"role": "user", "content": f"Hi.\n{prompt}"}]}).encode()
    for message in (
        f"1 validation error for Request: input_value={prompt!r}",
        f"Invalid message: Hi. {prompt}",
    ):
        body = json.dumps(nested_error(message)).encode()
        assert read_refusal(400, {}, body, request).kind == "bad_request"
    # The same conversation meets a real one.
    full = json.dumps(nested_error("prompt is too long: 250000 tokens > 200000 maximum")).encode()
    assert read_refusal(400, {}, full, request).kind == "context_exceeded"


@pytest.mark.parametrize(
    "told",
    [
        "error parsing tool call: raw='{quoted}', err=unexpected end of JSON input",
        "Failed to parse input at pos 12: {quoted}",
        "Failed to parse tool call arguments as JSON: syntax error; last read: '{quoted}'",
        "Failed to call a function. failed_generation: {quoted}",
    ],
)
@pytest.mark.parametrize(
    "quoted",
    [
        '{"path": "account.py", "content": "raise ValueError(\'Insufficient funds\')"',
        "BAD_KEY = {'error': {'code': 'invalid_api_key'}}",
        "the prompt is too long, 9 > 4",
    ],
)
def test_an_error_that_quotes_the_model_is_not_about_its_words(told: str, quoted: str) -> None:
    body = json.dumps(nested_error(told.replace("{quoted}", quoted), type="api_error")).encode()
    error = read_refusal(500, {}, body)
    assert error.kind == ("malformed" if "Failed to call" in told else "overloaded")
    assert quoted[:20] in str(error)


@pytest.mark.parametrize(
    ("message", "is_limit"),
    [
        (
            "'max_tokens' is too large: 8192. This model's maximum context length is 4096 tokens "
            "and your request has 300 input tokens (8192 > 4096 - 300).",
            True,
        ),
        (
            "This model's maximum context length is 4,097 tokens. However, you requested 8492 "
            "tokens (300 in the messages, 8192 in the completion).",
            True,
        ),
        (
            "Requested token count exceeds the model's maximum context length of 4096 tokens. You "
            "requested a total of 8492 tokens: 300 tokens from the input messages and 8192 tokens "
            "for the completion.",
            True,
        ),
        ("input length and `max_tokens` exceed context limit: 19 + 213330 > 200000", True),
        (
            "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 300 `inputs` tokens and "
            "8192 `max_new_tokens`",
            True,
        ),
        (
            "This endpoint's maximum context length is 32768 tokens. However, you requested about "
            "40000 tokens (300 of text input, 39700 in the output).",
            True,
        ),
        (
            "This model's maximum context length is 4096 tokens. However, you requested 6000 "
            "tokens (5000 in the messages, 1000 in the completion).",
            False,
        ),
        (
            "This model's maximum context length is 32768 tokens. However, you requested 33096 "
            "tokens (29000 in your prompt; 4096 for the completion).",
            False,
        ),
        (
            "This model's maximum context length is 8192 tokens. However, you requested 8500 "
            "tokens (500 in your prompt; 8000 for the completion).",
            True,
        ),
        ("input length and `max_tokens` exceed context limit: 297202 + 21333 > 200000", False),
        ("input length and `max_tokens` exceed context limit: 197309 + 8192 > 200000", False),
        ("prompt is too long: 250000 tokens > 200000 maximum", False),
        ("the request exceeds the available context size (4096 tokens)", False),
    ],
)
def test_a_first_request_may_be_refused_for_the_limit_of_its_reply(
    message: str, is_limit: bool
) -> None:
    error = read_refusal(400, {}, json.dumps(nested_error(message)).encode())
    assert error.kind == "context_exceeded"
    blame_reply_limit(error)
    assert error.kind == ("bad_request" if is_limit else "context_exceeded")


def test_what_an_error_holds_besides_its_words_is_no_error() -> None:
    item = {"type": "missing", "loc": ["body", "x"], "msg": "Field required"}
    body = {"detail": [{**item, "input": {"messages": "the prompt is too long"}}]}
    assert read_refusal(422, {}, json.dumps(body).encode()).kind == "bad_request"
    read = read_error(json.dumps(body).encode())
    assert (read.message, read.param) == ("body.x: Field required", "x")


def test_the_words_of_router_and_provider_are_both_shown() -> None:
    error = read_refusal(400, {}, json.dumps(raw("At most 1 image.", type="e")).encode())
    assert str(error) == "HTTP 400: Provider returned error: Acme: At most 1 image."
    assert error.code == "e"


@pytest.mark.parametrize(
    "body",
    [
        {"choices": [{"error": {"message": "boom"}, "finish_reason": "error"}]},
        {"detail": "boom"},
        {"object": "error", "message": "boom", "code": 400},
        {"success": False, "errors": [{"code": 10000, "message": "boom"}]},
        {"error_code": 336, "error_msg": "boom"},
        {"code": "InvalidParameter", "message": "boom"},
        {"fault": {"faultstring": "boom"}},
    ],
)
def test_an_error_inside_of_a_200_is_shown_in_the_servers_words(body: JSON) -> None:
    assert find_error(body) is not None
    for api in ("openai_chat", "anthropic_messages", "openai_responses", "gemini"):
        with pytest.raises(ModelError, match="boom"):
            read_reply(api, json.dumps(body).encode())


def test_a_200_that_nobody_can_read_is_quoted() -> None:
    body = json.dumps({"answer": "y" * 500}).encode()
    for api in ("openai_chat", "anthropic_messages", "openai_responses", "gemini"):
        with pytest.raises(ModelError, match="answer") as caught:
            read_reply(api, body)
        assert 180 < str(caught.value).count("y") <= 200
    whole = {"choices": [{**CHAT_END, "finish_reason": "stop"}]}
    assert find_error(whole) is None


def test_google_says_in_the_body_how_long_to_wait() -> None:
    info = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "34.5s"}
    body = json.dumps(nested_error("x", code=429, details=[info])).encode()
    assert read_refusal(429, {}, body).retry_after_s == 34.5
    assert read_refusal(429, {"retry-after": "2"}, body).retry_after_s == 2.0


def test_the_tables_are_read_once() -> None:
    assert load_words() is load_words()
