"""Advice about each kind of failure of a run's tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent.models.errors import RULES
from batch_trajectories.api.stored_run import StoredRun
from batch_trajectories.basics.errors import AgentFailed, SandboxLost
from batch_trajectories.basics.text import plural, single_line
from batch_trajectories.records.checks import CHECK_FAILED
from batch_trajectories.records.failures import WORKER_DIED, failures_by_class
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


def run_errors(stored: StoredRun) -> list[dict[str, Any]]:
    """`failures_by_class` of a run, each with its `remedy` ("" if none is known)."""
    return [one | {"remedy": find_remedy(one["class"])} for one in failures_by_class(stored.path)]


def errors_as_text(errors: list[dict[str, Any]]) -> str:
    """The kinds of failures of a run for a person: how many, the last one, and what to do."""
    if not errors:
        return "No attempt of a task has failed."
    lines = []
    for error in errors:
        last = plain(single_line(f"{error['id']}: {error['message']}"))
        lines.append(f"{plain(error['class'])}: {plural(error['count'], 'failed attempt')}")
        lines.append(f"  the last one: {last}")
        if error["remedy"]:
            lines.append(f"  what to do:   {error['remedy']}")
    return "\n".join(lines)
