"""A long run under steady faults: does anything grow, is anything lost?

    python -m tests.benchmarks.soak [--prompts=10000] [--turns=3] [--faults=0.05] [--kills=4]

Of all model calls a share fails, in every way that the fake endpoint knows; workers are killed on
the way, and half-way everything at once. Prints memory, open files and threads of the parent and
its workers over time with their slopes, then what was lost, doubled, torn, orphaned and wasted.
Exit code 1 where any of the first four is not 0, or more was wasted than was in flight at kills.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import orjson

from batch_trajectories.api.results import write_results
from batch_trajectories.api.stored_run import open_run
from batch_trajectories.maintenance.upkeep import check
from batch_trajectories.records.index import ROW_BYTES
from tests.benchmarks.resume import ROOT, status_of, write_rows
from tests.fakes.fake_endpoint import FakeEndpoint

KINDS = (
    "http500",
    "http529",
    "disconnect",
    "reset",
    "html",
    "empty",
    "null",
    "cut",
    "bad_utf8",
    "error200",
    "no_choices",
    "no_finish",
)
WORKERS, AGENTS = 2, 20

_GROWN_UP_S = 3.0
"""A worker that is younger is still importing, and says nothing about growth."""


class Sample(NamedTuple):
    """How large the processes of a run are once `tasks` have their record."""

    start: int
    """Which start of the run: a killed process starts small again, which is not growth."""
    at: float
    tasks: int
    sizes: dict[str, float]


class Soak:
    """One run, watched and hurt."""

    def __init__(self, cwd: Path, endpoint: FakeEndpoint, *, prompts: int, kills: int) -> None:
        self._cwd = cwd
        self._prompts = prompts
        self._run_dir = cwd / "trajectories" / "r"
        self._kill_at = [prompts * (n + 1) // (kills + 2) for n in range(kills)]
        self._kill_all_at: float = prompts / 2
        self._began = time.monotonic()
        self.samples: list[Sample] = []
        self._start = 0
        self.deaths = 0
        """Worker processes that were killed."""
        self._command = [sys.executable, str(ROOT / "batch_runner.py"), "--dataset_file=p.jsonl"]
        self._command += ["--run_name=r", "--model=openai:m", "--key_env=none"]
        self._command += [f"--num_workers={WORKERS}", f"--batch_size={AGENTS}", "--max_attempts=9"]
        self._command += ["--enabled_toolsets=file", f"--base_url={endpoint.openai_url}"]

    def run(self, every_s: float) -> int:
        """Run to the end, taking a sample every so often; the exit code of the last start."""
        while True:
            self._start += 1
            with (self._cwd / "output.txt").open("ab") as output:
                process = subprocess.Popen(
                    self._command,
                    cwd=self._cwd,
                    stderr=output,
                    stdout=output,
                    start_new_session=True,
                )
            code = self._watch(process, every_s)
            # A failed task is tried again by the next start.
            if code == 1 or code < 0:
                continue
            return code

    def _watch(self, process: subprocess.Popen[bytes], every_s: float) -> int:
        last = 0.0
        born: dict[int, float] = {}
        while process.poll() is None:
            tasks = self._finished()
            workers = children_of(process.pid)
            if self._kill_at and tasks >= self._kill_at[0] and len(workers) == WORKERS:
                self._kill_at.pop(0)
                os.kill(workers[0], signal.SIGKILL)
                self.deaths += 1
            if tasks >= self._kill_all_at:
                self._kill_all_at = float("inf")
                os.killpg(process.pid, signal.SIGKILL)
                self.deaths += len(workers)
            now = time.monotonic()
            born = {worker: born.get(worker, now) for worker in workers}
            grown = len(workers) == WORKERS and now - max(born.values()) > _GROWN_UP_S
            if now - last >= every_s and grown:
                last = now
                self._sample(process.pid, workers, tasks)
            time.sleep(0.1)
        return process.returncode

    def _finished(self) -> int:
        """Rows of the index: those of the records, and one for each way in which they end."""
        try:
            return (self._run_dir / "records.idx").stat().st_size // ROW_BYTES
        except FileNotFoundError:
            return 0

    def _sample(self, parent: int, workers: Sequence[int], tasks: int) -> None:
        sizes = {
            "parent MB": status_of(parent, "VmRSS"),
            "parent files": files_of(parent),
            "parent threads": threads_of(parent),
            "worker MB": max(status_of(worker, "VmRSS") for worker in workers),
            "worker files": max(map(files_of, workers)),
            "worker threads": max(map(threads_of, workers)),
        }
        self.samples.append(Sample(self._start, time.monotonic() - self._began, tasks, sizes))
        shown = ", ".join(f"{name} {size:.0f}" for name, size in sizes.items())
        print(f"{self.samples[-1].at:7.0f} s {tasks:>7,} tasks: {shown}", flush=True)

    def judge(self, endpoint: FakeEndpoint) -> dict[str, int]:
        """What went wrong over all starts, by kind; `wasted` are calls that were paid twice."""
        stored = open_run(self._run_dir)
        config = stored.config.model_copy(update={"dataset_file": self._cwd / "p.jsonl"})
        found = check(
            stored.path, stored.identity, config, read_data=True, repair=False, make=write_results
        )
        for problem in found.found:
            print(problem.describe())
        ids = Counter(
            orjson.loads(line)["id"]
            for line in (stored.path / "records.jsonl").read_bytes().splitlines()
            if line.startswith(b"{")
        )
        left = [*(stored.path / "inflight").iterdir(), *(stored.path / "workspaces").iterdir()]
        return {
            "lost": self._prompts - len(ids),
            "duplicated": ids.total() - len(ids),
            "torn": len(found.found),
            "orphaned": len(left),
            "wasted": endpoint.journal()["repeated"],
        }


def children_of(pid: int) -> list[int]:
    """The worker processes of a run."""
    collected = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"spawn_main" in (stat.parent / "cmdline").read_bytes():
                collected.append(int(stat.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return collected


def files_of(pid: int) -> float:
    """Open files of a process, 0 where it cannot be looked at."""
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return 0


def threads_of(pid: int) -> float:
    """Threads of a process, 0 where it is gone."""
    try:
        return len(list(Path(f"/proc/{pid}/task").iterdir()))
    except OSError:
        return 0


def steady(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each start without its first third, which is warming up."""
    starts = {sample.start for sample in samples}
    lives = [[sample for sample in samples if sample.start == start] for start in sorted(starts)]
    return [life[-(-len(life) // 3) :] for life in lives]


def slope(lives: Sequence[Sequence[Sample]], name: str) -> float:
    """Growth per 1,000 tasks within the lives of processes, by least squares."""
    spread = across = 0.0
    for life in lives:
        xs = [sample.tasks / 1000 for sample in life]
        ys = [sample.sizes[name] for sample in life]
        mean_x, mean_y = sum(xs) / max(len(xs), 1), sum(ys) / max(len(ys), 1)
        spread += sum((x - mean_x) ** 2 for x in xs)
        across += sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return across / spread if spread else 0.0


def main() -> None:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--faults", type=float, default=0.05, help="share of the calls that fail")
    parser.add_argument("--kills", type=int, default=4, help="workers that are killed")
    parser.add_argument("--every_s", type=float, default=10.0, help="time between samples")
    options = parser.parse_args()
    faults = dict.fromkeys(KINDS, options.faults / len(KINDS))
    endpoint = FakeEndpoint(
        turns=options.turns,
        latency_s=0.02,
        faults=faults,
        tool="write_file",
        arguments='{"path": "n{turn}", "content": "{turn}"}',
    )
    with TemporaryDirectory() as place, endpoint:
        write_rows(Path(place) / "p.jsonl", options.prompts)
        soak = Soak(Path(place), endpoint, prompts=options.prompts, kills=options.kills)
        code = soak.run(options.every_s)
        lives = steady(soak.samples)
        print("growth per 1,000 tasks, without the first third of each start:")
        for name in soak.samples[0].sizes if soak.samples else ():
            print(f"  {name:<16} {slope(lives, name):+8.3f}")
        counts = soak.judge(endpoint)
        bound = soak.deaths * AGENTS
        journal = endpoint.journal()
        print(f"exit code {code}, {journal['requests']:,} calls, faults {journal['faults']}")
        print(", ".join(f"{name} {count}" for name, count in counts.items()), f"(of {bound})")
    bad = any(counts[name] for name in counts if name != "wasted") or counts["wasted"] > bound
    sys.exit(1 if bad or code else 0)


if __name__ == "__main__":
    main()
