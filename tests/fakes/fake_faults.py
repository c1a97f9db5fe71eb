"""The faults that the fake endpoint can play, by name and family."""

from __future__ import annotations

from collections.abc import Mapping

RETRY_AFTER: Mapping[str, str | None] = {
    "http429": "0.05",
    "http429_none": None,
    "http429_1": "1",
    "http429_3600": "3600",
    "http429_negative": "-1",
    "http429_nan": "NaN",
    "http429_inf": "inf",
    "http429_date": None,
    "http429_ms": None,
}
"""Refusals for the rate of calls, and the Retry-After that they come with. The last two say it
as a date or in milliseconds."""

STATUSES: Mapping[str, int] = {
    **{
        f"http{status}": status
        for status in (400, 401, 402, 403, 404, 408, 409, 413, 422, 500, 502, 503, 529)
    },
    **dict.fromkeys(RETRY_AFTER, 429),
}

BODIES: Mapping[str, bytes] = {
    "html": b"<html><body>Bad gateway</body></html>",
    "empty": b"",
    "null": b"null",
}
"""What comes with status 200 instead of a reply."""

REFUSALS = ("context", "quota", *STATUSES)
"""The request is refused, with a status that says so."""

BROKEN = (
    "disconnect",
    "reset",
    "hang",
    "silence",
    "stall",
    "drip",
    "eof",
    "garbage",
    "huge",
    "cut",
    "mid_utf8",
    "error200",
    "error_event",
    "no_choices",
    "no_finish",
    *BODIES,
)
"""The reply does not arrive whole, or is none."""

CALL_FAULTS = (
    "bad_arguments",
    "list_arguments",
    "null_arguments",
    "wrong_types",
    "unknown_tool",
    "empty_name",
    "missing_id",
    "duplicate_ids",
    "many_calls",
    "repeated_call",
)
"""What a model does wrong in its calls."""

REPLY_FAULTS = (
    "length",
    "refusal",
    "pause",
    "context_stop",
    "empty_text",
    *CALL_FAULTS,
    "roles",
    "unknown_fields",
    "other_reasoning",
    "no_usage",
    "bad_utf8",
)
"""Faults that are replies, or can be repaired, and count as delivered."""

FAULTS = (*REFUSALS, *BROKEN, *REPLY_FAULTS)

STREAM_FAULTS = ("error_event", "roles")
"""Faults that only a stream can have."""
