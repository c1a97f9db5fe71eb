"""Compares two runs: sums, and the tasks that ended differently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from statistics import median
from typing import Any

from batch_trajectories.api.stored_run import StoredRun
from batch_trajectories.basics.console import track_progress
from batch_trajectories.basics.text import first_few, plural
from batch_trajectories.config.fingerprint import stored_meaning
from batch_trajectories.engine.run_totals import read_spending, spent_by_judges
from batch_trajectories.export.statistics import by_model
from batch_trajectories.records.checks import CheckSums
from batch_trajectories.records.failures import NO_LIMIT
from batch_trajectories.records.index import IndexEntry
from batch_trajectories.records.scores import Labels
from batch_trajectories.report.formatting import count, dollars, one_line

_MAX_LISTED = 10
_VALUE_CHARS = 60


def compare(first: StoredRun, second: StoredRun) -> dict[str, Any]:
    """Compare the records of two runs by task id; JSON-ready.

    Keys: `runs` (see `_sum_records`, for each run), `options` (those that affect the data and
    differ: {name: [first, second]}), `same_dataset`, `both` (number of tasks with records in both),
    `only` (two lists of ids), `changed` (tasks with another status, [{"id", "from", "to"}] in the
    order of the first run), `judged_otherwise` (the same for tasks that passed their check in only
    one run, with true or false), `labelled_otherwise` (the same for verdicts of people), `paired`
    (see `_mean_differences`).
    """
    runs = [stored.identity for stored in (first, second)]
    entries = [
        dict(track_progress(stored.entries(), f"reading {stored.path.name}"))
        for stored in (first, second)
    ]
    before, after = entries
    labels = [dict(Labels(stored.path).verdicts()) for stored in (first, second)]
    meanings = [stored_meaning(run) for run in runs]
    both = [task_id for task_id in before if task_id in after]
    changed: list[dict[str, Any]] = []
    judged_otherwise: list[dict[str, Any]] = []
    for task_id in both:
        old, new = before[task_id], after[task_id]
        if old.status != new.status:
            changed.append({"id": task_id, "from": old.status, "to": new.status})
        if {old.passed, new.passed} == {False, True}:
            judged_otherwise.append({"id": task_id, "from": old.passed, "to": new.passed})
    return {
        "runs": [
            {
                "run_dir": str(stored.path),
                **_sum_records(list(entry.values())),
                **_read_spending(stored),
                "models": stored.by_model(),
                "labels": dict(Counter(sorted(labelled.values()))),
            }
            for stored, entry, labelled in zip((first, second), entries, labels, strict=True)
        ],
        "options": {
            name: [meaning.get(name) for meaning in meanings]
            for name in sorted(set().union(*meanings))
            if meanings[0].get(name) != meanings[1].get(name)
        },
        "same_dataset": runs[0]["dataset"]["sha256"] == runs[1]["dataset"]["sha256"],
        "both": len(both),
        "only": [
            [task_id for task_id in first_ids if task_id not in second_ids]
            for first_ids, second_ids in ((before, after), (after, before))
        ],
        "changed": changed,
        "judged_otherwise": judged_otherwise,
        "labelled_otherwise": _list_relabelled(*labels),
        "paired": _mean_differences([(before[task_id], after[task_id]) for task_id in both]),
    }


def _list_relabelled(first: Mapping[str, str], second: Mapping[str, str]) -> list[dict[str, Any]]:
    """The tasks to which people gave different verdicts in the two runs."""
    return [
        {"id": task_id, "from": verdict, "to": second[task_id]}
        for task_id, verdict in first.items()
        if task_id in second and second[task_id] != verdict
    ]


def _sum_records(entries: list[IndexEntry]) -> dict[str, Any]:
    """Sum up the records of one run; tokens and dollars as far as they are known.

    `checks` are the sums of `records.checks`.
    """
    checks = CheckSums()
    for entry in entries:
        checks.add(entry.verdict, entry.reward, check_failed=entry.check_failed)
    return {
        "records": len(entries),
        "statuses": dict(Counter(sorted(entry.status for entry in entries))),
        "turns": sum(entry.turns for entry in entries),
        "turns_median": median(entry.turns for entry in entries) if entries else None,
        "tool_calls": sum(entry.tool_calls for entry in entries),
        "input_tokens": sum(entry.input_tokens or 0 for entry in entries),
        "output_tokens": sum(entry.output_tokens or 0 for entry in entries),
        "tokens_unknown": sum(None in (e.input_tokens, e.output_tokens) for e in entries),
        "cost_usd": sum(entry.cost_usd or 0.0 for entry in entries),
        "cost_unknown": sum(entry.cost_usd is None for entry in entries),
        "checks": asdict(checks.sums()),
    }


def _read_spending(stored: StoredRun) -> dict[str, Any]:
    """All that a run has spent, including replaced records, and what judges were paid."""
    spent = read_spending(stored.path, stored.identity["config"].get("max_attempts", NO_LIMIT))
    judges = spent_by_judges(stored.path)
    return {
        "spent_usd": spent.usd,
        "spent_unknown": spent.unknown,
        "judges_usd": judges.usd,
        "judges_unknown": judges.unknown,
    }


def _mean_differences(pairs: list[tuple[IndexEntry, IndexEntry]]) -> dict[str, float | None]:
    """Means of second minus first over the tasks with known numbers in both runs."""
    means: dict[str, float | None] = {}
    for name in ("turns", "tool_calls", "input_tokens", "output_tokens", "cost_usd", "reward"):
        values = [(getattr(before, name), getattr(after, name)) for before, after in pairs]
        differences = [
            after - before for before, after in values if before is not None and after is not None
        ]
        means[name] = sum(differences) / len(differences) if differences else None
    return means


def as_text(comparison: dict[str, Any]) -> str:
    """A comparison for a person."""
    first, second = comparison["runs"]
    rows: list[tuple[str, ...]] = [
        ("", first["run_dir"], second["run_dir"], "mean difference per shared task")
    ]
    paired = comparison["paired"]
    for status in sorted(first["statuses"] | second["statuses"]):
        rows.append((status, *(_format_share(run, status) for run in comparison["runs"]), ""))
    for name in ("records", "turns", "tool_calls", "input_tokens", "output_tokens"):
        mean = _format_difference(paired.get(name), ".2f")
        label = "tasks ended" if name == "records" else name
        rows.append((label, count(first[name]), count(second[name]), mean))
    rows.append(
        (
            "cost",
            *_format_money(comparison["runs"], "cost"),
            _format_difference(paired["cost_usd"], ".6f", " dollars"),
        )
    )
    rows.append(("total spent", *_format_money(comparison["runs"], "spent"), ""))
    if any(run["judges_usd"] or run["judges_unknown"] for run in comparison["runs"]):
        rows.append(("judges", *_format_money(comparison["runs"], "judges"), ""))
    rows += _check_rows(comparison)
    for verdict in sorted(first["labels"] | second["labels"]):
        counts = [count(run["labels"].get(verdict, 0)) for run in comparison["runs"]]
        rows.append((f"label {verdict}", *counts, ""))
    widths = [max(len(row[n]) for row in rows) for n in range(3)]
    lines = [
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip()
        for row in rows
    ]
    lines += [
        "",
        f"{plural(comparison['both'], 'task')} ended in both"
        + _describe_unshared(comparison["only"]),
    ]
    if not comparison["same_dataset"]:
        lines.append("the datasets differ")
    for run in comparison["runs"]:
        if run["models"]:
            lines += [f"models of {run['run_dir']}:", *by_model.as_text(run["models"])]
    lines += [
        f"option {name}: {one_line(str(a), _VALUE_CHARS)} -> {one_line(str(b), _VALUE_CHARS)}"
        for name, (a, b) in comparison["options"].items()
    ]
    lines += _describe_changes(comparison["changed"]) + _describe_judged(
        comparison["judged_otherwise"]
    )
    if labelled := comparison["labelled_otherwise"]:
        ids = [f"{one['id']} ({one['from']} -> {one['to']})" for one in labelled]
        lines.append(f"labelled otherwise: {count(len(ids))}: {_list_ids(ids)}")
    return "\n".join(lines)


def _describe_changes(changed: list[dict[str, str]]) -> list[str]:
    if not changed:
        return ["all of them have the same status in both"]
    kinds = Counter((change["from"], change["to"]) for change in changed)
    lines = [f"{count(len(changed))} of them ended differently:"]
    for (before, after), number in kinds.most_common():
        ids = [
            change["id"] for change in changed if (change["from"], change["to"]) == (before, after)
        ]
        lines.append(f"  {before} -> {after}: {count(number)}: {_list_ids(ids)}")
    return lines


def _check_rows(comparison: dict[str, Any]) -> list[tuple[str, ...]]:
    """Rows about checks and scores; none if nothing was judged."""
    both = [run["checks"] for run in comparison["runs"]]
    if all(checks["pass_rate"] is None for checks in both):
        return []
    passed = [
        "-"
        if checks["pass_rate"] is None
        else f"{count(checks['passed'])} of {count(checks['passed'] + checks['failed'])} "
        f"({checks['pass_rate']:.1f}%)"
        for checks in both
    ]
    rewards = [
        "-" if checks["mean_reward"] is None else f"{checks['mean_reward']:g}" for checks in both
    ]
    return [
        ("passed", *passed, ""),
        ("reward", *rewards, _format_difference(comparison["paired"]["reward"], ".4f")),
    ]


def _describe_judged(judged_otherwise: list[dict[str, Any]]) -> list[str]:
    """The tasks that passed their check in only one run."""
    lines = []
    for which, passed_later in (("first", False), ("second", True)):
        ids = [change["id"] for change in judged_otherwise if change["to"] is passed_later]
        if ids:
            lines.append(f"passed only in the {which}: {count(len(ids))}: {_list_ids(ids)}")
    return lines


def _list_ids(ids: list[str]) -> str:
    names = [one_line(name, _VALUE_CHARS) for name in ids]
    return first_few(names, _MAX_LISTED) + (" (--json has all)" if len(ids) > _MAX_LISTED else "")


def _format_share(run: dict[str, Any], status: str) -> str:
    number = run["statuses"].get(status, 0)
    return f"{count(number)} ({100 * number / run['records']:.1f}%)" if run["records"] else "0"


def _format_money(runs: list[dict[str, Any]], kind: str) -> tuple[str, ...]:
    """The dollars that each run paid, as far as known."""
    paid = [(run[f"{kind}_usd"], run[f"{kind}_unknown"]) for run in runs]
    return tuple(
        "unknown" if n and not usd else dollars(usd) + (f" + {count(n)} unknown" if n else "")
        for usd, n in paid
    )


def _format_difference(mean: float | None, format_spec: str, unit: str = "") -> str:
    return "" if mean is None else f"{mean:+,{format_spec}}{unit}"


def _describe_unshared(only: list[list[str]]) -> str:
    cells = [
        f"{count(len(ids))} only in the {which}"
        for which, ids in zip(("first", "second"), only, strict=True)
        if ids
    ]
    return f"; {', '.join(cells)}" if cells else ""
