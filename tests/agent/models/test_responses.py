"""The Responses dialect: what goes out, what comes back, and that thoughts return untouched."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
import pytest

from agent.messages.message import Message
from agent.models.client.endpoint import EndpointModel, open_model
from agent.models.dialects.openai_responses import API, ResponsesAssembly, read_reply, request_body
from agent.models.errors import ModelError
from agent.models.model import Completion, ModelSettings, Request, StreamEvent, StreamHandler
from agent.models.resolve import resolve_model, resolve_sibling
from agent.state.events import make_ids_unique
from run_agent import AIAgent
from tests.agent.models.test_streaming import nobody, summarize_events, summarize_message
from tests.helpers.answering import Handler, listening

KEY = "sk-secret-123"
SETTINGS = ModelSettings(name="m", api=API, base_url="http://x/v1", key_env=None)
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "list_files", "description": "F.", "parameters": PARAMETERS},
    }
]
JSON = dict[str, Any]


# What a reply consists of


def thought(n: Any, *summary: str, **more: Any) -> JSON:
    parts = [{"type": "summary_text", "text": text} for text in summary]
    sealed = f"gAAAA+/{n}=\u00e9\U0001f600"
    return {"id": f"rs_{n}", "type": "reasoning", "summary": parts, **more} | {
        "encrypted_content": sealed
    }


def text_part(text: str, **more: Any) -> JSON:
    return {"type": "output_text", "annotations": [], "logprobs": [], "text": text, **more}


def says(*parts: JSON, n: Any = 1, **more: Any) -> JSON:
    return {
        "id": f"msg_{n}",
        "type": "message",
        "status": "completed",
        "content": list(parts),
        "role": "assistant",
        **more,
    }


def calls(id: Any, arguments: Any = "{}", **more: Any) -> JSON:
    return {
        "id": f"fc_{id}",
        "type": "function_call",
        "status": "completed",
        "arguments": arguments,
        "call_id": id,
        "name": "list_files",
        **more,
    }


def body(*output: Any, status: Any = "completed", **more: Any) -> JSON:
    """A reply as it comes in one piece."""
    return {
        "id": "resp_1",
        "object": "response",
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": "m-2026",
        "output": list(output),
        **more,
    }


def read(*output: Any, **more: Any) -> Completion:
    return read_reply(orjson.dumps(body(*output, **more)))


def incomplete(reason: Any) -> JSON:
    return {"status": "incomplete", "incomplete_details": {"reason": reason}}


USAGE = {
    "input_tokens": 100,
    "input_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 30},
    "output_tokens": 20,
    "output_tokens_details": {"reasoning_tokens": 15},
    "total_tokens": 120,
}


def turn_outputs(turn: int, ids: Sequence[str]) -> list[JSON]:
    """Three turns with two calls each, then an answer; thoughts before all that they lead to."""
    one, other = ids
    empty: JSON = {"content": [], "status": None}
    match turn:
        case 1:
            parts = [thought("1a", "**Look** first.", "Then see."), calls(one, '{"path": "."}')]
            return [*parts, thought("1b", **empty), calls(other, "{")]
        case 2:
            raw = [{"type": "reasoning_text", "text": " raw thought\n"}]
            spoken = says(text_part("Looking \U0001f600 on."), n=2, phase="commentary")
            return [thought(2, content=raw), spoken, calls(one), calls(other, '{ "path":"b"}')]
        case 3:
            first, second = calls(one), calls(other, caller={"type": "direct"})
            return [thought("3a"), thought("3b", "Nearly."), first, second]
        case _:
            first = says(text_part("All", annotations=[{"type": "x"}]), text_part(" of it."), n=4)
            return [thought(4, "Done."), first, says(text_part("Bye."), n=5)]


def events_of(reply: JSON, last: str = "response.completed") -> Iterator[JSON]:
    """The stream in which a server sends the same reply, with much that no client needs."""
    started = {**reply, "output": [], "status": "in_progress", "usage": None}
    yield {"type": "response.created", "response": started}
    yield {"type": "response.in_progress", "response": started}
    for n, item in enumerate(reply["output"]):
        kind, place = item["type"], {"item_id": item["id"], "output_index": n}
        hollow: JSON = {"content": [], "status": "in_progress"}
        if kind == "reasoning":
            hollow = {"summary": [], "encrypted_content": "gAAA"}
        elif kind == "function_call":
            hollow = {"arguments": "", "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": n, "item": {**item, **hollow}}
        if kind == "function_call":
            yield from deltas("response.function_call_arguments", place, item["arguments"])
        for key, name in (("summary", "reasoning_summary_text"), ("content", "reasoning_text")):
            for k, part in enumerate((item.get(key) or []) if kind == "reasoning" else []):
                where = {**place, f"{key}_index": k}
                yield {"type": "response.reasoning_summary_part.added", **where, "part": part}
                yield from deltas(f"response.{name}", where, part["text"])
        for k, part in enumerate(item["content"] if kind == "message" else []):
            where = {**place, "content_index": k}
            yield {"type": "response.content_part.added", **where, "part": part}
            name = "refusal" if part["type"] == "refusal" else "output_text"
            yield from deltas(f"response.{name}", where, part.get("text") or part["refusal"])
            yield {"type": "response.content_part.done", **where, "part": part}
        yield {"type": "response.output_item.done", "output_index": n, "item": item}
    yield {"type": last, "response": reply}


def deltas(kind: str, place: JSON, text: str) -> Iterator[JSON]:
    for n in range(0, len(text), 3):
        yield {"type": f"{kind}.delta", **place, "delta": text[n : n + 3], "obfuscation": "x"}
    yield {"type": f"{kind}.done", **place, "text": text, "arguments": text}


# An endpoint that takes back only what it gave


@dataclass
class Endpoint:
    """Plays the four turns to everybody, and refuses a history that is not what it said."""

    repeats_ids: bool = False
    """Gives both calls of every turn one id, which a client has to distinguish itself."""
    url: str = ""
    requests: list[JSON] = field(default_factory=list)

    def outputs(self, turn: int) -> list[JSON]:
        return turn_outputs(turn, ["same"] * 2 if self.repeats_ids else [f"a{turn}", f"b{turn}"])

    def answer(self, request: JSON) -> JSON:
        self.requests.append(request)
        turn = self.check(request["input"])
        ids = {"id": f"resp_{turn}", "usage": USAGE}
        return body(*self.outputs(turn), **ids, instructions=request.get("instructions"))

    def check(self, items: list[JSON]) -> int:
        """The number of the turn that is asked for; raises `AssertionError` at anything odd."""
        assert items[0]["role"] == "user"
        queue, seen = list(items[1:]), set()
        for turn in itertools.count(1):
            if not queue:
                return turn
            open_calls = []
            for issued in self.outputs(turn):
                given = dict(queue.pop(0))
                if issued["type"] == "function_call":
                    open_calls.append(given["call_id"])
                    assert self.repeats_ids or given["call_id"] == issued["call_id"]
                    given["call_id"] = issued["call_id"]
                known = {key: value for key, value in issued.items() if value is not None}
                assert orjson.dumps(given) == orjson.dumps(known), "not byte for byte"
            for call_id in open_calls:
                result = queue.pop(0)
                assert result.keys() == {"type", "call_id", "output"}
                assert (result["type"], result["call_id"]) == ("function_call_output", call_id)
                assert call_id not in seen, "an id that two calls have"
                seen.add(call_id)
        raise AssertionError


@contextmanager
def serving(endpoint: Endpoint) -> Iterator[Endpoint]:
    class Answering(Handler):
        def do_POST(self) -> None:
            request = json.loads(self.body())
            try:
                assert self.path == "/v1/responses"
                assert self.headers["authorization"] == f"Bearer {KEY}"
                reply = endpoint.answer(request)
            except (AssertionError, LookupError, TypeError) as error:
                refused = {"error": {"message": f"refused: {error}"}}
                self.send(400, json.dumps(refused).encode())
                return
            if request.get("stream"):
                pairs = ((event["type"], json.dumps(event)) for event in events_of(reply))
                events = (f"event: {kind}\ndata: {text}\n\n" for kind, text in pairs)
                self.send(200, "".join(events).encode(), "text/event-stream")
            else:
                self.send(200, json.dumps(reply).encode())

    with listening(Answering) as url:
        endpoint.url = f"{url}/v1"
        yield endpoint


async def converse(
    url: str, listen: Callable[[], StreamHandler] | None = None
) -> tuple[list[Completion], list[Message]]:
    """Play the conversation to its end; what was received is also written to disk and read back."""
    model = EndpointModel(replace(SETTINGS, base_url=url), KEY)
    messages = [Message(role="system", content="Be kind."), Message(role="user", content="Go.")]
    completions: list[Completion] = []
    used: set[str] = set()
    while not completions or completions[-1].finish_reason == "tool_calls":
        request = Request(messages, TOOLS, on_delta=listen() if listen else None)
        completions.append(await model.complete(request))
        message = copy.deepcopy(completions[-1].message)
        make_ids_unique(message, used, turn=len(completions))
        messages.append(orjson.loads(orjson.dumps(message)))
        for call in message.get("tool_calls", ()):
            used.add(call["id"])
            messages.append(Message(role="tool", tool_call_id=call["id"], name="f", content="1"))
    await model.close()
    return completions, messages


@pytest.mark.parametrize("repeats_ids", [False, True])
def test_a_conversation_is_the_same_streamed_or_not(repeats_ids: bool) -> None:
    """And the endpoint, which keeps nothing, finds all that it said in every request."""
    turns: list[list[StreamEvent]] = []

    def listen() -> StreamHandler:
        turns.append([])
        return turns[-1].append

    with serving(Endpoint(repeats_ids)) as endpoint:
        whole, messages = asyncio.run(converse(endpoint.url))
        streamed, same = asyncio.run(converse(endpoint.url, listen))
    assert streamed == whole
    assert same == messages
    assert [completion.finish_reason for completion in whole] == ["tool_calls"] * 3 + ["stop"]
    assert [completion.response_id for completion in whole] == [f"resp_{n}" for n in range(1, 5)]
    assert [len(request["input"]) for request in endpoint.requests] == [1, 7, 13, 19] * 2
    assert all(request["instructions"] == "Be kind." for request in endpoint.requests)
    assert [request["stream"] for request in endpoint.requests] == [False] * 4 + [True] * 4
    for completion, events in zip(whole, turns, strict=True):
        if not repeats_ids:
            parts = summarize_events(events)
            parts["thinking_delta"] = parts["thinking_delta"].strip()
            assert parts == summarize_message(completion.message)
            started = [event["tool_id"] for event in events if event["type"] == "tool_use_start"]
            assert len(started) == len(set(started)), "each call begins once"


def test_a_conversation_is_read_with_text_reasoning_and_calls() -> None:
    with serving(Endpoint()) as endpoint:
        whole, _ = asyncio.run(converse(endpoint.url))
    said = [completion.message for completion in whole]
    assert [message["content"] for message in said] == [
        "",
        "Looking \U0001f600 on.",
        "",
        "All of it.\n\nBye.",
    ]
    assert [message["reasoning"] for message in said] == [
        "**Look** first.\n\nThen see.",
        "raw thought",
        "Nearly.",
        "Done.",
    ]
    arguments = [[call["function"]["arguments"] for call in m.get("tool_calls", ())] for m in said]
    assert arguments == [['{"path": "."}', "{"], ["{}", '{ "path":"b"}'], ["{}"] * 2, []]
    assert [call["id"] for call in said[0]["tool_calls"]] == ["a1", "b1"]
    for completion in whole:
        assert completion.model == "m-2026"
        assert completion.usage == {
            "input_tokens": 100,
            "output_tokens": 20,
            "cache_read_tokens": 60,
            "cache_write_tokens": 30,
            "reasoning_tokens": 15,
        }


@pytest.mark.parametrize("repeats_ids", [False, True])
@pytest.mark.parametrize("listens", [False, True])
def test_the_whole_loop_speaks_it(repeats_ids: bool, listens: bool) -> None:
    with serving(Endpoint(repeats_ids)) as endpoint:
        agent = AIAgent(
            "m",
            KEY,
            endpoint.url,
            api="openai_responses",
            enabled_toolsets=["file"],
            stream_handler=nobody if listens else None,
        )
        result = agent.run_conversation("x")
    assert (result["error"], result["status"]) == (None, "completed")
    assert result["api_calls"] == len(endpoint.requests) == 4
    assert result["final_response"] == "All of it.\n\nBye."
    assert result["usage"]["reasoning_tokens"] == 60


# What goes out


def sent_items(*messages: Message) -> Any:
    return request_body(SETTINGS, Request(messages))["input"]


def user(text: str) -> Message:
    return Message(role="user", content=text)


def test_a_request_depends_on_no_state_of_the_endpoint() -> None:
    body = request_body(SETTINGS, Request([user("hi")]))
    assert body == {
        "model": "m",
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "input": [{"role": "user", "content": "hi"}],
        "stream": False,
    }


def test_settings_and_tools_go_out_in_the_words_of_this_api() -> None:
    settings = replace(
        SETTINGS, temperature=0.0, top_p=0.9, max_tokens=5, reasoning_effort="minimal"
    )
    opening = [Message(role="system", content="Be kind."), user("hi"), user("there")]
    body = request_body(settings, Request(opening, TOOLS, tool_choice="none", on_delta=nobody))
    assert body.pop("input") == [{"role": "user", "content": text} for text in ("hi", "there")]
    assert body == {
        "model": "m",
        "instructions": "Be kind.",
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "tools": [
            {
                "type": "function",
                "name": "list_files",
                "description": "F.",
                "parameters": PARAMETERS,
                "strict": False,
            }
        ],
        "tool_choice": "none",
        "temperature": 0.0,
        "top_p": 0.9,
        "max_output_tokens": 5,
        "reasoning": {"effort": "minimal"},
        "stream": True,
    }


@pytest.mark.parametrize(
    ("name", "reasons"),
    [("gpt-5", True), ("o4-mini", True), ("gpt-4.1", False), ("gpt-5-chat-latest", False)],
)
def test_only_models_that_reason_are_asked_for_encrypted_thoughts(name: str, reasons: bool) -> None:
    body = request_body(replace(SETTINGS, name=name), Request([]))
    assert ("include" in body) is reasons


def test_extra_fields_win_and_summaries_can_be_asked_for_beside_the_effort() -> None:
    extra = {"include": [], "store": True, "reasoning": {"summary": "auto"}}
    settings = replace(SETTINGS, extra_body=extra, reasoning_effort="high")
    body = request_body(settings, Request([user("hi")]))
    assert (body["include"], body["store"]) == ([], True)
    assert body["reasoning"] == {"effort": "high", "summary": "auto"}
    assert extra["reasoning"] == {"summary": "auto"}, "the settings are not altered"
    settings = replace(settings, extra_body={"reasoning": None})
    assert request_body(settings, Request([user("hi")]))["reasoning"] is None


def test_the_turns_of_one_conversation_share_a_cache_key() -> None:
    settings = replace(SETTINGS, base_url="https://api.openai.com/v1")

    def key(*messages: Message) -> Any:
        return request_body(settings, Request(messages))["prompt_cache_key"]

    system, reply = Message(role="system", content="s"), Message(role="assistant", content="b")
    assert key(system, user("a")) == key(system, user("a"), reply, user("c"))
    assert key(user("a")) == key(user("a"), reply)
    assert len({key(user("a")), key(user("b")), key(system, user("a"))}) == 3
    assert len(key(user("a"))) <= 64, "the bound of the API"


def test_a_message_of_another_api_goes_without_its_reasoning() -> None:
    function = {"name": "f", "arguments": '{"a": 1'}
    message = Message(
        role="assistant",
        content="hi",
        reasoning="why",
        tool_calls=[{"id": "1", "type": "function", "function": function}],  # type: ignore[typeddict-item] # a literal
        provider_blocks={"api": "openai_chat", "blocks": [{"reasoning_content": "why"}]},
    )
    failed = Message(
        role="tool", tool_call_id="1", name="f", content="x", is_error=True, details={"a": 1}
    )
    assert sent_items(user("go"), message, failed)[1:] == [
        {"role": "assistant", "content": "hi"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1'},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
    ]
    assert sent_items(user("go"), Message(role="assistant", content="")) == sent_items(user("go"))


def test_a_thought_that_the_token_limit_cut_does_not_go_back() -> None:
    """The record has it; the endpoint refuses a thought without what it led to."""
    reply = read(thought(1, "So"), **incomplete("max_output_tokens"))
    assert reply.finish_reason == "length"
    assert reply.message["provider_blocks"]["blocks"] == [thought(1, "So")]
    assert sent_items(user("a"), reply.message, user("b")) == sent_items(user("a"), user("b"))
    reply = read(thought(1), says(text_part("x")), thought(2), **incomplete("max_output_tokens"))
    assert sent_items(reply.message) == [thought(1), says(text_part("x"))]


def plain_thought(n: Any, **more: Any) -> JSON:
    """A thought that is not encrypted."""
    return {"id": f"rs_{n}", "type": "reasoning", "summary": [], **more}


RAW = [{"type": "reasoning_text", "text": "So."}]


@pytest.mark.parametrize(
    "lost",
    [
        plain_thought(1),
        plain_thought(1, summary=[{"type": "summary_text", "text": "So."}]),
        plain_thought(1, encrypted_content=None, content=None, status=None),
        plain_thought(1, encrypted_content="", content=[{"type": "reasoning_text", "text": " "}]),
    ],
)
def test_a_thought_that_no_endpoint_finds_does_not_go_back(lost: JSON) -> None:
    """Nor do the ids of what follows it in its reply, by which OpenAI asks for the thought."""
    spoken, called = says(text_part("x"), phase="commentary"), calls("1")
    reply = read(thought(0), calls("0"), lost, spoken, called).message
    answers = [Message(role="tool", tool_call_id=id, name="f", content="y") for id in "01"]
    later = read(thought(5), calls("5")).message
    results = [{"type": "function_call_output", "call_id": id, "output": "y"} for id in "01"]
    assert sent_items(reply, *answers, later) == [
        thought(0),
        calls("0"),
        *({key: item[key] for key in item if key != "id"} for item in (spoken, called)),
        *results,
        thought(5),
        calls("5"),
    ]
    kept = read(lost, calls("1")).message
    stored = replace(SETTINGS, extra_body={"store": True})
    known = {key: value for key, value in lost.items() if value is not None}
    body = request_body(stored, Request([kept]))
    assert (body["store"], body["input"]) == (True, [known, calls("1")])


def test_only_servers_that_are_not_openai_take_thoughts_in_clear_text() -> None:
    """vLLM reads `content` and shows it to the model; OpenAI cannot know it."""
    message = read(plain_thought(1, content=RAW), calls("1")).message
    of_openai = replace(SETTINGS, base_url="https://eu.api.openai.com/v1")
    hosted = replace(SETTINGS, base_url="http://gpu:8000/v1")
    blocks = message["provider_blocks"]["blocks"]
    assert request_body(hosted, Request([message]))["input"] == blocks
    (only,) = request_body(of_openai, Request([message]))["input"]
    assert only == {key: value for key, value in calls("1").items() if key != "id"}


# What comes back


@pytest.mark.parametrize(
    "output",
    [
        [],
        [says(text_part("hi"))],
        [says(text_part("hi")), calls("1"), calls("2")],
        [calls("1", namespace=None)],
    ],
)
def test_blocks_without_further_fields_are_not_kept(output: list[JSON]) -> None:
    assert "provider_blocks" not in read(*output).message


@pytest.mark.parametrize(
    "output",
    [
        [thought(1)],
        [says(text_part("a"), text_part("b"))],
        [says(text_part("a")), says(text_part("b"))],
        [calls("1"), says(text_part("a"))],
        [says(text_part("a"), phase="final_answer")],
        [says(text_part("a", annotations=[{"type": "url_citation"}]))],
        [says({"type": "refusal", "refusal": "no"})],
        [says({"type": "of_tomorrow", "x": [1]})],
        [calls("1", namespace="n")],
        [{"type": "web_search_call", "id": "ws_1", "action": {"query": "x"}}],
        [{"type": "of_tomorrow", "deep": {"er": [None, 1.5]}}, says(text_part("a"))],
        [{"no": "type"}],
        [says(text_part("<think>why</think>a"))],
    ],
)
def test_blocks_with_further_fields_are_kept_verbatim_and_sent_back(output: list[JSON]) -> None:
    """Also what nobody here knows."""
    message = read(*copy.deepcopy(output)).message
    assert message["provider_blocks"] == {"api": API, "blocks": output}
    if output[0].get("type") != "reasoning":
        assert sent_items(message) == output


def test_thoughts_of_all_forms_are_joined() -> None:
    raw = {"type": "reasoning_text", "text": "c"}
    reply = read(thought(1, " a\n", ""), thought(2, "a", "b", content=[raw]), says(text_part("x")))
    assert reply.message["reasoning"] == "a\n\nb\n\nc", "the same said twice is said once"
    assert "reasoning" not in read(thought(1)).message, "an encrypted one cannot be read"
    inline = read(thought(1, "a"), says(text_part("<think>b</think>\nc"))).message
    assert (inline["content"], inline["reasoning"]) == ("c", "a\n\nb")


def test_odd_calls_and_texts_are_read_all_the_same() -> None:
    reply = read(calls(None, {"a": 1}), calls("2", None, name=None), {**calls("3"), "x": "y"})
    read_calls = reply.message["tool_calls"]
    assert [call["id"] for call in read_calls] == ["", "2", "3"]
    assert [call["function"]["arguments"] for call in read_calls] == ['{"a":1}', "{}", "{}"]
    assert read_calls[1]["function"]["name"] == ""
    assert read({**says(), "content": "plain"}).message == {"role": "assistant", "content": "plain"}
    cut_emoji = orjson.dumps(body(says(text_part("x?")))).replace(b"?", b"\\ud83d")
    assert read_reply(cut_emoji).message["content"] == "x\ufffd"


@pytest.mark.parametrize(
    ("output", "more", "finish"),
    [
        ([says(text_part("a"))], {}, "stop"),
        ([], {}, "stop"),
        ([says(text_part("a")), calls("1")], {}, "tool_calls"),
        ([says({"type": "refusal", "refusal": "a"})], {}, "refusal"),
        ([says(text_part("a"))], incomplete("max_output_tokens"), "length"),
        ([calls("1", "{")], incomplete("max_output_tokens"), "length"),
        ([says(text_part("a"))], incomplete("content_filter"), "refusal"),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_why_a_reply_ended(output: list[JSON], more: JSON, finish: str, streams: bool) -> None:
    reply = body(*output, **more)
    completion, events = (
        read_events(*events_of(reply, f"response.{reply['status']}"))
        if streams
        else (read_reply(orjson.dumps(reply)), [])
    )
    assert completion.finish_reason == finish
    spoken = any(item["type"] == "message" for item in output)
    assert completion.message["content"] == ("a" if spoken else "")
    assert not streams or summarize_events(events) == summarize_message(completion.message)


def test_a_refusal_after_some_text_is_a_refusal() -> None:
    reply = read(says(text_part("Well, "), {"type": "refusal", "refusal": "no."}))
    assert (reply.finish_reason, reply.message["content"]) == ("refusal", "Well, no.")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b"<html>",
        b'{"status": "comp',
        b"\xff\xfe",
        b"{}",
        *(body(status=status) for status in (None, "queued", "in_progress", "cancelled", "new", 1)),
        *(body(**incomplete(reason)) for reason in (None, "steered", "max_messages", "new", ["x"])),
        body(status="incomplete"),
        body() | {"output": None},
        body() | {"output": {}},
        body("text"),
        body(says() | {"content": None}),
        body(says() | {"content": ["text"]}),
        body(json.loads("[" * 200 + "]" * 200)),
        body(says(text_part("a")), error={"message": "boom"}),
        body(status="failed"),
        body(status="failed", error="boom"),
        body(status="failed", error={"code": "of_tomorrow", "message": "boom"}),
        body(status="failed", error={"code": "9" * 50, "message": "boom"}),
    ],
)
def test_a_reply_that_may_be_incomplete_is_malformed(raw: Any) -> None:
    with pytest.raises(ModelError) as caught:
        read_reply(raw if isinstance(raw, bytes) else orjson.dumps(raw))
    assert (caught.value.kind, caught.value.action) == ("malformed", "retry")


FAILURES = [
    ("server_error", "overloaded"),
    ("vector_store_timeout", "overloaded"),
    ("rate_limit_exceeded", "rate_limited"),
    ("insufficient_quota", "no_credit"),
    ("context_length_exceeded", "context_exceeded"),
    ("invalid_prompt", "bad_request"),
    ("bio_policy", "filtered"),
    ("502", "overloaded"),
    (429, "rate_limited"),
]


@pytest.mark.parametrize(("code", "kind"), FAILURES)
def test_a_failed_reply_means_what_its_code_says(code: Any, kind: str) -> None:
    failed = body(says(text_part("a")), status="failed", error={"code": code, "message": "boom"})
    flat = {"type": "error", "code": code, "message": "boom", "param": None, "sequence_number": 3}
    for fail in (
        lambda: read_reply(orjson.dumps(failed)),
        lambda: read_events(*events_of(failed, "response.failed")),
        lambda: read_events({"type": "response.created", "response": body()}, flat),
    ):
        with pytest.raises(ModelError, match="boom") as caught:
            fail()
        assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("raw", "counts"),
    [
        (None, None),
        ("x", None),
        ({}, (None,) * 5),
        ({"input_tokens": 1, "output_tokens": 2}, (1, 2, None, None, None)),
        ({"input_tokens": -1, "output_tokens": True, "input_tokens_details": 3}, (None,) * 5),
        (USAGE, (100, 20, 60, 30, 15)),
    ],
)
def test_an_unknown_count_is_not_zero(raw: Any, counts: Any) -> None:
    usage = read(usage=raw).usage
    assert (None if usage is None else tuple(usage.values())) == counts


# Streams


def read_events(*events: JSON) -> tuple[Completion, list[StreamEvent]]:
    seen: list[StreamEvent] = []
    assembly = ResponsesAssembly(seen.append)
    for part in events:
        assembly.add(part)
    return read_reply(assembly.finish()), seen


def test_a_stream_without_its_last_event_was_cut() -> None:
    *events, _ = events_of(body(says(text_part("whole"))))
    for length in range(len(events) + 1):
        with pytest.raises(ModelError, match="status is None") as caught:
            read_events(*events[:length])
        assert caught.value.kind == "malformed"


def test_items_that_the_last_event_leaves_out_are_those_that_were_done() -> None:
    output = turn_outputs(2, ["a", "b"])
    *events, last = events_of(body(*output))
    last["response"] = {**last["response"], "output": []}
    reply, _ = read_events(*events, last)
    assert reply == read(*output)


def test_calls_that_arrive_in_one_piece_have_events() -> None:
    item = calls("1", '{"a": 1}')
    done = {"type": "response.output_item.done", "output_index": 0, "item": item}
    stray = {"type": "response.function_call_arguments.delta", "output_index": 7, "delta": "1}"}
    last = {"type": "response.completed", "response": body(item)}
    reply, events = read_events(stray, done, last)
    assert [event["type"] for event in events] == [
        f"tool_use_{w}" for w in ("start", "delta", "stop")
    ]
    assert summarize_events(events) == summarize_message(reply.message)


def test_parts_that_are_not_what_they_should_be_are_passed_over() -> None:
    odd: list[JSON] = [{}, {"type": None}, {"type": "response.output_text.delta", "delta": None}]
    odd += [{"type": f"response.output_item.{w}", "item": None} for w in ("added", "done")]
    odd += [{"type": "response.output_text.delta", "delta": ""}, {"type": "response.completed"}]
    last = {"type": "response.completed", "response": body(says(text_part("a")))}
    reply, events = read_events(*odd, last)
    assert (reply.message["content"], events) == ("a", [])


# Names


@pytest.mark.parametrize(
    ("name", "given", "means"),
    [
        ("responses:gpt-5", {}, ("gpt-5", "https://api.openai.com/v1", "OPENAI_API_KEY", "openai")),
        (
            "responses:gpt-5",
            {"base_url": "http://h/v1"},
            ("gpt-5", "http://h/v1", "OPENAI_API_KEY", "openai"),
        ),
        ("m", {"base_url": "http://h/v1", "api": API}, ("m", "http://h/v1", None, None)),
        (
            "openai:gpt-5",
            {"api": API},
            ("gpt-5", "https://api.openai.com/v1", "OPENAI_API_KEY", "openai"),
        ),
    ],
)
def test_how_the_dialect_is_asked_for(name: str, given: Any, means: Any) -> None:
    settings = resolve_model(name, **{"base_url": None, "api": None, "key_env": None, **given})
    assert settings.api == API
    assert (settings.name, settings.base_url, settings.key_env, settings.provider) == means


def test_a_model_asked_beside_it_may_speak_the_other_dialect() -> None:
    settings = resolve_model("responses:gpt-5", base_url=None, api=None, key_env=None)
    assert resolve_sibling("responses:small", settings) == replace(
        settings, name="small", reference="responses:small"
    )
    assert resolve_sibling("small", settings).api == API
    assert resolve_sibling("openai:small", settings).api == "openai_chat"


def test_a_model_is_opened_by_its_dialect() -> None:
    async def ask() -> Completion:
        model = open_model(
            replace(SETTINGS, base_url=endpoint.url),
            api_key=KEY,
            on_retry=lambda retry: pytest.fail(str(retry)),
        )
        try:
            return await model.complete(Request([user("Go.")], TOOLS))
        finally:
            await model.close()

    with serving(Endpoint()) as endpoint:
        assert asyncio.run(ask()).finish_reason == "tool_calls"


def test_the_endpoint_of_these_tests_is_strict() -> None:
    """A history with a thought left out, altered or moved is refused."""
    outputs = turn_outputs(1, ["a1", "b1"])
    first = [{key: value for key, value in o.items() if value is not None} for o in outputs]
    results = [{"type": "function_call_output", "call_id": id, "output": ""} for id in ("a1", "b1")]
    item = {"role": "user", "content": "x"}
    assert Endpoint().check([item, *first, *results]) == 2
    altered = {**first[0], "encrypted_content": "x"}
    for wrong in (
        [*first[1:], *results],
        [altered, *first[1:], *results],
        [first[1], first[0], *first[2:], *results],
        [*first, *results[::-1]],
        [*first, results[0]],
    ):
        with pytest.raises((AssertionError, IndexError)):
            Endpoint().check([item, *wrong])
