"""Replies are what the readers of each API read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent.models.dialects.dialect import read_reply
from agent.wires.base import MadeCall
from agent.wires.wires import WIRES
from batch_trajectories.agents.check_endpoint import command_call, new_call, reply_body
from batch_trajectories.basics import exact_json


def tool(**properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": "run", "parameters": schema}}


@pytest.mark.parametrize("api", WIRES)
@pytest.mark.parametrize("calls", [(), (new_call("run", {"command": "ls"}),)])
def test_a_reply_is_read_as_it_was_meant(api: str, calls: tuple[MadeCall, ...]) -> None:
    body = reply_body(api, "m", "Done.", calls)
    completion = read_reply(api, exact_json.dumps(body))
    message = completion.message
    made = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]
    assert (message["content"], made) == ("Done.", [(call.name, call.arguments) for call in calls])
    assert completion.usage is not None
    assert completion.usage["output_tokens"] == 10


def test_the_command_goes_to_the_tool_that_takes_one() -> None:
    other = tool(path={"type": "string"})
    shell = tool(
        cmd={"type": "array"},
        why={"type": "string"},
        mode={"enum": ["fast", "slow"]},
        wait={"type": "integer"},
    )
    call = command_call([other, shell], "ls")
    assert call is not None
    assert call.arguments == {
        "cmd": ["bash", "-c", "ls"],
        "why": "check",
        "mode": "fast",
        "wait": 10_000,
    }
    assert command_call([other], "ls") is None
