"""`check --expected_match`: finished answers are compared in another way, without a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tests.helpers.running import SCRIPTED, run, write_rows


def test_answers_are_compared_again_in_another_way(tmp_path: Path) -> None:
    write_rows(
        tmp_path / "p.jsonl",
        *(
            {"id": f"q{n}", "prompt": "6 x 7?", "expected": "42", "script": [{"content": answer}]}
            for n, answer in enumerate(("It is 42.", "I do not know."))
        ),
    )
    options = {**SCRIPTED, "enabled_toolsets": "none", "expected_match": "exact"}
    ran = run(tmp_path, "--check_expected", **options)
    assert ran.returncode == 0, ran.stderr
    assert verdicts_after(tmp_path) == {(False, False): 2}
    after = verdicts_after(tmp_path, "--expected_match=number")
    assert after == {(False, False): 1, (False, True): 1}
    # Without the option, answers are compared as in the run.
    assert verdicts_after(tmp_path)[True, False] == 1


def verdicts_after(cwd: Path, *flags: str) -> Mapping[tuple[bool, bool], int]:
    """Whether answers passed before and after another check, with their number."""
    done = run(cwd, "check", "r", "--json", *flags)
    assert done.returncode == 0, done.stderr
    changes = json.loads(done.stdout)["changes"]
    return {(change["from"], change["to"]): change["count"] for change in changes}
