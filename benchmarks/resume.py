"""How long a start takes, and how much memory, where very many tasks are finished already.

    python -m benchmarks.resume --records=1000000

Generates a dataset and the records of all its rows but the last one, as a run would have written
them, then starts that run against the fake endpoint and takes the time to its first call.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from batch.config import RunConfig
from batch.files import AppendFile
from batch.prompts import scan, tasks
from batch.records import index_fields, index_line
from benchmarks.fake_endpoint import FakeEndpoint

ROOT = Path(__file__).resolve().parents[1]
_CHUNK = 10_000


def generate(cwd: Path, given: list[str], records: int) -> None:
    """Make a finished run of `records` tasks in `cwd` out of a run of one, and one task more."""
    dataset = cwd / "p.jsonl"
    write_rows(dataset, 1)
    subprocess.run(given, cwd=cwd, check=True, capture_output=True)
    run_dir = cwd / "trajectories" / "r"
    template = orjson.loads((run_dir / "records.jsonl").read_bytes())
    write_rows(dataset, records + 1)
    for name in ("records.jsonl", "records.idx"):
        (run_dir / name).unlink()
    config = RunConfig.model_validate(orjson.loads((run_dir / "run.json").read_bytes())["config"])
    found = scan(dataset, max_samples=records, rules=config.row_rules("openai_chat"))
    files = AppendFile(run_dir / "records.jsonl"), AppendFile(run_dir / "records.idx")
    offset = 0
    chunk: list[tuple[bytes, bytes]] = []
    for task in tasks(found, num_samples=1):
        record: dict[str, Any] = {
            **template,
            "id": task.id,
            "prompt_id": task.prompt_id,
            "input_digest": task.input_digest,
            "row": task.columns,
        }
        line = orjson.dumps(record) + b"\n"
        chunk.append((line, index_line(index_fields(record), offset, len(line))))
        offset += len(line)
        if len(chunk) == _CHUNK or task.id == f"p{records - 1}":
            for file, lines in zip(files, zip(*chunk, strict=True), strict=True):
                file.append(b"".join(lines))
            chunk.clear()


def write_rows(path: Path, count: int) -> None:
    """A dataset of `count` short prompts with ids."""
    with path.open("wb") as file:
        file.writelines(
            b'{"id":"p%d","prompt":"Question number %d"}\n' % (n, n) for n in range(count)
        )


def status_of(pid: int, key: str) -> float:
    """A size in /proc/PID/status, in MB; 0 where the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(key)), 0.0)


def start(cwd: Path, given: list[str], endpoint: FakeEndpoint) -> tuple[float, float, float, float]:
    """Start the run; seconds and peak MB of its parent at the first call and at the end."""
    before = endpoint.journal()["requests"]
    began = time.monotonic()
    process = subprocess.Popen(given, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while endpoint.journal()["requests"] == before and process.poll() is None:
        time.sleep(0.01)
    first, memory = time.monotonic() - began, status_of(process.pid, "VmHWM")
    peak = memory
    while process.poll() is None:
        peak = max(peak, status_of(process.pid, "VmHWM"))
        time.sleep(0.05)
    if process.returncode:
        raise RuntimeError(f"the run ended with exit code {process.returncode}")
    return first, memory, time.monotonic() - began, peak


def main() -> None:
    """Generate, start with the index and without it, print what that took."""
    parser = argparse.ArgumentParser(prog="resume", description=__doc__)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--place", type=Path, help="directory for the files; a temporary one")
    options = parser.parse_args()
    with FakeEndpoint(turns=1, latency_s=0.0) as endpoint, TemporaryDirectory() as temporary:
        cwd = options.place or Path(temporary)
        given = [sys.executable, str(ROOT / "batch_runner.py"), "--dataset_file=p.jsonl"]
        given += ["--run_name=r", "--model=openai:m", "--key_env=none", "--num_workers=1"]
        given += ["--enabled_toolsets=none", f"--base_url={endpoint.openai_url}"]
        if not (cwd / "p.jsonl").exists():
            generate(cwd, given, options.records)
        run_dir = cwd / "trajectories" / "r"
        kept = {name: (run_dir / name).stat().st_size for name in ("records.jsonl", "records.idx")}
        size_mb = kept["records.jsonl"] / 2**20
        print(f"{options.records:,} records, {size_mb:,.0f} MB", flush=True)
        for name in ("with the index", "without it"):
            if name == "without it":
                (run_dir / "records.idx").unlink()
            first, memory, total, peak = start(cwd, given, endpoint)
            print(
                f"{name:<15} first call after {first:6.2f} s at {memory:6.0f} MB; "
                f"all, exports included, {total:7.2f} s, at most {peak:6.0f} MB",
                flush=True,
            )
            for file, size in kept.items():
                with (run_dir / file).open("r+b") as opened:
                    opened.truncate(size)  # the last task is owed again


if __name__ == "__main__":
    main()
