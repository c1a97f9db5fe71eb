"""What the scan of a dataset found, kept in the run directory for the next start.

`dataset.idx` is a digest of all that follows, a line of JSON, then the offsets, occurrences and
keys of a `Scan`. It is derived and can be deleted at any time. It counts only for the same bytes
of the dataset, which are read and hashed at each start, neither size nor time being proof; for the
same rules of reading rows; and for the version of the program that wrote it. A torn or damaged
file has another digest, and the dataset is then scanned anew.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import fields
from hashlib import blake2b, file_digest
from importlib import metadata
from pathlib import Path
from typing import Any, TypedDict, Unpack

import orjson
from pydantic import BaseModel

from runs.dataset.lines import is_as_read
from runs.dataset.row import RowRules
from runs.dataset.scan import Scan, scan
from runs.shards import Shard
from runs.store.files import replace_file
from runs.tasks import BadRow

NAME = "dataset.idx"

_FORMAT = 2
"""Raised when rows are read or identified in another way, or the file is laid out in another."""

_DIGEST_BYTES = 32
_IN_THE_FILE = (
    *("sha256", "all_rows", "all_bad", "rows", "size", "content_digest", "may_go_on"),
    "setup_columns",
)
"""What the line of JSON says of a scan, beside its bad rows."""


class Asked(TypedDict):
    """What decides, beside the dataset, what a scan finds; the arguments of `scan`."""

    max_samples: int | None
    rules: RowRules
    num_samples: int
    shard: Shard | None


def scan_with(kept: Path, path: Path, **asked: Unpack[Asked]) -> Scan:
    """Scan a dataset, or take what `kept` holds of its scan. Writes nothing.

    Raises `DatasetError` where nothing in it is usable.
    """
    return load_scan(kept, path, **asked) or scan(path, **asked)


def save_scan(kept: Path, found: Scan) -> None:
    """Write `found` to the file `kept`, unless it holds just that. Raises `StorageError`."""
    told = orjson.dumps(
        {
            "for": _valid_for(
                max_samples=found.max_samples,
                rules=found.rules,
                num_samples=found.num_samples,
                shard=found.shard,
            ),
            "bad_rows": [list(row) for row in found.bad_rows],
            **{name: getattr(found, name) for name in _IN_THE_FILE},
        }
    )
    parts = (told, b"\n", found.offsets.tobytes(), found.occurrences.tobytes(), found.keys)
    digest = _digest(*parts)
    if _is_whole(kept, digest):
        return
    replace_file(kept, b"".join((digest, b"\n", *parts)))


def load_scan(kept: Path, path: Path, **asked: Unpack[Asked]) -> Scan | None:
    """What `kept` holds of the scan of a dataset, None where that is not what it holds."""
    if (content := _read(kept)) is None:
        return None
    said, body = content
    if said["for"] != _valid_for(**asked):
        return None
    if not is_as_read(path, said["size"], said["content_digest"], may_go_on=said["may_go_on"]):
        return None
    rows = said["rows"]
    offsets, occurrences = array("Q"), array("I")
    offsets.frombytes(body[: 8 * rows])
    occurrences.frombytes(body[8 * rows : 12 * rows])
    return Scan(
        path=path,
        bad_rows=tuple(BadRow(*row) for row in said["bad_rows"]),
        **asked,
        offsets=offsets,
        occurrences=occurrences,
        keys=body[12 * rows :],
        **{name: said[name] for name in _IN_THE_FILE},
    )


def kept_keys(kept: Path) -> bytes | None:
    """The keys of the tasks that the scan in `kept` found, whatever the dataset holds now."""
    content = _read(kept)
    return None if content is None else content[1][12 * content[0]["rows"] :]


def _read(kept: Path) -> tuple[dict[str, Any], bytes] | None:
    """The line of JSON and what follows it, None where the file is not whole."""
    try:
        content = memoryview(kept.read_bytes())
    except OSError:
        return None
    digest, rest = content[: 2 * _DIGEST_BYTES], content[2 * _DIGEST_BYTES + 1 :]
    if _digest(rest) != digest:
        return None
    told, body = bytes(rest).split(b"\n", 1)
    return orjson.loads(told), body


def _is_whole(kept: Path, digest: bytes) -> bool:
    """Whether a file has this digest, and it is right."""
    try:
        with kept.open("rb") as file:
            if file.readline() != digest + b"\n":
                return False
            return file_digest(file, _hash).hexdigest().encode() == digest
    except OSError:
        return False


def _digest(*parts: bytes | memoryview) -> bytes:
    digest = _hash()
    for part in parts:
        digest.update(part)
    return digest.hexdigest().encode()


def _hash() -> blake2b:
    return blake2b(digest_size=_DIGEST_BYTES)


def _valid_for(**asked: Unpack[Asked]) -> str:
    """A digest of all but the dataset that decides what a scan finds."""
    decides = {
        "format": [_FORMAT, sys.byteorder, _version()],
        **asked,
        "rules": {field.name: getattr(asked["rules"], field.name) for field in fields(RowRules)},
        "shard": str(asked["shard"]),
    }
    told = orjson.dumps(decides, default=_plain, option=orjson.OPT_SORT_KEYS)
    return blake2b(told, digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    match value:
        case BaseModel():
            return value.model_dump(mode="json")
        case frozenset():
            return sorted(value)
    raise TypeError


def _version() -> str:
    try:
        return metadata.version("batch-trajectories")
    except metadata.PackageNotFoundError:
        return "not installed"
