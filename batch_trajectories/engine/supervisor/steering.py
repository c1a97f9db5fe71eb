"""Carries out the requests that people make of a run in progress; see `engine.control`."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from batch_trajectories.basics.errors import RunError
from batch_trajectories.basics.text import plural
from batch_trajectories.engine.control import identify_process
from batch_trajectories.engine.messages import CancelTask
from batch_trajectories.engine.supervisor.budget import RunBudget
from batch_trajectories.engine.supervisor.limits import RunLimits
from batch_trajectories.engine.supervisor.worker_pool import Start, WorkerPool
from batch_trajectories.records.files import DamagedLine, read_json, read_object
from batch_trajectories.records.names import CONTROL_FILE, LOCK_FILE
from batch_trajectories.records.records import read_lines

log = logging.getLogger(__name__)

_MAX_ANSWERS = 50
"""Maximum answers in progress.json, the latest ones; a command waits only seconds for its own."""


class _Refused(ValueError):
    """The request cannot be carried out."""


class Steering:
    """The requests that people have made of one start of a run."""

    def __init__(
        self,
        start: Start,
        pool: WorkerPool,
        limits: RunLimits,
        budget: RunBudget,
        *,
        interrupt: Callable[[], None],
    ) -> None:
        """Wait for requests; `interrupt` stops the run in order."""
        self._interrupt = interrupt
        self._path = start.run_dir.path / CONTROL_FILE
        self._process_id = identify_process(read_json(start.run_dir.path / LOCK_FILE) or {})
        self._start, self._pool, self._limits, self._budget = start, pool, limits, budget
        self._bytes_read = 0
        self._answers: dict[str, dict[str, Any]] = {}
        self._changed: dict[str, float] = {}
        """The present values of the limits that were changed in this start."""
        self.is_paused = False
        self.is_stopping = False
        """A person has stopped the run."""

    def carry_out_requests(self) -> None:
        """Carry out the requests made since the last call."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return
        if status.st_size == self._bytes_read or status.st_uid != os.geteuid():
            return
        for offset, content in read_lines(self._path, self._bytes_read):
            self._bytes_read = offset + len(content)
            try:
                line = read_object(content)
            except DamagedLine as error:
                log.warning("A line of %s cannot be read and is skipped: %s", self._path, error)
                continue
            if line.get("to") == self._process_id:
                self._answer(line)

    def _answer(self, line: Mapping[str, Any]) -> None:
        who, do = str(line.get("who")), str(line.get("do"))
        try:
            text = self._carry_out(do, line)
            is_refused = False
        except (_Refused, ValueError, RunError) as error:
            text, is_refused = str(error), True
        log.info("%s asked for `%s`. %s: %s", who, do, "Refused" if is_refused else "Done", text)
        if not is_refused:
            # A change of limits is no message to keep: progress.json has the present limits.
            self._start.progress.say(f"{text} (asked by {who})", keep=do != "limits")
        self._answers[str(self._bytes_read)] = {"text": text, "refused": is_refused}
        while len(self._answers) > _MAX_ANSWERS:
            del self._answers[next(iter(self._answers))]
        self._start.progress.set_steering(
            {"is_paused": self.is_paused, "limits": self._changed, "answers": self._answers}
        )

    def _carry_out(self, do: str, line: Mapping[str, Any]) -> str:
        match do:
            case "pause" | "resume":
                self.is_paused = do == "pause"
                self._limits.pause(is_paused=self.is_paused)
                if self.is_paused:
                    return "paused: calls in flight end, no more are made until `resume`"
                return "resumed"
            case "limits":
                return self._change_limits(line)
            case "stop":
                return self._stop(str(line.get("id")))
            case "stop_run":
                self.is_stopping = True
                self._interrupt()
                return "stopping in order; `resume` continues the run"
            case "retry":
                return self._retry()
        raise _Refused(f"{do!r} is unknown to the version of the program that works on the run")

    def _change_limits(self, line: Mapping[str, Any]) -> str:
        names = ("rpm", "max_in_flight", "concurrency", "max_run_cost_usd")
        given = {name: line[name] for name in names if line.get(name) is not None}
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise _Refused(f"{name}: {value!r} is not a number")
            if not 0 < value < math.inf:
                raise _Refused(f"{name}: must be above 0 (got {value!r})")
            if name in ("max_in_flight", "concurrency") and value < 1:
                raise _Refused(f"{name}: must be at least 1; `pause` lets no call begin")
        if "rpm" in given or "max_in_flight" in given:
            self._limits.refuse_without_endpoints()
        if "max_run_cost_usd" in given:
            self._budget.raise_to(given["max_run_cost_usd"])
        if "rpm" in given or "max_in_flight" in given:
            in_flight = given.get("max_in_flight")
            self._limits.change(given.get("rpm"), None if in_flight is None else int(in_flight))
        if "concurrency" in given:
            self._change_concurrency(int(given["concurrency"]))
        self._changed |= given
        if not given:
            raise _Refused(f"no limit is given; give {', '.join(names)}")
        changed = ", ".join(f"{name} {value:g}" for name, value in given.items())
        return f"{changed} until this start ends"

    def _change_concurrency(self, conversations: int) -> None:
        """Have each worker hold this many conversations; those in flight go on."""
        before = self._pool.conversations_per_worker
        self._pool.conversations_per_worker = conversations
        workers = self._start.config.num_workers
        self._limits.follow_conversations(before * workers, conversations * workers)

    def _retry(self) -> str:
        failed = self._start.queue.retry()
        if not failed:
            raise _Refused("no conversation has failed in this start that has an attempt left")
        self._start.inflight.add_living(failed)
        for failure in failed.values():
            self._start.progress.count_retried_task(failure)
        return f"{plural(len(failed), 'failed conversation')} queued again"

    def _stop(self, id: str) -> str:
        for worker in self._pool.workers:
            for key, (task, _) in worker.assigned.items():
                if task.id == id:
                    worker.send(CancelTask(key))
                    return f"{id} is stopped; it counts as a failed attempt (class stopped)"
        raise _Refused(f"no conversation with the id {id!r} is in flight")
