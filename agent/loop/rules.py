"""What happens next in a conversation: the rules by which it goes on and ends.

A pure function of the trajectory, so that a conversation that was killed and replayed decides as
it would have decided. Where several rules apply, the order in which they stand here decides:
budget, time_limit, length, completed, awaiting_input, repeat, errors, max_turns.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agent.loop.plan import PLAN, plan_note
from agent.loop.steps import AddNote, CallModel, Finish, Move, ResumeTool, RunTools
from agent.loop.user_replies import waiting_call, wants_other_work
from agent.messages import PAID_ALONE
from agent.options import AgentOptions
from agent.reasoning import opens_reasoning, split_inline_reasoning
from agent.state.trajectory import CONTINUE_CUT, Trajectory

_MAX_UNUSABLE_TURNS = 3
"""So many turns in a row that hold nothing usable: the model has lost its way."""

_ROUNDING = 1e-9
"""Sums of dollars may differ from the true ones by this share."""

_SUMMARY = "final_summary"

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


@dataclass(frozen=True, slots=True)
class ConversationSpec:
    """What one conversation is held to."""

    options: AgentOptions = field(default_factory=AgentOptions)
    expected: str | None = None
    """The answer that is right; never part of anything the model sees."""
    user_replies: tuple[str, ...] = ()
    """What the user says where a tool asks for input, one reply after the other."""
    tool_names: tuple[str, ...] = ()


def next_step(t: Trajectory, spec: ConversationSpec) -> Move:
    """Decide what happens next in conversation `t`."""
    options = spec.options
    whole = t.outermost()
    if end := _over_budget(whole, t.turns, options) or over_time(whole, options):
        # Subagents that a crash cut off end by themselves, as they would have ended without it.
        begun = [(n, call) for n, call in t.open_calls() if call["id"] in t.inner]
        return RunTools(begun) if begun else end
    if t.notes_of(_SUMMARY):
        return _in_summary(t, options)
    if end := _too_many_reasks(t, options):
        return end
    if not t.replies:
        return _opening_move(t, options)
    if t.noted:
        # Notes are only made where another reply is within the bounds.
        return CallModel()
    match t.replies[-1]["finish_reason"]:
        case "length" if _may_continue(t, options):
            return _go_on(t, options, AddNote(CONTINUE_CUT, _CUT), otherwise=Finish("length"))
        case "length" | "refusal" | "context_exceeded" as cut:
            return Finish(cut)
        case "pause" if not t.last_calls():
            return _go_on(t, options)
    if calls := t.open_calls():
        return RunTools(calls)
    if not t.last_calls():
        return _after_text(t, spec)
    if finish := t.finish():
        if finish.tool == "cannot_complete":
            return Finish("cannot_complete", finish.text)
        return _check_answer(t, spec)
    return _waiting(t, spec) or _after_results(t, options)


def _over_budget(whole: Trajectory, turns: int, options: AgentOptions) -> Finish | None:
    """The budget is that of the outermost conversation, and so is what was spent of it."""
    dollars, tokens = options.max_cost_usd, options.max_total_tokens
    if dollars is not None and whole.unpriced:
        return Finish("budget", "the cost of a reply is unknown, so the budget cannot be kept")
    if tokens is not None and whole.uncounted:
        return Finish("budget", "the tokens of a reply are unknown, so the budget cannot be kept")
    if dollars is not None and whole.spent_usd > dollars * (1 + _ROUNDING):
        spent = f"${whole.spent_usd:.6f}"
        return Finish("budget", f"{spent} is over the budget of ${dollars:.6f} after turn {turns}")
    if tokens is not None and whole.spent_tokens > tokens:
        spent = f"{whole.spent_tokens:,} tokens"
        return Finish("budget", f"{spent} are over the budget of {tokens:,} after turn {turns}")
    return None


def over_time(t: Trajectory, options: AgentOptions) -> Finish | None:
    """The end for the time that was taken: that of the outermost one, as the budget is."""
    limit = options.max_conversation_s
    if limit is None or (took_s := t.outermost().seconds_at_work()) < limit:
        return None
    return Finish("time_limit", f"{took_s:.1f} s are over the limit of {limit:g} s")


def _in_summary(t: Trajectory, options: AgentOptions) -> Move:
    """The bound of turns is reached: one answer more, whatever it is."""
    if t.noted and t.reasks <= options.max_reasks:
        return CallModel("none")
    return Finish("max_turns")


def _too_many_reasks(t: Trajectory, options: AgentOptions) -> Finish | None:
    if t.reasks <= options.max_reasks:
        return None
    why = next(r["discarded"] for r in reversed(t.discarded) if r["discarded"] not in PAID_ALONE)
    return Finish("errors", f"{t.reasks} unusable replies in a row, the last one {why}")


def _opening_move(t: Trajectory, options: AgentOptions) -> Move:
    if not options.plan:
        return CallModel()
    return CallModel("none") if t.notes_of(PLAN) else plan_note(t, options) or CallModel()


def _may_continue(t: Trajectory, options: AgentOptions) -> bool:
    """Only a text that has begun can be continued: thoughts alone are none."""
    if t.last_calls() or t.notes_of(CONTINUE_CUT) >= options.continue_cut:
        return False
    said = split_inline_reasoning(t.replies[-1]["message"]["content"]).rest
    return bool(said.strip()) and not opens_reasoning(said)


def _waiting(t: Trajectory, spec: ConversationSpec) -> Move | None:
    """What to do about a tool that asked for the user's input."""
    if not spec.options.awaiting_input or (waiting := waiting_call(t)) is None:
        return None
    if t.replies_used >= len(spec.user_replies):
        return Finish("awaiting_input", waiting.question)
    reply = spec.user_replies[t.replies_used]
    called = waiting.call["function"]["name"]
    is_for_tool = not wants_other_work(reply, called=called, tools=spec.tool_names)
    return ResumeTool(waiting.call, waiting.result, reply, is_for_tool)


def _after_results(t: Trajectory, options: AgentOptions) -> Move:
    limit = options.repeat_limit
    if limit and t.tally.streak >= limit:
        return Finish(
            "repeat", f"the same call gave the same result {t.tally.streak} times in a row"
        )
    if end := _too_many_errors(t, options):
        return end
    if options.plan and (note := plan_note(t, options)):
        return _go_on(t, options, note)
    if limit and 2 <= t.tally.streak == limit - 1:
        return _go_on(t, options, AddNote("repeat", _REPEATED))
    return _go_on(t, options)


def _after_text(t: Trajectory, spec: ConversationSpec) -> Move:
    options = spec.options
    if "unusable" in t.replies[-1]["message"]:
        return _too_many_errors(t, options) or _go_on(t, options, AddNote("no_action", _NO_ACTION))
    if options.plan and (note := plan_note(t, options)):
        return _go_on(t, options, note)
    return _check_answer(t, spec)


def _check_answer(t: Trajectory, spec: ConversationSpec) -> Move:
    options = spec.options
    if spec.expected is None or _is_expected(t.final_text(), spec.expected):
        return Finish("completed")
    attempts = 1 + t.notes_of("expected")
    if attempts >= options.expected_attempts:
        return Finish("errors", f"not the expected answer in {attempts} attempts")
    return _go_on(t, options, AddNote("expected", _WRONG))


def _too_many_errors(t: Trajectory, options: AgentOptions) -> Finish | None:
    if options.max_errors and t.tally.errors >= options.max_errors:
        return Finish("errors", f"{t.tally.errors} errors")
    if options.max_errors and t.tally.unusable_turns >= _MAX_UNUSABLE_TURNS:
        return Finish("errors", f"{t.tally.unusable_turns} unusable turns in a row")
    return None


def _go_on(
    t: Trajectory,
    options: AgentOptions,
    note: AddNote | None = None,
    *,
    otherwise: Finish | None = None,
) -> Move:
    """Ask again, after `note` if there is one; at the bound of turns the conversation ends.

    `otherwise` is the ending at the bound that goes before `max_turns`.
    """
    if t.turns < options.max_turns:
        return note or CallModel()
    if otherwise is not None:
        return otherwise
    return AddNote(_SUMMARY, _SUM_UP) if options.final_summary else Finish("max_turns")


def _is_expected(answer: str, expected: str) -> bool:
    return answer.strip().casefold() == expected.strip().casefold()
