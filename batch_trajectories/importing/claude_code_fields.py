"""The known types and keys of lines in Claude Code's session files.

A line is part of the conversation, or its type is listed here as one that is not. An unlisted line
or key that holds text is refused, because it may be part of the conversation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from batch_trajectories.importing.conversation import (
    PartKinds,
    SourceRow,
    Unreadable,
    check_parts,
    refuse_unknown,
)

_LINE_KEYS = frozenset(
    {
        "type",
        "uuid",
        "parentUuid",
        "logicalParentUuid",
        "sessionId",
        "session_id",
        "timestamp",
        "version",
        "cwd",
        "gitBranch",
        "userType",
        "entrypoint",
        "slug",
        "sessionKind",
        "effort",
        "isSidechain",
        "isMeta",
        "isReplay",
        "agentId",
        "agentName",
        "agentColor",
        "teamName",
        "promptId",
        "promptSource",
        "permissionMode",
        "origin",
        "forkedFrom",
        "requestId",
        "attributionAgent",
        "attributionMcpServer",
        "attributionMcpTool",
        "attributionPlugin",
        "attributionSkill",
        "level",
        "source",
        "cause",
        "rendered",
    }
)
"""Keys of all lines: which program wrote them where, when and for whom."""
_USER_KEYS = frozenset(
    {
        "message",
        "toolUseResult",
        "sourceToolAssistantUUID",
        "sourceToolUseID",
        "toolUseID",
        "parentToolUseID",
        "toolDenialKind",
        "toolEndsTurn",
        "mcpMeta",
        "todos",
        "planContent",
        "thinkingMetadata",
        "imagePasteIds",
        "isCompactSummary",
        "isVisibleInTranscriptOnly",
        "summarizeMetadata",
        "interruptedMessageId",
        "interruptedByShutdown",
        "turnCompanion",
        "classifierMetaLines",
        "queuePriority",
        "queueSkipAttachments",
        "userFeedback",
    }
)
"""Keys of users' lines. Claude Code made the result in the message from `toolUseResult` and
`mcpMeta`."""
_REPLY_KEYS = frozenset(
    {
        "message",
        "isApiErrorMessage",
        "apiError",
        "apiErrorStatus",
        "error",
        "errorDetails",
        "isAbortedMidStream",
        "truncatedAfterOutput",
        "apiBlockIndex",
        "healsDistinctCarrier",
        "costUSD",
        "durationMs",
        "advisorModel",
        "isVisibleInTranscriptOnly",
    }
)
_MESSAGE_KEYS = frozenset(
    {
        "id",
        "type",
        "role",
        "content",
        "model",
        "usage",
        "stop_reason",
        "stop_sequence",
        "stop_details",
        "container",
        "context_management",
        "diagnostics",
    }
)

ASIDE = frozenset(
    {
        "summary",
        "task-summary",
        "ai-title",
        "custom-title",
        "last-prompt",
        "tag",
        "init",
        "agent-name",
        "agent-color",
        "agent-setting",
        "mode",
        "permission-mode",
        "progress",
        "file-history-snapshot",
        "file-history-delta",
        "attribution-snapshot",
        "pr-link",
        "queue-operation",
        "bridge-session",
        "frame-link",
        "worktree-state",
        "relocated",
        "artifact-autoreact-ledger",
        "artifact-comment-monitor",
        "atis-latch",
        "cost-state",
        "speculation-accept",
        "history-suppression",
    }
)
"""Types of lines for Claude Code's own screens, files and queues."""
ASIDE_OF_SYSTEM = frozenset(
    {
        "compact_boundary",
        "microcompact_boundary",
        "turn_duration",
        "stop_hook_summary",
        "api_error",
        "api_metrics",
        "informational",
        "away_summary",
        "scheduled_task_fire",
        "bridge_status",
        "permission_retry",
        "memory_saved",
        "agents_killed",
        "thinking",
        "file_snapshot",
        "model_refusal_fallback",
    }
)
"""Subtypes of lines of the type `system` that only people see."""
REMINDERS = frozenset(
    {
        # Files and selections that Claude Code shows beside a message.
        "file",
        "compact_file_reference",
        "pdf_reference",
        "already_read_file",
        "directory",
        "edited_text_file",
        "edited_image_file",
        "selected_lines_in_ide",
        "opened_file_in_ide",
        "plan_file_reference",
        "mcp_resource",
        "read_truncation_notice",
        # Instructions and memories.
        "nested_memory",
        "relevant_memories",
        "current_session_memory",
        "ultramemory",
        "instructions",
        "output_style",
        "critical_system_reminder",
        "session_context",
        "environment",
        "model",
        "date",
        "date_change",
        "prompt_snapshot",
        "companion_intro",
        # Tools, agents and skills on offer.
        "deferred_tools_delta",
        "deferred_tools_record",
        "agent_listing_delta",
        "agent_mention",
        "mcp_instructions_delta",
        "skill_listing",
        "skill_discovery",
        "dynamic_skill",
        "invoked_skills",
        "command_permissions",
        "credential_org",
        "remote_session_change",
        # States.
        "plan_mode",
        "plan_mode_reentry",
        "plan_mode_exit",
        "auto_mode",
        "auto_mode_exit",
        "todo_reminder",
        "task_reminder",
        "task_status",
        "verify_plan_reminder",
        "goal_status",
        "silent_turn_reminder",
        "compaction_reminder",
        "context_efficiency",
        "context_tip",
        "token_usage",
        "total_tokens_reminder",
        "output_token_usage",
        "budget_usd",
        "ultrathink_effort",
        "ultra_effort_enter",
        "ultra_effort_exit",
        "max_turns_reached",
        "diagnostics",
        "structured_output",
        # Hooks.
        "hook_success",
        "hook_non_blocking_error",
        "hook_blocking_error",
        "hook_cancelled",
        "hook_error_during_execution",
        "hook_additional_context",
        "hook_system_message",
        "hook_stopped_continuation",
        "hook_permission_decision",
        "async_hook_response",
    }
)
"""Types of attachments that requests have as reminders; records do not have reminders."""
QUEUED = "queued_command"
"""The type of an attachment with a message that came while the agent worked."""
LOCAL_COMMAND = "local_command"
"""The subtype of a line with one of Claude Code's own commands, or its output. In requests it is a
message of the user."""

_QUEUE, _REPLACED = "queue-operation", "content-replacement"
_RESULTS = (None, "tool-result")
"""The kinds of content that a line may replace."""
_ABSORBED = "absorbed_mid_turn"
"""The reason for which a message left the queue if the model read it while it worked."""

_QUEUED_KEYS = frozenset(
    {
        "type",
        "prompt",
        "commandMode",
        "origin",
        "source_uuid",
        "timestamp",
        "isMeta",
        "imagePasteIds",
    }
)
_TEXT = frozenset({"text", "citations", "cache_control"})
REPLY_PARTS: PartKinds = {
    "text": _TEXT,
    "thinking": frozenset({"thinking", "signature"}),
    "redacted_thinking": frozenset({"data"}),
    "tool_use": frozenset({"id", "name", "input", "caller", "cache_control"}),
}
"""Parts of replies. Parts of tools that the provider runs (`server_tool_use`, `mcp_tool_use` and
their results) are not among them, because a row would lack their effects."""
_MEDIA: PartKinds = {"text": _TEXT, "image": None, "document": None}
_REQUEST_PARTS: PartKinds = {
    **_MEDIA,
    "tool_result": frozenset({"tool_use_id", "content", "is_error", "cache_control"}),
}
_RESULT_PARTS: PartKinds = {**_MEDIA, "search_result": None, "tool_reference": None}


def _check_line(row: SourceRow) -> None:
    """Raise `Unreadable` for an unknown line, or one with an unknown field."""
    content, number = row.content, row.number
    kind, subtype = str(content.get("type")), str(content.get("subtype"))
    match kind:
        case "user" | "assistant":
            known = _LINE_KEYS | (_USER_KEYS if kind == "user" else _REPLY_KEYS)
            refuse_unknown(content, known, "", number, only_text=True)
            if isinstance(message := content.get("message"), dict):
                refuse_unknown(message, _MESSAGE_KEYS, "message", number, only_text=True)
                if message.get("role", kind) != kind:
                    raise Unreadable(
                        f"message.role: {message['role']!r} in a line of type {kind!r}", number
                    )
            _need_uuid(row)
        case "attachment":
            _check_attachment(row)
        case "system" if subtype == LOCAL_COMMAND:
            refuse_unknown(content, {*_LINE_KEYS, "subtype", "content"}, "", number, only_text=True)
            if not isinstance(content.get("content"), str):
                raise Unreadable("content: it must be text", number)
            _need_uuid(row)
        case "system" if subtype not in ASIDE_OF_SYSTEM:
            _refuse_text(row, {*_LINE_KEYS, "subtype"}, f"subtype: {subtype!r} is unknown")
        case "content-replacement":
            refuse_unknown(content, {*_LINE_KEYS, "replacements"}, "", number, only_text=True)
            _replacements_in(row)
        case _ if kind not in ASIDE and kind != "system":
            if "message" in content:
                raise Unreadable(
                    f"type: {kind!r} with a message is none of user, assistant", number
                )
            _refuse_text(row, _LINE_KEYS, f"type: {kind!r} is unknown")


def _refuse_text(row: SourceRow, known: frozenset[str] | set[str], what: str) -> None:
    """Raise `Unreadable` for a line that is unknown and holds text."""
    try:
        refuse_unknown(row.content, known, "", row.number, only_text=True)
    except Unreadable as error:
        raise Unreadable(f"{what}, and the line has {error}", row.number) from None


def _need_uuid(row: SourceRow) -> None:
    if not isinstance(row.content.get("uuid"), str):
        raise Unreadable("uuid: it is missing, so nothing says where the line belongs", row.number)


def _check_attachment(row: SourceRow) -> None:
    attachment = row.content.get("attachment")
    if not isinstance(attachment, dict):
        raise Unreadable("attachment: it must be an object", row.number)
    refuse_unknown(row.content, {*_LINE_KEYS, "attachment"}, "", row.number, only_text=True)
    kind = str(attachment.get("type"))
    if kind == QUEUED:
        refuse_unknown(attachment, _QUEUED_KEYS, "attachment", row.number, only_text=True)
        check_parts(attachment.get("prompt"), _MEDIA, "attachment.prompt", row.number)
        if not attachment.get("prompt"):
            raise Unreadable("attachment.prompt: it is missing", row.number)
        _need_uuid(row)
    elif kind not in REMINDERS:
        raise Unreadable(
            f"attachment.type: {kind!r} is unknown: neither a message nor a known reminder",
            row.number,
        )


def prepare_lines(rows: Sequence[SourceRow]) -> list[SourceRow]:
    """Return the lines in the form that requests have. Raises `Unreadable` for unknown ones.

    A message that only the queue has becomes an attachment, like other messages that came while the
    agent worked. Results that requests replaced have the replacement.
    """
    replacements: dict[str, str] = {}
    for row in rows:
        _check_line(row)
        if row.content.get("type") == _REPLACED:
            replacements |= _replacements_in(row)
    absorbed = _find_absorbed(rows)
    made = []
    for row in rows:
        content = row.content
        if row.number in absorbed:
            queued = {"type": QUEUED, "prompt": content["content"]}
            content = {"type": "attachment", "attachment": queued}
        elif replacements and content.get("type") == "user":
            content = _apply_replacements(content, replacements)
        made.append(SourceRow(row.number, content))
    return made


def _find_absorbed(rows: Sequence[SourceRow]) -> set[int]:
    """Find the lines of the queue that alone have a message that the model read.

    Raises `Unreadable` if that is not certain.
    """
    # Most versions write an attachment, too. Its text may be longer if something was pasted.
    prompts = Counter(_plain(prompt) for row in rows if (prompt := read_queued(row.content)))
    missing = []
    for row in rows:
        text = row.content.get("content")
        kind, reason = row.content.get("type"), row.content.get("reason")
        if kind != _QUEUE or reason != _ABSORBED or not isinstance(text, str) or not text:
            continue
        if prompts[text.strip()]:
            prompts[text.strip()] -= 1
        else:
            missing.append(row.number)
    if prompts.total() >= len(missing):
        return set()
    if prompts.total():
        raise Unreadable(
            "content: a message that came while the agent worked, and nothing says which of the "
            "attachments has it, if one does",
            missing[0],
        )
    return set(missing)


def _plain(prompt: Any) -> str:
    parts = prompt if isinstance(prompt, list) else [{"text": prompt}]
    return "\n".join(str(part["text"]) for part in parts if part.get("text")).strip()


def _replacements_in(row: SourceRow) -> dict[str, str]:
    """Return the texts that replace results in requests, by call id. Raises `Unreadable`."""
    found = {}
    given = row.content.get("replacements")
    for n, one in enumerate(given if isinstance(given, list) else [given]):
        match one:
            case {"toolUseId": str(id), "replacement": str(text)} if one.get("kind") in _RESULTS:
                found[id] = text
            case _:
                place = f"replacements[{n}]"
                raise Unreadable(f"{place}: it must have the id and text of a result", row.number)
        refuse_unknown(one, ("kind", "toolUseId", "replacement"), f"replacements[{n}]", row.number)
    return found


def _apply_replacements(
    line: Mapping[str, Any], replacements: Mapping[str, str]
) -> Mapping[str, Any]:
    message = line.get("message")
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return line
    parts = [
        {**part, "content": replacements[part["tool_use_id"]]}
        if isinstance(part, dict) and part.get("tool_use_id") in replacements
        else part
        for part in message["content"]
    ]
    return {**line, "message": {**message, "content": parts}}


def read_queued(line: Mapping[str, Any]) -> Any:
    """Return a message that came while the agent worked, as text or parts; None without one."""
    attachment = line.get("attachment")
    if isinstance(attachment, dict) and attachment.get("type") == QUEUED:
        return attachment.get("prompt")
    return None


def check_user_content(content: Any, number: int) -> None:
    """Raise `Unreadable` for a part of a user's message that would be lost."""
    check_parts(content, _REQUEST_PARTS, "message.content", number)
    for n, part in enumerate(content if isinstance(content, list) else ()):
        if part["type"] == "tool_result":
            place = f"message.content[{n}].content"
            check_parts(part.get("content"), _RESULT_PARTS, place, number)
