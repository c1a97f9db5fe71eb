"""Merge several runs of one config into a new run, with one record per task.

The merged runs stay unchanged. The new run is made whole in a hidden directory beside its place,
its training file included, and then put there by renames. After a kill the same command finishes
the renames, or starts over; until then no command finds a run.

    .NAME.merging/NAME        the new run
    .NAME.merging/NAME.jsonl  its training file
    .NAME.merging/ready.json  all is made and only has to be moved; written last
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from batch_trajectories.basics.console import track_progress
from batch_trajectories.basics.errors import ConfigError, RunDirError
from batch_trajectories.basics.text import first_few, plural
from batch_trajectories.batch_api.verifying import open_calls
from batch_trajectories.config.fingerprint import stored_meaning
from batch_trajectories.config.loading import load_config
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.kept_dataset import link_snapshot
from batch_trajectories.dataset.scan import Scan
from batch_trajectories.dataset.shards import check_shards
from batch_trajectories.engine.run_dir import (
    IMAGES,
    describe_dataset,
    hold_lock,
    read_run_json,
    was_started_here,
    write_run_json,
)
from batch_trajectories.records.failures import read_failure
from batch_trajectories.records.files import (
    AppendFile,
    link_file,
    list_directory,
    make_directory,
    read_json,
    repair_command,
    replace_json,
    sync_directory,
    training_path,
)
from batch_trajectories.records.journal import read_journaled_replies
from batch_trajectories.records.names import (
    FAILURES_FILE,
    INFLIGHT,
    LABELS_FILE,
    QUARANTINE,
    RECORDS_FILE,
    RECORDS_INDEX,
    RETAINED_WORKSPACES,
    SCORES_FILE,
    TEACHER_FILE,
    WORKSPACES,
)
from batch_trajectories.records.record_types import Record
from batch_trajectories.records.records import RecordFile, load_index, parse_record, read_lines
from batch_trajectories.records.tasks import task_key
from toolsets.workspace.removal import remove_tree

MakeResults = Callable[[Path, Scan, RunConfig], object]
"""Writes the training files and the summary of a run."""

_MAX_LISTED = 10
_READY = "ready.json"

_OWN_KEYS = ("run_name", "output_dir", "dataset_file", "shard")
"""Keys of the new run's config that differ from those of the first run."""


@dataclass(frozen=True, slots=True)
class MergeResult:
    """The result of `merge`."""

    path: Path
    records_by_run: Mapping[Path, int]
    """Number of records by source."""
    equal: int
    """Records that were also in another run, byte for byte."""

    def describe(self) -> str:
        """The numbers of records for a person: a line per run, and the sum."""
        lines = [f"{count:>9,} records of {run}" for run, count in self.records_by_run.items()]
        if self.equal:
            lines.append(f"{self.equal:>9,} of them were equal in two runs and are taken once")
        return "\n".join(
            [*lines, f"{sum(self.records_by_run.values()):>9,} records in {self.path}"]
        )


def common_config(
    runs: Sequence[tuple[Path, dict[str, Any]]],
    *,
    run_name: str,
    output_dir: Path,
    dataset_file: Path | None,
    allow_gaps: bool = False,
) -> RunConfig:
    """The config of the run that `runs` (directories with their run.json) are merged into.

    Raises `ConfigError` if they differ in options that affect the data; if they differ in their
    dataset and no `dataset_file` names one with all rows; or if they are shards and some are
    missing without `allow_gaps`.
    """
    first_path, first = runs[0]
    for path, identity in runs[1:]:
        one, other = stored_meaning(first), stored_meaning(identity)
        if keys := [key for key in one | other if one.get(key) != other.get(key)]:
            raise ConfigError(
                f"{path}: its config differs from that of {first_path} in {', '.join(keys)}; "
                "merging them would mix different data"
            )
    check_shards(runs, has_dataset=dataset_file is not None, allow_gaps=allow_gaps)
    if dataset_file is None:
        are_shards = first["config"].get("shard") is not None
        if (
            not are_shards
            and len({_rows_identity(identity["dataset"]) for _, identity in runs}) > 1
        ):
            raise ConfigError(
                "the runs have different datasets: give a dataset with all rows by --dataset_file"
            )
        if first["dataset"].get("source") is None:
            dataset_file = Path(first["dataset"]["path"])
        else:
            dataset_file = Path(first["config"]["dataset_file"])
    changed = {"run_name": run_name, "output_dir": output_dir, "dataset_file": dataset_file}
    return load_config(None, {**first["config"], **changed, "shard": None})


def _rows_identity(dataset: Mapping[str, Any]) -> str:
    """A text that is equal for runs with the same rows: a file, or the digest of its rows."""
    source = dataset.get("source")
    return str(dataset["path"] if source is None else source.get("blake2b", dataset["path"]))


def merge(
    runs: Sequence[tuple[Path, dict[str, Any]]],
    config: RunConfig,
    scan: Scan,
    *,
    drop: bool,
    make: MakeResults,
) -> MergeResult:
    """Write the records and failures of `runs` as the run of `config`, and its results by `make`.

    `drop` gives up unfinished conversations; their tasks start over. Raises `RunLocked`,
    `StorageError`, and `RunDirError` if two runs have different records of a task, a run is
    damaged, unfinished or named twice, or the new run exists already.
    """
    paths = [path.resolve() for path, _ in runs]
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise RunDirError(f"{twice[0]}: named twice; name each run once")
    into = config.run_dir
    wanted = [[str(path) for path in paths], scan.sha256, drop]
    beside = into.with_name(f".{into.name}.merging")
    if not beside.exists():
        _refuse_existing(into)
    make_directory(beside, is_inside=False, parents=True)
    with ExitStack() as stack:
        stack.enter_context(hold_lock(beside))
        ready = read_json(beside / _READY)
        if ready is not None and _put_in_place(beside, into) and ready["wanted"] == wanted:
            remove_tree(beside)
            records_by_run = {path: ready["taken"][str(path)] for path, _ in runs}
            return MergeResult(into, records_by_run, ready["equal"])
        is_moved = ready is None and not (beside / into.name).exists()
        if is_moved and (merged := _find_merged(into, runs)) is not None:
            remove_tree(beside)  # a killed merge has left the rest of it
            return merged
        try:
            _refuse_existing(into)
            for path, _ in runs:
                stack.enter_context(hold_lock(path))
                _refuse_unfinished(path, drop=drop)
            making = beside / into.name
            # Leftovers of a killed merge.
            (beside / _READY).unlink(missing_ok=True)
            training_path(making).unlink(missing_ok=True)
            remove_tree(making)
            records_by_run, equal = _write_run(making, runs, config, scan)
            make(making, scan, config)
            sources = {str(path): count for path, count in records_by_run.items()}
            replace_json(beside / _READY, {"wanted": wanted, "taken": sources, "equal": equal})
        except BaseException:
            remove_tree(beside)
            raise
        if not _put_in_place(beside, into):
            remove_tree(beside)
            _refuse_existing(into)
        remove_tree(beside)
    return MergeResult(into, records_by_run, equal)


def _find_merged(into: Path, runs: Sequence[tuple[Path, dict[str, Any]]]) -> MergeResult | None:
    """The result of an earlier merge of the same runs; None if there is no such run."""
    try:
        made_of = read_run_json(into)["history"][-1]["merged"]
        records_by_run = {
            path: made["records"] for (path, _), made in zip(runs, made_of, strict=True)
        }
    except (RunDirError, LookupError, TypeError, ValueError):
        return None
    is_same = [str(path) for path in records_by_run] == [made["path"] for made in made_of]
    return MergeResult(into, records_by_run, 0) if is_same else None


def _refuse_existing(into: Path) -> None:
    if into.exists() or training_path(into).exists():
        raise RunDirError(f"{into}: it exists already; give the name of a new run by --into")


def _put_in_place(beside: Path, into: Path) -> bool:
    """Move a finished run to its place; skip the steps that an earlier start has made.

    Returns False if that is impossible: somebody else has put a run there, or removed this one.
    """
    made = beside / into.name
    if not made.exists():
        return into.exists()
    if into.exists():
        return False
    training = training_path(made)
    if training.exists():
        training.rename(training_path(into))
    made.rename(into)
    sync_directory(into.parent)
    return True


def _write_run(
    making: Path, runs: Sequence[tuple[Path, dict[str, Any]]], config: RunConfig, scan: Scan
) -> tuple[dict[Path, int], int]:
    """Write all files of the new run but its exports.

    Return `MergeResult.records_by_run` and `equal`.
    """
    for directory in (making, making / INFLIGHT, making / WORKSPACES):
        directory.mkdir(mode=0o700)
    dataset = describe_dataset(scan)
    if dataset["source"] is not None:
        link_snapshot(scan.path, making)
        dataset["path"] = str(config.run_dir.resolve() / scan.path.name)
    paths = [path for path, _ in runs]
    records_by_run, equal = _copy_records(making, paths)
    _join_lines(making, paths, FAILURES_FILE, is_needed=True, accept=_is_whole_failure)
    for name in (SCORES_FILE, LABELS_FILE, TEACHER_FILE):
        _join_lines(making, paths, name)
    for kept in chain(*(list_directory(path / RETAINED_WORKSPACES) for path in paths)):
        make_directory(making / RETAINED_WORKSPACES)
        link_file(kept, making / RETAINED_WORKSPACES)
    first = runs[0][1]
    sources = [{"path": str(path), "records": count} for path, count in records_by_run.items()]
    identity = {
        **first,
        "run_name": config.run_name,
        "created": time.time(),
        "config": {**first["config"], **{key: config.to_json()[key] for key in _OWN_KEYS}},
        "dataset": dataset,
        "history": [*first["history"], {"at": time.time(), "merged": sources}],
        IMAGES: dict(chain(*(run.get(IMAGES, {}).items() for _, run in reversed(runs)))),
    }
    # The config is that of the first run, but all have the same meaning.
    write_run_json(making, identity, is_own=all(map(was_started_here, paths)))
    return records_by_run, equal


def _is_whole_failure(line: bytes) -> bool:
    return read_failure(line) is not None


def _join_lines(
    making: Path,
    paths: Sequence[Path],
    name: str,
    *,
    is_needed: bool = False,
    accept: Callable[[bytes], bool] = lambda line: True,
) -> None:
    """Copy the lines of the file `name` of all runs that `accept` takes into the new run.

    Does nothing if no run has the file, unless it `is_needed`.
    """
    if not is_needed and not any((path / name).exists() for path in paths):
        return
    with closing(AppendFile(making / name)) as joined:
        for path in paths:
            for _, line in read_lines(path / name, 0):
                if accept(line):
                    joined.append(line)
        joined.sync()


def _refuse_unfinished(path: Path, *, drop: bool) -> None:
    settled = load_index(path)
    unfinished = read_journaled_replies(path / INFLIGHT, settled=settled).tasks.values()
    calls = open_calls(path, settled)
    if drop or not (unfinished or calls):
        return
    turns = sum(replies.turns for replies in unfinished)
    what = f"{plural(len(unfinished), 'conversation')} with {plural(turns, 'turn')} under way"
    if not unfinished:
        what = f"{plural(calls, 'call')} in batches, already paid for"
    raise RunDirError(
        f"{path}: {what}: finish this run first, or give them up by --drop_unfinished"
    )


def _copy_records(making: Path, paths: Sequence[Path]) -> tuple[dict[Path, int], int]:
    """Append the record of each task; refuse if two runs disagree on any.

    Returns the number of records by source, and of records that were equal in two runs.
    """
    seen: dict[bytes, tuple[Path, bytes]] = {}
    records_by_run = dict.fromkeys(paths, 0)
    differing = []
    equal = 0
    with closing(RecordFile(making, making / QUARANTINE)) as records:
        for path in paths:
            for key, record in track_progress(_current_records(path), f"merging {path.name}"):
                content = hashlib.blake2b(record.line, digest_size=16).digest()
                if key not in seen:
                    seen[key] = (path, content)
                    records_by_run[path] += 1
                    records.add(record)
                elif seen[key][1] == content:
                    equal += 1
                else:
                    differing.append(f"{record.id} in {seen[key][0]} and {path}")
        if differing:
            raise RunDirError(
                f"{len(differing)} tasks have different records in two runs: "
                f"{first_few(differing, _MAX_LISTED, separator='; ')}. It is unknown which is "
                "right; merge only runs with different rows"
            )
        records.sync()
    return records_by_run, equal


def _current_records(path: Path) -> Iterator[tuple[bytes, Record]]:
    """The records of a run that count, in file order, with their task keys."""
    current = ((entry.offset, key) for key, entry in load_index(path).current_entries())
    upcoming = next(current, None)
    for number, (offset, line) in enumerate(read_lines(path / RECORDS_FILE, 0), start=1):
        record = parse_record(line)
        if record is None:
            raise RunDirError(
                f"{path / RECORDS_FILE}:{number}: unreadable; first run "
                f"{repair_command(path / RECORDS_FILE)}"
            )
        key = task_key(record.id, record.input_digest)
        if (offset, key) == upcoming:
            yield key, record
            upcoming = next(current, None)
    if upcoming is not None:
        index = path / RECORDS_INDEX
        raise RunDirError(
            f"{index}: does not match records.jsonl; first run {repair_command(index)}"
        )
