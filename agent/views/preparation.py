"""The preparation: a conversation before the main one that gathers context for it.

It may use the same tools, but must not do the task itself. It writes its findings as lines
`@name := value`; these are added to the prompts of the main conversation, numbered.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from agent.messages.message import Message

_INSTRUCTION = (
    "You prepare context for another agent. Do not do the request itself: only find out what the "
    "preparation asks for. End with one line for each thing found, in the form\n"
    "@name := value\n"
    "and nothing else."
)

_FINDING = re.compile(r"^\s*@(?P<name>[A-Za-z0-9_-]+)\s*(?::=|:|=)\s*(?P<value>.*\S)\s*$", re.M)


def preparation_opening(task: str, prompt: Sequence[Message]) -> list[Message]:
    """The messages that a preparation starts with; `prompt` are those of the main conversation."""
    request = "\n\n".join(m["content"] for m in prompt if m["role"] == "user")
    text = f"Preparation:\n{task}\n\nThe request that is being prepared:\n{request}"
    return [Message(role="system", content=_INSTRUCTION), Message(role="user", content=text)]


def findings_in(text: str) -> list[str]:
    """The values that a preparation found, in order, without quotes around them."""
    return [_unquoted(match["value"]) for match in _FINDING.finditer(text)]


def with_findings(prompt: Sequence[Message], findings: Sequence[str]) -> list[Message]:
    """`prompt` with the findings appended to its system message and its last message.

    The system message of a conversation that has already begun does not change.
    """
    if not findings:
        return list(prompt)
    pieces = "\n".join(
        '@context-piece-{} := "{}"'.format(n, value.replace('"', '\\"'))
        for n, value in enumerate(findings, start=1)
    )
    last = len(prompt) - 1
    is_new = all(message["role"] != "assistant" for message in prompt)
    return [
        Message(**{**message, "content": f"{message['content']}\n\n{pieces}"})
        if (message["role"] == "system" and is_new) or n == last
        else message
        for n, message in enumerate(prompt)
    ]


def _unquoted(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'`":
        return value[1:-1]
    return value
