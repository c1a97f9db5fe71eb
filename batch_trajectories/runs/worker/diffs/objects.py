"""Objects of git, named by SHA-1, as files of a directory of objects (gitrepository-layout(5))."""

from __future__ import annotations

import hashlib
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from toolsets.sandbox.image_files import FileSource

EMPTY_TREE = hashlib.sha1(b"tree 0\0", usedforsecurity=False).hexdigest()
_DIRECTORY = b"40000"


class Blob(NamedTuple):
    """A file or link in a tree."""

    mode: bytes
    """As trees have it: octal digits."""
    content: bytes
    """Of a link, its target."""


class Objects(FileSource):
    """Blobs and trees, to be copied to a directory of objects."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        """By their paths in the directory."""

    def add_tree(self, blobs: Mapping[str, Blob]) -> str:
        """Add a tree with files by their paths; return its name."""
        return self._tree(blobs).hex()

    def read_all(self, top: str, paths: Sequence[str]) -> dict[str, bytes]:
        """See `FileSource`."""
        del top
        return {path: self.files[path] for path in paths}

    def read_bytes(self, path: str, max_bytes: int) -> bytes:
        """See `FileSource`."""
        return self.files["/".join(path.rsplit("/", 2)[1:])][:max_bytes]

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
