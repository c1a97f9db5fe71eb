"""A forwarder between a run and its server, which keeps what the server sent."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any


class Wire:
    """The replies of a server, in the order in which they ended."""

    def __init__(self, upstream: int) -> None:
        """`upstream` is the server's port on 127.0.0.1."""
        self.upstream = upstream
        self.port = 0
        self.replies: list[dict[str, Any]] = []
        """Of each reply with ids: `prompt` and `completion` ids, and `logprobs` of the latter."""
        self._lock = Lock()

    def add(self, sent: bytes) -> None:
        """Keep the ids of a reply, streamed or not."""
        if sent.lstrip().startswith(b"data:"):
            lines = (line[6:] for line in sent.split(b"\n") if line.startswith(b"data: {"))
            parts = [json.loads(line) for line in lines]
        else:
            parts = [json.loads(sent)]
        reply: dict[str, Any] = {"prompt": None, "completion": [], "logprobs": []}
        for part in parts:
            reply["prompt"] = part.get("prompt_token_ids") or reply["prompt"]
            for choice in part.get("choices", ()):
                reply["completion"] += choice.get("token_ids") or ()
                tokens = (choice.get("logprobs") or {}).get("content") or ()
                reply["logprobs"] += [token["logprob"] for token in tokens]
        if reply["prompt"]:
            with self._lock:
                self.replies.append(reply)


@contextmanager
def forwarding(upstream: int) -> Iterator[Wire]:
    """A forwarder on a free port of 127.0.0.1."""
    wire = Wire(upstream)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._forward(None)

        def do_POST(self) -> None:
            self._forward(self.rfile.read(int(self.headers["content-length"])))

        def _forward(self, body: bytes | None) -> None:
            server = http.client.HTTPConnection("127.0.0.1", wire.upstream)
            headers = {"content-type": "application/json"}
            server.request(self.command, self.path, body, headers)
            reply = server.getresponse()
            self.send_response(reply.status)
            self.send_header("content-type", reply.headers["content-type"] or "text/plain")
            self.send_header("connection", "close")
            self.end_headers()
            sent = b""
            try:
                while part := reply.read1(1 << 16):
                    sent += part
                    self.wfile.write(part)
            except ConnectionError:
                return  # a killed run: the server sees it, too, and ends the reply
            finally:
                server.close()
                self.close_connection = True
            if body is not None and reply.status == 200:
                wire.add(sent)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as service:
        service.daemon_threads = True
        wire.port = service.server_port
        thread = Thread(target=service.serve_forever, daemon=True)
        thread.start()
        try:
            yield wire
        finally:
            service.shutdown()
            thread.join()
