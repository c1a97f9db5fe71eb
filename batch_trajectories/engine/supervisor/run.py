"""One start of a run, from its plan to workers that have ended."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from agent.models.model import endpoint_url
from batch_trajectories.basics.console import hide_progress
from batch_trajectories.basics.errors import DatasetChanged, RunLocked
from batch_trajectories.basics.process import (
    allow_many_files,
    hide_environment,
    log_to,
    restore_settings,
)
from batch_trajectories.basics.text import first_few
from batch_trajectories.config.endpoints import Cost
from batch_trajectories.config.models import endpoint_limits, run_budget, uses_key_command
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.config.sandboxes import has_overlays, remove_leftover_containers
from batch_trajectories.dataset.scan import Scan, tasks
from batch_trajectories.dataset.shards import parse_shard
from batch_trajectories.engine.executor_choice import open_executor
from batch_trajectories.engine.features import find_feature
from batch_trajectories.engine.messages import WorkerSetup
from batch_trajectories.engine.plan import Plan, describe, list_refused_wishes
from batch_trajectories.engine.record import Provenance
from batch_trajectories.engine.run_dir import RunDir
from batch_trajectories.engine.supervisor.budget import (
    BudgetLog,
    RunBudget,
    set_aside_damaged,
    sum_up_earlier_starts,
)
from batch_trajectories.engine.supervisor.limits import RunLimits, describe_calls
from batch_trajectories.engine.supervisor.progress import Progress
from batch_trajectories.engine.supervisor.refusals import Refusals
from batch_trajectories.engine.supervisor.run_watch import WhyRejected
from batch_trajectories.engine.supervisor.supervisor import Supervisor
from batch_trajectories.engine.supervisor.worker_pool import CallCollector, Start, TaskQueue
from batch_trajectories.records.failures import FailureFile, Settled, is_settled
from batch_trajectories.records.files import has_batches, list_directory
from batch_trajectories.records.journal import Inflight, segments
from batch_trajectories.records.names import DATASET_INDEX, LOG_FILE
from batch_trajectories.records.records import RecordFile, load_index
from batch_trajectories.records.tasks import Task
from toolsets.workspace.removal import remove_tree
from toolsets.workspace.workspace import TEMPORARY

if TYPE_CHECKING:
    from batch_trajectories.engine.shared_limits import SharedLimits
    from batch_trajectories.engine.stopping import Opening
    from batch_trajectories.engine.supervisor.key_service import KeyService

log = logging.getLogger(__name__)

_one_at_a_time = threading.Lock()


class Outcome(msgspec.Struct, frozen=True):
    """The end of a start."""

    signal: int | None = None
    """The signal that stopped the start; None if none did."""
    stopped_by: str | None = None
    """The reason why the environment or the budget stopped the start; None if neither did."""
    limits: Sequence[Mapping[str, Any]] = ()
    """The limits on the model calls; see `RunLimits.report`."""
    is_out_of_budget: bool = False
    """The budget of the run stopped the start."""
    is_hopeless: bool = False
    """A rule of `--stop_if` stopped the start."""

    def describe(self) -> str:
        """A sentence about the end of the start, for run.log."""
        if self.stopped_by is not None:
            return f"The start ends early: {self.stopped_by}"
        if self.signal is not None:
            return (
                f"The start ends early, because the signal {signal.Signals(self.signal).name} came."
            )
        return "The start ends, because all its tasks have ended."

    def to_json(self) -> dict[str, Any]:
        """The values for summary.json."""
        return {"stopped_by": self.stopped_by, "signal": self.signal, "calls": list(self.limits)}


def run_batch(
    plan: Plan,
    run_dir: RunDir,
    *,
    only: Collection[bytes] | None = None,
    tell: Callable[[str], object] | None = None,
    why_rejected: WhyRejected | None = None,
) -> Outcome:
    """Work on all tasks that need work. Blocks until they end or the run is stopped.

    `only` limits the work to the tasks with these keys. `tell` gets the messages for the user;
    without it they are printed, with a progress line. `why_rejected` says of a record why it
    gives no training row.

    Raises `EnvironmentStop` if the run cannot continue, and `RunLocked` if this process is working
    on another run: both would change log, limits and environment of the process.
    """
    if not _one_at_a_time.acquire(blocking=False):
        raise RunLocked(
            f"{run_dir.path}: this process is working on another run; start this one after it"
        )
    try:
        # With `tell`, the terminal belongs to the caller.
        with restore_settings(), nullcontext() if tell is None else hide_progress():
            return _run_batch(plan, run_dir, only, tell, why_rejected)
    finally:
        _one_at_a_time.release()


def _run_batch(
    plan: Plan,
    run_dir: RunDir,
    only: Collection[bytes] | None,
    tell: Callable[[str], object] | None,
    why_rejected: WhyRejected | None,
) -> Outcome:
    log_to(run_dir.path / LOG_FILE, plan.config.log_level)
    log.info("A start of the run begins; the digest of its config is %s.", run_dir.digest)
    for line in describe(plan).split("\n"):
        what, _, value = line.partition(" ")
        log.info("Its %s: %s", what, value.strip())
    for name, server in (plan.config.mcp or {}).items():
        for tool in server.listed or ():
            log.info(
                "The MCP server %s offers the tool %r, described as %r.",
                name,
                tool.name,
                tool.description,
            )
    for wish in list_refused_wishes(plan):
        log.warning("%s", wish)
    hide_environment()
    allow_many_files()
    try:
        outcome = _work(plan, run_dir, only, tell, why_rejected)
    except DatasetChanged:
        (run_dir.path / DATASET_INDEX).unlink(missing_ok=True)
        raise
    for calls in outcome.limits:
        log.info("Calls of this start: %s", describe_calls(calls))
    log.info("%s", outcome.describe())
    return outcome


def _work(
    plan: Plan,
    run_dir: RunDir,
    only: Collection[bytes] | None,
    tell: Callable[[str], object] | None,
    why_rejected: WhyRejected | None,
) -> Outcome:
    with ExitStack() as stack:
        stores = _open_stores(stack, run_dir)
        progress = _open_progress(stack, plan, run_dir, only, tell)
        _report_damage(stores, run_dir, progress)
        for row in plan.scan.bad_rows:
            stores.failures.append_bad_row(plan.config.dataset_file, row)
        state = _load_state(plan, run_dir, only, stores)
        _show_ended(state, progress)
        is_new = plan.config.batch_api
        plan = _continue_batches(plan, run_dir, stores, state, progress)
        with ExitStack() as services:
            start = _open_start(services, plan, run_dir, stores, state, progress, is_new=is_new)
            supervisor = Supervisor(start, why_rejected=why_rejected)
            del state, start  # frees the memory of the index
            with _forward_signals(supervisor) as received:
                stopped_by = supervisor.run()
        _remove_leftovers(plan.config, run_dir, supervisor)
    if supervisor.was_stopped_by_person:  # `stop RUN` ends a run as Ctrl-C does
        received.append(int(signal.SIGINT))
    return Outcome(
        signal=received[0] if received else None,
        stopped_by=stopped_by or None,
        limits=supervisor.limits.report(),
        is_out_of_budget=supervisor.is_out_of_budget,
        is_hopeless=supervisor.is_hopeless,
    )


class _Stores(NamedTuple):
    """The files that a start appends to, and the journals that it reads."""

    records: RecordFile
    failures: FailureFile
    inflight: Inflight
    budget_log: BudgetLog
    earlier: EarlierBatches | None
    """The batches of earlier starts; None if they made none."""
    damaged: list[str]
    """Names of the lines that were set aside because they cannot be read."""


def _open_stores(stack: ExitStack, run_dir: RunDir) -> _Stores:
    records = stack.enter_context(closing(RecordFile(run_dir.path, run_dir.quarantine)))
    damaged = set_aside_damaged(run_dir.path)
    if (earlier := _earlier_batches(run_dir)) is not None:
        damaged += earlier.set_aside_damaged_steps(run_dir.path)
    failures = stack.enter_context(closing(FailureFile(run_dir.path, run_dir.quarantine)))
    inflight = Inflight(run_dir.inflight, damaged=damaged)
    budget_log = stack.enter_context(closing(BudgetLog(run_dir.path, run_dir.quarantine)))
    return _Stores(
        records=records,
        failures=failures,
        inflight=inflight,
        budget_log=budget_log,
        earlier=earlier,
        damaged=damaged,
    )


def _open_progress(
    stack: ExitStack,
    plan: Plan,
    run_dir: RunDir,
    only: Collection[bytes] | None,
    tell: Callable[[str], object] | None,
) -> Progress:
    config = plan.config
    progress = Progress(
        total=plan.scan.tasks if only is None else len(only),
        run_dir=run_dir.path,
        tell=tell,
        tasks="steps" if config.audit else "tasks",
        turns=None if config.audit or config.checked_run else "turns",
    )
    stack.callback(progress.close)
    return progress


def _report_damage(stores: _Stores, run_dir: RunDir, progress: Progress) -> None:
    """Tell the user which records and lines were set aside."""
    if unreadable := stores.records.unreadable:
        progress.say(
            f"{len(unreadable)} unreadable records were set aside in "
            f"{run_dir.quarantine}: {first_few(unreadable)}; their tasks run again"
        )
    if stores.damaged:
        progress.say(
            f"{len(stores.damaged)} damaged lines were set aside in {run_dir.quarantine}: "
            f"{first_few(stores.damaged)}; they do not count"
        )


def _show_ended(state: RunState, progress: Progress) -> None:
    """Count what earlier starts have finished."""
    if state.opening is not None:  # the other samples are not needed, so far
        known = state.done + state.failed + len(state.remaining)
        progress.add_tasks(known - progress.left)
    if state.done or state.failed:
        cost = f", ${state.cost_usd:,.2f} spent" if state.cost_usd else ""
        progress.say(
            f"resuming: {state.done + state.failed:,} done, {len(state.remaining):,} to continue"
            f"{cost}",
            keep=False,
        )
    progress.count_earlier_tasks(
        done=state.done,
        failed=state.failed,
        passed=state.passed,
        not_passed=state.not_passed,
        cost_usd=state.cost_usd,
    )


def _continue_batches(
    plan: Plan, run_dir: RunDir, stores: _Stores, state: RunState, progress: Progress
) -> Plan:
    """Return the plan with `batch_api` on if earlier starts have open batches to wait for."""
    if (
        stores.earlier is None
        or plan.config.batch_api
        or not stores.earlier.has_open_batches(run_dir.path, run_dir.quarantine, state.settled)
    ):
        return plan
    progress.say("waiting for the batches of earlier starts; all other calls are made live")
    return replace(plan, config=plan.config.model_copy(update={"batch_api": True}))


def _open_start(
    stack: ExitStack,
    plan: Plan,
    run_dir: RunDir,
    stores: _Stores,
    state: RunState,
    progress: Progress,
    *,
    is_new: bool,
) -> Start:
    """Open what the supervisor works with; `is_new`: calls may go into new batches."""
    config = plan.config
    executor = stack.enter_context(closing(open_executor(config, run_dir)))
    keys = _open_keys(stack, plan)
    if config.pulls_images and config.executor == "local":
        ahead = find_feature("images_ahead")(config, plan.scan, state.remaining, run_dir.path)
        stack.callback(ahead.close)
    batches: CallCollector | None = None
    if config.batch_api:
        batches = find_feature("batch_api")(
            config, plan.setups, run_dir, state.settled, is_new=is_new
        )
        assert batches is not None
        stack.callback(batches.close)
    shared = _shared_limits(config, run_dir, progress)
    limits = endpoint_limits(config, plan.setups)
    budget = RunBudget(
        run_budget(config), spent=state.spent, budget_log=stores.budget_log, shared=shared
    )
    stack.callback(budget.close)
    return Start(
        run_dir=run_dir,
        config=config,
        executor=executor,
        setups=plan.setups,
        setup=_worker_setup(plan, run_dir, has_answers=state.has_answers),
        limits=RunLimits(limits, shared),
        budget=budget,
        reserved=state.reserved,
        queue=_queue(plan, state, stores.failures),
        records=stores.records,
        failures=stores.failures,
        inflight=stores.inflight,
        progress=progress,
        batches=batches,
        keys=keys,
        refusals=Refusals(limits, has_answered=state.has_answers and run_dir.same_endpoints),
    )


def _open_keys(stack: ExitStack, plan: Plan) -> KeyService | None:
    """Run the key commands in this process; None if there are none or the workers run them."""
    if plan.config.executor != "local" or not uses_key_command(plan.setups):
        return None
    from batch_trajectories.engine.supervisor.key_service import KeyService  # few runs use one

    return stack.enter_context(closing(KeyService(plan.setups)))


def _remove_leftovers(config: RunConfig, run_dir: RunDir, supervisor: Supervisor) -> None:
    if supervisor.is_dataset_changed:
        # Or the cached scan is wrong; in both cases the next start scans again.
        (run_dir.path / DATASET_INDEX).unlink(missing_ok=True)
    _remove_what_is_settled(run_dir, config.max_attempts)
    remove_leftover_containers(config)


def _shared_limits(config: RunConfig, run_dir: RunDir, progress: Progress) -> SharedLimits | None:
    if config.shared_limits is None:
        return None
    from batch_trajectories.engine.shared_limits import SharedLimits  # most runs have none

    parts = 1 if config.shard is None else parse_shard(config.shard).count
    limit = run_budget(config) or Cost()
    return SharedLimits(config.shared_limits, run_dir.path, limit, parts=parts, say=progress.say)


def _find_tasks(scan: Scan, keys: Container[bytes]) -> Iterator[Task]:
    return tasks(scan, [number for number in range(scan.tasks) if scan.key(number) in keys])


def _queue(plan: Plan, state: RunState, failures: FailureFile) -> TaskQueue:
    find = partial(_find_tasks, plan.scan)
    if state.opening is None:
        return TaskQueue(tasks(plan.scan, state.remaining), failures.deaths, find=find)
    first = state.opening.begin(state.remaining)
    return TaskQueue(first, failures.deaths, find=find, opening=state.opening)


class EarlierBatches(Protocol):
    """Reads the batches that earlier starts of a run have made at the provider."""

    def set_aside_damaged_steps(self, run_dir: Path, /) -> list[str]:
        """Move unreadable lines of `batches.jsonl` to the quarantine; return their names."""
        ...

    def free_unsent(self, run_dir: Path, quarantine: Path, /) -> list[Cost]:
        """Void jobs that were never sent; return the amounts reserved for their calls."""
        ...

    def load_reserved(
        self, run_dir: Path, settled: Container[bytes], /
    ) -> dict[bytes, dict[str, Cost]]:
        """Return amounts that are reserved for calls without an answer, by task and call."""
        ...

    def has_open_batches(
        self, run_dir: Path, quarantine: Path, settled: Container[bytes], /
    ) -> bool:
        """Whether a batch has calls of tasks that are not `settled`."""
        ...


def _earlier_batches(run_dir: RunDir) -> EarlierBatches | None:
    """Return the reader of the batches that earlier starts made; None if they made none."""
    if not has_batches(run_dir.path):
        return None
    reader: EarlierBatches = find_feature("batch_api_log")
    return reader


class RunState(NamedTuple):
    """Finished and remaining work when a start begins."""

    settled: Settled
    """The tasks that need no more work."""
    remaining: array[int]
    """The numbers of the tasks that need work, in dataset order."""
    done: int
    failed: int
    """Tasks that failed and are not retried."""
    passed: int
    not_passed: int
    """Tasks that passed, or did not."""
    has_answers: bool
    """An endpoint has answered in an earlier start."""
    spent: Cost
    """The part of the budget that is spent; 0 without a budget."""
    reserved: dict[bytes, dict[str, Cost]]
    """The part of `spent` that is reserved for unfinished batch calls, by task key and call id."""
    cost_usd: float
    """Dollars that the run has spent, as far as known."""
    opening: Opening | None
    """Opens the samples that follow from how others end; None if all tasks remain."""


def _load_state(
    plan: Plan, run_dir: RunDir, only: Collection[bytes] | None, stores: _Stores
) -> RunState:
    """Match records and tasks, remove leftovers of settled tasks, and read the journals."""
    scan, config, inflight = plan.scan, plan.config, stores.inflight
    index = stores.records.take_index()
    settled = Settled(index, config.max_attempts)
    inflight.read(settled=settled)
    _remove_workspaces(run_dir, settled)
    remove_leftover_containers(config)
    reserved = _free_unsent_calls(config, run_dir, stores, settled)
    spent = Cost()
    if run_budget(config) is not None:
        amounts = [amount for by_call in reserved.values() for amount in by_call.values()]
        stored = (entry for _, entry in index.records())
        spent = sum_up_earlier_starts(stored, inflight, stores.budget_log, held=amounts)
    rows, _ = index.match(scan.keys)
    samples = opening = None
    if config.until_passed is not None:
        from batch_trajectories.engine.stopping import (
            ModelBudgets,
            Opening,
            read_samples,
            stopping_rule,
        )

        samples = read_samples(run_dir.path, config, scan, index, rows, begun={*inflight.tasks()})
        budgets = ModelBudgets(config.model_budgets or {}, run_dir.path)
        opening = Opening(stopping_rule(config), scan, samples.outcomes, only=only, budgets=budgets)
    remaining = array("I")
    counts = Counter[bool]()
    passed = Counter[bool | None]()
    outcomes = zip(index.endings(rows), index.passed(rows), strict=True)
    for number, (ending, has_passed) in enumerate(outcomes):
        if only is not None and scan.key(number) not in only:
            continue
        is_failed = ending is not None and ending.status == "failed"
        if ending is None or (
            is_failed and not is_settled(index.entry(rows[number]), config.max_attempts)
        ):
            if samples is None or samples.must_run(number):
                remaining.append(number)
        else:
            counts[is_failed] += 1
            passed[has_passed] += 1
    return RunState(
        settled=settled,
        remaining=remaining,
        done=counts[False],
        failed=counts[True],
        passed=passed[True],
        not_passed=passed[False],
        has_answers=index.has_turns(),
        spent=spent,
        reserved=reserved,
        cost_usd=index.costs()[0] + inflight.paid_usd,
        opening=opening,
    )


def _free_unsent_calls(
    config: RunConfig, run_dir: RunDir, stores: _Stores, settled: Settled
) -> dict[bytes, dict[str, Cost]]:
    """Free the budget of batch calls that were never sent; return what others reserve.

    Amounts by task key and call id; none without a budget.
    """
    if stores.earlier is None:
        return {}
    # Freed first: after a crash between the two the amount stays granted, never freed twice.
    if freed := stores.earlier.free_unsent(run_dir.path, run_dir.quarantine):
        stores.budget_log.append("returned", sum(freed, Cost()))
    if run_budget(config) is None:
        return {}
    return stores.earlier.load_reserved(run_dir.path, settled)


def _worker_setup(plan: Plan, run_dir: RunDir, *, has_answers: bool) -> WorkerSetup:
    limits = endpoint_limits(plan.config, plan.setups)
    # With several endpoints it is unknown which one has answered.
    is_proven = has_answers and run_dir.same_endpoints and len(limits) == 1
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
        images=run_dir.images,
        has_overlays=plan.sandbox is not None
        and plan.config.executor == "local"  # other machines have other kernels
        and has_overlays(plan.config),
        script=plan.script,
        limits=limits,
        budget=run_budget(plan.config),
        proven=frozenset(map(endpoint_url, limits)) if is_proven else frozenset(),
        run_key=run_dir.key,
        start=secrets.token_hex(8),
    )


def _remove_what_is_settled(run_dir: RunDir, max_attempts: int) -> None:
    """Remove files that dead workers left of conversations that have ended since."""
    if list_directory(run_dir.workspaces) or segments(run_dir.inflight):
        settled = Settled(load_index(run_dir.path), max_attempts)
        _remove_workspaces(run_dir, settled)
        Inflight(run_dir.inflight).read(settled=settled)


def _remove_workspaces(run_dir: RunDir, settled: Container[bytes]) -> None:
    """Remove workspaces of settled tasks, left by a crash after the record was written.

    Keeps and logs files with other names and directories that cannot be removed.
    """
    for path in list_directory(run_dir.workspaces):
        try:
            name, _, _ = path.name.partition(".")
            if path.name.startswith(TEMPORARY) or bytes.fromhex(name) in settled:
                remove_tree(path)
        except (ValueError, OSError) as error:
            log.warning("The workspace %s is not needed but could not be removed: %s", path, error)


@contextmanager
def _forward_signals(supervisor: Supervisor) -> Iterator[list[int]]:
    """Turn SIGINT, SIGTERM and SIGHUP into an orderly stop; yields the list of received signals.

    Works only in the main thread; elsewhere the caller handles signals.
    """
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        supervisor.interrupt()

    before = {}
    is_main = threading.current_thread() is threading.main_thread()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if is_main else ():
        # Signals that nohup or a background job of a shell ignores stay ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, on_signal)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
