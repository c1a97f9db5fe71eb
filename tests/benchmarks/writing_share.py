"""The share of writing (journal, records, index) in the bytes and CPU time of a run.

    python -m tests.benchmarks.writing_share --turns=5

Runs conversations against the fake endpoint, each turn but the last with a tool call. Journals are
removed as conversations finish, so each is held by a second name until it is measured. CPU time is
that of writing the same again with what the run writes with: each event of the journal with its
syncs beside, the records, and an index with a write per record, which is the most that a run does.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from batch_trajectories.records.files import AppendFile
from batch_trajectories.records.index import MARK, RowMaker, index_fields
from batch_trajectories.records.journal import JournalWriter
from batch_trajectories.records.records import parse_record, read_lines
from tests.benchmarks.resume import ROOT, write_rows
from tests.fakes.fake_endpoint import FakeEndpoint

NOTE: dict[str, Any] = {
    "tool": "write_file",
    "arguments": '{"path": "n{turn}", "content": "{turn}"}',
}


def run_beside(given: list[str], cwd: Path) -> list[Path]:
    """Run to the end; all journals that there were."""
    held = cwd / "held"
    held.mkdir()
    process = subprocess.Popen(given, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        for segment in cwd.glob("trajectories/r/inflight/worker-*"):
            with suppress(FileExistsError, FileNotFoundError):
                os.link(segment, held / segment.name)
        time.sleep(0.005)
    if process.returncode:
        raise RuntimeError(f"the run ended with exit code {process.returncode}")
    return sorted(held.iterdir())


def journal_again(journals: list[Path], place: Path) -> float:
    """CPU seconds of writing all events again, at the pace of the run's own syncs or faster."""
    lines = [orjson.loads(line) for journal in journals for line in journal.open("rb")]
    place.mkdir()
    began = time.process_time()
    writer = JournalWriter(place, 0, on_storage_error=print)
    for line in lines:
        task, digest, event = line["task"], line["input_digest"], line["event"]
        writer.append(task, digest, event, assignment=line["deal"], position=line["position"])
    writer.close()
    return time.process_time() - began


def records_again(records: Path, place: Path) -> float:
    """CPU seconds of writing all records again, with a sync for every eight."""
    lines = records.read_bytes().splitlines(keepends=True)
    began = time.process_time()
    file = AppendFile(place / "records.jsonl")
    for number, line in enumerate(lines):
        file.append(line)
        if number % 8 == 0:
            file.sync()
    taken = time.process_time() - began
    file.close()
    return taken


def index_again(records: Path, place: Path) -> tuple[float, int]:
    """CPU seconds of making and writing the index of a run's records, and how many these are."""
    parsed = [(offset, len(line), parse_record(line)) for offset, line in read_lines(records, 0)]
    file = AppendFile(place / "records.idx")
    maker = RowMaker()
    began = time.process_time()
    file.append(MARK)
    for offset, length, record in parsed:
        assert record is not None
        file.append(maker.rows(index_fields(record), offset, length))
    taken = time.process_time() - began
    file.close()
    return taken, len(parsed)


def main() -> None:
    """Run, measure, print."""
    parser = argparse.ArgumentParser(prog="writing_share", description=__doc__)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--toolset", default="file", help="`none` makes the smallest records")
    options = parser.parse_args()
    with (
        FakeEndpoint(turns=options.turns, latency_s=0.0, **NOTE) as endpoint,
        TemporaryDirectory() as temporary,
    ):
        cwd = Path(temporary)
        write_rows(cwd / "p.jsonl", options.tasks)
        given = [sys.executable, str(ROOT / "batch_runner.py"), "--dataset_file=p.jsonl"]
        given += ["--run_name=r", "--model=openai:m", "--key_env=none", "--num_workers=1"]
        given += [f"--enabled_toolsets={options.toolset}", f"--base_url={endpoint.openai_url}"]
        journals = run_beside(given, cwd)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = used.ru_utime + used.ru_stime
        run_dir = cwd / "trajectories" / "r"
        sizes = {
            "records.jsonl": (run_dir / "records.jsonl").stat().st_size,
            "journals": sum(file.stat().st_size for file in journals),
            "training file": (cwd / "trajectories" / "r.jsonl").stat().st_size,
            "records.idx": (run_dir / "records.idx").stat().st_size,
            "dataset.idx": (run_dir / "dataset.idx").stat().st_size,
        }
        index_cpu, records = index_again(run_dir / "records.jsonl", cwd)
        costs = {
            "journal": journal_again(journals, cwd / "again"),
            "records": records_again(run_dir / "records.jsonl", cwd),
            "index": index_cpu,
        }
    print(f"{records:,} conversations of {options.turns} turns")
    for name, size in sizes.items():
        share = f"{100 * size / sum(sizes.values()):6.2f} % of all bytes"
        beside = f"{100 * size / sizes['records.jsonl']:7.2f} % of the records"
        print(f"  {name:<14} {size / records:9,.0f} bytes each  {share}  {beside}")
    print(f"  CPU of the run: {1000 * cpu / records:.2f} ms each")
    for name, taken in {**costs, "all three": sum(costs.values())}.items():
        print(
            f"  {name:<14} {1e6 * taken / records:9,.1f} µs each  {100 * taken / cpu:6.2f} % of it"
        )


if __name__ == "__main__":
    main()
