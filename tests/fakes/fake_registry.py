"""A registry of images on this machine, with logins, redirects and faults.

`FakeRegistry` serves the images that a test gives it, and writes down each request. Faults come
from a seeded generator, so that a test has the same ones again and again.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import random
import re
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from tests.fakes.fake_images import MACHINE
from tests.fakes.served import Served

_MEDIA = "application/vnd.oci.image"
MANIFEST = f"{_MEDIA}.manifest.v1+json"
LIST = f"{_MEDIA}.index.v1+json"
_PIECE_BYTES = 64 << 10


class Seen(NamedTuple):
    """A request, and how it was answered."""

    method: str
    path: str
    authorization: str | None
    first_byte: int
    """The offset of `Range`; 0 without one."""
    status: int
    """0 if the connection was cut before an answer."""
    sent: int
    """Number of bytes of the body that were written to the connection."""
    is_whole: bool
    """Whether the answer was complete and right."""


@dataclass
class Faults:
    """What goes wrong, as shares of all requests."""

    share: float = 0.0
    """The share of requests with any fault."""
    kinds: Sequence[str] = ("500", "503", "429", "cut", "drop", "flip")
    """`cut` ends a body early, `drop` closes the connection without an answer, `flip` changes one
    byte of a blob."""
    retry_after: str = "0"
    seed: int = 1


@dataclass
class FakeRegistry(Served):
    """A registry; use it in a `with` block, then `host` is its host and port."""

    faults: Faults = field(default_factory=Faults)
    login: tuple[str, str] | None = None
    """User and password that readers need; None: anybody may read."""
    scheme: str = "bearer"
    """`bearer` or `basic`, if there is a `login` or `needs_token`."""
    needs_token: bool = False
    """Readers need a token, which anybody gets."""
    token_life_s: float = 300
    blobs_at: str | None = None
    """The address of another server to which requests for blobs are redirected."""
    ignores_ranges: bool = False
    bytes_per_s: float | None = None
    on_blob: Callable[[str], object] = lambda digest: None
    """Called with the digest of a blob that is asked for, before it is sent."""
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[tuple[str, str], tuple[bytes, str]] = field(default_factory=dict)
    """Content and media type by repository and tag or digest."""
    seen: list[Seen] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        class Handler(_Handler):
            registry = self

        super().__init__(Handler)
        self._random = random.Random(self.faults.seed)
        self._lock = threading.Lock()
        self._sending: defaultdict[str, list[socket.socket]] = defaultdict(list)
        self.sent_at_once = 0
        """The most downloads of the same blob at a time."""

    @property
    def host(self) -> str:
        """Host and port, as in names of images."""
        return f"127.0.0.1:{self._server.server_address[1]}"

    # What is in it.

    def add_blob(self, content: bytes) -> dict[str, Any]:
        """Store a blob; return its digest and size."""
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        self.blobs[digest] = content
        return {"digest": digest, "size": len(content)}

    def add_manifest(self, repository: str, tag: str, content: Any, kind: str = MANIFEST) -> str:
        """Store a manifest under a tag and its digest; return the digest."""
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        for target in (tag, digest):
            self.manifests[repository, target] = raw, kind
        return digest

    def add_image(
        self,
        repository: str,
        tag: str,
        layers: Sequence[bytes],
        config: Mapping[str, Any] | None = None,
        *,
        compress: Any = lambda raw: gzip.compress(raw, 1, mtime=0),
        ending: str = "+gzip",
        architecture: str = MACHINE,
    ) -> str:
        """Store an image of uncompressed layers; return the digest of its manifest."""
        described = {
            "architecture": architecture,
            "os": "linux",
            "config": {"Env": ["PATH=/usr/bin:/bin"], **(config or {})},
            "rootfs": {
                "type": "layers",
                "diff_ids": [f"sha256:{hashlib.sha256(raw).hexdigest()}" for raw in layers],
            },
        }
        kind = f"{_MEDIA}.layer.v1.tar{ending}"
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {
                "mediaType": f"{_MEDIA}.config.v1+json",
                **self.add_blob(json.dumps(described).encode()),
            },
            "layers": [{"mediaType": kind, **self.add_blob(compress(raw))} for raw in layers],
        }
        return self.add_manifest(repository, tag, manifest)

    def add_list(self, repository: str, tag: str, images: Mapping[str, str]) -> str:
        """Store a list of manifests by platform, as `linux/arm64`; return its digest."""
        entries = []
        for platform, digest in images.items():
            system, architecture, *variant = platform.split("/")
            raw, kind = self.manifests[repository, digest]
            about = {"os": system, "architecture": architecture}
            entries.append(
                {
                    "mediaType": kind,
                    "digest": digest,
                    "size": len(raw),
                    "platform": about | ({"variant": variant[0]} if variant else {}),
                }
            )
        content = {"schemaVersion": 2, "mediaType": LIST, "manifests": entries}
        return self.add_manifest(repository, tag, content, LIST)

    # What was asked for.

    def requests_of(self, part: str) -> list[Seen]:
        """The requests whose path has this part, in their order."""
        with self._lock:
            return [one for one in self.seen if part in one.path]

    def whole_answers(self) -> Counter[str]:
        """How often each blob was sent completely from its first byte on, by digest."""
        return Counter(
            one.path.rpartition("/")[2]
            for one in self.requests_of("/blobs/")
            if one.is_whole and one.first_byte == 0
        )

    def sent_bytes(self) -> Counter[str]:
        """How many bytes of each blob were sent, by digest."""
        sent = Counter[str]()
        for one in self.requests_of("/blobs/"):
            sent[one.path.rpartition("/")[2]] += one.sent
        return sent

    def note(self, seen: Seen) -> None:
        """Write a request down."""
        with self._lock:
            self.seen.append(seen)

    @contextmanager
    def sending(self, digest: str, connection: socket.socket) -> Iterator[None]:
        """Count a download while it lasts."""
        with self._lock:
            downloads = self._sending[digest]
            downloads.append(connection)
            at_once = sum(map(_is_open, downloads))  # a killed client waits for nothing
            self.sent_at_once = max(self.sent_at_once, at_once)
        try:
            yield
        finally:
            with self._lock:
                downloads.remove(connection)

    @property
    def sending_now(self) -> int:
        """How many blobs are being sent."""
        with self._lock:
            return sum(map(len, self._sending.values()))

    def draw_fault(self) -> str | None:
        """The fault of the next request."""
        with self._lock:
            if self._random.random() >= self.faults.share:
                return None
            return self._random.choice(list(self.faults.kinds))

    def draw(self, below: int) -> int:
        """A random number."""
        with self._lock:
            return self._random.randrange(max(below, 1))


def _is_open(connection: socket.socket) -> bool:
    """Whether the other side has not closed a connection."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


class _Handler(BaseHTTPRequestHandler):
    registry: FakeRegistry
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self._fields = parse_qs(self.rfile.read(length).decode())
        self._answer()

    def do_GET(self) -> None:
        self._fields = parse_qs(urlsplit(self.path).query)
        self._answer()

    def _answer(self) -> None:
        registry, path = self.registry, urlsplit(self.path).path
        self._sent, self._status, self._is_whole = 0, 0, False
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        self._first = int(asked[1]) if asked and not registry.ignores_ranges else 0
        try:
            self._route(path)
        except OSError:
            self.close_connection = True
        finally:
            registry.note(
                Seen(
                    method=self.command,
                    path=path,
                    authorization=self.headers.get("Authorization"),
                    first_byte=int(asked[1]) if asked else 0,
                    status=self._status,
                    sent=self._sent,
                    is_whole=self._is_whole,
                )
            )

    def _route(self, path: str) -> None:
        registry = self.registry
        if path == "/token":
            self._give_token()
            return
        match = re.fullmatch(r"/v2/(.+)/(manifests|blobs)/([^/]+)", path)
        if match is None:
            self._refuse(404, "NAME_UNKNOWN", "no such address")
            return
        repository, kind, target = match.groups()
        if kind == "manifests":
            self._give(repository, kind, target)
            return
        registry.on_blob(target)
        with registry.sending(target, self.connection):
            self._give(repository, kind, target)

    def _give(self, repository: str, kind: str, target: str) -> None:
        registry, path = self.registry, urlsplit(self.path).path
        fault = registry.draw_fault()
        if fault in ("500", "503", "429"):
            later = {"Retry-After": registry.faults.retry_after} if fault == "429" else {}
            self._send(int(fault), b"{}", later)
            return
        if fault == "drop":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        if not self._may_read(repository):
            return
        if kind == "manifests":
            content, media = registry.manifests.get((repository, target), (None, ""))
        elif registry.blobs_at is not None:
            self._send(307, b"", {"Location": f"{registry.blobs_at}{path}?signature=s3cret"})
            return
        else:
            content, media = registry.blobs.get(target), "application/octet-stream"
        if content is None:
            code = "MANIFEST_UNKNOWN" if kind == "manifests" else "BLOB_UNKNOWN"
            self._refuse(404, code, f"{target} is not here")
            return
        if fault == "flip" and kind == "blobs" and content:
            place = registry.draw(len(content))
            content = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        headers = {"Content-Type": media, "Docker-Content-Digest": target}
        if self._first:
            if self._first >= len(content):
                self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
                return
            last = len(content) - 1
            headers["Content-Range"] = f"bytes {self._first}-{last}/{len(content)}"
            content = content[self._first :]
        cut = registry.draw(len(content)) if fault == "cut" else None
        self._send(206 if self._first else 200, content, headers, cut=cut)
        self._is_whole = fault not in ("flip", "cut") and self._sent == len(content)

    def _may_read(self, repository: str) -> bool:
        registry = self.registry
        if registry.login is None and not registry.needs_token:
            return True
        given = self.headers.get("Authorization", "")
        if registry.scheme == "basic" and registry.login is not None:
            if given == _basic(registry.login):
                return True
            self._refuse(401, "UNAUTHORIZED", "", {"WWW-Authenticate": 'Basic realm="r"'})
            return False
        if given.removeprefix("Bearer ") in registry.tokens:
            return True
        challenge = (
            f'Bearer realm="http://{registry.host}/token",service="fake registry",'
            f'scope="repository:{repository}:pull"'
        )
        self._refuse(401, "UNAUTHORIZED", "", {"WWW-Authenticate": challenge})
        return False

    def _give_token(self) -> None:
        registry = self.registry
        given = self.headers.get("Authorization")
        identity = self._fields.get("refresh_token", [""])[0]
        if registry.login is not None and not (
            given == _basic(registry.login) or identity == registry.login[1]
        ):
            self._refuse(401, "UNAUTHORIZED", "")
            return
        token = f"token-{len(registry.tokens)}-{self._fields['scope'][0]}"
        registry.tokens.append(token)
        self._send(
            200, json.dumps({"token": token, "expires_in": registry.token_life_s}).encode(), {}
        )

    def _refuse(
        self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        body = json.dumps({"errors": [{"code": code, "message": message}]}).encode()
        self._send(status, body, headers or {})

    def _send(
        self, status: int, body: bytes, headers: Mapping[str, str], *, cut: int | None = None
    ) -> None:
        self._status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        shown = body if cut is None else body[:cut]
        pause = threading.Event()
        for start in range(0, len(shown), _PIECE_BYTES):
            piece = shown[start : start + _PIECE_BYTES]
            # Before the piece: a client that has all of them may ask for the next blob at once.
            if self.registry.bytes_per_s is not None:
                pause.wait(len(piece) / self.registry.bytes_per_s)
            self.wfile.write(piece)
            self._sent += len(piece)
        if cut is not None:
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True


def _basic(login: tuple[str, str]) -> str:
    return f"Basic {base64.b64encode(':'.join(login).encode()).decode()}"
