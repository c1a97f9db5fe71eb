"""The rules that decide the next step of a conversation, or end it.

`next_step` is a pure function of the trajectory: after a crash and a replay it decides as before.
If several rules apply, the first in this order wins: budget, time_limit,
length, leaked_call, completed, awaiting_input, repeat, errors, max_turns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from agent.loop.acceptance import MAX_RUN_CALLS
from agent.messages.leaked_calls import find_leaked_call
from agent.messages.message import (
    COST_ONLY,
    USER_TURN,
    Message,
    ResultEvent,
    ToolCall,
    opens_reasoning,
    split_inline_reasoning,
)
from agent.options import AgentOptions
from agent.state.tally import Tally
from agent.state.trajectory import CONTINUE_CUT, Status, Trajectory
from batch_trajectories.basics.option_names import FIXED
from toolsets.tool import ASKS

# The steps of a conversation: the rules choose a step, the loop takes it.


class CallModel(NamedTuple):
    """Call the model for its next reply."""

    tool_choice: Literal["auto", "none"] = "auto"


class RunTools(NamedTuple):
    """Run the calls of the last reply that have no result yet."""

    calls: list[tuple[int, ToolCall]]


class ResumeTool(NamedTuple):
    """Give the user's reply to a call whose tool asked for it."""

    call: ToolCall
    result: ResultEvent
    """The result with the question."""
    reply: str
    is_for_tool: bool
    """Whether the tool is called again with the reply; if not, only the model sees it."""


class AddNote(NamedTuple):
    """Add a text for the model; `reason` names the rule that wrote it."""

    reason: str
    text: str


class AskUser(NamedTuple):
    """Have the simulated user write its next message."""


class Finish(NamedTuple):
    """End the conversation; `reason` adds details to the status."""

    status: Status
    reason: str | None = None

    def describe(self) -> str:
        """The status, with the reason if there is one."""
        return f"{self.status}: {self.reason}" if self.reason else self.status


NextStep = CallModel | RunTools | ResumeTool | AddNote | AskUser | Finish


_MAX_UNUSABLE_TURNS = 3
"""A conversation ends after this many turns in a row without anything usable."""

_ROUNDING = 1e-9
"""Relative rounding error of sums of dollars."""

FINAL_SUMMARY = "final_summary"
"""The reason of the note that asks for a last answer, without tools."""

_REPEATED = (
    "Note: this very call was made before, with the same result. Repeating it will not help; try "
    "something else, or give your answer with what you know."
)
_NO_ACTION = (
    "Your reply held neither an Action nor a Final Answer. Continue with exactly one of them."
)
_CUT = "Your reply was cut by the token limit. Continue exactly where it stopped."
_WRONG = "That is not the expected answer. Check your work and try again."
_SUM_UP = (
    "You have used all of your replies. Tools can no longer be called. Give your best final "
    "answer now, from what you have found."
)


class ConversationSpec(msgspec.Struct, frozen=True):
    """The options and texts that decide how one conversation runs and ends."""

    options: AgentOptions = msgspec.field(default_factory=AgentOptions)
    expected: str | None = None
    """The right answer; the model never sees it."""
    user_replies: tuple[str, ...] = ()
    """The user's replies to tools that ask for input, in order."""
    user_turns: tuple[str, ...] = ()
    """The user's messages after the first one: each is sent after the answer to the one before."""
    tool_names: tuple[str, ...] = ()
    """The names of all tools that the model can call."""
    max_calls: int | None = None
    """Maximum calls; after them the model has to write its text. None: no limit."""


def next_step(t: Trajectory, spec: ConversationSpec) -> NextStep:
    """Decide the next step of conversation `t`."""
    options = spec.options
    whole = t.outermost()
    if end := _budget_ending(whole, t.turns, options) or time_limit_ending(whole, options):
        # Subagents that a crash interrupted continue to their own ending, as without the crash.
        subagents = [(n, call) for n, call in t.open_calls() if call["id"] in t.inner]
        return RunTools(subagents) if subagents else end
    if t.count_notes(FINAL_SUMMARY):
        return _summary_step(t, options)
    if end := _reasks_ending(t, options):
        return end
    if not t.replies:
        return _opening_step(t, options)
    if t.new_notes:
        # A note is only added if the limits allow another reply.
        return CallModel()
    given = t.last_calls()
    match t.replies[-1]["finish_reason"]:
        case "length" if _may_continue(t, options):
            return _continue_step(
                t, options, AddNote(CONTINUE_CUT, _CUT), at_turn_limit=Finish("length")
            )
        case "length" | "refusal" | "context_exceeded" as cut:
            return Finish(cut)
        case "pause" if not given:
            return _continue_step(t, options)
    calls = t.open_calls()
    if (calls or not given) and (leak := _leak_ending(t, spec)):
        return leak
    if calls:
        return RunTools(calls)
    if not given:
        return _step_after_text(t, spec)
    if finish := t.final_call():
        if finish.tool == "cannot_complete":
            return Finish("cannot_complete", finish.text)
        return _step_after_answer(t, spec)
    return _question_step(t, spec) or _step_after_results(t, spec)


def _budget_ending(whole: Trajectory, turns: int, options: AgentOptions) -> Finish | None:
    """The ending if conversation `whole`, the outermost one, has exceeded the budget."""
    dollars, tokens = options.max_cost_usd, options.max_total_tokens
    if dollars is None and tokens is None:
        return None
    if end := unknown_cost_ending(whole, dollars, tokens):
        return end
    if dollars is not None and whole.spent_usd > dollars * (1 + _ROUNDING):
        spent = f"${whole.spent_usd:.6f}"
        return Finish("budget", f"{spent} is over the budget of ${dollars:.6f} after turn {turns}")
    if tokens is not None and whole.spent_tokens > tokens:
        spent = f"{whole.spent_tokens:,} tokens"
        return Finish("budget", f"{spent} are over the budget of {tokens:,} after turn {turns}")
    return None


def unknown_cost_ending(t: Trajectory, dollars: float | None, tokens: int | None) -> Finish | None:
    """The ending if a budget cannot be kept: the cost or the tokens of a reply are unknown."""
    if dollars is not None and t.unpriced:
        return Finish("budget", "the cost of a reply is unknown, so the budget cannot be kept")
    if tokens is not None and t.uncounted:
        return Finish("budget", "the tokens of a reply are unknown, so the budget cannot be kept")
    return None


def time_limit_ending(t: Trajectory, options: AgentOptions) -> Finish | None:
    """The ending if the outermost conversation has exceeded its time limit."""
    limit = options.max_conversation_s
    if limit is None or (took_s := t.outermost().seconds_at_work()) < limit:
        return None
    return Finish("time_limit", f"{took_s:.1f} s are over the limit of {limit:g} s")


def _summary_step(t: Trajectory, options: AgentOptions) -> NextStep:
    # At the turn limit: one more reply, then the end.
    if t.new_notes and t.reasks <= options.max_reasks:
        return CallModel("none")
    return Finish("max_turns")


def _reasks_ending(t: Trajectory, options: AgentOptions) -> Finish | None:
    if t.reasks <= options.max_reasks:
        return None
    why = next(r["discarded"] for r in reversed(t.discarded) if r["discarded"] not in COST_ONLY)
    return Finish("errors", f"{t.reasks} unusable replies in a row, the last one {why}")


def _opening_step(t: Trajectory, options: AgentOptions) -> NextStep:
    if not options.plan:
        return CallModel()
    if t.count_notes(PLAN):
        return CallModel("none")
    return plan_note(t) or CallModel()


def _leak_ending(t: Trajectory, spec: ConversationSpec) -> Finish | None:
    # No export takes a conversation whose text holds a call.
    message = t.replies[-1]["message"]
    if "unusable" in message:  # the text protocol asks again
        return None
    leak = find_leaked_call(
        message["content"],
        message.get("reasoning"),
        has_calls="tool_calls" in message,
        tools=spec.tool_names,
    )
    return leak and Finish("leaked_call", leak.describe())


def _may_continue(t: Trajectory, options: AgentOptions) -> bool:
    # Only a reply whose text has begun can be continued, not thoughts alone.
    if t.last_calls() or t.count_notes(CONTINUE_CUT) >= options.continue_cut:
        return False
    text = split_inline_reasoning(t.replies[-1]["message"]["content"]).rest
    return bool(text.strip()) and not opens_reasoning(text)


def _question_step(t: Trajectory, spec: ConversationSpec) -> NextStep | None:
    """The step for a tool that asked for the user's input."""
    if not spec.options.awaiting_input:
        return None
    if (waiting := waiting_call(t)) is None:
        return None
    if t.replies_used >= len(spec.user_replies):
        return Finish("awaiting_input", waiting.question)
    reply = spec.user_replies[t.replies_used]
    called = waiting.call["function"]["name"]
    is_for_tool = not is_new_instruction(reply, called=called, tools=spec.tool_names)
    return ResumeTool(waiting.call, waiting.result, reply, is_for_tool)


def repeat_ending(tally: Tally) -> Finish:
    """The ending of a conversation whose calls and results repeat; see `repeat_limit`."""
    return Finish(
        "repeat", f"the same call gave the same result {tally.repeated_turns} times in a row"
    )


def _step_after_results(t: Trajectory, spec: ConversationSpec) -> NextStep:
    options = spec.options
    limit = options.repeat_limit
    if limit and t.tally.repeated_turns >= limit:
        return repeat_ending(t.tally)
    if end := _errors_ending(t, options):
        return end
    if options.plan and (note := plan_note(t)):
        return _continue_step(t, options, note)
    if spec.max_calls is not None and len(t.results) >= spec.max_calls:
        return CallModel("none")
    if limit and 2 <= t.tally.repeated_turns == limit - 1:
        return _continue_step(t, options, AddNote("repeat", _REPEATED))
    return _continue_step(t, options)


def count_runnable(t: Trajectory, spec: ConversationSpec) -> int:
    """The number of calls that may run of the last reply; later ones get an error result."""
    if spec.max_calls is None:
        return MAX_RUN_CALLS
    return min(MAX_RUN_CALLS, spec.max_calls - len(t.results))


def _step_after_text(t: Trajectory, spec: ConversationSpec) -> NextStep:
    options = spec.options
    if "unusable" in t.replies[-1]["message"]:
        return _errors_ending(t, options) or _continue_step(
            t, options, AddNote("no_action", _NO_ACTION)
        )
    if options.plan and (note := plan_note(t)):
        return _continue_step(t, options, note)
    return _step_after_answer(t, spec)


def _step_after_answer(t: Trajectory, spec: ConversationSpec) -> NextStep:
    """The step after an answer: the user's next message, or the end."""
    sent = t.count_notes(USER_TURN)
    if sent < len(spec.user_turns):
        return _send_user_message(t, spec.options, spec.user_turns[sent])
    user = spec.options.simulated_user
    if user is None:
        return _check_answer(t, spec)
    from agent.loop.simulated_user import user_message

    text = user_message(t, sent + 1)
    if not text:
        written = sent + user.writes_first
        return AskUser() if written < user.max_turns else _check_answer(t, spec)
    if user.stop in text:
        return _check_answer(t, spec)
    return _send_user_message(t, spec.options, text)


def _send_user_message(t: Trajectory, options: AgentOptions, text: str) -> NextStep:
    # At the turn limit no summary is asked for: there is an answer.
    return _continue_step(t, options, AddNote(USER_TURN, text), at_turn_limit=Finish("max_turns"))


def _check_answer(t: Trajectory, spec: ConversationSpec) -> NextStep:
    options = spec.options
    if spec.expected is None:
        return Finish("completed")
    from agent.loop.answers import matches  # most conversations expect no answer

    question = next((m["content"] for m in t.messages if m["role"] == "user"), "")
    if matches(t.final_text(), spec.expected, options.expected_match, question):
        return Finish("completed")
    attempts = 1 + t.count_notes("expected")
    if attempts >= options.expected_attempts:
        tried = "" if attempts == 1 else f" in {attempts} attempts"
        return Finish("wrong_answer", f"not the expected answer{tried}")
    return _continue_step(t, options, AddNote("expected", _WRONG))


def _errors_ending(t: Trajectory, options: AgentOptions) -> Finish | None:
    if options.max_errors and t.tally.errors >= options.max_errors:
        return Finish("errors", f"{t.tally.errors} errors")
    if options.max_errors and t.tally.unusable_turns >= _MAX_UNUSABLE_TURNS:
        return Finish("errors", f"{t.tally.unusable_turns} unusable turns in a row")
    return None


def _continue_step(
    t: Trajectory,
    options: AgentOptions,
    note: AddNote | None = None,
    *,
    at_turn_limit: Finish | None = None,
) -> NextStep:
    """Call the model again, after `note` if there is one; at the turn limit end the conversation.

    `at_turn_limit` is the ending then; None: `max_turns`, or a summary if `final_summary` is on.
    """
    if t.turns < options.max_turns:
        return note or CallModel()
    if at_turn_limit is not None:
        return at_turn_limit
    return AddNote(FINAL_SUMMARY, _SUM_UP) if options.final_summary else Finish("max_turns")


def refusal_ending(kind: str, message: str) -> Finish | None:
    """The ending of a conversation whose next reply the endpoint refuses.

    `kind` is the kind of the error (`agent.models.errors.Kind`). None if the call just failed.
    """
    match kind:
        case "context_exceeded":
            return Finish("context_exceeded", message)
        case "filtered":
            return Finish("refusal", message)
    return None


_TURN_LIMIT_NOTE = "state_max_turns"


def add_turn_limit(opening: Sequence[Message], options: AgentOptions) -> list[Message]:
    """Add the turn limit to the system message of `opening`, if `state_max_turns` is on."""
    if not options.state_max_turns:
        return list(opening)
    text = f"You have at most {options.max_turns} replies for this task."
    if not opening or opening[0]["role"] != "system":
        return [Message(role="system", content=text, notes=[_TURN_LIMIT_NOTE]), *opening]
    if text in opening[0]["content"]:
        return list(opening)
    system = opening[0].copy()
    system["content"] += f"\n\n{text}"
    return [system, *opening[1:]]


_ANSWERS = re.compile(
    r"(?:y|yes|yeah|yep|ok|okay|sure|confirm(?:ed)?|go ahead|proceed|accept(?:ed)?|approved?"
    r"|n|no|nope|cancel|stop|abort|never ?mind|don't|do not|reject(?:ed)?|change|instead)\b",
    re.IGNORECASE,
)
"""The beginning of an acceptance, a refusal or a correction."""

_INSTRUCTS = re.compile(
    r"(?:please\s+)?(?:list|show|get|find|search|create|add|make|write|read|open|run|delete|remove"
    r"|update|explain|tell|give|fetch|compute|calculate|summari[sz]e)\b",
    re.IGNORECASE,
)
"""The beginning of a new instruction."""


class Waiting(NamedTuple):
    """A call whose tool waits for the user, its result so far, and its question."""

    call: ToolCall
    result: ResultEvent
    question: str


def waiting_call(t: Trajectory) -> Waiting | None:
    """The first call of the last turn whose tool waits for the user; None if none does.

    A tool asks with the object that it returns (see `toolsets.tool.as_result`).
    """
    for call, result in zip(t.last_calls(), t.last_results(), strict=False):
        question = result["message"].get("details", {}).get(ASKS)
        if question is not None:
            return Waiting(call, result, question)
    return None


def is_new_instruction(reply: str, *, called: str, tools: Sequence[str]) -> bool:
    """Whether a user's reply is a new instruction rather than a reply to the tool `called`."""
    if any(tool != called and re.search(rf"\b{re.escape(tool)}\b", reply) for tool in tools):
        return True
    reply = reply.strip()
    return not _ANSWERS.match(reply) and bool(_INSTRUCTS.match(reply))


# Plans: the model writes a plan, then works on one step after the other.
#
# It is one conversation: the plan is its first reply, and each step begins with a note.

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
    steps = plan_steps(t.replies[0]["message"]["content"])
    if len(begun) < len(steps):
        number = len(begun) + 1
        text = (
            f"Step {number} of {len(steps)}: {steps[number - 1]}\n"
            f"Work on this step alone, in at most {_STEP_TURNS} replies, and reply "
            "with its outcome."
        )
        return AddNote("plan_step", text)
    return AddNote("plan_answer", _ALL_DONE) if len(begun) == len(steps) else None


def plan_steps(plan: str) -> list[str]:
    """The steps of a plan: the items of its list; a plan without a list is one step."""
    return [match["step"].strip() for match in _STEP.finditer(plan)] or ["do what the plan says"]
