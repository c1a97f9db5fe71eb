"""Judge a workspace by its check: the steps before the check, its sandbox, and its files there."""

from __future__ import annotations

import asyncio
import json
import logging
import posixpath
import shlex
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import orjson

from batch_trajectories.basics.text import clip
from batch_trajectories.dataset.row_workspace import Check, Outcomes
from batch_trajectories.engine.worker.diffs.making import MAX_CARRIED_BYTES
from batch_trajectories.engine.worker.workspace_setup import (
    SetupFailed,
    few_at_a_time,
    fresh_root,
    make_executable,
    run_command,
    write_files,
)
from batch_trajectories.records.checks import (
    MAIN,
    Rewards,
    finite_number,
    parse_rewards,
    printed_rewards,
)
from toolsets.context import ToolContext
from toolsets.sandbox.base import ExecResult
from toolsets.sandbox.commands import require_sandbox
from toolsets.workspace.workspace import PathError

if TYPE_CHECKING:
    from batch_trajectories.dataset.row import RowTask
    from batch_trajectories.dataset.row_workspace import Artifact, Check
    from batch_trajectories.engine.worker.workspaces import Workspaces
    from toolsets.sandbox.image_files import FileState, ImageFiles, ImageSandbox


# Reads which tests passed from what a command printed.

_TIMEOUT_S = 30.0

_ESCAPES = r"\x1b\[[0-?]*[ -/]*[@-~]|\r"

MISSING = "missing"
"""The status of a test that the output does not name."""


class PatternTimeout(Exception):
    """A pattern takes too long to search an output."""


def outcomes(patterns: Iterable[str], output: str) -> dict[str, str]:
    """The status of each test; the last line that names a test counts. Raises `PatternTimeout`."""
    import regex

    plain = regex.sub(_ESCAPES, "", output)
    lines: list[tuple[int, str, str]] = []
    for pattern in patterns:
        try:
            matches = regex.finditer(
                pattern, plain, flags=regex.MULTILINE, timeout=_TIMEOUT_S, concurrent=True
            )
            lines += ((match.start(), match["name"], match["status"]) for match in matches)
        except TimeoutError as error:
            raise PatternTimeout(f"{pattern!r} took more than {_TIMEOUT_S:g} s") from error
    lines.sort(key=lambda item: item[0])
    return {_plain(name): status for _, name, status in lines}


def test_statuses(tests: Outcomes, by_test: Mapping[str, str]) -> dict[str, str]:
    """The status of each test that is named."""
    named, key = (tests.must_pass, _plain) if tests.expected is None else (tests.expected, _exact)
    ran = {key(name): status for name, status in by_test.items()}
    return {name: ran.get(key(name), MISSING) for name in named}


def wrong_outcomes(tests: Outcomes, by_test: Mapping[str, str]) -> dict[str, str]:
    """The tests that did not end as they should, with the status they have."""
    if tests.expected is None:
        statuses = test_statuses(tests, by_test)
        return {name: got for name, got in statuses.items() if got not in tests.passed}
    expected = {_exact(name): status for name, status in tests.expected.items()}
    ran = {_exact(name): status for name, status in by_test.items()}
    names = dict.fromkeys([*expected, *ran])
    return {name: ran.get(name, MISSING) for name in names if ran.get(name) != expected.get(name)}


def _plain(name: str) -> str:
    """A name as all are compared: some datasets join the parts with a dot."""
    return name.strip().replace("::", ".")


def _exact(name: str) -> str:
    """A name of `expected`, which may still have colours and the message of a failure."""
    import regex

    return _plain(regex.sub(_ESCAPES, "", name)).split(" - ")[0]


# Run the check of a row: what the workspace is worth when its conversation has ended.

_MAX_OUTPUT_CHARS = 2000
"""Maximum characters of a command's output in a record."""

_MAX_REWARD_BYTES = 1 << 20
_MAX_LOG_BYTES = 32 << 20
_MAX_LISTED_WRONG = 50
_NOT_FOUND, _NO_SHELL = 127, "sh: No such file or directory\n"
"""Exit code and message of a sandbox that has no shell for the command."""

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
    `tests`, `rewards` and `turn_rewards` where the check has them (see `records.checks`). If it
    timed out, could not run, or gave no reward or rewards for another number of turns, `passed` and
    `reward` are None, and `error` is why. Raises `SetupFailed` if no sandbox could be opened.
    """
    context = await open_as(prepare_as)
    try:
        result = make_unjudged("")
        try:
            await _prepare(context, check, "u+rwx" if prepare_as == check.user else "a+rwx")
            if prepare_as != check.user:
                await require_sandbox(context).stop()
                context = await open_as(check.user)
            command = await _command(context, check, turns)
            result |= {
                "exit_code": command.exit_code,
                "stdout": clip(command.stdout, max_chars=_MAX_OUTPUT_CHARS),
                "stderr": clip(command.stderr, max_chars=_MAX_OUTPUT_CHARS),
                "duration_s": round(command.duration_s, 3),
            }
            judged = await _judge_command(context, check, command, turns)
        except CheckFailed as error:
            return {**result, "error": str(error)}
        del result["error"]
        return result | judged
    finally:
        await require_sandbox(context).stop()


def make_unjudged(error: str) -> dict[str, Any]:
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
            raise CheckFailed(f"cannot make room for {', '.join(some)}: {_describe_result(result)}")


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


async def _judge_command(
    context: ToolContext, check: Check, result: ExecResult, turns: int | None
) -> dict[str, Any]:
    """The result of a check's command. Raises `CheckFailed`."""
    if result.exit_code is None:
        raise CheckFailed(f"`check`: {_describe_result(result)}")
    if check.tests is not None:
        return await _read_tests(context, check, result)
    if check.reward_files:
        return await _read_reward_files(context, check, result, turns)
    if result.exit_code == _NOT_FOUND and result.stderr == _NO_SHELL:
        raise CheckFailed(f"`check`: {result.stderr.strip()}")
    passed = result.exit_code == 0
    return {"passed": passed, "reward": float(passed), **_read_printed(result.stdout, turns)}


async def _read_tests(context: ToolContext, check: Check, result: ExecResult) -> dict[str, Any]:
    """The result of the tests in the output; the record has the ends of a test log as `stdout`."""
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
        shown = {"stdout": clip(output, max_chars=_MAX_OUTPUT_CHARS)}
    try:
        found = await asyncio.to_thread(outcomes, tests.patterns, output)
    except PatternTimeout as error:
        raise CheckFailed(f"`check.tests.patterns`: {error}") from error
    wrong = wrong_outcomes(tests, found)
    if tests.log is None and result.truncated and MISSING in wrong.values():
        raise CheckFailed("`check.tests`: the output is too long to be kept; print it to a `log`")
    statuses = Counter(test_statuses(tests, found).values())
    return {
        **shown,
        "passed": not wrong,
        "reward": float(not wrong),
        "tests": {
            "expected": statuses.total(),
            "found": len(found),
            "wrong": len(wrong),
            "statuses": dict(statuses),
            "first_wrong": dict(list(wrong.items())[:_MAX_LISTED_WRONG]),
        },
    }


async def _read_reward_files(
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
        reward = rewards.by_name.get(MAIN, next(iter(rewards.by_name.values())))
        return {"passed": reward >= 1, "reward": reward, **_named_rewards(rewards)}
    names = " or ".join(check.reward_files)
    raise CheckFailed(
        f"`check.reward_file`: the command did not write {names}; {_describe_result(result)}"
    )


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
    if not rewards.by_name:
        raise ValueError(f"has no number: {clip(text, max_chars=200)}")
    return rewards


def _read_printed(stdout: str, turns: int | None) -> dict[str, Any]:
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
    main = {MAIN: rewards.by_name[MAIN]} if MAIN in rewards.by_name else {}
    return main | _named_rewards(rewards)


def _named_rewards(rewards: Rewards) -> dict[str, Any]:
    """The keys of a result with rewards besides the one named `reward`."""
    found = rewards.to_json()
    return found if rewards.by_turn or rewards.by_name.keys() != {MAIN} else {}


def _describe_result(result: ExecResult) -> str:
    """The end of a command, and the last part of its output."""
    how = f"exit code {result.exit_code}"
    if result.timed_out:
        how = f"it timed out after {result.duration_s:.0f} s"
    elif result.exit_code is None:
        how = f"it filled the workspace ({result.full_mb} MB) and was stopped"
    output = clip((result.stderr or result.stdout).strip(), max_chars=_MAX_OUTPUT_CHARS)
    return f"{how}: {output}" if output else how


log = logging.getLogger(__name__)

_COMMAND_CHARS = 500
"""Maximum characters of a command and of its output in a log."""


async def collect(context: ToolContext, check: Check, task_id: str) -> None:
    """Run what a check collects, while the conversation's processes still run.

    What fails is logged: a check that needs it fails, too. Raises `SetupFailed` where the sandbox
    cannot run it.
    """
    for command in check.collect:
        result = await run_command(context, command.command, timeout_s=command.timeout_s)
        if result.exit_code != 0:
            how = "timed out" if result.timed_out else f"exit code {result.exit_code}"
            output = clip((result.stderr or result.stdout).strip(), max_chars=_COMMAND_CHARS)
            shown = clip(command.command, max_chars=_COMMAND_CHARS)
            log.warning(
                "Task %s: the command %r of `check.collect` failed (%s), and the check goes on "
                "without it; it printed: %s",
                task_id,
                shown,
                how,
                output,
            )


async def judge(
    spaces: Workspaces,
    context: ToolContext,
    row: RowTask,
    turns: int | None,
    diff: Mapping[str, Any] | None,
) -> dict[str, Any] | None:
    """The result of the row's check; None if it has none. Raises `SetupFailed`.

    `turns` is how many turns of the run's model it judges, if known; `diff` is that of
    `Workspaces.diff`, which has left the changed copy of the image for a fresh check.
    """
    if (check := row.check) is None:
        return None
    # Processes that the model left running could affect the check.
    await require_sandbox(context).stop()
    root = context.workspace.root
    if not spaces.are_in_images:
        return await run_check(check, partial(spaces.judging, context, row, check, root), turns)
    own = cast("ImageSandbox", require_sandbox(context))
    place: dict[str, Any] = {"in": check.where or "image"}
    prepare_as = "root" if check.user or check.image or not own.can_change_all else None
    if check.where == "same":
        open_as = partial(spaces.judging, context, row, check, root)
        return place | await run_check(check, open_as, turns, prepare_as=prepare_as)
    open_as = partial(spaces.judging, context, row, check, fresh_root(root))
    try:
        if check.image is not None:
            await spaces.remove_judged(row, check, fresh_root(root))
            worked = await spaces.reopen(context, row, starts_entrypoint=False)
            try:
                await _copy_to_check(worked, open_as, check.artifacts)
            finally:
                await require_sandbox(worked).stop()
            place |= {"image": spaces.image(row, check)}
        elif why := "there is no repository" if diff is None else diff.get("error"):
            raise CheckFailed(f"`check`: {why}")
        return place | await run_check(check, open_as, turns, prepare_as=prepare_as)
    except CheckFailed as error:
        return make_unjudged(str(error)) | place
    finally:
        await spaces.remove_judged(row, check, fresh_root(root))


async def _copy_to_check(worked: ToolContext, open_as: Open, artifacts: Sequence[Artifact]) -> None:
    """Copy what a check judges into the workspace of the check. Raises `CheckFailed`,
    `SetupFailed`."""
    judged = await open_as("root")
    try:
        await _copy_artifacts(worked, judged, artifacts)
    finally:
        await require_sandbox(judged).stop()


async def _copy_artifacts(
    worked: ToolContext, judged: ToolContext, artifacts: Sequence[Artifact]
) -> None:
    """Copy files and directories to the same paths in another image.

    Those that do not exist are left out; a directory replaces what the image has there. Raises
    `CheckFailed` for what cannot be copied, and `SetupFailed`.
    """
    left = MAX_CARRIED_BYTES
    for artifact in artifacts:
        path = posixpath.join(worked.workspace.home, artifact.path)
        try:
            left -= await _copy_artifact(worked, judged, path, artifact.exclude, left)
        except PathError as error:
            raise CheckFailed(f"`check.artifacts`: {error}") from error


async def _copy_artifact(
    worked: ToolContext, judged: ToolContext, path: str, exclude: Sequence[str], limit: int
) -> int:
    """Copy one file or directory; return its size in bytes."""
    source, target = cast("ImageFiles", worked.workspace), cast("ImageFiles", judged.workspace)
    try:
        tree = await asyncio.to_thread(source.tree, path, with_git=True)
    except PathError as error:
        return 0 if error.is_missing else await _carry_file(worked, judged, path, limit)
    states = {
        name: state
        for name, state in tree.items()
        if state.kind in ("file", "link") and not _is_excluded(name, exclude)
    }
    closed = [name for name, state in tree.items() if state.is_unreadable]
    if closed and not all(_is_excluded(name, exclude) for name in closed):
        raise CheckFailed(f"`check.artifacts`: {path}/{closed[0]}: the directory cannot be read")
    size = _read_size(states, path, limit)
    await run_command(judged, ["rm", "-rf", "--", path])
    await run_command(judged, ["mkdir", "-p", "--", path])
    await asyncio.to_thread(target.copy_from, source, path, states)
    return size


def _read_size(states: dict[str, FileState], path: str, limit: int) -> int:
    size = sum(state.size for state in states.values() if state.kind == "file")
    for name, state in states.items():
        if "\ufffd" in name or state.has_odd_target:
            raise CheckFailed(f"`check.artifacts`: {path}/{name}: its name or target is not UTF-8")
    if size > limit:
        raise CheckFailed(_too_large(path))
    return size


async def _carry_file(worked: ToolContext, judged: ToolContext, path: str, limit: int) -> int:
    content = await asyncio.to_thread(worked.workspace.read_bytes, path, limit + 1)
    if len(content) > limit:
        raise CheckFailed(_too_large(path))
    await asyncio.to_thread(judged.workspace.write_bytes, path, content)
    if (await run_command(worked, ["test", "-x", path])).exit_code == 0:
        await make_executable(judged, [path])
    return len(content)


def _too_large(path: str) -> str:
    most = MAX_CARRIED_BYTES >> 20
    return f"`check.artifacts`: {path}: more than {most} MiB, with those before it"


def _is_excluded(path: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches the path or a directory of it, from any of its names on."""
    names = path.split("/")
    places = [
        "/".join(names[first:last])
        for first in range(len(names))
        for last in range(first + 1, len(names) + 1)
    ]
    return any(fnmatchcase(place, pattern) for pattern in patterns for place in places)
