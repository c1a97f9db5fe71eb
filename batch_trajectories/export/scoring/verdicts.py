"""Replies of the judge that exports of earlier versions asked (`filters.judge` of a recipe).

`verdicts.jsonl` in the run directory holds a line for each: {"key", "id", "judge", "reply" (null
where the call failed), ...}. The key is a hash of the judge and its whole prompt. Nothing writes
the file any more; what it holds is paid for.
"""

from __future__ import annotations

from pathlib import Path

from batch_trajectories.basics.errors import RunDirError
from batch_trajectories.runs.store.checksum import read_object
from batch_trajectories.runs.store.records import lines_from

NAME = "verdicts.jsonl"


def read_verdicts(run_dir: Path) -> dict[str, str]:
    """The replies by key; the last of a key counts. Raises `RunDirError` for other lines."""
    replies: dict[str, str] = {}
    for number, (_, content) in enumerate(lines_from(run_dir / NAME, 0), start=1):
        try:
            line = read_object(content)
            if line["reply"] is not None:
                replies[str(line["key"])] = str(line["reply"])
        except (ValueError, KeyError) as error:
            raise RunDirError(
                f"{run_dir / NAME}:{number}: not a verdict; `verify --repair` sets it aside, and "
                "its question is asked again"
            ) from error
    return replies
