"""The tools of one conversation: the toolbox, and the wrappers that options put around it.

A `Caller` takes a call and returns its result. Each option that is on wraps the caller in another
one; an option that is off costs nothing.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import orjson

from agent.messages.message import TOOL_TEXT_END, TOOL_TEXT_START, ToolCall
from agent.options import AgentOptions
from agent.state.final_answer import RESERVED_TOOLS, SCHEMAS, parse_final_answer
from agent.state.trajectory import Trajectory
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import machine_failure
from batch_trajectories.basics.text import clip, valid_utf8
from toolsets.function_threads import call_in_thread
from toolsets.tool import ToolResult
from toolsets.toolbox import Toolbox, cancellations

_log = logging.getLogger(__name__)

_REASON_CHARS = 2_000
"""Maximum length of the reason for which a call is denied."""

Caller = Callable[[ToolCall, str | None], Awaitable[ToolResult]]
"""Returns the result of a call; the second argument is the user's reply, if there is one."""

Decision = str | tuple[str, str]

Approve = Callable[[str, Mapping[str, Any]], Decision | Awaitable[Decision]]
"""Called with a tool's name and its arguments; returns "approve", "deny" or "always".

A pair ("deny", REASON) gives the model a reason. "always" approves this tool with these arguments
for the rest of the conversation and its subagents; after a crash the hook is called again. A sync
function runs in a thread.
"""


class CallableAgent(Protocol):
    """An agent that is called like a tool."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """The agent as a tool, in OpenAI form."""
        ...

    async def call(self, call: ToolCall) -> ToolResult:
        """Run the agent on the task of a call."""
        ...


class AgentTools:
    """Everything that the model can call in one conversation."""

    def __init__(
        self,
        toolbox: Toolbox,
        trajectory: Trajectory,
        options: AgentOptions,
        *,
        subagents: Mapping[str, CallableAgent] | None = None,
        approve: Approve | None = None,
        approved: set[bytes] | None = None,
        note_begin: Callable[[str], None] | None = None,
    ) -> None:
        """Raises `ValueError` for repeated and reserved tool names.

        `approved` collects the calls that are always approved, and may be shared. `note_begin` gets
        the id of each call that must not be repeated, just before its tool runs; see
        `Toolbox.call`.
        """
        self._toolbox = toolbox
        self._trajectory = trajectory
        self._subagents = subagents or {}
        self._note_begin = note_begin
        agents = (subagent.schema for subagent in self._subagents.values())
        own = [*toolbox.schemas, *agents]
        check_names(schema["function"]["name"] for schema in own)
        self.schemas = add_completion_tools(own, options)
        self.names = sorted(schema["function"]["name"] for schema in self.schemas)
        call: Caller = self._call_toolbox
        if self._subagents:
            call = _add_subagents(call, self._subagents)
        if options.observation_chars is not None:
            call = _add_shortening(call, options.observation_chars)
        if approve is not None:
            call = _add_approval(call, approve, set() if approved is None else approved)
        if options.completion_tools:
            call = _add_final_answer(call)
        if options.result_references:
            call = _add_references(call, trajectory)
        self._call = call

    async def call(self, call: ToolCall, user_reply: str | None = None) -> ToolResult:
        """Run a call. Every mistake of the model or a tool is a result; see `Toolbox.call`."""
        return await self._call(call, user_reply)

    def is_subagent(self, name: str) -> bool:
        """Whether `name` is the name of a subagent."""
        return name in self._subagents

    def is_idempotent(self, name: str) -> bool:
        """Whether a call may be run again after a crash; a subagent may, since it resumes."""
        return name in self._subagents or self._toolbox.is_idempotent(name)

    def need_order(self, calls: Sequence[tuple[int, ToolCall]]) -> bool:
        """Whether these calls must run one after the other."""
        return len(calls) == 1 or any(
            self._toolbox.is_sequential(call["function"]["name"]) for _, call in calls
        )

    async def _call_toolbox(self, call: ToolCall, user_reply: str | None) -> ToolResult:
        function = call["function"]
        begin = None
        if self._note_begin is not None and not self._toolbox.is_idempotent(function["name"]):
            begin = partial(self._note_begin, call["id"])
        return await self._toolbox.call(
            function["name"],
            function["arguments"],
            conversation=self._trajectory.messages,
            user_reply=user_reply,
            others=self.names,
            begin=begin,
        )


def add_completion_tools(
    schemas: Sequence[Mapping[str, Any]], options: AgentOptions
) -> list[Mapping[str, Any]]:
    """Add the completion tools to `schemas`, if they are on."""
    return [*schemas, *SCHEMAS] if options.completion_tools else list(schemas)


def check_names(names: Iterable[str]) -> None:
    """Raise `ValueError` for a reserved or repeated name."""
    seen: set[str] = set()
    for name in names:
        if name in RESERVED_TOOLS:
            raise ValueError(f"the tool name {name!r} is reserved")
        if name in seen:
            raise ValueError(f"two tools have the name {name!r}")
        seen.add(name)


def _add_final_answer(next_caller: Caller) -> Caller:
    async def call(call: ToolCall, user_reply: str | None) -> ToolResult:
        name = call["function"]["name"]
        if name not in RESERVED_TOOLS:
            return await next_caller(call, user_reply)
        finish = parse_final_answer(call["function"]["name"], call["function"]["arguments"])
        if finish is None:
            text = f"Error: invalid arguments for {name}: they need a text that is not blank"
            return ToolResult(text, is_error=True, details={"failure": "invalid_arguments"})
        return ToolResult("Answer received.", details={"text": finish.text})

    return call


def _add_references(next_caller: Caller, trajectory: Trajectory) -> Caller:
    async def call(call: ToolCall, user_reply: str | None) -> ToolResult:
        function = call["function"]
        if "$$" in function["arguments"]:
            try:
                arguments = resolve_references(function["arguments"], trajectory)
            except UnusableReference as error:
                return ToolResult(
                    f"Error: {error}", is_error=True, details={"failure": "unknown_reference"}
                )
            call = {**call, "function": {"name": function["name"], "arguments": arguments}}
        result = await next_caller(call, user_reply)
        if result.is_error or user_reply is not None or function["name"] in RESERVED_TOOLS:
            return result
        name = result_name(call, trajectory)
        stored = {STORED_AS: name, TOOL_TEXT_END: len(result.content)}
        return ToolResult(
            result.content + reference_line(name), details={**result.details, **stored}
        )

    return call


def _add_approval(next_caller: Caller, approve: Approve, approved: set[bytes]) -> Caller:
    async def call(call: ToolCall, user_reply: str | None) -> ToolResult:
        name, written = call["function"]["name"], call["function"]["arguments"]
        try:
            arguments = exact_json.loads(written) if written.strip() else {}
        except exact_json.JSONDecodeError:
            # The check of arguments, which uses the same parser, will refuse them.
            return await next_caller(call, user_reply)
        why = await _why_denied(approve, name, arguments, approved)
        if why is not None:
            reason = f": {why}" if why else ""
            text = f"Error: the call of {name} was not approved{reason}"
            return ToolResult(text, is_error=True, details={"failure": "denied"})
        return await next_caller(call, user_reply)

    return call


async def _why_denied(
    approve: Approve, name: str, arguments: Any, approved: set[bytes]
) -> str | None:
    """Ask the hook why a call is denied: its reason, or ""; None if it approves.

    A hook that fails denies the call.
    """
    try:
        key = exact_json.dumps([name, arguments], option=orjson.OPT_SORT_KEYS)
    except TypeError:
        _log.warning(
            "A call of the tool %s is denied, because its arguments are nested too deeply.", name
        )
        return ""
    if key in approved:
        return None
    before = cancellations()
    try:
        if inspect.iscoroutinefunction(approve):
            decision = await approve(name, arguments)
        else:
            decision = await call_in_thread(partial(approve, name, arguments))
            decision = await decision if inspect.isawaitable(decision) else decision
    except BaseException as error:
        if cancellations() > before or isinstance(error, GeneratorExit | KeyboardInterrupt):
            raise
        if machine_failure(error) is not None:
            raise
        _log.exception("The approval hook failed, so the call of the tool %s is denied.", name)
        return ""
    reason = ""
    if isinstance(decision, tuple) and len(decision) == 2 and isinstance(decision[1], str):
        decision, reason = decision
    if not isinstance(decision, str) or decision not in ("approve", "always"):
        return clip(valid_utf8(reason.strip()), max_chars=_REASON_CHARS)
    if decision == "always":
        approved.add(key)
    return None


def _add_shortening(next_caller: Caller, limit: int) -> Caller:
    async def call(call: ToolCall, user_reply: str | None) -> ToolResult:
        result = await next_caller(call, user_reply)
        if len(result.content) <= limit:
            return result
        details = {**result.details, "whole_content": result.content}
        return ToolResult(clip(result.content, max_chars=limit), result.is_error, details)

    return call


def _add_subagents(next_caller: Caller, subagents: Mapping[str, CallableAgent]) -> Caller:
    async def call(call: ToolCall, user_reply: str | None) -> ToolResult:
        subagent = subagents.get(call["function"]["name"])
        return await (next_caller(call, user_reply) if subagent is None else subagent.call(call))

    return call


# References: `$$TOOL-res-N` in arguments is replaced by the result of the Nth call.

STORED_AS = "stored_as"
"""Key in the details of a result: the name by which later calls can refer to it."""

_REFERENCE = re.compile(r"\$\$([A-Za-z0-9_-]+-res-[0-9]+)")

MAX_RESOLVED_CHARS = 1_000_000
"""Maximum length of all inserted results: one that is named often must not fill the memory."""


class UnusableReference(Exception):
    """A reference names no result, or the inserted results are too long."""


def result_name(call: ToolCall, t: Trajectory) -> str:
    """The name for the result of a call of the last reply; N counts all calls."""
    # Only results of earlier turns: those of a turn are added when all of them are known.
    before = sum(message["role"] == "tool" for message in t.messages)
    number = before + [other["id"] for other in t.last_calls()].index(call["id"]) + 1
    return f"{call['function']['name']}-res-{number}"


def reference_line(name: str) -> str:
    """The line that tells the model the name of a result."""
    return f"\n[stored as $${name}; in arguments, this name stands for the result above]"


def resolve_references(arguments: str, t: Trajectory) -> str:
    """Replace names of results by the results in the strings of `arguments` (JSON text).

    `$$` before any other text does not change. Arguments that are not JSON are returned unchanged;
    the check of arguments will report them. Raises `UnusableReference`.
    """
    chars_left = MAX_RESOLVED_CHARS

    def insert(match: re.Match[str]) -> str:
        nonlocal chars_left
        result = _find_named_result(match[1], t)
        chars_left -= len(result)
        if chars_left < 0:
            raise UnusableReference(f"the results are longer than {MAX_RESOLVED_CHARS} characters")
        return result

    def insert_all(value: Any) -> Any:
        match value:
            case str():
                return _REFERENCE.sub(insert, value)
            case list():
                return [insert_all(item) for item in value]
            case dict():
                return {key: insert_all(item) for key, item in value.items()}
        return value

    try:
        return exact_json.dumps(insert_all(exact_json.loads(arguments))).decode()
    except (exact_json.JSONDecodeError, TypeError, RecursionError):
        return arguments


def _find_named_result(name: str, t: Trajectory) -> str:
    for message in t.messages:
        details = message.get("details", {})
        if details.get(STORED_AS) == name:
            return message["content"][details.get(TOOL_TEXT_START, 0) : details[TOOL_TEXT_END]]
    raise UnusableReference(f"there is no result with the name $${name}")
