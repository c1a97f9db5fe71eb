"""Checks a model's reply before it becomes part of the conversation.

An unusable reply is discarded. In a usable one only call ids change, which must be unique, and tool
names if `repair_tool_names` is on.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from agent.messages.leaked_calls import find_leaked_call
from agent.messages.message import Message, opens_reasoning, split_inline_reasoning
from agent.models.model import Completion, Request
from agent.options import AgentOptions
from batch_trajectories.basics import exact_json

_MIN_SIMILARITY = 0.8
"""Minimum similarity of a misspelt name to a known one (ratio of difflib, 0 to 1)."""

MAX_RUN_CALLS = 128
"""Maximum calls of one reply that are run; further calls get a result that says so.

Models never need as many, and a worker stays responsive while they run.
"""

MAX_CALLS = 1_000
"""A reply with more calls is discarded: their results would make the next request huge."""


def why_unusable(completion: Completion, request: Request, options: AgentOptions) -> str | None:
    """The reason why a reply is unusable and the model is asked again; None if it is usable."""
    message = completion.message
    calls = message.get("tool_calls", ())
    if len(calls) > MAX_CALLS:
        return "too_many_calls"
    if completion.finish_reason not in ("stop", "tool_calls"):
        return None  # asking again would not help: the next reply would be cut or refused, too
    text = split_inline_reasoning(message["content"]).rest
    if opens_reasoning(text):
        return "unclosed_reasoning"
    if request.tool_choice == "none" and (calls or _has_leaked_call(message, request)):
        # vLLM does not parse calls if the request forbids them. A call in the text is then no sign
        # that the server lacks a parser.
        return "calls_not_allowed"
    if not calls:
        return None if text.strip() or _has_leaked_call(message, request) else "blank"
    if options.bad_arguments == "resample":
        for call in calls:
            if not _is_object(call["function"]["arguments"]):
                return "bad_arguments"
    return None


def _has_leaked_call(message: Message, request: Request) -> bool:
    """Whether a reply without calls has a call in its text or its reasoning.

    If calls are allowed, the model is not asked again: the conversation ends with such a reply, see
    `agent.loop.rules`.
    """
    names = {tool["function"]["name"] for tool in request.tools}
    found = find_leaked_call(
        message["content"], message.get("reasoning"), has_calls=False, tools=names
    )
    return found is not None


def repair_names(message: Message, names: Sequence[str]) -> None:
    """Replace each unknown tool name by the only similar known name; record the repair."""
    repairs = []
    for call in message.get("tool_calls", ()):
        written = call["function"]["name"]
        if written not in names and (nearest := _find_nearest(written, names)):
            call["function"]["name"] = nearest
            repairs.append({"call": call["id"], "name": written})
    if repairs:
        message["repairs"] = message.get("repairs", []) + repairs


def _is_object(arguments: str) -> bool:
    try:
        return not arguments.strip() or isinstance(exact_json.loads(arguments), dict)
    except exact_json.JSONDecodeError:
        return False


def _find_nearest(written: str, names: Sequence[str]) -> str | None:
    """The only known name that is similar to a written one; None if there is none or several."""
    by_normalized: dict[str, list[str]] = {}
    for name in names:
        by_normalized.setdefault(_normalize_name(name), []).append(name)
    wanted = _normalize_name(written)
    near = difflib.get_close_matches(wanted, by_normalized, n=2, cutoff=_MIN_SIMILARITY)
    # A second similar name does not matter if the first one differs in case or punctuation only.
    is_clear = len(near) == 1 or near[:1] == [wanted]
    candidates = by_normalized[near[0]] if is_clear else []
    return candidates[0] if len(candidates) == 1 else None


def _normalize_name(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())
