"""CPU that the agent loop itself takes per turn: everything but the model client and the tool.

    python -m tests.benchmarks.loop_overhead [--turns 50] [--conversations 40] [--calls 1]

The same scripted conversations are played by the loop and, for comparison, by bare code that only
asks the model client and calls the tool. Both run in this process, in turns; the difference is
what the loop adds: rules, events, trajectory, call routing. `options` plays them once more with
many options switched on.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from agent.loop.rules import ConversationSpec
from agent.messages.message import Message
from agent.models.client.pool import ModelPool
from agent.models.model import ModelSettings, Request
from agent.models.resolve import read_key
from agent.models.scripted import ScriptedModel, ScriptedTurn, parse_script
from agent.options import AgentOptions
from agent.runner import ConversationRunner
from agent.setup import AgentServices, Setup, set_up
from agent.state.trajectory import Trajectory
from toolsets.context import ToolContext
from toolsets.tool import tool
from toolsets.toolbox import Toolbox
from toolsets.workspace.workspace import Workspace

SETTINGS = ModelSettings(name="scripted", api="scripted", base_url=None, key_env=None)
MANY = AgentOptions(
    max_turns=10_000,
    completion_tools=True,
    result_references=True,
    repair_tool_names=True,
    observation_chars=1000,
    final_summary=True,
    max_cost_usd=1.0,
)


@tool(idempotent=True)
async def step(context: ToolContext, number: int) -> str:
    """Do nothing, and say which nothing it was."""
    return f"step {number}"


def script(turns: int, calls: int) -> list[ScriptedTurn]:
    """Turns that call the tool, and one that answers."""
    asking: list[Any] = [
        {
            "reasoning": "think " * 20,
            "tool_calls": [
                {"name": "step", "arguments": {"number": turn * calls + n}} for n in range(calls)
            ],
        }
        for turn in range(turns - 1)
    ]
    return parse_script([*asking, {"content": "done"}])


async def run_bare(turns: list[ScriptedTurn], toolbox: Toolbox) -> None:
    """The model client and the tool alone."""
    model = ScriptedModel(turns)
    messages = [Message(role="user", content="go")]
    for _ in turns:
        completion = await model.complete(Request(messages, toolbox.schemas))
        for call in completion.message.get("tool_calls", ()):
            await toolbox.call(call["function"]["name"], call["function"]["arguments"])


async def run_loop(turns: list[ScriptedTurn], home: AgentServices, options: AgentOptions) -> None:
    """The same through the loop, its events kept in memory."""
    events: list[Any] = []
    trajectory = Trajectory([Message(role="user", content="go")])
    conversation = ConversationRunner(
        trajectory=trajectory,
        spec=ConversationSpec(options),
        model=ScriptedModel(turns),
        toolbox=home.toolbox(),
        journal=events.append,
        services=home,
    )
    end = await conversation.run()
    if end.status != "completed" or trajectory.turns != len(turns):
        raise RuntimeError(f"the conversation ended as {end} after {trajectory.turns} turns")


def cpu_per_turn(play: Callable[[], Awaitable[None]], conversations: int, turns: int) -> float:
    """Microseconds of CPU per turn over some conversations, one after the other."""

    async def play_all() -> float:
        started = time.process_time()
        for _ in range(conversations):
            await play()
        return time.process_time() - started

    return asyncio.run(play_all()) / (conversations * turns) * 1e6


def main() -> None:
    """Measure in rounds that alternate, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--calls", type=int, default=1, help="tool calls per turn")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    turns = script(args.turns, args.calls)
    plain = AgentOptions(max_turns=10_000)
    common = set_up(plain, SETTINGS, enabled_toolsets=["none"], disabled_toolsets=())
    common = Setup(
        settings=SETTINGS, toolsets=common.toolsets, tools=(step,), subagents={}, approve=None
    )
    with tempfile.TemporaryDirectory() as root:
        context = ToolContext(Workspace(Path(root)))
        home = AgentServices(common, context, ModelPool(key_of=read_key, on_retry=print), 300.0)
        plays: dict[str, Callable[[], Awaitable[None]]] = {
            "client and tool alone": lambda: run_bare(turns, home.toolbox()),
            "with the loop": lambda: run_loop(turns, home, plain),
            "with many options": lambda: run_loop(turns, home, MANY),
        }
        measured: dict[str, list[float]] = {name: [] for name in plays}
        for _ in range(args.rounds):
            for name, play in plays.items():
                measured[name].append(cpu_per_turn(play, args.conversations, args.turns))
    medians = {name: statistics.median(times) for name, times in measured.items()}
    floor = medians["client and tool alone"]
    print(f"{args.turns} turns x {args.calls} calls, median of {args.rounds} rounds, CPU per turn")
    for name, median in medians.items():
        print(f"  {name:<22} {median:8.1f} µs   the loop adds {median - floor:6.1f} µs")


if __name__ == "__main__":
    main()
