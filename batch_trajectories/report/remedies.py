"""Advice about each kind of failure of a run's tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from agent.models.errors import RULES
from batch_trajectories.api.stored_run import StoredRun
from batch_trajectories.basics.errors import AgentFailed, SandboxLost
from batch_trajectories.basics.text import plural, single_line
from batch_trajectories.records.checks import CHECK_FAILED
from batch_trajectories.records.failures import WORKER_DIED, failures_by_class
from batch_trajectories.records.index import IndexEntry
from batch_trajectories.records.reader import open_index, read_record
from batch_trajectories.records.records import UnreadableRecord
from batch_trajectories.report.formatting import plain

_OTHER_REMEDIES: Mapping[str, str] = {
    AgentFailed.error_class: (
        "Read what the agent printed (`show`). `agents check AGENT` tries it without a model."
    ),
    CHECK_FAILED: "Repair the check, then `check RUN` judges the conversations again.",
    "internal": "This is a bug in this program. Report it with the traceback in run.log.",
    "session_failed": "Read in run.log what cut this session, and record it again.",
    SandboxLost.error_class: (
        "The machine of the conversation was lost. The next start tries it again on another one."
    ),
    "setup_failed": (
        "Repair the row's `setup`, files or image. `check_tasks` tries them without a model."
    ),
    "stopped": "A person cancelled this conversation. The next start tries it again.",
    WORKER_DIED: (
        "The task killed its worker each time. Lower its memory or --command_memory_mb, and use "
        "another --run_name to try it again."
    ),
}
"""Advice by the class of a failure, for failures that no endpoint caused."""


def find_remedy(error_class: str) -> str:
    """Find the advice about failures of a class; "" if the class is unknown."""
    for kind, rule in RULES.items():
        if kind == error_class:
            return rule.remedy
    return _OTHER_REMEDIES.get(error_class, "")


_ENDING_REMEDIES: Mapping[str, str] = {
    "length": "Raise --max_tokens.",
    "max_turns": "Raise --max_turns.",
    "context_exceeded": RULES["context_exceeded"].remedy,
    "refusal": RULES["filtered"].remedy,
}
"""Advice by ending, for conversations that ended early without a failure."""

_WHOLE = ("completed", "wrong_answer", "failed")
"""Endings that are no early end, or that failures tell of."""


def early_endings(stored: StoredRun) -> list[dict[str, Any]]:
    """The conversations that ended early, by ending, in the form of `run_errors`."""
    counts: Counter[str] = Counter()
    last: dict[str, tuple[bytes, IndexEntry]] = {}
    endings = []
    with open_index(stored.path, lenient=True) as (index, records):
        for key, entry in index.records():
            if entry.status not in _WHOLE:
                counts[entry.status] += 1
                last[entry.status] = key, entry
        for status, count in sorted(counts.items(), key=lambda one: (-one[1], one[0])):
            key, entry = last[status]
            try:
                record = read_record(records, entry.offset, entry.length, key)
                example = {"id": record.id, "message": record.status_reason or "no further reason"}
            except UnreadableRecord as error:
                example = {"id": "?", "message": str(error)}
            remedy = _ENDING_REMEDIES.get(status, "Read one of them: `show RUN ID`.")
            endings.append({"class": status, "count": count, "remedy": remedy, **example})
    return endings


def run_errors(stored: StoredRun) -> list[dict[str, Any]]:
    """`failures_by_class` of a run, each with its `remedy` ("" if none is known)."""
    return [one | {"remedy": find_remedy(one["class"])} for one in failures_by_class(stored.path)]


def errors_as_text(errors: list[dict[str, Any]], endings: list[dict[str, Any]]) -> str:
    """The kinds of failures and early endings of a run: how many, the last one, what to do."""
    lines = [] if errors else ["No attempt of a task has failed."]
    for error in errors:
        lines += _describe(error, plural(error["count"], "failed attempt"))
    for ending in endings:
        lines += _describe(ending, f"{plural(ending['count'], 'conversation')} ended early")
    return "\n".join(lines)


def _describe(kind: Mapping[str, Any], how_many: str) -> Iterator[str]:
    yield f"{plain(kind['class'])}: {how_many}"
    last = single_line(f"{kind['id']}: {kind['message']}")
    yield f"  the last one: {plain(last)}"
    if kind["remedy"]:
        yield f"  what to do:   {kind['remedy']}"
