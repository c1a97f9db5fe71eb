"""Text made safe to show and to store: bounded in length and valid UTF-8."""

from __future__ import annotations


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
