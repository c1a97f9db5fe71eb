"""The objects below a URL, by `obstore`; credentials come from the environment."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

import orjson

from batch_trajectories.basics.console import LongWork
from batch_trajectories.basics.errors import EnvironmentStop, missing_extra
from batch_trajectories.basics.process import lock_file
from batch_trajectories.basics.text import clip

log = logging.getLogger(__name__)

T = TypeVar("T")

_REQUEST_S = 10
"""Seconds for a request of a mirror: three that fail take less than a mirror may lag behind."""
_SILENT_S = 30
"""Seconds without a byte after which the transfer of a file fails."""

_TRIES = 3
_PAUSE_S = 1.0
_READ_AHEAD = 16
_CHUNK_BYTES = 8 << 20
_MAX_MESSAGE_CHARS = 300

_QUERY = re.compile(r"(https?://[^\s?]*)\?[^\s)\"']*")
"""A URL with a query, which may be a signature (Azure)."""

_ANSWER = re.compile(r"<Code>(?P<code>[^<]*)</Code>(?:.*?<Message>(?P<message>[^<]*))?", re.DOTALL)
"""The error in the answer of a bucket, which may quote more of the request."""


class BucketFailed(EnvironmentStop):
    """A request to the bucket failed."""


class StoredFile(NamedTuple):
    """An object of a bucket."""

    name: str
    """The name of the object below the URL of the bucket."""
    size: int
    version: str
    """The ETag, which changes with the content."""


class Bucket:
    """The objects below a URL. Its methods can be called in any thread."""

    def __init__(self, url: str, *, of_files: bool = False) -> None:
        """`of_files`: the bucket stores large objects, and failed transfers are retried.

        Raises `ConfigError` without the extra, and `BucketFailed` for a URL that it cannot use.
        """
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise missing_extra(url, "mirror") from None
        self.url = url
        self._obstore = obstore
        more: dict[str, Any] = {}
        if url.startswith("file:"):
            more["mkdir"] = True
        else:
            # Only an endpoint that the user names, as a server in their network, can be http.
            more["client_options"] = {"allow_http": True}
            if of_files:
                silent = f"{_SILENT_S}s"
                more["client_options"] |= {"read_timeout": silent, "connect_timeout": silent}
                more["client_options"]["timeout"] = "1d"  # the default is too short for large ones
                more["retry_config"] = {"max_retries": 4}
            else:
                # Retries are ours: they count against the lag that a run allows.
                more["retry_config"] = {"max_retries": 0}
                more["client_options"]["timeout"] = f"{_REQUEST_S}s"
        try:
            self._store = from_url(url, **more)
        except (obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise self._to_error(error) from None

    def create(self, name: str, content: bytes) -> bool:
        """Create an object; False if there is one of this name. Raises `BucketFailed`."""
        try:
            self._obstore.put(self._store, name, content, mode="create", use_multipart=False)
        except self._obstore.exceptions.AlreadyExistsError as error:
            # Also said of other conflicts: two writes at once, a container that is removed.
            if self.read(name) is None:
                conflict = self._to_error(error)
                raise BucketFailed(f"{conflict} (a conflict: there is no such object)") from None
            return False
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise self._to_error(error) from None
        return True

    def read(self, name: str) -> bytes | None:
        """The content of an object, None if there is none. Raises `BucketFailed`."""
        try:
            return bytes(self._obstore.get(self._store, name).bytes())
        except FileNotFoundError:
            return None
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise self._to_error(error) from None

    def read_after(self, directory: str, name: str) -> Iterator[tuple[str, bytes]]:
        """Yield names and contents of the objects in a directory that sort after `name`, in order.

        Reads some ahead. Raises `BucketFailed`.
        """
        begin = f"{directory}/{name}"
        try:
            found = self._obstore.list(self._store, prefix=directory, offset=begin)
            listed = found.collect()
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise self._to_error(error) from None
        # Azure also lists the name from which it begins.
        paths = sorted(path for path in (str(entry["path"]) for entry in listed) if path > begin)
        with ThreadPoolExecutor(_READ_AHEAD) as pool:
            for first in range(0, len(paths), _READ_AHEAD):
                few = paths[first : first + _READ_AHEAD]
                for path, content in zip(few, pool.map(self.read, few), strict=True):
                    if content is None:
                        raise BucketFailed(f"{self.url}/{path}: it was removed")
                    yield path.rpartition("/")[2], content

    # Files.

    def list_files(self) -> list[StoredFile]:
        """All objects below the URL, by name. Raises `BucketFailed`."""
        try:
            listed = self._obstore.list(self._store).collect()
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise self._to_error(error) from None
        return sorted(map(_to_stored_file, listed))

    def find_file(self, name: str) -> StoredFile | None:
        """An object; None if there is none. Raises `BucketFailed`."""
        try:
            return _to_stored_file(self._obstore.head(self._store, name))
        except FileNotFoundError:
            return None
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise self._to_error(error) from None

    def download(self, file: StoredFile, path: Path) -> bool:
        """Download an object to a path. Return False if the object has changed or is gone.

        Raises `BucketFailed`, and `OSError` if the path cannot be written.
        """
        exceptions = self._obstore.exceptions
        try:
            got = self._obstore.get(self._store, file.name, options={"if_match": file.version})
            chunks = iter(got.stream(min_chunk_size=_CHUNK_BYTES))
        except (FileNotFoundError, exceptions.PreconditionError):
            return False
        except (exceptions.BaseError, OSError, ValueError) as error:
            raise self._to_error(error) from None
        with path.open("wb") as target:
            while True:
                try:
                    chunk = next(chunks, None)
                except (exceptions.BaseError, OSError, ValueError) as error:
                    raise self._to_error(error) from None
                if chunk is None:
                    return True
                target.write(chunk)

    def upload(self, name: str, content: Path | bytes) -> None:
        """Upload an object, whole or not at all. Raises `BucketFailed`."""
        try:
            self._obstore.put(self._store, name, content)
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise self._to_error(error) from None

    def remove(self, names: Iterable[str]) -> None:
        """Delete objects; a missing one is no error. Raises `BucketFailed`."""
        for name in names:
            try:
                self._obstore.delete(self._store, name)
            except FileNotFoundError:
                continue
            except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
                raise self._to_error(error) from None

    def _to_error(self, error: Exception) -> BucketFailed:
        """The error as `BucketFailed`, without the library's repetitions and without secrets."""
        message = str(error).partition("Debug source")[0]
        if answer := _ANSWER.search(message):
            reason = ": ".join(filter(None, answer.groups()))
            message = f"{message.partition('<')[0].strip().rstrip(':')}: {reason}"
        message = clip(" ".join(_QUERY.sub(r"\1?…", message).split()), max_chars=_MAX_MESSAGE_CHARS)
        return BucketFailed(f"{self.url}: {message}")


def call_with_retries(call: Callable[[], T]) -> T:
    """Call a function up to three times, until it does not raise `BucketFailed`.

    Busy buckets refuse some requests.
    """
    for _ in range(_TRIES - 1):
        try:
            return call()
        except BucketFailed as error:
            log.warning("A request to the bucket failed and is sent again: %s", error)
            time.sleep(_PAUSE_S)
    return call()


def _to_stored_file(meta: Any) -> StoredFile:
    version = meta["e_tag"] or f"{meta['size']}-{meta['last_modified'].timestamp()}"
    return StoredFile(str(meta["path"]), int(meta["size"]), str(version))


# Objects of a bucket as files of a directory of this machine.


def find_files(url: str) -> tuple[Bucket, list[StoredFile]]:
    """The bucket of a URL, and the object at this URL or else all objects below it.

    Raises `ConfigError` without the extra, and `BucketFailed`.
    """
    parent, _, name = url.rstrip("/").rpartition("/")
    if not parent.endswith("/"):  # else it is a whole bucket
        bucket = Bucket(parent, of_files=True)
        if not url.endswith("/") and (file := bucket.find_file(name)) is not None:
            return bucket, [file]
    below = Bucket(url.rstrip("/"), of_files=True)
    return below, [file for file in below.list_files() if file.name]


def cache_directory(url: str, kind: str) -> Path:
    """The directory in the user's cache for files that are downloaded from a URL."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = blake2b(url.encode(), digest_size=6).hexdigest()
    return cache / "batch-trajectories" / kind / key


def download_all(url: str, directory: Path) -> None:
    """Make a directory hold the files at a URL; only changed files are downloaded.

    Two files beside the directory hold a lock, and the version of each file that was downloaded:
    after a crash the next call continues. Files that did not come from the URL stay. Raises
    `ConfigError` without the extra, `BucketFailed`, and `OSError`.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    with lock_file(directory.with_name(f"{directory.name}.lock")):
        bucket, files = find_files(url)
        note = _note_path(directory)
        had: dict[str, str] = _read_note(note)["files"]
        there = {_check_name(url, file.name): file for file in files}
        for name in had.keys() - there.keys():
            (directory / name).unlink(missing_ok=True)
        has = {name: version for name, version in had.items() if name in there}
        lacking = [name for name, file in there.items() if has.get(name) != file.version]
        total = sum(there[name].size for name in lacking)
        with LongWork(f"bringing {url}", total=total, unit="B") as work:
            for name in lacking:
                path = directory / name
                path.parent.mkdir(parents=True, exist_ok=True)
                new = path.with_name(f".{path.name}.tmp")
                if not bucket.download(there[name], new):
                    raise BucketFailed(f"{url}: {name} changed while it was brought; try again")
                new.replace(path)
                has[name] = there[name].version
                _write_note(note, has, is_whole=False)
                work.advance(there[name].size)
        _write_note(note, has, is_whole=True)


def is_complete(directory: Path) -> bool:
    """Whether all files of a directory were downloaded once; see `download_all`."""
    return bool(_read_note(_note_path(directory))["is_whole"])


def _note_path(directory: Path) -> Path:
    """The file with the versions of downloaded files, and whether all were there once."""
    return directory.with_name(f"{directory.name}.json")


def _read_note(note: Path) -> dict[str, Any]:
    return orjson.loads(note.read_bytes()) if note.exists() else {"files": {}, "is_whole": False}


def _write_note(note: Path, versions: dict[str, str], *, is_whole: bool) -> None:
    new = note.with_suffix(".tmp")
    new.write_bytes(orjson.dumps({"files": versions, "is_whole": is_whole}))
    new.replace(note)


def _check_name(url: str, name: str) -> str:
    """Return the name if it can be that of a file in a directory. Raises `BucketFailed`."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts:
        raise BucketFailed(f"{url}: {name!r} cannot be the name of a file")
    return name
