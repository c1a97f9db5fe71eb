"""The training files of a run, made from its records: the same records give the same bytes.

    ../<run_name>.jsonl    completed conversations that are valid rows, in dataset order
    exports/partial.jsonl  conversations that ended early, in the same form
    exports/rejects.jsonl  {"id", "status", "reason", "detail"} of records that cannot be exported
    exports/manifest.json  what each file holds; its counts sum to all tasks
    statistics.json        statistics of all these records; no file above depends on it

Every file is written to a temporary file and renamed, so readers never see an incomplete one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

from batch_trajectories.basics.console import LongWork
from batch_trajectories.export.conversation.own_work import Own
from batch_trajectories.export.conversation.reading import read_conversation
from batch_trajectories.export.conversation.rewards import not_passed
from batch_trajectories.export.conversation.row_json import dumps_row
from batch_trajectories.export.conversation.style import Style
from batch_trajectories.export.conversation.tolerance import Tolerance, accepted
from batch_trajectories.export.conversation.validity import Reason, Rejected
from batch_trajectories.export.formats.hermes import FORMAT, row_of
from batch_trajectories.export.record_order import RecordOrder
from batch_trajectories.export.rows.row_files import Hashing
from batch_trajectories.export.statistics import Statistics
from batch_trajectories.runs.dataset.scan import Scan
from batch_trajectories.runs.store.checks import judgement_of
from batch_trajectories.runs.store.failures import load_failed_attempts
from batch_trajectories.runs.store.files import (
    StorageError,
    make_directory,
    open_temporary,
    replace_file,
    sync_directory,
    temporary_for,
    training_file_of,
)
from batch_trajectories.runs.store.record_types import Record, StoredError
from batch_trajectories.runs.store.scores import CHECK, Scores
from batch_trajectories.runs.store.scores import NAME as SCORES

_PLAIN = Style()

Place = Literal["training", "partial", "rejects"]

_HOLDS: dict[Place, str] = {
    "training": "completed conversations, for training",
    "partial": "conversations that ended early",
    "rejects": "records that cannot be exported, with the reason",
}


class Routed(NamedTuple):
    """The file of a record and its row in it."""

    place: Place
    row: dict[str, Any]
    reason: str | None
    others: Mapping[str, int] = {}
    """See `Conversation.others`."""


@dataclass
class _Output:
    """A file that is being written."""

    path: Path
    file: Hashing
    rows: int = 0


def style_of_run(config: Mapping[str, Any]) -> Style:
    """The style of the training file of a run with this config, as run.json has it."""
    return FORMAT.limit(
        Style(
            empty_think=config.get("empty_think", "keep"),
            tolerance=Tolerance(accepted(config.get("accept_rows", ()))),
            require_reasoning=config.get("require_reasoning", False),
            require_passed=config.get("require_passed", False),
        )
    )


def route(record: Record, own: Own | None = None, *, style: Style = _PLAIN) -> Routed:
    """Choose the file of a record and make its row; `style` is that of the run.

    `own` is that of `read_conversation`.
    """
    if record.status == "failed":
        error = record.error or StoredError("unknown", "")
        return _reject(record, "failed", f"{error.error_class}: {error.message}")
    try:
        conversation = read_conversation(record, own)
        row = row_of(conversation, style)
    except Rejected as rejected:
        hint = FORMAT.how_to_keep(rejected.reason)
        detail = f"{rejected.detail}; {hint}" if hint else rejected.detail
        return _reject(record, rejected.reason.value, detail)
    if style.require_reasoning and row["completed"] and not row["has_reasoning"]:
        return _reject(record, Reason.NO_REASONING.value, "no turn of the model holds reasoning")
    wants_passed = style.require_passed and row["completed"]
    if wants_passed and (why := not_passed(judgement_of(record))) is not None:
        return _reject(record, why.reason.value, why.detail)
    place: Place = "training" if row["completed"] else "partial"
    return Routed(place, row, None, conversation.others)


def export_run(run_dir: Path, scan: Scan, *, num_samples: int, style: Style = _PLAIN) -> None:
    """Write all files of a run from its records; `style` is that of the run.

    Raises `StorageError`, and `EnvironmentStop` where a record has become unreadable.

    Tasks without a record are in no file; the manifest counts them as failed (an attempt failed
    and the next start tries again) or as pending.
    """
    exports = run_dir / "exports"
    paths: dict[Place, Path] = {
        "training": training_file_of(run_dir),
        "partial": exports / "partial.jsonl",
        "rejects": exports / "rejects.jsonl",
    }
    reasons: Counter[str] = Counter()
    others: Counter[str] = Counter()
    statistics = Statistics()
    try:
        make_directory(exports)
        with ExitStack() as stack:
            outputs = {
                place: stack.enter_context(_replacing(path)) for place, path in paths.items()
            }
            order = RecordOrder(run_dir, scan, num_samples=num_samples)
            # Rewards that came later are left out, but not what takes the place of a check.
            read = stack.enter_context(order.reading(Scores(run_dir, only=CHECK)))
            work = stack.enter_context(LongWork("export", total=order.with_record))
            for groups in order.groups(by_prompt=False):
                few = [(stored := read(number), Own(stored)) for number in chain(*groups)]
                work.advance(len(few))
                # First the rows: what reads a conversation counts its replies on the way.
                routed = [route(record, own, style=style) for record, own in few]
                for record, own in few:
                    statistics.add(record, own)
                for place, row, reason, by_others in routed:
                    outputs[place].file.write(dumps_row(row))
                    outputs[place].rows += 1
                    if reason is not None:
                        reasons[reason] += 1
                    if by_others and place == "training":
                        others.update(by_others)
    except OSError as error:
        raise StorageError(
            f"{exports}: cannot write the training files: {error.strerror or error}. The records "
            "are safe; make room and run the same command again."
        ) from error
    failed_attempts = load_failed_attempts(run_dir)
    to_retry = sum(scan.key(number) in failed_attempts for number in order.without_record())
    written = sum(output.rows for output in outputs.values())
    discarded = len(scan.bad_rows) * num_samples
    manifest = {
        "schema_version": 1,
        "format": FORMAT.name,
        "tasks": len(order) + discarded,
        "exported": outputs["training"].rows,
        "partial": outputs["partial"].rows,
        "rejected": outputs["rejects"].rows,
        "rejected_by_reason": dict(sorted(reasons.items())),
        "turns_of_others": dict(sorted(others.items())),
        "discarded": discarded,
        "failed": to_retry,
        "pending": len(order) - written - to_retry,
        "gone": order.gone,
        "files": [
            {
                "path": os.path.relpath(output.path, run_dir),
                "holds": _HOLDS[place],
                "rows": output.rows,
                "bytes": output.file.size,
                "sha256": output.file.finish(),
            }
            for place, output in outputs.items()
        ],
    }
    _replace_json(exports / "manifest.json", manifest)
    _replace_json(run_dir / "statistics.json", statistics.to_json())


def left_out(run_dir: Path) -> frozenset[str] | None:
    """The ids of completed conversations that are not in the training file, from its rejects.

    None if the files may differ from what the records and options would give now: something was
    written after the manifest, there are records of rows that are gone, or later scores.
    """
    manifest, rejects = (run_dir / "exports" / name for name in ("manifest.json", "rejects.jsonl"))
    try:
        written = manifest.stat().st_mtime_ns
        sources = (run_dir / "records.jsonl", run_dir / "run.json", rejects)
        if max(source.stat().st_mtime_ns for source in sources) >= written:
            return None
        if (run_dir / SCORES).exists() or orjson.loads(manifest.read_bytes())["gone"]:
            return None
        rows = map(orjson.loads, rejects.read_bytes().splitlines())
        return frozenset(row["id"] for row in rows if row["status"] == "completed")
    except (FileNotFoundError, orjson.JSONDecodeError, KeyError, TypeError):
        return None


def _replace_json(path: Path, value: dict[str, Any]) -> None:
    replace_file(path, orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n")


def _reject(record: Record, reason: str, detail: str) -> Routed:
    row = {"id": record.id, "status": record.status, "reason": reason, "detail": detail}
    return Routed("rejects", row, reason)


@contextmanager
def _replacing(path: Path) -> Iterator[_Output]:
    """A file that replaces `path` if no error occurs."""
    temporary = temporary_for(path)
    try:
        with open_temporary(temporary, path) as file:
            yield _Output(path, Hashing(file))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
