"""Objects of a bucket as files of a directory of this machine."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Any

import orjson

from batch_trajectories.basics.buckets.bucket import Bucket, BucketFailed, StoredFile
from batch_trajectories.basics.console import LongWork
from batch_trajectories.basics.locked import locked


def files_at(url: str) -> tuple[Bucket, list[StoredFile]]:
    """The object at a URL, or else those below it, none if there are none.

    Raises `ConfigError` without the extra, and `BucketFailed`.
    """
    parent, _, name = url.rstrip("/").rpartition("/")
    if not parent.endswith("/"):  # else it is a whole bucket
        bucket = Bucket(parent, of_files=True)
        if not url.endswith("/") and (file := bucket.file(name)) is not None:
            return bucket, [file]
    below = Bucket(url.rstrip("/"), of_files=True)
    return below, [file for file in below.files() if file.name]


def cache_of(url: str, kind: str) -> Path:
    """The directory, below the user's cache, for what is brought from a URL."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = blake2b(url.encode(), digest_size=6).hexdigest()
    return cache / "batch-trajectories" / kind / key


def bring_all(url: str, directory: Path) -> None:
    """Have the files of a directory be those at a URL; only those that changed are brought.

    Files beside the directory hold a lock and what was brought. Files that did not come from there
    stay. Raises `ConfigError` without the extra, `BucketFailed`, and `OSError`.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    with locked(directory.with_name(f"{directory.name}.lock")):
        bucket, files = files_at(url)
        note = _note_of(directory)
        had: dict[str, str] = _read(note)["files"]
        there = {_checked(url, file.name): file for file in files}
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
                if not bucket.bring(there[name], new):
                    raise BucketFailed(f"{url}: {name} changed while it was brought; try again")
                new.replace(path)
                has[name] = there[name].version
                _write(note, has, is_whole=False)
                work.advance(there[name].size)
        _write(note, has, is_whole=True)


def is_whole(directory: Path) -> bool:
    """Whether `bring_all` has brought all files of a directory."""
    return bool(_read(_note_of(directory))["is_whole"])


def _note_of(directory: Path) -> Path:
    """The version of each of its files, and whether they were all there once."""
    return directory.with_name(f"{directory.name}.json")


def _read(note: Path) -> dict[str, Any]:
    return orjson.loads(note.read_bytes()) if note.exists() else {"files": {}, "is_whole": False}


def _write(note: Path, versions: dict[str, str], *, is_whole: bool) -> None:
    new = note.with_suffix(".tmp")
    new.write_bytes(orjson.dumps({"files": versions, "is_whole": is_whole}))
    new.replace(note)


def _checked(url: str, name: str) -> str:
    """The name, which must be that of a file inside. Raises `BucketFailed`."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts:
        raise BucketFailed(f"{url}: {name!r} cannot be the name of a file")
    return name
