"""Refuses starts that would shorten the training file of a run by mistake.

Rows that are no longer in the dataset leave the exports. An option given for a trial, or a cut or
wrong dataset file, must not have this effect.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.basics.text import plural
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.kept_dataset import source_name
from batch_trajectories.dataset.scan import Scan, tasks
from batch_trajectories.dataset.scan_cache import cached_keys
from batch_trajectories.records.index import Ending, Index
from batch_trajectories.records.names import DATASET_INDEX
from batch_trajectories.records.reader import open_index, read_id
from batch_trajectories.records.records import UnreadableRecord

NARROWING = ("max_samples", "num_samples", "dataset_file")
"""Keys of --accept_config_change that let finished rows leave the training file."""


def refuse_narrowing(
    path: Path, scan: Scan, config: RunConfig, before: dict[str, Any], accepted: Collection[str]
) -> None:
    """Raise `ConfigError` if finished tasks of the run in `path` would leave its training file.

    `before` is its run.json; `accepted` are the keys of --accept_config_change. A task does not
    count if it was not part of the run at its last start, or if its row was edited: it runs again.
    """
    last = cached_keys(path / DATASET_INDEX)
    option = _narrowing_option(before["config"], config)
    if last == scan.keys or (option or "dataset_file") in accepted:
        return
    with open_index(path, lenient=True) as (index, records):
        leaving = list(_find_leaving_rows(index, last, scan.keys))
        if not leaving:
            return
        rows, _ = index.match(scan.keys)
        ids = set(_read_ids(records, index, leaving))
        ids.difference_update(_read_ids(records, index, filter(None, rows)))
    ids.difference_update(task.id for task in tasks(scan, _missing_rows(rows)))
    if not ids:
        return
    staying = sum(_is_finished(ending) for ending in index.endings(rows))
    finished = f"{len(ids):,} of the {len(ids) + staying:,} finished tasks"
    if option:
        old = before["config"].get(option)
        what = f"--{option}={getattr(config, option)} leaves out {finished} of this run"
        keep = f"leave {option} {'out' if old is None else f'at {old}'}"
    else:
        has_ids = not all(id.startswith("row-") for id in ids)
        possible_edit = "has `id` another name now" if has_ids else "have rows without `id` changed"
        what = (
            f"{source_name(scan.path)}: {finished} of this run are not in it (was it cut off or "
            f"mixed up, or {possible_edit}?)"
        )
        keep = f"restore {plural(len(ids), 'row')}"
    raise ConfigError(
        f"{path}: {what}, such as {min(ids)!r}, and would leave the training file. To keep them, "
        f"{keep}; for a trial or other rows use another --run_name; to leave them out, give "
        f"--accept_config_change={option or 'dataset_file'} (their records stay)."
    )


def _find_leaving_rows(index: Index, last: bytes | None, keys: bytes) -> Iterator[int]:
    """Yield the rows of finished records whose tasks the last start had and `keys` do not name.

    `last` are the keys of the last start. If they are None, all finished records count that `keys`
    do not name.
    """
    rows, _ = index.match(b"".join(index) if last is None else last)
    staying = set(index.match(keys)[0])
    for row, ending in zip(rows, index.endings(rows), strict=True):
        if _is_finished(ending) and row not in staying:
            yield row


def _read_ids(records: BinaryIO, index: Index, rows: Iterable[int]) -> Iterator[str]:
    for row in rows:
        entry = index.entry(row)
        # A damaged record is set aside by the start, and its task runs again.
        with suppress(UnreadableRecord):
            yield read_id(records, entry.offset, entry.length, index.key(row))


def _missing_rows(rows: array[int]) -> Iterator[int]:
    return (number for number, row in enumerate(rows) if not row)


def _is_finished(ending: Ending | None) -> bool:
    return ending is not None and ending.status != "failed"


def _narrowing_option(before: dict[str, Any], config: RunConfig) -> str | None:
    """The option that leaves out tasks of the last start, if any."""
    limit = before.get("max_samples")
    if config.max_samples is not None and (limit is None or config.max_samples < limit):
        return "max_samples"
    return "num_samples" if config.num_samples < before.get("num_samples", 1) else None
