"""What each adapter makes of each fault that an endpoint can have, streamed and in one piece."""

from __future__ import annotations

import asyncio
import gzip
import resource
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from agent.messages.message import Message
from agent.models.batches.calls import open_batches
from agent.models.client.endpoint import EndpointModel
from agent.models.client.reply_bodies import MAX_REPLY_BYTES
from agent.models.dialects.dialect import DIALECTS
from agent.models.errors import ModelError
from agent.models.model import Completion, ModelSettings, Request, StreamEvent
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.fakes.fake_faults import BROKEN, FAULTS, REPLY_FAULTS, RETRY_AFTER

TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "F.", "parameters": {"type": "object"}},
    }
]
KINDS: dict[str, str] = {
    **dict.fromkeys(("http500", "http502", "http503", "http529"), "overloaded"),
    **dict.fromkeys(("http408", "http409"), "overloaded"),
    **dict.fromkeys(("http400", "http413", "http422"), "bad_request"),
    "http401": "auth",
    "http402": "no_credit",
    "http403": "forbidden",
    "http404": "not_found",
    "context": "context_exceeded",
    "quota": "no_credit",
    **dict.fromkeys(RETRY_AFTER, "rate_limited"),
    **dict.fromkeys(BROKEN, "malformed"),
    **dict.fromkeys(("hang", "silence", "stall", "drip"), "timeout"),
    **dict.fromkeys(("disconnect", "reset", "eof", "garbage"), "connection"),
    **dict.fromkeys(("error200", "error_event"), "overloaded"),
}
"""The kind of failure that a fault is, of all that are not replies."""
WAITS = {
    "http429": 0.05,
    "http429_1": 1.0,
    "http429_3600": 3600.0,
    "http429_ms": 0.05,
    **dict.fromkeys(("http429_none", "http429_negative", "http429_nan", "http429_inf")),
}
"""What a refusal asks for."""
SLOW = {"huge"}


def nobody(event: StreamEvent) -> None:
    """A handler for those who want the stream and not its parts."""


def adapter_of(dialect: str, root: str, **given: Any) -> EndpointModel:
    base_url = root if dialect == "anthropic_messages" else root + "/v1"
    given = {"attempt_timeout_s": 60.0, **given}
    settings = ModelSettings(name="m", api=dialect, base_url=base_url, key_env=None, **given)
    return EndpointModel(settings, "no-key")


def request_of(prompt: str, *, is_streamed: bool, is_last: bool = False) -> Request:
    """A request for a reply; the last one of a conversation is text."""
    messages = [Message(role="user", content=prompt)]
    if is_last:
        said = Message(role="assistant", content="Well.")
        messages += [said, Message(role="user", content="Go on.")]
    return Request(messages, TOOLS, on_delta=nobody if is_streamed else None)


class Asker:
    """Asks the endpoint for faults; the adapters are kept, for they take long to make."""

    def __init__(self, endpoint: FakeEndpoint, runner: asyncio.Runner) -> None:
        self._root = endpoint.anthropic_url
        self._runner = runner
        self._adapters: dict[Any, EndpointModel] = {}

    def __call__(self, dialect: str, fault: str, *, given: Any = None, **how: Any) -> Completion:
        return self._runner.run(self._ask(dialect, fault, given or {}, how))

    def close(self) -> None:
        for adapter in self._adapters.values():
            self._runner.run(adapter.close())

    async def _ask(self, dialect: str, fault: str, given: Any, how: Any) -> Completion:
        place = (dialect, *given.items())
        if place not in self._adapters:
            self._adapters[place] = adapter_of(dialect, self._root, **given)
        return await self._adapters[place].complete(request_of(f"fault:{fault}", **how))


@pytest.fixture(scope="module")
def ask() -> Iterator[Asker]:
    with (
        FakeEndpoint(
            turns=2, latency_s=0.0, reasoning_chars=53, text_chars=30, calls_per_turn=2
        ) as endpoint,
        asyncio.Runner() as runner,
    ):
        asker = Asker(endpoint, runner)
        yield asker
        asker.close()


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("fault", [fault for fault in KINDS if fault not in SLOW])
def test_a_fault_has_its_kind_and_is_never_a_reply(
    ask: Asker, fault: str, dialect: str, is_streamed: bool
) -> None:
    if fault == "error_event" and not is_streamed:
        pytest.skip("only a stream has events")
    if fault == "no_choices" and is_streamed and dialect != "openai_chat":
        pytest.skip("a stream without parts is an empty reply")
    if fault == "no_finish" and not is_streamed and dialect != "openai_responses":
        pytest.skip("a whole reply whose reason is null has an unknown ending")
    given = {"attempt_timeout_s": 0.1} if KINDS[fault] == "timeout" else {}
    with pytest.raises(ModelError) as caught:
        ask(dialect, fault, is_streamed=is_streamed, given=given)
    assert caught.value.kind == KINDS[fault], caught.value
    if fault in WAITS:
        assert caught.value.retry_after_s == WAITS[fault]


def test_every_fault_is_known_here() -> None:
    assert {*KINDS, *REPLY_FAULTS} == set(FAULTS)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("fault", REPLY_FAULTS)
def test_a_strange_reply_is_read_the_same_streamed_or_not(
    ask: Asker, fault: str, dialect: str
) -> None:
    is_last = fault == "empty_text"
    whole = ask(dialect, fault, is_last=is_last, is_streamed=False)
    streamed = ask(dialect, fault, is_last=is_last, is_streamed=True)
    if fault in ("list_arguments", "null_arguments"):
        # What is no object stays the text that it was in a stream.
        whole.message.pop("provider_blocks", None)
        streamed.message.pop("provider_blocks", None)
    assert streamed.message == whole.message
    assert streamed.finish_reason == whole.finish_reason
    due = {"length": "length", "refusal": "refusal", "empty_text": "stop"}
    if dialect == "anthropic_messages":
        due |= {"pause": "pause", "context_stop": "context_exceeded"}
    assert whole.finish_reason == due.get(fault, "tool_calls")
    if fault == "no_usage":
        assert whole.usage is None or set(whole.usage.values()) == {None}, "unknown is not 0"
    if fault not in ("empty_text", "refusal") or dialect == "anthropic_messages":
        assert whole.message["reasoning"].startswith("Thought")


@asynccontextmanager
async def sending(head: bytes, *parts: bytes, every_s: float = 0.0) -> AsyncIterator[str]:
    """An endpoint that sends the parts to everybody until it is left."""
    answers: set[asyncio.Task[Any]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (task := asyncio.current_task()) is not None:
            answers.add(task)
        with suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(head + b"\r\n\r\n")
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(every_s)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1")
    async with server:
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            await asyncio.gather(*answers)


async def ask_one_that_sends(
    dialect: str,
    head: bytes,
    *parts: bytes,
    is_streamed: bool,
    every_s: float = 0.0,
    **given: Any,
) -> Completion:
    async with sending(head, *parts, every_s=every_s) as root:
        adapter = adapter_of(dialect, root, **given)
        try:
            return await adapter.complete(request_of("Go.", is_streamed=is_streamed))
        finally:
            await adapter.close()


MIB = b"x" * 2**20
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream"


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("dialect", ["openai_chat", "anthropic_messages"])
def test_a_huge_reply_is_not_read_to_its_end(ask: Asker, dialect: str, is_streamed: bool) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    message = "more than 8 MiB" if is_streamed else "larger than 64 MiB"
    with pytest.raises(ModelError, match=message) as caught:
        ask(dialect, "huge", is_streamed=is_streamed, given={"attempt_timeout_s": 60.0})
    assert caught.value.kind == "malformed"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 1.5 * MAX_REPLY_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_reply_that_unpacks_to_too_much_is_not_unpacked_to_its_end(is_streamed: bool) -> None:
    packer = zlib.compressobj(wbits=31)
    packed = [packer.compress(MIB) for _ in range(300)] + [packer.flush()]
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Type: application/json"
    with pytest.raises(ModelError, match="larger than 64 MiB"):
        asyncio.run(ask_one_that_sends("openai_chat", head, *packed, is_streamed=is_streamed))


def test_packed_replies_are_read() -> None:
    body = b'{"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}'
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Type: application/json"
    for is_streamed in (False, True):
        reply = asyncio.run(
            ask_one_that_sends("openai_chat", head, gzip.compress(body), is_streamed=is_streamed)
        )
        assert reply.message["content"] == "hi"


@pytest.mark.parametrize("is_streamed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_error_of_any_size_counts_by_its_status(is_streamed: bool) -> None:
    how: dict[str, Any] = {"is_streamed": is_streamed, "attempt_timeout_s": 30.0}
    with pytest.raises(ModelError) as caught:
        asyncio.run(ask_one_that_sends("openai_chat", b"HTTP/1.1 429 Slow", *[MIB] * 80, **how))
    assert caught.value.kind == "rate_limited"


CHUNK = b'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": null}]}\n\n'
LAST = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


def test_a_stream_that_falls_silent_is_given_up_before_the_attempt_is(
    ask: Asker,
) -> None:
    given = {"attempt_timeout_s": 60.0, "idle_timeout_s": 0.2}
    for dialect in DIALECTS:
        with pytest.raises(ModelError, match=r"silent for 0\.2 s") as caught:
            ask(dialect, "stall", is_streamed=True, given=given)
        assert caught.value.kind == "timeout"


def test_a_stream_that_moves_may_take_longer_than_a_silence_may() -> None:
    """Also where all that comes is a comment, which some send to keep the connection alive."""
    parts = [CHUNK, b": still here\n\n", b": still here\n\n", CHUNK, b"", LAST]
    reply = asyncio.run(
        ask_one_that_sends(
            "openai_chat", SSE, *parts, every_s=0.25, is_streamed=True, idle_timeout_s=1.0
        )
    )
    assert reply.message["content"] == "aa"


def test_silence_before_a_stream_begins_counts_against_the_attempt_alone() -> None:
    """A model that thinks, or a request that waits for its turn, is silent before the first."""
    parts = [b"", CHUNK + LAST]
    reply = asyncio.run(
        ask_one_that_sends(
            "openai_chat", SSE, *parts, every_s=0.4, is_streamed=True, idle_timeout_s=0.3
        )
    )
    assert reply.message["content"] == "a"


STRANGE: dict[str, bytes] = {
    "a service of another kind": b"SSH-2.0-other",
    "a header beyond measure": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000,
    "too many headers": b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 20_000,
    "a length that is none": b"HTTP/1.1 200 OK\r\nContent-Length: abc",
    "a chunk that is none": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked",
    "nothing packed": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip",
}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("head", STRANGE.values(), ids=STRANGE)
def test_a_reply_that_is_not_http_is_a_failed_connection(
    dialect: str, head: bytes, is_streamed: bool
) -> None:
    with pytest.raises(ModelError) as caught:
        asyncio.run(ask_one_that_sends(dialect, head, b"zz{}", is_streamed=is_streamed))
    assert caught.value.kind == "connection"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_number_beyond_measure_in_a_stream_is_malformed(dialect: str) -> None:
    event = b'event: x\ndata: {"a": ' + b"9" * 5_000 + b"}\n\n"
    with pytest.raises(ModelError) as caught:
        asyncio.run(ask_one_that_sends(dialect, SSE, event, is_streamed=True))
    assert caught.value.kind == "malformed"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_key_does_not_follow_a_redirect(dialect: str) -> None:
    head = b"HTTP/1.1 308 Permanent Redirect\r\nLocation: https://elsewhere.test/v1"
    for path in (b"", b"/chat/completions", b"/responses"):
        with pytest.raises(
            ModelError, match=r"moved to https://elsewhere\.test/v1; give"
        ) as caught:
            asyncio.run(ask_one_that_sends(dialect, head + path, b"", is_streamed=False))
        assert caught.value.kind == "not_found"


@pytest.mark.parametrize("variable", ["http_proxy", "ALL_PROXY"])
def test_the_proxy_that_the_environment_names_is_asked(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b'{"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json"

    async def ask() -> Completion:
        async with sending(head, body) as proxy:
            monkeypatch.setenv(variable, proxy)
            adapter = adapter_of("openai_chat", "http://a-name-that-is-none.invalid")
            try:
                return await adapter.complete(request_of("Go.", is_streamed=False))
            finally:
                await adapter.close()

    assert asyncio.run(ask()).message["content"] == "hi"


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("scheme", ["http://", pytest.param("", marks=pytest.mark.slow)])
def test_a_proxy_does_not_get_the_key(
    dialect: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        collected.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async def ask() -> None:
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as proxy:
            port = proxy.sockets[0].getsockname()[1]
            monkeypatch.setenv("https_proxy", f"{scheme}127.0.0.1:{port}")
            root = "https://a-name-that-is-none.invalid"
            settings = ModelSettings(name="m", api=dialect, base_url=root, key_env=None)
            adapter = EndpointModel(settings, "sk-of-the-test")
            batches = open_batches(settings, api_key="sk-of-the-test")
            try:
                with pytest.raises(ModelError):
                    await adapter.complete(request_of("Go.", is_streamed=False))
                with pytest.raises(ModelError):
                    await batches.state("b1")
            finally:
                await adapter.close()
                await batches.close()

    asyncio.run(ask())
    assert len(collected) > 1
    assert {head.split()[0] for head in collected} == {b"CONNECT"}
    assert b"sk-of-the-test" not in b"".join(collected)


def test_no_proxy_may_name_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    body = b'{"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}'

    async def ask() -> Completion:
        async with sending(b"HTTP/1.1 200 OK\r\nContent-Type: application/json", body) as root:
            monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
            monkeypatch.setenv("no_proxy", root.removeprefix("http://"))
            adapter = adapter_of("openai_chat", root)
            try:
                return await adapter.complete(request_of("Go.", is_streamed=False))
            finally:
                await adapter.close()

    assert asyncio.run(ask()).message["content"] == "hi"


def test_no_connection_means_that_nothing_was_sent() -> None:
    async def ask() -> None:
        async with sending(b"") as root:
            pass  # whose port nobody listens at any more
        adapter = adapter_of("openai_chat", root)
        try:
            await adapter.complete(request_of("Go.", is_streamed=False))
        finally:
            await adapter.close()

    with pytest.raises(ModelError, match="refused") as caught:
        asyncio.run(ask())
    assert caught.value.kind == "connection"
    assert not caught.value.may_have_cost
