"""The server side of Gemini's generateContent. The model's name is in the path."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agent.messages.message import Message
from agent.models.dialects.gemini import API, read_parts
from agent.models.errors import ModelError
from agent.models.model import generation_config
from agent.wires.base import MadeCall, Wire, lower_limit, sse
from agent.wires.reading import (
    CallFields,
    CallsInOrder,
    Layout,
    Schemas,
    function_tool,
    make_message,
    require_objects,
    split_results,
    strip_query,
)
from agent.wires.wire import Operation, WireError
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.exact_json import objects_among

_PATH = re.compile(r"(?P<version>/v1[a-z0-9]*)?/models/(?P<model>[^/:]*):(?P<method>\w+)$")
_OPERATIONS: Mapping[str, Operation] = {
    "generateContent": "call",
    "streamGenerateContent": "call",
    "countTokens": "count_tokens",
}
_DECLARED = ("functionDeclarations", "function_declarations")
_READ_ELSEWHERE = frozenset(
    {"contents", "systemInstruction", "system_instruction", "tools", "labels", "model"}
)
_STATUSES: Mapping[int, str] = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
}


class GeminiWire(Wire):
    """Gemini's generateContent; see `Wire`."""

    api = API
    keepalive = b"\n"  # Google's own client takes no comments
    ends = ("finishReason", "blockReason")

    def __init__(self) -> None:
        self.layout = Layout(
            api=API,
            read_part=_read_part,
            read_tool=_read_tool,
            read_elsewhere=_READ_ELSEWHERE,
            messages="contents",
        )

    def operation(self, method: str, path: str) -> Operation | None:
        """See `Wire.operation`."""
        match = _PATH.search(strip_query(path))
        if match is None:
            return None
        return _OPERATIONS.get(match["method"], "other") if method == "POST" else "other"

    def read_fields(self, path: str, body: Mapping[str, Any]) -> CallFields:
        """See `Wire.read_fields`."""
        match = _PATH.search(strip_query(path))
        is_stream = match is not None and match["method"] == "streamGenerateContent"
        if is_stream and "alt=sse" not in path:
            raise WireError("streams are sent as events only: add ?alt=sse to the path")
        system, messages = self.split_messages(body)
        limit = generation_config(body).get("maxOutputTokens")
        return CallFields(
            model=match and match["model"],
            system=system,
            messages=messages,
            tools=_collect_tools(body),
            is_stream=is_stream,
            max_tokens=limit,
        )

    def split_messages(self, body: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        """See `Wire.split_messages`."""
        system = body.get("systemInstruction") or body.get("system_instruction")
        return system, require_objects(body.get("contents"), "contents")

    def rewrite(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        model: str | None = None,
        max_tokens: int | None = None,
        without_server_tools: bool = False,
    ) -> tuple[str, dict[str, Any]]:
        """See `Wire.rewrite`."""
        new = dict(body)
        if model is not None:
            plain, mark, query = path.partition("?")
            path = re.sub(r"(?<=/models/)[^/:]*(?=:)", lambda _: model, plain) + mark + query
        if max_tokens is not None:
            config = generation_config(body)
            limit = lower_limit(max_tokens, config.get("maxOutputTokens"))
            new.pop("generation_config", None)
            new["generationConfig"] = {**config, "maxOutputTokens": limit}
        if without_server_tools and body.get("tools"):
            declared = [
                {key: tool[key] for key in tool if key in _DECLARED} for tool in body["tools"]
            ]
            new["tools"] = [tool for tool in declared if tool]
            if not new["tools"]:
                del new["tools"]
                new.pop("toolConfig", None)
        return path, new

    def upstream_path(self, path: str) -> str:
        """See `Wire.upstream_path`. Passes on `alt=sse` of the query, and nothing else."""
        plain, _, query = path.partition("?")
        match = _PATH.search(plain.rstrip("/"))
        if match is None:
            return plain
        version = match["version"] or "/v1beta"
        form = "?alt=sse" if "alt=sse" in query else ""
        return f"{version}/models/{match['model']}:{match['method']}{form}"

    def write_stream(self, body: Mapping[str, Any]) -> list[bytes]:
        """See `Wire.write_stream`. Two events: the reply without its finish reason, and that."""
        candidates = objects_among(body.get("candidates"))
        begun = [{k: c[k] for k in c if k != "finishReason"} for c in candidates]
        ended = [
            {key: candidate[key] for key in ("finishReason", "index") if key in candidate}
            for candidate in candidates
        ]
        head = {key: body[key] for key in body if key not in ("candidates", "usageMetadata")}
        if not candidates:
            return [sse(body)]
        return [sse({**head, "candidates": begun}), sse({**body, "candidates": ended})]

    def write_reply(
        self, id: str, model: str, text: str, calls: Sequence[MadeCall]
    ) -> dict[str, Any]:
        """See `Wire.write_reply`."""
        parts: list[dict[str, Any]] = [{"text": text}] if text else []
        parts += [{"functionCall": {"name": call.name, "args": call.arguments}} for call in calls]
        content = {"role": "model", "parts": parts}
        return {
            "candidates": [{"content": content, "finishReason": "STOP", "index": 0}],
            "usageMetadata": {
                "promptTokenCount": 10,
                "candidatesTokenCount": 10,
                "totalTokenCount": 20,
            },
            "modelVersion": model,
            "responseId": id,
        }

    def is_end(self, event: Any) -> bool:
        """See `Wire.is_end`."""
        feedback, candidates = event.get("promptFeedback") or {}, event.get("candidates") or []
        return bool(feedback.get("blockReason")) or any(
            candidate.get("finishReason") for candidate in candidates
        )

    def write_error(self, status: int, kind: str, message: str) -> bytes:
        """See `Wire.write_error`."""
        named = _STATUSES.get(status, "INVALID_ARGUMENT" if status < 500 else "INTERNAL")
        error = {"code": status, "message": f"{message} ({kind})", "status": named}
        return exact_json.dumps({"error": error})

    def write_stream_error(self, status: int, kind: str, message: str) -> bytes:
        """See `Wire.write_stream_error`."""
        # Google's own client finds errors only outside of events.
        return self.write_error(status, kind, message) + b"\n\n"


def _collect_tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the declared functions, and an object for each kind of tool that Google would run."""
    tools: list[dict[str, Any]] = []
    for tool in require_objects(body.get("tools") or [], "tools"):
        for kind, given in tool.items():
            tools += require_objects(given or [], kind) if kind in _DECLARED else [{"kind": kind}]
    return tools


def _read_tool(tool: Mapping[str, Any]) -> Schemas:
    if "kind" in tool and "name" not in tool:
        return str(tool["kind"])
    parameters = tool.get("parametersJsonSchema") or tool.get("parameters")
    return [function_tool(str(tool.get("name") or ""), tool.get("description"), parameters)]


def _read_part(raw: Any, calls: CallsInOrder) -> list[Message]:
    if isinstance(raw, tuple):
        given = raw[1]
        return [make_message(API, "system", given if isinstance(given, str) else _parts(given))]
    match raw.get("role") or "user":
        case "model":
            try:
                message = read_parts(raw.get("parts") or [])
            except ModelError as error:
                raise WireError(str(error)) from error
            for n, call in enumerate(message.get("tool_calls", ()), calls.count):
                call["id"] = call["id"] or f"call_{n}"
            return [message]
        case "user" | "function":
            return _read_user(_parts(raw), calls)
        case role:
            raise WireError(f"its role is {role!r}; known: user, model, function")


def _parts(content: Any) -> list[dict[str, Any]]:
    return require_objects(
        content.get("parts") or [] if isinstance(content, dict) else None, "parts"
    )


def _read_user(parts: Sequence[dict[str, Any]], calls: CallsInOrder) -> list[Message]:
    """Read a message of the user, with its results.

    Results without ids, or with ids of no call, are in the order of calls.
    """
    # Subagents of Gemini CLI send calls without the ids that their results have.
    awaited = calls.latest()

    def read_result(part: Mapping[str, Any], before: int) -> Message | None:
        result = part.get("functionResponse")
        if not isinstance(result, dict):
            return None
        id = str(result.get("id") or "")
        if calls.rank(id) is None and before < len(awaited):
            call = awaited[before]
            if not id or call["function"]["name"] == result.get("name"):
                id = call["id"]
        return _read_result(id, result)

    return split_results(API, parts, read_result)


def _read_result(id: str, result: Mapping[str, Any]) -> Message:
    given = result.get("response")
    text, is_error = given, False
    if isinstance(given, dict) and len(given) == 1:
        [(key, text)] = given.items()
        is_error = key == "error"
    if not isinstance(text, str):
        text = exact_json.dumps(given).decode()
    name = str(result.get("name") or "")
    message = make_message(API, "tool", [{"text": text}, *objects_among(result.get("parts"))])
    return {**message, "tool_call_id": id, "name": name, "is_error": is_error}


WIRE = GeminiWire()
