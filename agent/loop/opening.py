"""What the runtime adds to the messages that a conversation starts with."""

from __future__ import annotations

from collections.abc import Sequence

from agent.messages import Message
from agent.options import AgentOptions

STATED = "state_max_turns"


def with_bound_stated(opening: Sequence[Message], options: AgentOptions) -> list[Message]:
    """`opening` with the bound of turns in its system message, where it is to be stated."""
    if not options.state_max_turns:
        return list(opening)
    text = f"You have at most {options.max_turns} replies for this task."
    if not opening or opening[0]["role"] != "system":
        return [Message(role="system", content=text, notes=[STATED]), *opening]
    if text in opening[0]["content"]:
        return list(opening)
    system = opening[0].copy()
    system["content"] += f"\n\n{text}"
    return [system, *opening[1:]]
