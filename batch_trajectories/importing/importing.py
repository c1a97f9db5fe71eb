"""Imports conversations of other programs as rows and records of a run directory.

The dataset of the run, `imported/conversations.jsonl`, has a row per conversation. A row is on disk
before its record, so an import that was killed continues where it stopped. Equal conversations are
imported once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import orjson
from msgspec.structs import replace

from batch_trajectories.basics import exact_json
from batch_trajectories.basics.console import track_progress
from batch_trajectories.basics.errors import ConfigError, DatasetError
from batch_trajectories.basics.text import first_few
from batch_trajectories.config.loading import load_config
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.row import RowRules
from batch_trajectories.dataset.scan import Scan, make_task, scan, tasks
from batch_trajectories.dataset.source import HUB_PREFIX
from batch_trajectories.engine.record import as_stored
from batch_trajectories.engine.run_dir import (
    RunDir,
    describe_dataset,
    open_run_dir,
    read_run_json,
    write_run_json,
)
from batch_trajectories.importing.conversation import SourceConversation, Unreadable
from batch_trajectories.importing.sources import Read, SourcePlace, read_conversations
from batch_trajectories.records.files import (
    AppendFile,
    DamagedLine,
    make_directory,
    repair_tail,
    replace_file,
)
from batch_trajectories.records.names import IMPORTED, RUN_FILE
from batch_trajectories.records.records import RecordFile
from batch_trajectories.records.tasks import Task

MODEL = "imported:any"
"""The model in the config of such a run; each record has the model of its own."""

_MAX_NAMED = 20
_DIGEST = "imported_digest"


@dataclass(slots=True)
class ImportEnd:
    """The result of an import."""

    completed: int = 0
    ended_early: int = 0
    already_recorded: int = 0
    """The number of conversations that had a record already."""
    repeated: int = 0
    """The number of conversations that equal an earlier one of the same import."""
    changed: list[str] = field(default_factory=list)
    """Places whose conversation has changed since it was imported."""
    unreadable: list[str] = field(default_factory=list)
    """Place, field and reason of each conversation that could not be read."""
    unreadable_file: Path | None = None
    """The file with a line for each unreadable conversation; None without any."""

    def describe(self) -> str:
        """Write a line per kind of result, with its first places."""
        counted = [
            (self.completed, "completed", []),
            (self.ended_early, "without an answer at their end", []),
            (self.already_recorded, "already in this run", []),
            (self.repeated, "equal to one before them, left out", []),
            (
                len(self.changed),
                "changed since they were imported; import them into another run:",
                self.changed,
            ),
        ]
        lines = ["imported conversations"]
        for count, kind, places in counted:
            if count:
                lines.append(f"{count:>9,} {kind} {first_few(places, _MAX_NAMED)}".rstrip())
        if self.unreadable:
            lines.append(f"{len(self.unreadable):>9,} unreadable, left out")
            lines += [f"          {what}" for what in self.unreadable[:_MAX_NAMED]]
            if len(self.unreadable) > _MAX_NAMED:
                lines.append(f"          all of them: {self.unreadable_file}")
            lines.append(
                "          mend these places, or delete there what is no part of the conversation, "
                "and import again"
            )
        return "\n".join(lines)


def import_conversations(
    names: Iterable[Path],
    run_name: str,
    output_dir: Path,
    *,
    format: str | None = None,
    metadata: Collection[str] = (),
) -> tuple[ImportEnd, RunConfig, Scan]:
    """Import files, directories and hub datasets into a new run, or one of earlier imports.

    `format` is the format of all sources, or None to recognize each. The columns that `metadata`
    names are no part of a conversation: short ones become columns to filter by, others are left
    out. Raises `DatasetError` and `ConfigError` for sources that cannot be read, `StorageError`,
    and the errors of `open_run_dir`.
    """
    names = [*names]
    for name in names:
        if not str(name).startswith(HUB_PREFIX) and not name.exists():
            raise DatasetError(f"{name}: no such file or directory")
    path = output_dir / run_name / IMPORTED / "conversations.jsonl"
    config = load_config(
        None,
        {
            "run_name": run_name,
            "output_dir": output_dir,
            "dataset_file": path,
            "model": MODEL,
            "sandbox": "local",
        },
    )
    _refuse_other_runs(config.run_dir)
    rules = config.row_rules(MODEL)
    with NamedTemporaryFile() as empty:
        source = path if path.exists() else Path(empty.name)
        known = scan(source, max_samples=None, rules=rules, may_be_empty=True)
    with closing(open_run_dir(config, replace(known, path=path), api=MODEL)) as run_dir:
        imported = ImportEnd()
        found = (one for name in names for one in read_conversations(name, format, metadata))
        _import(found, path, rules, run_dir, imported)
        scanned = scan(path, max_samples=None, rules=rules, may_be_empty=True)
        run = read_run_json(run_dir.path)
        write_run_json(run_dir.path, run | {"dataset": describe_dataset(scanned)})
    return imported, config, scanned


def _refuse_other_runs(run_dir: Path) -> None:
    """Raise `ConfigError` for a run whose conversations were not imported."""
    if (run_dir / RUN_FILE).exists() and read_run_json(run_dir)["config"].get("model") != MODEL:
        raise ConfigError(
            f"{run_dir}: this run has conversations of its own; import into another --run_name, "
            "and `export` both together"
        )


def _import(
    found: Iterable[tuple[SourcePlace, Read]],
    path: Path,
    rules: RowRules,
    run_dir: RunDir,
    imported: ImportEnd,
) -> None:
    make_directory(path.parent)
    repair_tail(path, run_dir.quarantine)
    with (
        closing(RecordFile(run_dir.path, run_dir.quarantine)) as records,
        closing(AppendFile(path)) as rows,
    ):
        there = records.take_index()
        added: set[bytes] = set()
        writer = _Rows(rows, scan(path, max_samples=None, rules=rules, may_be_empty=True))
        for place, read in track_progress(found, "import", unit="conversations"):
            try:
                if isinstance(read, Unreadable):
                    raise read
                task = writer.make_task(place, read)
                if task is None:
                    imported.changed.append(str(place))
                    continue
                if task.key in added:
                    imported.repeated += 1
                    continue
                if task.key in there:
                    imported.already_recorded += 1
                    continue
                origin = {"format": place.format, "file": place.source, "line": place.line}
                record = as_stored(read.record(task, run_dir.digest, place.at, origin))
            except (Unreadable, DamagedLine, ValueError) as error:
                imported.unreadable.append(f"{place}: {error}")
                continue
            records.add(record)
            added.add(task.key)
            if record.status == "completed":
                imported.completed += 1
            else:
                imported.ended_early += 1
        rows.sync()
        records.sync()
    if imported.unreadable:
        imported.unreadable_file = path.with_name("unreadable.txt")
        text = "".join(f"{what}\n" for what in imported.unreadable)
        replace_file(imported.unreadable_file, text.encode(errors="replace"))


class _Known(NamedTuple):
    """The identity of a row of the run."""

    id: str
    occurrence: int
    """The number of the row among those with its id, from 1."""
    place: str
    """The place at which the conversation was first read."""
    digest: str


class _Rows:
    """The rows of an import: those on disk, and new ones."""

    def __init__(self, file: AppendFile, known: Scan) -> None:
        self._file = file
        self._rules = known.rules
        self._known: dict[str, _Known] = {}
        """The rows by the digests of their conversations."""
        self._places: set[int] = set()
        self._ids: Counter[str] = Counter()
        for task in tasks(known):
            self._add(task.columns)

    def make_task(self, place: SourcePlace, found: SourceConversation) -> Task | None:
        """Return the task of a conversation, and write its row; equal conversations share both.

        Returns None if another conversation was imported from its place. Raises `ValueError` if no
        row can hold it.
        """
        digest = _conversation_digest(found)
        known = self._known.get(digest) or self._find_earlier_version(place, found)
        columns: dict[str, Any] = {
            **found.columns,
            "id": known.id if known else found.id or f"{Path(place.source).stem}-{place.line}",
            "prompt": found.prompt(),
            "imported_from": known.place if known else str(place),
            _DIGEST: known.digest if known else digest,
        }
        if known is None:
            if self._places.intersection(map(hash, place.names())):
                return None
            self._rules.read(columns)
            self._file.append(exact_json.dumps(columns, option=orjson.OPT_APPEND_NEWLINE))
            known = self._add(columns)
        return make_task(columns, self._rules, occurrence=known.occurrence)

    def _find_earlier_version(self, place: SourcePlace, found: SourceConversation) -> _Known | None:
        """Find the row that an earlier version wrote for this conversation; None without one."""
        known = self._known.get(digest_of_messages(found))
        return known if known is not None and known.place in place.names() else None

    def _add(self, columns: Mapping[str, Any]) -> _Known:
        id, place = columns["id"], columns["imported_from"]
        self._ids[id] += 1
        self._places.add(hash(place))
        known = self._known[columns[_DIGEST]] = _Known(id, self._ids[id], place, columns[_DIGEST])
        return known


def _conversation_digest(found: SourceConversation) -> str:
    """Return the digest of a conversation with its marks, and columns such as scores."""
    dialogue = found.conversation
    content = exact_json.dumps(
        [digest_of_messages(found), dialogue.no_loss, dialogue.cut, dict(found.columns)]
    )
    # The prefix distinguishes it from digests of earlier versions, without marks and columns.
    return f"2-{blake2b(content, digest_size=16).hexdigest()}"


def digest_of_messages(found: SourceConversation) -> str:
    """Return the digest that earlier versions made, without marks and columns."""
    content = exact_json.dumps(
        [found.conversation.to_record(0.0), found.tools, found.facts, found.imported, found.id]
    )
    return blake2b(content, digest_size=16).hexdigest()
