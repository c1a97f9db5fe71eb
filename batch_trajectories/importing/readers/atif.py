"""Documents of Harbor's Agent Trajectory Interchange Format (ATIF), versions 1.0 to 1.8.

Its RFC 0001 and the models of the harbor package define documents. Fields that a record lacks are
kept unchanged, and are in the document again that the format `atif` exports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from agent.messages.message import Message, Usage
from agent.models.parsing import make_call
from agent.wires.agent_conversations import SUBAGENT
from agent.wires.reading import make_message
from agent.wires.wire import WireError
from batch_trajectories.importing.conversation import (
    Dialogue,
    PartKinds,
    Reader,
    SourceConversation,
    Unreadable,
    check_parts,
    facts_in_metadata,
    is_blank,
    parse_time,
    refuse_unknown,
    usage,
)
from batch_trajectories.records.record_types import KEPT_STEP_FIELDS

_Text = str | list[dict[str, Any]]
_Object = dict[str, Any]


class _Call(msgspec.Struct):
    tool_call_id: str
    function_name: str
    arguments: _Object


class _Result(msgspec.Struct):
    content: _Text | None = None
    source_call_id: str | None = None
    subagent_trajectory_ref: list[_Object] | None = None
    extra: _Object | None = None


class _Observation(msgspec.Struct):
    results: list[_Result]


class _Metrics(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: int | float | None = None


class _Step(msgspec.Struct):
    source: Literal["system", "user", "agent"]
    message: _Text
    timestamp: str | None = None
    model_name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    observation: _Observation | None = None
    metrics: _Metrics | None = None
    is_copied_context: bool | None = None
    extra: _Object | None = None


class _Agent(msgspec.Struct):
    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[_Object] | None = None


class _Totals(msgspec.Struct):
    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_cached_tokens: int | None = None
    total_cost_usd: int | float | None = None


class _Document(msgspec.Struct):
    schema_version: str
    agent: _Agent
    steps: list[_Step]
    session_id: str | None = None
    trajectory_id: str | None = None
    final_metrics: _Totals | None = None
    extra: _Object | None = None
    subagent_trajectories: list[_Object] | None = None


_OURS = "batch-trajectories"

_DOCUMENT_KEYS = frozenset({*_Document.__struct_fields__, "notes", "continued_trajectory_ref"})
_AGENT_KEYS = frozenset({*_Agent.__struct_fields__, "extra"})
_STEP_KEYS = frozenset({*_Step.__struct_fields__, "step_id", "reasoning_effort", "llm_call_count"})
_CALL_KEYS = frozenset({*_Call.__struct_fields__, "extra"})
_RESULT_KEYS = frozenset(_Result.__struct_fields__)
_REFERENCE_KEYS = frozenset({"trajectory_id", "session_id", "trajectory_path", "extra"})
_PARTS: PartKinds = {"text": frozenset({"text"}), "image": None, "audio": None}

_MAX_NESTING = 20
"""Maximum depth of subagents; deeper nesting would exceed Python's recursion limit."""


def _read(row: Mapping[str, Any]) -> SourceConversation:
    documents: dict[str, _Object] = {}
    document = _read_document(row, "")
    conversation = _conversation(row, document, "", "", documents)
    extra = document.extra or {}
    columns = extra.get("columns")
    facts = facts_in_metadata(extra)
    facts.setdefault("model", document.agent.model_name)
    is_own = document.agent.name == _OURS
    return SourceConversation(
        conversation,
        "atif",
        id=document.trajectory_id or document.session_id,
        tools=document.agent.tool_definitions,
        columns=columns if isinstance(columns, dict) else {},
        facts=facts,
        imported={"documents": documents},
        agent=None if is_own else {"name": document.agent.name, "version": document.agent.version},
    )


def _read_document(row: Mapping[str, Any], place: str) -> _Document:
    try:
        document = msgspec.convert(row, _Document)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at ")
        field = place + where.strip("`").removeprefix("$").removeprefix(".")
        raise Unreadable(f"{field or 'the document'}: {what}") from error
    if not document.steps:
        raise Unreadable(f"{place}steps: it is empty")
    refuse_unknown(row, _DOCUMENT_KEYS, place.removesuffix("."))
    refuse_unknown(row["agent"], _AGENT_KEYS, f"{place}agent")
    for n, step in enumerate(row["steps"]):
        _check_step(step, f"{place}steps[{n}]")
    return document


def _check_step(step: Mapping[str, Any], place: str) -> None:
    """Raise `Unreadable` for content of a step that a record would lose."""
    refuse_unknown(step, _STEP_KEYS, place)
    check_parts(step["message"], _PARTS, f"{place}.message")
    if step["source"] != "agent":
        for field in ("tool_calls", "reasoning_content"):
            if not is_blank(step.get(field)):
                raise Unreadable(f"{place}.{field}: the source of the step is no agent")
    for n, call in enumerate(step.get("tool_calls") or ()):
        refuse_unknown(call, _CALL_KEYS, f"{place}.tool_calls[{n}]")
    observation = step.get("observation") or {}
    refuse_unknown(observation, ("results",), f"{place}.observation")
    for n, result in enumerate(observation.get("results", ())):
        where = f"{place}.observation.results[{n}]"
        refuse_unknown(result, _RESULT_KEYS, where)
        check_parts(result.get("content"), _PARTS, f"{where}.content")
        for m, reference in enumerate(result.get("subagent_trajectory_ref") or ()):
            refuse_unknown(reference, _REFERENCE_KEYS, f"{where}.subagent_trajectory_ref[{m}]")


def _conversation(
    row: Mapping[str, Any],
    document: _Document,
    place: str,
    path: str,
    documents: dict[str, _Object],
) -> Dialogue:
    """Read the conversation of a document, and add its other fields to `documents` under `path`.

    `place` is the position of the document within that of the file.
    """
    documents[path] = {
        key: value for key, value in row.items() if key not in ("steps", "subagent_trajectories")
    }
    raw_steps: Sequence[Mapping[str, Any]] = row["steps"]
    last_given = max(
        (n for n, step in enumerate(document.steps) if step.is_copied_context), default=-1
    )
    messages: list[Message] = []
    replies: list[dict[str, Any]] = []
    quiet: list[int] = []
    references: dict[str, str] = {}
    for n, step in enumerate(document.steps):
        at = f"{place}steps[{n}]"
        if step.source == "agent":
            messages.append(_read_reply(step, at))
            if n > last_given:
                kept = {key: raw_steps[n][key] for key in KEPT_STEP_FIELDS if key in raw_steps[n]}
                replies.append(_reply_facts(step, at, document.agent.model_name, kept))
                # A step without a call of the model is the program's.
                calls = raw_steps[n].get("llm_call_count")
                if (step.extra or {}).get("loss") in (False, 0) or calls == 0:
                    quiet.append(len(replies))
        else:
            messages.append(_make_message(step.source, step.message, f"{at}.message"))
        names = {call.tool_call_id: call.function_name for call in step.tool_calls or ()}
        results = step.observation.results if step.observation else []
        owners = _match_calls(step, results)
        if any(id for id, one in zip(owners, results, strict=True) if one.source_call_id is None):
            messages += [_read_result(_Result(), id, names, at) for id in names if id not in owners]
        for number, (result, id) in enumerate(zip(results, owners, strict=True)):
            where = f"{at}.observation.results[{number}]"
            if id is not None or result.content:
                messages.append(_read_result(result, id, names, where))
            for m, reference in enumerate(result.subagent_trajectory_ref or ()):
                _check_reference(reference, document, f"{where}.subagent_trajectory_ref[{m}]")
                references[str(reference.get("trajectory_id"))] = id or ""
    conversation = Dialogue(messages, replies, no_loss=quiet, sums=_read_sums(document))
    keys: set[str] = set()
    for n, inner in enumerate(document.subagent_trajectories or ()):
        where = f"{place}subagent_trajectories[{n}]."
        if where.count("[") > _MAX_NESTING:
            raise Unreadable(
                f"subagent_trajectories: more than {_MAX_NESTING} subagents inside each other"
            )
        typed = _read_document(inner, where)
        key = (typed.extra or {}).get("key") or references.get(typed.trajectory_id or "")
        key = str(key or f"thread#{n + 1}")
        if key in keys:  # one call can start several
            key = f"{key}#{n + 1}"
        keys.add(key)
        subagent = _conversation(inner, typed, where, f"{path}/{key}", documents)
        subagent.key, subagent.name = key, typed.agent.name or SUBAGENT
        conversation.inner.append(subagent)
    return conversation


def _check_reference(reference: _Object, document: _Document, place: str) -> None:
    """Raise `Unreadable` for a subagent that is neither in the document nor in a file."""
    inside = {inner.get("trajectory_id") for inner in document.subagent_trajectories or ()}
    id = reference.get("trajectory_id")
    if id is not None and id not in inside and not reference.get("trajectory_path"):
        raise Unreadable(f"{place}.trajectory_id: no trajectory in the document is {id!r}")


def _read_sums(document: _Document) -> dict[str, Any]:
    if (totals := document.final_metrics) is None:
        return {}
    sums: dict[str, Any] = {"cost_usd": totals.total_cost_usd}
    sums["usage"] = usage(
        totals.total_prompt_tokens, totals.total_completion_tokens, totals.total_cached_tokens
    )
    return sums


def _read_reply(step: _Step, place: str) -> Message:
    message = _make_message("assistant", _join_texts(step.message), f"{place}.message")
    if step.reasoning_content:
        message["reasoning"] = step.reasoning_content
    if step.tool_calls:
        message["tool_calls"] = [
            make_call(call.tool_call_id, call.function_name, call.arguments)
            for call in step.tool_calls
        ]
    return message


def _join_texts(text: _Text) -> _Text:
    """Join the parts that a model wrote to one text if all are texts."""
    if isinstance(text, str) or any(part["type"] != "text" for part in text):
        return text
    return "".join(str(part.get("text")) for part in text)


def _make_message(role: Any, text: _Text, place: str) -> Message:
    try:
        return make_message("atif", role, text)
    except WireError as error:
        raise Unreadable(f"{place}: {error}") from error


def _match_calls(step: _Step, results: Sequence[_Result]) -> list[str | None]:
    """Find the id of the call that each result answers; None if it answers none."""
    # Terminus-2 names no calls: its terminal's output after all calls of a step is one result.
    named = {result.source_call_id for result in results}
    left = [call.tool_call_id for call in step.tool_calls or () if call.tool_call_id not in named]
    unnamed = sum(result.source_call_id is None for result in results)
    ids = iter(left[-unnamed:] if unnamed else ())
    return [result.source_call_id or next(ids, None) for result in results]


def _read_result(result: _Result, id: str | None, names: Mapping[str, str], place: str) -> Message:
    """Read a result. A result of no call becomes a message of the user."""
    content = result.content or ""
    if id is not None and result.content is None and result.subagent_trajectory_ref:
        raise Unreadable(
            f"{place}.content: it is missing, and subagent_trajectory_ref does not say what the "
            "model read"
        )
    if id is None:
        return _make_message("user", content, f"{place}.content")
    if id not in names:
        raise Unreadable(f"{place}.source_call_id: no call of its step has the id {id!r}")
    message = _make_message("tool", content, f"{place}.content")
    is_error = (result.extra or {}).get("is_error") is True
    return {**message, "tool_call_id": id, "name": names[id], "is_error": is_error}


def _reply_facts(step: _Step, place: str, model: str | None, kept: _Object) -> dict[str, Any]:
    reply: dict[str, Any] = {"model": step.model_name or model, "extra": {"atif": kept}}
    if (metrics := step.metrics) is not None:
        reply["usage"] = _usage(metrics)
        reply["cost_usd"] = metrics.cost_usd
    if step.timestamp is not None:
        reply["started_at"] = parse_time(step.timestamp, f"{place}.timestamp")
    return reply


def _usage(metrics: _Metrics) -> Usage:
    return usage(metrics.prompt_tokens, metrics.completion_tokens, metrics.cached_tokens)


def _is_document(row: Mapping[str, Any]) -> bool:
    return str(row.get("schema_version")).startswith("ATIF-v1.")


READER = Reader(_is_document, row=_read)
