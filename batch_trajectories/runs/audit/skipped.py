"""Whether a check passed although no test ran, by what test runners print at the end.

The forms are those of pytest, unittest, `go test`, `cargo test` and jest; a check that prints none
of them is not judged.
"""

from __future__ import annotations

import re
from typing import Any

_SKIPPED = frozenset(("skip", "skipped", "ignored", "xskip"))

_PYTEST = re.compile(
    r"^=* ?((?:no tests ran|\d+ (?:passed|failed|skipped|deselected|errors?|warnings?|xpassed|"
    r"xfailed))[^\n]*?) in [\d.:]+s?\b",
    re.MULTILINE,
)
_FALLBACK = re.compile(
    r"\b(?:pytest|py\.test)\b(?:[^|;&\n]|>&)*\|\|(?!\s*(?:true|:|exit 0)\s*(?:[;)\n]|$))"
)
"""A command that runs another program where pytest fails, as it does where it finds no test."""

_UNITTEST = re.compile(r"^Ran (\d+) tests? in [^\n]*\s+OK(?: \(([^)\n]*)\))?", re.MULTILINE)
_GO = re.compile(r"^(?:ok|\?)\s+\S+\s+(?:\(cached\)|[\d.]+s)?\s*(\[no test[^\]]*\])?", re.MULTILINE)
_GO_TESTS = re.compile(r"^\s*--- (PASS|FAIL|SKIP):", re.MULTILINE)
_CARGO = re.compile(r"^test result: ok\. (\d+) passed;", re.MULTILINE)
_JEST = re.compile(r"^Tests: +([^\n]*\btotal)", re.MULTILINE)


def why_hollow(check: dict[str, Any], command: str = "") -> str | None:
    """Why a check that passed has tested nothing, None if it has or nothing shows it.

    `check` is the result of `run_check`, `command` what it ran: where pytest found no test and
    another program took its place, that program decided.
    """
    statuses = (check.get("tests") or {}).get("statuses")
    if statuses:
        skipped = {status for status in statuses if status.lower() in _SKIPPED}
        return "all its tests were skipped" if skipped == statuses.keys() else None
    output = f"{check.get('stdout') or ''}\n{check.get('stderr') or ''}"
    summaries = [*_summaries(output)]
    if not summaries or not all(is_hollow for _, is_hollow in summaries):
        return None
    last = summaries[-1][0]
    if "skipped" not in last and _FALLBACK.search(command):
        return None
    return f"no test ran: {last}"


def _summaries(output: str) -> list[tuple[str, bool]]:
    """What each runner printed last, and whether it says that no test ran."""
    summaries = []
    for match in _PYTEST.finditer(output):
        counts = match[1]
        summaries.append((counts, not re.search(r"passed|failed|xfailed|error", counts)))
    for match in _UNITTEST.finditer(output):
        skipped = re.search(r"skipped=(\d+)", match[2] or "")
        is_hollow = int(match[1]) == (int(skipped[1]) if skipped else 0)
        summaries.append((" ".join(match[0].split()), is_hollow))
    of_go = [match for match in _GO.finditer(output) if match[1] or match[0].startswith("ok")]
    if of_go:
        tests = set(_GO_TESTS.findall(output))
        is_hollow = tests == {"SKIP"} or (not tests and all(match[1] for match in of_go))
        summaries.append((" ".join(of_go[-1][0].split()), is_hollow))
    for match in _CARGO.finditer(output):
        summaries.append((match[0], match[1] == "0"))
    for match in _JEST.finditer(output):
        summaries.append((match[0], "passed" not in match[1] and "failed" not in match[1]))
    return summaries
