"""The run directory, its lock, and run.json.

    run.json         config, its digest, dataset, versions; no secrets; a MAC, see `origin`
    records.jsonl    one finished trajectory per line: the checkpoint
    records.idx      derived from records.jsonl
    dataset-KEY.*    the dataset as JSONL, if it is not a JSONL file of the user's
    dataset.idx      derived from the dataset
    failures.jsonl   one line per failed attempt and per bad row
    inflight/        turn journals of unfinished conversations
    workspaces/      files of unfinished conversations
    quarantine/      unreadable data that was set aside
    summary.json     the totals, computed at the end of each start
    run.log, lock

One process at a time: it holds the lock from `open_run_dir` to `RunDir.close` or its own end.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import msgspec
import orjson

from agent.models.conversation_id import new_run_key
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import (
    ConfigError,
    EnvironmentStop,
    RunDirError,
    RunLocked,
)
from batch_trajectories.basics.text import clip, first_few
from batch_trajectories.basics.versions import installed_version
from batch_trajectories.config.fingerprint import (
    EARLIER_DEFAULTS,
    data_options,
    digest_options,
    fill_defaults,
    stored_meaning,
    update_names,
)
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.kept_dataset import (
    move_snapshot,
    remove_other_snapshots,
    snapshot_source,
)
from batch_trajectories.dataset.scan import Scan
from batch_trajectories.dataset.scan_cache import save_scan
from batch_trajectories.engine.file_systems import describe_lock_error, explain_missing_locks
from batch_trajectories.engine.narrowing import NARROWING, refuse_narrowing
from batch_trajectories.engine.origin import MAC, compute_mac, is_own
from batch_trajectories.engine.run_json_shape import find_faults
from batch_trajectories.records.files import (
    is_training_file,
    list_directory,
    longest_temporary_path,
    make_directory,
    open_no_follow,
    refuse_links,
    refuse_strange_files,
    replace_file,
    storage_error,
    training_path,
)
from batch_trajectories.records.names import (
    DATASET_INDEX,
    EXPORTS,
    INFLIGHT,
    LOCK_FILE,
    QUARANTINE,
    RECORDS_FILE,
    RUN_FILE,
    WORKSPACES,
)
from batch_trajectories.records.records import refuse_lost_records
from batch_trajectories.records.tasks import SCHEMA_VERSION

if TYPE_CHECKING:
    from batch_trajectories.mirror.mirror import Mirror


# The lock of a run directory: one process at a time works on a run.


def read_holder(path: Path) -> dict[str, Any] | None:
    """The process that works on the run: {"pid", "host", "started"}; {} if it is just starting.

    None if there is none. Reads the kernel's list of locks: trying the lock could make a start
    fail at that moment.
    """
    try:
        lock = (path / LOCK_FILE).stat()
        locks = Path("/proc/locks").read_text().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return None
    name = f" {os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}:{lock.st_ino} "
    if not any("FLOCK" in line and name in line for line in locks):
        return None
    fd = os.open(path / LOCK_FILE, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return _read_holder(fd)
    finally:
        os.close(fd)


def refuse_held(path: Path) -> None:
    """Raise `RunLocked` if another process is working on the run."""
    if (holder := read_holder(path)) is not None:
        raise _run_locked_error(path, holder)


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a run. Raises `RunLocked`."""
    fd = lock(path)
    try:
        yield
    finally:
        os.close(fd)


def lock(path: Path) -> int:
    """Take the lock of a run and return its descriptor.

    Raises `RunLocked`, and `RunDirError` if the file system keeps no locks.
    """
    while True:
        fd = open_no_follow(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK)
        try:
            if _try_lock(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _try_lock(fd: int, path: Path) -> bool:
    """Take the lock of a run; return False if its directory was moved aside meanwhile."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _run_locked_error(path, _read_holder(fd)) from None
    except OSError as error:
        if (why := describe_lock_error(error)) is not None:
            raise _no_locks_error(path, why) from error
        raise
    if not is_same_file(fd, path / LOCK_FILE):
        return False
    if (why := explain_missing_locks(fd, path / LOCK_FILE)) is not None:
        raise _no_locks_error(path, why)
    me = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.time()}
    os.ftruncate(fd, 0)
    os.pwrite(fd, orjson.dumps(me), 0)
    return True


def _no_locks_error(path: Path, why: str) -> RunDirError:
    return RunDirError(
        f"{path}: its file system keeps no locks ({why}), so a second process could work on the "
        "same run. Give --output_dir on a disk of this machine, and --mirror=URL for what must "
        "outlive it"
    )


def _run_locked_error(path: Path, holder: dict[str, Any]) -> RunLocked:
    return RunLocked(
        f"{path}: another process is working on this run: pid {holder.get('pid')} on host "
        f"{holder.get('host')}. Wait for it, or stop it and run the same command again."
    )


def is_same_file(fd: int, path: Path) -> bool:
    """Whether `fd` refers to the file that is at `path` now."""
    try:
        there = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return os.path.samestat(os.fstat(fd), there)


def _read_holder(fd: int) -> dict[str, Any]:
    try:
        holder = orjson.loads(os.pread(fd, 4096, 0))
    except orjson.JSONDecodeError:
        return {}
    return holder if isinstance(holder, dict) else {}


# The contents of the directory before a start: other files, leftovers of a crash, an earlier run.


def check_paths(config: RunConfig) -> None:
    """Check that the run directory and the exports can be there and overwrite no dataset.

    Raises `ConfigError`.
    """
    training = training_path(config.run_dir)
    try:
        longest_temporary_path(training).exists()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise ConfigError(
            f"{training}: {error.strerror}; choose a shorter --run_name or --output_dir"
        ) from error
    places = (config.run_dir, *config.run_dir.parents)
    nearest = next(filter(os.path.lexists, places), None)
    if nearest is not None and not nearest.is_dir():
        raise ConfigError(
            f"{config.run_dir}: cannot use this run directory: {nearest} is not a directory; "
            "choose another place by --output_dir"
        )
    if is_training_file(config.dataset_file, config.run_dir):
        raise ConfigError(
            f"{config.dataset_file}: the training file of this run would overwrite this dataset; "
            "choose another --run_name or --output_dir"
        )
    if training.is_dir():
        raise ConfigError(
            f"{training}: the training file of this run has this name, but it is a directory; "
            "choose another --run_name or --output_dir"
        )


def prepare_directory(config: RunConfig, *, fresh: bool) -> None:
    """Refuse a run in progress, and download a run that only a mirror has; called before planning.

    Raises `RunLocked`, and what `download_run` raises.
    """
    refuse_held(config.run_dir)
    if config.mirror is not None and not fresh:
        from batch_trajectories.mirror.copies import download_run  # most runs have none

        download_run(config.mirror, config.run_dir)


def find_stale_files(path: Path) -> list[Path]:
    """Temporary files in a run directory, or beside the directory, that a crash has left."""
    inside = (path, path / EXPORTS, path / INFLIGHT, path / QUARANTINE)
    temporary = [file for directory in inside for file in sorted(directory.glob(".*.tmp"))]
    stale = [file for file in temporary if not file.is_dir()]
    beside = re.compile(rf"\.{re.escape(path.name)}(\.fork(\.\d+)?)?\.jsonl\.\d+(-\d+)?\.tmp")
    return stale + [file for file in path.parent.glob(".*.tmp") if beside.fullmatch(file.name)]


def move_aside(path: Path) -> Path:
    """Rename the directory of a run, and move its training file into it; return the new path."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    aside = path.with_name(f"{path.name}.{stamp}")
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.{stamp}.{number}")
    path.rename(aside)
    with suppress(FileNotFoundError):
        training = training_path(path)
        training.rename(aside / training.name)
    return aside


_CHECKSUM = "crc32"

IMAGES = "images"
"""The key of run.json with digests of images, and of --accept_config_change."""

_KEY = "conversation_key"
"""The key of run.json with `RunDir.key`. Runs of earlier versions get one when they continue."""

_ENDPOINT_KEYS = ("model", "models", "base_url", "endpoints")
"""Keys of a config that determine its endpoints."""

_MAX_VALUE_CHARS = 1000
"""Maximum characters of a changed value in a message."""

_DISK_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EIO)

_INLINE_OPTIONS = (
    "agent",
    "endpoints",
    "extra_body",
    "mcp",
    "models",
    "prefill_messages",
    "prices",
    "simulated_user",
    "subagents",
)
"""Options that may be given as JSON or as the name of a file, and that run.json holds whole."""

_ROWS_DEFAULTS = {
    name: RunConfig.model_fields[name].get_default(call_default_factory=True)
    for name in ("check_in", "row_setup", "workspace")
}
"""The options that a rows file can set, as runs of earlier versions lack some of them."""

_RECORDED_PACKAGES = ("batch-trajectories", "aiohttp", "orjson", "pydantic")


class RunDir(msgspec.Struct, frozen=True):
    """An opened, locked run directory."""

    path: Path
    digest: str
    """The digest of this start's config; see `digest_options`."""
    versions: dict[str, str]
    same_endpoints: bool
    """Whether the last start of this run used the same endpoints."""
    lock_fd: int
    directory_fds: Mapping[Path, int]
    """Open descriptors of the directories `inflight` and `workspaces`."""
    images: dict[str, str]
    """The digests of images that finished conversations worked in, by reference."""
    key: str
    """The secret from which the ids of conversations that endpoints see are made; see
    `agent.models.conversation_id`."""
    mirror: Mirror | None

    @property
    def inflight(self) -> Path:
        """Turn journals."""
        return self.path / INFLIGHT

    @property
    def workspaces(self) -> Path:
        """One directory per unfinished conversation that has touched files."""
        return self.path / WORKSPACES

    @property
    def quarantine(self) -> Path:
        """Unreadable data that was set aside."""
        return self.path / QUARANTINE

    def check_exists_still(self) -> None:
        """Raise `EnvironmentStop` if the directory was moved or removed since it was locked.

        Writes to open files would succeed, but the data would be lost. Raises `RunLocked` if
        another machine has taken over the run.
        """
        if self.mirror is not None and isinstance(self.mirror.problem, RunLocked):
            raise self.mirror.problem
        if not is_same_file(self.lock_fd, self.path / LOCK_FILE):
            raise EnvironmentStop(
                f"{self.path}: the run directory has vanished: it was moved or removed during the "
                "run. Finished work is in it. If it was moved, put it back (remove any new one in "
                "its place) and run the same command again to continue; if it was removed, the "
                "same command starts over."
            )

    def problem(self) -> str | None:
        """The reason why the run must stop: journals or workspaces were moved or removed, or the
        mirror lacks too much. None if it can go on."""
        if self.mirror is not None and self.mirror.problem is not None:
            return str(self.mirror.problem)
        for path, fd in self.directory_fds.items():
            if is_same_file(fd, path):
                continue
            if os.fstat(fd).st_nlink:
                how, advice = "moved", "Put it back (remove any new one in its place)"
            elif path == self.inflight:
                how, advice = "removed", "Workers restore the journals that they have open"
            else:
                how, advice = "removed", "Unfinished conversations lose their files"
            return (
                f"{path}: it was {how} during the run. {advice}; run the same command again to "
                "continue."
            )
        return None

    def record_image(self, reference: str, digest: str) -> None:
        """Write the image of a conversation to run.json, since later starts need the same one.

        Call it before the record of the conversation is written.
        """
        if reference not in self.images:
            self.images[reference] = digest
            write_run_json(self.path, read_run_json(self.path) | {IMAGES: self.images})

    def close(self) -> None:
        """Release the lock, after the mirror has the rest. Raises what `Mirror.close` does."""
        with ExitStack() as stack:
            for fd in (*self.directory_fds.values(), self.lock_fd):
                stack.callback(os.close, fd)
            if self.mirror is not None:
                self.mirror.close()


def open_run_dir(
    config: RunConfig,
    scan: Scan,
    *,
    api: str,
    fresh: bool = False,
    accept_changes: Sequence[str] = (),
) -> RunDir:
    """Create or reopen the directory of a run, and lock it.

    `api` is the dialect of the config's model. `fresh` first moves an existing directory and its
    training file aside. `accept_changes` names config keys that may have changed although they
    affect the data.

    Raises `RunLocked`, `RunDirError`, and `ConfigError` if other keys that affect the data have
    changed since the run's first start.
    """
    path = config.run_dir
    with _explain_os_errors(path), ExitStack() as opened:
        lock_fd = _lock_directory(config, scan, fresh=fresh)
        opened.callback(os.close, lock_fd)
        mirror = None
        if config.mirror is not None:
            from batch_trajectories.mirror.mirror import Mirror  # most runs have none

            mirror = Mirror(config.mirror, path)
            opened.callback(mirror.close)
            mirror.take(fresh=fresh)
        for name in (INFLIGHT, WORKSPACES, EXPORTS):
            make_directory(path / name)
        for file in find_stale_files(path):
            file.unlink()
        before, run = _identity(config, scan, accept_changes)
        run["api"] = api
        write_run_json(path, run)
        save_scan(path / DATASET_INDEX, scan)
        remove_other_snapshots(path, scan.path)
        if mirror is not None:
            mirror.start(scan.path)
        directory_fds = {}
        for directory in (path / INFLIGHT, path / WORKSPACES):
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, fd)
            directory_fds[directory] = fd
        opened.pop_all()
    same_endpoints = before is not None and all(
        before["config"].get(key) == run["config"][key] for key in _ENDPOINT_KEYS
    )
    return RunDir(
        path=path,
        digest=run["digest"],
        versions=run["versions"],
        same_endpoints=same_endpoints,
        lock_fd=lock_fd,
        directory_fds=directory_fds,
        images=run[IMAGES],
        key=run[_KEY],
        mirror=mirror,
    )


@contextmanager
def _explain_os_errors(path: Path) -> Iterator[None]:
    """Turn errors of the system inside a `with` block into `StorageError` or `RunDirError`."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FAILURES:
            raise storage_error(path, error) from error
        raise RunDirError(
            f"{path}: cannot use this run directory: {error.strerror or error}; choose another "
            "place by --output_dir"
        ) from error


def _lock_directory(config: RunConfig, scan: Scan, *, fresh: bool) -> int:
    """Make the directory of a run and lock it; return the descriptor of the lock.

    If `fresh`, move what an earlier run has left there aside.
    """
    path = config.run_dir
    make_directory(path, is_inside=False, parents=True)
    if not fresh:
        refuse_strange_files(path)
        refuse_links(path)
        refuse_lost_records(path)
    lock_fd = lock(path)
    try:
        # What this start has written itself is no earlier run.
        own = {LOCK_FILE, scan.path.name, scan.path.with_suffix(".json").name}
        if fresh and any(entry.name not in own for entry in path.iterdir()):
            # Locked while it moves, so no other process can start working in it.
            aside = move_aside(path)
            path.mkdir(mode=0o700)
            moved_fd, lock_fd = lock_fd, lock(path)
            os.close(moved_fd)
            if scan.path.parent == path:
                move_snapshot(aside / scan.path.name, path)
    except BaseException:
        os.close(lock_fd)
        raise
    return lock_fd


def check_reopening(config: RunConfig, scan: Scan, accept_changes: Sequence[str] = ()) -> bool:
    """Raise what `open_run_dir` would raise for an existing run; return whether there is one."""
    if not (config.run_dir / RUN_FILE).exists():
        return False
    refuse_strange_files(config.run_dir)
    refuse_lost_records(config.run_dir)
    _identity(config, scan, accept_changes)
    return True


def _identity(
    config: RunConfig, scan: Scan, accept_changes: Sequence[str]
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The existing run.json, if any, and the new one of this start.

    Raises `ConfigError` if this start may not continue the run.
    """
    path = config.run_dir
    before = read_run_json(path) if (path / RUN_FILE).exists() else None
    run = _compose_run_json(path, config, scan, before, accept_changes)
    if before is not None:
        refuse_narrowing(path, scan, config, before, accept_changes)
    return before, run


def write_run_json(path: Path, run: dict[str, Any], *, is_own: bool = True) -> None:
    """Write run.json with a checksum of its content, and the MAC of this user if it `is_own`.

    Its config must be what this user gave, or that of a run of this user. Raises `StorageError`.
    """
    run = {name: value for name, value in run.items() if name != MAC}
    mac = compute_mac(exact_json.dumps(run)) if is_own else None
    if mac is not None:
        run[MAC] = mac
    content = {**run, _CHECKSUM: _run_checksum(run)}
    replace_file(path / RUN_FILE, exact_json.dumps(content, option=orjson.OPT_INDENT_2) + b"\n")


def _run_checksum(run: dict[str, Any]) -> str:
    """Compute a checksum that does not depend on the layout of the file."""
    return f"{crc32(exact_json.dumps(run)):08x}"


def restore_first_defaults(config: RunConfig) -> RunConfig:
    """Replace today's defaults by those of the run's first start, if they have changed since.

    An option that the user names keeps its value, which is compared with the run's as usual.
    """
    if not (config.run_dir / RUN_FILE).is_file():
        return config
    meaning = read_run_json(config.run_dir)["meaning"]
    if "expected_match" in meaning:
        return config
    first_defaults = {
        name: meaning.get(name, value)
        for name, value in EARLIER_DEFAULTS.items()
        if name not in config.model_fields_set
    }
    return config.model_copy(update=first_defaults)


def read_run_json(path: Path) -> dict[str, Any]:
    """Read run.json. Raises `RunDirError` if `path` is not a run directory."""
    try:
        run = exact_json.loads(_read_plain_file(path / RUN_FILE))
    except FileNotFoundError:
        raise RunDirError(f"{path}: no run here (it has no run.json)") from None
    except NotADirectoryError:
        raise RunDirError(f"{path}: not a run directory") from None
    except (OSError, orjson.JSONDecodeError) as error:
        raise RunDirError(f"{path}/run.json: cannot read it: {error}") from error
    if isinstance(run, dict) and run.get("schema_version") == SCHEMA_VERSION:
        if _CHECKSUM in run and run.pop(_CHECKSUM) != _run_checksum(run):
            raise RunDirError(
                f"{path}/run.json: changed since it was written: its checksum does not match. "
                "Restore it from a copy. If it was edited on purpose, or there is no copy, check "
                f'it, remove "{_CHECKSUM}" from it, and run the same command again, which compares '
                "it with the config"
            )
        run.pop(MAC, None)  # only `was_started_here` checks it
        if faults := find_faults(run):
            what = f"damaged ({first_few(faults)})"
            raise RunDirError(f"{path}/run.json: {what}; start over with --fresh")
        run["config"] = update_names(run["config"], run["config"].get("base_url"))
        _refuse_file_names(path, run["config"])
        # Without these defaults, reading the config would open the rows file that it names.
        run["config"] = {**_ROWS_DEFAULTS, **run["config"]}
        return run
    what = "not written by this program (it has no `schema_version`); restore it from a copy"
    if isinstance(run, dict) and (version := run.get("schema_version")) is not None:
        what = f"written by another version of this program (schema {version}, this one has "
        what += f"{SCHEMA_VERSION}); use that version"
    raise RunDirError(f"{path}/run.json: {what}, or start over with --fresh")


def _read_plain_file(file: Path) -> bytes:
    """The content of a plain file. Raises `OSError`; opening a pipe could wait for ever."""
    if file.exists() and not file.is_file():
        raise OSError(errno.EINVAL, "not a plain file")
    return file.read_bytes()


def _refuse_file_names(path: Path, config: Mapping[str, Any]) -> None:
    """Raise `RunDirError` if run.json has the name of a file in the place of its content.

    Reading such an option as a flag would open any file that a stranger's run.json names.
    """
    texts = [name for name in _INLINE_OPTIONS if isinstance(config.get(name), str)]
    if texts:
        raise RunDirError(
            f"{path}/run.json: config.{texts[0]}: a text, where a run holds the content itself; "
            "this file was not written by this program, restore it from a copy"
        )


def was_started_here(path: Path) -> bool:
    """Whether this user has started the run in `path`; see `origin`. Raises `RunDirError`."""
    try:
        run = exact_json.loads(_read_plain_file(path / RUN_FILE))
        run.pop(_CHECKSUM, None)
        mac = run.pop(MAC, None)
    except (OSError, orjson.JSONDecodeError, AttributeError) as error:
        raise RunDirError(f"{path}/run.json: cannot read it: {error}") from error
    return is_own(exact_json.dumps(run), mac)


def find_run_dir(run: Path | str, output_dir: Path) -> Path:
    """The directory of a run that is given by its path or its name in `output_dir`.

    The directory may not exist.
    """
    path, by_name = Path(run), output_dir / run
    is_path = (path / RUN_FILE).exists() or (path.exists() and not by_name.exists())
    return path if is_path else by_name


def list_run_names(output_dir: Path) -> list[str]:
    """The names of the runs in a directory. A hidden one is a run that is still being made."""
    return sorted(path.parent.name for path in output_dir.glob("[!.]*/run.json"))


def _compose_run_json(
    path: Path,
    config: RunConfig,
    scan: Scan,
    before: dict[str, Any] | None,
    accept_changes: Sequence[str],
) -> dict[str, Any]:
    """Make the new run.json, given that of the last start; None if this is the first one.

    Raises `ConfigError` for changes that are not accepted.
    """
    meaning = data_options(config)
    now = fill_defaults(meaning)
    known = (*now, *NARROWING, IMAGES)
    if unknown := [key for key in accept_changes if key not in known]:
        raise ConfigError(
            f"--accept_config_change: {', '.join(unknown)}: unknown key; the possible keys are "
            f"{', '.join(known)}"
        )
    history: list[dict[str, Any]] = []
    images: dict[str, str] = {}
    created, key = time.time(), new_run_key()
    if before is None:
        if _has_work(path):
            raise RunDirError(
                f"{path}: it has records but no run.json, so their config is unknown; put run.json "
                "back, or start over with --fresh"
            )
    else:
        created, history = before["created"], before["history"]
        key = str(before.get(_KEY) or key)
        if (shard := before["config"].get("shard")) != config.shard and _has_work(path):
            raise ConfigError(
                f"{path}: this run is for {f'shard {shard}' if shard else 'the whole dataset'}, "
                f"now {f'shard {config.shard}' if config.shard else 'the whole dataset'} is "
                "requested; each shard needs its own --run_name (`merge` joins all shards)"
            )
        then = stored_meaning(before)
        changes = {
            key: {"from": then.get(key), "to": now[key]} for key in now if then.get(key) != now[key]
        }
        images = before.get(IMAGES, {})
        replaced: dict[str, str] = {}
        if config.uses_images:
            from batch_trajectories.config.sandboxes import replaced_images

            replaced = replaced_images(config, images)
        if replaced:
            changes[IMAGES] = {
                "from": {name: images[name] for name in replaced},
                "to": replaced,
            }
            images = images | replaced
        refused = {key: change for key, change in changes.items() if key not in accept_changes}
        if refused and _has_work(path):
            raise ConfigError(_explain_changes(path, refused))
        if changes:
            history = [*history, {"at": time.time(), "changes": changes}]
    return {
        "schema_version": SCHEMA_VERSION,
        "run_name": config.run_name,
        "created": created,
        "digest": digest_options(meaning),
        "meaning": meaning,
        "config": config.to_json(),
        "dataset": describe_dataset(scan),
        "versions": {"python": platform.python_version(), **package_versions(_RECORDED_PACKAGES)},
        "history": history,
        IMAGES: images,
        _KEY: key,
    }


def describe_dataset(scan: Scan) -> dict[str, Any]:
    """The value of `dataset` in run.json."""
    user_toolsets = scan.rules.user_toolsets
    return {
        "path": str(scan.path.resolve()),
        "source": snapshot_source(scan.path),
        "rows": scan.rows,
        "bad_rows": len(scan.bad_rows),
        "sha256": scan.sha256,
        "is_priced": scan.rules.is_priced,
        "toolsets": None if scan.rules.toolsets is None else sorted(scan.rules.toolsets),
        **({"user_toolsets": sorted(user_toolsets)} if user_toolsets else {}),
    }


def _has_work(path: Path) -> bool:
    """Whether the run has records or journals, which must not be mixed with another config's."""
    records = path / RECORDS_FILE
    if records.exists() and records.stat().st_size:
        return True
    return any(segment.stat().st_size for segment in list_directory(path / INFLIGHT))


def _explain_changes(path: Path, changes: dict[str, dict[str, Any]]) -> str:
    lines = [f"{path}: this run has another config; mixing the two would spoil the data:"]
    lines += [
        f"  {key}: the run has {_excerpt(change['from'])}, now {_excerpt(change['to'])}"
        for key, change in changes.items()
    ]
    lines.append(
        "Use another --run_name; or --fresh to start over (the old directory is kept); or "
        f"--accept_config_change={','.join(changes)} to continue with the new values."
    )
    return "\n".join(lines)


def _excerpt(value: Any) -> str:
    return clip(repr(value), max_chars=_MAX_VALUE_CHARS)


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of packages by name, or "not installed"."""
    return {name: installed_version(name) or "not installed" for name in packages}
