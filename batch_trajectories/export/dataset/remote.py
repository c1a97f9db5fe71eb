"""A dataset at a URL: made in a temporary directory, then sent whole, its manifest last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson

from batch_trajectories.basics.buckets.bucket import Bucket
from batch_trajectories.basics.buckets.files import bring_all
from batch_trajectories.basics.console import LongWork
from batch_trajectories.basics.errors import ConfigError, machine_failures_as_stops
from batch_trajectories.export.dataset.directory import (
    MANIFEST,
    paths_in,
    read_manifest,
    say_removed,
    under_way,
)


@contextmanager
def dataset_at(url: str, *, writes: bool) -> Iterator[Path]:
    """A directory for the dataset at a URL; with `writes` it replaces that at the end.

    Else it holds that one. In the bucket, the manifest says that the dataset is unfinished until
    all files are there. Raises `ConfigError` where the URL has other objects, and `BucketFailed`.
    """
    bucket = Bucket(url.rstrip("/"), of_files=True)
    with TemporaryDirectory(prefix="batch-trajectories-") as name, machine_failures_as_stops():
        directory = Path(name) / "dataset"
        if not writes:
            bring_all(url, directory)
            yield directory
            return
        old = _paths_at(bucket)
        yield directory
        if (directory / MANIFEST).exists():  # else there was nothing to export
            _send(bucket, directory, old)


def _paths_at(bucket: Bucket) -> set[str]:
    """The files of the dataset at a URL. Raises `ConfigError` if something else is there."""
    content = bucket.read(MANIFEST)
    if content is None:
        if there := bucket.files():
            raise ConfigError(
                f"{bucket.url}: holds {there[0].name} but no dataset; name another --output"
            )
        return set()
    with TemporaryDirectory(prefix="batch-trajectories-") as directory:
        Path(directory, MANIFEST).write_bytes(content)
        return paths_in(read_manifest(Path(directory)))


def _send(bucket: Bucket, directory: Path, old: set[str]) -> None:
    paths = paths_in(read_manifest(directory))
    gone = old - paths
    total = sum((directory / path).stat().st_size for path in paths)
    with LongWork(f"sending {bucket.url}", total=total, unit="B") as work:
        bucket.send(MANIFEST, orjson.dumps(under_way(old | paths)))
        for path in sorted(paths):
            bucket.send(path, directory / path)
            work.advance((directory / path).stat().st_size)
        bucket.remove(sorted(gone))
        bucket.send(MANIFEST, directory / MANIFEST)
    say_removed(bucket.url, gone)
