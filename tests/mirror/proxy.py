"""A proxy on loopback between a run and an emulator of a bucket: it counts requests, and fails.

A proxy for `gs` URLs also renames headers: no emulator in the registries has the XML API of Google
Cloud Storage with conditions, but an S3 server has what `obstore` asks of it, under other names.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

_SKEW_S = 900
"""S3 and Azure refuse requests whose time differs by more than 15 minutes."""

_OF_CONNECTIONS = ("connection", "transfer-encoding", "keep-alive", "expect")

Headers = dict[str, str]
"""Of a request, with lower-case names."""


def to_s3(headers: Headers) -> Headers:
    """The headers of a request of Google's client as S3 knows them."""
    headers["authorization"] = (
        "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request, Signature=0"
    )
    if headers.pop("x-goog-if-generation-match", None) is not None:
        headers["if-none-match"] = "*"
    return headers


class Fault(NamedTuple):
    """What the proxy does instead of passing a request on."""

    kind: Literal["answers", "slow", "cut before", "cut after", "stalls", "checks the clock"]
    """`cut after`: the bucket has done it, and nobody says so."""
    status: int = 0
    code: str = ""
    """Of an answer, as in the XML of its error."""
    seconds: float = 0.0
    method: str = ""
    """Of the requests that meet it; all if empty."""
    skips: int = 0
    """So many of them pass first."""


class Request(NamedTuple):
    """A request that came."""

    at: float
    """Monotonic clock."""
    method: str
    path: str
    """Without escapes: Google's client escapes more than others."""


class Proxy:
    """Passes requests on to a port, unless `fault` says what else to do."""

    def __init__(self, upstream: int, translate: Callable[[Headers], Headers]) -> None:
        self.upstream = upstream
        self.translate = translate
        self.fault: Fault | None = None
        self.requests: list[Request] = []
        self.met = 0
        """Requests that met the present fault, or passed where there is none."""
        self._changed = threading.Condition()

    def fail(self, fault: Fault | None) -> None:
        """From now on; None heals it, and what stalls goes on."""
        with self._changed:
            self.fault, self.met = fault, 0
            self._changed.notify_all()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Handle one request."""
        size = int(handler.headers.get("content-length") or 0)
        body = handler.rfile.read(size)
        with self._changed:
            self.requests.append(Request(time.monotonic(), handler.command, unquote(handler.path)))
            fault = self.fault
            if fault is not None and fault.method not in ("", handler.command):
                fault = None
            self.met += fault == self.fault
            if fault is not None and self.met <= fault.skips:
                fault = None
            if fault is not None and fault.kind == "stalls":
                self._changed.wait_for(lambda: self.fault is not fault)
        match fault:
            case Fault("answers", status, code):
                _say(handler, status, _error(code))
            case Fault("checks the clock") if _is_skewed(handler.headers):
                _say(handler, 403, _error("RequestTimeTooSkewed"))
            case Fault("cut before" | "stalls"):
                _cut(handler)
            case _:
                if fault is not None:
                    time.sleep(fault.seconds)
                status, headers, content = self._pass_on(handler, body)
                if fault is not None and fault.kind == "cut after":
                    _cut(handler)
                else:
                    _say(handler, status, content, headers)

    def _pass_on(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[int, Any, bytes]:
        connection = HTTPConnection("127.0.0.1", self.upstream, timeout=60)
        connection.putrequest(handler.command, handler.path, skip_host=True)
        headers = {name.lower(): value for name, value in handler.headers.items()}
        for name, value in self.translate(headers).items():
            if name not in _OF_CONNECTIONS:
                connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, answer.getheaders(), content


@contextmanager
def proxy_before(
    upstream: int, translate: Callable[[Headers], Headers] = dict
) -> Iterator[tuple[Proxy, int]]:
    """A proxy before a port, and its own port."""
    proxy = Proxy(upstream, translate)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except OSError:  # the client has gone
                self.close_connection = True

        def do_GET(self) -> None:
            proxy.answer(self)

        do_PUT = do_HEAD = do_POST = do_DELETE = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy, server.server_address[1]
    finally:
        proxy.fail(None)
        server.shutdown()
        server.server_close()
        thread.join()


def _say(handler: BaseHTTPRequestHandler, status: int, content: bytes, headers: Any = ()) -> None:
    handler.send_response_only(status)
    has_length = False
    for name, value in headers:
        if name.lower() not in _OF_CONNECTIONS:
            has_length |= name.lower() == "content-length"
            handler.send_header(name, value)
    if not has_length:
        handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(content)


def _cut(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    handler.connection.close()


def _error(code: str) -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>No</Message></Error>".encode()


def _is_skewed(headers: Any) -> bool:
    """Whether a request was made at another time, by the clock of its sender."""
    if amazon := headers.get("x-amz-date"):
        at = datetime.strptime(amazon, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    else:
        at = parsedate_to_datetime(headers["date"])
    return abs(at.timestamp() - time.time()) > _SKEW_S
