"""The one judge of all faults: after them, the same command completes the run as if nothing had
happened."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from batch_trajectories.api.results import write_results
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.engine.run_dir import read_run_json
from batch_trajectories.maintenance.upkeep import VerifyResult, check
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.helpers.running import run, session_of, wait_until

KNOWN = {
    "run.json",
    "records.jsonl",
    "records.idx",
    "dataset.idx",
    "failures.jsonl",
    "summary.json",
    "run.log",
    "lock",
    "statistics.json",
    "exports",
    "quarantine",
    "batches.jsonl",
    "batches",
    "mirror.json",
    "dataset.jsonl",
    "verdicts.jsonl",
    "inflight",
    "workspaces",
}
"""All that a finished run may hold; the last two must be empty."""


def check_run(run_dir: Path) -> VerifyResult:
    """What `verify --read_data` finds, without a process of its own."""
    identity = read_run_json(run_dir)
    config = RunConfig.model_validate(identity["config"])
    config = config.model_copy(update={"output_dir": run_dir.parent})
    return check(run_dir, identity, config, read_data=True, repair=False, make=write_results)


def resume_and_judge(
    cwd: Path,
    given: Mapping[str, Any],
    *,
    tasks: int,
    endpoint: FakeEndpoint | None = None,
    wasted: int = 0,
    code: int = 0,
    starts: int = 1,
) -> subprocess.CompletedProcess[str]:
    """Start the run again with the same command and check all that is promised.

    `wasted` is how many calls may be asked again although they were answered; `code` the exit
    code of the last of `starts` starts.
    """
    run_dir = cwd / str(given.get("output_dir", "trajectories")) / str(given["run_name"])
    finished = finished_lines(run_dir / "records.jsonl")
    before = {} if endpoint is None else asked_of(endpoint)
    for _ in range(starts):
        done = run(cwd, **given)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    judge_run_dir(run_dir, tasks=tasks)
    after = finished_lines(run_dir / "records.jsonl")
    assert finished.items() <= after.items(), "what was finished stays as it was"
    if endpoint is not None:
        again = asked_of(endpoint)
        for record in map(orjson.loads, finished.values()):
            key = conversation_of(record)
            assert again.get(key) == before.get(key), f"{record['id']} was asked for again"
        assert endpoint.journal()["repeated"] <= wasted
    return done


def judge_run_dir(run_dir: Path, *, tasks: int) -> None:
    """Check what lies on disk after a run that came to its end."""
    problems = check_run(run_dir)
    assert not problems.found, problems.describe()
    assert not problems.owed
    records = finished_lines(run_dir / "records.jsonl")
    assert len(records) == problems.records == tasks
    assert {path.name for path in run_dir.iterdir()} <= KNOWN
    for name in ("inflight", "workspaces"):
        assert not list((run_dir / name).iterdir())
    left = list(run_dir.parent.glob(f".{run_dir.name}.*"))
    assert not left, "temporary files"
    with (run_dir / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def finished_lines(records: Path) -> dict[str, bytes]:
    """Whole records by id; fails on a second one. A torn last line is not a record."""
    collected: dict[str, bytes] = {}
    if not records.exists():
        return collected
    for line in records.read_bytes().splitlines(keepends=True):
        try:
            record: dict[str, Any] = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if line.endswith(b"\n") and "id" in record:
            assert record["id"] not in collected, f"{record['id']} has two records"
            collected[record["id"]] = line
    return collected


def asked_of(endpoint: FakeEndpoint) -> dict[str, int]:
    """Requests by conversation, as the endpoint counted them."""
    counts: dict[str, int] = {}
    for count in endpoint.journal(full=True)["counts"]:
        counts[count["conversation"]] = counts.get(count["conversation"], 0) + count["asked"]
    return counts


def conversation_of(record: Mapping[str, Any]) -> str:
    """The name that the endpoint gives to the conversation of a record."""
    first = next(message for message in record["messages"] if message["role"] == "user")
    return hashlib.blake2b(f"{first['content']}\0".encode(), digest_size=8).hexdigest()


def assert_gone(session: int) -> None:
    """No process of a session lives on, once the kernel of a loaded machine has ended them."""
    wait_until(lambda: not session_of(session))
