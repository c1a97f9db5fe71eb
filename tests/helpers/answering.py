"""An endpoint on the loopback interface that answers as a test says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

JSON = dict[str, Any]
Answer = Callable[[str, JSON], tuple[int, JSON]]
"""From the path and body of a request to the status and body of its reply."""


class Handler(BaseHTTPRequestHandler):
    """Handles the requests of one connection; prints nothing."""

    def body(self) -> bytes:
        """The body of the request."""
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def send(
        self, status: int, content: bytes = b"", type: str = "application/json", **headers: str
    ) -> None:
        """Send a whole reply."""
        self.send_response(status)
        for name, value in {"content-type": type, **headers}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@contextmanager
def answering(answer: Answer) -> Iterator[tuple[str, list[JSON]]]:
    """The root of the running endpoint, and the bodies that it was sent so far."""
    requests: list[JSON] = []

    class Answering(Handler):
        def do_POST(self) -> None:
            body = json.loads(self.body())
            requests.append(body)
            status, reply = answer(self.path, body)
            self.send(status, json.dumps(reply).encode())

    with listening(Answering) as url:
        yield url, requests


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """A server on the loopback interface, for as long as the block lasts; gives its root URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
