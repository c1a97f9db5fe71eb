"""The server side of OpenAI's embeddings and legacy completions.

Each call is a conversation of one reply. Replies are read in the form of chat completions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent.messages.message import COMPLETION, EMBEDDINGS, Message
from agent.models.dialects.dialect import (
    Assembly,
    PartialObject,
    merge,
    read_reply,
    to_body,
    unknown_in,
)
from agent.models.dialects.openai_chat import API as CHAT
from agent.models.errors import ModelError
from agent.models.model import Completion
from agent.models.parsing import get_object, load_object
from agent.wires.base import sse
from agent.wires.openai_chat import ChatWire
from agent.wires.reading import CallFields, CallsInOrder, Layout, placeholder, strip_query
from agent.wires.wire import Operation, WireError
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.exact_json import objects_among

_CHOICE_FIELDS = frozenset({"index", "text", "finish_reason"})
_KNOWN = ("id", "model", "usage", "error", "base_resp")
_MAX_CHOICES = 128
"""Maximum choices that are kept of a reply; OpenAI gives no more for a prompt."""


class CompletionsWire(ChatWire):
    """Legacy completions; see `Wire`. Calls go to an endpoint that speaks chat completions."""

    call_path = "/completions"
    limits: tuple[str, ...] = ("max_tokens",)
    server_field = ""
    given = "prompt"
    """The field of the body with the texts."""

    def __init__(self, dialect: str = COMPLETION) -> None:
        known = frozenset({"model", self.given, "stream", "stream_options", "user"})
        self.layout = Layout(
            api=dialect,
            read_part=_read_part,
            read_tool=_read_tool,
            read_elsewhere=known,
            messages=self.given,
        )

    def operation(self, method: str, path: str) -> Operation | None:
        """See `Wire.operation`."""
        is_chat = strip_query(path).endswith(ChatWire.call_path)
        return None if is_chat else super().operation(method, path)

    def upstream_path(self, path: str) -> str:
        """See `Wire.upstream_path`."""
        return self.call_path

    def read_fields(self, path: str, body: Mapping[str, Any]) -> CallFields:
        """See `Wire.read_fields`."""
        given = body.get(self.given)
        is_list = isinstance(given, list) and given and not isinstance(given[0], int)
        pieces = given if is_list and isinstance(given, list) else [given]
        if not all(isinstance(piece, str | list) and piece for piece in pieces):
            raise WireError(f"{self.given}: it must be a text, tokens, or a list of these")
        limit = body.get("max_tokens")
        is_stream = body.get("stream") is True
        return CallFields(
            model=body.get("model"),
            system=None,
            messages=pieces,
            tools=None,
            is_stream=is_stream,
            max_tokens=limit,
        )

    def read_reply(self, body: bytes) -> Completion:
        """See `Wire.read_reply`."""
        reply = load_object(body)
        choices = [
            {
                "index": choice.get("index", 0),
                "message": {"role": "assistant", "content": choice.get("text")},
                **{key: choice[key] for key in ("finish_reason",) if key in choice},
            }
            for choice in objects_among(reply.get("choices"))
        ]
        return _read_as_chat(reply, choices)

    def assembly(self) -> Assembly:
        """See `Wire.assembly`."""
        return _TextAssembly()

    def write_whole(self, body: Mapping[str, Any]) -> bytes:
        """See `Wire.write_whole`."""
        return exact_json.dumps({"object": "text_completion", "created": 0, **body})

    def write_stream(self, body: Mapping[str, Any]) -> list[bytes]:
        """See `Wire.write_stream`."""
        head = {"object": "text_completion", "created": 0, **body}
        usage, choices = head.pop("usage", None), objects_among(head.pop("choices", []))
        events = [sse({**head, "choices": [choice]}) for choice in choices]
        if usage is not None:
            events.append(sse({**head, "choices": [], "usage": usage}))
        return [*events, b"data: [DONE]\n\n"]


class EmbeddingsWire(CompletionsWire):
    """Embeddings; see `Wire`. Replies have no text."""

    call_path = "/embeddings"
    limits = ()
    given = "input"

    def __init__(self) -> None:
        super().__init__(EMBEDDINGS)

    def read_fields(self, path: str, body: Mapping[str, Any]) -> CallFields:
        """See `Wire.read_fields`."""
        return super().read_fields(path, body)._replace(is_stream=False, max_tokens=0)

    def read_reply(self, body: bytes) -> Completion:
        """See `Wire.read_reply`."""
        reply = load_object(body)
        if not isinstance(reply.get("data"), list):
            raise ModelError("malformed", "the reply has no list of embeddings")
        message = {"role": "assistant", "content": ""}
        usage = {"completion_tokens": 0, **get_object(reply, "usage")}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return _read_as_chat({**reply, "usage": usage}, [choice])

    def write_whole(self, body: Mapping[str, Any]) -> bytes:
        """See `Wire.write_whole`."""
        return exact_json.dumps(body)


class _TextAssembly:
    """Puts one `text_completion` together from its parts; see `Assembly`."""

    def __init__(self) -> None:
        self._reply: dict[str, Any] = {}
        self._choices: dict[int, PartialObject] = {}
        self.has_reason = False
        self.is_over = False

    def add(self, part: Mapping[str, Any]) -> None:
        """See `Assembly.add`."""
        self._reply |= {key: part[key] for key in ("id", "model", "usage") if part.get(key)}
        for given in objects_among(part.get("choices")):
            index = given.get("index", 0)
            if type(index) is not int or not 0 <= index < _MAX_CHOICES:
                continue
            choice = self._choices.setdefault(index, PartialObject({"index": index, "text": ""}))
            choice.append("text", str(given.get("text") or ""))
            if reason := given.get("finish_reason"):
                choice.fields["finish_reason"] = reason
            merge(choice.fields, unknown_in(given, _CHOICE_FIELDS))
            self.has_reason = all(one.fields.get("finish_reason") for one in self._choices.values())

    def finish(self) -> bytes:
        """See `Assembly.finish`."""
        choices = [choice.build() for choice in self._choices.values()]
        return to_body({**self._reply, "choices": choices})


def _read_as_chat(reply: Mapping[str, Any], choices: Sequence[Mapping[str, Any]]) -> Completion:
    """Read the fields of a reply that a record needs; the body itself is kept as it came."""
    known = {key: reply[key] for key in _KNOWN if key in reply}
    return read_reply(CHAT, exact_json.dumps({**known, "choices": choices}))


def _read_part(raw: Any, calls: CallsInOrder) -> list[Message]:
    del calls
    text = raw if isinstance(raw, str) else placeholder({"type": "tokens", "tokens": raw})
    return [Message(role="user", content=text)]


def _read_tool(tool: Mapping[str, Any]) -> str:
    return str(tool.get("type"))
