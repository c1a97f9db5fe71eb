"""Pictures and documents that agents show their models: recorded once, and never training text."""

from __future__ import annotations

import json
import random
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import pytest

from agent.messages.message import part_kind
from agent.wires.wires import WIRES
from batch_trajectories.export.conversation.validity import Reason, Rejected
from batch_trajectories.export.formats.rl import make_rows
from tests.agent.gateway.talking import TALKS, Recording, Said, Talk, api_of
from tests.helpers.builders import record_of
from tests.helpers.stored import ROW_FORMATS, to_record, tolerant_row

JSON = dict[str, Any]
PROMPT = "What is this?"
DATA = b64encode(random.Random(1).randbytes(3000)).decode()
URL = f"data:image/png;base64,{DATA}"


def part_of(api: str, *, is_image: bool = True) -> JSON:
    """A picture, or a document, as each API has it in messages and results."""
    media = "image/png" if is_image else "application/pdf"
    source = {"type": "base64", "media_type": media, "data": DATA}
    parts: dict[str, tuple[JSON, JSON]] = {
        "openai_chat": (
            {"type": "image_url", "image_url": {"url": URL}},
            {"type": "file", "file": {"file_data": DATA}},
        ),
        "anthropic_messages": (
            {"type": "image", "source": source},
            {"type": "document", "source": source},
        ),
        "openai_responses": (
            {"type": "input_image", "image_url": URL},
            {"type": "input_file", "file_data": DATA},
        ),
        "gemini": ({"inlineData": {"mimeType": media, "data": DATA}},) * 2,
    }
    return parts[api][not is_image]


def show(talk: Talk, part: JSON) -> None:
    """The user's first message, with a part beside its text."""
    talk.say(PROMPT)
    item = talk.items[-1]
    if api_of(talk) == "gemini":
        item["parts"].append(part)
    elif isinstance(item["content"], str):
        item["content"] = [{"type": "text", "text": item["content"]}, part]
    else:
        item["content"].append(part)


def return_part(talk: Talk, part: JSON) -> None:
    """The result of the last call, with a part beside its text."""
    talk.result("It is here:")
    item = talk.items[-1]
    match api_of(talk):
        case "gemini":
            item["parts"][-1]["functionResponse"]["parts"] = [part]
        case "anthropic_messages":
            item["content"][-1]["content"] = [{"type": "text", "text": "It is here:"}, part]
        case "openai_responses":
            item["output"] = [{"type": "input_text", "text": "It is here:"}, part]
        case _:
            item["content"] = [{"type": "text", "text": "It is here:"}, part]


def conversation_with_part(
    make: Callable[[], Talk], part: JSON, *, in_result: bool, changes: bool = False
) -> Any:
    """A recorded conversation in which the agent shows a part; `changes`: also its prompt."""
    recording, talk = Recording(PROMPT), make()
    if in_result:
        talk.say(PROMPT)
    else:
        show(talk, part)
    for step in range(3):
        if changes:
            talk.system = f"It is {step} o'clock."
        recording.relay(talk, Said("", f"look {step}"))
        if in_result and not step:
            return_part(talk, part)
        else:
            talk.result("ok")
    recording.relay(talk, Said("A cat."))
    return recording


def record(recording: Recording) -> JSON:
    recorded = recording.trajectory.to_record()
    recorded["agent"] = {"name": "mine", "version": "1", **recorded["agent"]}
    plain = record_of(options={}, view_compacted=False, status_reason=None, finished_at=9.0)
    made: JSON = json.loads(json.dumps({**plain, "attempt": 1, "input_digest": "d", **recorded}))
    return made


@pytest.mark.parametrize("name", ROW_FORMATS)
@pytest.mark.parametrize("in_result", [False, True], ids=["message", "result"])
@pytest.mark.parametrize("make", TALKS.values(), ids=TALKS)
def test_a_picture_is_in_the_record_and_rejects_the_row_by_name(
    make: Callable[[], Talk], in_result: bool, name: str
) -> None:
    recording = conversation_with_part(make, part_of(api_of(make())), in_result=in_result)
    made = record(recording)
    assert json.dumps(made).count(DATA) == 1
    with pytest.raises(Rejected) as caught:
        tolerant_row(made, name)
    assert caught.value.reason == Reason.HAS_IMAGES
    assert DATA not in (row_text := json.dumps(tolerant_row(made, name, "has_images")))
    assert "bytes, digest " in row_text


@pytest.mark.parametrize("make", TALKS.values(), ids=TALKS)
def test_a_document_rejects_the_row_by_another_name(make: Callable[[], Talk]) -> None:
    made = record(
        conversation_with_part(make, part_of(api_of(make()), is_image=False), in_result=False)
    )
    with pytest.raises(Rejected, match="has_files: message 2: a part of the type"):
        tolerant_row(made, "openai")
    assert "bytes, digest " in json.dumps(tolerant_row(made, "openai", "has_files"))


@pytest.mark.parametrize("make", TALKS.values(), ids=TALKS)
def test_a_picture_that_each_call_shows_again_is_stored_once(make: Callable[[], Talk]) -> None:
    """Whether the agent repeats its messages or changes them, in the journal and in the record."""
    part = part_of(api_of(make()))
    for changes in (False, True):
        recording = conversation_with_part(make, part, in_result=False, changes=changes)
        assert json.dumps(recording.events).count(DATA) == 1
        made = record(recording)
        assert json.dumps(made).count(DATA) == 1
        with pytest.raises(Rejected, match="has_images"):
            tolerant_row(made, "hermes")
        # Read back, the conversation is the same.
        again = Recording(PROMPT, recording.events)
        assert again.trajectory.to_record() == recording.trajectory.to_record()
        assert not made["rewritten"] or DATA not in json.dumps(made["rewritten"])


def test_token_ids_have_no_pictures() -> None:
    with pytest.raises(Rejected, match="has_images"):
        make_rows(
            to_record(
                record(
                    conversation_with_part(
                        TALKS["openai_chat"], part_of("openai_chat"), in_result=True
                    )
                )
            )
        )


def test_a_picture_in_a_message_that_is_added_to_another_counts() -> None:
    recording, talk = Recording(PROMPT), TALKS["anthropic_messages"]()
    talk.say(PROMPT)
    recording.relay(talk, Said("", "look"))
    talk.result("ok")
    talk.items[-1]["content"].append(part_of("anthropic_messages"))
    recording.relay(talk, Said("A cat."))
    with pytest.raises(Rejected, match="has_images: message 4"):
        tolerant_row(record(recording), "hermes")


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_a_conversation_whose_beginning_is_unknown_is_always_rejected(name: str) -> None:
    """First of all flaws: its results need not fit its calls."""
    recording, talk = Recording(PROMPT), TALKS["openai_responses"]()
    talk.items.append({"type": "function_call_output", "call_id": "call_9", "output": "a b"})
    wire, body = WIRES["openai_responses"], {**talk.body(), "previous_response_id": "resp_9"}
    recording.record(wire, wire.read("/v1/responses", body), talk.reply(Said("Two.")))
    with pytest.raises(Rejected) as caught:
        tolerant_row(record(recording), name, "has_files", "has_images")
    assert str(caught.value) == (
        "earlier_response_unknown: message 2: what precedes response resp_9 is unknown"
    )


def test_parts_are_told_apart() -> None:
    kinds = [part_kind(part_of(api)) for api in TALKS]
    assert kinds == ["image"] * len(TALKS)
    assert part_kind({"type": "input_audio"}) == part_kind({}) == "file"
    assert part_kind({"type": "computer_screenshot"}) == "image"
