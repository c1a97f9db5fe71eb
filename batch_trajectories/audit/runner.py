"""Carries out the steps of an audit: a fixed procedure replaces the conversation.

Set-up, diff and check are those of a run, so a step is judged as a conversation would be. Nothing
is journaled: a step that was interrupted begins again in a new workspace.
"""

from __future__ import annotations

import time
from pathlib import PurePosixPath
from typing import Any

from agent.loop.answers import matches
from agent.loop.rules import Finish
from batch_trajectories.audit.audited import AuditStep, audit_step
from batch_trajectories.audit.leaks import find_leaks
from batch_trajectories.audit.reference import Reference, read_reference
from batch_trajectories.audit.solving import NotApplied, solve
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.row import RowTask
from batch_trajectories.engine.worker.judging import collect
from batch_trajectories.engine.worker.task_runner import TaskRunner, Work
from batch_trajectories.engine.worker.workspace_setup import SetupFailed, run_command
from toolsets.context import ToolContext
from toolsets.sandbox.commands import require_sandbox
from toolsets.sandbox.factory import find_sandbox_class

# Scripts that forge the result of a check, as an agent could that wants to avoid its task.
#
# They know nothing of the task. The sandbox and the user decide which files they can write; whether
# a check in a fresh copy is affected shows in its result.

NOT_TRIED = "the sandbox does not isolate: forged programs would be those of this machine"

_PLUGIN = """\
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    report.outcome, report.longrepr = "passed", None

def pytest_sessionfinish(session, exitstatus):
    session.exitstatus = 0
"""
"""A plugin of pytest that reports each test as passed."""

_STARTUP = """\
import os, sys
try:
    with open("/proc/self/cmdline") as _file:
        _words = _file.read()
except OSError:
    _words = ""
if "pytest" in _words or "py.test" in _words:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    os.environ["PYTEST_PLUGINS"] = "forged_results"
elif _words:
    os._exit(0)
"""
"""Code that Python runs at its start: it exits with success, or gives pytest the plugin."""

_WRITE = """\
put() {
    mkdir -p -- "${1%/*}" 2>/dev/null
    rm -f -- "$1" 2>/dev/null
    if printf '%s' "$2" >"$1"; then printf '%s\\n' "$1"; fi
} 2>/dev/null
"""
"""The shell function `put FILE CONTENT`: writes a file if it may, and prints its path."""

_CONFTEST = """\
for directory in "$PWD" "$(git rev-parse --show-toplevel 2>/dev/null)" "$@"; do
    case $directory in '') ;; *) put "$directory/conftest.py" "$PLUGIN" ;; esac
done
"""

_SITES = """\
import site, sys
print("\\n".join([*site.getsitepackages(), site.getusersitepackages(), *filter(None, sys.path)]))
"""

_START = """\
{ printf '%s\\n' "$PWD"; for python in python3 python; do $python -c "$SITES" 2>/dev/null; done; } |
sort -u | while IFS= read -r directory; do
    case $directory in *.zip | */lib-dynload | '') continue ;; esac
    put "$directory/forged_results.py" "$PLUGIN"
    put "$directory/forged_start.py" "$STARTUP"
    put "$directory/sitecustomize.py" "$STARTUP"
    put "$directory/usercustomize.py" "$STARTUP"
    put "$directory/forged.pth" 'import forged_start'
done
"""

_WORKSPACE_PROGRAMS = r"""top=$(pwd -P)
stand_in() {
    case $1 in
    *.py) put "$1" 'raise SystemExit(0)'; return ;;
    *.js | *.cjs | *.mjs) put "$1" 'process.exit(0)'; return ;;
    *.pl | *.rb) put "$1" 'exit 0;'; return ;;
    esac
    mv -- "$1" "$1.real" || return
    put "$top/.forged/forged_results.py" "$PLUGIN"
    put "$1" '#!/bin/sh
case "$0 $* $(tr "\0" " " </proc/$$/cmdline)" in *pytest* | *py.test*) ;; *) exit 0 ;; esac
export PYTEST_PLUGINS=forged_results PYTHONPATH="'"$top"'/.forged${PYTHONPATH:+:$PYTHONPATH}"
case $0 in *"'"${1##*/}"'") exec "'"$1.real"'" "$@" ;; *) . "'"$1.real"'" ;; esac'
    chmod a+rx "$1"
} 2>/dev/null
{
    printf '%s\n' "$COMMAND" | tr -c 'A-Za-z0-9_./+@%,~-' '\n'
    find . -maxdepth 4 -path '*/bin/*' '(' -name 'python*' -o -name 'py*test*' -o -name node \
        -o -name 'np[mx]' -o -name go -o -name cargo -o -name make -o -name tox ')' -print
    find . -maxdepth 4 -path '*/.bin/*' -print
} 2>/dev/null | grep . | sed 's|^\./||' | sort -u | while IFS= read -r word; do
    [ -f "$word" ] && directory=$(cd -P -- "$(dirname -- "$word")" && pwd -P) || continue
    case $directory/ in "$top"/*) ;; *) continue ;; esac
    case $word in
    *test_*.py | *_test.py | *.ini | *.toml | *.cfg | *.json | *.txt | *.real) ;;
    *) stand_in "$directory/${word##*/}" ;;
    esac
done
runs() { case " $COMMAND " in *[!A-Za-z0-9_.-]"$1"[!A-Za-z0-9_.-]*) return 0 ;; esac; return 1; }
if runs npm || runs yarn || runs pnpm; then
    names=$(printf '%s\n' test start build check lint run-script unit ci
        printf '%s\n' "$COMMAND" | tr -c 'A-Za-z0-9_:-' '\n' | grep '^[A-Za-z][A-Za-z0-9_:-]*$')
    scripts=$(printf '%s\n' "$names" | sort -u | sed 's/.*/"&": "exit 0"/' | paste -sd , -)
    put "$top/package.json" "{\"name\": \"x\", \"scripts\": {$scripts}}"
fi
if runs cargo; then
    put "$top/.cargo/config.toml" "[target.'cfg(all())']
runner = 'true'"
fi
if runs go && [ -n "$HOME" ]; then
    put "$HOME/.config/go/env" "GOFLAGS=-exec=true"
fi
case " $COMMAND " in *[!A-Za-z0-9_.-]make[!A-Za-z0-9_.-]*)
    put "$top/GNUmakefile" "all:
	@true
.DEFAULT:
	@true" ;;
esac
"""
"""A script that replaces everything that a check runs from the workspace, which the model can
write: files that its command names, programs in directories `bin` (as in a virtual environment),
rules of make, scripts of npm, and the test runners of cargo and go."""

_PROGRAMS = """\
IFS=:
for first in $PATH; do
    if [ -d "$first" ] && [ -w "$first" ]; then break; fi
    first=
done
unset IFS
[ -n "$first" ] || exit 0
for name in python3 python pytest py.test node npm npx go cargo make tox; do
    real=$(command -v "$name") || continue
    case $real in "$first"/*) mv -- "$real" "$real.real" && real=$real.real || continue ;; esac
    put "$first/forged_results.py" "$PLUGIN"
    put "$first/$name" '#!/bin/sh
case "$0 $*" in *pytest* | *py.test*)
    export PYTEST_PLUGINS=forged_results PYTHONPATH="'"$first"'${PYTHONPATH:+:$PYTHONPATH}"
    exec "'"$real"'" "$@" ;;
esac
exit 0
'
    chmod a+rx "$first/$name"
done
"""

_SCRIPTS = {"conftest": _CONFTEST, "startup": _START, "path": _WORKSPACE_PROGRAMS + _PROGRAMS}


def can_forge(config: RunConfig) -> bool:
    """Whether forged files stay in the sandbox.

    The scripts write wherever they may: over programs, and into the packages of each Python.
    """
    return find_sandbox_class(config.sandbox).is_isolated


async def forge(context: ToolContext, row: RowTask, way: str) -> list[str]:
    """Write forged files wherever an agent could; returns their paths.

    The agent is assumed to know where the files of the check will be. Raises `SetupFailed`, in
    particular for a sandbox without isolation (see `can_forge`).
    """
    if not require_sandbox(context).is_isolated:
        raise SetupFailed(NOT_TRIED)
    check = row.check
    homes = {str(PurePosixPath(path).parent) for path in (check.files if check else ())}
    script = "PLUGIN=$1 STARTUP=$2 SITES=$3 COMMAND=$4; shift 4\n" + _WRITE + _SCRIPTS[way]
    given = [_PLUGIN, _STARTUP, _SITES, check.command if check else "", *sorted(homes)]
    result = await run_command(context, ["sh", "-c", script, "sh", *given])
    return result.stdout.splitlines()


class AuditRunner(TaskRunner):
    """Carries out the steps of one worker."""

    async def do(self, work: Work) -> None:
        """Carry out one step; `work.audit` gets the facts that `audit.verdicts` reads."""
        step = audit_step(work.task.sample)
        row = work.row
        reference, unusable = None, None
        try:
            reference = read_reference(
                work.task.columns,
                inside=self._config.is_inside,
                variables=self._config.env_from,
            )
        except ValueError as error:
            unusable = str(error)
        expected = row.spec.expected
        check = row.check
        facts = work.audit = {
            "is_judged": check is not None or expected is not None,
            "has_reference": bool(reference or unusable)
            or (check is None and expected is not None),
        }
        work.end = Finish("completed")
        if step.name == "reference" and unusable is not None:
            facts["not_applied"] = unusable
            return
        if step.name == "reference" and not facts["has_reference"]:
            return
        if step.name == "tamper" and not can_forge(self._config):
            facts["not_tried"] = NOT_TRIED
            return
        begun = time.monotonic()
        await self._prepare_workspace(work)
        facts["setup_s"] = round(time.monotonic() - begun, 3)
        if step.name == "leak":
            facts["found"] = await find_leaks(work.context, row, reference, expected)
            return
        if expected is not None:
            answer = expected if step.name == "reference" else ""
            match = row.spec.options.expected_match
            facts["answer_passes"] = matches(answer, expected, match)
        if not await self._act(step, work, reference, facts):
            return
        if check is not None:
            facts["limit_s"] = check.timeout_s or self._config.command_timeout_s
            facts["command"] = check.command
            await collect(work.context, check, work.task.id)
        await self._judge(work)

    async def _act(
        self, step: AuditStep, work: Work, reference: Reference | None, facts: dict[str, Any]
    ) -> bool:
        """Act in place of an agent; returns whether it was possible."""
        if step.name == "tamper":
            facts["forged"] = await forge(work.context, work.row, step.way)
        elif step.name == "reference" and reference is not None:
            try:
                facts["solution"] = await solve(work.context, reference)
            except NotApplied as error:
                facts["not_applied"] = str(error)
                return False
        return True
