"""Format numbers and texts for a terminal, without control characters."""

from __future__ import annotations

import time

from batch_trajectories.basics.text import CONTROLS


def plain(text: str) -> str:
    """`text` with control characters shown as ⟨U+…⟩."""
    return CONTROLS.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", text)


def one_line(text: str, limit: int) -> str:
    """`text` as one line of at most `limit` characters."""
    line = plain(" ".join(text[: 4 * limit].split()))
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def count(number: float | None) -> str:
    """A whole number with thousands separators, or `?`."""
    return "?" if number is None else f"{number:,.0f}"


def dollars(usd: float | None) -> str:
    """Dollars with significant digits, or `?`."""
    if usd is None:
        return "?"
    return f"${usd:,.2f}" if usd >= 0.1 or usd == 0 else f"${usd:.2g}"


def seconds(s: float | None) -> str:
    """A duration in suitable units, or `?`."""
    if s is None:
        return "?"
    if s < 1:
        return f"{s * 1000:.0f} ms"
    if s < 60:
        return f"{s:.1f} s"
    minutes, rest = divmod(int(s), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"


def moment(at: float) -> str:
    """Epoch seconds as local time, or `?` for a number that is none."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (OSError, OverflowError, ValueError):
        return "?"
