"""A loopback server that offers one dataset or model as the Hugging Face hub does, for reading."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

REPOSITORY = "org/set"
REVISION = "a" * 40


@contextmanager
def fake_hub(
    files: Mapping[str, bytes],
    revision: str = REVISION,
    kind: Literal["dataset", "model"] = "dataset",
) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Serve `files` as the repository `REPOSITORY`; give the environment for it and paths asked."""
    commit = revision
    place = "/datasets" if kind == "dataset" else ""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            paths.append(self.path)
            self.rfile.read(int(self.headers.get("content-length") or 0))
            url = urlsplit(self.path)
            path = unquote(url.path)
            repository, revision = re.escape(REPOSITORY), "[^/]+"
            if re.fullmatch(rf"/api/{kind}s/{repository}(/revision/{revision})?", path):
                siblings = [{"rfilename": name} for name in files]
                self._json({"id": REPOSITORY, "sha": commit, "siblings": siblings})
            elif match := re.fullmatch(rf"/api/{kind}s/{repository}/tree/{revision}(.*)", path):
                recursive = "recursive=true" in url.query.lower()
                self._json(_tree(files, match[1].strip("/"), recursive=recursive))
            elif match := re.fullmatch(rf"{place}/{repository}/resolve/{revision}/(.+)", path):
                self._file(files.get(match[1]))
            else:
                self._send(404, b"{}", {"x-error-code": "RepoNotFound"})

        do_HEAD = do_POST = do_GET

        def _file(self, content: bytes | None) -> None:
            if content is None:
                self._send(404, b"", {"x-error-code": "EntryNotFound"})
                return
            headers = {"etag": f'"{len(content)}"', "x-repo-commit": commit}
            span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range") or "")
            if span is None:
                self._send(200, content, headers)
                return
            first, last = int(span[1]), min(int(span[2] or len(content)), len(content) - 1)
            headers["content-range"] = f"bytes {first}-{last}/{len(content)}"
            self._send(206, content[first : last + 1], headers)

        def _json(self, answer: Any) -> None:
            self._send(200, json.dumps(answer).encode(), {"content-type": "application/json"})

        def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    environment = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    try:
        yield environment, paths
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _tree(files: Mapping[str, bytes], inside: str, *, recursive: bool) -> list[dict[str, Any]]:
    prefix = f"{inside}/" if inside else ""
    collected: dict[str, dict[str, Any]] = {}
    for name, content in files.items():
        if not name.startswith(prefix):
            continue
        first, slash, _ = name.removeprefix(prefix).partition("/")
        if slash and not recursive:
            path = prefix + first
            collected[path] = {"type": "directory", "path": path, "oid": "c" * 40}
        else:
            collected[name] = {"type": "file", "path": name, "size": len(content), "oid": "b" * 40}
    return list(collected.values())
