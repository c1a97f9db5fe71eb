"""Gives a task to an agent by the Agent Client Protocol, and answers what the agent asks.

The protocol is JSON-RPC 2.0 on the agent's standard input and output, one message a line (version
1, agentclientprotocol.com). We are its client, as an editor would be, but offer the agent neither
files nor terminals: it uses those of its sandbox. What it reports, and what it prints beside the
protocol, becomes lines of our standard output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any

_VERSION = 1
_NO_METHOD = -32601
_DONE = "end_turn"
_ALLOWING = ("allow_once", "allow_always")
_REJECTING = ("reject_once", "reject_always")
"""Kinds of options of a permission request. "Always" comes last: it may be stored in the
workspace."""


class AcpError(Exception):
    """The agent refused a request, or ended before it answered."""


class AcpClient:
    """One connection to an agent."""

    def __init__(self, to_agent: IO[bytes], from_agent: IO[str], rejects: Iterable[str]) -> None:
        """`rejects` are the kinds of tools whose permission is refused; `*`: all."""
        self._to_agent, self._from_agent = to_agent, from_agent
        self._rejects = frozenset(rejects)
        self._calls = 0
        self._kinds: dict[str, str] = {}
        """Titles and kinds of tool calls by id: requests for permission may leave them out."""
        self._titles: dict[str, str] = {}
        self._is_in_text = False

    def prompt(self, text: str, cwd: str) -> str:
        """Give the agent a task in a new session; return why it stopped. Raises `AcpError`."""
        self._call(
            "initialize",
            {
                "protocolVersion": _VERSION,
                "clientCapabilities": {
                    "fs": {"readTextFile": False, "writeTextFile": False},
                    "terminal": False,
                },
                "clientInfo": {"name": "batch-trajectories", "version": "1"},
            },
        )
        session = self._call("session/new", {"cwd": cwd, "mcpServers": []})["sessionId"]
        task = [{"type": "text", "text": text}]
        end = self._call("session/prompt", {"sessionId": session, "prompt": task})
        self._say("")
        return str(end.get("stopReason"))

    def _call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._calls += 1
        self._send({"id": self._calls, "method": method, "params": params})
        for message in self._messages():
            if "method" in message:
                self._serve(message)
            elif message.get("id") == self._calls:
                if "error" in message:
                    raise AcpError(f"{method}: {json.dumps(message['error'])}")
                return message.get("result") or {}
        raise AcpError(f"{method}: the agent ended without an answer")

    def _messages(self) -> Iterator[dict[str, Any]]:
        for line in self._from_agent:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if isinstance(message, dict) and message.get("jsonrpc"):
                yield message
            elif line.strip():
                self._say(line.rstrip("\n"))

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._to_agent.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        except OSError as error:
            raise AcpError(f"the agent reads no more: {error}") from error

    def _serve(self, message: dict[str, Any]) -> None:
        """Answer a request of the agent, or print what it reports."""
        params = message.get("params") or {}
        if message["method"] == "session/update":
            self._note(params.get("update") or {})
        elif message["method"] == "session/request_permission":
            outcome = self._decide(params.get("toolCall") or {}, params.get("options") or ())
            self._send({"id": message.get("id"), "result": {"outcome": outcome}})
        elif "id" in message:
            text = f"this client has no {message['method']}"
            self._send({"id": message["id"], "error": {"code": _NO_METHOD, "message": text}})

    def _decide(self, call: dict[str, Any], options: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        self._name(call)
        kind = self._kinds.get(str(call.get("toolCallId")), "other")
        is_rejected = not self._rejects.isdisjoint((kind, "*"))
        known = {option.get("kind"): option.get("optionId") for option in options}
        for wanted in _REJECTING if is_rejected else _ALLOWING:
            if wanted in known:
                if is_rejected:
                    self._say(f"[rejected] {self._title(call)}")
                return {"outcome": "selected", "optionId": known[wanted]}
        self._say(f"[cancelled] {self._title(call)}: it offers none of the options that are known")
        return {"outcome": "cancelled"}

    def _note(self, update: dict[str, Any]) -> None:
        kind = update.get("sessionUpdate")
        if kind == "agent_message_chunk":
            content = update.get("content")
            text = content.get("text") if isinstance(content, dict) else None
            if isinstance(text, str) and text:
                sys.stdout.write(text)
                self._is_in_text = not text.endswith("\n")
        elif kind == "tool_call":
            self._name(update)
            self._say(f"[{update.get('kind') or 'other'}] {self._title(update)}")
        elif kind == "tool_call_update":
            self._name(update)
            if update.get("status") == "failed":
                self._say(f"[failed] {self._title(update)}")

    def _name(self, call: dict[str, Any]) -> None:
        """Store the title and kind that the agent gives a tool call."""
        id = str(call.get("toolCallId"))
        if call.get("kind"):
            self._kinds[id] = str(call["kind"])
        if call.get("title"):
            self._titles[id] = str(call["title"])

    def _title(self, call: dict[str, Any]) -> str:
        return self._titles.get(str(call.get("toolCallId")), "a call without a title")

    def _say(self, line: str) -> None:
        """Print a line; end an unfinished line of text first."""
        end = "\n" if self._is_in_text else ""
        sys.stdout.write(end + (f"{line}\n" if line else ""))
        sys.stdout.flush()
        self._is_in_text = False


def run_task(to_agent: IO[bytes], from_agent: IO[str], terms: Mapping[str, Any], cwd: str) -> bool:
    """Give an agent the task in `terms` (`prompt`, `rejects`); return whether it ended its turn.

    Prints the reason to standard error if it did not.
    """
    try:
        stopped = AcpClient(to_agent, from_agent, terms["rejects"]).prompt(terms["prompt"], cwd)
    except AcpError as error:
        stopped = str(error)
    if stopped != _DONE:
        sys.stderr.write(f"the agent stopped: {stopped}\n")
        sys.stderr.flush()
    return stopped == _DONE
