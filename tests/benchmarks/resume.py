"""Time and memory of a start with very many finished tasks.

    python -m tests.benchmarks.resume --records=1000000
    python -m tests.benchmarks.resume --records=1000000 --first_call -- --check_expected \\
        --num_samples=2 --until_passed=1

Generates a dataset and the records of all its rows but the last one, as a run would have written
them, then starts that run against the fake endpoint and takes the time to its first call. With
`--first_call` the run is killed there: at a million records, exports take minutes. Options of the
run can follow `--`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from batch_trajectories.api.stored_run import StoredRun
from batch_trajectories.dataset.scan import tasks
from batch_trajectories.dataset.scan_cache import save_scan
from batch_trajectories.engine.record import as_stored
from batch_trajectories.records.files import read_object
from batch_trajectories.records.names import DATASET_INDEX
from batch_trajectories.records.records import RecordFile
from tests.fakes.fake_endpoint import FakeEndpoint

ROOT = Path(__file__).resolve().parents[2]
_CHUNK = 10_000


def generate(cwd: Path, given: list[str], records: int) -> None:
    """Make a run in `cwd`, out of one of a single row, that lacks one of its `records` tasks."""
    dataset = cwd / "p.jsonl"
    write_rows(dataset, 1)
    subprocess.run(given, cwd=cwd, check=True, capture_output=True)
    run_dir = cwd / "trajectories" / "r"
    first, _, _ = (run_dir / "records.jsonl").read_bytes().partition(b"\n")
    template = read_object(first + b"\n")
    write_rows(dataset, records // StoredRun(run_dir).scan.num_samples)
    for name in ("records.jsonl", "records.idx"):
        (run_dir / name).unlink()
    found = StoredRun(run_dir).scan
    save_scan(run_dir / DATASET_INDEX, found)
    file = RecordFile(run_dir, run_dir / "quarantine")
    for number, task in enumerate(tasks(found)):
        if number == found.tasks - 1:
            break
        record: dict[str, Any] = {
            **template,
            "id": task.id,
            "prompt_id": task.prompt_id,
            "input_digest": task.input_digest,
            "row": task.columns,
        }
        file.add(as_stored(record))
        if number % _CHUNK == 0:
            file.sync()
    file.sync()
    file.close()


def write_rows(path: Path, count: int) -> None:
    """A dataset of `count` short prompts with ids."""
    with path.open("wb") as file:
        file.writelines(
            b'{"id":"p%d","prompt":"Question number %d","expected":"%d"}\n' % (n, n, n)
            for n in range(count)
        )


def status_of(pid: int, key: str) -> float:
    """A size in /proc/PID/status, in MB; 0 where the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(key)), 0.0)


def cpu_of(pid: int) -> float:
    """The seconds of processor time that a process has taken; 0 where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Started(NamedTuple):
    """How a start went: times in seconds, memory in MB, both of its parent process."""

    first_call: float
    first_call_cpu: float
    first_call_mb: float
    all: float
    peak_mb: float

    def describe(self, *, to_the_end: bool) -> str:
        """One line."""
        description = (
            f"first call after {self.first_call:6.2f} s, {self.first_call_cpu:6.2f} s of them CPU, "
            f"at {self.first_call_mb:4.0f} MB"
        )
        if to_the_end:
            description += (
                f"; all, exports included, {self.all:7.2f} s, at most {self.peak_mb:4.0f} MB"
            )
        return description


def start(cwd: Path, given: list[str], endpoint: FakeEndpoint, *, to_the_end: bool) -> Started:
    """Start the run; wait for its first call, then for its end, or kill it."""
    before = endpoint.journal()["requests"]
    began = time.monotonic()
    process = subprocess.Popen(given, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while endpoint.journal()["requests"] == before and process.poll() is None:
        time.sleep(0.01)
    first, cpu = time.monotonic() - began, cpu_of(process.pid)
    memory = peak = status_of(process.pid, "VmHWM")
    if not to_the_end:
        process.kill()
        process.wait()
        return Started(
            first_call=first, first_call_cpu=cpu, first_call_mb=memory, all=first, peak_mb=peak
        )
    while process.poll() is None:
        peak = max(peak, status_of(process.pid, "VmHWM"))
        time.sleep(0.05)
    if process.returncode:
        raise RuntimeError(f"the run ended with exit code {process.returncode}")
    return Started(
        first_call=first,
        first_call_cpu=cpu,
        first_call_mb=memory,
        all=time.monotonic() - began,
        peak_mb=peak,
    )


def main() -> None:
    """Generate, start with what is derived and without it, print what that took."""
    parser = argparse.ArgumentParser(prog="resume", description=__doc__)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--place", type=Path, help="directory for the files; a temporary one")
    parser.add_argument("--first_call", action="store_true", help="kill the run at its first call")
    parser.add_argument("options", nargs="*", help="options of the run, after --")
    options = parser.parse_args()
    with FakeEndpoint(turns=1, latency_s=0.0) as endpoint, TemporaryDirectory() as temporary:
        cwd = options.place or Path(temporary)
        cwd.mkdir(exist_ok=True)
        given = [sys.executable, str(ROOT / "batch_runner.py"), "--dataset_file=p.jsonl"]
        given += ["--run_name=r", "--model=openai:m", "--key_env=none", "--num_workers=1"]
        given += ["--enabled_toolsets=none", f"--base_url={endpoint.openai_url}"]
        given += options.options
        if not (cwd / "p.jsonl").exists():
            generate(cwd, given, options.records)
        run_dir = cwd / "trajectories" / "r"
        cache = {name: (run_dir / name).stat().st_size for name in ("records.jsonl", "records.idx")}
        size_mb = cache["records.jsonl"] / 2**20
        print(f"{options.records:,} records, {size_mb:,.0f} MB", flush=True)
        for missing in (None, DATASET_INDEX, "records.idx"):
            if missing is not None:
                (run_dir / missing).unlink()
            load = os.getloadavg()[0]
            started = start(cwd, given, endpoint, to_the_end=not options.first_call)
            description = started.describe(to_the_end=not options.first_call)
            print(f"without {missing or 'nothing':<11} {description} (load {load:.1f})", flush=True)
            for file, size in cache.items():
                with (run_dir / file).open("r+b") as opened:
                    opened.truncate(size)  # the last task is owed again
            for segment in (run_dir / "inflight").iterdir():
                segment.unlink()


if __name__ == "__main__":
    main()
