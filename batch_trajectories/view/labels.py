"""The decisions of people: read from labels.jsonl, and appended as the command `label` does."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batch_trajectories.basics.errors import RunDirError
from batch_trajectories.export.statistics.agreement import Agreement
from batch_trajectories.records.record_types import Label, Record
from batch_trajectories.records.scores import (
    DISPUTED,
    LABELS,
    Labels,
    agreed_verdict,
    append_label,
    label_change,
    score_key,
)

MAX_NAME_CHARS = 100
_DECISION_FIELDS = ("verdict", "no_loss", "note", "over")


class RunLabels:
    """The labels of one run, in memory, as people decide about thousands; thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._labels: Labels | None = None
        self._inode: int | None = None
        self.size = 0
        self.error: str | None = None
        """The reason why the labels cannot be read; None if they can."""

    def refresh(self) -> Labels | None:
        """Read new lines, and return the labels; None without any, or if they cannot be read."""
        with self._lock:
            try:
                status = (self._run_dir / LABELS).stat()
            except FileNotFoundError:
                self._labels, self._inode, self.size, self.error = None, None, 0, None
                return None
            if status.st_ino == self._inode and status.st_size == self.size:
                return self._labels
            try:
                if (
                    self._labels is None
                    or status.st_ino != self._inode
                    or status.st_size < self.size
                ):
                    self._labels = Labels(self._run_dir)
                else:
                    self._labels.read_new_lines()
                self.error = None
            except RunDirError as error:
                self._labels, self.error = None, str(error)
            self._inode, self.size = status.st_ino, status.st_size
            return self._labels


def records_by_label(labels: Labels | None) -> dict[str, list[bytes]]:
    """The keys of records by what their labels say: a verdict, any, note, no_loss, preferred."""
    found: dict[str, list[bytes]] = {}
    for record, record_labels in labels.by_record() if labels is not None else ():
        names = {"any"} if any(map(_has_content, record_labels)) else set()
        if (verdict := agreed_verdict(record_labels)) is not None:
            names.add(verdict)
        for name, attribute in (("note", "note"), ("no_loss", "no_loss"), ("preferred", "over")):
            if any(getattr(label, attribute) for label in record_labels):
                names.add(name)
        for name in names:
            found.setdefault(name, []).append(bytes.fromhex(record))
    return found


def decided_records(labels: Labels | None, who: str) -> list[bytes]:
    """The records that a reviewer has given a verdict."""
    return [
        bytes.fromhex(record)
        for record, record_labels in (labels.by_record() if labels is not None else ())
        if any(label.who == who and label.verdict is not None for label in record_labels)
    ]


VERDICTS = ("keep", "reject", "fix", DISPUTED)


def _has_content(label: Label) -> bool:
    return any(getattr(label, name) for name in _DECISION_FIELDS)


def labels_json(labels: Sequence[Label]) -> list[dict[str, Any]]:
    """The labels of a record, one per reviewer who says anything."""
    return [
        {
            "who": label.who,
            "at": label.at,
            **{name: getattr(label, name) for name in _DECISION_FIELDS},
        }
        for label in labels
        if _has_content(label)
    ]


def decide(
    run_dir: Path, record: Record, others: Sequence[Record], given: Mapping[str, Any], who: str
) -> dict[str, Any]:
    """Append a reviewer's decision about a record; return the reviewer's earlier values of it.

    `given` has the keys of a label; for `over`, `others` are the records of its ids. Raises
    `ValueError` for a wrong value, and what `append_label` raises.
    """
    decision = {name: given[name] for name in _DECISION_FIELDS if name in given}
    if decision.get("over") is not None:
        unrelated = [one.id for one in others if one.prompt_id != record.prompt_id]
        if unrelated or any(one.id == record.id for one in others):
            raise ValueError(
                f"over: {(unrelated or [record.id])[0]!r} is no other sample of its prompt"
            )
        decision["over"] = {one.id: score_key(one) for one in others} or None
    decision |= {name: decision[name] or None for name in ("no_loss", "note") if name in decision}
    change = label_change(decision)
    turns = change.no_loss if isinstance(change.no_loss, list) else []
    if beyond := [turn for turn in turns if turn > len(record.turns)]:
        raise ValueError(f"no_loss: there is no turn {beyond[0]}")
    before = next((label for label in record.labels if label.who == who), Label(who=who))
    append_label(run_dir, score_key(record), record.id, who, change)
    earlier_values = {name: getattr(before, name) for name in _DECISION_FIELDS if name in given}
    if earlier_values.get("over") is not None:
        earlier_values["over"] = list(earlier_values["over"])
    return earlier_values


def compute_agreement(records: Sequence[Record]) -> dict[str, Any]:
    """Compute the agreement of reviewers on some records; see `export.agreement`."""
    agreement = Agreement()
    for record in records:
        agreement.add(record)
    labels: dict[str, Any] = agreement.to_json().get("labels", {})
    return labels
