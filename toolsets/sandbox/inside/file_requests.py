"""Reads and writes the files inside a sandbox, for the host: those of a container image.

The sandbox confines the access. Relative paths begin at the workspace; absolute ones may lead
anywhere in the image. The size of each answer is limited, so a long walk or a large file takes
several.
"""

from __future__ import annotations

import binascii
import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import IO, Any

_MAX_ENTRIES = 2000
_MAX_CONTENT_BYTES = 512 << 10
_BINARY_PROBE_BYTES = 8192
_MAX_SUMMED_BYTES = 64 << 20
"""Maximum bytes of one request for checksums; one larger file is summed alone."""
_PIECE_BYTES = 1 << 20
_MAX_DEPTH = 255
UNREADABLE = "!"
"""The mark of a directory whose entries cannot be read."""
UNNAMED = "\ufffd"
"""The character that begins a byte which is not UTF-8; see `exact_text`."""

Entry = tuple[str, str, int]
"""A path, its kind and its size in bytes."""


class FileRequests:
    """Answers requests about files. An error is an answer, too."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._writing: tuple[int, str] | None = None
        """The descriptor and the path of a file that is written in several parts."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one request, as `toolsets.sandbox.image_files` makes them."""
        try:
            return getattr(self, "_" + request["op"])(request)  # type: ignore[no-any-return]
        except OSError as error:
            return {"error": error.errno or errno.EIO}

    def _read(self, request: dict[str, Any]) -> dict[str, Any]:
        fd = self._open(self._path(request))
        try:
            os.lseek(fd, request["offset"], os.SEEK_SET)
            raw = b""
            size = min(request["size"], _MAX_CONTENT_BYTES)
            while len(raw) < size and (piece := os.read(fd, size - len(raw))):
                raw += piece
            return {"contents": [[0, _encode(raw)]]}
        finally:
            os.close(fd)

    def _write(self, request: dict[str, Any]) -> dict[str, Any]:
        """Write a part of a file; the last part replaces the file, so it is never half written."""
        path = os.path.realpath(self._path(request))
        mode = 0o644
        if os.path.lexists(path):
            mode = os.lstat(path).st_mode
            if not stat.S_ISREG(mode):
                raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "")
            mode &= 0o777
        if request["is_first"]:
            self._give_up()
            os.makedirs(os.path.dirname(path), exist_ok=True)
            name = f".{os.urandom(8).hex()}.tmp"
            temporary = os.path.join(os.path.dirname(path), name)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            self._writing = (os.open(temporary, flags, mode), temporary)
        if self._writing is None:
            raise OSError(errno.EINVAL, "")
        fd, temporary = self._writing
        try:
            view = memoryview(binascii.a2b_base64(request["content"]))
            while view:
                view = view[os.write(fd, view) :]
            if request["is_last"]:
                os.fchmod(fd, mode)
                os.rename(temporary, path)
                os.close(fd)
                self._writing = None
        except OSError:
            self._give_up()
            raise
        return {}

    def _give_up(self) -> None:
        if self._writing is not None:
            fd, temporary = self._writing
            self._writing = None
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def _list(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of a directory after the one with the key `after`."""
        prefix = self._prefix(request["path"])
        entries = _entries(self._path(request), prefix)
        if request["after"] is not None:
            entries = [entry for entry in entries if _key(entry) > request["after"]]
        return {"entries": entries[:_MAX_ENTRIES], "more": len(entries) > _MAX_ENTRIES}

    def _walk(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the entries beneath a directory in the order of their paths, after `after`."""
        top, prefix = self._path(request), self._prefix(request["path"])
        status = os.stat(top)
        if stat.S_ISREG(status.st_mode):
            return {"entries": [(prefix.rstrip("/"), "file", status.st_size)], "more": False}
        entries: list[Entry] = []
        for entry in _walk_tree(top, prefix, request["after"]):
            if len(entries) == _MAX_ENTRIES:
                return {"entries": entries, "more": True}
            entries.append(entry)
        return {"entries": entries, "more": False}

    def _tree(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the entries as `_walk`, with a mark each that changes with the file.

        Paths are relative to the directory. The contents of directories called `.git` are left out,
        unless the request has `with_git`. Names are those of `exact_text`.
        """
        top = self._path(request)
        closed = None if request["with_git"] else ".git"
        entries: list[Entry] = []
        marks: list[str] = []
        for entry in _walk_tree(top, "", request["after"], closed=closed, exact=True):
            if len(entries) == _MAX_ENTRIES:
                return {"entries": entries, "marks": marks, "more": True}
            entries.append(entry)
            marks.append(_mark(real_path(os.path.join(top, entry[0]))))
        return {"entries": entries, "marks": marks, "more": False}

    def _checksums(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return checksums of the first files of a list; "" for a file that cannot be read."""
        top, marks, left = self._path(request), [], _MAX_SUMMED_BYTES
        for path in request["paths"]:
            if left <= 0:
                break
            try:
                with os.fdopen(self._open(real_path(os.path.join(top, path))), "rb") as file:
                    mark = checksum(file)
                    left -= file.tell()
            except OSError:
                mark = ""
            marks.append(mark)
        return {"marks": marks}

    def _read_all(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the contents of files in a directory."""
        contents = []
        for number, path in enumerate(request["paths"]):
            with os.fdopen(self._open(os.path.join(self._path(request), path)), "rb") as file:
                contents.append([number, _encode(file.read(_MAX_CONTENT_BYTES))])
        return {"contents": contents}

    def _put(self, request: dict[str, Any]) -> dict[str, Any]:
        """Write files and links into a directory; a file without content is there already."""
        for entry in request["entries"]:
            path = os.path.join(self._path(request), entry["path"])
            if entry["target"] is not None:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                os.symlink(entry["target"], path)
                continue
            if entry["content"] is not None:
                whole = {"path": path, "is_first": True, "is_last": True}
                self._write({**whole, "content": entry["content"]})
            mode = os.lstat(path).st_mode & 0o777
            os.chmod(path, mode | 0o111 if entry["is_executable"] else mode & ~0o111)
        return {}

    def _contents(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return contents of text files with any of `wanted`, and how many paths were read."""
        wanted = [binascii.a2b_base64(literal) for literal in request["wanted"]]
        contents: list[list[Any]] = []
        used = seen = 0
        for number, path in enumerate(request["paths"]):
            try:
                fd = self._open(os.path.join(self._home, path))
            except OSError:
                seen += 1
                continue
            with os.fdopen(fd, "rb") as file:
                try:
                    raw = file.read(request["max_bytes"])
                except OSError:
                    raw = b""
            is_binary = b"\0" in raw[:_BINARY_PROBE_BYTES]
            if not is_binary and any(literal in raw for literal in wanted):
                if len(raw) > _MAX_CONTENT_BYTES:
                    contents.append([number, None])
                elif used and used + len(raw) > _MAX_CONTENT_BYTES:
                    break
                else:
                    used += len(raw)
                    contents.append([number, _encode(raw)])
            seen += 1
            request["max_total"] -= len(raw)
            if request["max_total"] < 0:
                break
        return {"contents": contents, "seen": seen, "left_bytes": max(request["max_total"], -1)}

    def _path(self, request: dict[str, Any]) -> str:
        return os.path.join(self._home, request["path"])

    def _prefix(self, path: str) -> str:
        """Return the beginning of entries' paths, which are relative inside the workspace."""
        names = [name for name in path.split("/") if name not in ("", ".")]
        if not path.startswith("/"):
            return "".join(f"{name}/" for name in names)
        whole = "".join(f"/{name}" for name in names) + "/"
        home = self._home.rstrip("/") + "/"
        return whole[len(home) :] if home != "/" and whole.startswith(home) else whole

    def _open(self, path: str) -> int:
        """Open a regular file for reading. Other files are closed again at once."""
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        mode = os.fstat(fd).st_mode
        if stat.S_ISREG(mode):
            return fd
        os.close(fd)
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "")


def _walk_tree(
    top: str, prefix: str, after: str | None, closed: str | None = None, *, exact: bool = False
) -> Iterator[Entry]:
    """Walk without following links; begin after the entry with the key `after`.

    Directories called `closed` are not walked. With `exact`, names are those of `exact_text`, and
    directories whose names are not texts are walked, too.
    """

    def entries(before: str, *, follow: bool = False) -> list[Entry]:
        directory = os.path.join(top, before[len(prefix) :])
        if exact:
            directory = real_path(directory)
        return _entries(directory, before, follow=follow, exact=exact)[::-1]

    pending: list[Entry] = []
    if after is None:
        pending = entries(prefix, follow=True)
    else:
        before = prefix
        *parents, last = after[len(prefix) :].rstrip("/").split("/")
        for name in parents:
            pending += [entry for entry in entries(before) if _key(entry) > f"{before}{name}/"]
            before += f"{name}/"
        pending += [entry for entry in entries(before) if _key(entry) > after]
        if after.endswith("/") and last != closed:
            pending += entries(f"{before}{last}/")
    while pending:
        entry = pending.pop()
        yield entry
        if closed is not None and os.path.basename(entry[0]) == closed:
            continue
        if entry[1] == "dir" and entry[0].count("/") < _MAX_DEPTH:
            pending += entries(f"{entry[0]}/")


def _entries(
    directory: str, prefix: str, *, follow: bool = True, exact: bool = False
) -> list[Entry]:
    """Return the entries of a directory in the order of the paths beneath them."""
    entries: list[Entry] = []
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | (0 if follow else os.O_NOFOLLOW))
    except OSError:
        if follow:
            raise
        return entries  # the directory vanished, or may not be read
    try:
        with os.scandir(fd) as scan:
            for item in scan:
                with contextlib.suppress(OSError):
                    status = item.stat(follow_symlinks=False)
                    # A name that is not text can be shown, though not opened.
                    name = exact_text(item.name) if exact else _text(item.name)
                    entries.append((prefix + name, *_kind(status)))
    finally:
        os.close(fd)
    return sorted(entries, key=_key)


def _kind(status: os.stat_result) -> tuple[str, int]:
    if stat.S_ISREG(status.st_mode):
        return "file", status.st_size
    if stat.S_ISDIR(status.st_mode):
        return "dir", 0
    return ("link" if stat.S_ISLNK(status.st_mode) else "other"), 0


def _mark(path: str) -> str:
    """Return the target of a link, or the `mark_of_file` of a file, a space and its ctime."""
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            return exact_text(os.readlink(path))
        if stat.S_ISDIR(status.st_mode):
            can_read = os.access(path, os.R_OK | os.X_OK, effective_ids=True)
            return "" if can_read else UNREADABLE
    except OSError:
        return ""
    if not stat.S_ISREG(status.st_mode):
        return ""
    return f"{mark_of_file(status)} {status.st_ctime_ns}"


def mark_of_file(status: os.stat_result) -> str:
    """Return who may execute a file, and when its contents were changed, in nanoseconds."""
    return f"{mark_of_mode(status.st_mode)}{status.st_mtime_ns}"


def checksum(file: IO[bytes]) -> str:
    """Return the CRC-32 of a file's contents as text."""
    value = 0
    while piece := file.read(_PIECE_BYTES):
        value = binascii.crc32(piece, value)
    return f"{value:08x}"


def exact_text(name: str) -> str:
    """Return a name, or a link's target, as a text that is unique for its bytes.

    A name that is not UTF-8, or has U+FFFD itself, has U+FFFD and two digits for each such byte.
    """
    raw = os.fsencode(name)
    marked = raw.decode("utf-8", "surrogateescape").replace(UNNAMED, "\udcef\udcbf\udcbd")
    if marked.isascii() or not any(map(_is_byte, marked)):
        return marked
    return "".join(f"{UNNAMED}{ord(one) & 0xFF:02x}" if _is_byte(one) else one for one in marked)


def _is_byte(character: str) -> bool:
    return "\udc80" <= character <= "\udcff"


def real_path(path: str) -> str:
    """Return the path of a file that `exact_text` names."""
    if UNNAMED not in path:
        return path
    head, *parts = path.split(UNNAMED)
    raw = (bytes.fromhex(part[:2]) + part[2:].encode() for part in parts)
    return os.fsdecode(head.encode() + b"".join(raw))


def _text(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "replace")


def mark_of_mode(mode: int) -> str:
    """Return who may execute a file: its owner, others only, or nobody."""
    return "x" if mode & 0o100 else "o" if mode & 0o111 else "-"


def _key(entry: Entry) -> str:
    # "a.txt" sorts before "a/b": directories are compared with a slash at their end.
    path, kind, _ = entry
    return f"{path}/" if kind == "dir" else path


def _encode(raw: bytes) -> str:
    return binascii.b2a_base64(raw, newline=False).decode()
