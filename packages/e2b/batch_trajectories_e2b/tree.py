"""Compares, packs and unpacks directory trees; also the program that does so on a machine.

The same code runs here and, as source text, on the machine, so it needs nothing but Python 3.8. An
archive may come from a machine on which anything ran: unpacking writes only below its directory and
follows no symlink.

A tree is described by a dict from paths, relative and with "/", to lists whose first item is "dir",
"file" or "link". Other kinds of files, such as sockets, are left out.
"""

from __future__ import annotations

import errno
import io
import json
import os
import secrets
import shutil
import stat
import sys
import tarfile
from typing import IO, Any, BinaryIO, Dict, List  # noqa: UP035 - for machines with Python 3.8

CONTROL = "control.json"
"""The first member of an archive; the others are files below `tree/`."""
_TREE = "tree/"
_MAX_NAME_BYTES = 255
_MAX_DEPTH = 255
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a FIFO that has replaced a file would wait for a writer.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CHUNK_BYTES = 1 << 20

Tree = Dict[str, List[Any]]  # noqa: UP006 - see above


class TreeError(Exception):
    """An archive names what it must not, or is larger than allowed."""


def scan(root: str) -> Tree:
    """Return the description of the tree in `root`; entries that vanish meanwhile are left out."""
    found: Tree = {}
    pending = [""]
    while pending:
        below = pending.pop()
        try:
            with os.scandir(os.path.join(root, below)) as listing:
                entries = list(listing)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENAMETOOLONG):
                continue
            raise
        for entry in entries:
            path = below + entry.name
            described = describe(os.path.join(root, path))
            if described is not None:
                found[path] = described
                if described[0] == "dir":
                    pending.append(path + "/")
    return found


def describe(path: str) -> list[Any] | None:
    """Return the description of one path; None if it is missing or of another kind."""
    try:
        status = os.lstat(path)
        mode = stat.S_IMODE(status.st_mode) & 0o777
        if stat.S_ISDIR(status.st_mode):
            return ["dir", mode]
        if stat.S_ISLNK(status.st_mode):
            return ["link", os.readlink(path)]
        if stat.S_ISREG(status.st_mode):
            times = [status.st_mtime_ns, status.st_ctime_ns]
            return ["file", mode, status.st_size, *times, status.st_ino]
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            raise
    return None


def differences(before: Tree, now: Tree) -> tuple[list[str], list[str]]:
    """Return the paths that are new or changed, and those that are gone, each sorted."""
    changed = sorted(path for path in now if before.get(path) != now[path])
    return changed, sorted(path for path in before if path not in now)


def pack(
    root: str, tree: Tree, changed: list[str], gone: list[str], out: IO[bytes], **facts: Any
) -> None:
    """Write an archive of the changed paths of a described tree to a binary file."""
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        control = json.dumps({"gone": gone, **facts}).encode()
        member = tarfile.TarInfo(CONTROL)
        member.size = len(control)
        archive.addfile(member, io.BytesIO(control))
        for path in changed:
            _add(archive, root, path, tree[path])


def _add(archive: tarfile.TarFile, root: str, path: str, described: list[Any]) -> None:
    member = tarfile.TarInfo(_TREE + path)
    kind = described[0]
    if kind == "link":
        member.type, member.linkname = tarfile.SYMTYPE, described[1]
        archive.addfile(member)
        return
    member.mode = described[1]
    if kind == "dir":
        member.type = tarfile.DIRTYPE
        archive.addfile(member)
        return
    member.size = described[2]
    member.pax_headers = {"BT.mtime_ns": str(described[3])}
    try:
        file = os.open(os.path.join(root, path), _READ)
    except OSError as error:
        # It vanished, was replaced, or is not readable: the next comparison sees what it is then.
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.ENXIO):
            return
        raise
    with os.fdopen(file, "rb") as opened:
        archive.addfile(member, _Exactly(opened, member.size))  # type: ignore[arg-type]


class _Exactly:
    """Reads a file that may be written meanwhile: as many bytes as promised, zeros at the end."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._left = file, size

    def read(self, size: int) -> bytes:
        size = min(size, self._left)
        self._left -= size
        piece = self._file.read(size)
        return piece + bytes(size - len(piece))


def unpack(
    root: str, file: BinaryIO, temporary: str, max_bytes: int
) -> tuple[dict[str, Any], list[str]]:
    """Change the tree in `root` as an archive says; return its control and the paths it holds.

    Files are written in the directory `temporary`, on the same file system, and moved. Raises
    `TreeError` for an archive that leads elsewhere or holds more than `max_bytes`.
    """
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            first = archive.next()
            if first is None or first.name != CONTROL or first.size > max_bytes:
                raise TreeError("the archive has no description")
            control = json.loads(_contents(archive, first).read())
            remove(root, [str(path) for path in control["gone"]])
            with _Tree(root) as tree:
                paths = []
                while (member := archive.next()) is not None:
                    max_bytes -= member.size
                    if max_bytes < 0:
                        raise TreeError("the archive is larger than the workspace may be")
                    if not member.name.startswith(_TREE):
                        raise TreeError("the archive names a file outside of its tree")
                    path = member.name[len(_TREE) :]
                    tree.write(_split(path), member, archive, temporary)
                    paths.append(path)
    except (tarfile.TarError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TreeError("the archive is damaged: %s" % error) from error
    return control, paths


def remove(root: str, paths: list[str]) -> None:
    """Remove files and directories below `root`; they may be missing."""
    with _Tree(root) as tree:
        for path in sorted(paths, reverse=True):
            tree.remove(_split(path))


def _contents(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Any:
    contents = archive.extractfile(member)
    if contents is None:
        raise TreeError("the archive names no file where it should")
    return contents


def _split(path: str) -> list[str]:
    names = path.split("/")
    if len(names) > _MAX_DEPTH or any(
        name in ("", ".", "..") or "\0" in name or len(os.fsencode(name)) > _MAX_NAME_BYTES
        for name in names
    ):
        raise TreeError("the archive names %r" % path[:200])
    return names


class _Tree:
    """A directory that is changed name by name from open directories."""

    def __init__(self, root: str) -> None:
        self._root = root

    def __enter__(self) -> _Tree:
        self._top = os.open(self._root, _DIRECTORY)
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._top)

    def remove(self, names: list[str]) -> None:
        """Remove a file, or a directory with everything in it; it may be missing."""
        parent = self._parent(names, make=False)
        if parent is not None:
            try:
                _remove(names[-1], parent)
            finally:
                os.close(parent)

    def write(
        self, names: list[str], member: tarfile.TarInfo, archive: tarfile.TarFile, temporary: str
    ) -> None:
        """Make what a member of an archive holds, in place of anything else."""
        parent, name = self._parent(names, make=True), names[-1]
        assert parent is not None
        try:
            if member.isdir():
                _make_directory(name, parent, member.mode)
            elif member.issym():
                _remove(name, parent)
                os.symlink(member.linkname, name, dir_fd=parent)
            elif member.isreg():
                self._write_file(name, parent, member, archive, temporary)
            else:
                raise TreeError("the archive holds what is no file, directory or link")
        finally:
            os.close(parent)

    def _write_file(
        self,
        name: str,
        parent: int,
        member: tarfile.TarInfo,
        archive: tarfile.TarFile,
        temporary: str,
    ) -> None:
        place = os.path.join(temporary, ".tmp-" + secrets.token_hex(8))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(place, flags, 0o600), "wb") as out:
                shutil.copyfileobj(_contents(archive, member), out, _CHUNK_BYTES)
                out.flush()
                os.fchmod(out.fileno(), member.mode & 0o777)
                changed_ns = int(member.pax_headers.get("BT.mtime_ns", "0"))
                os.utime(out.fileno(), ns=(changed_ns, changed_ns))
            try:
                os.rename(place, name, dst_dir_fd=parent)
            except (IsADirectoryError, NotADirectoryError, FileExistsError):
                _remove(name, parent)
                os.rename(place, name, dst_dir_fd=parent)
        except BaseException:
            try:
                os.unlink(place)
            except FileNotFoundError:
                pass
            raise

    def _parent(self, names: list[str], make: bool) -> int | None:
        """Open the directory of a path; None if it is missing and not to be made."""
        at = os.dup(self._top)
        for name in names[:-1]:
            try:
                try:
                    below = os.open(name, _DIRECTORY, dir_fd=at)
                except OSError as error:
                    if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                        raise
                    if not make:
                        return None
                    _make_directory(name, at, 0o755)
                    below = os.open(name, _DIRECTORY, dir_fd=at)
            finally:
                os.close(at)
            at = below
        return at


def _make_directory(name: str, parent: int, mode: int) -> None:
    mode = mode & 0o777 | 0o700  # else its owner could neither fill nor remove it
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        os.mkdir(name, mode, dir_fd=parent)
    else:
        if not stat.S_ISDIR(status.st_mode):
            os.unlink(name, dir_fd=parent)
            os.mkdir(name, mode, dir_fd=parent)
    opened = os.open(name, _DIRECTORY, dir_fd=parent)
    try:
        os.fchmod(opened, mode)
    finally:
        os.close(opened)


def _remove(name: str, parent: int) -> None:
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        try:
            opened = os.open(name, _DIRECTORY, dir_fd=parent)
        except NotADirectoryError:
            raise PermissionError(errno.EACCES, "cannot be removed", name) from None
        try:
            os.fchmod(opened, 0o700)
            for entry in os.listdir(opened):
                _remove(entry, opened)
        finally:
            os.close(opened)
        os.rmdir(name, dir_fd=parent)


# What runs on the machine: `python3 -c SOURCE push|pull STATE ROOT HAVE MAX_BYTES`. HAVE is the
# number of the exchange that both sides have finished, so a request that is repeated because its
# answer was lost does the same again.


def _known(state: str, number: int) -> Tree | None:
    """What both sides know of the tree since an exchange; None if that was lost."""
    try:
        with open(os.path.join(state, "known-%d.json" % number)) as file:
            known: Tree = json.load(file)
            return known
    except (OSError, ValueError):
        return {} if number == 0 else None


def _keep(state: str, number: int, known: Tree) -> None:
    os.makedirs(state, exist_ok=True)
    with open(os.path.join(state, "known-%d.json" % number), "w") as file:
        json.dump(known, file)
    for name in os.listdir(state):
        digits = name.partition("-")[2].partition(".")[0]
        if digits.isdigit() and int(digits) < number - 1:
            os.unlink(os.path.join(state, name))


def _push(state: str, root: str, have: int, max_bytes: int) -> dict[str, Any]:
    known = _known(state, have)
    os.makedirs(root, exist_ok=True)
    with open(os.path.join(state, "in-%d.tar" % (have + 1)), "rb") as file:
        control, paths = unpack(root, file, state, max_bytes)
    if known is not None:
        for path in control["gone"]:
            known.pop(path, None)
        for path in paths:
            described = describe(os.path.join(root, path))
            if described is not None:
                known[path] = described
        _keep(state, have + 1, known)
    return {"number": have + 1}


def _pull(state: str, root: str, have: int, max_bytes: int) -> dict[str, Any]:
    known, now = _known(state, have), scan(root)
    changed, gone = differences(known or {}, now)
    if known is not None and not changed and not gone:
        return {"number": have, "bytes": 0}
    wanted = sum(now[path][2] for path in changed if now[path][0] == "file")
    if wanted > max_bytes:
        raise TreeError("the workspace holds %d bytes more than it may" % (wanted - max_bytes))
    os.makedirs(state, exist_ok=True)
    # All paths, if it is not known which of them the other side has.
    facts = {} if known is not None else {"all": sorted(now)}
    with open(os.path.join(state, "out-%d.tar" % (have + 1)), "wb") as file:
        pack(root, now, changed, gone, file, **facts)
        size = file.tell()
    _keep(state, have + 1, now)
    return {"number": have + 1, "bytes": size}


def main() -> None:
    """Do what the command line says, and print the answer as JSON."""
    act = {"push": _push, "pull": _pull}[sys.argv[1]]
    try:
        answer = act(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    except TreeError as error:
        answer = {"refused": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
