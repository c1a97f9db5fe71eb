"""Run the check of a row: what the workspace is worth when its conversation has ended."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import orjson

from batch_trajectories.basics.text import clip
from batch_trajectories.runs.dataset.row_check import Check
from batch_trajectories.runs.dataset.test_outcomes import (
    MISSING,
    PatternTimeout,
    outcomes,
    statuses_of,
    wrong_outcomes,
)
from batch_trajectories.runs.store.checks import (
    MAIN,
    Rewards,
    finite_number,
    parse_rewards,
    printed_rewards,
)
from batch_trajectories.runs.worker.workspace_setup import (
    SetupFailed,
    few_at_a_time,
    make_executable,
    run_command,
    write_files,
)
from toolsets.builtin.command_result import sandbox_of
from toolsets.context import ToolContext
from toolsets.sandbox.base import ExecResult
from toolsets.workspace.workspace import PathError

_SHOWN = 2000
"""Maximum characters of a command's output in a record."""

_MAX_REWARD_BYTES = 1 << 20
_MAX_LOG_BYTES = 32 << 20
_WRONG_SHOWN = 50
_NOT_FOUND, _NO_SHELL = 127, "sh: No such file or directory\n"
"""How a sandbox says that there is no shell for the command."""

TURNS_VARIABLE = "CONVERSATION_TURNS"
"""The variable with the number of turns, for checks that give rewards per turn."""

_CLEAR = """\
mode=$1; shift
rm -rf -- "$@" || exit
last=
for file; do
    case $file in */*) directory=${file%/*};; *) directory=;; esac
    [ -n "$directory" ] && [ "$directory" != "$last" ] || continue
    last=$directory
    above=$directory
    until [ -d "$above" ]; do
        rm -f -- "$above"
        case $above in ?*/*) above=${above%/*};; *) break;; esac
    done
    [ -d "$directory" ] || mkdir -p -- "$directory" || exit
    # The user of an image may own none of it.
    chmod "$mode" -- "$directory" 2>/dev/null || :
done
"""
"""Removes files and what is no directory above them, makes their directories, and sets the mode."""

Open = Callable[[str | None], Awaitable[ToolContext]]
"""Opens the workspace for the check as a user of its image; None: as the conversation's."""


class CheckFailed(Exception):
    """A check did not say what the workspace is worth."""


async def run_check(
    check: Check, open_as: Open, turns: int | None = None, *, prepare_as: str | None = None
) -> dict[str, Any]:
    """Run the check of a workspace after a conversation of so many `turns`.

    `prepare_as` is who makes room for the check's files and writes them.

    It has passed if its exit code is 0, or as its tests or its reward say. Keys: `passed`,
    `reward`, `exit_code` (None if it did not end), `stdout` and `stderr` (shortened), `duration_s`;
    `tests`, `rewards` and `turn_rewards` where the check has them (see `runs.store.checks`). If it
    timed out, could not run, or gave no reward or rewards for another number of turns, `passed` and
    `reward` are None, and `error` is why. Raises `SetupFailed` if no sandbox could be opened.
    """
    context = await open_as(prepare_as)
    try:
        result = unjudged("")
        try:
            await _prepare(context, check, "u+rwx" if prepare_as == check.user else "a+rwx")
            if prepare_as != check.user:
                await sandbox_of(context).stop()
                context = await open_as(check.user)
            command = await _command(context, check, turns)
            result |= {
                "exit_code": command.exit_code,
                "stdout": clip(command.stdout, max_chars=_SHOWN),
                "stderr": clip(command.stderr, max_chars=_SHOWN),
                "duration_s": round(command.duration_s, 3),
            }
            judged = await _judged(context, check, command, turns)
        except CheckFailed as error:
            return {**result, "error": str(error)}
        del result["error"]
        return result | judged
    finally:
        await sandbox_of(context).stop()


def unjudged(error: str) -> dict[str, Any]:
    """The result of a check that gave none, and why."""
    return {
        "passed": None,
        "reward": None,
        "error": error,
        "exit_code": None,
        "stdout": "",
        "stderr": "",
        "duration_s": 0.0,
    }


async def _prepare(context: ToolContext, check: Check, mode: str) -> None:
    """Remove what an earlier check or the model left in the way, and write the check's files.

    Raises `CheckFailed` where that is not possible: what the model left is in the way.
    """
    await _make_room(context, "u+rwx", [*check.files])
    written = [*check.reward_files]
    if check.tests is not None and check.tests.log is not None:
        written.append(check.tests.log)
    await _make_room(context, mode, written)
    try:
        await write_files(context, check.files)
        scripts = [path for path, content in check.files.items() if content.startswith(b"#!")]
        await make_executable(context, scripts)
    except SetupFailed as error:
        raise CheckFailed(f"`check`: {error}") from error


async def _make_room(context: ToolContext, mode: str, paths: Sequence[str]) -> None:
    for some in few_at_a_time(paths):
        result = await _ran(context, ["sh", "-c", _CLEAR, "sh", mode, *some])
        if result.exit_code != 0:
            raise CheckFailed(f"cannot make room for {', '.join(some)}: {_said(result)}")


async def _command(context: ToolContext, check: Check, turns: int | None) -> ExecResult:
    env = {**({} if turns is None else {TURNS_VARIABLE: str(turns)}), **check.env}
    exports = "".join(f"export {name}={shlex.quote(text)}; " for name, text in env.items())
    return await _ran(context, check.command, exports, timeout_s=check.timeout_s)


async def _ran(context: ToolContext, *command: Any, **options: Any) -> ExecResult:
    """See `run_command`. Raises `CheckFailed` where the sandbox cannot run it to its end."""
    try:
        return await run_command(context, *command, **options)
    except SetupFailed as error:
        raise CheckFailed(f"`check`: {error}") from error


async def _judged(
    context: ToolContext, check: Check, result: ExecResult, turns: int | None
) -> dict[str, Any]:
    """What the command of a check says. Raises `CheckFailed`."""
    if result.exit_code is None:
        raise CheckFailed(f"`check`: {_said(result)}")
    if check.tests is not None:
        return await _of_tests(context, check, result)
    if check.reward_files:
        return await _of_files(context, check, result, turns)
    if result.exit_code == _NOT_FOUND and result.stderr == _NO_SHELL:
        raise CheckFailed(f"`check`: {result.stderr.strip()}")
    passed = result.exit_code == 0
    return {"passed": passed, "reward": float(passed), **_printed(result.stdout, turns)}


async def _of_tests(context: ToolContext, check: Check, result: ExecResult) -> dict[str, Any]:
    """What the tests in the output say; of a log the record has the ends as `stdout`."""
    tests = check.tests
    assert tests is not None
    output = result.stdout + "\n" + result.stderr
    shown: dict[str, Any] = {}
    if tests.log is not None:
        try:
            content = await asyncio.to_thread(
                context.workspace.read_bytes, tests.log, _MAX_LOG_BYTES
            )
        except PathError:
            content = b""  # the command ended before any test
        output = content.decode(errors="replace")
        shown = {"stdout": clip(output, max_chars=_SHOWN)}
    try:
        found = await asyncio.to_thread(outcomes, tests.patterns, output)
    except PatternTimeout as error:
        raise CheckFailed(f"`check.tests.patterns`: {error}") from error
    wrong = wrong_outcomes(tests, found)
    if tests.log is None and result.truncated and MISSING in wrong.values():
        raise CheckFailed("`check.tests`: the output is too long to be kept; print it to a `log`")
    statuses = Counter(statuses_of(tests, found).values())
    return {
        **shown,
        "passed": not wrong,
        "reward": float(not wrong),
        "tests": {
            "expected": statuses.total(),
            "found": len(found),
            "wrong": len(wrong),
            "statuses": dict(statuses),
            "first_wrong": dict(list(wrong.items())[:_WRONG_SHOWN]),
        },
    }


async def _of_files(
    context: ToolContext, check: Check, result: ExecResult, turns: int | None
) -> dict[str, Any]:
    """The reward in the first of the reward files that the command wrote."""
    for path in check.reward_files:
        try:
            content = await asyncio.to_thread(context.workspace.read_bytes, path, _MAX_REWARD_BYTES)
        except PathError as error:
            if await _exists(context, path):
                raise CheckFailed(f"`check.reward_file`: {error}") from error
            continue
        try:
            rewards = _rewards(content, is_json=path.endswith(".json"), turns=turns)
        except ValueError as error:
            shown = f"`check.reward_file`: {path} {error}"
            raise CheckFailed(f"{shown} (exit code {result.exit_code})") from error
        reward = rewards.named.get(MAIN, next(iter(rewards.named.values())))
        return {"passed": reward >= 1, "reward": reward, **_by_name(rewards)}
    names = " or ".join(check.reward_files)
    raise CheckFailed(f"`check.reward_file`: the command did not write {names}; {_said(result)}")


async def _exists(context: ToolContext, path: str) -> bool:
    return (await _ran(context, ["test", "-e", path])).exit_code == 0


def _rewards(content: bytes, *, is_json: bool, turns: int | None) -> Rewards:
    """The rewards in a reward file. Raises `ValueError` with what is wrong with it."""
    text = content.decode(errors="replace").strip()
    if not text:
        raise ValueError("is empty")
    if not is_json:
        return Rewards({MAIN: finite_number(text)}, {})
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from error
    named = found if isinstance(found, dict) else {MAIN: found}
    numbers = {key: int(item) if isinstance(item, bool) else item for key, item in named.items()}
    rewards = parse_rewards(numbers, name=MAIN, turns=turns)
    if not rewards.named:
        raise ValueError(f"has no number: {clip(text, max_chars=200)}")
    return rewards


def _printed(stdout: str, turns: int | None) -> dict[str, Any]:
    """The keys of a result that a JSON object in the last line gives. Raises `CheckFailed`."""
    last = stdout.strip().rpartition("\n")[2]
    try:
        found = json.loads(last)  # with NaN and Infinity, which are no rewards, but meant as such
    except (ValueError, RecursionError):
        return {}
    try:
        rewards = printed_rewards(found, turns=turns)
    except ValueError as error:
        raise CheckFailed(f"`check`: the last line of its output {error}") from error
    if rewards is None:
        return {}
    main = {MAIN: rewards.named[MAIN]} if MAIN in rewards.named else {}
    return main | _by_name(rewards)


def _by_name(rewards: Rewards) -> dict[str, Any]:
    """The keys of a result with rewards besides the one named `reward`."""
    found = rewards.to_json()
    return found if rewards.by_turn or rewards.named.keys() != {MAIN} else {}


def _said(result: ExecResult) -> str:
    """How a command ended and the end of what it printed."""
    how = f"exit code {result.exit_code}"
    if result.timed_out:
        how = f"it timed out after {result.duration_s:.0f} s"
    elif result.exit_code is None:
        how = f"it filled the workspace ({result.full_mb} MB) and was stopped"
    output = clip((result.stderr or result.stdout).strip(), max_chars=_SHOWN)
    return f"{how}: {output}" if output else how
