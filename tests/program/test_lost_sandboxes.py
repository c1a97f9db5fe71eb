"""A conversation whose sandbox is on a machine elsewhere, which is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import SCRIPTED, lines, run, write_rows

pytestmark = pytest.mark.slow

TOOL = """
from pathlib import Path
from batch_trajectories.basics.errors import SandboxLost
from toolsets.tool import tool

@tool(effects="workspace")
async def ask_machine(name: str) -> str:
    \"\"\"Ask a machine.

    Args:
        name: Its name.
    \"\"\"
    if name == "always" or (name == "once" and not Path("lost").exists()):
        Path("lost").touch()
        raise SandboxLost(f"machine {name} is gone")
    return "well"
"""


def row(name: str) -> dict[str, Any]:
    call = {"name": "ask_machine", "arguments": {"name": name}}
    script = [{"tool_calls": [call]}, {"content": "Done."}]
    return {"id": name, "prompt": "Ask.", "script": script}


def test_it_goes_on_with_the_next_start_and_its_siblings_at_once(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(TOOL)
    write_rows(tmp_path / "p.jsonl", row("once"), row("never"), row("always"))
    given = {**SCRIPTED, "enabled_toolsets": "own", "tools": "own.py:ask_machine"}
    done = run(tmp_path, **given, max_attempts=2)
    assert done.returncode == 1, done.stderr
    assert "once: attempt 1 failed (sandbox_lost): machine once is gone" in done.stderr
    place = tmp_path / "trajectories" / "r"
    assert {one["id"] for one in lines(place / "records.jsonl")} == {"never"}
    assert run(tmp_path, **given, max_attempts=2).returncode == 1
    found = {one["id"]: one for one in lines(place / "records.jsonl")}
    assert {id: one["status"] for id, one in found.items()} == {
        "once": "completed",
        "never": "completed",
        "always": "failed",
    }
    assert found["always"]["error"]["class"] == "sandbox_lost"
    for name in ("once", "never"):
        [result] = [one for one in found[name]["messages"] if one["role"] == "tool"]
        assert (result["content"], result["is_error"]) == ("well", False)
