"""Starts a run and describes how the start ended."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from batch_trajectories.basics.console import hide_progress, say
from batch_trajectories.basics.errors import (
    SIGNALLED,
    ConfigError,
    interruption_message,
    stop_on_machine_failure,
)
from batch_trajectories.basics.text import first_few, plural
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.kept_dataset import source_name
from batch_trajectories.dataset.scan import Scan, tasks
from batch_trajectories.engine.origin import describe_received
from batch_trajectories.engine.plan import Plan, make_plan, refuse_bad_rows, warn
from batch_trajectories.engine.run_dir import RunDir, open_run_dir, was_started_here
from batch_trajectories.engine.run_totals import RunTotals, as_html, describe_counts, format_usd
from batch_trajectories.engine.supervisor.run import Outcome, run_batch
from batch_trajectories.records.files import (
    list_directory,
    training_path,
)
from batch_trajectories.records.names import INFLIGHT, RUN_FILE
from batch_trajectories.records.records import parse_record

if TYPE_CHECKING:
    from batch_trajectories.export.conversation.style import Style

_MAX_LISTED_IDS = 5


@dataclass(frozen=True, slots=True, repr=False)
class RunEnd:
    """The result of a start of a run."""

    path: Path
    """The run directory."""
    training_file: Path
    totals: RunTotals
    """Totals of the run over all its starts."""
    exit_code: int
    """The exit code of the command: 0 complete, 1 some tasks failed, 3 out of budget, 4 stopped by
    the environment, 7 stopped by `stop_if`, 128 plus the signal's number if a signal stopped it."""
    reason: str | None
    """The reason why `exit_code` is neither 0 nor 1, and what to do next."""
    stopped_by: str | None
    """The reason why the environment or the budget stopped the run; None if neither did."""
    signal: int | None
    """The number of the signal that stopped the run; None without one."""
    is_out_of_budget: bool
    is_hopeless: bool = False
    """A rule of `stop_if` stopped it."""

    @property
    def cost_usd(self) -> float | None:
        """Dollars that the run has spent in all its starts, as far as known; None if unknown."""
        return self.totals.spent_usd

    def __repr__(self) -> str:
        """Return one line: path, exit code, counts and cost."""
        return (
            f"<RunEnd {str(self.path)!r}: exit {self.exit_code}; {describe_counts(self.totals)}; "
            f"{format_usd(self.cost_usd)}>"
        )

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        more = {} if self.reason is None else {"reason": self.reason}
        return as_html(self.path, self.totals, more)


def run(
    config: RunConfig,
    *,
    fresh: bool = False,
    accept_config_change: Collection[str] = (),
    only: Collection[str] | None = None,
    progress: bool | Callable[[str], object] = True,
) -> RunEnd:
    """Run all prompts of a dataset, or resume a run, as the command does; blocks until it ends.

    `fresh` moves an existing run aside, `accept_config_change` names
    options that may differ from the run's first start, `only` limits this start to the tasks with
    these ids. `progress`: True shows messages and progress on standard error, False nothing; a
    function gets each message.

    In the main thread, SIGINT, SIGTERM and SIGHUP stop the run in good order; see
    `RunEnd.signal`. Raises `RunError`: `ConfigError`, `DatasetError`, `RunDirError`, `RunLocked`,
    `EnvironmentStop`.
    """
    with stop_on_machine_failure(), nullcontext() if progress is True else hide_progress():
        tell = (say if progress else _discard) if isinstance(progress, bool) else progress
        plan = make_plan(config, fresh=fresh, say=tell)
        keys = None if only is None else _task_keys(plan.scan, only)
        return start(
            plan,
            fresh=fresh,
            accept_config_change=accept_config_change,
            only=keys,
            progress=progress,
        )


def start(
    plan: Plan,
    *,
    fresh: bool = False,
    accept_config_change: Collection[str] = (),
    only: Collection[bytes] | None = None,
    progress: bool | Callable[[str], object] = True,
) -> RunEnd:
    """Run a plan; see `run`. `only` are task keys; None: all tasks."""
    tell = (None if progress else _discard) if isinstance(progress, bool) else progress
    warn(plan, tell or say)
    refuse_bad_rows(plan, tell or say)
    if not fresh and _continues_others_calls(plan.config):
        (tell or say)(
            f"{describe_received(plan.config.run_dir)}; its unfinished conversations go on, and "
            "with --sandbox=local their recorded calls may run again on this machine"
        )
    with open_planned_run(plan, fresh=fresh, accept_config_change=accept_config_change) as run_dir:
        outcome = run_batch(
            plan, run_dir, only=only, tell=tell, why_rejected=_rejection_finder(plan.config)
        )
        from batch_trajectories.api.results import write_results

        totals = write_results(run_dir.path, plan.scan, plan.config, last_start=outcome.to_json())
    return make_run_end(run_dir.path, outcome, totals, is_all=only is None)


def make_run_end(path: Path, outcome: Outcome, totals: RunTotals, *, is_all: bool = True) -> RunEnd:
    """Make the result of a start; see `explain_exit`."""
    exit_code, reason = explain_exit(outcome, totals, is_all=is_all)
    return RunEnd(
        path=path,
        training_file=training_path(path),
        totals=totals,
        exit_code=exit_code,
        reason=reason,
        stopped_by=outcome.stopped_by,
        signal=outcome.signal,
        is_out_of_budget=outcome.is_out_of_budget,
        is_hopeless=outcome.is_hopeless,
    )


def _continues_others_calls(config: RunConfig) -> bool:
    """Whether recorded calls may run again, unsandboxed, in a run that another user started."""
    path = config.run_dir
    if config.sandbox != "local" or not (path / RUN_FILE).exists():
        return False
    has_calls = any(file.stat().st_size for file in list_directory(path / INFLIGHT))
    return has_calls and not was_started_here(path)


def open_planned_run(
    plan: Plan, *, fresh: bool, accept_config_change: Collection[str]
) -> closing[RunDir]:
    """Open and lock the run directory of a plan, for a `with` block."""
    changes = tuple(accept_config_change)
    return closing(
        open_run_dir(plan.config, plan.scan, api=plan.api, fresh=fresh, accept_changes=changes)
    )


def explain_exit(
    outcome: Outcome, totals: RunTotals, *, is_all: bool = True
) -> tuple[int, str | None]:
    """The exit code of a start, and why it is neither 0 nor 1.

    `is_all`: the start was meant to run all tasks.
    """
    if outcome.is_out_of_budget:
        return 3, (
            f"stopped: {outcome.stopped_by}\nFinished work is safe. Raise the budget and run the "
            "same command again to continue."
        )
    if outcome.is_hopeless:
        return 7, (
            f"stopped: {outcome.stopped_by}\nFinished work is safe. Look at some conversations "
            "(`view` or `show`), then run the same command again to continue, with another "
            "--stop_if or without it."
        )
    if (reason := outcome.stopped_by) is not None:
        # Some reasons include this advice.
        if "run the same command again" not in reason:
            reason += "\nFinished work is safe. Fix this and run the same command again."
        return 4, f"stopped: {reason}"
    if outcome.signal is not None and (totals.pending or totals.to_retry):
        return SIGNALLED + outcome.signal, interruption_message(outcome.signal)
    if totals.pending and is_all:
        return 4, (
            f"{plural(totals.pending, 'task')} without a record although the run has ended: "
            "records.jsonl or the dataset was changed meanwhile. Run the same command again: it "
            "sets unreadable data aside and runs what is pending."
        )
    return (1 if totals.failed else 0), None


def _rejection_finder(config: RunConfig) -> Callable[[bytes], str | None]:
    """A function from a stored record to the reason why it gives no training row, if it gives none.

    The code that makes rows is imported at the first record: not while calls wait to be sent.
    """

    @cache
    def style() -> Style:
        from batch_trajectories.export.training_files import run_style

        return run_style(config.to_json())

    def why_rejected(content: bytes) -> str | None:
        from batch_trajectories.export.training_files import route_record

        record = parse_record(content)
        return None if record is None else route_record(record, style=style()).reason

    return why_rejected


def _discard(message: str) -> None:
    pass


def _task_keys(scan: Scan, ids: Collection[str]) -> set[bytes]:
    """The keys of tasks with these ids. Raises `ConfigError` for unknown ids."""
    wanted = set(ids)
    keys = {task.id: task.key for task in tasks(scan) if task.id in wanted}
    if missing := sorted(wanted - keys.keys()):
        named = first_few([*map(repr, missing)], _MAX_LISTED_IDS)
        raise ConfigError(
            f"only: {source_name(scan.path)} has no task {named}; `open_run(...).tasks()` gives "
            "the ids"
        )
    return set(keys.values())
