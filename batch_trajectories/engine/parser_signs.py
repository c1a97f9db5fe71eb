"""Signs in the replies of a conversation that the server's parsers are off.

A server that parses no tool calls, or does not split off thoughts, leaves them in the texts. Such
conversations are useless for training, so the user is told at the first one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from agent.messages.leaked_calls import (
    REASONING_REMEDY,
    find_leaked_call,
    has_stray_thought,
    parser_remedy,
)

_SCRIPTED = "scripted"


class ParserSigns(TypedDict):
    """The signs of one conversation, JSON-ready."""

    endpoint: str
    """Model and URL of the conversation."""
    call: str | None
    """The first tool call in a text, with what makes the server read such calls; None without."""
    thought: bool
    """A text has the end of a thought that began in the prompt."""
    reads_calls: bool
    """A reply had a call that the server read."""
    reads_thoughts: bool
    """Whether a reply had a thought beside its text."""


def parser_signs(record: Mapping[str, Any]) -> ParserSigns | None:
    """The signs in a record; None if no server has answered."""
    count = len(record["turns"])
    if not count or record["api"] == _SCRIPTED:
        return None
    # Replies that the row brought, or a parent had, come first.
    replies = [message for message in record["messages"] if message["role"] == "assistant"][-count:]
    names = {tool["function"]["name"] for tool in record["tools"]}
    signs = ParserSigns(
        endpoint=f"{record['model']} at {record['endpoint']}",
        call=None,
        thought=False,
        reads_calls=False,
        reads_thoughts=False,
    )
    for message in replies:
        has_calls = bool(message.get("tool_calls"))
        signs["reads_calls"] |= has_calls
        signs["reads_thoughts"] |= bool(message.get("reasoning"))
        signs["thought"] |= has_stray_thought(message["content"])
        if signs["call"] is None:
            leak = find_leaked_call(
                message["content"], message.get("reasoning"), has_calls=has_calls, tools=names
            )
            if leak is not None:
                signs["call"] = f"{leak.describe()}. {parser_remedy(leak.format)}"
    return signs


def warning_of_call(call: str) -> str:
    """The warning for the user, shown once; `call` is the one in the signs."""
    return (
        f"a reply holds {call}. The server's parser for tool calls is off or failed; such "
        "conversations end as leaked_call, and no export takes them"
    )


WARNING_OF_THOUGHT = (
    "a reply's text holds a thought (</think> without its beginning): the server's parser for "
    f"reasoning is off or failed. {REASONING_REMEDY}. Exports reject such conversations "
    "(marker_in_text)"
)
