"""The scan of a dataset, saved in the run directory for the next start.

`dataset.idx` is a digest of all that follows, a header (one line of JSON), then the offsets,
occurrences and keys of a `Scan`. It is derived and can be deleted at any time. It is valid only
for the same bytes of the dataset (which are hashed at each start: size and time prove nothing),
the same `ScanOptions`, and the version of the program that wrote it: a start of another version
scans again. Commands that only read a run use the scan of its last start, of any version. If the
file is torn or damaged, the digest differs and the dataset is scanned again.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import msgspec
import orjson
from pydantic import BaseModel

from batch_trajectories.basics.versions import installed_version
from batch_trajectories.dataset.lines import is_unchanged
from batch_trajectories.dataset.scan import Scan, ScanOptions, scan
from batch_trajectories.records.files import replace_file
from batch_trajectories.records.tasks import BadRow

_FORMAT = 7
"""The version of the layout; raise it when rows are read or identified in another way, too."""

_DIGEST_BYTES = 32
_HEADER_FIELDS = (
    "sha256",
    "all_rows",
    "all_bad",
    "rows",
    "size",
    "content_digest",
    "may_continue",
    "setup_columns",
    "asked",
)
"""Fields of a scan in the header, beside its bad rows."""


def cached_scan(cache: Path, path: Path, **options: Unpack[ScanOptions]) -> Scan:
    """The scan of a dataset, from the file `cache` if it is valid. Writes nothing.

    Raises `DatasetError` if the dataset has no usable row.
    """
    return load_scan(cache, path, **options) or scan(path, **options)


def last_scan(
    cache: Path, path: Path, dataset: Mapping[str, Any], **options: Unpack[ScanOptions]
) -> Scan:
    """The scan of the last start of a run, by any version of the program. Writes nothing.

    `dataset` is the entry of its run.json; if `cache` does not match it, the dataset is scanned.
    Raises `DatasetError` if it has no usable row.
    """
    saved = _read(cache)
    if saved is not None and saved.is_current(dataset, options["num_samples"]):
        found = saved.to_scan(path, options)
        if found is not None:
            return found
    return cached_scan(cache, path, **options)


def save_scan(cache: Path, made: Scan) -> None:
    """Write `made` to the file `cache`, unless it is there already. Raises `StorageError`."""
    header = orjson.dumps(
        {
            "for": _options_digest(**made.options),
            "bad_rows": [list(row) for row in made.bad_rows],
            "occurrences": len(made.occurrences),
            **{name: getattr(made, name) for name in _HEADER_FIELDS},
        }
    )
    parts = (header, b"\n", made.offsets.tobytes(), made.occurrences.tobytes(), made.keys)
    digest = _digest(*parts)
    if not _has_digest(cache, digest):
        replace_file(cache, b"".join((digest, b"\n", *parts)))


def load_scan(cache: Path, path: Path, **options: Unpack[ScanOptions]) -> Scan | None:
    """The scan of a dataset in the file `cache`; None if the file is not valid for the dataset."""
    saved = _read(cache)
    if saved is None or saved.header["for"] != _options_digest(**options):
        return None
    return saved.to_scan(path, options)


def cached_keys(cache: Path) -> bytes | None:
    """The keys of the tasks of the scan in `cache`, whatever the dataset holds now."""
    saved = _read(cache)
    return None if saved is None else saved.keys


class _SavedScan(NamedTuple):
    """The content of a cache file, whose digest matches."""

    header: dict[str, Any]
    body: bytes
    """The offsets, occurrences and keys."""

    @property
    def keys(self) -> bytes:
        """The keys of the tasks."""
        return self.body[self._keys_offset :]

    @property
    def _keys_offset(self) -> int:
        rows: int = self.header["rows"]
        occurrences: int = self.header.get("occurrences", rows)  # older files have one per row
        return 8 * rows + 4 * occurrences

    def is_current(self, dataset: Mapping[str, Any], num_samples: int) -> bool:
        """Whether the file has the current form, and the scan is of this dataset of a run.json."""
        header = self.header
        if not {*_HEADER_FIELDS, "bad_rows", "occurrences"} <= header.keys():
            return False
        return (
            dataset.get("sha256") == header["sha256"]
            and dataset.get("rows") == header["rows"]
            and dataset.get("bad_rows") == len(header["bad_rows"])
            and len(self.keys) == 16 * header["rows"] * num_samples
        )

    def to_scan(self, path: Path, options: ScanOptions) -> Scan | None:
        """The scan; None if the dataset at `path` has changed since."""
        header = self.header
        size, digest = header["size"], header["content_digest"]
        if not is_unchanged(path, size, digest, may_continue=header["may_continue"]):
            return None
        offsets_end = 8 * header["rows"]
        offsets, occurrences = array("Q"), array("I")
        offsets.frombytes(self.body[:offsets_end])
        occurrences.frombytes(self.body[offsets_end : self._keys_offset])
        return Scan(
            path=path,
            bad_rows=tuple(BadRow(*row) for row in header["bad_rows"]),
            **options,
            offsets=offsets,
            occurrences=occurrences,
            keys=self.keys,
            **{name: header[name] for name in _HEADER_FIELDS},
        )


def _read(cache: Path) -> _SavedScan | None:
    """The content of a cache file; None if the file is missing or damaged."""
    if not cache.is_file():  # reading a pipe would never end
        return None
    try:
        content = memoryview(cache.read_bytes())
    except OSError:
        return None
    digest, rest = content[: 2 * _DIGEST_BYTES], content[2 * _DIGEST_BYTES + 1 :]
    if _digest(rest) != digest:
        return None
    header, body = bytes(rest).split(b"\n", 1)
    return _SavedScan(orjson.loads(header), body)


def _has_digest(cache: Path, digest: bytes) -> bool:
    """Whether a file begins with this digest, and its content really has it."""
    if not cache.is_file():
        return False
    try:
        with cache.open("rb") as file:
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


def _options_digest(**options: Unpack[ScanOptions]) -> str:
    """A digest of everything that the result of a scan depends on, besides the dataset."""
    rules = options["rules"]
    decisive = {
        "format": [_FORMAT, sys.byteorder, installed_version("batch-trajectories")],
        **options,
        "rules": msgspec.structs.asdict(rules),
        "shard": str(options["shard"]),
    }
    text = orjson.dumps(decisive, default=_plain, option=orjson.OPT_SORT_KEYS)
    return blake2b(text, digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    match value:
        case BaseModel():
            return dict(value)  # pydantic would first build a serializer, in 7 ms
        case frozenset() | set():
            return sorted(value)
        case Path():
            return str(value)
    raise TypeError
