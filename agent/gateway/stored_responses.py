"""Responses that an agent asks for by their ids: those that it has made in the background.

OpenAI's Responses API answers a request with `background` at once, and the client then asks for the
response by its id until that is there. Here the call is an ordinary one, with the retries, limits
and records of all calls; only the agent does not wait for it. A response that was recorded can be
asked for as well, also after a crash.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent.gateway.answers import Answer, Refusal
from agent.gateway.relay import Relay
from agent.gateway.sending import AgentCall
from agent.models.dialects.openai_responses import API
from agent.wires.reading import path_of
from agent.wires.wire import WireError
from agent.wires.wire_base import SERVER_ERROR, Wire
from batch_trajectories.basics import exact_json

_PLACE = "/responses/"
_CANCEL = "/cancel"


@dataclass
class _Begun:
    """A response that is being made."""

    body: dict[str, Any]
    """What it is until it is there."""
    reply: Answer
    reading: asyncio.Task[None]
    """Keeps others from taking its reply for theirs."""


class StoredResponses:
    """The responses of one agent, by their ids."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._begun: dict[str, _Begun] = {}

    def answer(self, call: AgentCall) -> Answer:
        """The reply to a model call; one in the background gets its id. Raises `WireError`."""
        if call.wire.api != API:
            return self._relay.answer(call)
        is_background = call.body.get("background") is True
        body = {name: value for name, value in call.body.items() if name != "background"}
        earlier = self._begun.get(str(body.get("previous_response_id")))
        if earlier is not None:
            if not earlier.reply.is_done or earlier.reply.refusal is not None:
                raise WireError("previous_response_id: that response is not completed")
            body["previous_response_id"] = _made(earlier.reply)["id"]
        if is_background or earlier is not None:
            call = call._replace(body=body, content=exact_json.dumps(body))
        reply = self._relay.answer(call)
        # A stream is waited for. What is there already is told at once.
        if not is_background or reply.is_stream or reply.is_done:
            return reply
        return self._begin(body, reply)

    def _begin(self, body: Mapping[str, Any], reply: Answer) -> Answer:
        id = f"resp_{secrets.token_hex(24)}"
        begun = {
            **{"id": id, "object": "response", "created_at": int(time.time())},
            **{"status": "queued", "background": True, "error": None, "incomplete_details": None},
            **{"model": body.get("model"), "output": [], "usage": None},
            **{"instructions": body.get("instructions"), "metadata": body.get("metadata") or {}},
            **{"tools": body.get("tools") or [], "tool_choice": body.get("tool_choice", "auto")},
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
        }
        reading = asyncio.create_task(self._read(reply))
        self._begun[id] = _Begun(begun, reply, reading)
        return _respond(begun)

    async def _read(self, reply: Answer) -> None:
        with self._relay.answers.reading(reply):
            await reply.done()

    def operate(self, method: str, wire: Wire, path: str) -> Answer | None:
        """The answer to a request that names a response; None if it is none of these."""
        plain = path_of(path)
        _, place, id = plain.rpartition(_PLACE)
        if wire.api != API or not place:
            return None
        if method == "GET" and "/" not in id:
            return self._state(id, path)
        if method == "POST" and id.endswith(_CANCEL):
            return self._cancel(id.removesuffix(_CANCEL), path)
        if method == "DELETE" and "/" not in id:
            return _respond({"id": id, "object": "response", "deleted": True})
        return None

    def _state(self, id: str, path: str) -> Answer:
        if "stream=true" in path:
            message = "a response is given whole here: ask for it without stream=true"
            return Answer(Refusal(400, "bad_request", message))
        begun = self._begun.get(id)
        if begun is None:
            return self._recorded(id)
        if not begun.reply.is_done or begun.body["status"] == "cancelled":
            return _respond(begun.body)
        if (refusal := begun.reply.refusal) is not None:
            code = SERVER_ERROR if refusal.status >= 500 else "invalid_prompt"
            error = {"code": code, "message": f"{refusal.message} ({refusal.kind})"}
            return _respond({**begun.body, "status": "failed", "error": error})
        return _respond(_made(begun.reply))

    def _cancel(self, id: str, path: str) -> Answer:
        """The call goes on at the endpoint: it is paid and recorded, but not shown to the agent."""
        begun = self._begun.get(id)
        if begun is not None and not begun.reply.is_done:
            begun.body["status"] = "cancelled"
        return self._state(id, path)

    def _recorded(self, id: str) -> Answer:
        for exchange in self._relay.exchanges:
            if exchange["body"].get("id") == id:
                return _respond(exchange["body"])
        message = f"Response with id '{id}' not found: send its request again."
        return Answer(Refusal(404, "not_found", message))


def _made(reply: Answer) -> dict[str, Any]:
    made: dict[str, Any] = exact_json.loads(b"".join(reply.parts))
    return made


def _respond(body: Mapping[str, Any]) -> Answer:
    answer = Answer()
    answer.finish([exact_json.dumps(body)])
    return answer
