"""The requests by which people steer a running process: `control.jsonl` in the run directory.

The file only grows. A line has `at` (epoch seconds), `who`, `to` (the process it is meant for:
`pid` and `started`, as the lock of the run names it), and `do`:

    pause, resume
    limits  with `rpm`, `max_in_flight`, `concurrency` or `max_run_cost_usd`
    stop    one conversation, with `id`
    stop_run
    retry   the conversations that failed in this start

The process reads what is meant for it, says in `progress.json` how much it has read and what it
refused (see `steered`), and logs it. A later start reads none of it.
"""

from __future__ import annotations

import getpass
import os
import pwd
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batch_trajectories.basics.errors import RunDirError
from batch_trajectories.engine.run_dir import read_holder
from batch_trajectories.records.files import append_line, read_json
from batch_trajectories.records.names import CONTROL_FILE

_PATIENCE_S = 15.0
_LOOK_EVERY_S = 0.1


def identify_process(holder: Mapping[str, Any]) -> list[Any]:
    """The values that name the process that works on a run, taken from its lock."""
    return [holder.get("pid"), holder.get("started")]


def steer(run_dir: Path, holder: Mapping[str, Any] | None, do: str, **values: Any) -> str:
    """Ask the process that works on a run, and wait for its answer, which is returned.

    `holder` is that of `read_holder`. Raises `RunDirError` if nothing works on the run, if it
    belongs to another user, if the process refuses or ends, or if it does not answer within 15
    seconds.
    """
    refuse_strangers(run_dir)
    if holder is None:
        raise RunDirError(
            f"{run_dir}: no process works on this run; `resume {run_dir.name}` starts it again"
        )
    line = {
        "at": time.time(),
        "who": user_name(),
        "to": identify_process(holder),
        "do": do,
        **values,
    }
    end = append_line(run_dir / CONTROL_FILE, line)
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        works = read_holder(run_dir) is not None  # asked first: what it wrote last is read below
        state = read_json(run_dir / "progress.json") or {}
        answers = (state.get("steered") or {}).get("answers", {})
        if (answer := answers.get(str(end))) is not None:
            if answer["refused"]:
                raise RunDirError(f"{run_dir}: refused: {answer['text']}")
            return str(answer["text"])
        if not works:
            raise RunDirError(f"{run_dir}: the run has ended; its run.log says what it still did")
        time.sleep(_LOOK_EVERY_S)
    raise RunDirError(
        f"{run_dir}: process {holder.get('pid')} has not answered; it may be ending or suspended. "
        "`status` shows whether it still works"
    )


def user_name() -> str:
    """Who runs this process, for lines that say who wrote them."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        return f"user {os.geteuid()}"


def refuse_strangers(run_dir: Path) -> None:
    """Raise `RunDirError` if a run belongs to another user."""
    owner = run_dir.stat().st_uid
    if owner != os.geteuid():
        try:
            name = pwd.getpwuid(owner).pw_name
        except KeyError:
            name = f"user {owner}"
        raise RunDirError(f"{run_dir}: this run belongs to {name}, who alone may change it")
