"""A model that plays the user.

Its conversation is an inner one of the model's: part of its record, paid from its budget, and
resumed after a crash. The roles are swapped in it: what the model answers is a user message, and
what the user writes is the reply.
"""

from __future__ import annotations

from agent.loop.steps import AddUserTurn, AskUser, Finish, NextStep
from agent.messages import SIMULATED_USER, Message
from agent.options import MAX_COUNT, AgentOptions, SimulatedUser
from agent.reasoning import split_inline_reasoning
from agent.state.trajectory import Trajectory

KEY = f"{SIMULATED_USER}#1"
"""The key of its inner conversation."""

_GREETING = "Hello! How can I help you?"
"""The first user message of the inner conversation: every API wants one before a reply."""

_STOP = "When there is nothing left to say, reply with {} alone."


def user_step(t: Trajectory, user: SimulatedUser, options: AgentOptions) -> NextStep | None:
    """The step after an answer; None once the user has ended the conversation."""
    inner = t.inner.get(KEY)
    if inner is not None and not must_ask(t, inner.trajectory) and _has_replied(inner.trajectory):
        reason = inner.trajectory.replies[-1]["finish_reason"]
        if reason != "stop":
            return Finish("errors", f"the reply of the simulated user ended as {reason}")
        text = inner.trajectory.final_text().strip()
        if user.stop in text:
            return None
        if t.turns >= options.max_turns:
            return Finish("max_turns", "the last message of the simulated user was not sent")
        return AddUserTurn(SIMULATED_USER, text)
    return None if is_at_limit(t, user) else AskUser()


def is_at_limit(t: Trajectory, user: SimulatedUser) -> bool:
    """Whether the user has sent as many messages as it may."""
    return len(t.user_turns) >= user.max_turns


def must_ask(t: Trajectory, inner: Trajectory) -> bool:
    """Whether the last answer of `t` is not yet in the conversation of the user."""
    sent = sum("inherited" not in event for event in t.user_turns)
    return len(inner.user_turns) < sent


def opening_of(t: Trajectory, user: SimulatedUser) -> list[Message]:
    """The first messages of the user's conversation: what user and model have said so far."""
    system = user.system_prompt or ""
    if user.stop not in system:
        system = f"{system}\n\n{_STOP.format(user.stop)}".strip()
    opening = [
        Message(role="system", content=system),
        Message(role="user", content=_GREETING),
    ]
    for n, message in enumerate(t.messages):
        is_of_runtime = n >= t.opening and "notes" in message
        if message["role"] == "user" and not is_of_runtime:
            role, text = "assistant", message["content"]
        elif message["role"] == "assistant" and not message.get("tool_calls"):
            role, text = "user", split_inline_reasoning(message["content"]).rest
        else:
            continue
        if opening[-1]["role"] == role:  # only the last answer before a user message counts
            opening.pop()
        opening.append(Message(role="user" if role == "user" else "assistant", content=text))
    opening[-1]["content"] = t.final_text()  # whole, even if it was cut and continued
    return opening


def options_of_user(options: AgentOptions) -> AgentOptions:
    """The options of the user's conversation: the limits of the whole one."""
    return AgentOptions(
        max_turns=MAX_COUNT,
        max_reasks=options.max_reasks,
        max_cost_usd=options.max_cost_usd,
        max_total_tokens=options.max_total_tokens,
        max_conversation_s=options.max_conversation_s,
    )


def ending_of(end: Finish) -> Finish | None:
    """How the conversation ends if the user's reply to an answer ended so; None: it continues.

    The rules decide about replies that are known, and about budget and time.
    """
    if end.status in ("completed", "length", "refusal", "budget", "time_limit"):
        return None
    why = f": {end.reason}" if end.reason else ""
    status = "context_exceeded" if end.status == "context_exceeded" else "errors"
    return Finish(status, f"the simulated user ended as {end.status}{why}")


def _has_replied(inner: Trajectory) -> bool:
    if not inner.replies or inner.last_calls() or inner.noted:
        return False
    return inner.replies[-1]["finish_reason"] != "pause"
