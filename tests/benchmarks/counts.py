"""Repeatable counts per turn: instructions, bytes on disk, blocks of memory; instructions per
exported record; and of sandboxes: system calls of a start and of a command, and memory of its own.

    python -m tests.benchmarks.counts            compare with the committed counts; exit 1 if above
    python -m tests.benchmarks.counts --write    make these the committed counts

The same conversations are played with a real client over loopback, the loop, a tool, the turn
journal and the record; once few and once many, so that what starting takes falls out. Instructions
are counted by valgrind (callgrind), in user space, of this process alone. Unlike times they are the
same on a busy machine, but not under another version of Python: the counts are kept by version.
System calls are counted by strace, of all processes, the sandbox's too.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import orjson

from agent.loop.rules import ConversationSpec
from agent.messages.message import Event, Message
from agent.models.client.pool import ModelPool
from agent.models.model import ModelSettings
from agent.models.resolve import read_key
from agent.options import AgentOptions
from agent.runner import ConversationRunner
from agent.setup import AgentServices, Setup, set_up
from agent.state.trajectory import Trajectory
from batch_trajectories.engine.messages import TaskFinished, encode
from batch_trajectories.engine.record import Provenance, as_stored, make_record
from batch_trajectories.records.files import AppendFile
from batch_trajectories.records.index import index_fields
from batch_trajectories.records.journal import JournalWriter
from batch_trajectories.records.tasks import Task
from tests.benchmarks.engines import SYSTEM
from tests.benchmarks.export_speed import SIZES, make_run
from tests.benchmarks.throughput import ROOT, Work, runner
from tests.fakes.quick_endpoint import QuickEndpoint, scripted_replies
from toolsets.context import ToolContext
from toolsets.sandbox.base import Limits
from toolsets.sandbox.factory import make_sandbox, sandbox_problem
from toolsets.sandbox.inside.processes import descendants
from toolsets.tool import tool
from toolsets.toolbox import Toolbox
from toolsets.workspace.workspace import Workspace

KEPT = Path(__file__).with_suffix(".json")
TOLERANCE = 1.03
"""Times the committed count; what a count moves by itself is under a hundredth."""
TURNS = 5
LOOSE = 1.1
"""The same for what a sandbox takes: how often processes wait for each other varies."""
ROWS = 200
"""Records of an export."""
FEW, MANY = 4, 24
"""Conversations, or sandboxes."""


@tool()
async def step(context: ToolContext, number: int) -> str:
    """Take one step."""
    return f"step {number}"


async def play(url: str, conversations: int, directory: Path) -> dict[str, float]:
    """Play conversations one after the other; give bytes and blocks per turn."""
    settings = ModelSettings("m", "openai_chat", f"{url}/v1", None)
    options = AgentOptions()
    spec = ConversationSpec(options)
    toolsets = set_up(options, settings, enabled_toolsets=["none"], disabled_toolsets=()).toolsets
    setup = Setup(settings=settings, toolsets=toolsets, tools=(step,), subagents={}, approve=None)
    pool = ModelPool(key_of=read_key, on_retry=print)
    journal = JournalWriter(directory, 0, on_storage_error=print)
    records = AppendFile(directory / "records.jsonl")
    provenance = Provenance(None, 0, "digest", {})
    collected: list[Trajectory] = []
    blocks: list[int] = []
    for number in range(conversations):
        columns = {"prompt": f"Question number {number}"}
        task = Task(
            id=str(number), prompt_id=str(number), sample=0, input_digest="digest", columns=columns
        )
        opening = [Message(role="system", content=SYSTEM)]
        opening.append(Message(role="user", content=columns["prompt"]))
        trajectory = Trajectory(opening)
        home = AgentServices(
            setup, ToolContext(Workspace(directory / "w")), pool, call_timeout_s=300.0
        )

        def keep(event: Event, task: Task = task, trajectory: Trajectory = trajectory) -> None:
            position = len(trajectory.messages)
            journal.append(task.id, task.input_digest, event, assignment=1, position=position)

        conversation = ConversationRunner(
            trajectory=trajectory,
            spec=spec,
            model=home.model((), start=0),
            toolbox=home.toolbox(),
            journal=keep,
            services=home,
            records_starts=True,
        )
        end = await conversation.run()
        record = make_record(
            task,
            trajectory,
            end=end,
            spec=spec,
            setup=setup,
            failure=None,
            attempt=1,
            provenance=provenance,
        )
        stored = as_stored(record)
        payload = stored.line
        encode(
            TaskFinished(
                key=task.key,
                fields=index_fields(stored),
                failure=None,
                images=[],
                signs=None,
                payload=payload,
            )
        )
        records.append(payload)
        journal.finish(task.key)
        if end.status != "completed" or trajectory.turns != TURNS:
            raise RuntimeError(f"the conversation ended as {end} after {trajectory.turns} turns")
        collected.append(trajectory)
        if number in (0, conversations - 1):
            gc.collect()
            blocks.append(sys.getallocatedblocks())
    await pool.close()
    turns = conversations * TURNS
    journaled = sum(segment.stat().st_size for segment in directory.glob("worker-*"))
    return {
        "bytes journaled per turn": journaled / turns,
        "bytes recorded per turn": records.size / turns,
        "blocks of memory per turn": (blocks[-1] - blocks[0]) / (turns - TURNS),
    }


async def call_tool(calls: int, directory: Path) -> None:
    """Call one small tool many times, as a conversation does."""
    toolbox = Toolbox([step], ToolContext(Workspace(directory / "w")))
    for number in range(calls):
        if (await toolbox.call("step", f'{{"number": {number}}}')).is_error:
            raise RuntimeError("the tool failed")


def instructions(command: Sequence[str], bytecode: Path) -> int:
    """How many instructions a command takes under valgrind, less what it forks."""
    done = _run(
        ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", *command], bytecode
    )
    return max(map(int, re.findall(r"Collected : (\d+)", done)))  # a fork counts from its parent's


def modules(command: Sequence[str], bytecode: Path) -> int:
    """How many modules all processes of a Python command import."""
    python, *arguments = command
    return _run([python, "-X", "importtime", *arguments], bytecode).count("\nimport time:")


def _run(command: Sequence[str], bytecode: Path) -> str:
    """What a command says on standard error. Raises `RuntimeError` where it fails."""
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "0",  # hashes of texts decide the order of sets, and so what is done
        "PYTHONPYCACHEPREFIX": str(bytecode),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{command[0]} ended with exit code {done.returncode}: {done.stderr[-2000:]}"
        )
    return done.stderr


async def use_sandboxes(name: str, sandboxes: int, commands: int, directory: Path) -> float:
    """Start sandboxes and run commands in each; give the KB of memory that each has of its own."""
    spaces = [Workspace(directory / str(number)) for number in range(sandboxes)]
    made = [make_sandbox(name, space, Limits()) for space in spaces]
    known: set[int] = set()
    for sandbox in made:
        for _ in range(commands):
            await sandbox.run("shell", "echo hello")
        known = known or {pid for pid, _ in descendants()}  # those of the first, and what forks
    added = [pid for pid, _ in descendants() if pid not in known]
    private = sum(map(private_kb, added)) / max(1, sandboxes - 1)
    await asyncio.gather(*(sandbox.stop() for sandbox in made))
    return private


def count_export(size: str, bytecode: Path) -> float:
    """Instructions per record of an export to hermes."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir = make_run(Path(directory), ROWS, *SIZES[size])
        command = [sys.executable, "-m", "tests.benchmarks.export_speed", "measure", str(run_dir)]
        _run([*command, "hermes"], bytecode)  # compiles
        once, thrice = (
            instructions([*command, "hermes", f"--times={n}"], bytecode) for n in (1, 3)
        )
    return (thrice - once) / (2 * ROWS)


def private_kb(pid: int) -> int:
    """The memory of a process that no other has mapped."""
    shown = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(map(int, re.findall(r"^Private_\w+: +(\d+)", shown, re.MULTILINE)))


def system_calls(name: str, sandboxes: int, commands: int) -> int:
    """How many system calls it takes to use sandboxes, with all processes of theirs."""
    with tempfile.NamedTemporaryFile("r") as told:
        command = [
            "strace",
            "-f",
            "-c",
            "-o",
            told.name,
            sys.executable,
            "-m",
            "tests.benchmarks.counts",
            f"--sandbox={name}",
            f"--play={sandboxes}",
            f"--commands={commands}",
        ]
        subprocess.run(command, capture_output=True, check=True)
        return int(re.findall(r"(\d+)(?: +\d+)? total$", told.read(), re.MULTILINE)[0])


def count_sandboxes(name: str) -> dict[str, float]:
    """What a sandbox takes."""
    with tempfile.TemporaryDirectory() as directory:
        private = asyncio.run(use_sandboxes(name, MANY, 1, Path(directory)))
    few = system_calls(name, FEW, 1)
    started = (system_calls(name, MANY, 1) - few) / (MANY - FEW)
    further = (system_calls(name, FEW, 1 + MANY) - few) / (FEW * MANY)
    return {
        f"system calls per sandbox ({name})": started,
        f"system calls per command ({name})": further,
        f"KB of a sandbox's own ({name})": private,
    }


def count() -> dict[str, float]:
    """All counts."""
    with tempfile.TemporaryDirectory() as bytecode:
        return {name: round(value) for name, value in _count(Path(bytecode)).items()}


def _count(bytecode: Path) -> dict[str, float]:
    this = (sys.executable, "-m", "tests.benchmarks.counts")
    with QuickEndpoint(scripted_replies(TURNS)) as endpoint:
        counts = play_in(endpoint.url, MANY)
        url = f"--url={endpoint.url}"
        _run([*this, f"--play={FEW}", url], bytecode)  # compiles
        few, many = (instructions([*this, f"--play={n}", url], bytecode) for n in (FEW, MANY))
    counts["instructions per turn"] = (many - few) / ((MANY - FEW) * TURNS)
    few, many = (instructions([*this, f"--tool_calls={n}"], bytecode) for n in (100, 1100))
    counts["instructions per tool call"] = (many - few) / 1000
    counts["instructions per exported record of 4 KB"] = count_export("small", bytecode)
    counts["instructions per exported record of 34 KB"] = count_export("large", bytecode)
    command = [sys.executable, str(ROOT / "batch_runner.py"), "--help"]
    counts["modules of --help"] = modules(command, bytecode)
    with (
        QuickEndpoint(scripted_replies(1)) as endpoint,
        tempfile.TemporaryDirectory() as directory,
    ):
        command = runner(Work(prompts=1, turns=1, agents=1), endpoint.url, Path(directory))
        _run(command, bytecode)  # compiles
        counts["modules of a run of one prompt"] = modules(command, bytecode)
        counts["instructions of a run of one prompt"] = instructions(command, bytecode)
    for name in ("bwrap", "local"):
        if (problem := sandbox_problem(name)) is None:
            counts |= count_sandboxes(name)
        else:
            print(problem)
    return counts


def play_in(url: str, conversations: int) -> dict[str, float]:
    """`play` in a directory of its own."""
    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(play(url, conversations, Path(directory)))


def main() -> int:
    """Count, and compare or write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="make these the committed counts")
    parser.add_argument("--play", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--sandbox", help=argparse.SUPPRESS)
    parser.add_argument("--commands", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--tool_calls", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sandbox:
        with tempfile.TemporaryDirectory() as directory:
            asyncio.run(use_sandboxes(args.sandbox, args.play, args.commands, Path(directory)))
        return 0
    if args.play:
        play_in(args.url, args.play)
        return 0
    if args.tool_calls:
        with tempfile.TemporaryDirectory() as directory:
            asyncio.run(call_tool(args.tool_calls, Path(directory)))
        return 0
    for program in ("valgrind", "strace"):
        if shutil.which(program) is None:
            print(f"{program} is missing, so nothing is counted; it is a package of most systems")
            return 0
    version = ".".join(map(str, sys.version_info[:2]))
    counts = count()
    committed: dict[str, dict[str, float]] = (
        orjson.loads(KEPT.read_bytes()) if KEPT.exists() else {}
    )
    known = committed.get(version, {})
    for name, value in counts.items():
        ratio = f"{value / known[name]:6.3f} x {known[name]:,}" if name in known else "no count yet"
        print(f"{name:<40} {value:>13,}   {ratio}")
    if args.write:
        committed[version] = counts
        KEPT.write_bytes(orjson.dumps(committed, option=orjson.OPT_INDENT_2) + b"\n")
        return 0
    above = [
        name
        for name, value in counts.items()
        if value > known.get(name, value) * (LOOSE if "(" in name else TOLERANCE)
    ]
    if above:
        print(f"more than {TOLERANCE:g} or {LOOSE:g} times the committed count: {', '.join(above)}")
        print("if that is what the change is worth: python -m tests.benchmarks.counts --write")
    return bool(above)


if __name__ == "__main__":
    sys.exit(main())
