"""Requests that are sent on aiohttp's connections without its session, against raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from yarl import URL

from agent.models.client.direct_requests import DirectRequests

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
HEADERS = {"Accept": "application/json", "Content-Type": "application/json", "X-Key": "é"}


@contextlib.asynccontextmanager
async def direct(
    answer: Answer,
) -> AsyncIterator[tuple[DirectRequests, URL, list[asyncio.Future[None]]]]:
    """Direct requests, the URL of a server with `answer`, and a list with an entry a connection."""
    connections: list[asyncio.Future[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended = asyncio.get_running_loop().create_future()
        connections.append(ended)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await answer(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        ended.set_result(None)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with server:
        async with aiohttp.ClientSession(timeout=timeout) as session:
            port = server.sockets[0].getsockname()[1]
            requests = DirectRequests(session, timeout=timeout, max_header_bytes=1 << 16)
            yield requests, URL(f"http://127.0.0.1:{port}/v1/chat?a=%2Fb"), connections
        await asyncio.gather(*connections)


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """The head and the body of one request."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    return head, await reader.readexactly(length)


def answering(*replies: bytes) -> Answer:
    """Answer the requests of one connection with these bytes, then close it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for reply in replies:
            await read_request(reader)
            writer.write(reply)

    return answer


async def ask(requests: DirectRequests, url: URL, body: bytes = b"{}") -> tuple[int, bytes]:
    """Post once; the status and the body of the response."""
    post = requests.post(url, HEADERS, {}, body)
    assert post is not None
    async with post as response:
        return response.status, await response.content.read()


def test_the_installed_aiohttp_is_one_whose_connections_are_used() -> None:
    """Another version works too, by its session, but every call then costs more."""

    async def run() -> tuple[int, bytes]:
        async with direct(answering(WHOLE)) as (requests, url, _):
            return await ask(requests, url)

    assert asyncio.run(run()) == (200, b"ok")


def test_a_direct_request_has_the_bytes_of_one_by_a_session() -> None:
    seen: list[tuple[list[bytes], bytes]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head, body = await read_request(reader)
            first, *lines = head.rstrip().split(b"\r\n")
            seen.append(([first, *sorted(lines)], body))
            writer.write(WHOLE)

    async def run() -> None:
        async with direct(answer) as (requests, url, _):
            post = requests.post(url, HEADERS, {"x-session-id": "s"}, b'{"a": 1}')
            assert post is not None
            async with post as response:
                await response.content.read()
            async with (
                aiohttp.ClientSession() as session,
                session.post(
                    url, data=b'{"a": 1}', headers={**HEADERS, "x-session-id": "s"}
                ) as other,
            ):
                await other.read()

    asyncio.run(run())
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("reply", "connections"),
    [
        (WHOLE, 1),
        (WHOLE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), 2),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", 2),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n", 2),
    ],
)
def test_a_connection_serves_again_after_a_whole_response_alone(
    reply: bytes, connections: int
) -> None:
    async def run() -> int:
        async with direct(answering(reply, reply, WHOLE)) as (requests, url, seen):
            for _ in range(2):
                post = requests.post(url, HEADERS, {}, b"{}")
                assert post is not None
                async with post as response:
                    assert await response.content.readany() == b"ok"
            return len(seen)

    assert asyncio.run(run()) == connections


def test_a_connection_with_an_unsent_request_is_closed() -> None:
    """The server answers before it has read all, and reads no more."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        await asyncio.sleep(0.1)

    async def run() -> tuple[tuple[int, bytes], int]:
        async with direct(answer) as (requests, url, seen):
            await ask(requests, url, b"x" * (32 << 20))
            return await ask(requests, url, b"x" * (32 << 20)), len(seen)

    assert asyncio.run(run()) == ((413, b""), 2)


def test_informational_responses_are_skipped() -> None:
    async def run() -> tuple[int, bytes]:
        hints = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
        async with direct(answering(b"HTTP/1.1 100 Continue\r\n\r\n" + hints + WHOLE)) as (
            requests,
            url,
            _,
        ):
            return await ask(requests, url)

    assert asyncio.run(run()) == (200, b"ok")


def test_a_response_that_is_no_http_raises_as_a_session_does() -> None:
    async def run() -> None:
        async with direct(answering(b"nonsense\r\n\r\n")) as (requests, url, _):
            await ask(requests, url)

    with pytest.raises(aiohttp.ClientResponseError, match="400"):
        asyncio.run(run())


@pytest.mark.parametrize("name", ["Transfer-Encoding", "content-encoding", "Expect", "Host"])
@pytest.mark.parametrize("is_added", [True, False])
def test_a_header_that_changes_how_a_body_is_sent_is_left_to_the_session(
    name: str, is_added: bool
) -> None:
    async def run() -> object:
        async with direct(answering(WHOLE)) as (requests, url, _):
            extra = {name: "x"}
            given, added = (HEADERS, extra) if is_added else ({**HEADERS, **extra}, {})
            return requests.post(url, given, added, b"{}")

    assert asyncio.run(run()) is None


def test_a_url_with_a_password_is_left_to_the_session() -> None:
    async def run() -> object:
        async with direct(answering(WHOLE)) as (requests, url, _):
            return requests.post(url.with_user("u").with_password("p"), HEADERS, {}, b"{}")

    assert asyncio.run(run()) is None


@pytest.mark.parametrize("value", ["a\r\nX-Other: b", "a\nb", "a\0b"])
def test_a_header_has_no_second_line(value: str) -> None:
    async def run() -> object:
        async with direct(answering(WHOLE)) as (requests, url, _):
            return requests.post(url, HEADERS, {"x-session-id": value}, b"{}")

    with pytest.raises(ValueError, match="x-session-id"):
        asyncio.run(run())


def test_a_connection_that_is_closed_before_it_is_used_fails_as_one_that_is_lost() -> None:
    """A server that is full accepts connections and closes them at once."""

    async def run() -> None:
        async with direct(answering(WHOLE)) as (requests, url, _):
            connect = requests.connector.connect

            async def connect_and_lose(*given: Any) -> Any:
                connection = await connect(*given)
                assert connection.transport is not None
                connection.transport.abort()
                await asyncio.sleep(0)
                return connection

            requests.connector.connect = connect_and_lose  # type: ignore[assignment,method-assign]
            with pytest.raises(aiohttp.ClientConnectionResetError):
                await ask(requests, url)

    asyncio.run(run())
