"""Datasets of the Hugging Face hub and directories written by `save_to_disk`, by `datasets`.

The rows come as Arrow tables, so images and audio are never decoded. Code that a dataset brings
along is never run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from batch_trajectories.basics.errors import DatasetError, EnvironmentStop, RunError
from batch_trajectories.basics.exact_json import objects_among
from batch_trajectories.runs.sources.arrow_rows import BATCH_ROWS, rows_of, rows_per_batch
from batch_trajectories.runs.sources.source import HubName


def revision_of(name: HubName) -> str:
    """The commit that a dataset's revision is now.

    Raises `DatasetError` where the hub has no such dataset, `EnvironmentStop` where it cannot be
    reached.
    """
    from huggingface_hub import HfApi

    try:
        info = HfApi().dataset_info(name.repository, revision=name.revision)
    except Exception as error:
        raise _refusal(name.repository, error) from error
    return str(info.sha)


def hub_rows(name: HubName, revision: str, left_out: set[str]) -> Iterator[dict[str, Any]]:
    """Stream the rows of one split. See `rows_of`. Raises as `revision_of` does."""
    import datasets

    datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False
    try:
        dataset = datasets.load_dataset(
            name.repository, name.config, split=name.split, revision=revision, streaming=True
        )
        if name.split is None:
            dataset = dataset[_only_split(name.repository, list(dataset))]
        tables = dataset.with_format("arrow").iter(BATCH_ROWS)
        yield from rows_of(tables, f"hf:{name.repository}", left_out)
    except (RunError, MemoryError):
        raise
    except Exception as error:
        raise _refusal(name.repository, error) from error


def saved_rows(path: Path, left_out: set[str]) -> Iterator[dict[str, Any]]:
    """Stream the rows of a directory written by `save_to_disk`. See `rows_of`.

    Raises `DatasetError`.
    """
    import datasets

    refuse_files_outside(path)
    try:
        dataset = datasets.load_from_disk(str(path))
        if isinstance(dataset, datasets.DatasetDict):
            dataset = dataset[_only_split(f"{path}/", list(dataset))]
        rows = rows_per_batch(dataset.data.nbytes // max(1, dataset.data.num_rows))
        yield from rows_of(dataset.with_format("arrow").iter(rows), str(path), left_out)
    except (RunError, MemoryError):
        raise
    except Exception as error:
        raise DatasetError(
            f"{path}: cannot read it as a dataset that was saved with `save_to_disk`: {error}"
        ) from error


def refuse_files_outside(path: Path) -> None:
    """Raise `DatasetError` if a directory of `save_to_disk` leads to files outside of itself.

    A directory that somebody else made can name any file of this machine, whose rows would then go
    to the model.
    """
    given = _json_object(path / "dataset_dict.json").get("splits")
    splits = [str(split) for split in given] if isinstance(given, list) else []
    for split in splits:
        _refuse_outside(path, path / "dataset_dict.json", split)
    for directory in (path, *(path / split for split in splits)):
        state = directory / "state.json"
        lists = (value for value in _json_object(state).values() if isinstance(value, list))
        for file in objects_among([item for items in lists for item in items]):
            _refuse_outside(directory, state, str(file.get("filename", "")))


def _refuse_outside(directory: Path, named_in: Path, name: str) -> None:
    if "\0" in name or not (directory / name).resolve().is_relative_to(directory.resolve()):
        raise DatasetError(
            f"{named_in}: names {name!r}, which is outside of {directory}; only files inside are "
            "read: save the dataset again by `save_to_disk`"
        )


def _json_object(path: Path) -> dict[str, Any]:
    """The object in a file; empty where `datasets` will say what is wrong with it."""
    try:
        value = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def _only_split(place: str, splits: list[str]) -> str:
    """`train`, or the only split. Raises `DatasetError` where a user must choose."""
    if "train" in splits:
        return "train"
    if len(splits) == 1:
        return splits[0]
    how = f"give one of them as {place}SPLIT" if place.endswith("/") else "add :SPLIT to its name"
    raise DatasetError(f"{place}: it has the splits {', '.join(splits)}; {how}")


def _refusal(repository: str, error: Exception) -> RunError:
    """What stops a run when the hub, or the reading of what it sent, fails."""
    from huggingface_hub.errors import HfHubHTTPError

    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403, 404) or "gated" in type(error).__name__.lower():
        login = "" if os.environ.get("HF_TOKEN") else "; private and gated datasets need HF_TOKEN"
        return DatasetError(f"hf:{repository}: the hub refuses it: {error}{login}")
    is_network = isinstance(error, HfHubHTTPError | ConnectionError | TimeoutError)
    if is_network or "connect" in type(error).__name__.lower():
        return EnvironmentStop(
            f"hf:{repository}: cannot reach the hub: {error}. Run the same command again later."
        )
    return DatasetError(f"hf:{repository}: cannot read it: {error}")
