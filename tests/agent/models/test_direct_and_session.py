"""Each answer of a server has the same outcome on both ways of a request: direct, or by a session.

The servers are raw sockets. An outcome is what was read, or the class and the text of the error.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import re
import socket
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import aiohttp
import pyarrow as pa
import pytest
from yarl import URL

from agent.models.client.direct_requests import DirectRequests
from agent.models.client.live_connector import LiveConnector

HEADERS = {"Accept": "application/json", "Content-Type": "application/json", "X-Key": "é"}
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5)
MAX_HEADER_BYTES = 64 << 10
WAIT_S = 0.3
"""Seconds after which a request that gets no answer is cancelled."""

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def listening(serve: Serve) -> AsyncIterator[tuple[aiohttp.ClientSession, URL]]:
    """A session and the URL of a server that calls `serve` for each connection."""
    serving: set[asyncio.Task[None] | None] = set()

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await serve(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve_one, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        async with make_session() as session:
            yield session, URL(f"http://127.0.0.1:{port}/v1/chat?a=%2Fb")
        await asyncio.gather(*filter(None, serving))


def make_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=LiveConnector(limit=0),
        timeout=TIMEOUT,
        cookie_jar=aiohttp.DummyCookieJar(),
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
    )


def make_direct(session: aiohttp.ClientSession) -> DirectRequests:
    return DirectRequests(session, timeout=TIMEOUT, max_header_bytes=MAX_HEADER_BYTES)


def length_of(head: bytes) -> int:
    found = re.search(rb"(?i)content-length: (\d+)", head)
    assert found is not None
    return int(found[1])


async def outcome(
    way: str, session: aiohttp.ClientSession, url: URL, body: bytes, wait_s: float = WAIT_S
) -> Any:
    """Post once on one of the ways; what was read, or the error."""
    post: Any
    if way == "direct":
        post = make_direct(session).post(url, HEADERS, {}, body)
        assert post is not None
    else:
        post = session.post(url, headers=HEADERS, data=body, allow_redirects=False)
    try:
        async with asyncio.timeout(wait_s), post as response:
            content = await response.content.read()
            return response.status, response.reason, sorted(response.headers.items()), content
    except TimeoutError as error:
        return (type(error).__name__,)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return type(error).__name__, str(error).replace(f":{url.port}", "")


async def on_both_ways(
    answer: bytes, ending: str, bodies: list[bytes], *, reads_body: bool = True
) -> dict[str, object]:
    """The outcomes of the requests and the number of connections, by the way of the requests.

    The first request of a connection gets `answer`, the next one `WHOLE`. `ending` follows:
    "close", "reset", or "open" until the client closes.
    """
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        for part in (answer, WHOLE):
            head = await reader.readuntil(b"\r\n\r\n")
            if reads_body:
                await reader.readexactly(length_of(head))
            writer.write(part)
            await writer.drain()
            if not reads_body:
                break
        if ending == "open":
            await reader.read()
        if ending == "reset":
            writer.transport.abort()

    found: dict[str, object] = {}
    for way in ("direct", "session"):
        connections = 0
        async with listening(serve) as (session, url):
            outcomes = []
            for body in bodies:
                outcomes.append(await outcome(way, session, url, body))
                await asyncio.sleep(0.02)
        found[way] = outcomes, connections
    return found


def zstd(raw: bytes) -> bytes:
    made: bytes = pa.compress(raw, codec="zstd", asbytes=True)
    return made


def packed(encoding: str, raw: bytes) -> bytes:
    return HEAD + b"Content-Encoding: %b\r\nContent-Length: %d\r\n\r\n%b" % (
        encoding.encode(),
        len(raw),
        raw,
    )


ANSWERS = {
    "whole": WHOLE,
    "nothing": b"",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-",
    "no body 204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "204 with a length": b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\nhello",
    "304": b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n",
    "205": b"HTTP/1.1 205 Reset\r\nContent-Length: 0\r\n\r\n",
    "continue": b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE,
    "hints": b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + WHOLE,
    "processing": b"HTTP/1.1 102 Processing\r\n\r\n" * 3 + WHOLE,
    "switch": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nabc",
    "redirect": b"HTTP/1.1 307 T\r\nLocation: https://x.invalid/\r\nContent-Length: 0\r\n\r\n",
    "moved": b"HTTP/1.1 301 M\r\nLocation: /other\r\nContent-Length: 0\r\n\r\n",
    "permanent": b"HTTP/1.1 308 P\r\nLocation: /other\r\nContent-Length: 0\r\n\r\n",
    "chunks": CHUNKED + b"2\r\nok\r\n0\r\n\r\n",
    "trailers": CHUNKED + b"2;ext=1\r\nok\r\n0\r\nX-Sum: 1\r\n\r\n",
    "cut chunk": CHUNKED + b"9\r\nok",
    "no last chunk": CHUNKED + b"2\r\nok\r\n",
    "bad chunk": CHUNKED + b"zz\r\nok\r\n0\r\n\r\n",
    "chunks and length": HEAD
    + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nok",
    "bad length": HEAD + b"Content-Length: -2\r\n\r\nok",
    "short": HEAD + b"Content-Length: 9\r\n\r\nok",
    "long": HEAD + b"Content-Length: 2\r\n\r\nok, and more",
    "until the end": HEAD + b"\r\nok",
    "http 1.0": b"HTTP/1.0 200 OK\r\n\r\nok",
    "http 1.0 kept": b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok",
    "http 0.9": b"ok",
    "http 2": b"HTTP/2 200 OK\r\nContent-Length: 2\r\n\r\nok",
    "no reason": b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok",
    "odd reason": b"HTTP/1.1 200 \xff\xfe\r\nContent-Length: 2\r\n\r\nok",
    "status 999": b"HTTP/1.1 999 X\r\nContent-Length: 2\r\n\r\nok",
    "status 42": b"HTTP/1.1 42 X\r\nContent-Length: 2\r\n\r\nok",
    "closing": HEAD + b"Connection: close\r\nContent-Length: 2\r\n\r\nok",
    "cookie": HEAD + b"Set-Cookie: a=b; Domain=x\r\nSet-Cookie: c=d\r\nContent-Length: 2\r\n\r\nok",
    "folded": HEAD + b"X-A: b\r\n c\r\nContent-Length: 2\r\n\r\nok",
    "nul": HEAD + b"X-A: b\0c\r\nContent-Length: 2\r\n\r\nok",
    "space before colon": HEAD + b"X-A : b\r\nContent-Length: 2\r\n\r\nok",
    "latin header": HEAD + b"X-A: \xe9\r\nContent-Length: 2\r\n\r\nok",
    "bare line feeds": b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
    "line breaks first": b"\r\n\r\n" + WHOLE,
    "long header": HEAD + b"X-A: " + b"a" * 60000 + b"\r\nContent-Length: 2\r\n\r\nok",
    "too long header": HEAD + b"X-A: " + b"a" * 70000 + b"\r\nContent-Length: 2\r\n\r\nok",
    "too many headers": HEAD + b"X-A: b\r\n" * 300 + b"Content-Length: 2\r\n\r\nok",
    "gzip": packed("gzip", gzip.compress(b"ok")),
    "deflate": packed("deflate", zlib.compress(b"ok")),
    "raw deflate": packed("deflate", zlib.compress(b"ok", wbits=-15)),
    "zstd": packed("zstd", zstd(b"ok")),
    "br": packed("br", b"\x0b\x00\x80ok\x03"),
    "no gzip": packed("gzip", b"no gzip"),
    "cut gzip": packed("gzip", gzip.compress(b"ok" * 1000)[:-9]),
    "odd encoding": packed("x-odd", b"ok"),
    "identity": packed("identity", b"ok"),
    "two encodings": packed("gzip, gzip", gzip.compress(gzip.compress(b"ok"))),
    "empty gzip": packed("gzip", b""),
    "too large": b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno",
    "large": HEAD + b"Content-Length: 3000000\r\n\r\n" + b"x" * 3000000,
    "two at once": WHOLE + b"HTTP/1.1 418 T\r\nContent-Length: 3\r\n\r\nbad",
    "line break after": WHOLE + b"\r\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["close", "reset", "open"])
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_means_the_same(name: str, ending: str) -> None:
    found = asyncio.run(on_both_ways(ANSWERS[name], ending, [b"{}", b"{}"]))
    assert found["direct"] == found["session"]


@pytest.mark.filterwarnings("ignore:Sending a large body")
@pytest.mark.slow
@pytest.mark.parametrize("ending", ["close", "reset", "open"])
@pytest.mark.parametrize("status", [413, 429, 401])
def test_an_early_answer_means_the_same(status: int, ending: str) -> None:
    """The server answers after the head, and reads nothing of the body."""
    answer = b"HTTP/1.1 %d X\r\nContent-Length: 2\r\n\r\nno" % status
    bodies = [b"x" * (8 << 20)] * 2
    found = asyncio.run(on_both_ways(answer, ending, bodies, reads_body=False))
    assert found["direct"] == found["session"]


# Kept connections.


@contextlib.asynccontextmanager
async def echoing(
    later: bytes | None, after_s: float = 0.0
) -> AsyncIterator[tuple[aiohttp.ClientSession, URL, list[asyncio.StreamWriter]]]:
    """A server whose replies are the bodies; `later` follows each of them, None: the end does."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        while True:
            body = await reader.readexactly(length_of(await reader.readuntil(b"\r\n\r\n")))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            if after_s:
                await asyncio.sleep(after_s)
            if later is None:
                return
            writer.write(later)

    async with listening(serve) as (session, url):
        yield session, url, writers


@pytest.mark.parametrize(
    "later",
    [
        b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 3\r\n\r\nbad",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nb",
        b"HTTP/1.1 200 OK\r\nContent-",
        b"\r\n",
    ],
)
@pytest.mark.parametrize("way", ["direct", "session"])
def test_bytes_that_nobody_asked_for_are_no_reply(way: str, later: bytes) -> None:
    async def run() -> list[Any]:
        async with echoing(later, 0.02) as (session, url, _):
            found = []
            for number in range(3):
                found.append(await outcome(way, session, url, b"%d" % number))
                await asyncio.sleep(0.1)
            return found

    if way == "session" and not later.startswith(b"HTTP/1.1 408"):
        pytest.skip("aiohttp's parser has taken such bytes, and says nothing of them")
    found = asyncio.run(run())
    assert [one[-1] for one in found] == [b"0", b"1", b"2"]


@pytest.mark.parametrize("way", ["direct", "session"])
def test_a_connection_that_was_closed_while_the_program_was_busy_is_not_used(way: str) -> None:
    """Servers close kept connections after some seconds; the event loop learns it later."""

    async def run() -> tuple[Any, Any, int]:
        async with echoing(None, 0.5) as (session, url, writers):
            first = await outcome(way, session, url, b"1")
            (server_side,) = writers
            sock = server_side.get_extra_info("socket")
            sock.shutdown(socket.SHUT_RDWR)  # seen by nobody before the loop runs again
            return first, await outcome(way, session, url, b"2"), len(writers)

    first, second, connections = asyncio.run(run())
    assert (first[-1], second[-1], connections) == (b"1", b"2", 2)


@pytest.mark.parametrize("way", ["direct", "session"])
def test_a_call_that_is_cancelled_leaves_no_connection_with_its_reply(way: str) -> None:
    """At whatever point: the next call gets its own reply, and no connection stays taken."""

    async def run() -> None:
        async with echoing(b"") as (session, url, _):
            assert session.connector is not None
            for steps in range(40):
                call = asyncio.create_task(outcome(way, session, url, b"cancelled %d" % steps))
                for _ in range(steps):
                    await asyncio.sleep(0)
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
                assert not session.connector._acquired
                found = await outcome(way, session, url, b"%d" % steps, wait_s=60)
                assert found[-1] == b"%d" % steps

    asyncio.run(run())


def test_many_calls_at_once_get_their_own_replies() -> None:
    async def run() -> None:
        async with echoing(b"") as (session, url, writers):
            for _ in range(3):
                bodies = [b"%d" % number * (number % 50 * 100 + 1) for number in range(200)]
                found = await asyncio.gather(
                    *(outcome("direct", session, url, body, wait_s=60) for body in bodies)
                )
                assert [one[-1] for one in found] == bodies
            assert len(writers) <= 200, "connections are used again"

    asyncio.run(run())


# What is sent.


PATHS = ("", "/v1/x y?q=a b&c=%2F#part", "//a//", "/a/../b", "/é?ü=é", "/%zz%0d%0a")


class Sent(NamedTuple):
    headers: dict[str, str]
    added: dict[str, str]


@pytest.mark.parametrize(
    "sent",
    [
        Sent({"X": "a\tb"}, {}),
        Sent({"X": "é"}, {"Y": "ü"}),
        Sent({"X": "a\udce9b"}, {"Y": "\ud800"}),
        Sent({"X": ""}, {}),
        Sent({"x": "1", "X": "2"}, {}),
        Sent({"X": "1"}, {"X": "2"}),
        Sent({"X": "1"}, {"x": "2"}),
        Sent({}, {"user-agent": "u", "Content-Type": "a/b"}),
        Sent({"ACCEPT": "a", "accept-encoding": "br"}, {}),
        Sent({"X": "a\x01b"}, {}),
        Sent({"X": "a"}, {"Y": "\x7f"}),
        Sent({"X": "a\n"}, {}),
        Sent({"X\r\nY": "a"}, {}),
    ],
)
def test_a_request_has_the_same_bytes(sent: Sent) -> None:
    heads: list[list[bytes]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            heads.append(sorted((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")))
            await reader.readexactly(2)
            writer.write(WHOLE)

    async def run() -> tuple[list[str], list[str]]:
        async with listening(serve) as (session, url):
            direct = make_direct(session)
            given = {**sent.headers, **sent.added}
            failed: tuple[list[str], list[str]] = ([], [])
            for path in PATHS:
                there = URL(f"http://127.0.0.1:{url.port}{path}")
                try:
                    post = direct.post(there, sent.headers, sent.added, b"{}")
                    async with post or session.post(there, data=b"{}", headers=given):
                        pass
                except ValueError:
                    failed[0].append(path)
                try:
                    async with session.post(there, data=b"{}", headers=given):
                        pass
                except ValueError:
                    failed[1].append(path)
            return failed

    direct_failed, session_failed = asyncio.run(run())
    assert direct_failed == session_failed
    assert heads[::2] == heads[1::2]
    assert len(heads) == 2 * (len(PATHS) - len(direct_failed))


@pytest.mark.parametrize(
    "url", ["htp://127.0.0.1:1/", "localhost:80", "http:///v1", "http+unix://%2Ftmp%2Fx/", "/v1"]
)
def test_a_url_that_cannot_be_asked_is_left_to_the_session(url: str) -> None:
    """A wrong scheme would send the key without TLS."""

    async def run() -> object:
        async with make_session() as session:
            direct = make_direct(session)
            return direct.post(URL(url), HEADERS, {}, b"{}")

    assert asyncio.run(run()) is None


@pytest.mark.parametrize("host", ["a..b", "a" * 70])
@pytest.mark.parametrize("way", ["direct", "session"])
def test_a_host_that_is_no_name_is_an_error_of_the_connection(way: str, host: str) -> None:
    """Another error would be taken for a fault of this program."""

    async def run() -> Any:
        async with make_session() as session:
            return await outcome(way, session, URL(f"http://{host}/"), b"{}")

    assert asyncio.run(run())[0] == "InvalidURL"


@pytest.mark.parametrize("version", ["3.13.9", "3.15.0", "4.0.0"])
def test_another_version_of_aiohttp_sends_by_its_session(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> object:
        async with make_session() as session:
            return make_direct(session).post(URL("http://127.0.0.1:1/"), HEADERS, {}, b"{}")

    monkeypatch.setattr(aiohttp, "__version__", version)
    assert asyncio.run(run()) is None


def test_a_large_body_is_sent_without_a_copy() -> None:
    """Many calls wait for their replies at once; each keeps its body in memory once."""

    async def run() -> int:
        async with echoing(b"") as (session, url, _):
            direct = make_direct(session)
            bodies = [b"%d" % number + b"x" * 1_000_000 for number in range(20)]
            tracemalloc.start()
            posts = [direct.post(url, HEADERS, {}, body) for body in bodies]
            try:
                assert all(post is not None for post in posts)
                return tracemalloc.get_traced_memory()[0]
            finally:
                tracemalloc.stop()

    assert asyncio.run(run()) < 1_000_000
