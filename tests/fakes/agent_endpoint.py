"""A model on the loopback interface for agents that run as commands, with a log of its own.

It speaks the OpenAI chat, OpenAI Responses, Anthropic messages and Gemini dialects. A prompt that
holds [NAME steps=N] gets N replies that each run a shell command by whatever tool the request
offers for that, then a text. With run=all they do what coding agents do: read, write and edit
files, keep a list, make several calls at once, make calls that fail, start subagents, and show a
picture at the last step. With full=N the reply to step N reports a context that is nearly full, and
an agent that then asks for a summary gets one. A later message that holds [more steps=N] raises
the number of steps. A request whose instructions hold [user N] is a user's, who asks N times for
two more steps each. Ids of calls are random, as those of real models.
"""

from __future__ import annotations

import itertools
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import NamedTuple, cast

import orjson

from tests.fakes.fake_answers import DIALECTS
from tests.fakes.fake_dialects import CHAT
from tests.fakes.fake_script import JSON, Reply
from tests.fakes.fake_tokens import Template, add_tokens, refusal
from tests.fakes.served import Served

_TASK = re.compile(r"\[(\w+) steps=(\d+)(?: run=(\w+))?(?: full=(\d+))?\]")
_MORE = re.compile(r"\[more steps=(\d+)\]")
_USER = re.compile(r"\[user (\d+)\]")
_ID = re.compile(r"call_(\d+)_[0-9a-f]{16}")
_SHELLS = (
    "Bash",
    "bash",
    "exec_command",
    "shell",
    "shell_command",
    "run_shell_command",
    "terminal",
    "run_commands",
)
_STEP = re.compile(r"\bStep (\d+)\.")
_SUMMARY = re.compile(
    r"detailed summary of (?:the|this|our) conversation|CONTEXT CHECKPOINT COMPACTION"
    r"|<state_snapshot>|anchored summary|Summarize the conversation|Create a handoff summary",
    re.IGNORECASE,
)
"""In the requests of agents that ask for a summary."""
_FULL_TOKENS = {"input": 260_000, "messages": 195_000, "contents": 900_000}
"""What a nearly full context has, by the field that holds the messages of an API."""
_SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_COMMANDS = {
    None: "echo {name}-{step} >> notes.txt && cat notes.txt",
    "clock": "date +%s%N",
    "same": "echo took $(date +%s%N) ns",
    "fix": "sed -i s/-/+/ pkg/calc.py && cat pkg/calc.py",
    "log": "cd /workspace && echo {name}-{step} >> {name}.log && cat {name}.log",
}
"""What a step runs, by the name in its prompt; the clock's output is never the same."""
ALL = "all"
PICTURE = (
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAAAFklEQVR42mM4ISdHEmIY1TCqYfhqAADkYgQQ6ZuA8QAAAABJ"
    "RU5ErkJggg=="
)
"""A red square, as PNG."""
_PICTURE_FILE = {
    "file_path": "/workspace/{name}.png",
    "path": "/workspace/{name}.png",
    "command": "view",
}
_FILE = {"file_path": "/workspace/{name}.txt", "path": "/workspace/{name}.txt"}


def _edit(old: str, new: str, *, every: bool = False) -> JSON:
    """The arguments of an edit, by all the names that tools have for them."""
    return {
        **_FILE,
        "old_string": old,
        "new_string": new,
        "command": "str_replace",
        **({"replace_all": True} if every else {}),
        "edits": [{"oldText": old, "newText": new}],
    }


_TEXT = "alpha\nbeta\nbeta\n"
_EDIT = "{name}.txt\n```\nalpha of {name}\n```\n"
"""The reply to an agent that has no tools and takes edits from texts (aider)."""
_DEEDS: Sequence[Sequence[tuple[str, JSON]]] = (
    [("shell", {"command": _COMMANDS["log"]})],
    [("write", {**_FILE, "content": _TEXT, "new_string": _TEXT, "command": "create"})],
    [
        ("read", {**_FILE, "files": [_FILE], "command": "view"}),
        ("shell", {"command": _COMMANDS["log"]}),
        ("list", {"path": "/workspace"}),
    ],
    [("edit", _edit("alpha", "gamma"))],
    [("edit", _edit("beta", "delta", every=True))],
    [("edit", _edit("no such text", "none"))],
    [
        (
            "todo",
            {
                "todos": [
                    {
                        "content": "Work",
                        "title": "Work",
                        "status": "pending",
                        "priority": "high",
                        "id": "1",
                    }
                ],
                "checklist": "- [ ] Work",
                "command": "plan",
                "task_list": [{"title": "Work", "status": "todo"}],
            },
        )
    ],
    [
        ("subagent", {"prompt": "Please work on [{name}a steps=2 run=log]"}),
        ("subagent", {"prompt": "Please work on [{name}b steps=2 run=log]"}),
    ],
    [
        (
            "shell",
            {
                "command": f"cd /workspace && echo {PICTURE} | base64 -d > {{name}}.png; "
                "cat {name}.txt {name}*.log 2>/dev/null; seq 30000"
            },
        )
    ],
    [("picture", _PICTURE_FILE)],
)
"""What the steps of run=all do: the calls of each, by what their tool is for."""
STEPS = len(_DEEDS)
"""How many steps run=all has."""
_TOOLS: Mapping[str, Sequence[str]] = {
    "shell": _SHELLS,
    "write": ("Write", "write", "write_file", "editor", "file_editor"),
    "read": ("Read", "read", "read_file", "read_files", "file_editor"),
    "list": ("Glob", "glob", "list_directory", "List"),
    "picture": (
        "view_image",
        "ReadMediaFile",
        "Read",
        "read",
        "read_file",
        "vision_analyze",
        "file_editor",
    ),
    "edit": ("Edit", "edit", "replace", "patch", "editor", "file_editor"),
    "todo": (
        "TodoWrite",
        "todowrite",
        "todo_write",
        "TaskCreate",
        "todo",
        "Checklist",
        "TodoList",
        "task_tracker",
    ),
    "subagent": ("Agent", "agent", "task", "invoke_agent", "delegate_task", "spawn_agent"),
}
"""The names that agents give to tools."""
_NAMES = {
    "cmd": "command",
    "filePath": "file_path",
    "filepath": "file_path",
    "dir_path": "path",
    "dirpath": "path",
    "image_url": "path",
    "goal": "prompt",
    "task": "prompt",
    "oldString": "old_string",
    "newString": "new_string",
    "replaceAll": "replace_all",
    "allow_multiple": "replace_all",
    "old_text": "old_string",
    "new_text": "new_string",
    "old_str": "old_string",
    "new_str": "new_string",
    "file_text": "content",
    "commands": "command",
}
"""The names that agents give to arguments, and those in `_DEEDS`."""
_KINDS = {"task": "general", "invoke_agent": "generalist"}
"""What a tool for subagents calls one that has all tools; "general-purpose" for others, but none
where the tool has one by default."""
_FILLERS = {"string": "step", "boolean": False, "integer": 1, "number": 1, "array": []}


class Exchange(NamedTuple):
    """One request and its reply, as the log holds them."""

    number: int
    path: str
    key: str
    """What the client authenticated with."""
    request: JSON
    reply: JSON
    """The whole body, also where it was streamed."""


class AgentEndpoint(Served):
    """The endpoint in a thread, for the time of a `with` block."""

    def __init__(
        self,
        *,
        reasoning: str = "",
        latency_s: float = 0.0,
        event_s: float = 0.0,
        log: Path | None = None,
        cut_every: int | None = None,
        tokens: str | None = None,
    ) -> None:
        """`latency_s`, `event_s`: seconds before a reply, and before each event of a stream.

        Of `cut_every` streams, one ends after its first half, and is not logged. `tokens`: it
        gives token ids as this does; see `tests.fakes.fake_tokens`.
        """
        self.exchanges: list[Exchange] = []
        """Replies that were sent in full, in order."""
        self.sessions: list[str | None] = []
        """The header `x-session-id` of each request."""
        self.refusing: int | None = None
        """The status of an error for every request, if set."""
        self.answers = 1 << 30
        """How many requests get a reply; further ones wait until this is raised."""
        self.waiting = 0
        """Requests that wait for that."""
        self.making = 0
        """Requests whose reply is being made."""
        self.keeps = True
        """It keeps responses, so that requests can continue them; else it ignores their ids."""
        self._kept: dict[str, list[JSON]] = {}
        self._reasoning, self._latency_s, self.event_s = reasoning, latency_s, event_s
        self._log, self.tokens = log, tokens
        self._lock = threading.Condition()
        self._taken = 0
        self._cut_every, self._streams = cut_every, itertools.count(1)
        self._numbers = itertools.count()
        super().__init__(_handler_of(self))

    def __exit__(self, *error: object) -> None:
        self.answer_all()
        super().__exit__(*error)

    def answer_all(self) -> None:
        """Have all requests answered, those that wait too."""
        with self._lock:
            self.answers = 1 << 30
            self._lock.notify_all()

    def of_task(self, name: str) -> list[Exchange]:
        """The exchanges of the task of that name."""
        with self._lock:
            return [one for one in self.exchanges if f"[{name} steps=" in _json_of(one.request)]

    def whole(self, request: JSON) -> JSON:
        """A request with what it continues, as a list; raises `KeyError` if that is unknown."""
        if isinstance(text := request.get("input"), str):
            request = {**request, "input": [{"role": "user", "content": text}]}
        earlier = request.get("previous_response_id")
        if earlier is None or not self.keeps:
            return request
        return {**request, "input": [*self._kept[earlier], *request["input"]]}

    def answer(self, path: str, key: str, request: JSON) -> tuple[JSON, list[bytes] | None]:
        """The reply to a request, and its events where it asks for a stream."""
        with self._lock:
            self.waiting += 1
            self._lock.wait_for(lambda: self._taken < self.answers)
            self.waiting -= 1
            self._taken += 1
            self.making += 1
        time.sleep(self._latency_s)
        with self._lock:
            self.making -= 1
        if path.startswith("/v1beta/models/"):
            body = _gemini_body(request, path, self._reasoning)
            is_stream = "streamGenerateContent" in path
            events = [b"data: %b\n\n" % orjson.dumps(body)] if is_stream else None
        else:
            dialect = DIALECTS[path]
            body = dialect.body(_reply(request, self._reasoning))
            if dialect is CHAT:
                add_tokens(body, request, self.tokens, Template())
            if "input" in request:
                kept = request.get("previous_response_id") if self.keeps else None
                body["previous_response_id"] = kept
                self._kept[body["id"]] = [*request["input"], *body["output"]]
            events = None
            if request.get("stream"):
                # Some dialects take their body apart.
                events = dialect.events(orjson.loads(orjson.dumps(body)), request)
        return body, events

    def is_cut(self) -> bool:
        """Whether the next stream is cut."""
        return self._cut_every is not None and next(self._streams) % self._cut_every == 0

    def note(self, path: str, key: str, request: JSON, reply: JSON) -> None:
        """Log an exchange."""
        with self._lock:
            exchange = Exchange(
                number=next(self._numbers), path=path, key=key, request=request, reply=reply
            )
            self.exchanges.append(exchange)
            if self._log is not None:
                with self._log.open("ab") as file:
                    line = orjson.dumps(exchange._asdict(), option=orjson.OPT_APPEND_NEWLINE)
                    file.write(line)


def _handler_of(endpoint: AgentEndpoint) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("content-length", 0)))
            endpoint.sessions.append(self.headers.get("x-session-id"))
            path, _, _ = self.path.partition("?")
            given = self.headers.get("authorization", "").removeprefix("Bearer ")
            key = self.headers.get("x-api-key") or self.headers.get("x-goog-api-key") or given
            if endpoint.refusing is not None:
                return self._send(endpoint.refusing, {"error": {"message": "refused by the test"}})
            request = orjson.loads(raw)
            if path.endswith("count_tokens"):
                return self._send(200, {"input_tokens": len(raw) // 4})
            if why := refusal(request, endpoint.tokens):
                return self._send(400, {"error": {"message": why}})
            if path not in DIALECTS and not path.startswith("/v1beta/models/"):
                return self._send(404, {"error": {"message": f"there is no {path}"}})
            try:
                request = endpoint.whole(request)
            except KeyError as error:
                message = f"Previous response with id {error} not found."
                return self._send(400, {"error": {"message": message}})
            body, events = endpoint.answer(path, key, request)
            if events is None:
                self._send(200, body)
            else:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                is_cut = endpoint.is_cut()
                for event in events[: len(events) // 2] if is_cut else [*events, b""]:
                    time.sleep(endpoint.event_s)
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
                if is_cut:
                    self.close_connection = True
                    return None
            endpoint.note(path, key, request, body)
            return None

        def _send(self, status: int, body: JSON) -> None:
            raw = orjson.dumps(body)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            """Nothing: the log has what tests need."""

    return Handler


def _json_of(request: JSON) -> str:
    return orjson.dumps(request).decode()


def _reply(request: JSON, reasoning: str) -> Reply:
    text, calls = _due(request)
    body = _json_of(request)
    step = _steps_made(request, body) + 1
    return Reply(
        key=(secrets.token_hex(6), 1),
        model=str(request.get("model")),
        thought=reasoning,
        text=text,
        calls=[{"id": f"call_{step}_{secrets.token_hex(8)}", **call} for call in calls],
        finish="tool_calls" if calls else "stop",
        input_tokens=_tokens(request, body),
        cached_tokens=0,
        output_tokens=len(text) // 4 + 20,
    )


def _due(request: JSON) -> tuple[str, list[JSON]]:
    """The text and the calls that are due at this point of the conversation."""
    body = _json_of(request)
    task = _TASK.search(body)
    tools = dict(_tools(request))
    if user := _USER.search(body):
        written = sum(item.get("role") == "assistant" for item in _items(request))
        more = f"Please go on. [more steps={2 * written + 2}]"
        return more if written <= int(user[1]) else "###STOP###", []
    if task is not None and task[4] and _asks_for_summary(request):
        # The id of a call says how many steps were made.
        steps = max(map(int, _STEP.findall(body)), default=_steps_made(request, body))
        made = f"call_{steps}_{secrets.token_hex(8)}"
        return f"<summary>Work on [{task[1]} steps={task[2]} run={task[3]}]; {made}.</summary>", []
    if task is not None and not tools and "file listing" in body:
        return _EDIT.format(name=task[1]), []
    if task is None or not any(name in tools for name in _SHELLS):
        return "A title", []
    name, run = task[1], task[3]
    steps = max(int(task[2]), *(int(more) for more in _MORE.findall(body)), 0)
    step = _steps_made(request, body) + 1
    if step <= steps and run == ALL:
        calls = [_call(tools, kind, given, name, step) for kind, given in _DEEDS[step - 1]]
        return f"Step {step}.", calls
    if step <= steps:
        return "", [_call(tools, "shell", {"command": _COMMANDS[run]}, name, step)]
    if _SUBMIT in body:
        return "", [_call(tools, "shell", {"command": f"echo {_SUBMIT}"}, name, step)]
    said = f"Finished {name} in {steps} steps."
    if "complete_task" in tools:
        given = orjson.dumps({"result": {"response": said}}).decode()
        return "", [{"name": "complete_task", "arguments": given}]
    return said, []


def _asks_for_summary(request: JSON) -> bool:
    """Whether the last message asks for one, or the system prompt."""
    ends = [_items(request)[-1], request.get("system"), request.get("systemInstruction")]
    ends.append(_items(request)[0] if "messages" in request else None)
    return _SUMMARY.search(_json_of({"ends": ends})) is not None


def _tokens(request: JSON, body: str) -> int:
    """How many tokens of a request its reply reports."""
    task = _TASK.search(body)
    if task is None or not task[4] or _asks_for_summary(request):
        return len(body) // 4
    is_full = _steps_made(request, body) + 1 == int(task[4])
    if not is_full:
        return len(body) // 4
    return next(tokens for name, tokens in _FULL_TOKENS.items() if name in request)


def _steps_made(request: JSON, body: str) -> int:
    """How many replies of this conversation had calls, by their ids if they have some."""
    return max((int(n) for n in _ID.findall(body)), default=sum(map(_is_call, _items(request))))


def _items(request: JSON) -> list[JSON]:
    found = request.get("messages") or request.get("input") or request.get("contents") or []
    return cast(list[JSON], found)


def _is_call(item: JSON) -> bool:
    """Whether a message or item of a request is a reply that called a tool."""
    if item.get("type") == "function_call" or item.get("tool_calls"):
        return True
    blocks = item.get("content") if isinstance(item.get("content"), list) else item.get("parts")
    return any(block.get("type") == "tool_use" or "functionCall" in block for block in blocks or ())


def _tools(request: JSON) -> Iterator[tuple[str, JSON]]:
    """The tools of a request: names, and schemas of their parameters."""
    for tool in request.get("tools") or ():
        for function in tool.get("functionDeclarations") or [tool.get("function", tool)]:
            schema = (
                function.get("parameters")
                or function.get("input_schema")
                or function.get("parametersJsonSchema")
            )
            if schema:
                yield function.get("name", ""), schema


def _call(tools: Mapping[str, JSON], kind: str, given: JSON, name: str, step: int) -> JSON:
    """A call of the tool for something, or of the shell where the agent has none for it."""
    tool = next((known for known in _TOOLS[kind] if known in tools), None)
    if tool is None:
        tool = next(known for known in _SHELLS if known in tools)
        given = {"command": "echo {name} {step}"}
    known = tools[tool]["properties"]
    kind_of_agent = (
        "general-purpose" if "file_editor" in tools else _KINDS.get(tool, "general-purpose")
    )
    given = {"agent_name": kind_of_agent, **given}
    if "default" not in _json_of(known.get("subagent_type", {})).lower():
        given["subagent_type"] = kind_of_agent
    filled = orjson.dumps(given).replace(b"{name}", name.encode())
    given = orjson.loads(filled.replace(b"{step}", b"%d" % step))
    arguments = {key: given[_NAMES.get(key, key)] for key in known if _NAMES.get(key, key) in given}
    for key in ("command", "cmd"):
        if key in arguments and known[key].get("type") == "array":
            arguments[key] = ["bash", "-lc", arguments[key]]
    if "commands" in arguments:
        arguments["commands"] = [arguments["commands"]]
    if "todos" in arguments:
        parts = known["todos"]["items"]["properties"]
        arguments["todos"] = [
            {key: todo[key] for key in todo if key in parts} for todo in arguments["todos"]
        ]
    for required in tools[tool].get("required", ()):
        filler = _FILLERS[str(known[required].get("type", "string")).lower()]
        arguments.setdefault(required, known[required].get("enum", [filler])[0])
    return {"name": tool, "arguments": orjson.dumps(arguments).decode()}


def _gemini_body(request: JSON, path: str, reasoning: str) -> JSON:
    text, calls = _due(request)
    parts: list[JSON] = [{"text": reasoning, "thought": True}] if reasoning else []
    parts += [{"text": text}] if text else []
    parts += [
        {"functionCall": {"name": call["name"], "args": orjson.loads(call["arguments"])}}
        for call in calls
    ]
    tokens = _tokens(request, _json_of(request))
    return {
        "candidates": [
            {"content": {"role": "model", "parts": parts}, "finishReason": "STOP", "index": 0}
        ],
        "usageMetadata": {
            "promptTokenCount": tokens,
            "candidatesTokenCount": 20,
            "totalTokenCount": tokens + 20,
        },
        "modelVersion": path.removeprefix("/v1beta/models/").partition(":")[0],
        "responseId": secrets.token_hex(6),
    }
