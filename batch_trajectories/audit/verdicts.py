"""Derives the verdict on each row of an audit from the records, and writes tasks.jsonl.

A line has `id`, `verdict`, `why` (text), `defects` (all verdicts that apply, the first is the
verdict), `digest` (see `task_digest`), `image` (its `reference` and `digest`), `times` (seconds of
the longest set-up and check) and `steps`, the results of the steps in the order of `audit_step`.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import orjson

from batch_trajectories.audit.audited import Name, audit_step
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.text import clip, single_line
from batch_trajectories.dataset.columns import column_names
from batch_trajectories.dataset.row_conversation import CHAT_COLUMNS
from batch_trajectories.dataset.row_workspace import (
    HistoryColumns,
    InsideColumns,
    SetupColumns,
    image_columns,
)
from batch_trajectories.dataset.scan import Scan
from batch_trajectories.records.files import open_temporary, temporary_path
from batch_trajectories.records.reader import open_index, read_record
from batch_trajectories.records.record_types import Record

# Checks that passed although no test ran, recognized by the last lines of test runners.
#
# The forms are those of pytest, unittest, `go test`, `cargo test` and jest; a check that prints
# none of these forms is not judged.

_SKIPPED = frozenset(("skip", "skipped", "ignored", "xskip"))

_PYTEST = re.compile(
    r"^=* ?((?:no tests ran|\d+ (?:passed|failed|skipped|deselected|errors?|warnings?|xpassed|"
    r"xfailed))[^\n]*?) in [\d.:]+s?\b",
    re.MULTILINE,
)
_FALLBACK = re.compile(
    r"\b(?:pytest|py\.test)\b(?:[^|;&\n]|>&)*\|\|(?!\s*(?:true|:|exit 0)\s*(?:[;)\n]|$))"
)
"""A command that runs another program if pytest fails, as pytest does if it finds no test."""

_UNITTEST = re.compile(r"^Ran (\d+) tests? in [^\n]*\s+OK(?: \(([^)\n]*)\))?", re.MULTILINE)
_GO = re.compile(r"^(?:ok|\?)\s+\S+\s+(?:\(cached\)|[\d.]+s)?\s*(\[no test[^\]]*\])?", re.MULTILINE)
_GO_TESTS = re.compile(r"^\s*--- (PASS|FAIL|SKIP):", re.MULTILINE)
_CARGO = re.compile(r"^test result: ok\. (\d+) passed;", re.MULTILINE)
_JEST = re.compile(r"^Tests: +([^\n]*\btotal)", re.MULTILINE)


def explain_hollow_pass(check: dict[str, Any], command: str = "") -> str | None:
    """The reason why a check that passed has tested nothing; None if it has, or if this is unknown.

    `check` is the result of `run_check`, `command` is the command of the check.
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
    # If pytest found no test and another program ran in its place, that program decided.
    if "skipped" not in last and _FALLBACK.search(command):
        return None
    return f"no test ran: {last}"


def _summaries(output: str) -> list[tuple[str, bool]]:
    """The last lines of test runners, each with whether it says that no test ran."""
    summaries = []
    for match in _PYTEST.finditer(output):
        counts = match[1]
        summaries.append((counts, not re.search(r"passed|failed|xfailed|error", counts)))
    for match in _UNITTEST.finditer(output):
        skipped = re.search(r"skipped=(\d+)", match[2] or "")
        is_hollow = int(match[1]) == (int(skipped[1]) if skipped else 0)
        summaries.append((" ".join(match[0].split()), is_hollow))
    go_lines = [match for match in _GO.finditer(output) if match[1] or match[0].startswith("ok")]
    if go_lines:
        tests = set(_GO_TESTS.findall(output))
        is_hollow = tests == {"SKIP"} or (not tests and all(match[1] for match in go_lines))
        summaries.append((" ".join(go_lines[-1][0].split()), is_hollow))
    for match in _CARGO.finditer(output):
        summaries.append((match[0], match[1] == "0"))
    for match in _JEST.finditer(output):
        summaries.append((match[0], "passed" not in match[1] and "failed" not in match[1]))
    return summaries


TASKS_FILE = "tasks.jsonl"
SOUND, NO_REFERENCE = "sound", "no_reference"

WHAT_TO_DO = {
    SOUND: "use them",
    "setup_fails": "repair `files`, `setup` or the image: no conversation can begin",
    "no_check": "add `check`, or `expected` with --check_expected: nothing says what is right",
    "too_slow": "raise `check.timeout_s` or --command_timeout_s, or make it faster",
    "flaky": "find what differs between repetitions: time, order, network, random numbers",
    "all_skipped": "install what the tests need, or name other tests: a pass means nothing",
    "passes_untouched": "make the check fail before the work: a reward is given for nothing",
    "reference_fails": "repair the check or the image: perhaps nobody can pass",
    "leaks_fix": "remove what is named from the image or the prompt: the solution can be read",
    "forgeable": "judge in a fresh copy (check.in: fresh), or bring tests and programs with it; "
    "what it runs from the workspace is the model's to write",
    NO_REFERENCE: "add `solution`, `solution_command` or `reference` to prove that it can pass",
}
"""The verdicts, the most serious first, each with advice for the user."""

_NEAR_LIMIT_SHARE = 0.8
"""A check that takes this share of its time limit is too slow on a busy machine."""
_MAX_MESSAGE_CHARS = 1500
_MAX_LISTED_LEAKS = 3
_STEPS = get_args(Name)


class TaskVerdict(NamedTuple):
    """A verdict on one row, with its reason."""

    verdict: str
    why: str


def task_digest(columns: Mapping[str, Any]) -> str:
    """A digest, 16 hex digits, of the parts of a task: prompt, set-up, image and check."""
    names = ["prompt", *CHAT_COLUMNS, "expected", "target", *image_columns(columns)]
    for group in (SetupColumns, HistoryColumns, InsideColumns):
        names += column_names(group)
    present = {name: columns[name] for name in sorted({*names}) if columns.get(name) is not None}
    content = exact_json.dumps(present, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def write_verdicts(run_dir: Path, scan: Scan) -> Counter[str]:
    """Write tasks.jsonl; returns the number of rows by verdict. Raises what `open_index` raises."""
    counts: Counter[str] = Counter()
    path = run_dir / TASKS_FILE
    temporary = temporary_path(path)
    with open_temporary(temporary, path) as file:
        for line in verdict_lines(run_dir, scan):
            counts[line["verdict"]] += 1
            file.write(exact_json.dumps(line) + b"\n")
    temporary.replace(path)
    return counts


def verdict_lines(run_dir: Path, scan: Scan) -> Iterator[dict[str, Any]]:
    """The lines of tasks.jsonl from the records, in the order of the dataset.

    A row whose steps have not all ended has no line. Raises what `open_index` raises.
    """
    with open_index(run_dir) as (index, records):
        for row in range(scan.rows):
            parts = []
            for sample in range(scan.num_samples):
                key = scan.key(row * scan.num_samples + sample)
                if (entry := index.get(key)) is None:
                    break
                record = read_record(records, entry.offset, entry.length, key)
                parts.append(read_step(record))
            else:
                yield _make_line(record.prompt_id, parts)


def shows_defect(part: Mapping[str, Any]) -> bool:
    """Whether a step ended differently than for a sound row."""
    if part.get("error") is not None:
        return True
    if "not_tried" in part:
        return False
    match part["step"]:
        case "leak":
            return bool(part.get("found"))
        case "reference":
            return bool(part["has_reference"]) and _outcome(part) != "passed"
    return _outcome(part) != "failed"


def read_step(record: Record) -> dict[str, Any]:
    """The fields of a step's record that a verdict needs."""
    step = audit_step(record.sample)
    part: dict[str, Any] = {"step": step.name}
    part |= {"way": step.way} if step.way else {"repetition": step.repetition}
    part |= record.audit or {}
    if step == audit_step(0):
        part |= {"digest": task_digest(record.row), "image": record.image}
    if record.error is not None:
        message = clip(record.error.message or "", max_chars=_MAX_MESSAGE_CHARS)
        part["error"] = {"class": record.error.error_class, "message": message}
    if record.check is not None:
        part["check"] = record.as_dict()["check"]
        command = part.get("command") or ""
        is_pass = part["check"].get("passed")
        part["hollow"] = explain_hollow_pass(part["check"], command) if is_pass else None
    return part


def _make_line(id_: str, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    defects = [*_find_defects(parts)]
    defects.sort(key=lambda defect: [*WHAT_TO_DO].index(defect.verdict))
    first = defects[0] if defects else TaskVerdict(SOUND, "")
    times = {
        "setup_s": max((part.get("setup_s", 0.0) for part in parts), default=0.0),
        "check_s": max((_check(part).get("duration_s", 0.0) for part in parts), default=0.0),
    }
    return {
        "id": id_,
        **first._asdict(),
        "defects": list(dict.fromkeys(defect.verdict for defect in defects)),
        "digest": parts[0].pop("digest"),
        "image": parts[0].pop("image"),
        "times": times,
        "steps": list(parts),
    }


def _check(part: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a step's check; empty if the check did not run."""
    return part.get("check") or {}


def _find_defects(parts: Sequence[dict[str, Any]]) -> Iterator[TaskVerdict]:
    """The defects of a row, from the results of its steps."""
    for part in parts:
        if (error := part.get("error")) is not None:
            too_slow = error["class"] == "setup_failed" and " timed out" in error["message"]
            yield TaskVerdict(
                "too_slow" if too_slow else "setup_fails", _last_line(error["message"])
            )
            return
    by_step = {name: [part for part in parts if part["step"] == name] for name in _STEPS}
    untouched, solved = by_step["untouched"], by_step["reference"]
    if not untouched[0]["is_judged"]:
        yield TaskVerdict("no_check", "no check, and no expected answer that is compared")
        return
    has_reference = solved[0]["has_reference"]
    for part in parts:
        message = _check(part).get("error") or ""
        if "it timed out" in message:
            yield TaskVerdict("too_slow", f"{_step_name(part)}: {message}")
        elif (limit := part.get("limit_s")) and _check(part).get(
            "duration_s", 0
        ) > _NEAR_LIMIT_SHARE * limit:
            took = _check(part)["duration_s"]
            yield TaskVerdict("too_slow", f"{_step_name(part)}: {took:.1f} s of {limit:g} s")
    groups = [untouched, *([solved] if has_reference else [])]
    for group in groups:
        outcomes = [_outcome(part) for part in group]
        if len(set(outcomes)) > 1:
            yield TaskVerdict("flaky", f"{group[0]['step']}: {', '.join(outcomes)}")
    passed = [part for group in groups for part in group if _outcome(part) == "passed"]
    if passed and all(part.get("hollow") for part in passed):
        yield TaskVerdict("all_skipped", f"{_step_name(passed[0])}: {passed[0]['hollow']}")
    if _outcome(untouched[0]) == "passed":
        yield TaskVerdict(
            "passes_untouched", f"passed without any work: {_describe_end(untouched[0])}"
        )
    if has_reference and _outcome(solved[0]) != "passed":
        yield TaskVerdict("reference_fails", _describe_end(solved[0]))
    leaks = [leak for part in by_step["leak"] for leak in part.get("found", ())]
    if leaks:
        yield TaskVerdict(
            "leaks_fix", "; ".join(leak["what"] for leak in leaks[:_MAX_LISTED_LEAKS])
        )
    # If the untouched workspace passes, no forged file is needed.
    forged = [part for part in by_step["tamper"] if _outcome(part) == "passed"]
    if forged and _outcome(untouched[0]) != "passed":
        ways = ", ".join(part["way"] for part in forged)
        yield TaskVerdict("forgeable", f"passed by forged files: {ways}")
    if not has_reference:
        yield TaskVerdict(NO_REFERENCE, "nothing says how it is solved")


def _outcome(part: Mapping[str, Any]) -> str:
    """The outcome of a step: `passed`, `failed` or `no result`."""
    if part.get("answer_passes") is not None and not _check(part):
        return "passed" if part["answer_passes"] else "failed"
    has_passed = _check(part).get("passed")
    return "no result" if has_passed is None else "passed" if has_passed else "failed"


def _step_name(part: Mapping[str, Any]) -> str:
    return str(part["step"]) + (f" {part['way']}" if "way" in part else "")


def step_title(part: Mapping[str, Any]) -> str:
    """The name of a step with its way, or with the number of its repetition."""
    return f"{part['step']} {part.get('way') or part['repetition']}"


def step_result(part: Mapping[str, Any]) -> str:
    """The result of a step, in a line."""
    if (error := part.get("error")) is not None:
        return f"{error['class']}: {_last_line(error['message'])}"
    if (why := part.get("not_tried")) is not None:
        return f"not tried: {why}"
    if part["step"] == "leak":
        leaks = part.get("found") or ()
        return "; ".join(leak["what"] for leak in leaks[:_MAX_LISTED_LEAKS]) or "no leak found"
    if part["step"] == "reference" and not part["has_reference"]:
        return "the row has no solution"
    outcome = _outcome(part)
    return outcome if outcome == "passed" else f"{outcome}: {_describe_end(part)}"


def _describe_end(part: Mapping[str, Any]) -> str:
    """Describe the end of a step's check, in a line."""
    if (why := part.get("not_applied")) is not None:
        return f"the solution cannot be applied: {_last_line(why)}"
    check = _check(part)
    return describe_check_end(check) if check else "by the answer alone"


def describe_check_end(check: Mapping[str, Any]) -> str:
    """Describe the end of a check, in a line; `check` is the result of `run_check`."""
    if check.get("error"):
        return single_line(check["error"])
    tests = check.get("tests") or {}
    if wrong := tests.get("first_wrong"):
        shown = ", ".join(f"{name} {status}" for name, status in list(wrong.items())[:3])
        return f"{tests['wrong']} of {tests['expected']} tests: {shown}"
    output = _last_line(check.get("stderr") or "") or _last_line(check.get("stdout") or "")
    return f"exit code {check.get('exit_code')}" + (f": {output}" if output else "")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return clip(lines[-1].strip(), max_chars=300) if lines else ""
