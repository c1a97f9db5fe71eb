"""Text to show and to store: limited in length, valid UTF-8; counts with their nouns."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

_NUMBERS = r"\b(?=[a-fA-F-]*\d)[0-9a-fA-F-]{8,}\b|(?<!HTTP )(?<!\d)\d+"
"""Numbers and hexadecimal ids, but not the number of an HTTP status."""
_VALUES = re.compile(rf"'[^']*'|\"[^\"]*\"|{_NUMBERS}")
_SENTENCE = re.compile(r"\S+(?: \S+){2,20}")
"""A quoted text of three words or more, but not one as long as a quoted page."""

_CUT_MARK = "[...]"


def clip(text: str, *, max_chars: int) -> str:
    """Return `text`, or its head and tail around a mark if it is longer than `max_chars`.

    The mark is not counted in `max_chars`.
    """
    if len(text) <= max_chars:
        return text
    head = max_chars // 2
    tail = max_chars - head
    mark = f"\n[... {len(text) - max_chars} characters cut ...]\n"
    return text[:head] + mark + text[len(text) - tail :]


def one_line_excerpt(text: str, *, max_chars: int) -> str:
    """Return `text` in one line: whole, or its beginning and end around the number left out.

    The number does not count in `max_chars`.
    """
    line = " ".join(text.split())
    if len(line) <= max_chars:
        return line
    head, tail = line[: max_chars // 2].rstrip(), line[max_chars // 2 - max_chars :].lstrip()
    left_out = len(line) - len(head) - len(tail)
    return f"{head} [... {left_out:,} characters left out ...] {tail}"


def single_line(message: str, *, max_chars: int = 300) -> str:
    """Put a message of several lines into one line.

    Keeps the first line, which says what failed, and as many of the last lines as fit, which say
    why. A mark stands for the lines between them. Marks and bars do not count in `max_chars`.
    """
    lines = [line for line in (" ".join(line.split()) for line in message.splitlines()) if line]
    if len(lines) < 2:
        return _cut_middle("".join(lines), max_chars)
    first = _cut_middle(lines[0], max_chars // 2)
    left = max(max_chars - len(first), max_chars // 2)
    last = [_cut_middle(lines[-1], left)]
    left -= len(last[0])
    for line in reversed(lines[1:-1]):
        if (left := left - len(line)) < 0:
            last.append(_CUT_MARK)
            break
        last.append(line)
    return " | ".join([first, *reversed(last)])


def _cut_middle(line: str, max_chars: int) -> str:
    if len(line) <= max_chars:
        return line
    head = max_chars // 2
    return f"{line[:head].rstrip()} {_CUT_MARK} {line[head - max_chars :].lstrip()}"


def valid_utf8(text: str) -> str:
    """Return `text` with lone surrogates replaced; it can then be encoded as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Terminal escapes and changes of the writing direction; line ends and tabs stay."""


def escape_controls(text: str) -> str:
    r"""Escape control characters in `text`, as `\u001b`; the value of JSON stays the same.

    Ids, errors and file names come from others, and a terminal obeys escape sequences: these can
    hide a line, change the title or write to the clipboard.
    """
    return CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def mask_values(text: str, mark: str = "") -> str:
    """Replace the parts that differ between messages of one kind: ids, numbers, quoted names."""
    return _VALUES.sub(mark, text)


def mask_names(text: str) -> str:
    """Remove ids, numbers and quotes as `mask_values` does, but keep the words of quoted sentences.

    Such a sentence is mostly the message of another program, and the only difference.
    """
    return _VALUES.sub(lambda found: _keep_sentence(found[0]), text)


def _keep_sentence(value: str) -> str:
    """Return the words of a quoted sentence; "" for any other value."""
    inner = value[1:-1]
    return re.sub(_NUMBERS, "", inner) if _SENTENCE.fullmatch(inner) else ""


def plural(number: int, noun: str) -> str:
    """A number with its noun, such as `1 turn` and `2,000 turns`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_few(names: Sequence[str], limit: int = 10, *, separator: str = ", ") -> str:
    """The first names, and how many more there are: `a, b and 3 more`."""
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return separator.join(names[:limit]) + more


def output_text(head: bytes, tail: bytes, total: int) -> str:
    """Return the head and tail of `total` bytes of output as text without NUL.

    If the middle is missing, a mark says how many bytes it had.
    """
    if total <= len(head) + len(tail):
        return _decode(head + tail)
    # A character that the cut splits is dropped.
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
    """Callback of a flag that may be repeated: one text with all values; None without the flag."""
    return ",".join(values) if values else None
