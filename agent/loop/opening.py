"""States the turn limit in the system prompt."""

from __future__ import annotations

from collections.abc import Sequence

from agent.messages.message import Message
from agent.options import AgentOptions

_NOTE = "state_max_turns"


def with_turn_limit(opening: Sequence[Message], options: AgentOptions) -> list[Message]:
    """`opening` with the turn limit in its system message, if `state_max_turns` is on."""
    if not options.state_max_turns:
        return list(opening)
    text = f"You have at most {options.max_turns} replies for this task."
    if not opening or opening[0]["role"] != "system":
        return [Message(role="system", content=text, notes=[_NOTE]), *opening]
    if text in opening[0]["content"]:
        return list(opening)
    system = opening[0].copy()
    system["content"] += f"\n\n{text}"
    return [system, *opening[1:]]
