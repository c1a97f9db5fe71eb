"""The parent's side of batches, in an event loop of its own: calls come in, waves go out.

Nothing is paid twice because every step is on disk before the next (see `wave_ledger`), and
because a call that may be in a batch is never asked elsewhere until that is decided.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agent.models.batches.base import ItemResult
from agent.models.errors import RULES, ModelError
from runs.batch_api.delivery import WaveCourier
from runs.batch_api.ledger import Wave, WaveLedger
from runs.errors import EnvironmentStop
from runs.store.files import AppendFile
from runs.worker.batch_api_model import task_of
from toolsets.errors import HostError, machine_failure

log = logging.getLogger(__name__)

Reply = Callable[[str, str, bytes], None]
"""Answers a call: its id, how (see `Answer`), and the reply."""

_QUIET_S = 0.3
"""All wait, and for so long nobody has joined: the wave is complete."""

_ANSWERS, _ANSWERS_S = 500, 0.05
"""So many answers go out at a time."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """When a wave is closed, beside when nobody can join it any more."""

    wait_s: float
    max_requests: int


@dataclass
class _Gathering:
    """A wave that calls are still joining."""

    wave: Wave
    file: AppendFile
    began: float = field(default_factory=time.monotonic)


class WaveOffice:
    """Gathers calls, sees their batches through, and answers. All calls belong to one loop."""

    def __init__(
        self,
        ledger: WaveLedger,
        waves: Iterable[Wave],
        couriers: Mapping[str, WaveCourier],
        bounds: Bounds,
        *,
        on_problem: Callable[[str], None],
    ) -> None:
        """`waves` are those of earlier starts; `couriers` by `name_of`.

        `on_problem` stops the run.
        """
        self._ledger = ledger
        self._couriers = couriers
        self._bounds = bounds
        self._on_problem = on_problem
        self._waves: set[Wave] = set()
        self._wave_of: dict[str, Wave] = {}
        self._calls_of: defaultdict[bytes, set[str]] = defaultdict(set)
        self._waiting: dict[str, Reply] = {}
        self._waiting_of: defaultdict[bytes, set[str]] = defaultdict(set)
        self._gathering: dict[str, _Gathering] = {}
        self._working: dict[asyncio.Task[None], Wave] = {}
        self._joined_at = 0.0
        self._is_tail = self._is_stopping = False
        self.live = 0
        """Calls that were sent live."""
        self.in_batches = (0, 0)
        """How many calls are in batches that are not over, and how many such batches there are."""
        for wave in waves:
            self._take_up(wave)

    def ask(
        self, id: str, model: str, body: bytes, reply: Reply, most: list[Any] | None = None
    ) -> None:
        """A worker wants a call made, and has set `most` aside for it if there is a budget."""
        if self._is_stopping:
            return
        self._waiting[id] = reply
        self._waiting_of[task_of(id)].add(id)
        self._joined_at = time.monotonic()
        wave = self._wave_of.get(id)
        if wave is not None:
            self._answer(wave, id)
        elif self._is_tail:
            self._send(id, "live")
        else:
            self._gather(id, model, body, most)

    def leave(self, task: bytes) -> None:
        """Nobody waits for the calls of a task any more."""
        for id in self._waiting_of.pop(task, ()):
            self._waiting.pop(id, None)

    def forget(self, task: bytes) -> None:
        """A task has its record: its calls are never asked again."""
        self.leave(task)
        for id in self._calls_of.pop(task, ()):
            wave = self._wave_of.pop(id)
            wave.index.pop(id, None)
            wave.needed -= 1
            if not wave.needed and wave.state in ("collected", "failed"):
                self._ledger.remove(wave)
                self._waves.discard(wave)

    def tick(self, held: int | None, *, is_tail: bool) -> None:
        """Close the waves that are complete.

        `held` is how many tasks the workers have, None while more of them are starting. With
        `is_tail` the run is so near its end that what comes now is asked live.
        """
        under_way = [wave for wave in self._waves if wave.state in ("sending", "created")]
        self.in_batches = (sum(len(wave.ids) for wave in under_way), len(under_way))
        now = time.monotonic()
        if self._is_stopping:
            return
        if is_tail and not self._is_tail:
            self._is_tail = True
            for gathering in list(self._gathering.values()):
                self._drop(gathering)
                self._let_go(gathering.wave, "live")
        waiting = sum(map(bool, self._waiting_of.values()))
        is_complete = waiting == held and now - self._joined_at >= _QUIET_S
        for gathering in list(self._gathering.values()):
            if is_complete or now - gathering.began >= self._bounds.wait_s:
                self._close(gathering)

    def stop(self) -> None:
        """Send nothing that has not been sent."""
        self._is_stopping = True
        for gathering in list(self._gathering.values()):
            self._drop(gathering)
            if gathering.wave.most:
                self._note_gathered(gathering.wave)  # the next start gives back what is set aside
        for task, wave in self._working.items():
            if wave.state == "gathered":
                task.cancel()

    async def close(self, wait_s: float) -> None:
        """Wait `wait_s` at most for creations under way, so that their ids get known; then end."""
        self.stop()
        creating = [task for task, wave in self._working.items() if wave.state == "sending"]
        deadline = time.monotonic() + wait_s
        while creating and time.monotonic() < deadline:
            await asyncio.wait(creating, timeout=0.05)
            creating = [
                task
                for task in creating
                if not task.done() and self._working[task].state == "sending"
            ]
        for task in self._working:
            task.cancel()
        await asyncio.gather(*self._working, return_exceptions=True)
        for courier in self._couriers.values():
            await courier.api.close()
        if self.live:
            self._ledger.note_live(self.live)
        self._ledger.close()

    # Gathering.

    def _gather(self, id: str, model: str, body: bytes, most: list[Any] | None) -> None:
        courier = self._couriers[model]
        api = courier.api
        gathering = self._gathering.get(model)
        room = min(self._bounds.max_requests, courier.most)
        line = api.line(gathering.wave.sent_id(id) if gathering else id, body)
        if gathering is not None and (
            len(gathering.wave.ids) >= room or gathering.file.size + len(line) > api.max_bytes
        ):
            self._close(gathering)
            gathering = None
        if gathering is None:
            wave = Wave(secrets.token_hex(4), model, [])
            gathering = _Gathering(wave, AppendFile(self._ledger.items_file(wave)))
            self._gathering[model] = gathering
            self._waves.add(wave)
            line = api.line(wave.sent_id(id), body)
        gathering.file.append(line)
        gathering.wave.ids.append(id)
        gathering.wave.needed += 1
        if most is not None:
            gathering.wave.most.append(most)
        self._know(id, gathering.wave)

    def _close(self, gathering: _Gathering) -> None:
        """Send a wave, if all its calls are still wanted; else those that are gather anew."""
        wave = gathering.wave
        del self._gathering[wave.model]
        gathering.file.close()
        if not all(id in self._waiting for id in wave.ids):
            self._ledger.remove(wave)
            self._let_go(wave, "again")
            return
        wave.size = gathering.file.size
        self._note_gathered(wave)
        self._work(wave)

    def _note_gathered(self, wave: Wave) -> None:
        most = {"most": wave.most} if wave.most else {}
        self._ledger.note(wave, "gathered", model=wave.model, items=wave.ids, **most)

    def _drop(self, gathering: _Gathering) -> None:
        """Forget a wave of which nothing was sent."""
        del self._gathering[gathering.wave.model]
        gathering.file.close()
        self._ledger.remove(gathering.wave)

    def _know(self, id: str, wave: Wave) -> None:
        self._wave_of[id] = wave
        self._calls_of[task_of(id)].add(id)

    def _let_go(self, wave: Wave, how: str) -> None:
        """The calls of a wave belong to it no longer."""
        self._waves.discard(wave)
        for id in wave.ids:
            if self._wave_of.get(id) is wave:
                del self._wave_of[id]
                self._calls_of[task_of(id)].discard(id)
            self._send(id, how)

    # Answering.

    def _answer(self, wave: Wave, id: str) -> None:
        """Answer a call of a wave that is waited for, if it is decided."""
        if wave.state not in ("collected", "failed") or id not in self._waiting:
            return
        result = ItemResult(id, None, wave.why)
        if wave.state == "collected":
            result = self._ledger.result(wave, id)
        if result.reply is None:
            log.info("%s: asked live: %s", id, result.why)
            self._send(id, "live")
        else:
            self._send(id, "reply", result.reply)

    def _send(self, id: str, how: str, reply: bytes = b"") -> None:
        if (answer := self._waiting.pop(id, None)) is not None:
            self._waiting_of[task_of(id)].discard(id)
            self.live += how == "live"
            answer(id, how, reply)

    # Seeing a wave through.

    def _take_up(self, wave: Wave) -> None:
        """Go on with a wave of an earlier start."""
        if wave.model not in self._couriers:
            log.warning("batch %s asks %s, which this run no longer does", wave.batch, wave.model)
            return
        self._waves.add(wave)
        for id in wave.ids:
            self._know(id, wave)
        if wave.state in ("sending", "created"):
            self._work(wave)

    def _work(self, wave: Wave) -> None:
        task = asyncio.get_running_loop().create_task(self._see_through(wave))
        self._working[task] = wave
        task.add_done_callback(lambda task: self._working.pop(task, None))

    async def _see_through(self, wave: Wave) -> None:
        """From the calls of a wave to their answers. What fails for good stops the run."""
        try:
            await self._couriers[wave.model].see_through(wave)
            if wave.state == "void":
                self._let_go(wave, "again")
            for n, id in enumerate(wave.ids, 1):
                self._answer(wave, id)
                if n % _ANSWERS == 0:  # else the pipes would hold all replies of a large wave
                    await asyncio.sleep(_ANSWERS_S)
            if not wave.needed:
                self._ledger.remove(wave)
        except ModelError as error:
            self._on_problem(f"batches of {wave.model}: {RULES[error.kind].meaning}: {error}")
        except (EnvironmentStop, HostError) as error:
            self._on_problem(str(error))
        except Exception as error:
            if (words := machine_failure(error)) is not None:
                self._on_problem(words)
                return
            log.exception("batch %s: a defect of this program", wave.batch or wave.name)
            self._on_problem(f"a defect of this program, see run.log: {error!r}")
