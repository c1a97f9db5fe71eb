"""Export speed, compared with only reading and writing the records.

    python -m tests.benchmarks.export_speed [--rows 4000] [--size small] [--format hermes]
        [--reps 5]

Conversations with tools are run against the fake endpoint, copied under new ids into a run of
`--rows` records, and exported. In turns, each in a process of its own and `--reps` times:

    floor   orjson reads each record and writes each row that the export makes of it
    bare    thirty lines that make chat messages of records and write them, without a check
    NAME    the export to one format, from the index to the manifest, and the default export

Printed are medians with their spread: MB of records per second of CPU, the share of the bare
stream's rate, that of the floor of the same format, and the peak memory of the process.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import click
import orjson

from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.scan import Scan, scan, tasks
from batch_trajectories.engine.record import as_stored
from batch_trajectories.engine.run_dir import read_run_json, write_run_json
from batch_trajectories.records.files import read_object
from batch_trajectories.records.index import MARK, RowMaker, index_fields
from tests.fakes.fake_endpoint import FakeEndpoint

ROOT = Path(__file__).resolve().parents[2]
SIZES: dict[str, tuple[int, int, int, str]] = {
    "large": (5, 3600, 800, "terminal,file"),
    "small": (2, 160, 60, "terminal"),
}
"""Turns, characters of a result and of reasoning, toolsets: about 34 and 4 KB a record."""

_CONVERSATIONS = 100
_FLOOR_ROWS = 64


@click.group(invoke_without_command=True)
@click.option("--rows", default=4000)
@click.option("--size", type=click.Choice(sorted(SIZES)), default="large")
@click.option("--format", "formats", default="hermes,openai,llamafactory,atif,raw,default")
@click.option("--reps", default=5)
@click.pass_context
def main(context: click.Context, rows: int, size: str, formats: str, reps: int) -> None:
    """Make records, export them, print what it took."""
    if context.invoked_subcommand is not None:
        return
    names = formats.split(",")
    with tempfile.TemporaryDirectory() as folder:
        run_dir = make_run(Path(folder), rows, *SIZES[size])
        megabytes = (run_dir / "records.jsonl").stat().st_size / 1e6
        click.echo(
            f"{rows:,} records, {megabytes:.0f} MB, {megabytes * 1000 / rows:.1f} KB each;"
            f" medians of {reps}"
        )
        kinds = ["bare", *(kind for name in names for kind in (name, f"floor:{name}"))]
        found = defaultdict(list)
        for _ in range(reps):
            for kind in kinds:
                found[kind].append(_in_a_process(run_dir, kind))
    rates = {kind: [megabytes / cpu for cpu, _ in runs] for kind, runs in found.items()}
    for kind in kinds:
        rate, peak = statistics.median(rates[kind]), max(peak for _, peak in found[kind])
        line = f"{kind:20} {rate:6.0f} MB/s ({min(rates[kind]):.0f}-{max(rates[kind]):.0f})"
        if kind in names:
            line += f", {_ratio(rates[kind], rates['bare'])} of the bare stream"
            line += f", {_ratio(rates[kind], rates[f'floor:{kind}'])} of the floor"
        click.echo(f"{line}, peak {peak:.0f} MB")


def _ratio(ours: list[float], theirs: list[float]) -> str:
    """Median and spread over the repetitions, each compared with its neighbour in time."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def _in_a_process(run_dir: Path, kind: str) -> tuple[float, float]:
    """Seconds of CPU and peak MB."""
    command = [sys.executable, "-m", "tests.benchmarks.export_speed", "measure", str(run_dir), kind]
    output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    cpu, peak = orjson.loads(output)
    return cpu, peak


@main.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("kind")
@click.option("--times", default=1)
def measure(run_dir: Path, kind: str, times: int) -> None:
    """Do one thing and print its seconds of CPU and the peak MB of this process."""
    config = RunConfig.model_validate(read_run_json(run_dir)["config"])
    scanned = scan(config.dataset_file, max_samples=None, rules=config.row_rules("openai_chat"))
    work = _work(run_dir, scanned, kind)
    status = Path("/proc/self/status").read_text  # `ru_maxrss` takes over that of the parent
    cpu = sum(work() for _ in range(times))
    peak = next(int(line.split()[1]) for line in status().splitlines() if "VmHWM" in line) / 1024
    click.echo(orjson.dumps([cpu, peak]))


def _work(run_dir: Path, found: Scan, kind: str) -> Callable[[], float]:
    output = run_dir.parent / "exports"
    if kind.startswith("floor:"):
        name = kind.removeprefix("floor:")
        rows = output / name / name / "train.jsonl"
        if name == "default":
            rows = run_dir.parent / f"{run_dir.name}.jsonl"
        return lambda: _floor(run_dir / "records.jsonl", rows)
    if kind == "bare":
        return lambda: _timed(lambda: _bare(run_dir / "records.jsonl", output.with_name("bare")))
    if kind == "default":
        from batch_trajectories.export.training_files import export_run

        return lambda: _timed(lambda: export_run(run_dir, found, num_samples=1))
    from batch_trajectories.export.dataset.directory import export_dataset
    from batch_trajectories.export.dataset.runs import Source
    from batch_trajectories.export.rows.recipe import load_recipe

    source, recipe = Source(run_dir, found, 1), load_recipe(None, {"formats": kind})
    return lambda: _timed(lambda: export_dataset(source, recipe, output / kind))


def _timed(work: Callable[[], object]) -> float:
    before = _cpu_s()
    work()
    return _cpu_s() - before


def _cpu_s() -> float:
    """Seconds of CPU of this process and of the parts of its work, which have ended."""
    of_parts = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + of_parts.ru_utime + of_parts.ru_stime


def _floor(records: Path, rows: Path) -> float:
    cpu = 0.0
    with records.open("rb") as lines, rows.open("rb") as made:
        while chunk := list(islice(lines, _FLOOR_ROWS)):
            before = time.process_time()
            for line in chunk:
                orjson.loads(line)
            cpu += time.process_time() - before
            parsed = [orjson.loads(row) for row in islice(made, _FLOOR_ROWS)]
            before = time.process_time()
            for row in parsed:
                orjson.dumps(row)
            cpu += time.process_time() - before
    return cpu


def _bare(records: Path, output: Path) -> None:
    with records.open("rb") as lines, output.open("wb") as file:
        for line in lines:
            record = orjson.loads(line)
            row = {
                "id": record["id"],
                "messages": [_bare_message(message) for message in record["messages"]],
                "tools": orjson.dumps(record["tools"]).decode(),
                "num_turns": len(record["turns"]),
            }
            file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))


def _bare_message(message: dict[str, Any]) -> dict[str, Any]:
    said = {"role": message["role"], "content": message["content"]}
    if message["role"] == "tool":
        return {**said, "tool_call_id": message["tool_call_id"], "name": message["name"]}
    if "reasoning" in message:
        said["reasoning_content"] = message["reasoning"]
    if "tool_calls" in message:
        said["tool_calls"] = [_bare_call(call) for call in message["tool_calls"]]
    return said


def _bare_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = orjson.loads(function["arguments"])
    return {**call, "function": {"name": function["name"], "arguments": arguments}}


def make_run(
    folder: Path, rows: int, turns: int, result_chars: int, reasoning_chars: int, toolsets: str
) -> Path:
    """A finished run of `rows` records: those of a real one, under other ids and with a number.

    The other arguments are a line of `SIZES`.
    """
    dataset = folder / "p.jsonl"
    _write_prompts(dataset, min(rows, _CONVERSATIONS))
    shown = ROOT / "toolsets" / "sandbox" / "bwrap.py"
    command = f"tail -c +{{turn}}000 {shown} | head -c {result_chars}; echo {{conversation}}"
    with FakeEndpoint(
        latency_s=0.0,
        turns=turns,
        tool="terminal",
        arguments=json.dumps({"command": command}),
        reasoning_chars=reasoning_chars,
    ) as endpoint:
        argv = [sys.executable, "batch_runner.py", f"--dataset_file={dataset}", "--run_name=r"]
        argv += [f"--output_dir={folder}", "--model=m", f"--base_url={endpoint.openai_url}"]
        argv += ["--key_env=none", "--sandbox=local", f"--enabled_toolsets={toolsets}"]
        subprocess.run(argv, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    run_dir = folder / "r"
    templates = [read_object(line) for line in (run_dir / "records.jsonl").open("rb")]
    _write_prompts(dataset, rows)
    run = read_run_json(run_dir)
    config = RunConfig.model_validate(run["config"])
    scanned = scan(dataset, max_samples=None, rules=config.row_rules("openai_chat"))
    run["dataset"] |= {"rows": scanned.rows, "sha256": scanned.sha256}
    write_run_json(run_dir, run)
    offset = 0
    files = (run_dir / "records.jsonl", run_dir / "records.idx")
    with files[0].open("wb") as records, files[1].open("wb") as index:
        index.write(MARK)
        maker = RowMaker()
        for record in _copies(scanned, templates):
            stored = as_stored(record)
            records.write(stored.line)
            index.write(maker.rows(index_fields(stored), offset, len(stored.line)))
            offset += len(stored.line)
    return run_dir


def _copies(found: Scan, templates: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for number, task in enumerate(tasks(found)):
        record = templates[number % len(templates)]
        *messages, last = record["messages"]
        yield {
            **record,
            "id": task.id,
            "prompt_id": task.prompt_id,
            "input_digest": task.input_digest,
            "row": task.columns,
            "messages": [*messages, {**last, "content": f"{last['content']} {number}"}],
        }


def _write_prompts(path: Path, count: int) -> None:
    with path.open("wb") as file:
        file.writelines(b'{"id":"p%d","prompt":"Question %d"}\n' % (n, n) for n in range(count))


if __name__ == "__main__":
    main()
