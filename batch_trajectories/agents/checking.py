"""Checks an agent: runs it, kills it, starts it again, and reports what would go wrong in a run.

The agent runs as in any run, with the real sandbox, gateway, records and resuming. Only the model
is replaced, by a server on loopback that costs nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

from agent.gateway.command_agent import CommandAgent
from agent.models.dialects import gemini
from agent.models.dialects.dialect import api_base_url
from agent.wires.reading import deciding_fields, remove_matches
from agent.wires.wire import Volatile
from batch_trajectories.agents.check_endpoint import AnsweredCall, CheckEndpoint
from batch_trajectories.api.stored_run import open_run
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.basics.text import clip
from batch_trajectories.records.names import EXPORTS, LOG_FILE

# The differences between two requests of one agent, and the settings that ignore them.

_TEXTS = frozenset({"messages", "tools"})
"""Fields whose differences `volatile.texts` ignores; for all others it is `volatile.fields`."""

_CONTEXT_CHARS = 16
"""Characters before a word that identify it."""

_WORD = r"[^\s\"'<>,;]+"
_NUMBER = re.compile(r"[0-9]+")
"""Part of the text before a word that other starts need not share: it may be a date."""
_WORD_SEPARATORS = frozenset(" \n\t\r\"'<>,;=(")

_MISSING = object()


class Difference(NamedTuple):
    """A value that differs between two requests."""

    path: str
    """The dotted path of the value; list items are numbers."""
    before: str
    after: str
    advice: str
    """The line for the agent's file that ignores the difference; "" if there is none."""


def deciding_values(request: AnsweredCall, volatile: Volatile) -> dict[str, Any]:
    """Return the values that decide whether a later request is the same."""
    read = request.read
    messages = [
        {
            "role": message["role"],
            "content": remove_matches(message["content"], volatile.texts),
            "calls": [call["function"] for call in message.get("tool_calls") or ()],
        }
        for message in read.messages
    ]
    head = deciding_fields(request.body, request.wire.layout.read_elsewhere, volatile.fields)
    return {**head, "tools": read.tools, "messages": messages}


def differences(before: Any, after: Any, path: str = "") -> Iterator[Difference]:
    """Compare two JSON values, in the order of the first."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys((*before, *after)):
            inner = f"{path}.{key}" if path else key
            yield from differences(before.get(key, _MISSING), after.get(key, _MISSING), inner)
    elif isinstance(before, list) and isinstance(after, list):
        for n, (one, other) in enumerate(zip_longest(before, after, fillvalue=_MISSING)):
            yield from differences(one, other, f"{path}.{n}")
    elif before != after:
        if path.partition(".")[0] not in _TEXTS:
            yield Difference(path, _excerpt(before), _excerpt(after), _ignore("fields", path))
        elif isinstance(before, str) and isinstance(after, str):
            yield from _text_differences(path, before, after)
        else:
            yield Difference(path, _excerpt(before), _excerpt(after), "")


def _text_differences(path: str, before: str, after: str) -> Iterator[Difference]:
    """Yield the words that differ, until the rest is equal."""
    while before != after:
        start = _equal_chars(before, after)
        # Report whole words: "12:05 and 12:07", not "5 and 7".
        while start and before[start - 1] not in _WORD_SEPARATORS:
            start -= 1
        known = before[max(0, start - _CONTEXT_CHARS) : start]
        pattern = _NUMBER.sub("[0-9]+", re.escape(known).replace("\\ ", " ")) + _WORD
        is_distinct = re.search(r"\w\w", known) is not None
        advice = _ignore("texts", pattern) if is_distinct else ""
        yield Difference(
            path, _excerpt_word(known, before, start), _excerpt_word(known, after, start), advice
        )
        if not is_distinct:
            return
        before, after = (re.sub(pattern, "", text) for text in (before, after))


def _ignore(kind: str, value: str) -> str:
    return f"volatile: {{{kind}: [{json.dumps(value)}]}}"


def _equal_chars(one: str, other: str) -> int:
    """Count the first characters that two texts have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _excerpt_word(known: str, text: str, start: int) -> str:
    match = re.match(_WORD, text[start:])
    return repr(known + (match[0] if match else ""))


def _excerpt(value: Any) -> str:
    if value is _MISSING:
        return "(nothing)"
    return clip(json.dumps(value, ensure_ascii=False), max_chars=80)


_PROMPT = "Run the commands that the task needs, one at a time, and then say that you are done."
_KEY_ENV = "AGENT_CHECK_KEY"
_RUN_NAME = "check"
_MODEL = "check-model"
_EXTRA_S = 30.0
"""Time beyond the agent's own for a run to start and to end."""
_MAX_DIFFERENCES = 5
"""Maximum differences that are reported."""
_EXCERPT_CHARS = 600

_URL = (
    "It has to call models at {gateway}, which `command`, `env` or `files` can give it, and by an "
    "API that `speaks` names"
)
_REFUSED = "the gateway refused"
"""Words in the reason of a failure: the agent made a call, but one that the run cannot relay."""
_FINAL_CALL = "If it ends by a call of a tool instead of a text, set `final_call`"

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """The result of one part of the check."""

    level: Level
    """A `note` means that nothing is lost; a `problem`, that tasks, money or rows would be."""
    text: str


def check_agent(
    agent: CommandAgent, *, sandbox: str, final_command: str | None, timeout_s: float
) -> list[Finding]:
    """Have an agent run two commands, kill it before its last reply, and start it again.

    `final_command` is for agents with `final_call`; None: it is made from that expression. Raises
    `ConfigError` if the agent cannot be started.
    """
    if agent.final_call is not None and final_command is None:
        final_command = _make_final_command(agent.final_call)
    with tempfile.TemporaryDirectory(prefix="agent-check-") as directory:
        trial = _Trial(agent, Path(directory), CheckEndpoint(final_command), sandbox)
        asyncio.run(trial.run(timeout_s))
        return list(trial.findings())


def _make_final_command(final_call: str) -> str:
    literal = re.sub(r"\\(.)", r"\1", final_call)
    command = f"echo {literal}"
    if re.search(final_call, command) is None:
        raise ConfigError(
            f"final_call {final_call!r}: give a command that it matches, with --final_command"
        )
    return command


class _Trial:
    """One agent, started twice on the same task."""

    def __init__(
        self, agent: CommandAgent, directory: Path, endpoint: CheckEndpoint, sandbox: str
    ) -> None:
        self._agent = agent
        self._directory = directory
        self._endpoint = endpoint
        self._sandbox = sandbox
        self._was_killed = False
        self._calls_before_kill = 0
        """The number of requests that were answered before the kill."""
        self._timed_out = False
        self._ends_at = 0.0
        """The end of the check, by the monotonic clock."""

    async def run(self, timeout_s: float) -> None:
        """Start the agent, kill its run once all results are there, and start it again."""
        (self._directory / "p.jsonl").write_text(json.dumps({"id": "check", "prompt": _PROMPT}))
        self._ends_at = time.monotonic() + timeout_s
        async with self._endpoint.serve() as url:
            try:
                async with asyncio.timeout(timeout_s + _EXTRA_S):
                    await self._run_twice(url)
            except TimeoutError:
                self._timed_out = True

    async def _run_twice(self, url: str) -> None:
        first = asyncio.create_task(self._run_batch(url))
        results = asyncio.create_task(self._endpoint.has_all_results.wait())
        try:
            await asyncio.wait((first, results), return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                self._was_killed = True
                self._calls_before_kill = len(self._endpoint.requests)
        finally:
            first.cancel()
            results.cancel()
            await asyncio.gather(first, results, return_exceptions=True)
        self._endpoint.may_end.set()
        await (self._run_batch(url) if self._was_killed else first)

    async def _run_batch(self, url: str) -> None:
        """Run the batch runner to its end; kills it with all of its processes if cancelled."""
        left_s = max(0.1, self._ends_at - time.monotonic())
        api = self._agent.speaks[0]
        described = self._agent.model_dump(mode="json", exclude_unset=True)
        # The run has another current directory.
        described["programs"] = [str(path.absolute()) for path in self._agent.programs]
        program, *arguments = self._agent.command
        if "/" in program:
            described["command"] = [str(Path(program).absolute()), *arguments]
        described["aliases"] = dict.fromkeys(self._agent.aliases, _MODEL)
        given = {
            "agent": json.dumps(described),
            "dataset_file": "p.jsonl",
            "run_name": _RUN_NAME,
            "model": _MODEL,
            "api": api,
            "key_env": _KEY_ENV,
            "sandbox": self._sandbox,
            "base_url": api_base_url(api, url),
            "num_workers": 1,
            "concurrency": 1,
            "max_attempts": 2,
            "max_turns": 20,
            # The rest of --timeout_s: then the run ends the agent and still gets its output.
            "max_conversation_s": left_s,
            "accept_config_change": "max_conversation_s",
            "prices": json.dumps({_MODEL: {"input": 0, "output": 0}}),
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "batch_runner",
            *(f"--{name}={value}" for name, value in given.items()),
            cwd=self._directory,
            env=os.environ | {_KEY_ENV: "the-key-of-a-check"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode == 2:
            reason = output.decode(errors="replace").strip()
            raise ConfigError(reason.removeprefix("error: "))

    def findings(self) -> Iterator[Finding]:
        """Yield the findings, in the order in which things happen in a run."""
        requests = self._endpoint.requests
        run = open_run(self._directory / "trajectories" / _RUN_NAME)
        record = next(run.records(), None)
        failures = [line["message"] for line in run.failures()]
        if not requests:
            reason = (
                failures[-1]
                if failures
                else f"it went on until --timeout_s{self._write_log(record)}"
            )
            advice = "" if _REFUSED in reason else f". {_URL}"
            yield Finding("problem", f"no model call of it was answered: {reason}{advice}")
            return
        apis = ", ".join(sorted({request.read.api for request in requests}))
        yield Finding("ok", f"{len(requests)} model calls were answered ({apis})")
        yield from self._check_tools(requests)
        if self._timed_out or (record is not None and record["status"] == "time_limit"):
            text = f"it has not ended in time: give it more by --timeout_s{self._write_log(record)}"
            yield Finding("problem", text)
        elif record is None:
            yield Finding("problem", f"it has no answer: {failures[-1]}. {_FINAL_CALL}")
        else:
            yield from self._check_ending(record)
            yield from self._check_resuming(record)
            yield from self._check_rows(record)

    def _write_log(self, record: Mapping[str, Any] | None) -> str:
        """Write a log about an agent that did not end; return words that name the file."""
        ran = {} if record is None else record["agent"]
        output = "".join(
            f"[{name}]\n{ran[name]}\n" for name in ("stdout", "stderr") if ran.get(name)
        )
        path = self._directory / "trajectories" / _RUN_NAME / LOG_FILE
        log = path.read_text(errors="replace") if path.exists() else "it has not begun\n"
        with tempfile.NamedTemporaryFile(
            "w", prefix="agent-check-", suffix=".log", delete=False
        ) as file:
            file.write(f"{output}[run.log]\n{log}")
        return f"; what it printed, and the log of its run, are in {file.name}"

    def _check_tools(self, requests: Sequence[AnsweredCall]) -> Iterator[Finding]:
        """Check that the commands ran, and how calls and ids come back."""
        calls_by_id = {call.id: call for request in requests for call in request.calls}
        if not calls_by_id:
            yield Finding("note", "no tool of it takes a command: calls were not tried")
            return
        last = max(requests, key=lambda request: len(request.read.messages)).read
        results = [message["content"] for message in last.messages if message["role"] == "tool"]
        if any("checked" in result for result in results):
            yield Finding("ok", f"{len(results)} commands ran, and their results came back")
        else:
            shown = clip(" | ".join(results) or "no result", max_chars=_EXCERPT_CHARS)
            yield Finding("problem", f"the commands did not run: {shown}")
        shown_again = [
            call for message in last.messages for call in message.get("tool_calls") or ()
        ]
        ids = {call["id"] for call in shown_again}
        if ids and last.api != gemini.API and not ids & calls_by_id.keys():
            yield Finding("note", "it changes the ids of calls: replies are found by their texts")
        for call in shown_again:
            arguments = json.loads(call["function"]["arguments"])
            made = calls_by_id.get(call["id"])
            if made is not None and arguments != made.arguments:
                name = call["function"]["name"]
                yield Finding(
                    "note",
                    f"it repeats calls of {name} with other arguments; rows hold the model's own",
                )

    def _check_ending(self, record: dict[str, Any]) -> Iterator[Finding]:
        if record["status"] == "completed":
            yield Finding("ok", "its conversation ended as completed")
            return
        yield Finding(
            "problem", f"its conversation ended as {record['status']}: {record['status_reason']}"
        )

    def _check_resuming(self, record: dict[str, Any]) -> Iterator[Finding]:
        if not self._was_killed:
            yield Finding("note", "it ended before it could be killed: a restart was not tried")
            return
        diverged_at = record.get("diverged_at")
        if diverged_at is None:
            yield Finding(
                "ok",
                f"killed and started again: {self._calls_before_kill} paid calls were used again",
            )
            return
        paid = len(record.get("set_aside") or ())
        yield Finding(
            "problem",
            f"after a kill it makes another call than before, after {diverged_at} equal ones: "
            f"{paid} paid calls would be paid again",
        )
        yield from self._explain_divergence(diverged_at)

    def _explain_divergence(self, diverged_at: int) -> Iterator[Finding]:
        requests = self._endpoint.requests
        if diverged_at >= self._calls_before_kill or self._calls_before_kill >= len(requests):
            return
        volatile = self._agent.volatile_values
        before, after = (
            deciding_values(requests[at], volatile) for at in (diverged_at, self._calls_before_kill)
        )
        for found in islice(differences(before, after), _MAX_DIFFERENCES):
            advice = f"; to ignore that, add `{found.advice}`" if found.advice else ""
            text = f"{found.path} was {found.before} and then {found.after}{advice}"
            yield Finding("note", text)

    def _check_rows(self, record: dict[str, Any]) -> Iterator[Finding]:
        threads = [thread["name"] for thread in record.get("threads") or ()]
        if others := len(threads) - 1:
            yield Finding("note", f"{others} other conversations beside the main one: {threads}")
        if record.get("rewritten"):
            yield Finding("note", "it changes earlier messages: export with --segments")
        training_file = self._directory / "trajectories" / f"{_RUN_NAME}.jsonl"
        if training_file.exists() and training_file.read_text().strip():
            yield Finding("ok", "its row is training data")
        elif record["status"] == "completed":
            rejects = self._directory / "trajectories" / _RUN_NAME / EXPORTS / "rejects.jsonl"
            reason = rejects.read_text() if rejects.exists() else "unknown reason"
            yield Finding(
                "problem", f"its row is rejected: {clip(reason, max_chars=_EXCERPT_CHARS)}"
            )
