"""Agents as they talk to a model, in each dialect: what they send, and how they repeat replies.

An agent repeats a reply as real ones do: without reasoning, with arguments that it wrote itself,
with marks for the cache that move, or with ids of its own.
"""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from agent.messages.message import Event
from agent.models.dialects.dialect import read_reply
from agent.state.events import Clock, exchange_event
from agent.state.trajectory import Trajectory
from agent.wires.base import Wire
from agent.wires.threads import Threads
from agent.wires.wire import Volatile, WireRequest
from agent.wires.wires import WIRES
from batch_trajectories.basics import exact_json

JSON = dict[str, Any]
ids = itertools.count(1)

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
PATHS = {
    "openai_chat": "/v1/chat/completions",
    "anthropic_messages": "/v1/messages?beta=true",
    "openai_responses": "/v1/responses",
    "gemini": "/v1beta/models/m:streamGenerateContent?alt=sse&key=sk",
}


@dataclass
class Said:
    """A reply of the model, in no dialect."""

    text: str = ""
    command: str | None = None
    thought: str = ""


@dataclass
class Talk(ABC):
    """An agent's conversation in one dialect."""

    system: str = "You work."
    model: str = "m"
    has_tools: bool = True
    items: list[JSON] = field(default_factory=list)

    @abstractmethod
    def say(self, text: str) -> None:
        """The user's next message."""

    @abstractmethod
    def result(self, text: str) -> None:
        """The result of the last call."""

    @abstractmethod
    def body(self) -> JSON:
        """The body of the next request."""

    @abstractmethod
    def reply(self, said: Said) -> JSON:
        """The body of a reply to it."""

    @abstractmethod
    def hear(self, reply: JSON) -> None:
        """Take a reply in, as this agent repeats it."""


class ChatTalk(Talk):
    """See `Talk`: like opencode, which writes arguments again and keeps no reasoning."""

    def say(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})

    def result(self, text: str) -> None:
        id = self.items[-1]["tool_calls"][0]["id"]
        self.items.append({"role": "tool", "tool_call_id": id, "content": text})

    def body(self) -> JSON:
        function = {"name": "bash", "description": "Runs it.", "parameters": PARAMETERS}
        tools = {"tools": [{"type": "function", "function": function}]}
        return {
            "model": self.model,
            "max_tokens": 8000,
            "messages": [{"role": "system", "content": self.system}, *self.items],
            "stream": True,
            "stream_options": {"include_usage": True},
            **(tools if self.has_tools else {}),
        }

    def reply(self, said: Said) -> JSON:
        message: JSON = {"role": "assistant", "content": said.text or None}
        if said.thought:
            message["reasoning_content"] = said.thought
        if said.command is not None:
            function = {"name": "bash", "arguments": json.dumps({"command": said.command})}
            message["tool_calls"] = [
                {"id": f"call_{next(ids)}", "type": "function", "function": function}
            ]
        finish = "stop" if said.command is None else "tool_calls"
        return {
            "id": f"chatcmpl-{next(ids)}",
            "object": "chat.completion",
            "created": 1,
            "model": "m-1",
            "choices": [{"index": 0, "message": message, "finish_reason": finish}],
            "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
        }

    def hear(self, reply: JSON) -> None:
        message = dict(reply["choices"][0]["message"])
        message.pop("reasoning_content", None)
        message["content"] = message["content"] or ""
        for call in message.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            compact = json.dumps(arguments, separators=(",", ":"))
            call = {**call, "function": {**call["function"], "arguments": compact}}
            message["tool_calls"] = [call]
        self.items.append(message)


class MessagesTalk(Talk):
    """See `Talk`: like Claude Code, with a mark for the cache on the last block."""

    def say(self, text: str) -> None:
        self.items.append({"role": "user", "content": [{"type": "text", "text": text}]})

    def result(self, text: str) -> None:
        id = self.items[-1]["content"][-1]["id"]
        result = {"type": "tool_result", "tool_use_id": id, "content": text, "is_error": False}
        self.items.append({"role": "user", "content": [result]})

    def body(self) -> JSON:
        items = json.loads(json.dumps(self.items))
        mark = {"cache_control": {"type": "ephemeral"}}
        items[-1]["content"][-1] |= mark
        tool = {"name": "bash", "description": "Runs it.", "input_schema": PARAMETERS}
        return {
            "model": self.model,
            "max_tokens": 8000,
            "system": [
                {"type": "text", "text": self.system, "cache_control": {"type": "ephemeral"}}
            ],
            "messages": items,
            "metadata": {"user_id": f"session {next(ids)}"},
            "stream": True,
            **({"tools": [tool]} if self.has_tools else {}),
        }

    def reply(self, said: Said) -> JSON:
        content: list[JSON] = []
        if said.thought:
            content.append({"type": "thinking", "thinking": said.thought, "signature": "c2ln"})
        if said.text:
            content.append({"type": "text", "text": said.text})
        if said.command is not None:
            given = {"command": said.command}
            use = {"type": "tool_use", "id": f"toolu_{next(ids)}", "name": "bash", "input": given}
            content.append(use)
        return {
            "id": f"msg_{next(ids)}",
            "type": "message",
            "role": "assistant",
            "model": "m-1",
            "content": content,
            "stop_reason": "end_turn" if said.command is None else "tool_use",
            "stop_sequence": None,
            "usage": {"input_tokens": 10, "output_tokens": 5},
        }

    def hear(self, reply: JSON) -> None:
        blocks = [block for block in reply["content"] if block["type"] != "thinking"]
        self.items.append({"role": "assistant", "content": blocks})


@dataclass
class TwoAtOnce(MessagesTalk):
    """Makes each call twice; like Claude Code's subagents, the one that ends first comes first."""

    order: tuple[int, int] = (0, 1)
    apart: bool = False
    """Each result is a message of its own."""

    def reply(self, said: Said) -> JSON:
        reply = super().reply(said)
        uses = [block for block in reply["content"] if block["type"] == "tool_use"]
        reply["content"] += [{**use, "id": f"{use['id']}_second"} for use in uses]
        return reply

    def result(self, text: str) -> None:
        uses = [block for block in self.items[-1]["content"] if block["type"] == "tool_use"]
        found = [
            {"type": "tool_result", "tool_use_id": uses[n]["id"], "content": f"{text} {n}"}
            for n in self.order
        ]
        items = [[one] for one in found] if self.apart else [found]
        self.items += [{"role": "user", "content": content} for content in items]


class ResponsesTalk(Talk):
    """See `Talk`: like Codex, which gives items ids of its own and sends no reasoning here."""

    def say(self, text: str) -> None:
        part = {"type": "input_text", "text": text}
        message = {"type": "message", "role": "user", "content": [part]}
        self.items.append({**message, "id": f"item_{next(ids)}"})

    def result(self, text: str) -> None:
        id = self.items[-1]["call_id"]
        output = {"type": "function_call_output", "call_id": id, "output": text}
        self.items.append({**output, "id": f"item_{next(ids)}"})

    def body(self) -> JSON:
        tool = {"type": "function", "name": "bash", "parameters": PARAMETERS, "strict": False}
        return {
            "model": self.model,
            "max_output_tokens": 8000,
            "instructions": self.system,
            "input": self.items,
            "stream": True,
            "store": False,
            "prompt_cache_key": f"cache {next(ids)}",
            "client_metadata": {"id": f"{next(ids)}"},
            **({"tools": [tool]} if self.has_tools else {}),
        }

    def reply(self, said: Said) -> JSON:
        output: list[JSON] = []
        if said.thought:
            summary = [{"type": "summary_text", "text": said.thought}]
            output.append({"type": "reasoning", "id": f"rs_{next(ids)}", "summary": summary})
        if said.text:
            part = {"type": "output_text", "text": said.text, "annotations": []}
            message = {"type": "message", "id": f"msg_{next(ids)}", "status": "completed"}
            output.append({**message, "role": "assistant", "content": [part]})
        if said.command is not None:
            arguments = json.dumps({"command": said.command})
            call = {"type": "function_call", "id": f"fc_{next(ids)}", "status": "completed"}
            call |= {"call_id": f"call_{next(ids)}", "name": "bash", "arguments": arguments}
            output.append(call)
        return {
            "id": f"resp_{next(ids)}",
            "object": "response",
            "created_at": 1,
            "status": "completed",
            "model": "m-1",
            "output": output,
            "usage": {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15},
        }

    def hear(self, reply: JSON) -> None:
        said = [item for item in reply["output"] if item["type"] != "reasoning"]
        self.items += [{**item, "id": f"item_{next(ids)}"} for item in said]


class GeminiTalk(Talk):
    """See `Talk`: like Gemini CLI, which gives calls without ids ids of its own."""

    def say(self, text: str) -> None:
        self.items.append({"role": "user", "parts": [{"text": text}]})

    def result(self, text: str) -> None:
        call = self.items[-1]["parts"][-1]["functionCall"]
        response = {"id": call["id"], "name": "bash", "response": {"output": text}}
        self.items.append({"role": "user", "parts": [{"functionResponse": response}]})

    def body(self) -> JSON:
        function = {"name": "bash", "description": "Runs it.", "parametersJsonSchema": PARAMETERS}
        tools = {"tools": [{"functionDeclarations": [function]}]}
        return {
            "contents": self.items,
            "systemInstruction": {"role": "user", "parts": [{"text": self.system}]},
            "generationConfig": {"temperature": 1, "maxOutputTokens": 8000},
            **(tools if self.has_tools else {}),
        }

    def reply(self, said: Said) -> JSON:
        parts: list[JSON] = []
        if said.thought:
            parts.append({"text": said.thought, "thought": True})
        if said.text:
            parts.append({"text": said.text})
        if said.command is not None:
            call = {"name": "bash", "args": {"command": said.command}}
            parts.append({"functionCall": call, "thoughtSignature": "c2ln"})
        candidate = {"content": {"role": "model", "parts": parts}, "index": 0}
        return {
            "candidates": [{**candidate, "finishReason": "STOP"}],
            "usageMetadata": {"promptTokenCount": 10, "candidatesTokenCount": 5},
            "modelVersion": "m-1",
            "responseId": f"{next(ids)}",
        }

    def hear(self, reply: JSON) -> None:
        content = reply["candidates"][0]["content"]
        parts = json.loads(json.dumps(content["parts"]))
        for part in parts:
            if call := part.get("functionCall"):
                call["id"] = f"bash_{next(ids)}"
        kept = [part for part in parts if not part.get("thought")]
        self.items.append({"role": "model", "parts": kept})


TALKS: dict[str, type[Talk]] = {
    "openai_chat": ChatTalk,
    "anthropic_messages": MessagesTalk,
    "openai_responses": ResponsesTalk,
    "gemini": GeminiTalk,
}


def api_of(talk: Talk) -> str:
    """The dialect that an agent speaks."""
    return next(api for api, kind in TALKS.items() if isinstance(talk, kind))


def path_for(talk: Talk) -> str:
    """The path of its requests."""
    return PATHS[api_of(talk)].replace("models/m:", f"models/{talk.model}:")


class Recording:
    """A gateway without connections: reads requests and journals calls."""

    def __init__(self, prompt: str, events: list[Event] | None = None, **volatile: Any) -> None:
        self.trajectory = Trajectory([{"role": "user", "content": prompt}])
        self.events: list[Event] = []
        self.threads = Threads()
        self.threads.volatile = Volatile(**volatile)
        self.trajectory.agent_calls = self.threads
        for event in events or ():
            self.take(event)

    def take(self, event: Event) -> None:
        """Journal an event, as it is read back from disk."""
        event = exact_json.loads(exact_json.dumps(event))
        self.events.append(event)
        self.trajectory.apply(event)

    def restart(self) -> None:
        """The agent's command starts again."""
        self.take({"kind": "agent_restarted", "at": 1.0})

    def read(self, talk: Talk) -> tuple[Wire, WireRequest]:
        """The request that an agent would send now."""
        wire = WIRES[api_of(talk)]
        return wire, self.threads.read(wire, path_for(talk), talk.body())

    def relay(self, talk: Talk, said: Said, *, echo: bool = True) -> JSON:
        """One call that the model answers with `said`; returns the body of its reply."""
        wire, request = self.read(talk)
        reply = talk.reply(said)
        self.record(wire, request, reply)
        if echo:
            talk.hear(reply)
        return reply

    def record(self, wire: Wire, request: WireRequest, reply: JSON) -> None:
        """Journal a call and its reply."""
        completion = read_reply(wire.api, exact_json.dumps(reply))
        self.take(exchange_event(self.threads, request, completion, reply, Clock()))

    def ask(self, talk: Talk, said: Said) -> bool:
        """One call, answered from the journal if it can be; whether it was."""
        _, request = self.read(talk)
        known = self.threads.find_set_aside(request.key)
        if known is None:
            self.relay(talk, said)
            return False
        self.take({"kind": "answered", "exchange": known["number"]})
        talk.hear(known["body"])
        return True
