"""Registries that answer wrongly or with bad intent: each is refused by name, and no secret leaks.

A failure is always an `ImageError`, which fails one image; any other error would end the command.
"""

from __future__ import annotations

import gzip
import http.server
import io
import json
import tarfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.fake_images import MACHINE, Entry, layer_of
from tests.fakes.fake_registry import LIST, MANIFEST, FakeRegistry
from tests.fakes.served import Served
from tests.images.test_registry import encoded, log_in, pull
from toolsets.images.names import ImageError
from toolsets.images.registry import client
from toolsets.images.registry.tokens import parse_challenges
from toolsets.images.registry.transport import _parse_retry_after
from toolsets.images.store import ImageStore

LAYER = layer_of([Entry("file", b"x" * 3000)])
DIGEST = f"sha256:{'0' * 64}"
Answer = Callable[[str, Mapping[str, str]], tuple[int, Mapping[str, str], bytes]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short pauses, and no login of the user who runs the tests."""
    monkeypatch.setattr(client, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(client, "_MAX_PAUSE_S", 0.01)
    monkeypatch.setattr(client, "MAX_WAIT_S", 0.1)
    for name in ("REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))


class HostileServer(Served):
    """A server whose answers a function makes; it keeps the requests."""

    def __init__(self, answer: Answer) -> None:
        self.seen: list[tuple[str, dict[str, str], bytes]] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(handler, *_: object) -> None:
                pass

            def do_GET(handler) -> None:
                length = int(handler.headers.get("Content-Length", 0))
                sent = handler.rfile.read(length)
                self.seen.append((handler.path, dict(handler.headers), sent))
                status, headers, body = answer(handler.path, dict(handler.headers))
                handler.send_response(status)
                for name, value in headers.items():
                    handler.send_header(name, value)
                if "Content-Length" not in headers:
                    handler.send_header("Content-Length", str(len(body)))
                handler.end_headers()
                handler.wfile.write(body)

            do_POST = do_GET

        super().__init__(Handler)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"


def refusal(directory: Path, answer: Answer) -> str:
    """The message with which the image of a hostile server is refused."""
    with HostileServer(answer) as server, pytest.raises(ImageError) as refused:
        pull(directory, f"{server.host}/x:1")
    return str(refused.value)


def asking(challenge: str) -> Answer:
    return lambda path, headers: (401, {"WWW-Authenticate": challenge}, b"{}")


@pytest.mark.parametrize(
    "realm",
    [
        "token",
        "",
        "/token",
        "https://",
        "http://:80/",
        "ftp://h/t",
        "http://h:99999/",
        "http://[::1",
        "http://a..b/",
        "http://" + "a" * 70 + ".invalid/",
        "http://\u00ff\u00fe/",
        "http://u:p@127.0.0.1:1/",
    ],
)
def test_a_realm_that_is_no_address_is_refused(tmp_path: Path, realm: str) -> None:
    message = refusal(tmp_path, asking(f'Bearer realm="{realm}"'))
    assert "127.0.0.1" in message


def test_a_scope_that_is_no_text_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, asking('Bearer realm="http://127.0.0.1:1/",scope="\u00ff\u00e9"'))


def test_a_realm_with_a_user_gets_no_login(tmp_path: Path) -> None:
    def answer(path: str, headers: Mapping[str, str]) -> tuple[int, dict[str, str], bytes]:
        realm = f"http://u:p@{headers['Host']}/token"
        return 401, {"WWW-Authenticate": f'Bearer realm="{realm}"'}, b""

    with HostileServer(answer) as server:
        log_in(tmp_path, auths={server.host: {"auth": encoded("me", "s3cret")}})
        with pytest.raises(ImageError, match="has a user or a password"):
            pull(tmp_path, f"{server.host}/x:1")


def test_a_registry_that_always_asks_for_a_login_is_refused(tmp_path: Path) -> None:
    def answer(path: str, headers: Mapping[str, str]) -> tuple[int, dict[str, str], bytes]:
        if path.startswith("/token"):
            return 200, {}, b'{"token": "t", "expires_in": 0}'
        challenge = f'Bearer realm="http://{headers["Host"]}/token"'
        return 401, {"WWW-Authenticate": challenge}, b"{}"

    with HostileServer(answer) as server:
        with pytest.raises(ImageError, match="HTTP 401"):
            pull(tmp_path, f"{server.host}/x:1")
        assert len(server.seen) == 3


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_an_identity_token_follows_no_redirect_to_another_host(tmp_path: Path, status: int) -> None:
    with HostileServer(lambda path, headers: (200, {}, b'{"token": "t"}')) as thief:

        def answer(path: str, headers: Mapping[str, str]) -> tuple[int, dict[str, str], bytes]:
            if path.startswith("/token"):
                return status, {"Location": f"http://{thief.host}/"}, b""
            challenge = f'Bearer realm="http://{headers["Host"]}/token"'
            return 401, {"WWW-Authenticate": challenge}, b""

        with HostileServer(answer) as server:
            log_in(tmp_path, auths={server.host: {"identitytoken": "s3cret"}})
            with pytest.raises(ImageError, match="would send a login"):
                pull(tmp_path, f"{server.host}/x:1")
        assert thief.seen == []


@pytest.mark.parametrize(
    "location",
    [
        "",
        "ftp://h/",
        "http://h:99999/",
        "http://[::1",
        "//",
        "http://u:p@127.0.0.1:1/",
        "mailto:x",
        "http://a..b/",
        "http://" + "a" * 70 + ".invalid/",
    ],
)
def test_a_redirect_to_no_address_is_refused(tmp_path: Path, location: str) -> None:
    message = refusal(tmp_path, lambda path, headers: (302, {"Location": location}, b""))
    assert "127.0.0.1" in message


@pytest.mark.parametrize(
    "later",
    [
        None,
        "-5",
        "x",
        "",
        "9" * 400,
        "Mon, 01 Jan 2001 00:00:00 GMT",
        "Mon, 01 Jan 99999 00:00:00 GMT",
        "1 Jan 2020 00:00:00 +99999999999999999999",
    ],
)
def test_a_busy_registry_with_any_retry_after_ends(tmp_path: Path, later: str | None) -> None:
    given = {} if later is None else {"Retry-After": later}
    assert "HTTP 429" in refusal(tmp_path, lambda path, headers: (429, given, b""))
    assert _parse_retry_after("Mon, 01 Jan 2001 00:00:00 GMT") == 0.0


@pytest.mark.parametrize(
    "entry",
    [
        {"platform": {"os": "linux", "architecture": MACHINE, "variant": []}},
        {"platform": {"os": "linux", "architecture": MACHINE, "variant": {"a": 1}}},
        {"mediaType": 5},
        {"mediaType": ["x"]},
        {"mediaType": "a\r\nX-Other: b"},
        {"mediaType": None},
        {"digest": 5},
        {"digest": "sha256:00"},
        {"platform": {"os": "x" * 100_000, "architecture": []}},
    ],
)
def test_a_list_with_odd_values_is_refused(tmp_path: Path, entry: dict[str, Any]) -> None:
    whole = {
        "digest": DIGEST,
        "size": 5,
        "platform": {"os": "linux", "architecture": MACHINE},
        **entry,
    }
    with FakeRegistry() as registry:
        registry.add_manifest("x", "1", {"manifests": [whole]}, LIST)
        with pytest.raises(ImageError) as refused:
            pull(tmp_path, f"{registry.host}/x:1")
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("depth", [10_000, 1_000_000])
def test_a_manifest_that_is_nested_deeply_is_refused(tmp_path: Path, depth: int) -> None:
    with FakeRegistry() as registry:
        registry.add_manifest("x", "1", b'{"a":' + b"[" * depth + b"]" * depth + b"}", MANIFEST)
        with pytest.raises(ImageError, match="sends no JSON"):
            pull(tmp_path, f"{registry.host}/x:1")


def test_addresses_of_foreign_layers_are_not_asked(tmp_path: Path) -> None:
    with FakeRegistry() as registry, HostileServer(lambda *_: (200, {}, b"x")) as other:
        registry.add_image("x", "1", [LAYER])
        raw, kind = registry.manifests["x", "1"]
        manifest = json.loads(raw)
        (layer,) = manifest["layers"]
        layer["mediaType"] = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"
        layer["urls"] = [f"http://{other.host}/layer"]
        del registry.blobs[layer["digest"]]
        registry.add_manifest("x", "1", manifest, kind)
        with pytest.raises(ImageError, match="BLOB_UNKNOWN"):
            pull(tmp_path, f"{registry.host}/x:1")
        assert other.seen == []


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Range": "bytes 7-9/10"},
        {"Content-Range": "x"},
        {"Content-Range": "bytes */3"},
    ],
)
def test_a_part_that_was_not_asked_for_is_not_taken(
    tmp_path: Path, headers: dict[str, str]
) -> None:
    with FakeRegistry() as registry:
        registry.add_image("x", "1", [LAYER])
        manifest, kind = registry.manifests["x", "1"]

        def answer(path: str, _: Mapping[str, str]) -> tuple[int, Mapping[str, str], bytes]:
            if "/manifests/" in path:
                return 200, {"Content-Type": kind}, manifest
            return 206, headers, registry.blobs[path.rpartition("/")[2]]

        assert "another part than asked for" in refusal(tmp_path, answer)


def test_a_challenge_of_spaces_is_read_at_once() -> None:
    """A header may have 8 KB, and an answer a hundred of them."""
    began = time.monotonic()
    assert parse_challenges([f"Bearer{' ' * 8000}!", f"Bearer a=1{' ' * 8000}!"] * 20)
    assert time.monotonic() - began < 1


def packed(raw: bytes) -> bytes:
    return gzip.compress(raw, 1, mtime=0)


def chained_headers(kind: bytes) -> bytes:
    """A layer whose file has very many headers before it."""
    made = io.BytesIO()
    for _ in range(5000):
        header = tarfile.TarInfo("long")
        header.type, header.size = kind, 4
        made.write(header.tobuf(tarfile.GNU_FORMAT) + b"name".ljust(512, b"\0"))
    made.write(tarfile.TarInfo("file").tobuf() + bytes(1024))
    return made.getvalue()


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK])
def test_a_chain_of_headers_is_refused(tmp_path: Path, kind: bytes) -> None:
    with FakeRegistry() as registry:
        registry.add_image("x", "1", [chained_headers(kind)])
        pull(tmp_path, f"{registry.host}/x:1")
        with pytest.raises(ImageError, match="too many headers"):
            ImageStore(tmp_path).unpack(f"{registry.host}/x:1")


@pytest.mark.parametrize("size", [1 << 40, (1 << 63) - 1, -5, 1 << 80])
def test_a_file_whose_size_is_a_lie_is_refused(tmp_path: Path, size: int) -> None:
    member = tarfile.TarInfo("file")
    member.size = size
    with FakeRegistry() as registry:
        registry.add_image("x", "1", [member.tobuf(tarfile.GNU_FORMAT) + bytes(2048)])
        pull(tmp_path, f"{registry.host}/x:1")
        with pytest.raises(ImageError):
            ImageStore(tmp_path).unpack(f"{registry.host}/x:1")


@pytest.mark.parametrize(
    "config",
    [
        {"Env": 5},
        {"Env": "A=b"},
        {"Env": {"A": "b"}},
        {"Env": [5]},
        {"Env": ["A=\0"]},
        {"Entrypoint": "sh -c"},
        {"Entrypoint": 7},
        {"Entrypoint": ["a\0b"]},
        {"WorkingDir": ["/x"]},
        {"User": {"a": 1}},
        {"User": "a\0"},
    ],
)
def test_a_configuration_with_odd_values_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    with FakeRegistry() as registry:
        registry.add_image("x", "1", [LAYER], config)
        pull(tmp_path, f"{registry.host}/x:1")
        with pytest.raises(ImageError, match=f"its configuration has .*{next(iter(config))}"):
            ImageStore(tmp_path).unpack(f"{registry.host}/x:1")


def test_a_configuration_without_values_is_fine(tmp_path: Path) -> None:
    config = {"Env": None, "Entrypoint": None, "WorkingDir": None, "User": None}
    with FakeRegistry() as registry:
        registry.add_image("x", "1", [LAYER], config)
        pull(tmp_path, f"{registry.host}/x:1")
        image = ImageStore(tmp_path).unpack(f"{registry.host}/x:1")
    assert (image.env, image.entrypoint, image.workdir, image.user) == ({}, (), "/", "")
