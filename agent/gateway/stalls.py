"""Whether an agent makes the same call with the same result again and again."""

from __future__ import annotations

from collections.abc import Sequence

from agent.loop.steps import Finish
from agent.messages.message import Message
from agent.state.tally import Tally
from agent.wires.canonical import cut
from agent.wires.wire import Volatile


def stalled(messages: Sequence[Message], limit: int, volatile: Volatile) -> Finish | None:
    """The ending if the last `limit` turns made one call with one result; see `Tally.streak`.

    Texts that differ from start to start of the agent do not make a result another one.
    """
    turns: list[tuple[Message, dict[str, Message]]] = []
    results: dict[str, Message] = {}
    for message in reversed(messages):
        if message["role"] == "tool":
            text = cut(message["content"], volatile.texts)
            result = message.copy()
            result["content"] = text
            results.setdefault(message["tool_call_id"], result)
        elif message.get("tool_calls"):
            turns.append((message, results))
            results = {}
        if len(turns) == limit:
            break
    tally = Tally()
    for message, found in reversed(turns):
        calls = [call for call in message["tool_calls"] if call["id"] in found]
        tally.count_turn(calls, [found[call["id"]] for call in calls])
    if tally.streak < limit:
        return None
    return Finish("repeat", f"the same call gave the same result {tally.streak} times in a row")
