"""How fast records become training files, and how much memory that takes.

    python -m benchmarks.export_speed --rows 2000 --format hermes,openai

Makes a run directory of generated records (tool calls, JSON and text results, reasoning), exports
it in a process of its own, and prints MB of records per second of CPU and the peak memory of that
process. `--format default` measures the export at the end of a run.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import orjson

from batch.config import RunConfig
from batch.prompts import scan, tasks
from batch.records import RecordFile
from batch.run_dir import SCHEMA_VERSION

_TEXT = (
    "the file holds a list of numbers that we read and sort before any of them is printed "
    'again with "quotes", tabs\tand lines\n of Œuvres <b>html</b> {"a": [1, 2.50, null]}'
)


@click.command()
@click.option("--rows", default=1000)
@click.option("--turns", default=6, help="Turns with a call before the answer.")
@click.option("--chars", default=1500, help="Characters per tool result.")
@click.option("--format", "formats", default="default")
@click.option("--recipe", default=None)
def main(rows: int, turns: int, chars: int, formats: str, recipe: str | None) -> None:
    """Make records, export them, print what it took."""
    with tempfile.TemporaryDirectory() as folder:
        # In a process of its own: one that is started takes over the peak of its parent.
        sizes = {"rows": rows, "turns": turns, "chars": chars}
        maker = get_context("spawn").Process(target=_make_run, args=(Path(folder),), kwargs=sizes)
        maker.start()
        maker.join()
        run_dir = Path(folder, "r")
        size = (run_dir / "records.jsonl").stat().st_size
        argv = [sys.executable, "batch_runner.py", "export", str(run_dir)]
        argv += [] if formats == "default" else [f"--format={formats}"]
        argv += [f"--recipe={recipe}"] if recipe else []
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)  # of this child alone, not of the maker too
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise SystemExit(f"{argv} ended with {process.returncode}")
    cpu = used.ru_utime + used.ru_stime
    click.echo(
        f"{formats}: {rows:,} rows, {size / 1e6:.0f} MB in {cpu:.2f} s of CPU = "
        f"{size / 1e6 / cpu:.0f} MB/s, {rows / cpu:,.0f} rows/s, "
        f"peak {used.ru_maxrss / 1024:.0f} MB"
    )


def _make_run(folder: Path, *, rows: int, turns: int, chars: int) -> Path:
    dataset = folder / "p.jsonl"
    with dataset.open("w") as file:
        file.writelines(
            json.dumps({"id": f"p{n}", "prompt": f"Question {n}"}) + "\n" for n in range(rows)
        )
    run_dir = folder / "r"
    (run_dir / "inflight").mkdir(parents=True)
    config = RunConfig(dataset_file=dataset, run_name="r", output_dir=folder)
    identity = {
        "schema_version": SCHEMA_VERSION,
        "api": "openai_chat",
        "created": 0.5,
        "digest": "0" * 16,
        "meaning": {},
        "config": config.to_json(),
        "dataset": {"path": str(dataset)},
        "history": [],
        "versions": {},
    }
    (run_dir / "run.json").write_bytes(orjson.dumps(identity))
    found = scan(dataset, max_samples=None)
    rng = random.Random(0)
    # A few texts in turn: drawing words for each would take longer than what is measured.
    pieces = list(_pieces(rng, chars))
    with (run_dir / "records.jsonl").open("wb") as file:
        for task in tasks(found, num_samples=1):
            record = _record(rng, pieces, turns=turns)
            record |= {"id": task.id, "prompt_id": task.prompt_id, "row": task.columns}
            record["input_digest"] = task.input_digest
            record["messages"][1]["content"] = task.columns["prompt"]
            file.write(orjson.dumps(record) + b"\n")
    RecordFile(run_dir, run_dir / "quarantine").close()  # writes the index, as a run does
    return run_dir


def _pieces(rng: random.Random, chars: int) -> Iterator[str]:
    for number in range(64):
        text = " ".join(rng.choices(_TEXT.split(" "), k=chars // 5))[:chars]
        yield json.dumps({"exit_code": 0, "output": text}) if number % 2 else text


def _record(rng: random.Random, pieces: list[str], *, turns: int) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": ""},
    ]
    for number in range(turns):
        arguments = json.dumps({"path": f"f{number}.txt", "content": rng.choice(pieces)[:300]})
        function = {"name": "write_file", "arguments": arguments}
        messages += [
            {
                "role": "assistant",
                "content": "",
                "reasoning": rng.choice(pieces)[:400].replace("<", "["),
                "tool_calls": [{"id": f"c{number}", "type": "function", "function": function}],
            },
            {
                "role": "tool",
                "tool_call_id": f"c{number}",
                "name": "write_file",
                "content": rng.choice(pieces),
                "is_error": False,
            },
        ]
    messages.append({"role": "assistant", "content": f"Done, {rng.random()}."})
    usage = {"input_tokens": 900, "output_tokens": 90}
    turn = {"finish_reason": "stop", "usage": usage, "cost_usd": 0.01, "model": "m"}
    reply = {**turn, "started_at": 1.0, "duration_s": 2.0, "response_id": "x"}
    schema = {"type": "object", "properties": {"path": {"type": "string"}}}
    tool = {"name": "write_file", "description": "Write a file.", "parameters": schema}
    return {
        "status": "completed",
        "error": None,
        "sample": 0,
        "attempt": 1,
        "messages": messages,
        "turns": [{**reply, "turn": n} for n in range(1, turns + 2)],
        "tool_calls": [],
        "resumes": [],
        "api_calls": turns + 1,
        "usage": usage,
        "cost_usd": 0.1,
        "model_returned": "m",
        "tools": [{"type": "function", "function": tool}] * 12,
        "options": {},
        "model": "m",
        "api": "openai_chat",
        "toolsets": ["file"],
        "sandbox": None,
        "seed": 0,
        "config_digest": "d",
    }


if __name__ == "__main__":
    main()
