"""Splitting a stream of server-sent events without losing a byte of it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.models.client.reply_bodies import EventSplitter, EventTooLarge

STREAM = (
    b"data: one\n\n: still here\n\nevent: x\ndata: two\ndata:three\nid: 1\n\n"
    b'data: {"a": "\xc3\xa9 \xe2\x80\xa8"}\r\n\r\n\r\ndata: four\r\revent: y\n\ndata\n\n'
)
DATA = ["one", None, "two\nthree", '{"a": "é \u2028"}', "four", None, None]


def _split(parts: list[bytes]) -> tuple[bytes, list[str | None]]:
    splitter = EventSplitter(1000)
    events = [event for part in parts for event in splitter.feed(part)]
    return b"".join(event.raw for event in events), [event.data for event in events]


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_events_do_not_depend_on_the_parts_they_come_in(cuts: list[int]) -> None:
    """However a stream is cut, its data is the same and its bytes stay as they were, but for empty
    data, which is a comment."""
    ends = [0, *sorted(cuts), len(STREAM)]
    parts = [STREAM[a:b] for a, b in pairwise(ends)]
    raw, data = _split(parts)
    assert raw == STREAM.removesuffix(b"data\n\n") + b":\n\n"
    assert data == DATA


@pytest.mark.parametrize("part", [b"data: " + b"x" * 300, b"x\n" * 150])
def test_an_event_beyond_the_maximum_is_refused(part: bytes) -> None:
    """What an endpoint sends without end is not held in memory."""
    splitter = EventSplitter(1000)
    for _ in range(3):
        splitter.feed(part)
    with pytest.raises(EventTooLarge):
        splitter.feed(part)


def test_data_that_is_no_text_is_repaired() -> None:
    """Bytes that are not UTF-8 are replaced inside an event and after the last one."""
    for event in (b"data: \xff", b'data: {"a": "\xff"}', b"event: x\ndata: \xff"):
        due = (event.replace(b"\xff", "\ufffd".encode()) + b"\n\n",)
        splitter = EventSplitter(1000)
        (repaired,) = splitter.feed(event + b"\n\n")
        assert (repaired.raw,) == due
        assert repaired.data is not None
        assert "\ufffd" in repaired.data
        assert splitter.feed(event) == []
        assert splitter.end() == [repaired]


@pytest.mark.parametrize(
    "kept_alive",
    [b"data:\n\n", b"data: \n\n", b"id: 1\ndata:\n\n", b"data: : PROCESSING\n\n", b": ping\n\n"],
)
def test_what_keeps_a_connection_alive_has_no_data(kept_alive: bytes) -> None:
    """Empty data is no event by the standard; relays wrap comments of other servers into data."""
    raw, data = _split([kept_alive, b"data: {}\n\n"])
    assert data == [None, "{}"]
    comment = kept_alive if kept_alive.startswith(b":") else b":\n\n"
    assert raw == comment + b"data: {}\n\n"


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_events_that_only_line_ends_separate_are_several(line_end: bytes) -> None:
    """The data of one event in several lines stays one."""
    stream = line_end.join(
        [b"event: a", b'data: {"n": 1}', b'data: {"n": 2}', b"data: [DONE]", b"", b""]
    )
    raw, data = _split([stream, b'data: {"n":\ndata: 3}\n\n'])
    assert data == ['{"n": 1}', '{"n": 2}', "[DONE]", '{"n":\n3}']
    assert raw.count(b"\n\n") == 4, "other readers separate them, too"


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_the_last_event_needs_no_empty_line_after_it(end: bytes) -> None:
    """Some servers close the connection after the last event; other readers need the line."""
    splitter = EventSplitter(1000)
    assert splitter.feed(b"data: {}\n\ndata: [DONE]" + end)[0].data == "{}"
    assert splitter.end() == [(b"data: [DONE]\n\n", "[DONE]")]
    assert splitter.end() == []
