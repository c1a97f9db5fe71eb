"""A model that plays the user and writes the next message after each answer.

It sees what a user sees: messages and answers, but neither the calls nor the reasoning of the
agent. Each of its messages is an inner conversation "simulated_user#N": paid, journaled and resumed
like others. It has one reply or, if the user has tools, replies with calls before it. Only the text
of its last reply becomes a message; later messages are written with the earlier calls in view.
Message N follows answer N of the agent. With `writes_first`, message 0 takes the place of a prompt.

Journal and record hold its replies and results and, once, its instructions. They do not hold the
messages that it saw: these follow from the conversation, and copies would grow with the square of
its length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec

from agent.messages.message import (
    SIMULATED_USER,
    USER_TURN,
    Message,
    Role,
    split_inline_reasoning,
    user_key,
)
from agent.models.model import Completion, Model, Request
from agent.options import SimulatedUser
from agent.state.trajectory import CONTINUE_CUT, Trajectory

_GREETING = "Hello! How can I help you?"
"""Opening message in the user simulator's chat.

The simulator answers as `assistant`, so a message of the other role has to come first.
"""


def user_message(t: Trajectory, number: int) -> str:
    """Message `number` of the simulated user; "" if it is missing, or was cut.

    Message 0 is the first message of a conversation without a prompt.
    """
    return message_in(t, user_key(number))


def message_in(t: Trajectory, key: str) -> str:
    """The message that the inner conversation `key` wrote; "" if it is missing, or was cut."""
    inner = t.inner.get(key)
    if inner is None or not inner.trajectory.replies:
        return ""
    # Some servers say `tool_calls` of a reply without any.
    if inner.trajectory.replies[-1]["finish_reason"] not in ("stop", "tool_calls"):
        return ""
    return inner.trajectory.final_text().strip()


class SimulatedUserModel:
    """The model of a simulated user, which is shown more than its inner conversation stores."""

    def __init__(self, model: Model, seen: Sequence[Message], *, opening_length: int) -> None:
        """`seen` stands for the first `opening_length` messages of the inner conversation."""
        self._model = model
        self._seen = seen
        self._opening_length = opening_length

    async def complete(self, request: Request) -> Completion:
        """See `Model.complete`."""
        shown = [*self._seen, *request.messages[self._opening_length :]]
        completion = await self._model.complete(msgspec.structs.replace(request, messages=shown))
        if completion.tokens is None:
            return completion
        # The prompt's messages are not stored, so its token ids are not either.
        return replace(completion, tokens=completion.tokens._replace(prompt=None))


def missing_instructions(seen: Sequence[Message], t: Trajectory) -> list[Message]:
    """The messages of `seen` that conversation `t` has to store: the instructions, only once."""
    users = (inner for inner in t.inner.values() if inner.name == SIMULATED_USER)
    return [] if any(inner.trajectory.messages for inner in users) else list(seen[:1])


def calls_of_message(t: Trajectory, number: int) -> list[Message]:
    """The replies with calls, and their results, that precede message `number` of the user."""
    inner = t.inner.get(user_key(number))
    if inner is None:
        return []
    messages = inner.trajectory.messages[inner.trajectory.opening_length :]
    roles = [message["role"] for message in messages]
    end = len(roles) - roles[::-1].index("tool") if "tool" in roles else 0
    return messages[:end]


def count_replies(t: Trajectory, numbers: Iterable[int]) -> int:
    """The number of replies in which the user wrote the messages with these numbers."""
    # A branch has messages of its parent without their replies.
    inner = (t.inner.get(user_key(number)) for number in numbers)
    return sum(1 if one is None else max(1, one.trajectory.turns) for one in inner)


def opening_view(user: SimulatedUser, *, with_tools: bool = False) -> list[Message]:
    """The messages that a simulated user sees before the conversation begins."""
    return [
        Message(role="system", content=user.instructions(with_tools=with_tools)),
        Message(role="user", content=_GREETING),
    ]


def build_user_view_of_agent(
    user: SimulatedUser, messages: Sequence[str], answers: Sequence[str]
) -> list[Message]:
    """The chat with an agent that runs as a command, as the simulated user sees it.

    `messages` are the user's messages, `answers` the agent's answers to them.
    """
    seen = opening_view(user)
    for message, answer in zip(messages, answers, strict=True):
        seen.append(Message(role="assistant", content=message))
        seen.append(Message(role="user", content=split_inline_reasoning(answer).rest))
    return seen


def build_user_view(
    user: SimulatedUser, t: Trajectory, *, with_tools: bool = False
) -> list[Message]:
    """The conversation as the simulated user sees it: roles exchanged, with the user's own calls.

    `with_tools`: the user can call tools.
    """
    seen = opening_view(user, with_tools=with_tools)
    written = 0

    # Separates an answer from the text before it; empty if that was cut and is continued.
    between = ""

    def say(role: Role, text: str) -> None:
        if seen[-1]["role"] == role:
            text = seen.pop()["content"] + between + text
        seen.append(Message(role=role, content=text))

    texts = deque(note["text"] for note in t.notes if note["reason"] == USER_TURN)
    for n, message in enumerate(t.messages):
        if message["role"] == "assistant" and not message.get("tool_calls"):
            say("user", split_inline_reasoning(message["content"]).rest)
        elif message["role"] == "user" and n < t.opening_length:
            seen += calls_of_message(t, 0)
            say("assistant", message["content"])
        elif message["role"] == "user" and texts and message["content"].startswith(texts[0]):
            written += 1
            seen += calls_of_message(t, written)
            say("assistant", texts.popleft())  # without a note that the runtime may have added
        elif message["role"] == "user":  # a note as a whole
            between = "" if CONTINUE_CUT in message.get("notes", ()) else "\n\n"
    return seen
