"""Judges the conversations of a finished run again, with a changed or added check: `check`.

The work is a separate run in `checks/` of the run directory, with a row per conversation and
workers that call no model. It resumes like any run. When all conversations are judged, the verdicts
are appended to scores.jsonl, and the directory is removed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import orjson

from agent.options import Match
from batch_trajectories.api.results import write_results
from batch_trajectories.api.start import explain_exit, open_planned_run
from batch_trajectories.api.stored_run import StoredRun
from batch_trajectories.audit.audited import make_config_without_model
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.console import say, track_progress
from batch_trajectories.basics.errors import DatasetError
from batch_trajectories.basics.text import first_few, plural
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.kept_dataset import take_snapshot
from batch_trajectories.dataset.row import RowRules
from batch_trajectories.dataset.scan import make_task, scan
from batch_trajectories.engine.plan import make_plan, warn
from batch_trajectories.engine.run_dir import hold_lock, refuse_held
from batch_trajectories.engine.run_totals import compute_totals
from batch_trajectories.engine.supervisor.run import run_batch
from batch_trajectories.records.checks import judge_record
from batch_trajectories.records.files import make_directory, open_temporary, temporary_path
from batch_trajectories.records.index import Index
from batch_trajectories.records.names import CHECKS, EXPORTS, MANIFEST_FILE, SCORES_FILE
from batch_trajectories.records.reader import open_index, read_record
from batch_trajectories.records.record_types import CheckResult, Record, decode_record
from batch_trajectories.records.scores import CHECK, Scores, later_check_keys, score_key
from batch_trajectories.records.tasks import task_key
from batch_trajectories.scoring.rechecks import (
    HARMLESS,
    REFUSED,
    Judging,
    LeftOut,
    NewRows,
    Rechecks,
)
from batch_trajectories.scoring.score_file import NewScore, open_scores
from toolsets.workspace.removal import remove_tree

_MAX_LISTED_IDS = 5
_SCORES_PER_APPEND = 500
"""Number of scores that are appended together."""
_MAX_ATTEMPTS = 1_000_000
"""Maximum attempts. A failed attempt gives no verdict, and the next command makes another one."""

_VERDICT_TEXTS = {True: "passed", False: "not passed", None: "without a verdict"}


@dataclass
class RecheckResult:
    """The result of a start of `check`."""

    path: Path
    """The run directory."""
    changes: Counter[tuple[bool | None, bool | None]] = field(default_factory=Counter)
    """Number of verdicts by the verdict before and the new one."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of conversations that were not judged, by reason: `HARMLESS` and `REFUSED`."""
    refused: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Ids of conversations that could not be judged, by reason: those of `REFUSED`."""
    details: dict[str, str] = field(default_factory=dict)
    """Details of the most recent conversation that was left out, by reason."""
    failed: Sequence[Mapping[str, Any]] = ()
    """The reasons why workspaces could not be rebuilt: `class`, `message`, `count`."""
    exit_code: int = 0
    """0: all conversations with something to judge were judged; 1: some were not; else the exit
    code of a run."""
    reason: str | None = None
    """The reason why `exit_code` is neither 0 nor 1, and what to do next."""
    unwritten: str | None = None
    """The reason why training file and summary were not written again; None if they were."""

    def to_json(self) -> dict[str, Any]:
        """The result for `--json`, with all ids of `refused`."""
        changes = [
            {"from": before, "to": now, "count": count}
            for (before, now), count in self.changes.items()
        ]
        return {
            "run_dir": str(self.path),
            "verdicts": self.changes.total(),
            "changes": changes,
            "left_out": dict(self.left_out),
            "refused": dict(self.refused),
            "failed": list(self.failed),
            "unwritten": self.unwritten,
        }

    def as_table(self) -> str:
        """The verdicts, and the conversations without a verdict, as lines for a person."""
        given = self.changes.total()
        lines = [f"{plural(given, 'verdict')} given in {self.path / SCORES_FILE}"]
        for (before, now), count in sorted(self.changes.items(), key=lambda item: -item[1]):
            same = "still " if before == now else f"{_VERDICT_TEXTS[before]} -> "
            lines.append(f"  {count:>9,}  {same}{_VERDICT_TEXTS[now]}")
        for reason, words in (HARMLESS | REFUSED).items():
            if count := self.left_out[reason]:
                ids = self.refused.get(reason, [])
                named = f": {first_few(ids, _MAX_LISTED_IDS)}" if ids else ""
                named += " (--json has all)" if len(ids) > _MAX_LISTED_IDS else ""
                detail = f" ({self.details[reason]})" if self.details.get(reason) else ""
                lines.append(f"  {count:>9,}  {words}{detail}{named}")
        lines += [f"  {one['count']:>9,}  not rebuilt: {one['message']}" for one in self.failed]
        if any(before != now for before, now in self.changes):
            lines.append(f"`compare {self.path.name}` shows which verdicts changed, and why")
        if self.unwritten is not None:
            lines.append(f"training file and summary stay as they are: {self.unwritten}")
        return "\n".join(lines)


def recheck(
    stored: StoredRun, config: RunConfig, *, has_new_rows: bool, match: Match | None = None
) -> RecheckResult:
    """Judge the conversations of a run again; blocks until all are judged.

    `config` is that of the run with changed options. `has_new_rows`: its dataset has the rows with
    the checks, else the records have them. `match` is how answers are compared; None: as they were
    when the conversation ended. Raises what `start` raises.
    """
    refuse_held(stored.path)
    directory = _work_directory(stored.path, config, has_new_rows=has_new_rows)
    config = make_config_without_model(
        config,
        checked_run=stored.path.absolute(),
        max_attempts=_MAX_ATTEMPTS,
        executor="local",
        max_samples=None,
        shard=None,
        num_samples=1,
        output_dir=directory,
        run_name="judging",
        on_bad_row="fail",
    )
    end = RecheckResult(stored.path)
    rechecks = Rechecks(config, _scan_new_rows(config) if has_new_rows else None, match)
    make_directory(directory.parent)
    make_directory(directory)
    rows = directory / "rows.jsonl"
    count = _write_rows(stored.path, rechecks, rows, end)
    config = config.model_copy(update={"dataset_file": rows, "rows": None, "columns": {}})
    if count:
        plan = make_plan(config)
        warn(plan, say)
        with open_planned_run(plan, fresh=False, accept_config_change=()) as run_dir:
            outcome = run_batch(plan, run_dir)
            totals = compute_totals(run_dir.path, plan.scan, plan.config)
        end.failed = totals.reasons
        end.exit_code, end.reason = explain_exit(outcome, totals)
        if end.reason is not None:
            return end
    with hold_lock(stored.path):
        _append_verdicts(stored, rechecks, config, end)
        end.unwritten = _write_results(stored)
    remove_tree(directory)
    with suppress(OSError):  # another check is under way there
        directory.parent.rmdir()
    end.exit_code = int(bool(end.refused or end.failed))
    return end


def _work_directory(run_dir: Path, config: RunConfig, *, has_new_rows: bool) -> Path:
    """The directory for the work of this check, which the same command finds again."""
    options = config.to_json()
    for name in ("num_workers", "batch_size", "concurrency", "log_level", "grace_s"):
        del options[name]
    content = exact_json.dumps([options, has_new_rows], option=orjson.OPT_SORT_KEYS)
    return run_dir / CHECKS / blake2b(content, digest_size=6).hexdigest()


def _scan_new_rows(config: RunConfig) -> NewRows:
    rules = config.row_rules("scripted")
    dataset = take_snapshot(
        config.dataset_file,
        config.run_dir,
        columns=config.columns,
        rows=config.rows,
        rules=rules,
        max_samples=None,
        writes=False,
        say=say,
    )
    found = scan(dataset.path, max_samples=None, rules=rules)
    for bad in found.bad_rows[:_MAX_LISTED_IDS]:
        say(f"{config.dataset_file}: row {bad.line}: cannot be used: {bad.reason}")
    return NewRows(found, dataset)


def _write_rows(run_dir: Path, rechecks: Rechecks, rows: Path, end: RecheckResult) -> int:
    """Write the rows for the workers; returns the number of rows."""
    count = 0
    temporary = temporary_path(rows)
    with open_temporary(temporary, rows) as file:
        for record, judging in _decide_rechecks(run_dir, rechecks, doing="reading records"):
            if isinstance(judging, LeftOut):
                end.left_out[judging.reason] += 1
                if judging.reason in REFUSED:
                    end.refused[judging.reason].append(record.id)
                    end.details[judging.reason] = judging.detail
            elif judging.row is not None:
                file.write(exact_json.dumps(judging.row) + b"\n")
                count += 1
    temporary.replace(rows)
    return count


def _decide_rechecks(
    run_dir: Path, rechecks: Rechecks, *, doing: str
) -> Iterator[tuple[Record, Judging | LeftOut]]:
    scores = Scores(run_dir, only=CHECK)
    with open_index(run_dir) as (index, records):
        for key, entry in track_progress(index.current_entries(), doing, total=index.written()):
            record = scores.extend_record(read_record(records, entry.offset, entry.length, key))
            yield record, rechecks.decide(record, entry, key)


def _append_verdicts(
    stored: StoredRun, rechecks: Rechecks, config: RunConfig, end: RecheckResult
) -> None:
    """Append to scores.jsonl the verdicts that it does not have."""
    rules = config.row_rules("scripted")
    with open_scores(stored.path) as file, open_index(config.run_dir) as (index, records):
        scores: list[NewScore] = []
        for record, judging in _decide_rechecks(stored.path, rechecks, doing="judging"):
            if isinstance(judging, LeftOut):
                continue
            if (checked := _find_result(judging, rules, index, records)) is None:
                continue
            result = msgspec.convert(checked.check, CheckResult)
            passed = result.passed if isinstance(result.passed, bool) else None
            end.changes[judge_record(record).verdict, passed] += 1
            scores.append(_make_score(record, judging, checked, result))
            if len(scores) >= _SCORES_PER_APPEND:
                file.append(scores)
                scores = []
        file.append(scores)


class _CheckOutcome(NamedTuple):
    """The result of a check, and the image in which it ran."""

    check: dict[str, Any]
    image: dict[str, str] | None


def _find_result(
    judging: Judging, rules: RowRules, index: Index, records: BinaryIO
) -> _CheckOutcome | None:
    """The result for a conversation; None if its workspace was not rebuilt.

    `index` and `records` are those of the work directory.
    """
    if judging.row is None:
        assert judging.check is not None  # the answer was compared
        return _CheckOutcome(judging.check, image=None)
    task = make_task(judging.row, rules)
    entry = index.get(task.key)
    if entry is None:
        return None
    judged = read_record(records, entry.offset, entry.length, task.key)
    if judged.check is None:
        return None
    return _CheckOutcome(judged.as_dict()["check"], image=judged.image)


def _make_score(
    record: Record, judging: Judging, checked: _CheckOutcome, result: CheckResult
) -> NewScore:
    original = decode_record(record.line)
    score = {
        "source": CHECK,
        "version": judging.version,
        "rewards": None,
        "error": None,
        "check": checked.check,
        "task": task_key(original.id, original.input_digest).hex(),
        **later_check_keys(original, result),
        **({} if checked.image is None else {"image": checked.image}),
    }
    return NewScore(score_key(record), record.id, score)


def _write_results(stored: StoredRun) -> str | None:
    """Write training file and summary with the new verdicts; returns why, if it is not possible."""
    manifest = stored.path / EXPORTS / MANIFEST_FILE
    try:
        before = orjson.loads(manifest.read_bytes())["gone"]
        dataset = stored.scan
    except (FileNotFoundError, KeyError, DatasetError) as error:
        return str(error)
    if compute_totals(stored.path, dataset, stored.config).gone > before:
        return (
            "the dataset of the run has changed since; keep it, and give the new rows by "
            "--dataset_file"
        )
    write_results(stored.path, dataset, stored.config)
    return None
