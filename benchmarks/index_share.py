"""What the index costs a run: its share of the bytes that the run writes, and of its CPU time.

    python -m benchmarks.index_share --turns=5

Runs conversations against the fake endpoint, each turn but the last with a tool call. Journals are
removed as conversations finish, so each is held by a second name until it is measured. The CPU
time of the index is that of making its rows again and writing them, a write per record, which is
the most that a run does.
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

from batch.files import AppendFile
from batch.index import MARK, RowMaker, index_fields
from batch.records import lines_from, parse_record
from benchmarks.fake_endpoint import FakeEndpoint
from benchmarks.resume import ROOT, write_rows

NOTE: dict[str, Any] = {
    "tool": "write_file",
    "arguments": '{"path": "n{turn}", "content": "{turn}"}',
}


def run_beside(given: list[str], cwd: Path) -> int:
    """Run to the end; the bytes of all journals that there were."""
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
    return sum(file.stat().st_size for file in held.iterdir())


def index_again(records: Path, place: Path) -> tuple[float, int]:
    """CPU seconds of making and writing the index of a run's records, and how many these are."""
    parsed = [(offset, len(line), parse_record(line)) for offset, line in lines_from(records, 0)]
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
    parser = argparse.ArgumentParser(prog="index_share", description=__doc__)
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
            "journals": journals,
            "training file": (cwd / "trajectories" / "r.jsonl").stat().st_size,
            "records.idx": (run_dir / "records.idx").stat().st_size,
            "dataset.idx": (run_dir / "dataset.idx").stat().st_size,
        }
        index_cpu, records = index_again(run_dir / "records.jsonl", cwd)
    print(f"{records:,} conversations of {options.turns} turns")
    for name, size in sizes.items():
        share = f"{100 * size / sum(sizes.values()):6.2f} % of all bytes"
        beside = f"{100 * size / sizes['records.jsonl']:7.2f} % of the records"
        print(f"  {name:<14} {size / records:9,.0f} bytes each  {share}  {beside}")
    print(
        f"  CPU of the run {1000 * cpu / records:.2f} ms each, of its index "
        f"{1e6 * index_cpu / records:.1f} µs: {100 * index_cpu / cpu:.2f} %"
    )


if __name__ == "__main__":
    main()
