"""A stream in any order and numbering of its parts is the same reply sent whole, or malformed.

The forms are those of real servers: calls that share an index or have none, names in pieces, blocks
that share an index, text for the block of a call, items that only the parts of a stream have.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.models.dialects.dialect import get_dialect, read_reply
from agent.models.errors import ModelError
from agent.models.model import Completion, ignore_event
from tests.helpers.builders import chat_reply

JSON = dict[str, Any]
MANY = settings(max_examples=4 * settings.default.max_examples)  # type: ignore[union-attr]


class Said(NamedTuple):
    """What a reply says, however it was sent."""

    content: str
    reasoning: str
    calls: list[tuple[str, Any]]
    """Names and arguments, parsed if they are JSON."""


def assemble(api: str, parts: Sequence[JSON]) -> bytes:
    assembly = get_dialect(api).assembly(ignore_event)
    for part in parts:
        assembly.add(json.loads(json.dumps(part)))
    return assembly.finish()


def summarize(completion: Completion) -> Said:
    message = completion.message
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return Said(
        message["content"],
        message.get("reasoning", ""),
        [(call["name"], json.loads(call["arguments"])) for call in calls],
    )


def read_stream(api: str, parts: Sequence[JSON]) -> Said:
    return summarize(read_reply(api, assemble(api, parts)))


def is_malformed(api: str, parts: Sequence[JSON]) -> bool:
    with pytest.raises(ModelError) as caught:
        read_reply(api, assemble(api, parts))
    return caught.value.kind == "malformed"


def pieces_of(draw: Callable[..., Any], text: str) -> list[str]:
    """The text, cut at some places."""
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=4)))
    bounds = [0, *(cut for cut in cuts if cut < len(text)), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds) if a < b]


def draw_merged(draw: Callable[..., Any], queues: Sequence[Sequence[Any]]) -> Iterator[Any]:
    """The parts of several sources, each in its own order."""
    left = [list(queue) for queue in queues if queue]
    while left:
        n = draw(st.integers(0, len(left) - 1))
        yield left[n].pop(0)
        if not left[n]:
            del left[n]


WORDS = st.text(st.sampled_from('ab {}[]":,\\n\n\u00e4\U0001f600'), min_size=1, max_size=12)
ARGUMENTS: st.SearchStrategy[JSON] = st.one_of(
    st.just({}),
    st.dictionaries(
        st.sampled_from("abc"), st.one_of(WORDS, st.integers(), st.lists(WORDS)), max_size=3
    ),
)
NAMES = st.sampled_from(["list_files", "read", "ls", "run_command"])
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), max_size=4)


# Chat


def chat_part(delta: JSON, finish: str | None = None) -> JSON:
    return {"id": "r", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def call_part(**fields: Any) -> JSON:
    """One part of a call: `name` and `arguments` belong to its function."""
    function = {key: fields.pop(key) for key in ("name", "arguments") if key in fields}
    return {**fields, "function": function}


NUMBERINGS = ("usual", "ids", "one index", "in turn", "whole", "whole in one part")


@st.composite
def chat_streams(draw: Callable[..., Any]) -> tuple[list[JSON], Said]:
    """The parts of a stream, and what it says."""
    thought, text, calls = draw(st.just("") | WORDS), draw(st.just("") | WORDS), draw(CALLS)
    numbering = draw(st.sampled_from(NUMBERINGS))
    queues: list[list[JSON]] = []
    whole = []
    for n, (name, arguments) in enumerate(calls):
        written = json.dumps(arguments)
        if numbering.startswith("whole"):
            place = draw(st.sampled_from([{"index": 0}, {"index": n}, {}]))
            id = draw(st.sampled_from([{}, {"id": ""}, {"id": f"c{n}"}]))
            whole.append(call_part(**place, **id, name=name, arguments=written))
            continue
        marks: dict[str, JSON] = {
            "usual": {"index": n},
            "ids": {"id": f"c{n}"},
            "one index": {"index": 0, "id": f"c{n}"},
            "in turn": {"index": 0},
        }
        mark = marks[numbering]
        first: JSON = {"index": n, "id": f"c{n}"} if numbering == "usual" else dict(mark)
        names = pieces_of(draw, name) if draw(st.booleans()) else [name]
        head = [call_part(**first, name=names[0], **draw(st.sampled_from([{}, {"arguments": ""}])))]
        head += [call_part(**mark, name=piece) for piece in names[1:]]
        if arguments and draw(st.booleans()):
            head[-1]["function"]["arguments"] = "{}"  # before the real ones
        repeats = numbering != "in turn" and draw(st.booleans())
        again = {"name": name} if repeats else {}
        body = [call_part(**mark, **again, arguments=piece) for piece in pieces_of(draw, written)]
        if "id" in first and repeats:
            body = [{**first, **part} for part in body]
        queues.append([*head, *body])
    if numbering == "in turn":
        queues = [list(itertools.chain.from_iterable(queues))]
    deltas = [{"tool_calls": [part]} for part in draw_merged(draw, queues)]
    if numbering in ("ids", "one index"):  # nothing else says which call is the first
        ids = dict.fromkeys(delta["tool_calls"][0]["id"] for delta in deltas)
        calls = [calls[int(id[1:])] for id in ids]
    if numbering == "whole":
        deltas = [{"tool_calls": [part]} for part in whole]
    elif whole:
        deltas = [{"tool_calls": whole}]
    field = draw(st.sampled_from(["reasoning_content", "reasoning", "reasoning_text", "thinking"]))
    thoughts: list[JSON] = [{field: piece} for piece in pieces_of(draw, thought)]
    if draw(st.booleans()):  # mirrored, and once more in parts
        thoughts = [{**one, "reasoning_details": [detail_of(one[field])]} for one in thoughts]
    texts = [{"content": piece} for piece in pieces_of(draw, text)]
    parts = [chat_part(delta) for delta in draw_merged(draw, [thoughts, texts, deltas])]
    parts.append(chat_part({}, "tool_calls" if calls else "stop"))
    return parts, Said(text, thought.strip(), calls)


def detail_of(text: str) -> JSON:
    return {"type": "reasoning.text", "text": text, "index": 0}


@MANY
@given(chat_streams())
def test_a_chat_stream_is_the_whole_reply(stream: tuple[list[JSON], Said]) -> None:
    parts, said = stream
    got = read_stream("openai_chat", parts)
    assert got.calls == said.calls
    assert "".join(got.reasoning.split()) == "".join(said.reasoning.split())
    assert got.content == said.content


def part_of_call(index: int | None, id: str | None, name: str | None, arguments: Any) -> JSON:
    """A part of a call, without what is None."""
    fields = {"index": index, "id": id, "name": name, "arguments": arguments}
    return call_part(**{key: value for key, value in fields.items() if value is not None})


ONE, TWO, HALF = '{"a":1}', '{"a":2}', '{"a":'


@pytest.mark.parametrize(
    "chunks",
    [
        [[part_of_call(0, None, "f", ONE), part_of_call(0, None, "f", TWO)]],
        [[part_of_call(None, None, "f", ONE)], [part_of_call(None, None, "f", TWO)]],
        [[part_of_call(0, "", "f", ONE)], [part_of_call(0, "", "f", TWO)]],
        [[part_of_call(0, "x", "f", ONE)], [part_of_call(0, "x", "f", TWO)]],
        [
            [part_of_call(0, "a", None, None)],
            [part_of_call(0, None, "f", None)],
            [part_of_call(0, None, None, ONE)],
            [part_of_call(0, "b", None, None)],
            [part_of_call(0, None, "f", None)],
            [part_of_call(0, None, None, TWO)],
        ],
        [
            [part_of_call(0, "a", "f", HALF)],
            [part_of_call(0, "b", "f", HALF)],
            [part_of_call(0, "a", None, "1}")],
            [part_of_call(0, "b", None, "2}")],
        ],
    ],
    ids=["one chunk", "no index", "empty ids", "one id", "first the ids", "in turns"],
)
def test_calls_that_are_numbered_alike_are_two(chunks: list[list[JSON]]) -> None:
    parts = [chat_part({"tool_calls": chunk}) for chunk in chunks]
    got = read_stream("openai_chat", [*parts, chat_part({}, "tool_calls")])
    assert got.calls == [("f", {"a": 1}), ("f", {"a": 2})]


@pytest.mark.parametrize(
    "calls",
    [
        [
            part_of_call(0, "x", "f", "{}"),
            part_of_call(0, None, None, HALF),
            part_of_call(0, None, None, "1}"),
        ],
        [
            part_of_call(0, "x", "f", ""),
            part_of_call(0, "x", "f", ONE),
            part_of_call(0, "x", "f", ""),
        ],
        [part_of_call(0, "x", "f", ONE), part_of_call(0, "x", "f", ONE)],
        [part_of_call(0, "x", "f", HALF), part_of_call(0, "y", None, "1}")],
        [part_of_call(0, None, "f", {"a": 1})],
        [part_of_call(0, "x", "f", "null"), part_of_call(0, None, None, ONE)],
        [
            part_of_call(0, "x", "f", '{"a'),
            part_of_call(0, "x", "f", HALF),
            part_of_call(0, "x", "f", ONE),
        ],
    ],
    ids=[
        "first an empty object",
        "repeated heads",
        "sent again",
        "an id a part",
        "an object",
        "first a null",
        "all so far in each part",
    ],
)
def test_the_parts_of_one_call_stay_one(calls: list[JSON]) -> None:
    parts = [chat_part({"tool_calls": [part]}) for part in calls]
    got = read_stream("openai_chat", [*parts, chat_part({}, "tool_calls")])
    assert got.calls == [("f", {"a": 1})]


def test_arguments_that_no_name_belongs_to_are_malformed() -> None:
    parts = [chat_part({"tool_calls": [call_part(index=3, arguments='{"a": 1}')]})]
    assert is_malformed("openai_chat", [*parts, chat_part({}, "tool_calls")])


@pytest.mark.parametrize(
    "calls",
    [
        {"index": 0, "id": "x", "function": {"name": "f", "arguments": ONE}},
        ["f"],
        [{"index": 0, "id": "x", "name": "f", "arguments": ONE}],
    ],
    ids=["an object", "a text", "no function"],
)
def test_calls_of_another_form_are_malformed_in_parts_as_in_one_piece(calls: Any) -> None:
    """They are not left out beside a text."""
    said = {"content": "I look.", "tool_calls": calls}
    assert is_malformed("openai_chat", [chat_part(said), chat_part({}, "tool_calls")])
    message = {"role": "assistant", **said}
    assert is_malformed("openai_chat", [{"choices": [{"message": message, "finish_reason": "x"}]}])


def test_a_call_with_free_text_is_put_together() -> None:
    def custom(name: str | None, text: str) -> JSON:
        given = {"name": name, "input": text} if name else {"input": text}
        head = {"id": "x", "type": "custom"} if name else {}
        return chat_part({"tool_calls": [{"index": 0, **head, "custom": given}]})

    parts = [custom("patch", ""), custom(None, "a b"), custom(None, " c")]
    got = read_stream("openai_chat", [*parts, chat_part({}, "tool_calls")])
    assert got.calls == [("patch", {"input": "a b c"})]


def test_calls_and_thoughts_that_only_the_whole_message_of_a_stream_has_are_kept() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": ONE}}
    for content in ("hello", None):
        message = {"role": "assistant", "content": content, "tool_calls": [call]}
        whole = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
        got = read_stream("openai_chat", [chat_part({"content": "hello"}), whole])
        assert (got.content, got.calls) == ("hello", [("f", {"a": 1})])
    message = {"role": "assistant", "content": "hello", "reasoning_content": "why"}
    whole = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    got = read_stream("openai_chat", [chat_part({"content": "hello"}), whole])
    assert (got.content, got.reasoning) == ("hello", "why")


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        [{"type": "text", "text": "a"}, {"type": "reference", "reference_ids": [1]}, "b"],
        {"type": "text", "text": "ab"},
    ],
    ids=["texts", "a reference", "an object"],
)
def test_parts_of_a_content_are_the_same_whole_and_streamed(content: Any) -> None:
    """What is no text is kept as it came, and goes back."""
    message = {"role": "assistant", "content": content}
    body = chat_reply(message)
    whole = read_reply("openai_chat", json.dumps(body).encode()).message
    assembly = get_dialect("openai_chat").assembly(ignore_event)
    for part in (chat_part({"content": content}), chat_part({}, "stop")):
        assembly.add(part)
    parts = read_reply("openai_chat", assembly.finish()).message
    assert whole["content"] == parts["content"] == "ab"
    assert ("reference" in json.dumps(whole)) == ("reference" in json.dumps(content))
    assert ("reference" in json.dumps(parts)) == ("reference" in json.dumps(content))


def test_a_reason_that_is_null_in_words_is_no_end() -> None:
    """A pause after it is none after the reply."""
    assembly = get_dialect("openai_chat").assembly(ignore_event)
    has_reason = []
    for part in (chat_part({"content": "a"}, "null"), chat_part({}, "stop")):
        assembly.add(part)
        has_reason.append(assembly.has_reason)
    assert has_reason == [False, True]
    assert read_reply("openai_chat", assembly.finish()).unknown_ending is None


def test_a_whole_message_in_a_stream_counts_once() -> None:
    message = {"role": "assistant", "content": "hello"}
    whole = {"id": "r", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    assert read_stream("openai_chat", [whole]).content == "hello"
    parts = [chat_part({"content": "hel"}), chat_part({"content": "lo"})]
    assert read_stream("openai_chat", [*parts, whole]).content == "hello"
    assert is_malformed("openai_chat", [chat_part({"content": "bye"}), whole])


# Anthropic messages


def block_start(n: int | None, block: JSON) -> JSON:
    return {"type": "content_block_start", "index": n, "content_block": block}


def block_delta(n: int | None, delta: JSON) -> JSON:
    return {"type": "content_block_delta", "index": n, "delta": delta}


def block_stop(n: int | None) -> JSON:
    return {"type": "content_block_stop", "index": n}


HEAD = {"type": "message_start", "message": {"id": "m", "content": [], "stop_reason": None}}
EMPTY: dict[str, JSON] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


def ending_events(stop: str) -> list[JSON]:
    return [{"type": "message_delta", "delta": {"stop_reason": stop}}, {"type": "message_stop"}]


@st.composite
def message_streams(draw: Callable[..., Any]) -> tuple[list[JSON], Said]:
    """The events of a stream whose blocks are numbered in one of several ways, and what it says."""
    kinds = draw(
        st.lists(st.sampled_from(["text", "thinking", "tool_use"]), min_size=1, max_size=5)
    )
    numbering = draw(st.sampled_from(["usual", "all 0", "none", "without starts", "a start each"]))
    queues: list[list[JSON]] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[tuple[str, JSON]] = []
    for place, kind in enumerate(kinds):
        n = {"all 0": 0, "none": None}.get(numbering, place)
        if kind == "tool_use":
            name, arguments = draw(NAMES), draw(ARGUMENTS)
            calls.append((name, arguments))
            start = {"type": kind, "id": f"c{place}", "name": name, "input": {}}
            pieces = [] if not arguments else pieces_of(draw, json.dumps(arguments))
            deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]
            queues.append(
                [block_start(n, start), *(block_delta(n, d) for d in deltas), block_stop(n)]
            )
            continue
        text = draw(WORDS)
        (texts if kind == "text" else thoughts).append(text)
        pieces = pieces_of(draw, text)
        if numbering == "a start each":
            events = [block_start(n, {**EMPTY[kind], kind: piece}) for piece in pieces]
            queues.append([*events, block_stop(n)])
            continue
        events = [block_delta(n, {"type": f"{kind}_delta", kind: piece}) for piece in pieces]
        if numbering != "without starts":
            events = [block_start(n, EMPTY[kind]), *events, block_stop(n)]
        queues.append(events)
    parts = (
        draw_merged(draw, queues) if numbering == "usual" else itertools.chain.from_iterable(queues)
    )
    reasoning = "\n\n".join(filter(None, (thought.strip() for thought in thoughts)))
    said = Said("".join(texts), reasoning, calls)
    return [HEAD, *parts, *ending_events("tool_use" if calls else "end_turn")], said


@MANY
@given(message_streams())
def test_a_stream_of_blocks_is_the_whole_message(stream: tuple[list[JSON], Said]) -> None:
    parts, said = stream
    assert read_stream("anthropic_messages", parts) == said


USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}


def test_parts_for_a_block_of_another_type_are_blocks_of_their_own() -> None:
    parts = [
        HEAD,
        block_start(0, USE),
        block_delta(0, {"type": "text_delta", "text": "Now "}),
        block_delta(0, {"type": "input_json_delta", "partial_json": '{"a": 1}'}),
        block_delta(0, {"type": "text_delta", "text": "that."}),
        block_delta(0, {"type": "thinking_delta", "thinking": "Hm."}),
        block_delta(0, {"type": "signature_delta", "signature": "s"}),
        *ending_events("tool_use"),
    ]
    reply = read_reply("anthropic_messages", assemble("anthropic_messages", parts))
    assert summarize(reply) == Said("Now that.", "Hm.", [("f", {"a": 1})])
    blocks = reply.message["provider_blocks"]["blocks"]
    assert blocks[0] == {**USE, "input": {"a": 1}}, "nothing of the text is in the call"
    assert blocks[2] == {"type": "thinking", "thinking": "Hm.", "signature": "s"}


@pytest.mark.parametrize(
    "parts",
    [
        [block_delta(0, {"type": "input_json_delta", "partial_json": "{}"})],
        [
            block_start(0, EMPTY["text"]),
            block_delta(0, {"type": "input_json_delta", "partial_json": "{}"}),
        ],
        [block_delta(0, {"type": "signature_delta", "signature": "s"})],
        [block_delta(0, {"type": "new_delta", "new": "?"})],
    ],
    ids=["no block", "a text", "no thought", "an unknown kind"],
)
def test_parts_that_belong_to_no_block_are_malformed(parts: list[JSON]) -> None:
    assert is_malformed("anthropic_messages", [HEAD, *parts, *ending_events("end_turn")])


def test_a_part_of_an_unknown_kind_grows() -> None:
    parts = [
        HEAD,
        block_start(0, {"type": "compaction", "content": None}),
        block_delta(0, {"type": "compaction_delta", "compaction": "ab"}),
        block_delta(0, {"type": "compaction_delta", "compaction": "cd"}),
        *ending_events("end_turn"),
    ]
    body = json.loads(assemble("anthropic_messages", parts))
    assert body["content"] == [{"type": "compaction", "content": None, "compaction": "abcd"}]


# Responses


@st.composite
def response_streams(draw: Callable[..., Any]) -> tuple[list[JSON], Said]:
    """The events of a stream whose last one has all items, some, or none; and what it says."""
    kinds = draw(
        st.lists(st.sampled_from(["message", "reasoning", "function_call"]), min_size=1, max_size=4)
    )
    queues, items = [], []
    texts, thoughts, calls = [], [], []
    for n, kind in enumerate(kinds):
        place = {"output_index": n}
        if kind == "function_call":
            name, arguments = draw(NAMES), draw(ARGUMENTS)
            calls.append((name, arguments))
            written = json.dumps(arguments)
            item = {"type": kind, "call_id": f"c{n}", "name": name, "arguments": written}
            start = {**item, "arguments": ""}
            event, text = "response.function_call_arguments.delta", written
        elif kind == "message":
            text = draw(WORDS)
            texts.append(text)
            item = {"type": kind, "content": [{"type": "output_text", "text": text}]}
            start = {"type": kind, "content": []}
            event = "response.output_text.delta"
        else:
            text = draw(WORDS)
            thoughts.append(text)
            item = {"type": kind, "summary": [{"type": "summary_text", "text": text}]}
            start = {"type": kind, "summary": []}
            event = "response.reasoning_summary_text.delta"
        items.append(item)
        events = [{"type": "response.output_item.added", **place, "item": start}]
        events += [{"type": event, **place, "delta": piece} for piece in pieces_of(draw, text)]
        if draw(st.booleans()):
            events.append({"type": "response.output_item.done", **place, "item": item})
        queues.append(events)
    last = draw(st.sampled_from([items, items[:1], []]))
    reply = {"status": "completed", "output": last}
    parts = [*draw_merged(draw, queues), {"type": "response.completed", "response": reply}]
    # As `read_output` joins the texts of several items.
    reasoning = "\n\n".join(dict.fromkeys(filter(None, (one.strip() for one in thoughts))))
    return parts, Said("\n\n".join(texts), reasoning, calls)


@MANY
@given(response_streams())
def test_items_are_taken_from_wherever_a_stream_has_them(stream: tuple[list[JSON], Said]) -> None:
    parts, said = stream
    assert read_stream("openai_responses", parts) == said


def test_text_for_an_index_that_no_item_has_is_kept_once() -> None:
    delta = {"type": "response.output_text.delta", "output_index": 4, "delta": "hello"}
    item = {"type": "message", "content": [{"type": "output_text", "text": "hello"}]}
    for output, text in (([item], "hello"), ([], "hello")):
        reply = {"status": "completed", "output": output}
        last = {"type": "response.completed", "response": reply}
        assert read_stream("openai_responses", [delta, last]).content == text


MESSAGE: JSON = {"type": "message", "content": [{"type": "output_text", "text": "one two"}]}
CALL: JSON = {"type": "function_call", "call_id": "c", "name": "f", "arguments": ONE}


def without_text(item: JSON) -> JSON:
    return {**item, "content": []} if "content" in item else {**item, "arguments": ""}


def parts_of_item(n: int, item: JSON, done: JSON) -> list[JSON]:
    """The events that bring an item, of which the last one has it as `done`."""
    at_item = {"output_index": n}
    kind = "output_text" if "content" in item else "function_call_arguments"
    text = item["content"][0]["text"] if "content" in item else item["arguments"]
    return [
        {"type": "response.output_item.added", "item": without_text(item), **at_item},
        *(
            {"type": f"response.{kind}.delta", "delta": piece, **at_item}
            for piece in (text[:3], text[3:])
        ),
        {"type": "response.output_item.done", "item": done, **at_item},
    ]


@pytest.mark.parametrize("end", ["response.completed", "response.done"])
@pytest.mark.parametrize("is_done_whole", [True, False], ids=["ends whole", "ends empty"])
@pytest.mark.parametrize("lacks", [0, 1], ids=["a text", "arguments"])
def test_what_the_end_of_a_stream_leaves_out_of_an_item_is_kept(
    end: str, is_done_whole: bool, lacks: int
) -> None:
    items = [MESSAGE, CALL]
    ends = [without_text(item) if n == lacks else item for n, item in enumerate(items)]
    dones = items if is_done_whole else ends
    events = [e for n, item in enumerate(items) for e in parts_of_item(n, item, dones[n])]
    last = {"type": end, "response": {"status": "completed", "output": ends}}
    assert read_stream("openai_responses", [*events, last]) == Said(
        "one two", "", [("f", {"a": 1})]
    )


def test_an_end_that_says_something_else_than_its_parts_counts() -> None:
    def last(*output: JSON) -> JSON:
        return {
            "type": "response.completed",
            "response": {"status": "completed", "output": [*output]},
        }

    other = {"type": "message", "content": [{"type": "output_text", "text": "three"}]}
    events = parts_of_item(0, MESSAGE, without_text(MESSAGE))
    assert read_stream("openai_responses", [*events, last(other)]).content == "three"
    assert is_malformed("openai_responses", [*events, last(other, CALL)])
    spaced = {**CALL, "arguments": '{"a": 1}'}
    same = [*parts_of_item(0, CALL, CALL), last(spaced)]
    assert read_stream("openai_responses", same).calls == [("f", {"a": 1})]


@pytest.mark.parametrize("api", ["openai_chat", "anthropic_messages", "openai_responses"])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_arguments_that_are_encoded_twice_are_read(api: str, is_streamed: bool) -> None:
    """Parsers of servers write the JSON of a text that the model wrote as JSON."""
    twice = json.dumps(json.dumps({"a": 1}))
    call = {"index": 0, "id": "x", "function": {"name": "f", "arguments": twice}}
    item = {**CALL, "arguments": twice}
    use = {"type": "tool_use", "id": "x", "name": "f", "input": {}}
    events: dict[str, list[JSON]] = {
        "openai_chat": [chat_part({"tool_calls": [call]}), chat_part({}, "tool_calls")],
        "anthropic_messages": [
            block_start(0, use),
            block_delta(0, {"type": "input_json_delta", "partial_json": twice}),
            {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
        ],
        "openai_responses": [
            *parts_of_item(0, item, item),
            {"type": "response.completed", "response": {"status": "completed", "output": [item]}},
        ],
    }
    wholes: dict[str, JSON] = {
        "openai_chat": chat_reply({"tool_calls": [call]}),
        "anthropic_messages": {
            "content": [{**use, "input": json.dumps({"a": 1})}],
            "stop_reason": "tool_use",
        },
        "openai_responses": {"status": "completed", "output": [item]},
    }
    if is_streamed:
        assert read_stream(api, events[api]).calls == [("f", {"a": 1})]
        return
    message = read_reply(api, json.dumps(wholes[api]).encode()).message
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 1}


def test_pieces_of_a_block_in_other_forms_are_read() -> None:
    """A signature in pieces that repeat, an input that is an object, and counts at the very end."""
    events = [
        block_start(0, {"type": "thinking", "thinking": "why", "signature": ""}),
        *(
            block_delta(0, {"type": "signature_delta", "signature": text})
            for text in ("abab", "ab")
        ),
        block_start(1, {"type": "tool_use", "id": "x", "name": "f", "input": {}}),
        block_delta(1, {"type": "input_json_delta", "partial_json": {"a": 1}}),
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use"},
            "usage": {"output_tokens": 1},
        },
        {"type": "message_stop", "usage": {"input_tokens": 100, "output_tokens": 10}},
    ]
    assembly = get_dialect("anthropic_messages").assembly(ignore_event)
    for event in events:
        assembly.add(event)
    completion = read_reply("anthropic_messages", assembly.finish())
    message = completion.message
    assert message["provider_blocks"]["blocks"][0]["signature"] == "ababab"
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a":1}'
    assert completion.usage is not None
    assert (completion.usage["input_tokens"], completion.usage["output_tokens"]) == (100, 10)
