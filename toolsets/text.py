"""Text made safe to show and to store: bounded in length and valid UTF-8."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


def clip(text: str, *, max_chars: int) -> str:
    """Return `text`, or its head and tail around a mark when it is longer than `max_chars`.

    The mark itself comes on top of `max_chars`.
    """
    if len(text) <= max_chars:
        return text
    head = max_chars // 2
    tail = max_chars - head
    mark = f"\n[... {len(text) - max_chars} characters cut ...]\n"
    return text[:head] + mark + text[len(text) - tail :]


def valid_utf8(text: str) -> str:
    """Return `text` with lone surrogates replaced, so that it can be encoded as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def output_text(head: bytes, tail: bytes, total: int) -> str:
    """Return what was kept of `total` bytes of output, as text without NUL.

    Where the middle is missing a mark says how much.
    """
    if total <= len(head) + len(tail):
        return _decode(head + tail)
    # A character split by the cut is dropped rather than shown as a broken one.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(head)
    head = head[: len(head) - len(decoder.getstate()[0])]
    lead = 0
    while lead < min(3, len(tail)) and tail[lead] & 0xC0 == 0x80:
        lead += 1
    tail = tail[lead:]
    cut_bytes = total - len(head) - len(tail)
    return f"{_decode(head)}\n[... {cut_bytes} bytes cut ...]\n{_decode(tail)}"


def _decode(raw: bytes) -> str:
    return raw.decode("utf-8", "replace").replace("\0", "\N{REPLACEMENT CHARACTER}")


def join_commas(context: object, option: object, values: Sequence[str]) -> str | None:
    """Callback of a command line option that may be given several times: all of it counts.

    Gives one text, None where the option was not given.
    """
    return ",".join(values) if values else None
