"""What happens next in a conversation: the rules by which it goes on and ends.

A pure function of the trajectory, so that a conversation that was killed and replayed decides as
it would have decided. Where several rules apply, the order in which they stand here decides:
budget, length, completed, awaiting_input, repeat, errors, max_turns.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agent.interaction import waiting_call, wants_other_work
from agent.moves import Answer, Ask, Continue, End, Move, Note
from agent.options import AgentOptions
from agent.plan import plan_note
from agent.trajectory import Trajectory

_MAX_UNUSABLE_TURNS = 3
"""So many turns in a row that hold nothing usable: the model has lost its way."""

_REPEATED = (
    "Note: this very call was made before, with the same result. Repeating it will not help; try "
    "something else, or give your answer with what you know."
)
_NO_ACTION = (
    "Your reply held neither an Action nor a Final Answer. Continue with exactly one of them."
)
_CUT = "Your reply was cut by the token limit. Continue exactly where it stopped."
_WRONG = "That is not the expected answer. Check your work and try again."
_SUMMARY = (
    "You have used all of your replies. Tools can no longer be called. Give your best final "
    "answer now, from what you have found."
)


@dataclass(frozen=True, slots=True)
class Terms:
    """What one conversation is held to."""

    options: AgentOptions = field(default_factory=AgentOptions)
    expected: str | None = None
    """The answer that is right; never part of anything the model sees."""
    user_replies: tuple[str, ...] = ()
    """What the user says where a tool asks for input, one reply after the other."""
    tool_names: tuple[str, ...] = ()


def next_move(t: Trajectory, terms: Terms) -> Move:
    """Decide what happens next in conversation `t`."""
    options = terms.options
    if t.reasks > options.max_reasks:
        return End(
            "errors", f"{t.reasks} unusable replies in a row: {t.discarded[-1]['discarded']}"
        )
    if end := _over_budget(t, options.max_cost_usd):
        return end
    if not t.replies:
        return _opening_move(t, options)
    match t.replies[-1]["finish_reason"]:
        case "length" if not t.noted and _may_continue(t, options):
            return Note("continue_cut", _CUT)
        case "length" | "refusal" | "context_exceeded" as cut if not t.noted:
            return End(cut)
        case "pause" if not t.noted and not t.last_calls():
            return _go_on(t, options)
    if calls := t.open_calls():
        if "final_summary" in t.tally.notes:
            return End("max_turns", "tools were called in the final summary")
        return Answer(calls)
    if (move := _waiting(t, terms)) is not None:
        return move
    if t.noted:
        return Ask("none" if t.noted[-1]["reason"] in ("final_summary", "plan") else "auto")
    if "final_summary" in t.tally.notes:
        return End("max_turns")
    if t.last_calls() and (finish := t.finish()) is None:
        return _after_results(t, options)
    if t.last_calls() and finish is not None and finish.tool == "cannot_complete":
        return End("cannot_complete", finish.text)
    return _after_text(t, terms)


def _over_budget(t: Trajectory, budget: float | None) -> End | None:
    if budget is None:
        return None
    if t.unpriced:
        return End("budget", "the cost of a reply is unknown, so the budget cannot be kept")
    if t.spent_usd > budget:
        words = f"${t.spent_usd:.6f} is over the budget of ${budget:.6f} after turn {t.turns}"
        return End("budget", words)
    return None


def _opening_move(t: Trajectory, options: AgentOptions) -> Move:
    if options.plan and not t.noted:
        return plan_note(t, options) or Ask()
    return Ask("none" if options.plan else "auto")


def _may_continue(t: Trajectory, options: AgentOptions) -> bool:
    return not t.last_calls() and t.tally.notes["continue_cut"] < options.continue_cut


def _waiting(t: Trajectory, terms: Terms) -> Move | None:
    """What to do about a tool that asked for the user's input."""
    if not terms.options.awaiting_input or (waiting := waiting_call(t)) is None:
        return None
    used = t.tally.notes["user_reply"]
    if used >= len(terms.user_replies):
        return End("awaiting_input", waiting.question)
    reply = terms.user_replies[used]
    if wants_other_work(reply, called=waiting.call["function"]["name"], tools=terms.tool_names):
        return Note("user_reply", f"User: {reply}", {"call": waiting.n, "pending": False})
    return Continue(waiting.n, waiting.call, reply)


def _after_results(t: Trajectory, options: AgentOptions) -> Move:
    limit = options.repeat_limit
    if limit and t.tally.streak >= limit:
        return End("repeat", f"the same call gave the same result {t.tally.streak} times in a row")
    if end := _too_many_errors(t, options):
        return end
    if limit and 2 <= t.tally.streak == limit - 1:
        return _go_on(t, options, Note("repeat", _REPEATED))
    return _go_on(t, options)


def _after_text(t: Trajectory, terms: Terms) -> Move:
    options = terms.options
    if "notes" in t.replies[-1]["message"]:
        return _too_many_errors(t, options) or _go_on(t, options, Note("no_action", _NO_ACTION))
    if options.plan and (note := plan_note(t, options)):
        return _go_on(t, options, note)
    if terms.expected is not None and not _is_expected(t.final_text(), terms.expected):
        attempts = 1 + t.tally.notes["expected"]
        if attempts >= options.expected_attempts:
            return End("errors", f"not the expected answer in {attempts} attempts")
        return _go_on(t, options, Note("expected", _WRONG))
    return End("completed")


def _too_many_errors(t: Trajectory, options: AgentOptions) -> End | None:
    if options.max_errors and t.tally.errors >= options.max_errors:
        return End("errors", f"{t.tally.errors} errors")
    if options.max_errors and t.tally.unusable_turns >= _MAX_UNUSABLE_TURNS:
        return End("errors", f"{t.tally.unusable_turns} unusable turns in a row")
    return None


def _go_on(t: Trajectory, options: AgentOptions, note: Note | None = None) -> Move:
    """Ask again, after `note` if there is one; at the bound of turns the conversation ends."""
    if t.turns < options.max_turns:
        if note is None and options.plan and t.last_calls():
            note = plan_note(t, options)
        return note or Ask()
    return Note("final_summary", _SUMMARY) if options.final_summary else End("max_turns")


def _is_expected(answer: str, expected: str) -> bool:
    return answer.strip().casefold() == expected.strip().casefold()
