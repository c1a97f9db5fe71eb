"""Plans: the model writes a plan, then works on one step after the other.

It is one conversation: the plan is its first reply, and each step begins with a note.
"""

from __future__ import annotations

import re

from agent.loop.steps import AddNote
from agent.state.trajectory import Trajectory
from batch_trajectories.basics.option_names import FIXED

_STEP = re.compile(r"^\s*(?:\d+[.)]|[-*•])\s+(?P<step>\S.*)$", re.MULTILINE)

_MAKE_A_PLAN = (
    "Before you begin, write a plan: a numbered list of the steps, a line each. Call no tools yet."
)
PLAN = "plan"

_STEP_TURNS: int = FIXED["plan_step_turns"]

_ALL_DONE = "All steps of the plan are done. Give the final answer now."


def plan_note(t: Trajectory) -> AddNote | None:
    """The note that begins the next step or the final answer; None if the current step continues.

    A step ends with a reply without calls, or after `_STEP_TURNS` replies.
    """
    if not t.replies:
        return AddNote(PLAN, _MAKE_A_PLAN)
    begun = [note for note in t.notes if note["reason"] in ("plan_step", "plan_answer")]
    if t.last_calls() and begun and t.turns - begun[-1]["turn"] < _STEP_TURNS:
        return None
    steps = steps_of(t.replies[0]["message"]["content"])
    if len(begun) < len(steps):
        number = len(begun) + 1
        text = (
            f"Step {number} of {len(steps)}: {steps[number - 1]}\n"
            f"Work on this step alone, in at most {_STEP_TURNS} replies, and reply "
            "with its outcome."
        )
        return AddNote("plan_step", text)
    return AddNote("plan_answer", _ALL_DONE) if len(begun) == len(steps) else None


def steps_of(plan: str) -> list[str]:
    """The steps of a plan: the items of its list; a plan without a list is one step."""
    return [match["step"].strip() for match in _STEP.finditer(plan)] or ["do what the plan says"]
