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
    call, and `request`, the context that the call was shown (see `_requests`), unless that is in
    `rewritten`. Further keys: `offers` (lists of tools that calls offered, if they differ from the
    tools of their conversation), `threads` (one per conversation: key, name, calls, model),
    `set_aside` (calls of earlier starts that the last start did not make: number, thread, shared,
    of, added, dialect, asked, and the keys of a turn, with its message), `rewritten` (calls that
    were shown other messages than their conversation has: exchanges, thread, start, end, messages,
    until, requests), `diverged_at`, and `agent` (starts, stripped_tools, exit_code, stdout, stderr,
    duration_s, timed_out).
    """
    lines = find_conversations(threads, prompt)
    main = [] if lines.main is None else [lines.main]
    record: dict[str, Any] = {}
    offers: list[list[dict[str, Any]]] = []
    for line in main:
        record |= _conversation(line, threads, offers)
    record["inner"] = [
        {"key": line.key, "name": line.name, **_conversation(line, threads, offers)}
        for line in lines.others
    ]
    record["threads"] = [
        {
            "key": line.key,
            "name": line.name or MAIN,
            "calls": len(line.new_calls),
            "model": threads.exchanges[line.call_numbers[-1]]["asked"],
        }
        for line in (*main, *lines.others)
    ]
    record["set_aside"] = [
        {**_set_aside(event), "added": threads.parts.restore(event["added"])}
        for event in lines.set_aside
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
                for number, request in _requests(
                    changed.as_requested, threads, offers, tools=changed.conversation.tools
                ).items()
            ],
        }
        for changed in lines.rewritten
    ]
    if offers:
        record["offers"] = offers
    record["diverged_at"] = threads.diverged_at
    record["agent"] = _facts(threads)
    parts = PartStore()
    for place in (*([record] if main else ()), *record["inner"], *record["rewritten"]):
        place["messages"] = parts.deduplicate(place["messages"])
    for call in record["set_aside"]:
        call["added"] = parts.deduplicate(call["added"])
    return record


def _conversation(
    line: AgentConversation, threads: Threads, offers: list[list[dict[str, Any]]]
) -> dict[str, Any]:
    """The conversation of a line, with the keys that every conversation in a record has."""
    turns, calls = [], []
    requests = _requests(line, threads, offers, tools=line.tools)
    last_with_ids = None
    for turn, (position, number) in enumerate(line.replies, 1):
        reply = threads.exchanges[number]["reply"]
        view = {key: value for key, value in reply.items() if key not in ("kind", "message")}
        if "tokens" in view:
            view["tokens"] = threads.turn_tokens(number, last_with_ids)
            last_with_ids = number if has_ids(view) else last_with_ids
        inherited = {} if number in line.new_calls else {"inherited": True}
        request = {"request": requests[number]} if number in requests else {}
        turns.append({**view, "turn": turn, "exchange": number, **inherited, **request})
        calls += _results(line, threads, turn, position)
    paid = [threads.exchanges[number]["reply"] for number in sorted(line.new_calls)]
    return {
        "messages": line.messages,
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
        "tools": line.tools,
    }


def _requests(
    line: AgentConversation,
    threads: Threads,
    offers: list[list[dict[str, Any]]],
    *,
    tools: list[dict[str, Any]],
) -> dict[int, dict[str, Any]]:
    """The context that each call of a line was shown, by the number of the call.

    Calls that were shown another conversation than the line are left out. `at`: the call was shown
    the messages before this position. `shown`: changes since the line's previous call among the
    messages that were shown otherwise than they are recorded (`at`, and keys of a message; see
    `agent.wires.thread`). `tools`: the index in `offers` of the tools on offer, if they are not
    `tools`; lists that `offers` lacks are added to it.
    """
    found = {}
    before: Patches = {}
    for position, number in line.replies:
        thread, end = threads.thread_and_end(number)
        if end != position + 1 or (
            thread is not line.thread and thread.messages[:end] != line.messages[:end]
        ):
            continue
        request: dict[str, Any] = {"at": position}
        shown = threads.request_patches(number)
        if change := diff_patches(before, shown):
            request["shown"] = [{"at": at, **patch} for at, patch in change.items()]
        before = shown
        if (offered := threads.offered_tools(number)) != tools:
            if offered not in offers:
                offers.append(offered)
            request["tools"] = offers.index(offered)
        found[number] = request
    return found


def _results(
    line: AgentConversation, threads: Threads, turn: int, position: int
) -> list[dict[str, Any]]:
    """The results of the calls of a turn, in call order, in the form of `Trajectory.to_record`.

    The duration is the time from the reply to the next request, since the agent ran the tools. It
    is None if the next request came from another start.
    """
    calls = line.messages[position].get("tool_calls", ())
    places = {call["id"]: n for n, call in enumerate(calls)}
    results = []
    for message in line.messages[position + 1 :]:
        if message["role"] == "assistant":
            break
        if message["role"] == "tool" and message["tool_call_id"] in places:
            results.append((places.pop(message["tool_call_id"]), message))
    _, number = line.replies[turn - 1]
    began = _ended_at(threads.exchanges[number]["reply"])
    took = None
    if turn < len(line.replies) and threads.agent_start(line.replies[turn][1]) == (
        threads.agent_start(number)
    ):
        following = threads.exchanges[line.replies[turn][1]]["reply"]
        took = max(0.0, round(following["started_at"] - began, 6))
    return [
        {
            "turn": turn,
            "call": n,
            "name": message["name"],
            "is_error": message["is_error"],
            "started_at": began,
            "duration_s": took,
        }
        for n, message in sorted(results, key=lambda place: place[0])
    ]


def _ended_at(reply: ReplyEvent) -> float:
    return reply["started_at"] + reply["duration_s"]


def _set_aside(event: ExchangeEvent) -> dict[str, Any]:
    hidden = ("kind", "reply", "body", "echoes", "ids")
    reply = {key: value for key, value in event["reply"].items() if key != "kind"}
    return {key: value for key, value in event.items() if key not in hidden} | reply


def _facts(threads: Threads) -> dict[str, Any]:
    """Facts about the agent, from its calls and its exit."""
    stripped = {name for event in threads.exchanges for name in event.get("stripped", ())}
    ended = {} if threads.exit is None else dict(threads.exit)
    ended.pop("kind", None)
    return {"starts": threads.starts, "stripped_tools": sorted(stripped), **ended}
