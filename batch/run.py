"""One start of a run, from a config to workers that have ended."""

from __future__ import annotations

import ipaddress
import logging
import os
import signal
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import yaml

from agent.models.model import ModelSettings, url_of
from agent.models.scripted import ScriptedTurn, parse_script
from agent.setup import Setup, schemas_for
from batch.budget import Ledger, spent_before
from batch.catalog import catalog_of, with_listed_servers
from batch.config import RunConfig
from batch.console import say
from batch.errors import ConfigError, DatasetChanged, DatasetError
from batch.executors import check_executor, open_executor
from batch.failures import FailureFile
from batch.journal import Inflight, segments
from batch.kept_scan import NAME, scan_with
from batch.models import Setups, asked, bounds_of, budget_of, set_up_models, unpriced
from batch.process import allow_many_files, hide_environment, log_to
from batch.progress import Progress
from batch.prompts import Scan, tasks_at
from batch.purse import Amount
from batch.record import Provenance
from batch.records import RecordFile, load_index
from batch.run_dir import RunDir
from batch.shards import parse_shard
from batch.standing import Settled, is_settled
from batch.supervisor import Supervisor
from batch.waves import Waves, with_open_batches
from batch.worker_setup import WorkerSetup
from toolsets.removal import remove_tree
from toolsets.sandbox import sandbox_problem
from toolsets.workspace import TEMPORARY

log = logging.getLogger(__name__)

_BAD_ROWS_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Plan:
    """What a start would do: everything checked, nothing begun."""

    config: RunConfig
    setups: Setups
    sandbox: str | None
    """None where no tool runs commands."""
    script: list[ScriptedTurn] | None
    scan: Scan

    @property
    def api(self) -> str:
        """The dialect of the models; of several, that of the first."""
        return next(iter(self.setups.values())).settings.api

    @property
    def toolsets(self) -> list[str]:
        """The names of the toolsets that conversations can be offered."""
        return next(iter(self.setups.values())).names()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a start ended."""

    signal: int | None = None
    """The signal that stopped it."""
    stopped_by: str | None = None
    """What in the environment stopped it."""
    limits: Sequence[Mapping[str, Any]] = ()
    """What limited the model calls; see `RunLimits.report`."""
    is_out_of_budget: bool = False
    """The budget of the run stopped it."""

    def to_json(self) -> dict[str, Any]:
        """For the summary."""
        return {"stopped_by": self.stopped_by, "signal": self.signal, "calls": list(self.limits)}


def make_plan(config: RunConfig) -> Plan:
    """Check all that can be checked before anything is written or asked for.

    Raises `ConfigError` or `DatasetError`.
    """
    try:
        config = with_listed_servers(config)
        known = catalog_of(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    check_executor(config)
    setups = set_up_models(config, known)
    first = next(iter(setups.values()))
    _check_web(config, first)
    needs_sandbox = bool(first.sandboxed()) or config.row_setup
    if needs_sandbox and (problem := sandbox_problem(config.sandbox, image=config.docker_image)):
        raise ConfigError(_without_sandbox(problem, first.sandboxed(), config))
    script = _read_script(config.script_file)
    return Plan(
        config=config,
        setups=setups,
        sandbox=config.sandbox if needs_sandbox else None,
        script=script,
        scan=scan_with(
            config.run_dir / NAME,
            config.dataset_file,
            max_samples=config.max_samples,
            rules=config.row_rules(
                first.settings.api, is_priced=unpriced(setups) is None, toolsets=first.names()
            ),
            num_samples=config.num_samples,
            shard=None if config.shard is None else parse_shard(config.shard),
        ),
    )


def _without_sandbox(problem: str, toolsets: Sequence[str], config: RunConfig) -> str:
    names = ",".join(toolsets)
    msg = f"{problem.rstrip('.')}. "
    if toolsets:
        msg += f"The toolsets {names} run commands and are not loaded without it. "
    if config.row_setup:
        msg += "The rows' `setup` and `check` are commands too (--row_setup). "
    msg += "Or choose --sandbox local (commands then run with your own rights, not isolated)"
    return msg + (f", or --disabled_toolsets {names}." if toolsets else ".")


def _check_web(config: RunConfig, setup: Setup) -> None:
    try:
        settings = config.web_settings()
        problem = settings.problem() if setup.uses("web") else None
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if problem:
        raise ConfigError(problem)


def describe(plan: Plan) -> str:
    """What a start of `plan` would do, for `--dry_run`."""
    config, scan = plan.config, plan.scan
    first = next(iter(plan.setups.values()))
    names = [schema["function"]["name"] for schema in schemas_for(first, config.agent_options)]
    models = [
        _in_words(setup.settings, weight if len(plan.setups) > 1 else None)
        for setup, weight in zip(plan.setups.values(), config.model_weights().values(), strict=True)
    ]
    return "\n".join(
        [
            f"run        {config.run_dir}",
            f"dataset    {scan.path}: {scan.all_rows} usable rows, {scan.all_bad} bad",
            *([f"shard      {scan.shard}: {scan.rows} of the rows"] if scan.shard else []),
            f"tasks      {scan.rows} prompts x {config.num_samples} samples = "
            f"{scan.rows * config.num_samples}",
            *(f"model      {model}" for model in models),
            f"toolsets   {_shares(plan) or 'none'} ({', '.join(names) or 'no tools'})",
            f"sandbox    {plan.sandbox or 'not needed'}",
            f"bounds     {config.max_turns} turns, {config.max_attempts} attempts",
            f"workers    {config.num_workers} x {config.agents_per_worker} conversations",
        ]
    )


def _in_words(settings: ModelSettings, weight: float | None) -> str:
    place = f" at {settings.base_url}" if settings.base_url else ", offline"
    weighed = "" if weight is None else f", weight {weight:g}"
    return f"{settings.name} ({settings.api}{place}{weighed})"


def _shares(plan: Plan) -> str:
    """The toolsets, with their percentages where each conversation draws its own."""
    drawn = plan.config.toolset_percentages()
    return ", ".join(
        name if drawn is None else f"{name} {drawn[name]:g}%" for name in plan.toolsets
    )


def run_batch(
    plan: Plan,
    run_dir: RunDir,
    *,
    only: Collection[bytes] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Outcome:
    """Work on all tasks that need work. Blocks until they end or the run is stopped.

    `only` bounds the work to the tasks with these keys; `tell` takes the messages for the user
    where something else than the progress line has the terminal.

    Raises `EnvironmentStop` where the run cannot go on.
    """
    log_to(run_dir.path / "run.log", plan.config.log_level)
    log.info("start; config digest %s\n%s", run_dir.digest, describe(plan))
    for name, server in (plan.config.mcp or {}).items():
        for tool in server.listed or ():
            log.info("mcp server %s offers %r: %r", name, tool.name, tool.description)
    hide_environment()
    allow_many_files()
    outcome = _work(plan, run_dir, only, tell)
    log.info("end; signal %s, stopped by %s", outcome.signal, outcome.stopped_by)
    log.info("calls: %s", outcome.limits)
    return outcome


def warn(plan: Plan) -> None:
    """Say what a careful user would want to know before the first call."""
    for base_url in dict.fromkeys(settings.base_url or "" for settings in asked(plan.setups)):
        url = urlsplit(base_url)
        if url.scheme == "http" and url.hostname and not _is_near(url.hostname):
            say(
                f"warning: {base_url} is not encrypted: whoever is on the way can read the API "
                "key, the prompts and the replies; use https"
            )


def _is_near(host: str) -> bool:
    """Whether what is sent to `host` stays on this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def refuse_bad_rows(plan: Plan) -> None:
    """Name the bad rows; raise `DatasetError` if the config says that there may be none."""
    show_bad_rows(plan.scan)
    if plan.config.on_bad_row == "fail" and plan.scan.all_bad:
        msg = (
            f"{plan.scan.path}: {plan.scan.all_bad} bad rows and --on_bad_row fail; "
            "no model call was made"
        )
        raise DatasetError(msg)


def _work(
    plan: Plan,
    run_dir: RunDir,
    only: Collection[bytes] | None,
    tell: Callable[[str], None] | None,
) -> Outcome:
    config = plan.config
    records = RecordFile(run_dir.path, run_dir.quarantine)
    failures = FailureFile(run_dir.path, run_dir.quarantine)
    inflight = Inflight(run_dir.inflight)
    ledger = Ledger(run_dir.path, run_dir.quarantine)
    progress = Progress(
        total=plan.scan.rows * config.num_samples if only is None else len(only),
        run_dir=run_dir.path,
        tell=tell,
    )
    try:
        if records.unreadable:
            progress.say(
                f"{records.unreadable} unreadable records were set aside in {run_dir.quarantine}; "
                "their tasks run again"
            )
        for row in plan.scan.bad_rows:
            failures.append_bad_row(plan.scan.path, row)
        stock = _take_stock(plan, run_dir, only, records, inflight, ledger)
        progress.found_ended(done=stock.done, failed=stock.failed, cost_usd=stock.cost_usd)
        if (config := with_open_batches(config, run_dir, stock.settled)) is not plan.config:
            plan = replace(plan, config=config)
            progress.say("calls in batches of earlier starts are waited for; all others go live")
        with (
            closing(open_executor(config, run_dir)) as executor,
            closing(Waves(config, plan.setups, run_dir, stock.settled)) as waves,
        ):
            supervisor = Supervisor(
                run_dir=run_dir,
                config=config,
                executor=executor,
                setups=plan.setups,
                setup=_worker_setup(plan, run_dir, has_answers=stock.has_answers),
                spent=stock.spent,
                ledger=ledger,
                tasks=tasks_at(plan.scan, stock.owed),
                records=records,
                failures=failures,
                inflight=inflight,
                progress=progress,
                waves=waves,
            )
            with _signals_to(supervisor) as received:
                stopped_by = supervisor.run()
        _remove_what_is_settled(run_dir, config.max_attempts)
    except DatasetChanged:
        # Or what is kept of its scan is not what this program would find.
        (run_dir.path / NAME).unlink(missing_ok=True)
        raise
    finally:
        progress.close()
        records.close()
        failures.close()
        ledger.close()
    return Outcome(
        signal=received[0] if received else None,
        stopped_by=stopped_by or None,
        limits=supervisor.limits.report(),
        is_out_of_budget=supervisor.is_out_of_budget,
    )


class _Stock(NamedTuple):
    """What a run has and still owes when a start begins."""

    settled: Settled
    """The tasks that need no more work."""
    owed: array[int]
    """The numbers of the tasks that need work, in dataset order."""
    done: int
    failed: int
    """Those that failed for good."""
    has_answers: bool
    """An endpoint has answered in an earlier start."""
    spent: Amount
    """What of the budget is used up; nothing where there is none."""
    cost_usd: float
    """What the records cost, as far as that is known."""


def _take_stock(
    plan: Plan,
    run_dir: RunDir,
    only: Collection[bytes] | None,
    records: RecordFile,
    inflight: Inflight,
    ledger: Ledger,
) -> _Stock:
    """Look at all records once; remove what is left of settled tasks, and read the journals."""
    scan, max_attempts = plan.scan, plan.config.max_attempts
    found = records.take_found()
    settled = Settled(found, max_attempts)
    inflight.read(settled=settled)
    _remove_workspaces(run_dir, settled)
    spent = Amount()
    if budget_of(plan.config) is not None:
        spent = spent_before((entry for _, entry in found.records()), inflight, ledger)
    rows, _ = found.match(scan.keys)
    owed = array("I")
    counts = Counter[bool]()
    for number, status in enumerate(found.statuses(rows)):
        if only is not None and scan.key(number) not in only:
            continue
        is_failed = status == "failed"
        if status is None or (
            is_failed and not is_settled(found.entry(rows[number]), max_attempts)
        ):
            owed.append(number)
        else:
            counts[is_failed] += 1
    return _Stock(
        settled, owed, counts[False], counts[True], found.has_turns(), spent, found.known_cost_usd()
    )


def show_bad_rows(scan: Scan) -> None:
    """Name bad rows on standard error, the first ones each, the rest by their number."""
    for row in scan.bad_rows[:_BAD_ROWS_SHOWN]:
        say(f"{scan.path}:{row.line}: skipped: {row.reason}")
    more = len(scan.bad_rows) - _BAD_ROWS_SHOWN
    if more > 0:
        say(f"{scan.path}: {more} more bad rows, all in failures.jsonl")


def _read_script(path: Path | None) -> list[ScriptedTurn] | None:
    if path is None:
        return None
    try:
        return parse_script(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, ValueError) as error:
        msg = f"{path}: {error}"
        raise ConfigError(msg) from error


def _worker_setup(plan: Plan, run_dir: RunDir, *, has_answers: bool) -> WorkerSetup:
    bounds = bounds_of(plan.config, plan.setups)
    is_proven = has_answers and run_dir.same_endpoints and len(bounds) == 1
    return WorkerSetup(
        number=0,
        parent_pid=os.getpid(),
        run_dir=run_dir.path,
        config=plan.config,
        api=plan.api,
        provenance=Provenance(
            sandbox=plan.sandbox,
            seed=plan.config.seed,
            config_digest=run_dir.digest,
            versions=run_dir.versions,
        ),
        script=plan.script,
        bounds=bounds,
        budget=budget_of(plan.config),
        # Of several endpoints nobody knows which one answered.
        proven=frozenset(map(url_of, bounds)) if is_proven else frozenset(),
    )


def _remove_what_is_settled(run_dir: RunDir, max_attempts: int) -> None:
    """Remove what workers that died left of conversations that have ended since."""
    if any(run_dir.workspaces.iterdir()) or segments(run_dir.inflight):
        settled = Settled(load_index(run_dir.path), max_attempts)
        _remove_workspaces(run_dir, settled)
        Inflight(run_dir.inflight).read(settled=settled)


def _remove_workspaces(run_dir: RunDir, settled: Container[bytes]) -> None:
    """Remove what a crash left between a durable record and the end of its workspace.

    Names that are not ours and directories that resist are left and logged.
    """
    for path in run_dir.workspaces.iterdir():
        try:
            if path.name.startswith(TEMPORARY):
                path.unlink()
            elif bytes.fromhex(path.name.removesuffix(".half")) in settled:
                remove_tree(path)
        except (ValueError, OSError) as error:
            log.warning("left alone: %s: %s", path, error)


@contextmanager
def _signals_to(supervisor: Supervisor) -> Iterator[list[int]]:
    """Turn SIGINT, SIGTERM and SIGHUP into an orderly stop; gives the list of those received."""
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        supervisor.interrupt()

    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # What nohup or a shell script's background job ignores stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, on_signal)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
