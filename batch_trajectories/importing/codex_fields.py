"""The known types and fields of items in Codex's session files.

An item of an unlisted type, or with an unlisted field that holds text, is refused, because the
model may have read or written it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batch_trajectories.importing.call_forms import json_text
from batch_trajectories.importing.conversation import (
    PartKinds,
    Unreadable,
    check_parts,
    refuse_unknown,
)

_ITEMS: Mapping[str, frozenset[str]] = {
    "message": frozenset({"role", "content", "phase"}),
    "agent_message": frozenset({"content"}),
    "reasoning": frozenset({"summary", "content", "encrypted_content"}),
    "local_shell_call": frozenset({"call_id", "action"}),
    "function_call": frozenset(
        {"call_id", "name", "namespace", "arguments", "encrypted_function_args"}
    ),
    "function_call_output": frozenset({"call_id", "output"}),
    "custom_tool_call": frozenset({"call_id", "name", "namespace", "input"}),
    "custom_tool_call_output": frozenset({"call_id", "output"}),
    "tool_search_call": frozenset({"call_id", "execution", "arguments"}),
    "tool_search_output": frozenset({"call_id", "tools"}),
    "image_generation_call": frozenset({"revised_prompt", "result"}),
    "compaction": frozenset({"encrypted_content"}),
    "compaction_summary": frozenset({"encrypted_content"}),
    "context_compaction": frozenset({"encrypted_content"}),
}
"""Types of items, and the fields that a record keeps, beside `type`, `id` and `status`."""
_NOTES = frozenset(
    {
        "metadata",
        "internal_chat_message_metadata_passthrough",
        "end_turn",
        "author",
        "recipient",
        "execution",
        "success",
        "name",
        "timestamp",
    }
)
"""Fields of items that only Codex uses, or whose text the item repeats."""
_NO_ITEMS = frozenset({"ghost_snapshot", "compaction_trigger", "configuration_update"})
"""Types of items that are in no request: snapshots of files, and settings."""

_TEXT = frozenset({"text", "annotations", "logprobs"})
_SAID: PartKinds = {
    **dict.fromkeys(("text", "input_text", "output_text"), _TEXT),
    **dict.fromkeys(("input_image", "input_audio", "input_file", "encrypted_content")),
}
_WRITTEN: PartKinds = {
    **dict.fromkeys(("text", "input_text", "output_text"), _TEXT),
    "refusal": frozenset({"refusal"}),
}
_THOUGHTS: PartKinds = dict.fromkeys(("summary_text", "reasoning_text", "text"), _TEXT)

ASIDE = frozenset({"world_state", "inter_agent_communication_metadata", "security_risk_score"})
"""Types of lines without any part of the conversation. Changes by a `world_state` are in items."""

_BEGUN_AND_ENDED = (
    "mcp_tool_call",
    "web_search",
    "image_generation",
    "exec_command",
    "patch_apply",
    "collab_agent_spawn",
    "collab_agent_interaction",
    "collab_waiting",
    "collab_close",
    "collab_resume",
)
EVENTS = frozenset(
    {
        *(f"{name}_{end}" for name in _BEGUN_AND_ENDED for end in ("begin", "end")),
        "token_count",
        "task_started",
        "task_complete",
        "turn_started",
        "turn_complete",
        "turn_aborted",
        "turn_diff",
        "plan_update",
        "plan_delta",
        "context_compacted",
        "user_message",
        "agent_message",
        "agent_message_delta",
        "agent_message_content_delta",
        "agent_reasoning",
        "agent_reasoning_delta",
        "agent_reasoning_raw_content",
        "agent_reasoning_raw_content_delta",
        "agent_reasoning_section_break",
        "reasoning_content_delta",
        "reasoning_raw_content_delta",
        "raw_response_item",
        "item_started",
        "item_completed",
        "exec_command_output_delta",
        "terminal_interaction",
        "view_image_tool_call",
        "patch_apply_updated",
        "sub_agent_activity",
        "hook_started",
        "hook_completed",
        "exec_approval_request",
        "apply_patch_approval_request",
        "request_permissions",
        "request_user_input",
        "elicitation_request",
        "dynamic_tool_call_request",
        "dynamic_tool_call_response",
        "entered_review_mode",
        "exited_review_mode",
        "error",
        "stream_error",
        "stream_info",
        "warning",
        "guardian_warning",
        "guardian_assessment",
        "background_event",
        "deprecation_notice",
        "model_reroute",
        "model_verification",
        "turn_moderation_metadata",
        "safety_buffering",
        "session_configured",
        "conversation_path",
        "thread_name_updated",
        "shutdown_complete",
        "thread_goal_updated",
        "thread_settings_applied",
        "thread_context_usage_updated",
        "thread_skills_updated",
        "mcp_startup_update",
        "mcp_startup_complete",
        "mcp_list_tools_response",
        "list_custom_prompts_response",
        "list_skills_response",
        "list_remote_skills_response",
        "remote_skill_downloaded",
        "skills_update_available",
        "get_history_entry_response",
        "undo_started",
        "undo_completed",
    }
)
"""Events for the screen. Items repeat any text of them that the model read or wrote."""
_ROLLED_BACK = "thread_rolled_back"


def check_event(payload: Mapping[str, Any], number: int) -> None:
    """Raise `Unreadable` for an event that may be part of the conversation."""
    kind = str(payload.get("type"))
    if kind == _ROLLED_BACK:
        raise Unreadable(
            "payload.type: the user took turns back (thread_rolled_back), and the session does not "
            "say which items they had; delete these items and the line to import the rest",
            number,
        )
    if kind not in EVENTS:
        try:
            refuse_unknown(payload, {"type", "turn_id"}, "payload", number, only_text=True)
        except Unreadable as error:
            place = f"payload.type: {kind!r} is an unknown event"
            raise Unreadable(f"{place}, and it has {error}", number) from None


def check_item(item: Mapping[str, Any], place: str, number: int) -> dict[str, Any] | None:
    """Check an item and return it in the form that requests have; None if no request has it.

    Raises `Unreadable` for unknown items and fields.
    """
    kind = item.get("type", "message" if "role" in item else None)
    if isinstance(kind, str) and kind in _NO_ITEMS:
        return None
    if not isinstance(kind, str) or kind not in _ITEMS or _is_run_by_provider(item):
        raise Unreadable(f"{place}.type: {_why_refused(item, kind)}", number)
    kept = _ITEMS[kind] | {"type", "id", "status"}
    refuse_unknown(item, kept | _NOTES, place, number, only_text=True)
    plain = {key: value for key, value in item.items() if key in kept and value is not None}
    match kind:
        case "message":
            kinds = _WRITTEN if item.get("role") == "assistant" else _SAID
            check_parts(item.get("content"), kinds, f"{place}.content", number)
        case "agent_message":
            check_parts(item.get("content"), _SAID, f"{place}.content", number)
            return {"type": "message", "role": "user", "content": item.get("content")}
        case "reasoning":
            for field in ("summary", "content"):
                if item.get(field) and not isinstance(item[field], list):
                    raise Unreadable(f"{place}.{field}: it must be a list of parts", number)
                check_parts(item.get(field), _THOUGHTS, f"{place}.{field}", number)
        case "local_shell_call":
            plain.setdefault("call_id", item.get("id"))  # servers of the chat API give that
        case "tool_search_output":
            plain["output"] = json_text(plain.pop("tools", []))
        case "function_call_output" | "custom_tool_call_output":
            plain["output"] = _check_output(item.get("output"), f"{place}.output", number)
    return plain


def has_failed(item: Mapping[str, Any]) -> bool:
    """Whether an item of the first versions is the result of a failed call."""
    output = item.get("output")
    return isinstance(output, dict) and output.get("success") is False


def _check_output(output: Any, place: str, number: int) -> Any:
    if isinstance(output, dict):
        refuse_unknown(output, {"content", "success"}, place, number)
        output = output.get("content")
    check_parts(output, _SAID, place, number)
    return output


def _is_run_by_provider(item: Mapping[str, Any]) -> bool:
    return item.get("type") == "tool_search_call" and item.get("call_id") is None


def _why_refused(item: Mapping[str, Any], kind: Any) -> str:
    if kind == "web_search_call" or _is_run_by_provider(item):
        return f"{kind!r} is a call that the provider ran, whose result is in no session file"
    return f"{kind!r} is unknown; known: {', '.join(sorted(_ITEMS))}"
