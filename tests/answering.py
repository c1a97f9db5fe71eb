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


@contextmanager
def answering(answer: Answer) -> Iterator[tuple[str, list[JSON]]]:
    """The root of the running endpoint, and the bodies that it was sent so far."""
    asked: list[JSON] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append(body)
            status, reply = answer(self.path, body)
            content = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Nobody reads it."""

    with listening(Handler) as url:
        yield url, asked


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
