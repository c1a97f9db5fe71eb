"""The record of one finished task: all that was sent, received and decided, lossless.

Keys, in this order: `id`, `status`, `status_reason` (null or text), `error` (null or {"class",
"message"}), `prompt_id`, `sample`, `input_digest`, `attempt`, `row` (the dataset's columns; see
`records.record_types` for long ones), then
the conversation (see `Trajectory.to_record`; branches also have `fork`), `inner_tools` (only with
subagents or a preparation: what was offered in conversations inside it, by their names), `check`
(null, or the result of the row's check; see `run_check`), `scores` (only with `--reward`; see
`records.checks`), `diff` (what changed in the image's repository; see `engine.worker.diffs`; only
with `--workspace=image`), `workspace` (only with `--keep_workspaces`: the `name` of the file in
kept_workspaces/, or the `error` why it is not kept), `audit` (only of `check_tasks`; see
`audit.verdicts`), `tools` (schemas as offered), `options` (those of the conversation that are
not defaults), `view_compacted` (the model saw parts shortened or as a summary), `view_trimmed`
(only with `--token_ids`: it saw earlier replies without the newlines around their text), and the
provenance: `model` (as requested),
`api`, `endpoint`, `toolsets`, `sandbox`, `imported` (only of `import`: `format`, `file` and `line`,
`tools_called` if what was on offer is unknown, the numbers of turns with `no_loss`, and `documents`
with what ATIF says beside steps), `image` (with `--workspace=image`: its `reference` in the
row and its `digest`, that of the configuration), `seed`, `config_digest`, `versions`, `finished_at`
(epoch seconds), `schema_version`. On disk a checksum follows (see `records.files`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec

from agent.loop.rules import ConversationSpec, Finish
from agent.messages.message import ReplyEvent, is_cost_only
from agent.messages.tokens import missing_token_data, trimmed_replies
from agent.options import AgentOptions
from agent.setup import Setup, inner_schemas, list_schemas
from agent.state.trajectory import Trajectory
from batch_trajectories.basics import exact_json
from batch_trajectories.dataset.row_conversation import FORK_COLUMN
from batch_trajectories.records.failures import Failure
from batch_trajectories.records.files import add_checksum
from batch_trajectories.records.record_types import Record, decode_record, share_texts
from batch_trajectories.records.tasks import SCHEMA_VERSION, Task

if TYPE_CHECKING:
    from agent.gateway.command_agent import CommandAgent


class UsedImage(TypedDict):
    """A container image that a conversation or its check worked in."""

    reference: str
    digest: str


class Provenance(msgspec.Struct, frozen=True):
    """Keys that all records of a start share."""

    sandbox: str | None
    seed: int
    config_digest: str
    versions: dict[str, str]


def make_record(
    task: Task,
    trajectory: Trajectory,
    *,
    end: Finish,
    spec: ConversationSpec,
    setup: Setup,
    failure: Failure | None,
    check: dict[str, Any] | None = None,
    diff: dict[str, Any] | None = None,
    audit: dict[str, Any] | None = None,
    workspace: dict[str, Any] | None = None,
    attempt: int,
    provenance: Provenance,
    agent: CommandAgent | None = None,
    image: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Build the record of a task that has ended with the model and tools of `setup`.

    `agent` is the command that held the conversation, if one did.
    """
    from agent.runner import was_compacted  # readers of records hold no conversations

    conversation = trajectory.to_record()
    # The tools of an agent are in its requests.
    tools = conversation.pop("tools", None) or list_schemas(setup, spec.options)
    if agent is not None:
        conversation["agent"] = agent.record_facts() | conversation.get("agent", {})
    return {
        "id": task.id,
        "status": end.status,
        "status_reason": end.reason,
        "error": failure and {"class": failure.error_class, "message": failure.message},
        "prompt_id": task.prompt_id,
        "sample": task.sample,
        "input_digest": task.input_digest,
        "attempt": attempt,
        "row": _stored_columns(task),
        **conversation,
        **_inner_tools(conversation, setup, spec.options),
        "check": check,
        **({} if diff is None else {"diff": diff}),
        **({} if workspace is None else {"workspace": workspace}),
        **({} if audit is None else {"audit": audit}),
        "tools": tools,
        "options": spec.options.given(),
        "view_compacted": was_compacted(trajectory, spec.options),
        **({"view_trimmed": True} if _was_trimmed(setup, conversation) else {}),
        "model": setup.settings.reference,
        "api": setup.settings.api,
        "endpoint": setup.settings.base_url,
        "toolsets": setup.toolset_names(),
        "sandbox": provenance.sandbox,
        **({} if image is None else {"image": image}),
        "seed": provenance.seed,
        "config_digest": provenance.config_digest,
        "versions": provenance.versions,
        "finished_at": time.time(),
        "schema_version": SCHEMA_VERSION,
    }


def used_images(record: Mapping[str, Any]) -> list[UsedImage]:
    """The images that a record says were used: by its conversation, and by its check alone."""
    used = (record, record["check"] or {})
    return [part["image"] for part in used if part.get("image") is not None]


def _inner_tools(
    conversation: Mapping[str, Any], setup: Setup, options: AgentOptions
) -> dict[str, Any]:
    """`inner_tools`, where the conversation has others inside it that were offered tools."""
    names = {inner["name"] for inner in _walk_inner(conversation)}
    if not names:
        return {}
    found = {name: inner_schemas(setup, options, name) for name in sorted(names)}
    offered = {name: tools for name, tools in found.items() if tools is not None}
    return {"inner_tools": offered} if offered else {}


def _walk_inner(conversation: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The conversations inside one, at any depth."""
    for inner in conversation["inner"]:
        yield inner
        yield from _walk_inner(inner)


def _stored_columns(task: Task) -> dict[str, Any]:
    if FORK_COLUMN not in task.columns:
        return task.columns
    from batch_trajectories.dataset.row_fork import remove_fork_events

    return remove_fork_events(task.columns)


def _was_trimmed(setup: Setup, conversation: Mapping[str, Any]) -> bool:
    """Whether the model saw replies without the newlines around their text."""
    # Without tokens the endpoint refused the option.
    if not setup.settings.token_ids or not any("tokens" in one for one in conversation["turns"]):
        return False
    replies = [m["content"] for m in conversation["messages"] if m["role"] == "assistant"]
    return trimmed_replies(replies) > 0


def describe_missing_tokens(reply: ReplyEvent) -> str | None:
    """Describe what a reply lacks that was requested with `--token_ids`; None if nothing."""
    missing = "" if is_cost_only(reply) else missing_token_data(reply)
    if not missing:
        return None
    return (
        f"--token_ids: replies of {reply['model']} come without {missing}; the run continues, and "
        "export --format rl counts such turns (docs/endpoints.md)"
    )


def describe_missing_usage(reply: ReplyEvent) -> str | None:
    """Describe that a reply to an agent's own request came without token counts; None if with."""
    if reply["usage"] is not None or reply.get("discarded"):
        return None
    return (
        f"replies of {reply['model']} to the agent come without token counts, so their cost is "
        "unknown, and a budget counts the most that they may cost. If they are streams, have the "
        'agent send `stream_options: {"include_usage": true}`'
    )


def add_scores(record: dict[str, Any], scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A record with the scores of functions, at their place among its keys."""
    items = list(record.items())
    place = next(n for n, (name, _) in enumerate(items) if name == "tools")
    return dict([*items[:place], ("scores", list(scores)), *items[place:]])


def as_stored(record: dict[str, Any]) -> Record:
    """The record as readers find it; its `line` is the line in records.jsonl."""
    return decode_record(add_checksum(exact_json.dumps(share_texts(record))))
