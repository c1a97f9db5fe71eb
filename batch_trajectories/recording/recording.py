"""One start of a recording, from its config to the end of all sessions."""

from __future__ import annotations

import asyncio
import logging
import signal
import tempfile
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from batch_trajectories.api.results import write_results
from batch_trajectories.api.start import RunEnd, make_run_end
from batch_trajectories.basics.process import (
    allow_many_files,
    collect_garbage_rarely,
    hide_environment,
    log_to,
    restore_settings,
)
from batch_trajectories.basics.text import first_few
from batch_trajectories.config.endpoints import Cost
from batch_trajectories.config.models import run_budget
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.scan import Scan, scan
from batch_trajectories.engine.record import Provenance
from batch_trajectories.engine.run_dir import RunDir, open_run_dir
from batch_trajectories.engine.supervisor.budget import (
    BudgetLog,
    set_aside_damaged,
    sum_up_earlier_starts,
)
from batch_trajectories.engine.supervisor.run import Outcome
from batch_trajectories.recording.recorder import Recorder, SessionFile
from batch_trajectories.recording.upstream import Models, Upstream
from batch_trajectories.records.failures import FailureFile, Settled
from batch_trajectories.records.files import StorageError
from batch_trajectories.records.journal import Inflight, JournalWriter, next_worker_number
from batch_trajectories.records.names import LOG_FILE, SESSIONS
from batch_trajectories.records.records import RecordFile

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Listening:
    """The address of a recording, and the silence after which its sessions end."""

    host: str = "127.0.0.1"
    port: int = 8080
    silence_s: float = 600.0


def sessions_path(run_dir: Path) -> Path:
    """Return the path of the dataset of a recording."""
    return run_dir / SESSIONS / "sessions.jsonl"


def open_recording(
    config: RunConfig, models: Models, *, fresh: bool, accept_changes: Sequence[str]
) -> RunDir:
    """Open and lock the run directory of a recording; see `open_run_dir`."""
    path, rules = config.dataset_file, config.row_rules(models.settings.api)
    with tempfile.NamedTemporaryFile() as empty:
        source = path if path.exists() and not fresh else Path(empty.name)
        scanned = scan(source, max_samples=None, rules=rules, may_be_empty=True)
    scanned = replace(scanned, path=path)
    return open_run_dir(
        config, scanned, api=models.settings.api, fresh=fresh, accept_changes=accept_changes
    )


def run_recording(
    config: RunConfig,
    models: Models,
    run_dir: RunDir,
    listening: Listening,
    *,
    say: Callable[[str], object],
) -> tuple[Outcome, Scan]:
    """Record until a signal ends it or it cannot continue; return the sessions as a dataset."""
    with restore_settings():
        log_to(run_dir.path / LOG_FILE, config.log_level)
        log.info("A recording begins; the digest of its config is %s.", run_dir.digest)
        hide_environment()
        allow_many_files()
        collect_garbage_rarely()
        outcome, totals = _record(config, models, run_dir, listening, say)
        log.info("%s", outcome.describe())
    return outcome, totals


@dataclass(frozen=True, slots=True)
class _Stores:
    """The files that a recording writes, and what earlier starts left in them."""

    sessions: SessionFile
    records: RecordFile
    failures: FailureFile
    budget_log: BudgetLog
    inflight: Inflight
    settled: Settled
    spent: Cost
    """The amount that earlier starts have spent; 0 without a budget."""


def _record(
    config: RunConfig,
    models: Models,
    run_dir: RunDir,
    listening: Listening,
    say: Callable[[str], object],
) -> tuple[Outcome, Scan]:
    rules = config.row_rules(models.settings.api)
    with (
        closing(RecordFile(run_dir.path, run_dir.quarantine)) as records,
        closing(FailureFile(run_dir.path, run_dir.quarantine)) as failures,
        closing(BudgetLog(run_dir.path, run_dir.quarantine)) as budget_log,
        closing(SessionFile(config.dataset_file, rules, run_dir.quarantine)) as sessions,
    ):
        for damaged in (records.unreadable, set_aside_damaged(run_dir.path)):
            if damaged:
                say(f"set aside in {run_dir.quarantine}: {first_few(damaged)}")
        inflight = Inflight(run_dir.inflight)
        index = records.take_index()
        settled = Settled(index, config.max_attempts)
        inflight.read(settled=settled)
        spent = Cost()
        if run_budget(config) is not None:
            spent = sum_up_earlier_starts(
                (entry for _, entry in index.records()), inflight, budget_log
            )
        stores = _Stores(
            sessions=sessions,
            records=records,
            failures=failures,
            budget_log=budget_log,
            inflight=inflight,
            settled=settled,
            spent=spent,
        )
        outcome = asyncio.run(_serve(config, models, run_dir, listening, stores, say))
        return outcome, sessions.scan()


async def _serve(
    config: RunConfig,
    models: Models,
    run_dir: RunDir,
    listening: Listening,
    stores: _Stores,
    say: Callable[[str], object],
) -> Outcome:
    """Serve the sessions until a signal or a failure ends the recording."""
    loop = asyncio.get_running_loop()
    used_up: list[str] = []

    # Both are called only once the recorder exists: before it, nothing is called or written.
    def halt_out_of_budget(reason: str) -> None:
        used_up.append(reason)
        recorder.halt(reason)

    def halt_storage_failed(error: StorageError) -> None:
        loop.call_soon_threadsafe(recorder.halt, str(error))

    upstream = Upstream(
        config,
        models,
        spent=stores.spent,
        budget_log=stores.budget_log,
        on_used_up=halt_out_of_budget,
        say=say,
    )
    journal = JournalWriter(
        run_dir.inflight,
        next_worker_number(run_dir.inflight),
        on_storage_error=halt_storage_failed,
    )
    with closing(journal):
        recorder = Recorder(
            config,
            models,
            upstream,
            sessions=stores.sessions,
            records=stores.records,
            failures=stores.failures,
            inflight=stores.inflight,
            journal=journal,
            provenance=Provenance(None, config.seed, run_dir.digest, run_dir.versions),
            run_key=run_dir.key,
            silence_s=listening.silence_s,
            say=say,
        )
        recorder.reopen_sessions(
            [task for task in stores.sessions.tasks if task.key not in stores.settled]
        )
        received = _stop_by_signals(recorder)
        try:
            with suppress(asyncio.CancelledError):
                await recorder.serve(listening.host, listening.port)
        finally:
            await upstream.close()
    is_forced = len(received) > 1
    return Outcome(
        signal=received[-1] if is_forced else None,
        stopped_by=recorder.stopped_by,
        limits=upstream.report(),
        is_out_of_budget=bool(used_up),
    )


def _stop_by_signals(recorder: Recorder) -> list[int]:
    """Have the first signal stop the recorder, and a second one cancel the current task.

    Returns the list to which received signals are added.
    """
    received: list[int] = []
    serving = asyncio.current_task()
    assert serving is not None

    def stop(number: int) -> None:
        received.append(number)
        if len(received) > 1:
            serving.cancel()
        recorder.stop()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
    return received


def record(
    config: RunConfig,
    upstream: str,
    listening: Listening,
    *,
    fresh: bool = False,
    accept_config_change: Collection[str] = (),
    say: Callable[[str], object],
) -> RunEnd:
    """Record model calls until a signal ends the recording; see the command `record`.

    Raises `RunError`, as `run` does.
    """
    models = Models(config, upstream)
    accepted = tuple(accept_config_change)
    with closing(open_recording(config, models, fresh=fresh, accept_changes=accepted)) as run_dir:
        outcome, scan = run_recording(config, models, run_dir, listening, say=say)
        totals = write_results(run_dir.path, scan, config, last_start=outcome.to_json())
    return make_run_end(run_dir.path, outcome, totals)
