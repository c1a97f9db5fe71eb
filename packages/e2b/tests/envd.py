"""The server inside a machine of the loopback service: processes and files, as E2B's `envd` has.

    python3 envd.py SOCKET TOKEN

It follows `spec/envd` of the repository e2b-dev/E2B, and the behaviour of `packages/envd` in
e2b-dev/infra: output that nobody listens to is dropped, a command outlives its stream, and the end
of a command is told once its output has ended. It needs nothing but Python.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import signal
import socketserver
import struct
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

HEADER = struct.Struct(">BI")
USERS = ("user", "root")
CHUNK_BYTES = 32 << 10


class Process:
    """A command and those who listen to it."""

    def __init__(self, request: dict[str, Any]) -> None:
        config = request["process"]
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": "/home/user",
            "USER": "user",
            "LOGNAME": "user",
            "E2B_SANDBOX": "true",
            **config.get("envs", {}),
        }
        # By a shell, as there: a command that does not exist ends with 127.
        wrapped = ["/bin/sh", "-c", 'exec "${@}"', "--", config["cmd"], *config.get("args", [])]
        has_input = request.get("stdin", True)
        self.tag = request.get("tag")
        self.config = config
        self.child = subprocess.Popen(
            wrapped,
            stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=config.get("cwd") or "/home/user",
            env=environment,
        )
        self.input = threading.Lock()
        self._lock = threading.Lock()
        self._listeners: list[queue.Queue[dict[str, Any] | None]] = []
        self.end: dict[str, Any] | None = None
        self._readers = [
            threading.Thread(target=self._read, args=(name, stream), daemon=True)
            for name, stream in (("stdout", self.child.stdout), ("stderr", self.child.stderr))
        ]

    def start(self) -> None:
        """Begin to read the output, once somebody listens."""
        for reader in self._readers:
            reader.start()
        threading.Thread(target=self._wait, daemon=True).start()

    def listen(self) -> queue.Queue[dict[str, Any] | None]:
        """Return a queue with all further events; None after the last one."""
        events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        with self._lock:
            if self.end is not None:
                events.put({"end": self.end})
                events.put(None)
            else:
                self._listeners.append(events)
        return events

    def leave(self, events: queue.Queue[dict[str, Any] | None]) -> None:
        """Listen no more."""
        with self._lock:
            if events in self._listeners:
                self._listeners.remove(events)

    def _tell(self, event: dict[str, Any] | None) -> None:
        for events in self._listeners:
            events.put(event)

    def _read(self, name: str, stream: Any) -> None:
        while data := os.read(stream.fileno(), CHUNK_BYTES):
            with self._lock:
                self._tell({"data": {name: base64.b64encode(data).decode()}})

    def _wait(self) -> None:
        for reader in self._readers:
            reader.join()
        code = self.child.wait()
        end: dict[str, Any] = {"exited": code >= 0, "status": f"exit status {code}"}
        if code < 0:
            end["status"] = f"signal: {signal.strsignal(-code)}".lower()
            end["error"] = end["status"]
        if code:
            end["exitCode"] = max(code, -1)
        with self._lock:
            self.end = end
            self._tell({"end": end})
            self._tell(None)


PROCESSES: dict[int, Process] = {}


class Failure(Exception):
    """An error of the Connect protocol."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"code": code, "message": message}


class Handler(BaseHTTPRequestHandler):
    """The requests of one connection."""

    protocol_version = "HTTP/1.1"
    token = ""

    def address_string(self) -> str:
        return "loopback"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path == "/health":
            self._answer(204, b"")
        elif self._is_trusted():
            path = Path(self._path(parse_qs(url.query)))
            if path.is_file():
                self._answer(200, path.read_bytes(), "application/octet-stream")
            else:
                self._answer(404, _json({"code": 404, "message": f"path '{path}' does not exist"}))

    def do_POST(self) -> None:
        body = self._body()
        if not self._is_trusted():
            return
        url = urlsplit(self.path)
        if url.path == "/files":
            self._write_file(parse_qs(url.query), body)
            return
        service, _, method = url.path.lstrip("/").partition("/")
        act = getattr(self, f"rpc_{method}", None)
        try:
            if service != "process.Process" or act is None:
                raise Failure(404, "unimplemented", f"there is no {url.path}")
            self._check_user()
            if method in ("Start", "Connect"):
                flags, size = HEADER.unpack_from(body)
                assert flags == 0
                assert self.headers["Content-Type"] == "application/connect+json"
                act(json.loads(body[HEADER.size : HEADER.size + size]))
            else:
                assert self.headers["Content-Type"].startswith("application/json")
                self._answer(200, _json(act(json.loads(body))))
        except Failure as failure:
            if method in ("Start", "Connect"):
                self._begin_stream()
                self._send(2, {"error": failure.body})
                self._chunk(b"")
            else:
                self._answer(failure.status, _json(failure.body))

    def _is_trusted(self) -> bool:
        if self.headers.get("X-Access-Token") == self.token:
            return True
        message = "unauthorized access, please provide a valid access token"
        self._answer(401, _json({"code": 401, "message": message}))
        return False

    def _check_user(self) -> None:
        given = self.headers.get("Authorization", "")
        if given.startswith("Basic "):
            name = base64.b64decode(given.removeprefix("Basic ")).decode().partition(":")[0]
            if name not in USERS:
                raise Failure(401, "unauthenticated", f"invalid username: '{name}'")

    def _path(self, query: dict[str, list[str]]) -> str:
        return str(Path("/home/user", query["path"][0]))

    def _write_file(self, query: dict[str, list[str]], body: bytes) -> None:
        kind = self.headers["Content-Type"]
        if kind.startswith("multipart/form-data"):
            boundary = kind.partition("boundary=")[2].strip('"').encode()
            head, _, rest = body.partition(b"\r\n\r\n")
            assert b'name="file"' in head
            body = rest[: rest.rindex(b"\r\n--" + boundary + b"--")]
        else:
            assert kind == "application/octet-stream"
        path = Path(self._path(query))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
        entry = {"path": str(path), "name": path.name, "type": "file"}
        self._answer(200, _json([entry]))

    def rpc_Start(self, request: dict[str, Any]) -> None:
        cwd = request["process"].get("cwd") or "/home/user"
        if not Path(cwd).exists():
            raise Failure(400, "invalid_argument", f"cwd '{cwd}' does not exist")
        try:
            process = Process(request)
        except OSError as error:
            raise Failure(400, "invalid_argument", f"error starting process: {error}") from error
        PROCESSES[process.child.pid] = process
        events = process.listen()
        process.start()
        self._stream(process, events)

    def rpc_Connect(self, request: dict[str, Any]) -> None:
        process = self._selected(request)
        self._stream(process, process.listen())

    def rpc_List(self, request: dict[str, Any]) -> dict[str, Any]:
        live = {pid: one for pid, one in PROCESSES.items() if one.end is None}
        return {"processes": [{"pid": pid, "config": one.config} for pid, one in live.items()]}

    def rpc_SendInput(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._selected(request)
        if process.child.stdin is None or process.child.stdin.closed:
            raise Failure(500, "internal", "error writing to stdin: stdin not enabled or closed")
        with process.input:
            try:
                process.child.stdin.write(base64.b64decode(request["input"]["stdin"]))
                process.child.stdin.flush()
            except OSError as error:
                raise Failure(500, "internal", f"error writing to stdin: {error}") from error
        return {}

    def rpc_CloseStdin(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._selected(request)
        if process.child.stdin is not None:
            process.child.stdin.close()
        return {}

    def rpc_SendSignal(self, request: dict[str, Any]) -> dict[str, Any]:
        number = getattr(signal, request["signal"].removeprefix("SIGNAL_"))
        self._selected(request).child.send_signal(number)
        return {}

    def _selected(self, request: dict[str, Any]) -> Process:
        process = PROCESSES.get(request["process"].get("pid", 0))
        if process is None:
            raise Failure(404, "not_found", f"process with pid {request['process']} not found")
        return process

    def _stream(self, process: Process, events: queue.Queue[dict[str, Any] | None]) -> None:
        ping_s = float(self.headers.get("Keepalive-Ping-Interval", "90"))
        try:
            self._begin_stream()
            self._send(0, {"event": {"start": {"pid": process.child.pid}}})
            while True:
                try:
                    event = events.get(timeout=ping_s)
                except queue.Empty:
                    event = {"keepalive": {}}
                if event is None:
                    break
                self._send(0, {"event": event})
            self._send(2, {})
            self._chunk(b"")
        except OSError:
            self.close_connection = True  # the client has left, and the command runs on
        finally:
            process.leave(events)

    def _begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/connect+json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _send(self, flags: int, message: dict[str, Any]) -> None:
        raw = _json(message)
        self._chunk(HEADER.pack(flags, len(raw)) + raw)

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n" % len(data) + data + b"\r\n")
        self.wfile.flush()

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", "0")))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


if __name__ == "__main__":
    Handler.token = sys.argv[2]
    with Server(sys.argv[1], Handler) as server:
        Path(sys.argv[1]).chmod(0o777)
        server.serve_forever()
