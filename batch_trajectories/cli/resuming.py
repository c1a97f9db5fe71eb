"""The options of a run that exists, for commands that continue it without naming them again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from batch_trajectories.basics.errors import RunDirError
from batch_trajectories.records.names import IMPORTED, RUN_FILE, SESSIONS

if TYPE_CHECKING:
    from batch_trajectories.api.stored_run import StoredRun


def stored_options(stored: StoredRun, *, trust_run: bool = False) -> dict[str, Any]:
    """The options of the last start of a run, as flags.

    The run may have been moved since, and the current directory may be another one. Raises
    `RunDirError` for a run that another command made, and for a run of another user or machine
    without `trust_run`: its options may name code, keys and addresses.
    """
    options = dict(stored.identity["config"])
    _refuse_runs_of_other_commands(stored, options)
    if not (stored.is_own or trust_run):
        raise RunDirError(
            f"{stored.path}: this run was not started here. Its run.json names code to run and "
            f"addresses to call. Read it, then `resume {stored.path.name} --trust_run`"
        )
    dataset = stored.identity["dataset"]
    if dataset.get("source") is None and Path(dataset["path"]).is_absolute():
        options["dataset_file"] = dataset["path"]
    options |= {"run_name": stored.path.name, "output_dir": str(stored.path.parent)}
    return {name: value for name, value in options.items() if value is not None}


def _refuse_runs_of_other_commands(stored: StoredRun, options: dict[str, Any]) -> None:
    if options.get("audit"):
        raise RunDirError(f"{stored.path}: this is an audit; `check_tasks` continues it")
    if options.get("checked_run"):
        raise RunDirError(f"{stored.path}: this is a run of `check`, which continues it")
    if (stored.path / IMPORTED).is_dir():
        raise RunDirError(
            f"{stored.path}: these conversations were imported; `import` goes on with its sources"
        )
    if (stored.path / SESSIONS).is_dir():
        raise RunDirError(f"{stored.path}: this is a recording; `record` continues it")


def add_stored_options(flags: dict[str, Any]) -> dict[str, Any]:
    """`flags` of a start, on top of the options of the run that they name, if it exists.

    Only if they name no dataset. Raises `RunDirError` as `stored_options`.
    """
    if flags.get("dataset_file") is not None or flags.get("run_name") is None:
        return flags
    from batch_trajectories.api.stored_run import open_run

    output_dir = Path(flags.get("output_dir") or "trajectories")
    name = str(flags["run_name"])
    if not (output_dir / name / RUN_FILE).is_file():
        return flags
    given = {key: value for key, value in flags.items() if value is not None}
    return {**flags, **stored_options(open_run(name, output_dir)), **given}
