"""A small agent that runs as a command: it asks the model and runs the commands it calls for.

    python -m tests.fakes.scripted_agent DIALECT [--stream] [--by_id] [--continue] PROMPT

With --by_id, the dialect responses sends only what is new, and the id of the reply before. With
--continue it goes on with what it has kept in HOME, as each start keeps its conversation. With
--acp, prompts come by the Agent Client Protocol, and it asks for permission to run each command.
DIALECT is chat, messages or responses. It knows only what the environment says (OPENAI_BASE_URL,
ANTHROPIC_BASE_URL), runs with the standard library alone, and prints the last text.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

JSON = dict[str, Any]
Read = tuple[list[JSON], str, list[tuple[str, str]]]
"""The messages to be repeated in the next request, the text, and the calls: ids and arguments."""

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
KEY = os.environ.get("OPENAI_API_KEY", "")
SYSTEM = "You are an agent in a test. Run commands with the tool bash."


class Chat:
    """OpenAI chat completions."""

    url = os.environ.get("OPENAI_BASE_URL", "") + "/chat/completions"
    more: ClassVar[JSON] = {
        "tools": [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}],
        "stream_options": {"include_usage": True},
    }
    field = "messages"

    def opening(self, prompt: str) -> list[JSON]:
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]

    def read(self, events: Iterable[JSON]) -> Read:
        message: JSON = {"role": "assistant", "content": ""}
        for event in events:
            for choice in event.get("choices", ()):
                delta = choice["delta"] if "delta" in choice else choice["message"]
                message["content"] += delta.get("content") or ""
                for call in delta.get("tool_calls") or ():
                    call = {key: value for key, value in call.items() if key != "index"}
                    message.setdefault("tool_calls", []).append(call)
        calls = message.get("tool_calls", ())
        return [message], message["content"], [(c["id"], c["function"]["arguments"]) for c in calls]

    def results(self, results: Sequence[tuple[str, str]]) -> list[JSON]:
        return [{"role": "tool", "tool_call_id": id, "content": text} for id, text in results]


class Messages:
    """Anthropic messages."""

    url = os.environ.get("ANTHROPIC_BASE_URL", "") + "/v1/messages?beta=true"
    more: ClassVar[JSON] = {
        "max_tokens": 1000,
        "system": SYSTEM,
        "metadata": {"user_id": os.urandom(8).hex()},
        "tools": [{"name": "bash", "description": "Runs a command", "input_schema": SCHEMA}],
    }
    field = "messages"

    def opening(self, prompt: str) -> list[JSON]:
        return [{"role": "user", "content": [{"type": "text", "text": prompt}]}]

    def read(self, events: Iterable[JSON]) -> Read:
        blocks: list[JSON] = []
        for event in events:
            if event["type"] == "message":
                blocks = event["content"]
            elif event["type"] == "content_block_start":
                blocks.append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                kind = delta["type"].removesuffix("_delta")
                name = {"input_json": "json"}.get(kind, kind)
                blocks[-1][name] += delta.get("partial_json") or delta.get(kind) or ""
        for block in blocks:
            text = block.pop("json", "")
            if text and block["type"] == "tool_use":
                block["input"] = json.loads(text)
        said = "".join(block["text"] for block in blocks if block["type"] == "text")
        calls = [(b["id"], json.dumps(b["input"])) for b in blocks if b["type"] == "tool_use"]
        return [{"role": "assistant", "content": blocks}], said, calls

    def results(self, results: Sequence[tuple[str, str]]) -> list[JSON]:
        blocks = [{"type": "tool_result", "tool_use_id": i, "content": t} for i, t in results]
        return [{"role": "user", "content": blocks}]


class Responses:
    """OpenAI Responses."""

    url = os.environ.get("OPENAI_BASE_URL", "") + "/responses"
    more: ClassVar[JSON] = {
        "instructions": SYSTEM,
        "store": False,
        "prompt_cache_key": os.urandom(8).hex(),
        "tools": [{"type": "function", "name": "bash", "parameters": SCHEMA}],
    }
    field = "input"

    def opening(self, prompt: str) -> list[JSON]:
        part = {"type": "input_text", "text": prompt}
        return [{"type": "message", "role": "user", "content": [part]}]

    def read(self, events: Iterable[JSON]) -> Read:
        items: list[JSON] = []
        for event in events:
            if event.get("type") == "response.output_item.done":
                items.append(event["item"])
            elif event.get("object") == "response":
                items = event["output"]
        said = "".join(i["content"][0]["text"] for i in items if i["type"] == "message")
        calls = [(i["call_id"], i["arguments"]) for i in items if i["type"] == "function_call"]
        return items, said, calls

    def results(self, results: Sequence[tuple[str, str]]) -> list[JSON]:
        kind = "function_call_output"
        return [{"type": kind, "call_id": id, "output": text} for id, text in results]


def ask(
    dialect: Chat | Messages | Responses, history: list[JSON], stream: bool, by_id: str | None
) -> list[JSON]:
    body = {"model": os.environ.get("MODEL", "m"), "stream": stream, **dialect.more}
    if by_id:
        body |= {"previous_response_id": by_id, "store": True}
    body[dialect.field] = history
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(dialect.url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as response:
        if not stream:
            return [json.load(response)]
        lines = [line[5:].strip() for line in response if line.startswith(b"data:")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]


def work(dialect: Chat | Messages | Responses, flags: Sequence[str], prompt: str) -> str:
    """Have the model work on a prompt; the last text."""
    history = dialect.opening(prompt)
    session = Path.home() / "session.json"
    if "--continue" in flags:
        history = [*json.loads(session.read_text()), history[-1]]
    by_id = None
    while True:
        events = ask(dialect, history, "--stream" in flags, by_id)
        echo, text, calls = dialect.read(events)
        history += echo
        if "--by_id" in flags:
            by_id = events[-1].get("response", events[-1])["id"]
            history = []
        if not calls:
            session.write_text(json.dumps(history))
            return text
        results: list[tuple[str, str]] = []
        for id, arguments in calls:
            command = json.loads(arguments)["command"]
            if "--acp" in flags and not is_permitted(id, command):
                results.append((id, "the user does not permit it"))
                continue
            done = subprocess.run(
                ["sh", "-c", command], capture_output=True, text=True, check=False
            )
            results.append((id, done.stdout + done.stderr))
        history += dialect.results(results)


def send(message: JSON) -> None:
    """A message of the Agent Client Protocol."""
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def is_permitted(id: str, command: str) -> bool:
    """Tell the client of a call, and ask whether it may be made."""
    call = {"toolCallId": id, "title": command, "kind": "execute", "status": "pending"}
    update = {"sessionUpdate": "tool_call", **call}
    send({"method": "session/update", "params": {"sessionId": "s1", "update": update}})
    options = [
        {"optionId": f"id of {kind}", "name": kind, "kind": kind}
        for kind in ("allow_always", "allow_once", "reject_once")
    ]
    params = {"sessionId": "s1", "toolCall": {"toolCallId": id}, "options": options}
    send({"id": "p1", "method": "session/request_permission", "params": params})
    outcome = json.loads(sys.stdin.readline())["result"]["outcome"]
    return bool(outcome["optionId"] == "id of allow_once")


def take_prompts(dialect: Chat | Messages | Responses, flags: Sequence[str]) -> None:
    """Serve a client of the Agent Client Protocol until it has no more to say."""
    print("a line that is no message", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        method, params = request["method"], request["params"]
        if method == "initialize":
            result: JSON = {"protocolVersion": 1, "agentCapabilities": {}, "authMethods": []}
        elif method == "session/new":
            os.chdir(params["cwd"])
            result = {"sessionId": "s1"}
        else:
            send({"id": "f1", "method": "fs/read_text_file", "params": {"path": "/etc/passwd"}})
            assert json.loads(sys.stdin.readline())["error"]["code"] == -32601
            try:
                text = work(dialect, flags, params["prompt"][0]["text"])
            except urllib.error.HTTPError as error:
                said = {"code": -32603, "message": f"HTTP {error.code}"}
                send({"id": request["id"], "error": said})
                continue
            chunk = {
                "sessionUpdate": "agent_message_chunk",
                "content": {"type": "text", "text": text},
            }
            send({"method": "session/update", "params": {"sessionId": "s1", "update": chunk}})
            result = {"stopReason": "end_turn"}
        send({"id": request["id"], "result": result})


def main() -> None:
    kind, *rest = sys.argv[1:]
    dialect: Chat | Messages | Responses = {
        "chat": Chat(),
        "messages": Messages(),
        "responses": Responses(),
    }[kind]  # type: ignore[assignment]
    if "--acp" in rest:
        take_prompts(dialect, rest)
        return
    *flags, prompt = rest
    try:
        print(work(dialect, flags, prompt))
    except urllib.error.HTTPError as error:
        sys.exit(f"HTTP {error.code}: {error.read().decode()}")


if __name__ == "__main__":
    main()
