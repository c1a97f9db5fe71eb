"""Makes the training files of a run from its records: the same records give the same bytes.

    ../<run_name>.jsonl    completed conversations that are valid rows, in dataset order
    exports/partial.jsonl  conversations that ended early, in the same form
    exports/rejects.jsonl  {"id", "status", "reason", "detail"} of records that cannot be exported
    exports/manifest.json  what each file holds; its counts sum to all tasks
    statistics.json        statistics of all these records; no file above depends on it

Every file is written under a temporary name and renamed, so readers never see an incomplete file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from glob import escape
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

from batch_trajectories.basics.errors import help_for_write
from batch_trajectories.basics.parts import Advance, run_in_processes
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.scan import Scan
from batch_trajectories.engine.run_totals import count_owed
from batch_trajectories.export.conversation.own_work import AuthoredWork
from batch_trajectories.export.conversation.reading import read_conversation, refuse_all_masked
from batch_trajectories.export.conversation.rewards import why_not_passed
from batch_trajectories.export.conversation.row_json import dumps_row
from batch_trajectories.export.conversation.style import Style
from batch_trajectories.export.conversation.tolerance import Tolerance, parse_reasons
from batch_trajectories.export.conversation.turns import Conversation
from batch_trajectories.export.conversation.validity import Reason, Rejected
from batch_trajectories.export.formats.hermes import FORMAT, make_row
from batch_trajectories.export.record_order import RecordOrder, RecordReader
from batch_trajectories.export.statistics.counts import KeyCounts, Statistics
from batch_trajectories.records.checks import judge_record
from batch_trajectories.records.files import (
    StorageError,
    make_directory,
    open_temporary,
    replace_json,
    sync_directory,
    temporary_path,
    training_path,
)
from batch_trajectories.records.names import (
    EXPORTS,
    MANIFEST_FILE,
    RECORDS_FILE,
    RUN_FILE,
    SCORES_FILE,
    STATISTICS_FILE,
)
from batch_trajectories.records.reader import ENOUGH_BYTES
from batch_trajectories.records.record_types import Record, StoredError
from batch_trajectories.records.scores import CHECK, Scores

_PLAIN = Style()
_BLOCK = 1 << 20

FileName = Literal["training", "partial", "rejects"]

FAILED = "failed"
"""The reason in manifests for a task whose record says that it failed."""

_HOLDS: dict[FileName, str] = {
    "training": "completed conversations, for training",
    "partial": "conversations that ended early",
    "rejects": "conversations in no row, with the reason",
}


class Routed(NamedTuple):
    """The file of a record and its row in it."""

    file: FileName
    row: dict[str, Any]
    reason: str | None
    """The reason of a rejection, for counts; None for a row of the other files."""
    others: Mapping[str, int] = {}
    """The number of turns by authors other than the run's model; see `Conversation.others`."""


class _Part:
    """The rows and counts of some of the records of a run, in files of their own."""

    def __init__(self, files: Mapping[FileName, Path]) -> None:
        self.files = files
        self.rows: KeyCounts[FileName] = KeyCounts()
        self.reasons: KeyCounts[str] = KeyCounts()
        self.others: KeyCounts[str] = KeyCounts()
        self.statistics = Statistics()

    def write(
        self,
        numbers: Iterable[Sequence[int]],
        *,
        read: RecordReader,
        style: Style,
        advance: Advance,
        paths: Mapping[FileName, Path],
    ) -> None:
        """Write the rows of records; `numbers` are those of their tasks, a few at a time.

        `paths` are the final paths of the files, for messages. `advance` is called with the number
        of records.
        """
        with ExitStack() as stack:
            files = {
                name: stack.enter_context(open_temporary(file, paths[name]))
                for name, file in self.files.items()
            }
            for few in numbers:
                records = [(record := read(number), AuthoredWork(record)) for number in few]
                lines: dict[FileName, list[bytes]] = {name: [] for name in files}
                for record, authored in records:
                    routed = route_record(record, authored, style=style)
                    lines[routed.file].append(dumps_row(routed.row))
                    self.rows[routed.file] += 1
                    if routed.reason is not None:
                        self.reasons[routed.reason] += 1
                    if routed.others and routed.file == "training":
                        self.others.merge(routed.others)
                for name, written in lines.items():
                    files[name].write(b"".join(written))
                # After the rows: reading a conversation counts its replies on the way.
                for record, authored in records:
                    self.statistics.add(record, authored)
                advance(len(few))

    def add(self, other: _Part) -> None:
        """Add the records of `other`, which follow those of this part."""
        self.rows.merge(other.rows)
        self.reasons.merge(other.reasons)
        self.others.merge(other.others)
        self.statistics.merge(other.statistics)
        for name, path in self.files.items():
            with path.open("ab") as file, other.files[name].open("rb") as added:
                shutil.copyfileobj(added, file, _BLOCK)
            other.files[name].unlink()

    def finish(self, name: FileName, path: Path, run_dir: Path) -> dict[str, Any]:
        """Move a file to `path`, durably; returns its part of the manifest."""
        with self.files[name].open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
            size = os.fstat(file.fileno()).st_size
        self.files[name].replace(path)
        sync_directory(path.parent)
        return {
            "path": os.path.relpath(path, run_dir),
            "holds": _HOLDS[name],
            "rows": self.rows[name],
            "bytes": size,
            "sha256": digest,
        }


def _part_file(temporary: Path, first: object) -> Path:
    """The file of the part whose first record has the number `first`."""
    return temporary.with_name(f"{temporary.stem}-{first}{temporary.suffix}")


def run_style(config: Mapping[str, Any]) -> Style:
    """The style of the training file of a run; `config` is the one in run.json."""
    return FORMAT.limit(
        Style(
            empty_think=config.get("empty_think", "keep"),
            tolerance=Tolerance(parse_reasons(config.get("accept_rows", ()))),
            require_reasoning=config.get("require_reasoning", False),
            require_passed=config.get("require_passed", False),
        )
    )


def route_record(
    record: Record,
    authored: AuthoredWork | None = None,
    *,
    style: Style = _PLAIN,
    render: Callable[[Conversation, Style], dict[str, Any]] = make_row,
) -> Routed:
    """Choose the file of a record and make its row; `style` is that of the run.

    For `authored` see `read_conversation`. `render` may make another object than the row; it must
    raise Rejected for the same conversations.
    """
    if record.status == "failed":
        error = record.error or StoredError("unknown", "")
        return _reject(record, FAILED, f"{error.error_class}: {error.message}")
    try:
        conversation = read_conversation(record, authored)
        refuse_all_masked(conversation)
        row = render(conversation, style)
    except Rejected as rejected:
        hint = FORMAT.how_to_keep(rejected.reason)
        detail = f"{rejected.detail}; {hint}" if hint else rejected.detail
        return _reject(record, rejected.reason.value, detail)
    completed = conversation.completed
    if style.require_reasoning and completed and not _has_reasoning(conversation):
        return _reject(record, Reason.NO_REASONING.value, "no turn of the model holds reasoning")
    wants_passed = style.require_passed and completed
    if wants_passed and (why := why_not_passed(judge_record(record))) is not None:
        return _reject(record, why.reason.value, why.detail)
    return Routed(
        file="training" if completed else "partial",
        row=row,
        reason=None,
        others=conversation.others if conversation.has_other_authors else {},
    )


def _has_reasoning(conversation: Conversation) -> bool:
    return any(turn.reasoning for turn in conversation.own_turns)


def export_run(
    run_dir: Path,
    scan: Scan,
    *,
    num_samples: int,
    style: Style = _PLAIN,
    config: RunConfig | None = None,
) -> None:
    """Write all files of a run from its records.

    `style` is that of the run. `config` says which samples are tasks; None: all. Tasks without a
    record are in no file; the manifest counts them as failed (an attempt failed and the next start
    tries again) or as pending.

    Raises `StorageError`, and `EnvironmentStop` if a record has become unreadable.
    """
    exports = run_dir / EXPORTS
    paths: dict[FileName, Path] = {
        "training": training_path(run_dir),
        "partial": exports / "partial.jsonl",
        "rejects": exports / "rejects.jsonl",
    }
    try:
        make_directory(exports)
        order = RecordOrder(run_dir, scan, num_samples=num_samples)
        whole, files = _write_files(run_dir, order, style, paths)
    except OSError as error:
        raise StorageError(
            f"{exports}: cannot write the training files: {error.strerror or error}. The records "
            f"are safe; {help_for_write(error)}, then run the same command again."
        ) from error
    left = count_owed(run_dir, scan, config, order.tasks_without_record())
    discarded = len(scan.bad_rows) * num_samples
    manifest = {
        "schema_version": 1,
        "format": FORMAT.name,
        "tasks": len(order) - left.not_needed + discarded,
        "exported": whole.rows["training"],
        "partial": whole.rows["partial"],
        "rejected": whole.rows["rejects"],
        "rejected_by_reason": dict(sorted(whole.reasons.items())),
        "turns_of_others": dict(sorted(whole.others.items())),
        "discarded": discarded,
        "failed": left.failed,
        "pending": left.pending,
        "gone": order.gone,
        "files": files,
    }
    replace_json(exports / MANIFEST_FILE, manifest)
    replace_json(run_dir / STATISTICS_FILE, whole.statistics.to_json())


def _write_files(
    run_dir: Path, order: RecordOrder, style: Style, paths: dict[FileName, Path]
) -> tuple[_Part, list[dict[str, Any]]]:
    """Write the rows of all records, in parts; returns the whole, and its files for the manifest.

    Temporary files are removed, also after a failure.
    """
    temporaries = {name: temporary_path(path) for name, path in paths.items()}
    numbers = array("I", order.numbers())
    try:
        # Rewards that came later are left out, but not verdicts that replace a check.
        with order.open_reader(Scores(run_dir, only=CHECK)) as read:

            def write(some: Sequence[int], advance: Advance) -> _Part:
                first = some[0] if some else 0
                part = _Part({name: _part_file(one, first) for name, one in temporaries.items()})
                part.write(
                    order.batches(some), read=read, style=style, advance=advance, paths=paths
                )
                return part

            whole, *others = run_in_processes(
                numbers, write, doing="export", enough=ENOUGH_BYTES, amount=order.total_bytes
            )
        for part in others:
            whole.add(part)
        # The training file comes last: if it is new, the others are.
        last_first = reversed(paths.items())
        finished = {name: whole.finish(name, path, run_dir) for name, path in last_first}
        return whole, [finished[name] for name in paths]
    finally:
        for temporary in temporaries.values():
            pattern = _part_file(Path(escape(str(temporary))), "*").name
            for file in temporary.parent.glob(pattern):
                file.unlink()


def read_left_out_ids(run_dir: Path) -> frozenset[str] | None:
    """The ids of completed conversations that are not in the training file, read from its rejects.

    None if the files may be outdated: something was written after the manifest, there are records
    of rows that are gone, or later scores.
    """
    manifest, rejects = (run_dir / EXPORTS / name for name in (MANIFEST_FILE, "rejects.jsonl"))
    try:
        written = manifest.stat().st_mtime_ns
        sources = (run_dir / RECORDS_FILE, run_dir / RUN_FILE, rejects)
        if max(source.stat().st_mtime_ns for source in sources) >= written:
            return None
        if (run_dir / SCORES_FILE).exists() or orjson.loads(manifest.read_bytes())["gone"]:
            return None
        rows = map(orjson.loads, rejects.read_bytes().splitlines())
        return frozenset(row["id"] for row in rows if row["status"] == "completed")
    except (FileNotFoundError, orjson.JSONDecodeError, KeyError, TypeError):
        return None


def _reject(record: Record, reason: str, detail: str) -> Routed:
    row = {"id": record.id, "status": record.status, "reason": reason, "detail": detail}
    return Routed(file="rejects", row=row, reason=reason)
