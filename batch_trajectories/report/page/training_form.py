"""The row of a record in the run's own export, and which turns carry loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from batch_trajectories.export.conversation.own_work import Own
from batch_trajectories.export.conversation.style import Style
from batch_trajectories.export.training_files import route
from batch_trajectories.runs.store.record_types import Record


def training_form(
    record: Record, own: Own | None = None, *, key_of: Callable[[str], Any], style: Style
) -> dict[str, Any]:
    """The export row of a record, for `dumps_row`; `own` is that of `read_conversation`.

    Keys: `file` ("training", "partial" or "rejects"), `reason` and `detail` (of a reject, else
    None), `system` (what `key_of` gives for the text of the system turn, which most rows of a run
    share; None for a reject), `turns` (lists of speaker, text and whether it carries loss, without
    the system turn), `given` (number of turns with loss that are from the prompt).

    All turns of `gpt` carry loss, also those from the prompt: trainers mask by speaker.
    """
    routed = route(record, own, style=style)
    row = routed.row
    if routed.place == "rejects":
        found = {"reason": row["reason"], "detail": row["detail"], "system": None}
        return {"file": routed.place, **found, "turns": [], "given": 0}
    system, *turns = row["conversations"]
    return {
        "file": routed.place,
        "reason": None,
        "detail": None,
        "system": key_of(system["value"]),
        "turns": [[turn["from"], turn["value"], turn["from"] == "gpt"] for turn in turns],
        "given": _given(row),
    }


def _given(row: dict[str, Any]) -> int:
    own = int(orjson.loads(row["metadata"])["reasoning"]["assistant_turns"])
    speakers = [turn["from"] for turn in row["conversations"]]
    return speakers.count("gpt") - own
