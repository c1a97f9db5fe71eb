"""Audits of rows in images, of all kinds, with real git and pytest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.audit.planting import (
    ADD,
    BY_PYTEST,
    MUL,
    R2E_TEST,
    WRONG,
    Images,
    audit,
    bringing,
    found,
    harbor_task,
    swe_row,
    verdicts,
)
from tests.helpers.running import write_rows

pytestmark = pytest.mark.slow

KINDS = ("swe-bench", "swe-rebench", "swe-smith", "r2e-gym")
NAMED: dict[str, dict[str, Any]] = {
    "sound": {},
    "passes_untouched": {"FAIL_TO_PASS": [MUL]},
    "reference_fails": {"FAIL_TO_PASS": [ADD, "tests/test_calc.py::test_missing"]},
    "setup_fails": {"image_name": "missing:1", "docker_image": "missing:1"},
}
OF_PATCHES: dict[str, dict[str, Any]] = {
    "no_reference": {"patch": None},
    "reference_fails": {"patch": WRONG},
    "leaks_fix": {"image_name": "copy:1"},
    "wheel": {"image_name": "wheel:1"},
    "clone": {"image_name": "clone:1"},
    "history": {"keep_history": True},
    "tests": {"test_patch": bringing(R2E_TEST.replace("pytest.mark.skip", "pytest.mark.slow"))},
}
LEAKS = ("wheel", "clone", "history")


def rows_of(kind: str, images: Images) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Rows with one defect each, and their verdicts."""
    rows, expected = [], {}
    for name, changes in NAMED.items():
        if kind == "r2e-gym" and name not in ("sound", "setup_fails"):
            continue
        rows.append(swe_row(kind, name, images, **changes))
        expected[name] = name
    if kind in ("swe-bench", "swe-rebench"):
        for name, changes in OF_PATCHES.items():
            rows.append(swe_row(kind, f"p_{name}", images, **changes))
            verdict = "leaks_fix" if name in LEAKS else "sound" if name == "tests" else name
            expected[f"p_{name}"] = verdict
    if kind == "r2e-gym":
        for name, expected_output in (
            ("passes_untouched", '{"test_add": "FAILED", "test_mul": "PASSED"}'),
            ("reference_fails", '{"test_add": "PASSED"}'),
        ):
            rows.append(swe_row(kind, name, images, expected_output_json=expected_output))
            expected[name] = name
        rows.append(swe_row(kind, "no_reference", images, parsed_commit_content=None))
        expected["no_reference"] = "no_reference"
    return rows, expected


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_kind(tmp_path: Path, task_images: Images, kind: str) -> None:
    rows, expected = rows_of(kind, task_images)
    write_rows(tmp_path / "p.jsonl", *rows)
    code, said = audit(
        tmp_path, rows=kind, images=task_images.directory, sandbox="bwrap", repeats=2
    )
    assert code == 1, said
    lines = found(tmp_path)
    own = {id_.removesuffix(f"-{task_images.fix}"): line for id_, line in lines.items()}
    assert {id_: line["verdict"] for id_, line in own.items()} == expected, {
        id_: line["why"] for id_, line in own.items() if line["verdict"] != expected[id_]
    }
    # Forged files were written, and did not count.
    forged = [step for step in own["sound"]["steps"] if step["step"] == "tamper"]
    assert any(path.endswith("/testbed/conftest.py") for path in forged[0]["forged"])
    assert all(step["forged"] for step in forged)


def test_harbor_tasks(tmp_path: Path, task_images: Images) -> None:
    tasks = tmp_path / "tasks"
    harbor_task(tasks, "sound")
    harbor_task(tasks, "no_reference", solve=None)
    harbor_task(tasks, "reference_fails", solve="#!/bin/sh\necho 41 > answer.txt\n")
    harbor_task(tasks, "passes_untouched", test="#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n")
    harbor_task(tasks, "setup_fails", test="#!/usr/bin/ruby\n")
    tests = {"tests/test_calc.py": R2E_TEST}
    fix = "#!/bin/sh\nsed -i 's/first - second/first + second/' pkg/calc.py\n"
    harbor_task(tasks, "forgeable", test=BY_PYTEST, solve=fix, **tests)
    skipped = {"tests/test_calc.py": "import pytest\npytest.skip(allow_module_level=True)\n"}
    harbor_task(tasks, "all_skipped", test=BY_PYTEST.replace("&&", ";true &&"), **skipped)
    # As an image that was built of the whole directory of the task.
    harbor_task(tasks, "leaks_fix", image="solution:1")
    slow = "[verifier]\ntimeout_sec = 1\n"
    harbor_task(tasks, "too_slow", test="#!/bin/sh\nexec sleep 60\n", more=slow)
    code, said = audit(
        tmp_path, rows="harbor", dataset_file="tasks", images=task_images.directory, repeats=2
    )
    assert code == 1, said
    found_ = verdicts(tmp_path)
    assert found_ == {name: name for name in found_}, found(tmp_path)
    assert len(found_) == 9
    forged = found(tmp_path)["forgeable"]
    assert forged["why"] == "passed by forged files: conftest, startup, path"
