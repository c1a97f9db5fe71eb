"""The facts of a whole run, as the report states them: funnel, problems, rewards, costs.

Another process reads all records for it, and keeps the result beside the index. It is shown until
a new one is made, as of so many records.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import orjson

from batch_trajectories.api.stored_run import StoredRun
from batch_trajectories.audit.verdicts import TASKS_FILE
from batch_trajectories.engine.run_totals import read_spending, spent_by_judges
from batch_trajectories.export.conversation.own_work import AuthoredWork
from batch_trajectories.export.statistics.health import HEALTH_CHECKS, Health, problems_in
from batch_trajectories.export.statistics.rewards import RewardStatistics
from batch_trajectories.records.failures import NO_LIMIT, failures_by_class, stored_failures
from batch_trajectories.records.files import read_json, replace_file
from batch_trajectories.records.names import FAILURES_FILE, RECORDS_FILE, SCORES_FILE
from batch_trajectories.records.reader import RecordPart, process_records

NAME = "facts.json"

_WAIT_FACTOR = 20
"""A run that grows is read again after so many times as long as that takes."""


class _Part:
    """The facts of some records."""

    def __init__(self, samples: int, rule: Any) -> None:
        self.rewards, self.health = RewardStatistics(samples, rule), Health(samples)
        self.records = 0


def make_facts(run_dir: Path, cache: Path) -> None:
    """Read the whole run and write its facts. Raises `RunError` and `OSError`."""
    began = time.monotonic()
    state = source_state(run_dir)
    stored = StoredRun(run_dir)
    config = stored.identity["config"]
    samples, rule = config["num_samples"], stored.rule

    def collect(some: RecordPart) -> _Part:
        part = _Part(samples, rule)
        for records in some.few:
            for record in records:
                part.rewards.add(record)
                part.health.add(record, AuthoredWork(record))
            part.records += len(records)
        return part

    whole, *others = process_records(run_dir, collect, doing="facts")
    for part in others:
        whole.rewards.merge(part.rewards)
        whole.health.merge(part.health)
        whole.records += part.records
    whole.health.add_failures(stored_failures(run_dir))
    health = whole.health.to_json(stored.price_of)
    funnel, why, signs = stored.funnel_if_known()
    facts = {
        "verdicts": _count_verdicts(run_dir) if config.get("audit") else None,
        "as_of": {"records": whole.records, "at": time.time()},
        "funnel": funnel,
        "signs": [sign.to_json() for sign in signs],
        "funnel_unknown": why,
        "errors": failures_by_class(run_dir),
        "spent": read_spending(run_dir, config.get("max_attempts", NO_LIMIT))._asdict(),
        "judges": spent_by_judges(run_dir)._asdict(),
        "rewards": whole.rewards.to_json(),
        "health": problems_in(health),
        "caches": whole.health.caches.to_json(stored.price_of),
        "health_checked": sum(one["of"] >= HEALTH_CHECKS[one["name"]].least for one in health),
    }
    content = {"state": state, "took_s": time.monotonic() - began, "facts": facts}
    replace_file(cache / NAME, orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS))


def _count_verdicts(run_dir: Path) -> dict[str, int] | None:
    """Count the tasks of an audit by verdict; None before its end."""
    try:
        with (run_dir / TASKS_FILE).open("rb") as file:
            return dict(Counter(orjson.loads(line)["verdict"] for line in file))
    except FileNotFoundError:
        return None


def source_state(run_dir: Path) -> list[list[int]]:
    """Changes when the facts do."""
    found = []
    for name in (
        RECORDS_FILE,
        FAILURES_FILE,
        SCORES_FILE,
        "exports/dataset/manifest.json",
        TASKS_FILE,
    ):
        try:
            status = (run_dir / name).stat()
        except FileNotFoundError:
            found.append([0, 0])
            continue
        found.append([status.st_ino, status.st_size])
    return found


def read_facts(cache: Path, run_dir: Path) -> tuple[dict[str, Any] | None, bool]:
    """The facts that were made last, and whether it is time to make new ones."""
    made = read_json(cache / NAME)
    if made is None or not {"state", "took_s", "facts"} <= made.keys():
        return None, True
    age = time.time() - made["facts"]["as_of"]["at"]
    return made["facts"], made["state"] != source_state(run_dir) and age > _WAIT_FACTOR * made[
        "took_s"
    ]
