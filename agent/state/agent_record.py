"""The part of a record that describes the calls of an agent that runs as a command."""

from __future__ import annotations

from typing import Any

from agent.messages.message import ExchangeEvent, PartStore, ReplyEvent
from agent.messages.tokens import has_ids
from agent.state.tally import sum_cost, sum_usage
from agent.wires.agent_conversations import AgentConversation, find_conversations
from agent.wires.thread import Patches, diff_patches
from agent.wires.threads import Threads

MAIN = "main"
"""The name of the main conversation among the threads."""


def agent_record(threads: Threads, prompt: str) -> dict[str, Any]:
    """The main conversation of an agent whose task is `prompt`, and all its other conversations.

    It has the keys of `Trajectory.to_record`. Its `turns` also have `exchange`, the number of the
    call, and `request`, the context that the call was shown (see `_describe_requests`), unless
    that is in `rewritten`. Further keys: `offers` (lists of tools that calls offered, if they
    differ from the tools of their conversation), `threads` (one per conversation: key, name, calls,
    model),
    `set_aside` (calls of earlier starts that the last start did not make: number, thread, shared,
    of, added, dialect, asked, and the keys of a turn, with its message), `rewritten` (calls that
    were shown other messages than their conversation has: exchanges, thread, start, end, messages,
    until, requests), `diverged_at`, and `agent` (starts, stripped_tools, exit_code, stdout, stderr,
    duration_s, timed_out).
    """
    found = find_conversations(threads, prompt)
    main = [] if found.main is None else [found.main]
    record: dict[str, Any] = {}
    offers: list[list[dict[str, Any]]] = []
    for conversation in main:
        record |= _conversation_record(conversation, threads, offers)
    record["inner"] = [
        {
            "key": conversation.key,
            "name": conversation.name,
            **_conversation_record(conversation, threads, offers),
        }
        for conversation in found.others
    ]
    record["threads"] = [
        {
            "key": conversation.key,
            "name": conversation.name or MAIN,
            "calls": len(conversation.new_calls),
            "model": threads.exchanges[conversation.call_numbers[-1]]["asked"],
        }
        for conversation in (*main, *found.others)
    ]
    record["set_aside"] = [
        {**_set_aside_call(event), "added": threads.parts.restore(event["added"])}
        for event in found.set_aside
    ]
    record["rewritten"] = [
        {
            "exchanges": changed.calls,
            "thread": changed.conversation.key,
            "start": changed.start,
            "end": changed.end,
            "messages": changed.messages,
            "until": changed.until,
            "requests": [
                {"exchange": number, **request}
                for number, request in _describe_requests(
                    changed.as_requested, threads, offers, tools=changed.conversation.tools
                ).items()
            ],
        }
        for changed in found.rewritten
    ]
    if offers:
        record["offers"] = offers
    record["diverged_at"] = threads.diverged_at
    record["agent"] = _agent_facts(threads)
    parts = PartStore()
    for part in (*([record] if main else ()), *record["inner"], *record["rewritten"]):
        part["messages"] = parts.deduplicate(part["messages"])
    for call in record["set_aside"]:
        call["added"] = parts.deduplicate(call["added"])
    return record


def _conversation_record(
    conversation: AgentConversation, threads: Threads, offers: list[list[dict[str, Any]]]
) -> dict[str, Any]:
    """A conversation in the form of a record, with the keys that each has there."""
    turns, calls = [], []
    requests = _describe_requests(conversation, threads, offers, tools=conversation.tools)
    last_with_ids = None
    for turn, (position, number) in enumerate(conversation.replies, 1):
        reply = threads.exchanges[number]["reply"]
        view = {key: value for key, value in reply.items() if key not in ("kind", "message")}
        if "tokens" in view:
            view["tokens"] = threads.turn_tokens(number, last_with_ids)
            last_with_ids = number if has_ids(view) else last_with_ids
        inherited = {} if number in conversation.new_calls else {"inherited": True}
        request = {"request": requests[number]} if number in requests else {}
        turns.append({**view, "turn": turn, "exchange": number, **inherited, **request})
        calls += _tool_results(conversation, threads, turn, position)
    paid = [threads.exchanges[number]["reply"] for number in sorted(conversation.new_calls)]
    return {
        "messages": conversation.messages,
        "turns": turns,
        "tool_calls": calls,
        "notes": [],
        "discarded": [],
        "inner": [],
        "resumes": [],
        "api_calls": len(paid),
        "usage": sum_usage(paid),
        "cost_usd": sum_cost(paid),
        "model_returned": turns[-1]["model"],
        "tools": conversation.tools,
    }


def _describe_requests(
    conversation: AgentConversation,
    threads: Threads,
    offers: list[list[dict[str, Any]]],
    *,
    tools: list[dict[str, Any]],
) -> dict[int, dict[str, Any]]:
    """The context that each call of a conversation was shown, by the number of the call.

    Calls that were shown other messages than the conversation has are left out. `at`: the call was
    shown the messages before this position. `shown`: messages that were shown otherwise than they
    are recorded, as far as that differs from the previous call (`at`, and keys of a message; see
    `agent.wires.thread`). `tools`: the index in `offers` of the tools on offer, if they are not
    `tools`; lists that `offers` lacks are added to it.
    """
    requests = {}
    earlier_patches: Patches = {}
    for position, number in conversation.replies:
        thread, end = threads.thread_and_end(number)
        if end != position + 1 or (
            thread is not conversation.thread
            and thread.messages[:end] != conversation.messages[:end]
        ):
            continue
        request: dict[str, Any] = {"at": position}
        patches = threads.request_patches(number)
        if change := diff_patches(earlier_patches, patches):
            request["shown"] = [{"at": at, **patch} for at, patch in change.items()]
        earlier_patches = patches
        if (offered := threads.offered_tools(number)) != tools:
            if offered not in offers:
                offers.append(offered)
            request["tools"] = offers.index(offered)
        requests[number] = request
    return requests


def _tool_results(
    conversation: AgentConversation, threads: Threads, turn: int, position: int
) -> list[dict[str, Any]]:
    """The results of the calls of a turn, in call order, in the form of `Trajectory.to_record`.

    The duration is the time from the reply to the next request, since the agent ran the tools. It
    is None if the next request came from another start.
    """
    calls = conversation.messages[position].get("tool_calls", ())
    numbers = {call["id"]: n for n, call in enumerate(calls)}
    results = []
    for message in conversation.messages[position + 1 :]:
        if message["role"] == "assistant":
            break
        if message["role"] == "tool" and message["tool_call_id"] in numbers:
            results.append((numbers.pop(message["tool_call_id"]), message))
    number = conversation.replies[turn - 1].number
    started_at = _ended_at(threads.exchanges[number]["reply"])
    duration_s = None
    if turn < len(conversation.replies):
        next_number = conversation.replies[turn].number
        if threads.agent_start(next_number) == threads.agent_start(number):
            next_reply = threads.exchanges[next_number]["reply"]
            duration_s = max(0.0, round(next_reply["started_at"] - started_at, 6))
    return [
        {
            "turn": turn,
            "call": n,
            "name": message["name"],
            "is_error": message["is_error"],
            "started_at": started_at,
            "duration_s": duration_s,
        }
        for n, message in sorted(results, key=lambda result: result[0])
    ]


def _ended_at(reply: ReplyEvent) -> float:
    return reply["started_at"] + reply["duration_s"]


def _set_aside_call(event: ExchangeEvent) -> dict[str, Any]:
    hidden = ("kind", "reply", "body", "echoes", "ids")
    reply = {key: value for key, value in event["reply"].items() if key != "kind"}
    return {key: value for key, value in event.items() if key not in hidden} | reply


def _agent_facts(threads: Threads) -> dict[str, Any]:
    """Facts about the agent, from its calls and its exit."""
    stripped = {name for event in threads.exchanges for name in event.get("stripped", ())}
    exit_facts = {} if threads.exit is None else dict(threads.exit)
    exit_facts.pop("kind", None)
    return {"starts": threads.starts, "stripped_tools": sorted(stripped), **exit_facts}
