"""Carry out a step of an audit: a fixed procedure takes the place of the conversation.

Set-up, diff and check are those of a run, so a step is judged as a conversation would be. Nothing
is journaled: a step that was cut off begins again in a new workspace.
"""

from __future__ import annotations

import time
from typing import Any

from agent.loop.rules import is_expected
from agent.loop.steps import Finish
from batch_trajectories.runs.audit.reference import Reference, read_reference
from batch_trajectories.runs.audit.steps import AuditStep, step_of
from batch_trajectories.runs.worker.audit.leaks import find_leaks
from batch_trajectories.runs.worker.audit.solving import NotApplied, solve
from batch_trajectories.runs.worker.audit.tamper import NOT_TRIED, can_forge, forge
from batch_trajectories.runs.worker.judging import collect
from batch_trajectories.runs.worker.task_runner import TaskRunner, Work


class AuditRunner(TaskRunner):
    """Carries out the steps of one worker."""

    async def do(self, work: Work) -> None:
        """Carry out one step; `work.audit` gets what `runs.audit.verdicts` reads."""
        step = step_of(work.task.sample)
        row = work.row
        reference, unusable = None, None
        try:
            reference = read_reference(
                work.task.columns,
                inside=self._config.is_inside,
                variables=self._config.env_from,
            )
        except ValueError as error:
            unusable = str(error)
        expected = row.spec.expected
        check = row.check
        facts = work.audit = {
            "is_judged": check is not None or expected is not None,
            "has_reference": bool(reference or unusable)
            or (check is None and expected is not None),
        }
        work.end = Finish("completed")
        if step.name == "reference" and unusable is not None:
            facts["not_applied"] = unusable
            return
        if step.name == "reference" and not facts["has_reference"]:
            return
        if step.name == "tamper" and not can_forge(self._config):
            facts["not_tried"] = NOT_TRIED
            return
        begun = time.monotonic()
        await self._prepared(work)
        facts["setup_s"] = round(time.monotonic() - begun, 3)
        if step.name == "leak":
            facts["found"] = await find_leaks(work.context, row, reference, expected)
            return
        if expected is not None:
            answer = expected if step.name == "reference" else ""
            facts["answer_passes"] = is_expected(answer, expected)
        if not await self._act(step, work, reference, facts):
            return
        if check is not None:
            facts["limit_s"] = check.timeout_s or self._config.command_timeout_s
            facts["command"] = check.command
            await collect(work.context, check, work.task.id)
        await self._judge(work)

    async def _act(
        self, step: AuditStep, work: Work, reference: Reference | None, facts: dict[str, Any]
    ) -> bool:
        """Do what an agent would have done; whether that was possible."""
        if step.name == "tamper":
            facts["forged"] = await forge(work.context, work.row, step.way)
        elif step.name == "reference" and reference is not None:
            try:
                facts["solution"] = await solve(work.context, reference)
            except NotApplied as error:
                facts["not_applied"] = str(error)
                return False
        return True
