"""Server-sent events, made from the files of the runs: nothing asks the processes that work."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
from aiohttp import web

from batch_trajectories.basics.errors import RunError
from batch_trajectories.view import conversation as live
from batch_trajectories.view.guard import HEADERS, AccessRefused
from batch_trajectories.view.runs import NoSuchRun, run_json
from batch_trajectories.view.state import State

_EVERY_S = 1.0
_QUIET_S = 15.0
_RESTS = 5
"""Journals are read again after so many times as long as that takes."""
_MAX_STREAMS = 64
_MAX_IN_FLIGHT = 200

_streams = 0


async def events(request: web.Request, state: State) -> web.StreamResponse:
    """Answer with events until the page is closed."""
    global _streams
    if _streams >= _MAX_STREAMS:
        raise AccessRefused(409, f"{_MAX_STREAMS} pages are open already; close one")
    response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
    await response.prepare(request)
    watch = _Watch(state, request.query.get("run"), request.query.get("id"))
    _streams += 1
    quiet = 0.0
    try:
        while True:
            found = await asyncio.to_thread(watch.changes)
            content = b"".join(
                b"event: %s\ndata: %s\n\n" % (kind.encode(), orjson.dumps(data))
                for kind, data in found
            )
            quiet = 0.0 if content else quiet + _EVERY_S
            if quiet >= _QUIET_S:
                content, quiet = b": still here\n\n", 0.0
            if content:
                await response.write(content)
            await asyncio.sleep(_EVERY_S)
    except (ConnectionError, asyncio.CancelledError):
        return response
    finally:
        _streams -= 1


class _Watch:
    """The state that one page was sent."""

    def __init__(self, state: State, run: str | None, id: str | None) -> None:
        self._state, self._run, self._id = state, run, id
        self._told: dict[tuple[str, str], Any] = {}
        self._runs: set[str] = set()
        self._journals: Any = None
        self._rests_until = 0.0

    def changes(self) -> list[tuple[str, Any]]:
        """The events since the last call."""
        found = [*self._list_events()]
        if self._run is not None:
            try:
                found += self._run_events(self._run)
            except (NoSuchRun, RunError, OSError) as error:
                found += self._new("problem", self._run, {"error": str(error)})
        return found

    def _list_events(self) -> list[tuple[str, Any]]:
        found = []
        self._state.places.bring_mirrors()
        runs = {run.key: run for run in self._state.places.runs()}
        for key, run in runs.items():
            found += self._new("run", key, run_json(run))
        for key in self._runs - runs.keys():
            self._told.pop(("run", key), None)
            found.append(("gone", {"key": key}))
        self._runs = set(runs)
        if self._run is None:  # the list of runs is looked at
            self._state.health.begin_next(runs.values())
        return found

    def _run_events(self, key: str) -> list[tuple[str, Any]]:
        run = self._state.open(key)
        table = run.index.refresh()
        found = self._new("index", key, run.index.to_json())
        found += self._new("text", key, run.texts.read_state()) if run.texts.state else []
        facts, why = run.facts()
        as_of = None if facts is None else facts["as_of"]
        found += self._new("facts", key, {"as_of": as_of, "error": why})
        run.labels.refresh()
        found += self._new("labels", key, {"version": run.version, "size": run.labels.size})
        journals = live.signature(run.place.path)
        began = time.monotonic()
        if journals == self._journals or began < self._rests_until:
            return found
        self._journals = journals
        flying = live.in_flight(run.place, table)
        data = {"conversations": flying[:_MAX_IN_FLIGHT], "count": len(flying)}
        found += self._new("in_flight", key, data)
        if self._id is not None:
            found += self._new("live", key, live.conversation(run.place, table, self._id))
        self._rests_until = time.monotonic() + _RESTS * (time.monotonic() - began)
        return found

    def _new(self, kind: str, key: str, data: Any) -> list[tuple[str, Any]]:
        if self._told.get((kind, key)) == data:
            return []
        self._told[kind, key] = data
        return [(kind, data)]
