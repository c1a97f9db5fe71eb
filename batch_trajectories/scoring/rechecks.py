"""Decides for each conversation whether and how `check` can judge it again.

If its row has a check, the workspace is rebuilt: from the diff in a fresh image, if the diff is
whole and the check runs in a fresh copy anyway; else from the workspace that the run kept. If the
row has no check, the answer is compared with the expected one.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from agent.loop.answers import matches
from agent.options import Match
from batch_trajectories.audit.audited import SAME_IN_RUNS
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import ToolError
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.config.sandboxes import image_sandboxes
from batch_trajectories.dataset.columns import column_names
from batch_trajectories.dataset.kept_dataset import DatasetSnapshot
from batch_trajectories.dataset.lines import read_row
from batch_trajectories.dataset.row_conversation import USER_COLUMN, opening_messages
from batch_trajectories.dataset.row_workspace import (
    HistoryColumns,
    InsideColumns,
    SetupColumns,
    image_columns,
)
from batch_trajectories.dataset.scan import Scan, tasks
from batch_trajectories.export.conversation.ending import find_answer, is_answered
from batch_trajectories.records.checks import expected_text, find_question
from batch_trajectories.records.index import IndexEntry
from batch_trajectories.records.record_types import Record, Score
from batch_trajectories.records.scores import CHECK, score_key

SAME = "same"
"""The reason for conversations whose last verdict is by this check already."""

HARMLESS = {
    SAME: "judged by this check before",
    "failed": "failed: there is no conversation to judge",
    "no_check": "its row has no check, and no expected answer that is compared",
    "no_answer": "ended before an answer that can be compared",
}
"""Reasons why there is nothing to judge, with explanations."""

REFUSED = {
    "no_row": "the dataset has no row for it",
    "several_rows": "several rows have its prompt and no id: give them ids",
    "bad_row": "its row cannot be used",
    "cut_diff": "its diff was cut: what it changed is not known whole",
    "no_diff": "its diff could not be made",
    "only_diff": "its check runs in the container as it was (in: same), of which the run kept only "
    "a diff: give --check_in=fresh, or run with --keep_workspaces",
    "not_kept": "neither a diff nor its workspace was kept: run with --keep_workspaces",
}
"""Reasons why a conversation cannot be judged although there is something to judge."""


class Judging(NamedTuple):
    """The way in which a conversation is judged again."""

    version: str
    """A digest of the check: of its columns, the options of tasks and the image."""
    row: dict[str, Any] | None
    """The row for the workers; None if only the answer is compared."""
    check: dict[str, Any] | None = None
    """The result of comparing the answer; None if workers judge."""


class LeftOut(NamedTuple):
    """The reason why a conversation is not judged again."""

    reason: str
    """A key of `HARMLESS` or `REFUSED`."""
    detail: str = ""


class NewRows:
    """Finds the rows of another dataset by the ids or prompts of records."""

    def __init__(self, scan: Scan, dataset: DatasetSnapshot) -> None:
        self._dataset = dataset  # a reference, as it may be a temporary file
        self._path = scan.path
        self._by_id: dict[str, int] = {}
        self._by_prompt: dict[bytes, int | None] = {}
        for number, task in enumerate(tasks(scan)):
            place = scan.offsets[number]
            if not _is_generated(task.prompt_id):
                self._by_id[task.prompt_id] = place
            else:  # the id is a hash of the whole row, which another check changes
                prompt = _prompt_bytes(task.columns)
                self._by_prompt[prompt] = None if prompt in self._by_prompt else place

    def find_row(self, record: Record) -> dict[str, Any] | LeftOut:
        """Find the row of a record."""
        place = self._by_id.get(record.prompt_id)
        if place is None and _is_generated(record.prompt_id):
            prompt = _prompt_bytes(record.row)
            place = self._by_prompt.get(prompt)
            if place is None and prompt in self._by_prompt:
                return LeftOut("several_rows")
        if place is None:
            return LeftOut("no_row")
        with self._path.open("rb") as file:
            return read_row(file, place) or LeftOut("no_row")


class Rechecks:
    """Decides how each record of a run is judged again."""

    def __init__(self, config: RunConfig, rows: NewRows | None, match: Match | None = None) -> None:
        """`config` is that of the workers. `rows`: None means the rows in the records.

        `match` is how answers are compared; None: as they were when the conversation ended.
        """
        self._config = config
        self._match = match
        self._rows = rows
        self._rules = config.row_rules("scripted")
        options = config.to_json()
        self._options = {name: options[name] for name in SAME_IN_RUNS}
        self._images: dict[str, str | None] = {}

    def decide(self, record: Record, place: IndexEntry, key: bytes) -> Judging | LeftOut:
        """Decide how a record is judged; `place` and `key` are its index entry and its task key."""
        if record.status == "failed":
            return LeftOut("failed")
        row = record.row if self._rows is None else self._rows.find_row(record)
        if isinstance(row, LeftOut):
            return row
        found = self._recheck_answer(record, row)
        if row.get("check") is not None:
            found = self._recheck_workspace(record, row, place, key)
        last = next((one for one in record.scores or () if one.source == CHECK), None)
        is_same = isinstance(found, Judging) and last is not None and last.version == found.version
        return LeftOut(SAME) if is_same and not _has_failed(last) else found

    def _recheck_answer(self, record: Record, row: Mapping[str, Any]) -> Judging | LeftOut:
        expected = expected_text(row)
        is_asked = self._config.check_expected or (record.options or {}).get("check_expected")
        if not is_asked or expected is None:
            return LeftOut("no_check")
        if not is_answered(record):
            return LeftOut("no_answer")
        answer = find_answer(record) or ""
        match = self._match or (record.options or {}).get(
            "expected_match", self._config.expected_match
        )
        question = find_question(record)
        passed = matches(answer, expected, match, question)
        check = {"passed": passed, "reward": float(passed), "answer": answer[:200]}
        return Judging(_digest({"expected": expected, "match": match}), None, check)

    def _recheck_workspace(
        self, record: Record, row: Mapping[str, Any], place: IndexEntry, key: bytes
    ) -> Judging | LeftOut:
        names = [*column_names(SetupColumns)]
        if self._rules.image != "ignored":
            names += image_columns(row)
        if self._config.is_inside:
            names += [*column_names(HistoryColumns), *column_names(InsideColumns)]
        columns = {name: row[name] for name in names if row.get(name) is not None}
        columns["prompt"] = record.id
        try:
            task = self._rules.read(columns)
        except ValueError as error:
            return LeftOut("bad_row", str(error))
        source = _source(record, is_afresh=task.is_judged_afresh)
        if isinstance(source, LeftOut):
            return source
        reference = task.image.reference if task.image else self._config.docker_image
        image = self._image_digest(reference) if self._config.is_inside and reference else None
        judge = task.check.image if task.check else None
        judged = {
            "offset": place.offset,
            "length": place.length,
            "task": key.hex(),
            "from": source,
            "turns": None if record.agent is not None else len(record.own_turns),
        }
        decides = {**columns, "prompt": None, "options": self._options, "image": image}
        if judge is not None:
            decides["judge"] = self._image_digest(judge)
        version = _digest(decides)
        id_ = f"check-{record.id}-{score_key(record)}"  # unlike any generated id
        return Judging(version, {"id": id_, **columns, "judged": judged})

    def _image_digest(self, reference: str) -> str | None:
        if reference not in self._images:
            try:
                found = image_sandboxes(self._config).digests([reference])
            except ToolError:
                found = {}  # the plan says why
            self._images[reference] = found.get(reference)
        return self._images[reference]


def _has_failed(score: Score | None) -> bool:
    """Whether the check itself failed, so that it is repeated."""
    return score is not None and (score.check or {}).get("error") is not None


def _source(record: Record, *, is_afresh: bool) -> str | LeftOut:
    """The source for rebuilding the workspace: `diff` or `workspace`."""
    diff = record.diff
    if is_afresh and diff is not None and not diff.get("truncated") and not diff.get("error"):
        return "diff"
    if record.workspace is not None and "name" in record.workspace:
        return "workspace"
    if diff is not None and diff.get("truncated"):
        return LeftOut("cut_diff")
    if diff is not None and diff.get("error"):
        return LeftOut("no_diff", str(diff["error"]))
    if diff is not None:
        return LeftOut("only_diff")
    return LeftOut("not_kept", (record.workspace or {}).get("error", ""))


def _is_generated(prompt_id: str) -> bool:
    """Whether an id was generated, as the row had none."""
    return prompt_id.startswith("row-")


def _prompt_bytes(columns: Mapping[str, Any]) -> bytes:
    try:
        opening: Any = opening_messages(columns, None)
    except ValueError:  # a simulated user writes the first message
        opening = columns.get(USER_COLUMN)
    return blake2b(exact_json.dumps(opening), digest_size=16).digest()


def _digest(value: Mapping[str, Any]) -> str:
    content = exact_json.dumps(value, option=orjson.OPT_SORT_KEYS)
    return blake2b(content, digest_size=8).hexdigest()
