"""The OpenAI Responses dialect of the fake endpoint."""

from __future__ import annotations

import time

from tests.fakes.fake_dialects import CHAT, named_event, text_of
from tests.fakes.fake_script import JSON, Options, Reply, digest


def _is_reply(item: JSON) -> bool:
    return item.get("role") == "assistant" or item.get("type", "message") in (
        "function_call",
        "reasoning",
    )


def _opening(request: JSON) -> tuple[str, int]:
    items = request["input"]
    first = next((item["content"] for item in items if item.get("role") == "user"), "")
    pairs = zip([{}, *items], items, strict=False)
    return text_of(first), sum(_is_reply(item) and not _is_reply(before) for before, item in pairs)


def _breach(request: JSON, conversation: str, options: Options) -> str | None:
    awaited: list[str] = []
    for n, item in enumerate([*request["input"], {"role": "user"}]):
        match item.get("type"):
            case "function_call":
                if item["call_id"] in awaited:
                    return f"input[{n}]: call_id {item['call_id']!r} is repeated"
                awaited.append(item["call_id"])
            case "function_call_output":
                if item["call_id"] not in awaited:
                    return f"No tool call found for function call output {item['call_id']!r}."
                awaited.remove(item["call_id"])
            case _ if awaited and item.get("role") == "user":
                return f"No tool output found for function call {awaited[0]!r}."
    return None


def _body(reply: Reply) -> JSON:
    name = "{}_{}".format(*reply.key)
    output: list[JSON] = []
    if reply.thought:
        summary = [{"type": "summary_text", "text": reply.thought}]
        item = {"type": "reasoning", "id": "rs_" + name, "summary": summary}
        output.append({**item, "encrypted_content": digest(f"signed {reply.key}", 32)})
    if reply.text:
        part = {"type": "output_text", "text": reply.text, "annotations": []}
        if reply.finish == "refusal":
            part = {"type": "refusal", "refusal": reply.text}
        item = {"type": "message", "id": "msg_" + name, "status": "completed"}
        output.append({**item, "role": "assistant", "content": [part]})
    for n, call in enumerate(reply.calls):
        item = {"type": "function_call", "id": f"fc_{name}_{n}", "status": "completed"}
        item |= {"name": call["name"], "arguments": call["arguments"]}
        output.append(item if call["id"] is None else {**item, "call_id": "call_" + call["id"]})
    is_cut = reply.finish == "length"
    status = None if reply.finish is None else "incomplete" if is_cut else "completed"
    return {
        "id": "resp_" + name,
        "object": "response",
        "created_at": int(time.time()),
        "model": reply.model,
        "status": status,
        "error": None,
        "output": output,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "usage": {
            "input_tokens": reply.input_tokens,
            "input_tokens_details": {"cached_tokens": reply.cached_tokens},
            "output_tokens": reply.output_tokens,
            "output_tokens_details": {"reasoning_tokens": len(reply.thought) // 4},
            "total_tokens": reply.input_tokens + reply.output_tokens,
        },
    }


def _events(body: JSON, request: JSON) -> list[bytes]:
    begun = {**body, "status": "in_progress", "output": [], "usage": None}
    events: list[JSON] = [{"type": "response.created", "response": begun}]
    for n, item in enumerate(body["output"] or ()):
        place = {"output_index": n, "item_id": item["id"]}
        match item["type"]:
            case "reasoning":
                empty, kind = {**item, "summary": []}, "response.reasoning_summary_text.delta"
                delta, more = item["summary"][0]["text"], {"summary_index": 0}
            case "message":
                part = item["content"][0]
                said = "refusal" if part["type"] == "refusal" else "output_text"
                empty, kind = {**item, "content": []}, f"response.{said}.delta"
                delta, more = part.get("text") or part.get("refusal"), {"content_index": 0}
            case _:
                empty, kind = {**item, "arguments": ""}, "response.function_call_arguments.delta"
                delta, more = item["arguments"], {}
        events.append({"type": "response.output_item.added", "output_index": n, "item": empty})
        events.append({"type": kind, **place, **more, "delta": delta})
        events.append({"type": "response.output_item.done", "output_index": n, "item": item})
    ending = "incomplete" if body["status"] == "incomplete" else "completed"
    events.append({"type": f"response.{ending}", "response": body})
    return [named_event(event) for event in events]


def _error_event(error: JSON) -> bytes:
    return named_event({**error["error"], "type": "error", "code": "server_error"})


# Errors have the same form.
RESPONSES = CHAT._replace(
    opening=_opening,
    breach=_breach,
    body=_body,
    events=_events,
    error_event=_error_event,
    hollow={"output": None},
    lacks=frozenset({"pause", "context_stop", "roles", "other_reasoning"}),
)
