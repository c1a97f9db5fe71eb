"""Which runs `resume` continues by their stored options, and what it says of others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.running import SCRIPTED, lines, run, write_prompts, write_rows


def test_imported_conversations_are_not_resumed(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]
    write_rows(tmp_path / "c.jsonl", {"conversations": turns})
    assert run(tmp_path, "import", "c.jsonl", run_name="r").returncode == 0
    done = run(tmp_path, "resume", "r")
    assert done.returncode == 2
    assert "these conversations were imported; `import` goes on" in done.stderr


@pytest.mark.slow
def test_a_run_that_was_not_started_here_needs_a_decision(tmp_path: Path) -> None:
    """The run.json of someone else may name code, keys and addresses."""
    write_prompts(tmp_path / "p.jsonl", 2)
    (tmp_path / "s.yaml").write_text("- content: Hi.\n")
    options = {**SCRIPTED, "script_file": tmp_path / "s.yaml"}
    assert run(tmp_path, **options, max_samples=1).returncode == 0
    stored = tmp_path / "trajectories/r/run.json"
    content = json.loads(stored.read_bytes())
    content["config"]["max_samples"] = 2
    del content["crc32"]
    stored.write_text(json.dumps(content))
    for command in (("resume", "r"), ("--run_name=r",)):
        refused = run(tmp_path, *command)
        assert refused.returncode == 2
        assert "`resume r --trust_run`" in refused.stderr
    assert run(tmp_path, "resume", "r", "--trust_run").returncode == 0
    assert len(lines(tmp_path / "trajectories/r/records.jsonl")) == 2
