"""The rules that a conversation must keep to become a training row.

Trainers silently drop rows that break these rules, or stop the whole training. Such rows are
rejected with a reason; their records stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import NamedTuple

from agent.state.final_answer import FINAL_ANSWER, parse_final_answer
from batch_trajectories.records.record_types import StoredCall, StoredMessage


class Reason(StrEnum):
    """Reasons why a record does not become a row."""

    NO_REPLY = "no_reply"
    """The model never replied, so there is nothing to train on."""
    UNFINISHED = "unfinished"
    """The record counts as completed, but does not end with an answer of the model."""
    ROLES_OUT_OF_ORDER = "roles_out_of_order"
    """The roles are not: system, then user, assistant, (results, assistant)*, user and so on.

    An assistant message may follow another without calls: the provider had paused the turn.
    """
    UNKNOWN_TOOL = "unknown_tool"
    """A tool was called that the model was not offered."""
    REPEATED_CALL_ID = "repeated_call_id"
    """Two calls of one turn have the same id, so their results are ambiguous."""
    UNANSWERED_CALL = "unanswered_call"
    """A call has no result, although the conversation continues."""
    STRAY_RESULT = "stray_result"
    """A tool result answers no call of its turn, or one that was answered before."""
    ARGUMENTS_NOT_JSON = "arguments_not_json"
    """The arguments of a call are not strict JSON, or nested too deep for its readers."""
    ARGUMENTS_NOT_OBJECT = "arguments_not_object"
    """The arguments of a call are JSON, but not an object."""
    EMPTY_VALUE = "empty_value"
    """A user message, an assistant turn or a final answer says nothing."""
    REASONING_ONLY = "reasoning_only"
    """An assistant turn holds reasoning, but neither text nor calls."""
    UNCLOSED_THINK = "unclosed_think"
    """An assistant turn opens a block of reasoning and never closes this block."""
    MARKER_IN_TEXT = "marker_in_text"
    """The model's text or reasoning holds a tag that would be read as structure."""
    MARKER_IN_ARGUMENTS = "marker_in_arguments"
    """Arguments hold the tag that closes calls, in a format that templates render."""
    MARKER_IN_RESULT = "marker_in_result"
    """A tool result holds the tag that closes results, in a format that does not escape it."""
    EARLIER_RESPONSE_UNKNOWN = "earlier_response_unknown"
    """An agent continued a response of the endpoint by its id, and what came before is unknown."""
    INTERRUPTED = "interrupted"
    """A result says that a crash interrupted its call, which the model did not cause."""
    LEAKED_CALL = "leaked_call"
    """A text of the model holds a tool call that its server did not read, and that never ran."""
    LEAK_SUSPECTED = "leak_suspected"
    """A conversation with a reward made a call that looked for the solution."""
    HAS_IMAGES = "has_images"
    """A message holds a picture, and the format only text."""
    HAS_FILES = "has_files"
    """A message holds a document, audio or another part that is not text; the format only text."""
    PROVIDER_CALL = "provider_call"
    """The provider ran a tool within a reply; rows lack the call and its result."""
    CONTROL_TOKEN = "control_token"
    """A text holds a token of chat templates."""
    NOT_TEXT = "not_text"
    """The content of a message, or a final answer, is not a string."""
    NO_REWARD = "no_reward"
    """The conversation has no reward, in a format that needs one."""
    NO_PATCH = "no_patch"
    """The record has no diff that is text, in a format that is made of diffs."""
    CUT_PATCH = "patch_truncated"
    """The diff was longer than a record holds."""
    OTHER_SAMPLE = "other_sample"
    """Another sample of the prompt is in the file, in a format with one row per prompt."""
    NO_TOKEN_IDS = "no_token_ids"
    """The record has no turn with token ids, in a format that is made of token ids."""
    NO_PAIR = "no_pair"
    """The record makes no pair with another sample of its prompt."""
    NO_LABEL = "no_label"
    """The record has no verdict of reviewers, or they differ, in a format of labels."""
    NO_REASONING = "no_reasoning"
    """The record has no turn with reasoning, in an export that requires reasoning."""
    NOT_PASSED = "not_passed"
    """The record did not pass, in an export that requires it."""
    ALL_MASKED = "all_masked"
    """The reason for conversations of which every turn is masked."""
    TOO_LONG = "too_long"
    """The row has more tokens than the recipe allows."""
    CHECK_FAILED = "check_failed"
    """The check of the record gave no result, in an export that requires a pass."""


class Rejection(NamedTuple):
    """The reason why a record, or a row of it, is left out."""

    reason: str
    """The name by which rejections are counted."""
    detail: str
    """An explanation for a reader."""


class Rejected(Exception):
    """A record cannot become a training row. `reason` is for counting, `detail` for reading."""

    def __init__(self, reason: Reason, detail: str) -> None:
        # Both as args: the exception is pickled when it crosses a process border.
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"

    def as_rejection(self) -> Rejection:
        """The reason and the detail as a value."""
        return Rejection(self.reason.value, self.detail)


_MAY_FOLLOW = {
    "": ("system", "user"),
    "system": ("system", "user"),
    "user": ("assistant",),
    "assistant": ("user", "assistant"),
    "tool": ("assistant",),
}
"""Which roles may follow which; tool results must answer open calls."""


def check_conversation(messages: Sequence[StoredMessage], tools: Collection[str]) -> list[str]:
    """Raise Rejected unless roles, calls and results fit together.

    `tools` names the tools on offer. Returns descriptions of calls of other tools. The conversation
    may end early: after a user message, or within the results of its last turn.
    """
    before = ""
    turn = 0
    open_calls: set[str] = set()
    invented: list[str] = []
    for position, message in enumerate(messages, start=1):
        role = message.role
        if role == "tool":
            if message.tool_call_id not in open_calls:
                raise Rejected(
                    Reason.STRAY_RESULT,
                    f"message {position}, after turn {turn}: result for"
                    f" {message.tool_call_id!r}, which is no open call",
                )
            open_calls.remove(message.tool_call_id)
        elif open_calls:
            raise Rejected(
                Reason.UNANSWERED_CALL, f"turn {turn}: no result for {sorted(open_calls)}"
            )
        elif role not in _MAY_FOLLOW[before]:
            after = f"after {before!r}" if before else "as the first"
            raise Rejected(Reason.ROLES_OUT_OF_ORDER, f"message {position}: role {role!r} {after}")
        if role == "assistant":
            turn += before != "assistant"  # else it continues the same turn
            open_calls = _check_calls(message.tool_calls, tools, invented, turn=turn)
        before = role
    if turn == 0:
        raise Rejected(Reason.NO_REPLY, "the conversation holds no assistant turn")
    return invented


def check_finished(messages: Sequence[StoredMessage]) -> None:
    """Raise Rejected unless the conversation ends with an answer.

    An answer is an assistant turn without calls, or one with an answered call of `final_answer`.
    """
    last = messages[-1]
    if last.role == "tool" and final_answer_call(messages) is not None:
        return
    if last.role != "assistant":
        raise Rejected(Reason.UNFINISHED, f"completed, but the last message is a {last.role}'s")
    if last.tool_calls:
        raise Rejected(Reason.UNFINISHED, "completed, but the last turn asks for tools")


def final_answer_call(messages: Sequence[StoredMessage]) -> StoredCall | None:
    """The call of `final_answer` in the last turn, once all calls of that turn have results.

    If there are several, the first that the runtime could accept. None without any.
    """
    results = {}
    for message in reversed(messages):
        if message.role != "tool":
            break
        results[message.tool_call_id] = message
    else:
        return None
    if not results:
        return None
    calls = message.tool_calls
    if results.keys() != {call.id for call in calls}:
        return None
    answers = [call for call in calls if call.function.name == FINAL_ANSWER]
    for call in answers:
        finish = parse_final_answer(FINAL_ANSWER, call.function.arguments)
        if not results[call.id].is_error and finish is not None:
            return call
    return answers[0] if answers else None


def _check_calls(
    calls: Sequence[StoredCall], tools: Collection[str], invented: list[str], *, turn: int
) -> set[str]:
    ids: set[str] = set()
    for number, call in enumerate(calls, start=1):
        name = call.function.name
        if name not in tools:
            invented.append(f"turn {turn}, call {number}: tool {name!r} was not on offer")
        if call.id in ids:
            raise Rejected(
                Reason.REPEATED_CALL_ID,
                f"turn {turn}, call {number}: id {call.id!r} belongs to an earlier call",
            )
        ids.add(call.id)
    return ids
