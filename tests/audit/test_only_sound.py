"""Runs that use only the rows that an audit found sound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.audit.planting import audit, plain_row
from tests.helpers.running import SCRIPTED, ids, run, write_rows
from tests.images.test_task_runs import script_of

pytestmark = pytest.mark.slow

RUN: dict[str, Any] = {**SCRIPTED, "enabled_toolsets": "terminal", "only_sound": "audit"}


def test_a_run_uses_the_sound_rows_that_have_not_changed(tmp_path: Path) -> None:
    script = script_of("true")
    rows = [
        plain_row("sound", script=script),
        plain_row("edited", script=script),
        plain_row("given", script=script, check="true"),
        plain_row("wrong", script=script, solution={"calc.py": "pass\n"}),
    ]
    write_rows(tmp_path / "p.jsonl", *rows)
    assert audit(tmp_path)[0] == 1
    rows[1]["prompt"] += " Please."
    rows.append(plain_row("new", script=script))
    write_rows(tmp_path / "p.jsonl", *rows)
    for _ in range(2):  # resuming finds the same rows
        done = run(tmp_path, "--row_setup", **RUN)
        assert done.returncode == 0, done.stderr
        assert (
            "--only_sound=audit: 1 sound row; left out: 1 changed since, 1 not in the audit, "
            "1 passes_untouched, 1 reference_fails"
        ) in done.stderr
    assert ids(tmp_path / "trajectories" / "r" / "records.jsonl") == ["sound"]
    told = run(tmp_path, "stats", "r").stdout
    assert "audited                5\n" in told
    assert "  left out             1  task: passes_untouched\n" in told
    (tmp_path / "recipe.yaml").write_text("formats: [openai]\n")
    made = run(tmp_path, "export", "r", recipe="recipe.yaml", output="data")
    assert made.returncode == 0, made.stderr
    card = (tmp_path / "data" / "README.md").read_text()
    assert "tasks audited before the run (`audit`), only sound ones used: 1 sound" in card


def test_an_audit_of_other_tasks_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", plain_row("sound", script=script_of("true")))
    missing = run(tmp_path, "--row_setup", **RUN)
    assert missing.returncode == 2
    assert "--only_sound=audit: no audit at trajectories/audit" in missing.stderr
    assert audit(tmp_path)[0] == 0
    other = run(tmp_path, "--row_setup", **RUN, command_timeout_s=7)
    assert other.returncode == 2
    assert "the audit had command_timeout_s=120.0, this run has 7.0" in other.stderr
    unchecked = run(tmp_path, **RUN)
    assert unchecked.returncode == 2
    assert "--only_sound=audit: its rows have checks; add --row_setup" in unchecked.stderr
    manifest = tmp_path / "trajectories" / "audit" / "run.json"
    assert json.loads(manifest.read_text())["config"]["audit"]
