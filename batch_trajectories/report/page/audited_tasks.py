"""The tasks of an audit as rows and records of the page: the status of a task is its verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from batch_trajectories.runs.audit.verdicts import speaks_against


def task_row(line: Mapping[str, Any]) -> dict[str, Any]:
    """The row of the table for a line of tasks.jsonl; steps are its `tools`, as in `row_of`."""
    done = Counter(part["step"] for part in line["steps"])
    against = Counter(part["step"] for part in line["steps"] if speaks_against(part))
    return {
        "id": line["id"],
        "status": line["verdict"],
        "error": None,
        "prompt": line["why"],
        "calls": done.total(),
        "failed_calls": against.total(),
        **line["times"],
        "tools": {name: [count, against[name]] for name, count in done.items()},
        "flags": line["defects"],
    }


def task_record(line: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of a task."""
    steps = [{**part, "against": speaks_against(part)} for part in line["steps"]]
    return {**line, "steps": steps, "tools": [], "training_form": None}
