"""Documents of the Agent Trajectory Interchange Format (ATIF), for harbor.

There is one document per line. A step is a message of the system or a user, or a turn of the model
with its calls, their results and costs. Turns that came with the prompt are marked as copied
context, which the format keeps out of training.

Conversations of subagents and stages are documents inside their parent's document, at any depth.
The result of the call that started one refers to its document. A conversation that breaks a rule
(arguments that are not JSON, for example) is only named in `extra`: the parent's model saw nothing
but the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from agent.messages.message import SIMULATED_USER
from agent.models.usage import count_or_none
from batch_trajectories.basics.exact_json import stringify_large_integers
from batch_trajectories.export.conversation.authors import mark_context, order_messages
from batch_trajectories.export.conversation.metadata import row_metadata
from batch_trajectories.export.conversation.own_work import AuthoredWork
from batch_trajectories.export.conversation.reading import joined_system_prompt, read_entries
from batch_trajectories.export.conversation.rewards import reward_facts
from batch_trajectories.export.conversation.style import Style, apply_style
from batch_trajectories.export.conversation.tolerance import (
    COMMON_FLAWS,
    NON_TEXT_FLAWS,
    TAG_FLAWS,
    Flaw,
    Tolerance,
)
from batch_trajectories.export.conversation.turns import Conversation, Turn, UserMessage
from batch_trajectories.export.conversation.validity import Reason, Rejected
from batch_trajectories.export.rows.format import RowFormat
from batch_trajectories.records.record_types import (
    KEPT_STEP_FIELDS,
    InnerRecord,
    Record,
    StoredConversation,
    StoredTurn,
    StoredUsage,
)

SCHEMA_VERSION = "ATIF-v1.8"

_EXPORTED_KEYS = frozenset(("schema_version", "steps", "subagent_trajectories"))
"""Keys of an imported document that the export sets anew."""

_TOTALS = "The totals of tokens and cost include those of all inner conversations."


def make_row(conversation: Conversation, style: Style) -> dict[str, Any]:
    """The document of a conversation; calls of a turn are never split. Raises Rejected."""
    style.tolerance.refuse(conversation.flaws)
    record = conversation.record
    name, version = None, (record.versions or {}).get("batch-trajectories")
    if record.agent is not None:
        name, version = record.agent.name, record.agent.version
    agent = {
        "name": name or "batch-trajectories",
        "version": version or "unknown",
        "model_name": record.model_returned or record.model,
        "tool_definitions": list(conversation.tools),
    }
    extra = stringify_large_integers(
        {
            "completed": conversation.completed,
            **row_metadata(conversation),
        }
    )
    return _document(
        conversation, record, style, record.id, session=record.id, agent=agent, extra=extra
    )


def _document(
    conversation: Conversation,
    part: StoredConversation,
    style: Style,
    name: str,
    *,
    session: str,
    agent: dict[str, Any],
    extra: dict[str, Any],
) -> dict[str, Any]:
    """A document named `name`, with the documents of inner conversations in it."""
    inside, left_out = _inner_documents(
        conversation, part, style, name, session=session, agent=agent
    )
    references = _references(inside)
    replies = conversation.replies_by_turn
    steps: list[dict[str, Any]] = []
    if conversation.system and style.has_system(by_default=True):
        steps.append({"source": "system", "message": conversation.system})
    for entry in conversation.entries:
        if isinstance(entry, UserMessage):
            steps.append({"source": "user", "message": entry.text})
        else:
            steps.append(_agent_step(entry, replies.get(entry.number, []), references))
    usage = part.usage or {}
    documents = (conversation.record.imported or {}).get("documents", {})
    kept = documents.get(name.removeprefix(session), {})
    metrics = {
        "total_prompt_tokens": usage.get("input_tokens"),
        "total_completion_tokens": usage.get("output_tokens"),
        "total_cached_tokens": usage.get("cache_read_tokens"),
        "total_cost_usd": part.cost_usd,
        "total_steps": len(steps),
    }
    made: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "session_id": session,
        "trajectory_id": name,
        "agent": agent,
        "steps": [{"step_id": n, **step} for n, step in enumerate(steps, start=1)],
        **({"notes": _TOTALS} if part.inner else {}),
        "final_metrics": _drop_unknown(metrics),
        "extra": {**extra, **({"subagents_left_out": left_out} if left_out else {})},
        **({"subagent_trajectories": list(inside.values())} if inside else {}),
    }
    return _restore_imported(made, kept, conversation.record) if kept else made


def _inner_documents(
    conversation: Conversation,
    part: StoredConversation,
    style: Style,
    name: str,
    *,
    session: str,
    agent: dict[str, Any],
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """The documents of inner conversations by key, and the inner conversations without one."""
    inside: dict[str, dict[str, Any]] = {}
    left_out = []
    for inner in part.inner:
        if inner.name == SIMULATED_USER:
            continue  # what it wrote are user messages, and no agent's work to train on
        try:
            nested = _read_inner(inner, conversation.record, style.tolerance)
            inside[inner.key] = _document(
                apply_style(nested, style),
                inner,
                style,
                f"{name}/{inner.key}",
                session=session,
                agent={
                    "name": inner.name,
                    "version": agent["version"],
                    "model_name": inner.model_returned or agent["model_name"],
                },
                extra={"key": inner.key},
            )
        except Rejected as rejected:
            left_out.append({"key": inner.key, "name": inner.name, "reason": str(rejected)})
    return inside, left_out


def _references(inside: Mapping[str, Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """References to inner documents, by the key of the call that started each of them."""
    references: dict[str, list[dict[str, Any]]] = {}
    for key, document in inside.items():
        call = key.rpartition("#")[0]  # if one call started several
        reference = {"trajectory_id": document["trajectory_id"]}
        references.setdefault(call if call in inside else key, []).append(reference)
    return references


def _restore_imported(
    made: dict[str, Any], kept: Mapping[str, Any], record: Record
) -> dict[str, Any]:
    """Restore an imported document, with masks and rewards that were added since."""
    decided = {"masked", *(reward_facts(record) if record.scores else ())}
    since = {key: value for key, value in made["extra"].items() if key in decided}
    document = {**made, **kept, "schema_version": SCHEMA_VERSION}
    if since:
        document["extra"] = {**(kept.get("extra") or {}), **since}
    if "total_steps" in (kept.get("final_metrics") or {}):
        document["final_metrics"] = {**kept["final_metrics"], "total_steps": len(made["steps"])}
    return {key: value for key, value in document.items() if key in kept or key in _EXPORTED_KEYS}


def _read_inner(inner: InnerRecord, record: Record, tolerance: Tolerance) -> Conversation:
    """Read the conversation of a subagent or a stage. Raises Rejected."""
    # Its record does not list the tools on offer, so all tools that it called count as offered.
    if not inner.turns:
        raise Rejected(Reason.NO_REPLY, "the model never replied")
    inner = order_messages(inner)
    messages = inner.messages
    called = {call.function.name for message in messages for call in message.tool_calls}
    flaws: list[Flaw] = []
    offered = [{"function": {"name": name}} for name in sorted(called)]
    authored = AuthoredWork(inner)
    entries = mark_context(read_entries(messages, offered, flaws), inner, authored)
    tolerance.refuse(flaws)
    return Conversation(
        system=joined_system_prompt(messages),
        entries=entries,
        tools=(),
        completed=True,
        record=record,
        authored=authored,
        metadata={},
        num_tool_calls=0,
        has_other_authors=authored.prior_replies > 0,
    )


def _agent_step(
    turn: Turn, replies: list[StoredTurn], references: Mapping[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    step: dict[str, Any] = {"source": "agent", "message": turn.text}
    if replies:
        step["timestamp"] = datetime.fromtimestamp(replies[0].started_at, UTC).isoformat()
    if turn.reasoning:
        step["reasoning_content"] = turn.reasoning
    if turn.calls:
        step["tool_calls"] = [
            {
                "tool_call_id": call.id,
                "function_name": call.name,
                "arguments": call.value,
            }
            for call in turn.calls
        ]
    if turn.results:
        step["observation"] = {
            "results": [
                {
                    "source_call_id": result.id,
                    "content": result.content,
                    **(
                        {"subagent_trajectory_ref": references[result.id]}
                        if result.id in references
                        else {}
                    ),
                    **({"extra": {"is_error": True}} if result.is_error else {}),
                }
                for result in turn.results
            ]
        }
    if turn.is_prior:
        step["is_copied_context"] = True
    elif replies:
        if turn.author == "other_model":
            step["model_name"] = replies[-1].model
        step["llm_call_count"] = len(replies)
        if metrics := _metrics(replies):
            step["metrics"] = metrics
    kept = replies[0].extra.get("atif") if replies and replies[0].extra else None
    if kept is not None:
        step = {key: value for key, value in step.items() if key not in KEPT_STEP_FIELDS} | kept
    extra = step.get("extra") or {}
    if turn.masked and extra.get("loss") is not False:
        step["extra"] = {**extra, "loss": False, "masked": list(turn.masked)}
    return step


def _metrics(replies: list[StoredTurn]) -> dict[str, Any]:
    usages = [reply.usage or StoredUsage() for reply in replies]
    return _drop_unknown(
        {
            "prompt_tokens": _sum_or_none(count_or_none(one.input_tokens) for one in usages),
            "completion_tokens": _sum_or_none(count_or_none(one.output_tokens) for one in usages),
            "cached_tokens": _sum_or_none(count_or_none(one.cache_read_tokens) for one in usages),
            "cost_usd": _sum_or_none(reply.cost_usd for reply in replies),
        }
    )


def _sum_or_none(numbers: Any) -> Any:
    """The sum of numbers; None if any of them is unknown."""
    known = list(numbers)
    return None if None in known else sum(known)


def _drop_unknown(members: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in members.items() if value is not None}


FORMAT = RowFormat(
    name="atif",
    card="One ATIF-v1.8 document per line; not meant for `load_dataset`.",
    row_of=make_row,
    reasoning=frozenset(("field",)),
    holds=COMMON_FLAWS | TAG_FLAWS,
    # Nothing tokenizes its documents. Placeholders of parts are not what the model saw. A call that
    # a server left in a text, or that the provider ran, would be missing.
    accepts=(COMMON_FLAWS | TAG_FLAWS)
    - NON_TEXT_FLAWS
    - {Reason.LEAKED_CALL, Reason.PROVIDER_CALL},
    splits_calls=False,
    has_segments=False,
    marks_loss=True,
)
