"""Objects of git, named by SHA-1, as files of a directory of objects (gitrepository-layout(5))."""

from __future__ import annotations

import binascii
import hashlib
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

EMPTY_TREE = hashlib.sha1(b"tree 0\0", usedforsecurity=False).hexdigest()
_DIRECTORY = b"40000"
_MAX_REQUEST_BYTES = 512 << 10
"""Of contents in one request; a single one may be larger."""


class Blob(NamedTuple):
    """A file or link in a tree."""

    mode: bytes
    """As trees have it: octal digits."""
    content: bytes
    """Of a link, its target."""


class Objects:
    """Blobs and trees, to be copied to a directory of objects."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        """By their paths in the directory."""

    def add_tree(self, blobs: Mapping[str, Blob]) -> str:
        """Add a tree with files by their paths; return its name."""
        return self._tree(blobs).hex()

    def requested(self) -> Iterator[list[dict[str, Any]]]:
        """The entries of requests that write them; see `inside.file_requests`."""
        entries: list[dict[str, Any]] = []
        size = 0
        for path, raw in self.files.items():
            if entries and size + len(raw) > _MAX_REQUEST_BYTES:
                yield entries
                entries, size = [], 0
            content = binascii.b2a_base64(raw, newline=False).decode()
            more = {"target": None, "is_executable": False}
            entries.append({"path": path, "content": content, **more})
            size += len(raw)
        yield entries

    def _tree(self, blobs: Mapping[str, Blob]) -> bytes:
        beneath: defaultdict[bytes, dict[str, Blob]] = defaultdict(dict)
        entries: list[tuple[bytes, bytes, bytes]] = []
        for path, blob in blobs.items():
            name, _, rest = path.partition("/")
            if rest:
                beneath[name.encode()][rest] = blob
            else:
                entries.append((name.encode(), blob.mode, self._add(b"blob", blob.content)))
        # Names of directories are sorted as if a slash ended them.
        entries += [(name + b"/", _DIRECTORY, self._tree(some)) for name, some in beneath.items()]
        parts = [
            b"%s %s\0%s" % (mode, name.removesuffix(b"/"), digest)
            for name, mode, digest in sorted(entries)
        ]
        return self._add(b"tree", b"".join(parts))

    def _add(self, kind: bytes, content: bytes) -> bytes:
        raw = b"%s %d\0%s" % (kind, len(content), content)
        digest = hashlib.sha1(raw, usedforsecurity=False)
        name = digest.hexdigest()
        self.files[f"{name[:2]}/{name[2:]}"] = zlib.compress(raw, 1)
        return digest.digest()
