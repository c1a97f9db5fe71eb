"""The names of the images that rows need, in the order of the rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from batch_trajectories.dataset.row_workspace import read_image
from batch_trajectories.dataset.scan import Scan, tasks


def list_row_images(columns: Mapping[str, Any], default: str | None) -> list[str]:
    """The images of a row and of its check; `default` is for rows that name none.

    Raises `ValueError` if the row's column cannot be read.
    """
    image = read_image(columns, None, network=False)
    names = [default if image is None else image.reference]
    match columns.get("check"):
        case {"image": str(reference)}:
            names.append(reference)
    return [name for name in names if name]


def list_task_images(scan: Scan, numbers: Iterable[int], default: str | None) -> Iterator[str]:
    """Yield the images of tasks, each once. Raises `DatasetChanged`."""
    seen: set[str] = set()
    for task in tasks(scan, _first_samples(scan, numbers)):
        for name in list_row_images(task.columns, default):
            if name not in seen:
                seen.add(name)
                yield name


def _first_samples(scan: Scan, numbers: Iterable[int]) -> Iterator[int]:
    """Yield one task of each row: its samples have the same images."""
    last = -1
    for number in numbers:
        row = number // scan.num_samples
        if row != last:
            last = row
            yield row * scan.num_samples
