"""The preview of a dry run: the state of an existing run, and the first request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice

from agent.gateway.command_agent import fill_placeholders
from agent.loop.answers import describe_rule
from agent.messages.message import Message, OpeningEvent
from agent.models.client.pool import ModelPool
from agent.models.model import Completion, Request
from agent.runner import ConversationRunner
from agent.setup import AgentServices
from agent.state.trajectory import Trajectory
from batch_trajectories.basics.text import clip, plural
from batch_trajectories.config.models import setup_of_task
from batch_trajectories.config.sandboxes import image_sandboxes
from batch_trajectories.dataset.row import RowTask
from batch_trajectories.dataset.scan import tasks
from batch_trajectories.dataset.scan_cache import cached_keys
from batch_trajectories.engine.plan import Plan
from batch_trajectories.engine.run_dir import check_reopening, refuse_held
from batch_trajectories.engine.run_totals import RunTotals, compute_totals, describe_dollars
from batch_trajectories.records.checks import expected_text
from batch_trajectories.records.names import DATASET_INDEX, RUN_FILE, WORKSPACES
from batch_trajectories.records.records import load_index
from batch_trajectories.records.tasks import Task
from toolsets.context import ToolContext
from toolsets.workspace.workspace import Workspace

_MAX_TEXT_CHARS = 2000
_ROWS_READ = 1000


def preview(plan: Plan, *, fresh: bool, accept_changes: Sequence[str]) -> str:
    """The state of the run that a start of `plan` would continue, and its first request.

    Writes nothing. Raises what the start would raise: `ConfigError`, `RunDirError`, `RunLocked`.
    """
    path = plan.config.run_dir
    lines = []
    if (path / RUN_FILE).exists() and fresh:
        lines.append(f"on disk    --fresh moves {path} aside; all tasks run again")
    elif check_reopening(plan.config, plan.scan, accept_changes):
        refuse_held(path)
        lines += _standing(plan)
    return "\n".join([*lines, *_first_prompt(plan), *_no_images(plan)])


def _standing(plan: Plan) -> list[str]:
    totals = compute_totals(plan.config.run_dir, plan.scan, plan.config)
    failed = totals.failed - totals.to_retry
    for_good = f", {failed:,} failed with no attempts left" if failed else ""
    spent = describe_dollars(totals.spent_usd, totals.spent_unknown, "records and replies")
    lines = [f"on disk    {plural(totals.done, 'task')} done{for_good}; spent so far: {spent}"]
    owed = totals.pending + totals.to_retry
    lines.append(f"to do      {plural(owed, 'task')}{_describe_owed(plan, totals)}")
    if totals.gone:
        lines.append(
            f"removed    {plural(totals.gone, 'finished task')} no longer part of the run: out of "
            "the training file, still in records.jsonl"
        )
    return lines


def _describe_owed(plan: Plan, totals: RunTotals) -> str:
    parts = []
    if totals.under_way:
        parts.append(
            f"{totals.under_way:,} in flight with {plural(totals.turns_under_way, 'turn')} saved"
        )
    if totals.to_retry:
        parts.append(f"{totals.to_retry:,} failed, to be retried")
    if new := _new_tasks(plan):
        parts.append(f"{new:,} new since the last start")
    return f": {', '.join(parts)}" if parts else ""


def _new_tasks(plan: Plan) -> int:
    """Number of tasks without a record that the last start did not have; 0 if unknown."""
    if plan.config.until_passed is not None:
        return 0  # most samples are no tasks yet
    if (before := cached_keys(plan.config.run_dir / DATASET_INDEX)) is None:
        return 0
    known = {before[start : start + 16] for start in range(0, len(before), 16)}
    rows, _ = load_index(plan.config.run_dir).match(plan.scan.keys)
    return sum(not row and plan.scan.key(n) not in known for n, row in enumerate(rows))


def _first_prompt(plan: Plan) -> list[str]:
    if not plan.scan.rows:  # none of them belongs to the shard
        return []
    task = next(tasks(plan.scan, [0]))
    if plan.config.agent is not None:
        return _first_command(plan, task)
    request = asyncio.run(_capture_request(plan, task))
    names = [tool["function"]["name"] for tool in request.tools]
    lines = [f"first      {_plain(task.id)}, as sent to the model:"]
    for message in request.messages:
        text = _plain(clip(message["content"], max_chars=_MAX_TEXT_CHARS))
        lines.append(f"  {message['role']}: " + text.replace("\n", "\n    "))
    lines.append(f"  tools offered: {', '.join(names) or 'none'}")
    if plan.config.check_expected and (expected := expected_text(task.columns)) is not None:
        lines.append(f"  {describe_rule(expected, plan.config.expected_match)}")
    return lines


def _first_command(plan: Plan, task: Task) -> list[str]:
    """The command of the first task's agent; the gateway's address is known only later."""
    row = plan.config.row_rules(plan.api).read(task.columns)
    assert row.agent is not None
    values = {
        "prompt": row.opening[-1]["content"],
        "model": setup_of_task(plan.setups, plan.config, task).settings.name,
    }
    texts = [*row.agent.command, *([f"<<< {row.agent.stdin}"] if row.agent.stdin else [])]
    command = clip(
        " ".join(fill_placeholders(text, values) for text in texts), max_chars=_MAX_TEXT_CHARS
    )
    return [
        f"first      {_plain(task.id)}, the command of {row.agent.name}:",
        "  " + _plain(command).replace("\n", "\n    "),
    ]


async def _capture_request(plan: Plan, task: Task) -> Request:
    """The first request of a task, after everything between conversation and model."""
    config = plan.config
    row = config.row_rules(plan.api).read(task.columns)
    setup = setup_of_task(plan.setups, config, task)
    pool = ModelPool(key_of=lambda settings: "", on_retry=lambda settings, message: None)
    # Nothing is done in it, so it is never made.
    context = ToolContext(Workspace(config.run_dir / WORKSPACES / task.key.hex()))
    home = AgentServices(setup, context, pool, config.tool_timeout_s)
    conversation = ConversationRunner(
        trajectory=_begin_conversation(row),
        spec=row.spec,
        model=_CapturingModel(),
        toolbox=home.toolbox(),
        journal=lambda event: None,
        services=home,
        subagents=row.spec.options.subagents,
    )
    try:
        await conversation.run()
    except _Captured as captured:
        return captured.request
    return Request(row.opening)  # it ends without any call


def _begin_conversation(row: RowTask) -> Trajectory:
    """The conversation before its first request. A simulated user is not asked for its message."""
    user = row.spec.options.simulated_user
    trajectory = row.trajectory([])
    if user is not None and user.writes_first and not trajectory.is_reopened:
        first = Message(role="user", content="(the simulated user writes the first message)")
        opening = [*trajectory.messages, first]
        trajectory.apply(OpeningEvent(kind="opening", messages=opening))
    return trajectory


class _Captured(Exception):
    def __init__(self, request: Request) -> None:
        super().__init__()
        self.request = request


class _CapturingModel:
    """A model that only captures the request."""

    async def complete(self, request: Request) -> Completion:
        raise _Captured(request)


def _no_images(plan: Plan) -> list[str]:
    """A line about rows whose images are not in the directory of images."""
    config, rules = plan.config, plan.config.row_rules(plan.api)
    if not config.is_inside or plan.scan.rows == 0:
        return []
    problem_of = cache(image_sandboxes(config).problem_of_image)
    missing = []
    for row in (rules.read(task.columns) for task in _first_tasks(plan)):
        names = [row.image.reference if row.image else config.docker_image or ""]
        if row.check is not None and row.check.image is not None:
            names.append(row.check.image)
        missing.append(next(filter(None, map(problem_of, names)), None))
    problems = [problem for problem in missing if problem is not None]
    if not problems:
        return []
    of = f"of the first {len(missing):,} rows" if len(missing) < plan.scan.rows else "rows"
    return [f"images     {len(problems):,} {of} will fail; the first: {_plain(problems[0])}"]


def _first_tasks(plan: Plan) -> Iterator[Task]:
    """The first sample of each of the first rows."""
    numbers = range(0, plan.scan.tasks, plan.scan.num_samples)
    return islice(tasks(plan.scan, numbers), _ROWS_READ)


def _plain(text: str) -> str:
    """Remove control characters."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)
