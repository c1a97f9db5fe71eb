"""Web servers on loopback that tests fill with pages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Visit(NamedTuple):
    """One request that a site got."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Answer(NamedTuple):
    """What a site sends back; a body in pieces is sent until the other side hangs up."""

    body: bytes | Iterator[bytes]
    content_type: str | None = "text/plain"
    status: int = 200
    headers: dict[str, str] = {}  # noqa: RUF012 - a default that nobody changes


@dataclass
class Site:
    """A running server. Paths that have no page are 404."""

    host: str
    port: int = 0
    pages: dict[str, Answer | Callable[[Visit], Answer]] = field(default_factory=dict)
    visits: list[Visit] = field(default_factory=list)

    def url(self, path: str = "/") -> str:
        return f"http://{self.host}:{self.port}{path}"

    @property
    def allow(self) -> tuple[str, ...]:
        return (f"{self.host}:{self.port}",)

    def redirect(self, path: str, target: str) -> None:
        self.pages[path] = Answer(b"", None, 302, {"Location": target})


@contextmanager
def site(host: str = "127.0.0.1") -> Iterator[Site]:
    """A server that lives as long as the block."""
    served = Site(host)

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            visit = Visit(self.command, self.path, dict(self.headers), self.rfile.read(length))
            served.visits.append(visit)
            page = served.pages.get(self.path, Answer(b"no such page", status=404))
            answer = page if isinstance(page, Answer) else page(visit)
            self.send_response(answer.status)
            if answer.content_type is not None:
                self.send_header("Content-Type", answer.content_type)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                for piece in [answer.body] if isinstance(answer.body, bytes) else answer.body:
                    self.wfile.write(piece)
            except ConnectionError:
                pass  # The other side has had enough.

        do_GET = do_POST = handle_any

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer((host, 0), Handler)
    server.daemon_threads = True
    served.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
