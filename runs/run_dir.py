"""The directory of a run: its lock, its identity, and where everything lies.

    run.json         config, its semantic digest, dataset, versions; no secrets
    records.jsonl    one finished trajectory per line: the checkpoint
    records.idx      derived from it
    dataset-KEY.*    the dataset as JSONL, if it is not a JSONL file of the user's
    dataset.idx      derived from the dataset
    failures.jsonl   one line per failed attempt and per bad row
    inflight/        turn journals of conversations that are not finished
    workspaces/      files of conversations that are not finished
    quarantine/      what a crash left unreadable, set aside
    summary.json     the accounts, computed at the end of each start
    run.log, lock

One process at a time: the lock is held from `open_run_dir` to `RunDir.close`, or until the process
ends, however it ends.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from zlib import crc32

import orjson

from runs.config.fingerprint import default_meaning, digest_of, meaning_of
from runs.config.run_config import RunConfig
from runs.dataset.scan import Scan
from runs.dataset.scan_cache import NAME, save_scan
from runs.errors import ConfigError, EnvironmentStop, RunDirError
from runs.narrowing import NARROWING, refuse_narrowing
from runs.run_lock import is_same_file, lock
from runs.sources.kept_dataset import link_kept, remove_other_kept, source_of_kept
from runs.store.files import (
    listed,
    refuse_strange_files,
    replace_file,
    storage_error,
    training_file_of,
)
from runs.store.records import refuse_lost_records
from runs.tasks import SCHEMA_VERSION
from toolsets import exact_json

_RUN_KEYS = {
    "api": str,
    "created": float,
    "meaning": dict,
    "config": dict,
    "dataset": dict,
    "history": list,
}

_CHECKSUM = "crc32"

_WHERE = ("model", "models", "base_url", "endpoints")
"""Keys of a config that say which endpoints are asked."""

_DISK_FAILS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)

_VERSIONS_OF = ("batch-trajectories", "aiohttp", "orjson", "pydantic")


@dataclass(frozen=True, slots=True)
class RunDir:
    """An opened, locked run directory."""

    path: Path
    digest: str
    """Semantic digest of the config that this start runs with."""
    versions: dict[str, str]
    same_endpoints: bool
    """The last start of this run spoke to the same base URLs."""
    lock_fd: int
    directory_fds: Mapping[Path, int]
    """Those that a run cannot do without."""

    @property
    def inflight(self) -> Path:
        """Turn journals."""
        return self.path / "inflight"

    @property
    def workspaces(self) -> Path:
        """One directory per unfinished conversation that has touched files."""
        return self.path / "workspaces"

    @property
    def quarantine(self) -> Path:
        """What was set aside."""
        return self.path / "quarantine"

    def check_is_there(self) -> None:
        """Raise `EnvironmentStop` if the directory was moved or removed since it was locked.

        The files that are open would take all that is written, and nobody would ever find it.
        """
        if not is_same_file(self.lock_fd, self.path / "lock"):
            msg = (
                f"{self.path}: the run directory has vanished: it was moved or removed while the "
                "run worked in it. What was finished before is in it: if it was moved, put it back "
                "in its place (remove what stands there now) and run the same command again to go "
                "on; if it was removed, the same command begins anew."
            )
            raise EnvironmentStop(msg)

    def what_vanished(self) -> str | None:
        """In words, that journals or workspaces were moved or removed; None if they were not."""
        for path, fd in self.directory_fds.items():
            if is_same_file(fd, path):
                continue
            if os.fstat(fd).st_nlink:
                how, then = "moved", "Put it back in its place (remove what stands there now)"
            elif path == self.inflight:
                how, then = "removed", "What the workers had open of it is written anew"
            else:
                how, then = "removed", "Conversations under way lose the files that they had there"
            return (
                f"{path}: it was {how} while the run worked in it. {then}; run the same command "
                "again to go on."
            )
        return None

    def close(self) -> None:
        """Release the lock."""
        os.close(self.lock_fd)
        for fd in self.directory_fds.values():
            os.close(fd)


def open_run_dir(
    config: RunConfig,
    scan: Scan,
    *,
    api: str,
    fresh: bool = False,
    accept_changes: Sequence[str] = (),
) -> RunDir:
    """Create or reopen the directory of a run, and lock it.

    `api` is the dialect that the config's model speaks. `fresh` moves an existing directory and
    its training file aside first. `accept_changes` names config keys whose change is wanted
    though it changes what the data means.

    Raises `RunLocked`, `RunDirError`, and `ConfigError` where the config differs in meaning
    from the one that the run began with.
    """
    path = config.run_dir
    lock_fd = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(exist_ok=True, mode=0o700)
        if not fresh:
            refuse_strange_files(path)
            refuse_lost_records(path)
        lock_fd = lock(path)
        if fresh and any(entry.name != "lock" for entry in path.iterdir()):
            # Still locked while it moves, so no other process can begin to work in it.
            aside = _move_aside(path)
            path.mkdir(mode=0o700)
            moved_fd, lock_fd = lock_fd, lock(path)
            os.close(moved_fd)
            if scan.path.parent == path:
                link_kept(aside / scan.path.name, path)
        for name in ("inflight", "workspaces", "exports"):
            (path / name).mkdir(exist_ok=True, mode=0o700)
        for litter in stale_files_of(path):
            litter.unlink()
        before, run = _identity(config, scan, accept_changes)
        run["api"] = api
        write_run_json(path, run)
        save_scan(path / NAME, scan)
        remove_other_kept(path, scan.path)
    except BaseException as error:
        if lock_fd is not None:
            os.close(lock_fd)
        if isinstance(error, OSError):
            if error.errno in _DISK_FAILS:
                raise storage_error(path, error) from error
            msg = (
                f"{path}: cannot use this run directory: {error.strerror or error}; --output_dir "
                "names another place"
            )
            raise RunDirError(msg) from error
        raise
    same_endpoints = before is not None and all(
        before["config"].get(key) == run["config"][key] for key in _WHERE
    )
    fds = {
        path / name: os.open(path / name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for name in ("inflight", "workspaces")
    }
    return RunDir(path, run["digest"], run["versions"], same_endpoints, lock_fd, fds)


def check_reopening(config: RunConfig, scan: Scan, accept_changes: Sequence[str] = ()) -> bool:
    """Raise what `open_run` would refuse of an existing run; return whether there is one."""
    if not (config.run_dir / "run.json").exists():
        return False
    refuse_strange_files(config.run_dir)
    refuse_lost_records(config.run_dir)
    _identity(config, scan, accept_changes)
    return True


def _identity(
    config: RunConfig, scan: Scan, accept_changes: Sequence[str]
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The run.json that there is, None for none, and the one of this start. Raises `ConfigError`
    where this start may not go on with the run."""
    path = config.run_dir
    before = read_run_json(path) if (path / "run.json").exists() else None
    run = _run_json(path, config, scan, before, accept_changes)
    if before is not None:
        refuse_narrowing(path, scan, config, before, accept_changes)
    return before, run


def stale_files_of(path: Path) -> list[Path]:
    """The temporary files of a run that a crash has left behind, those beside it too."""
    inside = (path, path / "exports", path / "inflight", path / "quarantine")
    found = [file for directory in inside for file in sorted(directory.glob(".*.tmp"))]
    left = [file for file in found if not file.is_dir()]
    beside = re.compile(rf"\.{re.escape(path.name)}(\.fork(\.\d+)?)?\.jsonl\.\d+\.tmp")
    return left + [file for file in path.parent.glob(".*.tmp") if beside.fullmatch(file.name)]


def write_run_json(path: Path, run: dict[str, Any]) -> None:
    """Write the identity of a run, with a checksum of what it says. Raises `StorageError`."""
    told = {**run, _CHECKSUM: _checksum_of(run)}
    replace_file(path / "run.json", exact_json.dumps(told, option=orjson.OPT_INDENT_2) + b"\n")


def _checksum_of(run: dict[str, Any]) -> str:
    """However the file is laid out."""
    return f"{crc32(exact_json.dumps(run)):08x}"


def read_run_json(path: Path) -> dict[str, Any]:
    """The identity of a run. Raises `RunDirError` where `path` is no run directory of ours."""
    try:
        run = exact_json.loads((path / "run.json").read_bytes())
    except FileNotFoundError:
        msg = f"{path}: no run here (it has no run.json)"
        raise RunDirError(msg) from None
    except NotADirectoryError:
        msg = f"{path}: not a run directory"
        raise RunDirError(msg) from None
    except (OSError, orjson.JSONDecodeError) as error:
        msg = f"{path}/run.json: cannot read it: {error}"
        raise RunDirError(msg) from error
    if isinstance(run, dict) and run.get("schema_version") == SCHEMA_VERSION:
        if _CHECKSUM in run and run.pop(_CHECKSUM) != _checksum_of(run):
            msg = (
                f"{path}/run.json: changed since it was written: its checksum does not fit. Put "
                "a copy of it back. If it was edited, or there is none, look it through, remove "
                f'"{_CHECKSUM}" from it, and run the same command again: that compares it with the '
                "config"
            )
            raise RunDirError(msg)
        if missing := [key for key in _RUN_KEYS if not isinstance(run.get(key), _RUN_KEYS[key])]:
            msg = f"{path}/run.json: damaged ({', '.join(missing)}); --fresh begins anew"
            raise RunDirError(msg)
    else:
        msg = (
            f"{path}/run.json: written by another version of this program (schema "
            f"{run.get('schema_version') if isinstance(run, dict) else None}, ours is "
            f"{SCHEMA_VERSION}); use that version, or --fresh to begin anew"
        )
        raise RunDirError(msg)
    return run


def runs_in(output_dir: Path) -> list[str]:
    """The names of the runs in a directory."""
    return sorted(path.parent.name for path in output_dir.glob("*/run.json"))


def _move_aside(path: Path) -> Path:
    """Rename the directory of a run, and move its training file into it; return the new path."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    aside = path.with_name(f"{path.name}.{stamp}")
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.{stamp}.{number}")
    path.rename(aside)
    with suppress(FileNotFoundError):
        training = training_file_of(path)
        training.rename(aside / training.name)
    return aside


def _run_json(
    path: Path,
    config: RunConfig,
    scan: Scan,
    before: dict[str, Any] | None,
    accept_changes: Sequence[str],
) -> dict[str, Any]:
    meaning = meaning_of(config)
    known = (*meaning, *NARROWING)
    if unknown := [key for key in accept_changes if key not in known]:
        msg = (
            f"--accept_config_change: {', '.join(unknown)}: no such key; those that it can name "
            f"are {', '.join(known)}"
        )
        raise ConfigError(msg)
    history: list[dict[str, Any]] = []
    created = time.time()
    if before is None:
        if _holds_work(path):
            msg = (
                f"{path}: it holds records but no run.json, so nobody can tell what config they "
                "belong to; put run.json back, or use --fresh to begin anew"
            )
            raise RunDirError(msg)
    else:
        created, history = before["created"], before["history"]
        if (shard := before["config"].get("shard")) != config.shard and _holds_work(path):
            msg = (
                f"{path}: this run is {f'shard {shard}' if shard else 'of the whole dataset'}, now "
                f"asked: {f'shard {config.shard}' if config.shard else 'the whole dataset'}; each "
                "shard needs its own --run_name (and `merge` makes one run of all shards)"
            )
            raise ConfigError(msg)
        # An option that the program did not have then was as if it had its default.
        then = default_meaning() | before["meaning"]
        changes = {
            key: {"from": then.get(key), "to": meaning[key]}
            for key in meaning
            if then.get(key) != meaning[key]
        }
        refused = {key: change for key, change in changes.items() if key not in accept_changes}
        if refused and _holds_work(path):
            raise ConfigError(_explain_changes(path, refused))
        if changes:
            history = [*history, {"at": time.time(), "changes": changes}]
    return {
        "schema_version": SCHEMA_VERSION,
        "run_name": config.run_name,
        "created": created,
        "digest": digest_of(meaning),
        "meaning": meaning,
        "config": config.to_json(),
        "dataset": dataset_of(scan),
        "versions": {"python": platform.python_version(), **versions_of(_VERSIONS_OF)},
        "history": history,
    }


def dataset_of(scan: Scan) -> dict[str, Any]:
    """What run.json says of the dataset."""
    return {
        "path": str(scan.path.resolve()),
        "source": source_of_kept(scan.path),
        "rows": scan.rows,
        "bad_rows": len(scan.bad_rows),
        "sha256": scan.sha256,
        "is_priced": scan.rules.is_priced,
        "toolsets": None if scan.rules.toolsets is None else sorted(scan.rules.toolsets),
    }


def _holds_work(path: Path) -> bool:
    """Whether the run has anything that another config could be mixed with."""
    records = path / "records.jsonl"
    if records.exists() and records.stat().st_size:
        return True
    return any(segment.stat().st_size for segment in listed(path / "inflight"))


def _explain_changes(path: Path, changes: dict[str, dict[str, Any]]) -> str:
    lines = [f"{path}: this run began with another config; mixing them would spoil the data:"]
    lines += [
        f"  {key}: the run has {change['from']!r}, now asked: {change['to']!r}"
        for key, change in changes.items()
    ]
    lines.append(
        "Take another --run_name, or --fresh to begin anew (the old directory is kept aside), "
        f"or --accept_config_change={','.join(changes)} to go on with the new values."
    )
    return "\n".join(lines)


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """The versions of packages by their names; "not installed" of those that are not."""
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions
