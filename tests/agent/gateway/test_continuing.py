"""Calls that continue a response, or a conversation, which the endpoint keeps under an id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from agent.messages.message import EARLIER_RESPONSE, part_kind, placeholder_parts
from agent.wires.reading import mark_earlier_unread
from agent.wires.wire import WireError
from agent.wires.wires import WIRES
from tests.agent.gateway.talking import JSON, Recording, ResponsesTalk, Said

PROMPT = "Count the files."


@dataclass
class ById(ResponsesTalk):
    """An agent that sends only what is new, with the id of the reply before."""

    previous: str | None = None
    conversation: Any = None
    call: str = ""

    def body(self) -> JSON:
        """See `Talk`."""
        named = {"previous_response_id": self.previous, "conversation": self.conversation}
        body = {**super().body(), **{name: id for name, id in named.items() if id}}
        if not self.system:
            del body["instructions"]
        return body

    def hear(self, reply: JSON) -> None:
        """See `Talk`."""
        self.items = []
        if self.conversation is None:
            self.previous = reply["id"]
        calls = [item for item in reply["output"] if item["type"] == "function_call"]
        self.call = calls[-1]["call_id"] if calls else ""

    def result(self, text: str) -> None:
        """See `Talk`."""
        kind = "function_call_output"
        self.items.append({"type": kind, "call_id": self.call, "output": text})


def read_messages(record: JSON) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in record["messages"]]


def lacks_messages(record: JSON) -> bool:
    """Whether a part says that messages are unknown, which exports then reject."""
    parts = [
        part
        for message in record["messages"]
        for part in placeholder_parts(
            message["role"], message.get("provider_blocks", {}).get("blocks", ())
        )
    ]
    return [part_kind(part) for part in parts] == [EARLIER_RESPONSE]


def make_one_call(recording: Recording, talk: ById) -> None:
    """A conversation of one call and its result."""
    talk.say(PROMPT)
    recording.relay(talk, Said("Looking.", "ls"))
    talk.result("a b")
    recording.relay(talk, Said("Two."))


WHOLE = [
    ("system", "You work."),
    ("user", PROMPT),
    ("assistant", "Looking."),
    ("tool", "a b"),
    ("assistant", "Two."),
]


def test_the_ids_are_followed() -> None:
    recording = Recording(PROMPT)
    make_one_call(recording, ById())
    record = recording.trajectory.to_record()
    assert read_messages(record) == WHOLE
    assert [(one["name"], one["calls"]) for one in record["threads"]] == [("main", 2)]
    assert record["messages"][3]["tool_call_id"] == record["messages"][2]["tool_calls"][0]["id"]
    assert [event["shared"] for event in recording.threads.exchanges] == [0, 3]


def ask_again(first: Recording, talk: ById) -> Recording:
    """What was `make_one_call`, after a kill: both calls are answered, and none is made."""
    again = Recording(PROMPT, first.events)
    again.restart()
    talk.say(PROMPT)
    assert again.ask(talk, Said("never"))
    talk.result("a b")
    assert again.ask(talk, Said("never"))
    return again


def test_a_kill_changes_nothing() -> None:
    """The same calls are answered from the journal, by the ids of the replies that it has."""
    first = Recording(PROMPT)
    make_one_call(first, ById())
    talk = ById()
    again = ask_again(first, talk)
    assert not talk.items
    talk.say("And the directories?")
    assert not again.ask(talk, Said("None."))
    assert read_messages(again.trajectory.to_record()) == [
        *WHOLE,
        ("user", "And the directories?"),
        ("assistant", "None."),
    ]


class ByItems(ById):
    """An agent that sends all, but names the items of replies by their ids."""

    def hear(self, reply: JSON) -> None:
        """See `Talk`."""
        before = self.items
        super().hear(reply)
        self.previous = None
        named = [{"type": "item_reference", "id": item["id"]} for item in reply["output"]]
        self.items = [*before, *named]


def test_items_that_are_only_named_are_those_of_the_replies() -> None:
    """After a kill, too: each request goes on with the thread, and has its key."""
    recording = Recording(PROMPT)
    make_one_call(recording, ByItems())
    record = recording.trajectory.to_record()
    assert read_messages(record) == WHOLE
    assert [(one["name"], one["calls"]) for one in record["threads"]] == [("main", 2)]
    ask_again(recording, ByItems())


def test_an_item_of_elsewhere_is_unknown_context() -> None:
    recording, talk = Recording(PROMPT), ByItems()
    talk.say(PROMPT)
    talk.items.insert(0, {"type": "item_reference", "id": "msg_of_elsewhere"})
    recording.relay(talk, Said("Two."))
    assert lacks_messages(recording.trajectory.to_record())


def test_a_resumed_session_continues_by_id() -> None:
    first, talk = Recording(PROMPT), ById()
    make_one_call(first, talk)
    again = Recording(PROMPT, first.events)
    talk.say("And the directories?")
    again.relay(talk, Said("None."))
    record = again.trajectory.to_record()
    assert (len(record["messages"]), len(record["threads"])) == (7, 1)


def test_instructions_are_for_one_call() -> None:
    """The API does not carry them over; other system messages belong to the conversation."""
    recording, talk = Recording(PROMPT), ById()
    talk.items.append({"role": "developer", "content": "Be brief."})
    make_one_call(recording, talk)
    talk.system = "You answer in French."
    talk.say("Encore?")
    recording.relay(talk, Said("Deux."))
    talk.system = ""
    talk.say("Sure?")
    recording.relay(talk, Said("Yes."))
    common = [("system", "Be brief."), *WHOLE[1:]]
    record = recording.trajectory.to_record()
    assert read_messages(record) == [
        *common,
        ("user", "Encore?"),
        ("assistant", "Deux."),
        ("user", "Sure?"),
        ("assistant", "Yes."),
    ]
    shown = {message["content"] for change in record["rewritten"] for message in change["messages"]}
    assert {"You work.", "You answer in French."} <= shown


def test_two_calls_that_continue_one_response_are_branches() -> None:
    recording, talk = Recording(PROMPT), ById()
    talk.say(PROMPT)
    recording.relay(talk, Said("Looking.", "ls"))
    other = ById(previous=talk.previous, call=talk.call)
    for one, result in ((talk, "a b"), (other, "c")):
        one.result(result)
        recording.relay(one, Said(f"I see {result}."))
    record = recording.trajectory.to_record()
    assert [one["name"] for one in record["threads"]] == ["main", "branch"]
    assert [part["messages"][-1]["content"] for part in (record, *record["inner"])] == [
        "I see a b.",
        "I see c.",
    ]


def test_results_find_calls_whose_ids_the_record_changed() -> None:
    """A server that gives all calls one id: the agent knows it by that."""
    recording, talk = Recording(PROMPT), ById()
    talk.say(PROMPT)
    for n in range(3):
        wire, request = recording.read(talk)
        reply = talk.reply(Said("", f"step {n}"))
        reply["output"][-1]["call_id"] = "call_0"
        recording.record(wire, request, reply)
        talk.hear(reply)
        talk.result(f"result {n}")
    recording.relay(talk, Said("Done."))
    record = recording.trajectory.to_record()
    calls = [m["tool_calls"][0]["id"] for m in record["messages"] if m.get("tool_calls")]
    results = [m["tool_call_id"] for m in record["messages"] if m["role"] == "tool"]
    assert calls == results
    assert len({*calls}) == 3


@pytest.mark.parametrize("conversation", ["conv_1", {"id": "conv_1"}])
def test_a_conversation_of_the_endpoint_is_followed_once_it_is_known(conversation: Any) -> None:
    """What it held before its first call here is unknown."""
    recording, talk = Recording(PROMPT), ById(conversation=conversation)
    replies = (Said("Looking.", "ls"), Said("Two."))
    talk.say(PROMPT)
    for said_now in replies:
        wire, request = recording.read(talk)
        reply = {**talk.reply(said_now), "conversation": {"id": "conv_1"}}
        recording.record(wire, request, reply)
        talk.hear(reply)
        talk.result("a b")
    record = recording.trajectory.to_record()
    unknown = ("system", "[earlier response conv_1: unknown]")
    assert read_messages(record) == [WHOLE[0], unknown, *WHOLE[1:]]
    assert lacks_messages(record)


def test_an_unknown_response_is_named_and_is_no_training_data() -> None:
    recording, talk = Recording(PROMPT), ById(previous="resp_other", call="call_9")
    talk.result("a b")
    recording.relay(talk, Said("Two."))
    record = recording.trajectory.to_record()
    assert read_messages(record)[1] == ("system", "[earlier response resp_other: unknown]")
    assert lacks_messages(record)


def test_a_response_that_the_endpoint_did_not_read_is_no_training_data() -> None:
    recording, talk = Recording(PROMPT), ById()
    talk.say(PROMPT)
    recording.relay(talk, Said("Looking.", "ls"))
    talk.result("a b")
    wire, request = recording.read(talk)
    reply = talk.reply(Said("Two."))
    assert wire.has_read_earlier(request, reply)
    assert wire.has_read_earlier(request, {**reply, "previous_response_id": request.follows})
    assert not wire.has_read_earlier(request, {**reply, "previous_response_id": None})
    recording.record(wire, mark_earlier_unread(request), reply)
    talk.hear(reply)
    talk.say("More?")
    recording.relay(talk, Said("No."))
    record = recording.trajectory.to_record()
    assert len(record["threads"]) == 1
    unknown = ("system", f"[earlier response {request.follows}: unknown]")
    assert read_messages(record)[:5] == [*WHOLE[:3], unknown, WHOLE[3]]
    assert lacks_messages(record)


@pytest.mark.parametrize("id", [1, ["x"], {"id": 1}])
def test_an_id_that_is_none_is_refused(id: Any) -> None:
    with pytest.raises(WireError, match="it must be an id"):
        WIRES["openai_responses"].read("/v1/responses", {"model": "m", "conversation": id})
