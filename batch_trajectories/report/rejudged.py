"""The verdicts of a run that `check` changed, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from batch_trajectories.api.stored_run import StoredRun
from batch_trajectories.audit.verdicts import describe_check_end
from batch_trajectories.basics.errors import RunDirError
from batch_trajectories.records.checks import judge_record
from batch_trajectories.records.reader import stored_records
from batch_trajectories.records.record_types import Record, decode_record
from batch_trajectories.records.scores import CHECK
from batch_trajectories.report.formatting import count, one_line

_MAX_LISTED = 20
_CHARS = 200
_WORDS = {True: "passed", False: "not passed", None: "no verdict"}


def compare_verdicts(stored: StoredRun) -> dict[str, Any]:
    """Compare the verdicts of the run with the last of `check`; JSON-ready.

    Keys: `run_dir`, `records` (number of all), `judged` (of those that `check` judged), `changed`:
    [{"id", "from", "to", "then", "now"}] with true, false or null, and how each check ended; with
    `images` [then, now] where the image was replaced. Raises `RunDirError` without such verdicts.
    """
    records = judged = 0
    changed = []
    for record in stored_records(stored.path, doing="reading records"):
        records += 1
        score = next((one for one in record.scores or () if one.source == CHECK), None)
        if score is None:
            continue
        judged += 1
        own = decode_record(record.line)
        before, now = judge_record(own).verdict, judge_record(record).verdict
        if before != now:
            images = [(record.image or {}).get("digest"), (score.image or {}).get("digest")]
            changed.append(
                {
                    "id": record.id,
                    "from": before,
                    "to": now,
                    "then": _how(own),
                    "now": _how(record),
                    **({"images": images} if images[0] != images[1] else {}),
                }
            )
    if not judged:
        raise RunDirError(
            f"{stored.path}: `check` has judged none of its conversations; name another run to "
            "compare it with, or run `check` first"
        )
    return {"run_dir": str(stored.path), "records": records, "judged": judged, "changed": changed}


def as_text(found: Mapping[str, Any]) -> str:
    """The changes for a person."""
    changed = found["changed"]
    same = found["judged"] - len(changed)
    lines = [
        f"{found['run_dir']}: {count(found['judged'])} of {count(found['records'])} conversations "
        f"judged again: {count(same)} verdicts are the same, {count(len(changed))} changed"
    ]
    kinds = defaultdict(list)
    for change in changed:
        kinds[change["from"], change["to"]].append(change)
    for (before, now), some in kinds.items():
        lines.append(f"{_WORDS[before]} -> {_WORDS[now]}: {count(len(some))}")
        for change in some[:_MAX_LISTED]:
            why = one_line(f"{change['then']} -> {change['now']}", _CHARS)
            image = "; another image" if "images" in change else ""
            lines.append(f"  {change['id']}  {why}{image}")
        if len(some) > _MAX_LISTED:
            lines.append(f"  and {count(len(some) - _MAX_LISTED)} more (--json has all)")
    return "\n".join(lines)


def _how(record: Record) -> str:
    check: dict[str, Any] | None = record.as_dict().get("check")
    if check is None:
        return record.status_reason or record.status
    if "answer" in check:
        return f"the answer {check['answer']!r}"
    return describe_check_end(check)
