"""The endpoint that other tests rely on: real clients can talk to it, and its counts are exact."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.fake_endpoint import FakeEndpoint
from tests.fakes.fake_faults import FAULTS, REPLY_FAULTS, RETRY_AFTER, STATUSES, STREAM_FAULTS
from tests.helpers.running import PATIENCE_S

OPENAI, ANTHROPIC, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
pytestmark = pytest.mark.slow

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: dict[str, Any] = {
    OPENAI: [{"type": "function", "function": {"name": "temp", "parameters": SCHEMA}}],
    ANTHROPIC: [{"name": "temp", "input_schema": SCHEMA}],
    RESPONSES: [{"type": "function", "name": "temp", "parameters": SCHEMA}],
}


@pytest.fixture(scope="module")
def process() -> Iterator[FakeEndpoint]:
    with FakeEndpoint(
        turns=3,
        latency_s=0.0,
        reasoning_chars=50,
        text_chars=30,
        calls_per_turn=2,
        arguments='{"city": "{conversation}/{turn}"}',
    ) as running:
        yield running


@pytest.fixture
def endpoint(process: FakeEndpoint) -> FakeEndpoint:
    process.reset()
    return process


def ask(path: str = OPENAI, prompt: str = "Go.", **more: Any) -> dict[str, Any]:
    return {
        "model": "fake",
        "max_tokens": 100,
        "input" if path == RESPONSES else "messages": [{"role": "user", "content": prompt}],
        "tools": TOOLS[path],
        **more,
    }


def post(
    endpoint: FakeEndpoint,
    path: str,
    body: Any,
    *,
    headers: dict[str, str] | None = None,
    timeout_s: float = PATIENCE_S,
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one request on a connection of its own."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=timeout_s)
    with closing(connection):
        connection.request("POST", path, raw, headers or {})
        with connection.getresponse() as response:
            return response.status, dict(response.headers), response.read()


def leave(endpoint: FakeEndpoint, body: dict[str, Any]) -> None:
    """Send a request and reset the connection at once."""
    raw = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=PATIENCE_S) as connection:
        connection.sendall(b"POST %b HTTP/1.1\r\n" % OPENAI.encode())
        connection.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(raw), raw))
        wait_until(endpoint, lambda journal: journal["in_flight"] == 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(endpoint, lambda journal: journal["in_flight"] == 0)


def wait_until(endpoint: FakeEndpoint, holds: Callable[[dict[str, Any]], bool]) -> None:
    assert any(holds(endpoint.journal()) for _ in range(2_000))


def converse_openai(
    endpoint: FakeEndpoint, *, stream: bool, turns: int = 3
) -> list[dict[str, Any]]:
    """Play a conversation with the SDK; returns all messages."""
    import openai

    messages: list[Any] = [{"role": "user", "content": "Go."}]
    options: dict[str, Any] = {"model": "fake", "tools": TOOLS[OPENAI]}
    with openai.OpenAI(base_url=endpoint.openai_url, api_key="k", max_retries=0) as client:
        for _ in range(turns):
            if stream:
                with client.chat.completions.stream(
                    messages=messages, stream_options={"include_usage": True}, **options
                ) as events:
                    reply: Any = events.get_final_completion()
            else:
                reply = client.chat.completions.create(messages=messages, **options)
            choice = reply.choices[0]
            assert reply.usage.total_tokens > reply.usage.prompt_tokens > 0
            assert reply.usage.completion_tokens_details.reasoning_tokens == 50 // 4
            message = choice.message.model_dump(exclude_none=True)
            messages.append(message)
            calls = choice.message.tool_calls or []
            assert choice.finish_reason == ("tool_calls" if calls else "stop")
            messages += [{"role": "tool", "tool_call_id": c.id, "content": "1"} for c in calls]
    return messages


def converse_anthropic(
    endpoint: FakeEndpoint, *, stream: bool, turns: int = 3
) -> list[dict[str, Any]]:
    """Play a conversation with the SDK; returns all messages."""
    import anthropic

    messages: list[Any] = [{"role": "user", "content": "Go."}]
    options: dict[str, Any] = {"model": "fake", "max_tokens": 100, "tools": TOOLS[ANTHROPIC]}
    with anthropic.Anthropic(base_url=endpoint.anthropic_url, api_key="k", max_retries=0) as client:
        for _ in range(turns):
            if stream:
                with client.messages.stream(messages=messages, **options) as events:
                    reply: Any = events.get_final_message()
            else:
                reply = client.messages.create(messages=messages, **options)
            assert reply.usage.input_tokens > 0
            assert reply.usage.output_tokens > 50 // 4
            content = [block.model_dump(exclude_none=True) for block in reply.content]
            messages.append({"role": "assistant", "content": content})
            calls = [block for block in reply.content if block.type == "tool_use"]
            assert reply.stop_reason == ("tool_use" if calls else "end_turn")
            results = [{"type": "tool_result", "tool_use_id": c.id, "content": "1"} for c in calls]
            if results:
                messages.append({"role": "user", "content": results})
    return messages


def test_openai_conversation_is_the_same_streamed_or_not(endpoint: FakeEndpoint) -> None:
    plain = converse_openai(endpoint, stream=False)
    streamed = converse_openai(endpoint, stream=True)
    assert [message["role"] for message in plain] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    for one, other in zip(plain, streamed, strict=True):
        assert one.get("reasoning_content") == other.get("reasoning_content")
        assert (one.get("content") or "") == (other.get("content") or "")
        assert _calls(one) == _calls(other)
    ids = [call[0] for message in plain for call in _calls(message)]
    assert len(set(ids)) == len(ids) == 4
    conversation, turn = json.loads(_calls(plain[4])[0][2])["city"].split("/")
    assert turn == "2"
    assert conversation in ids[0]
    assert len(plain[1]["reasoning_content"]) == 50
    assert len(plain[-1]["content"]) == 30


def _calls(message: dict[str, Any]) -> list[tuple[str, str, str]]:
    calls = message.get("tool_calls", [])
    return [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls]


def test_anthropic_conversation_is_the_same_streamed_or_not(endpoint: FakeEndpoint) -> None:
    plain = converse_anthropic(endpoint, stream=False)
    assert plain == converse_anthropic(endpoint, stream=True)
    assert len(plain) == 6
    kinds = [block["type"] for block in plain[1]["content"]]
    assert kinds == ["thinking", "tool_use", "tool_use"]
    assert plain[1]["content"][0]["signature"]
    assert plain[1]["content"][1]["input"]["city"].endswith("/1")


@pytest.mark.parametrize("spoil", ["thinking", "signature", "block", "result"])
def test_anthropic_refuses_altered_history(endpoint: FakeEndpoint, spoil: str) -> None:
    messages = converse_anthropic(endpoint, stream=False, turns=1)
    assert post(endpoint, ANTHROPIC, ask(ANTHROPIC, messages=messages))[0] == 200
    reply, results = messages[1]["content"], messages[2]["content"]
    if spoil == "result":
        results.pop()
    elif spoil == "block":
        reply.pop(0)
    else:
        reply[0][spoil] += "."
    status, _, body = post(endpoint, ANTHROPIC, ask(ANTHROPIC, messages=messages))
    error = json.loads(body)["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith("messages.")
    assert endpoint.journal()["refused"] == 1


@pytest.mark.parametrize("spoil", ["missing", "twice", "unknown"])
def test_openai_refuses_calls_and_results_that_do_not_pair(
    endpoint: FakeEndpoint, spoil: str
) -> None:
    messages = converse_openai(endpoint, stream=False, turns=1)
    assert post(endpoint, OPENAI, ask(messages=messages))[0] == 200
    last = messages.pop()
    if spoil == "twice":
        messages += [last, last]
    elif spoil == "unknown":
        messages.append({**last, "tool_call_id": "other"})
    status, _, body = post(endpoint, OPENAI, ask(messages=messages))
    assert (status, json.loads(body)["error"]["type"]) == (400, "invalid_request_error")


def test_counts_replies_and_paid_repeats(endpoint: FakeEndpoint) -> None:
    for prompt in ("one", "two", "two", "two"):
        post(endpoint, OPENAI, ask(prompt=prompt))
    journal = endpoint.journal(full=True)
    assert {name: journal[name] for name in ("requests", "replies", "conversations")} == {
        "requests": 4,
        "replies": 4,
        "conversations": 2,
    }
    assert journal["repeated"] == 2
    assert [(count["turn"], count["asked"], count["answered"]) for count in journal["counts"]] == [
        (1, 1, 1),
        (1, 3, 3),
    ]
    assert journal["last_reply_at"] >= journal["first_request_at"]
    assert journal["cpu_s"] > 0
    endpoint.reset()
    assert endpoint.journal()["requests"] == endpoint.journal()["repeated"] == 0


def test_task_id_header_separates_equal_prompts(endpoint: FakeEndpoint) -> None:
    for task in ("1", "2"):
        post(endpoint, OPENAI, ask(), headers={"X-Task-Id": task})
    journal = endpoint.journal()
    assert (journal["conversations"], journal["repeated"]) == (2, 0)


def test_a_reply_whose_client_left_is_not_counted_as_delivered() -> None:
    with FakeEndpoint(latency_s=5.0) as slow:
        leave(slow, ask())
        leave(slow, ask())
        journal = slow.journal()
    assert (journal["requests"], journal["replies"], journal["repeated"]) == (2, 0, 0)


def test_large_reply_counts_only_once_it_left_in_full() -> None:
    body = ask()
    with FakeEndpoint(turns=1, latency_s=0.0, text_chars=30_000_000) as endpoint:
        leave(endpoint, body)
        assert endpoint.journal()["replies"] == 0
        assert len(post(endpoint, OPENAI, body)[2]) > 30_000_000
        journal = endpoint.journal()
    assert (journal["replies"], journal["repeated"], journal["in_flight"]) == (1, 0, 0)


def test_requests_wait_side_by_side() -> None:
    raw = json.dumps(ask()).encode()
    request = b"POST %b HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (OPENAI.encode(), len(raw)) + raw
    with FakeEndpoint(latency_s=0.2) as endpoint:
        address = ("127.0.0.1", endpoint.port)
        connections = [socket.create_connection(address, timeout=PATIENCE_S) for _ in range(8)]
        for connection in connections:
            connection.sendall(request)
        for connection in connections:
            with connection:
                assert connection.recv(12) == b"HTTP/1.1 200"
        journal = endpoint.journal()
    assert journal["max_in_flight"] == 8
    assert journal["last_reply_at"] - journal["first_request_at"] >= 0.2


def test_requests_beyond_the_answers_wait_for_their_turn() -> None:
    raw = json.dumps(ask()).encode()
    request = b"POST %b HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (OPENAI.encode(), len(raw)) + raw
    with FakeEndpoint(latency_s=0.0, answers=1) as endpoint:
        assert post(endpoint, OPENAI, ask())[0] == 200
        leave(endpoint, ask())
        with socket.create_connection(("127.0.0.1", endpoint.port)) as connection:
            connection.sendall(request)
            wait_until(endpoint, lambda journal: journal["in_flight"] == 1)
            assert endpoint.journal()["replies"] == 1
            endpoint.answer(3)
            assert connection.recv(12) == b"HTTP/1.1 200"
        leave(endpoint, ask())
        endpoint.answer(None)
        assert post(endpoint, OPENAI, ask())[0] == 200
        assert endpoint.journal()["replies"] == 3


def test_events_outlive_the_process(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for _ in range(2):
        with FakeEndpoint(latency_s=0.0, journal_path=str(path)) as endpoint:
            post(endpoint, OPENAI, ask())
    events = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [event["event"] for event in events] == ["asked", "answered"] * 2
    assert {(event["turn"], len(event["conversation"])) for event in events} == {(1, 16)}


def test_key_is_demanded_in_either_header() -> None:
    with FakeEndpoint(latency_s=0.0, key="secret") as endpoint:
        for path in (OPENAI, ANTHROPIC):
            status, _, body = post(endpoint, path, ask(path), headers={"x-api-key": "wrong"})
            assert status == 401
            assert json.loads(body)["error"]["type"] == "authentication_error"
            for headers in ({"x-api-key": "secret"}, {"Authorization": "Bearer secret"}):
                assert post(endpoint, path, ask(path), headers=headers)[0] == 200
        import openai

        client = openai.OpenAI(base_url=endpoint.openai_url, api_key="wrong", max_retries=0)
        with client, pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Go."}])


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (OPENAI, b"{", 400),
        (OPENAI, b"[]", 400),
        (OPENAI, {"messages": [{}]}, 400),
        (ANTHROPIC, b"", 400),
        (ANTHROPIC, {"messages": [{"role": "user", "content": "Go."}]}, 400),
        (ANTHROPIC, ask(messages=[{"role": "system", "content": ""}]), 400),
        ("/v1/other", {}, 404),
    ],
)
def test_bad_requests_get_an_error_in_json(
    endpoint: FakeEndpoint, path: str, body: Any, status: int
) -> None:
    got, headers, reply = post(endpoint, path, body)
    assert (got, headers["Content-Type"]) == (status, "application/json")
    assert json.loads(reply)["error"]["message"]


def test_without_tools_the_reply_is_text_unless_turns_are_given(endpoint: FakeEndpoint) -> None:
    assert _finish(post(endpoint, OPENAI, ask(tools=[]))[2]) == "tool_calls"
    with FakeEndpoint(latency_s=0.0) as other:
        assert _finish(post(other, OPENAI, ask(tools=[]))[2]) == "stop"
        assert _finish(post(other, OPENAI, ask())[2]) == "tool_calls"


def _finish(body: bytes) -> Any:
    reply = json.loads(body)
    if "choices" in reply:
        return reply["choices"][0]["finish_reason"]
    return reply["stop_reason"] if "content" in reply else reply["status"]


def _calls_in(body: bytes) -> list[tuple[Any, str, Any]]:
    """Id, name and arguments of each call of a reply; arguments that are not JSON as text."""
    reply = json.loads(body)
    if "choices" in reply:
        calls = reply["choices"][0]["message"]["tool_calls"]
        return [(c.get("id"), *_function(c["function"])) for c in calls]
    if "content" in reply:
        blocks = [block for block in reply["content"] if block["type"] == "tool_use"]
        return [(b.get("id"), b["name"], b["input"]) for b in blocks]
    items = [item for item in reply["output"] if item["type"] == "function_call"]
    return [(item.get("call_id"), *_function(item)) for item in items]


def _function(fields: dict[str, str]) -> tuple[str, Any]:
    with suppress(ValueError):
        return fields["name"], json.loads(fields["arguments"])
    return fields["name"], fields["arguments"]


def _arguments(body: bytes) -> list[Any]:
    return [arguments for _, _, arguments in _calls_in(body)]


BODIES: dict[str, Callable[[bytes], object]] = {
    "html": lambda body: body.startswith(b"<html"),
    "empty": lambda body: body == b"",
    "null": lambda body: body == b"null",
    "cut": lambda body: body.startswith(b'{"id":') and not body.endswith(b"}"),
    "mid_utf8": lambda body: body.endswith(b"\xc3"),
    "bad_utf8": lambda body: b"\xff" in body,
    "error200": lambda body: json.loads(body)["error"]["message"],
    "no_choices": lambda body: (
        b'"choices":[]' in body or b'"content":null' in body or b'"output":null' in body
    ),
    "no_finish": lambda body: _finish(body) is None,
    "length": lambda body: _finish(body) in ("length", "max_tokens", "incomplete"),
    "refusal": lambda body: b'"refusal"' in body,
    "pause": lambda body: _finish(body) == "pause_turn",
    "context_stop": lambda body: _finish(body) == "model_context_window_exceeded",
    "bad_arguments": lambda body: _arguments(body) == ['{"cut": "'] * 2,
    "list_arguments": lambda body: _arguments(body) == [["a"]] * 2,
    "null_arguments": lambda body: _arguments(body) == [None] * 2,
    "wrong_types": lambda body: _arguments(body) == [{"city": [1]}] * 2,
    "unknown_tool": lambda body: _calls_in(body)[0][1] == "no_such_tool",
    "empty_name": lambda body: _calls_in(body)[0][1] == "",
    "missing_id": lambda body: _calls_in(body)[0][0] is None,
    "duplicate_ids": lambda body: (
        len(_calls_in(body)) == 2 and len({c[0] for c in _calls_in(body)}) == 1
    ),
    "many_calls": lambda body: len(_calls_in(body)) == 500,
    "repeated_call": lambda body: _arguments(body)[0]["city"].endswith("/1"),
    "unknown_fields": lambda body: body.count(b"x_unknown") > 3,
    "other_reasoning": lambda body: b'"reasoning":"Thought' in body,
    "no_usage": lambda body: b'"usage"' not in body,
}
NO_ANSWER: dict[str, type[Exception] | tuple[type[Exception], ...]] = {
    "disconnect": http.client.RemoteDisconnected,
    "garbage": http.client.BadStatusLine,
    "eof": http.client.IncompleteRead,
    "reset": (ConnectionResetError, http.client.IncompleteRead),
    **dict.fromkeys(("hang", "silence", "stall"), TimeoutError),
}
OTHERWISE_TESTED = {"empty_text", "huge", "drip", "quota", "context", *STATUSES, *STREAM_FAULTS}
LACKING = {
    ANTHROPIC: {"other_reasoning"},
    OPENAI: {"pause", "context_stop"},
    RESPONSES: {"pause", "context_stop", "other_reasoning"},
}


@pytest.mark.parametrize("path", [OPENAI, ANTHROPIC, RESPONSES])
@pytest.mark.parametrize("kind", sorted(set(FAULTS) - OTHERWISE_TESTED))
def test_fault(endpoint: FakeEndpoint, path: str, kind: str) -> None:
    body = ask(path, prompt=f"fault:{kind}")
    if kind in LACKING[path]:
        assert post(endpoint, path, body)[0] == 200
        assert endpoint.journal()["faults"] == {}
        return
    if kind in NO_ANSWER:
        timeout_s = 0.2 if NO_ANSWER[kind] is TimeoutError else PATIENCE_S
        with pytest.raises(NO_ANSWER[kind]):
            post(endpoint, path, body, timeout_s=timeout_s)
    else:
        status, _, reply = post(endpoint, path, body)
        assert status == 200
        assert BODIES[kind](reply)
    wait_until(endpoint, lambda journal: journal["in_flight"] == 0)
    journal = endpoint.journal()
    assert journal["requests"] == journal["faults"][kind] == 1
    assert journal["replies"] == (kind in REPLY_FAULTS)


@pytest.mark.parametrize("path", [OPENAI, ANTHROPIC, RESPONSES])
def test_refusals(endpoint: FakeEndpoint, path: str) -> None:
    for kind, due in STATUSES.items():
        status, headers, body = post(endpoint, path, ask(path, prompt=f"fault:{kind}"))
        assert status == due
        assert json.loads(body)["error"]["message"]
        if kind == "http429_date":
            assert parsedate_to_datetime(headers["Retry-After"]).year > 2000
        elif kind == "http429_ms":
            assert headers["retry-after-ms"] == "50"
        else:
            assert headers.get("Retry-After") == RETRY_AFTER.get(kind)
    status, _, body = post(endpoint, path, ask(path, prompt="fault:context"))
    assert status == 400
    assert b"context_length_exceeded" in body or b"prompt is too long" in body
    status, _, body = post(endpoint, path, ask(path, prompt="fault:quota"))
    assert b"insufficient_quota" in body if status == 429 else b"credit balance" in body
    assert endpoint.journal()["replies"] == 0


def test_slow_and_huge_replies(endpoint: FakeEndpoint) -> None:
    raw = json.dumps(ask(prompt="fault:drip")).encode()
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=PATIENCE_S) as connection:
        connection.sendall(b"POST %b HTTP/1.1\r\n" % OPENAI.encode())
        connection.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(raw), raw))
        connection.recv(1000)
        assert all(connection.recv(1) for _ in range(3))
        assert endpoint.journal()["in_flight"] == 1
    for stream in (False, True):
        body = post(endpoint, OPENAI, ask(prompt="fault:huge", stream=stream))[2]
        assert len(body) > 200 * 2**20
    assert endpoint.journal()["replies"] == 0


@pytest.mark.parametrize("path", [OPENAI, ANTHROPIC, RESPONSES])
def test_faults_of_streams(endpoint: FakeEndpoint, path: str) -> None:
    body = post(endpoint, path, ask(path, prompt="fault:error_event", stream=True))[2]
    assert b'"error"' in body
    assert not body.endswith((b"[DONE]\n\n", b'"message_stop"}\n\n'))
    post(endpoint, path, ask(path, prompt="fault:error_event"))
    assert endpoint.journal()["faults"] == {"error_event": 1}
    if path == OPENAI:
        body = post(endpoint, path, ask(path, prompt="fault:roles", stream=True))[2]
        assert body.count(b'"role":"assistant"') > 3


def test_replies_of_the_responses_dialect(endpoint: FakeEndpoint) -> None:
    """Calls, then the text; results must be those of the calls."""
    items: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    for turn in (1, 2, 3):
        status, _, body = post(endpoint, RESPONSES, ask(RESPONSES, input=items))
        assert status == 200
        reply = json.loads(body)
        assert reply["id"].endswith(f"_{turn}")
        items += reply["output"]
        calls = [item for item in reply["output"] if item["type"] == "function_call"]
        assert len(calls) == (2 if turn < 3 else 0)
        waits = [*items, {"role": "user", "content": "Well?"}]
        assert post(endpoint, RESPONSES, ask(RESPONSES, input=waits))[0] == (400 if calls else 200)
        for call in calls:
            items.append({"type": "function_call_output", "call_id": call["call_id"], "output": ""})
    stray = {"type": "function_call_output", "call_id": "other", "output": ""}
    assert post(endpoint, RESPONSES, ask(RESPONSES, input=[*items, stray]))[0] == 400


def test_the_empty_text_fault_affects_only_the_last_reply() -> None:
    with FakeEndpoint(latency_s=0.0, faults={"empty_text": 1.0}) as endpoint:
        assert _finish(post(endpoint, OPENAI, ask())[2]) == "tool_calls"
        assert endpoint.journal()["faults"] == {}
        last = json.loads(post(endpoint, OPENAI, ask(tools=[]))[2])["choices"][0]
        assert (last["message"]["content"], last["finish_reason"]) == ("", "stop")
        blocks = json.loads(post(endpoint, ANTHROPIC, ask(tools=[]))[2])["content"]
        assert blocks == []
        assert endpoint.journal()["replies"] == 3


def test_cut_stream_ends_without_a_finish_reason() -> None:
    with FakeEndpoint(latency_s=0.0, faults={"cut": 1.0}) as endpoint:
        for path, last in ((OPENAI, b"[DONE]"), (ANTHROPIC, b"message_stop")):
            status, headers, body = post(endpoint, path, ask(path, stream=True))
            assert (status, headers["Content-Type"]) == (200, "text/event-stream")
            assert b"data: " in body
            assert last not in body


def test_faults_are_the_same_for_the_same_seed_and_keep_their_rate() -> None:
    def statuses(endpoint: FakeEndpoint) -> list[int]:
        endpoint.reset()
        return [post(endpoint, OPENAI, ask(prompt=str(n)))[0] for n in range(200)]

    with FakeEndpoint(latency_s=0.0, faults={"http500": 0.3, "http429": 0.2}) as endpoint:
        first = statuses(endpoint)
        assert statuses(endpoint) == first
    assert first.count(500) == pytest.approx(60, abs=20)
    assert first.count(429) == pytest.approx(40, abs=20)
    with FakeEndpoint(latency_s=0.0, faults={"http500": 0.3, "http429": 0.2}, seed=1) as endpoint:
        assert statuses(endpoint) != first


@pytest.mark.parametrize("faults", [{"other": 0.1}, {"cut": 0.6, "hang": 0.6}, {"cut": -1.0}])
def test_impossible_faults_are_refused(faults: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="fault"):
        FakeEndpoint(faults=faults)


def test_same_port_again_after_a_stop() -> None:
    endpoint = FakeEndpoint(latency_s=0.0)
    with endpoint:
        port = endpoint.port
        post(endpoint, OPENAI, ask())
    with endpoint:
        assert endpoint.port == port
        assert endpoint.journal()["requests"] == 0


def test_failed_start_is_an_error(endpoint: FakeEndpoint) -> None:
    with (
        pytest.raises(RuntimeError, match="did not start"),
        FakeEndpoint(port=endpoint.port),
    ):
        pass


def test_ends_with_its_parent() -> None:
    code = (
        "import sys; from tests.fakes.fake_endpoint import FakeEndpoint\n"
        "print(FakeEndpoint().__enter__().port, flush=True)\n"
        "sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    root = Path(__file__).resolve().parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, stdin=pipe, stdout=pipe
    ) as parent:
        assert parent.stdout is not None
        port = int(parent.stdout.readline())
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
            parent.send_signal(signal.SIGKILL)
            with suppress(ConnectionResetError):  # where it had not been accepted yet
                assert connection.recv(1) == b""
