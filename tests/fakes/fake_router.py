"""A router on loopback before several endpoints: by turns, or by a header of the request."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from hashlib import blake2b
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from itertools import count
from typing import Any

from tests.fakes.served import Served

_PASSED_ON = ("content-type", "authorization", "x-api-key", "anthropic-version")


class FakeRouter(Served):
    """Passes requests on to endpoints that speak HTTP/1.1 on these ports of loopback."""

    def __init__(self, ports: Sequence[int], *, header: str | None = None) -> None:
        """Without a `header` requests go to the endpoints by turns."""
        numbers, lock = count(), threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                """Be silent."""

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                connection = HTTPConnection("127.0.0.1", self._port(), timeout=60)
                given = {name: self.headers[name] for name in _PASSED_ON if name in self.headers}
                connection.request("POST", self.path, body, given)
                reply = connection.getresponse()
                answer = reply.read()
                connection.close()
                self.send_response(reply.status)
                self.send_header("Content-Type", reply.getheader("content-type", ""))
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def _port(self) -> int:
                if header is not None and (id := self.headers.get(header)) is not None:
                    digest = blake2b(id.encode(), digest_size=8).digest()
                    return ports[int.from_bytes(digest) % len(ports)]
                with lock:
                    return ports[next(numbers) % len(ports)]

        super().__init__(Handler)
