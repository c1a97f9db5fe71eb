"""280 rows of all kinds, 80 of them with one of eight defects, in audits that are killed."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.audit.planting import (
    ADD,
    BY_PYTEST,
    COIN,
    MUL,
    R2E_TEST,
    SKIPPED,
    WRONG,
    Images,
    audit,
    audit_with_kills,
    found,
    harbor_task,
    plain_row,
    swe_row,
)
from tests.helpers.running import lines, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.long]

MISSING = {"FAIL_TO_PASS": [ADD, "tests/test_calc.py::test_missing"]}
NO_IMAGE = {"image_name": "missing:1", "docker_image": "missing:1"}
SKIPPING = {"tests/test_calc.py": "import pytest\npytest.skip(allow_module_level=True)\n"}
FIX = "#!/bin/sh\nsed -i 's/first - second/first + second/' pkg/calc.py\n"

Planted = list[tuple[str, int, dict[str, Any]]]
"""A verdict, how many rows have it, and what makes them differ from a sound row."""

SETS: dict[str, Planted] = {
    "swe-bench": [
        ("sound", 40, {}),
        ("passes_untouched", 2, {"FAIL_TO_PASS": [MUL]}),
        ("reference_fails", 2, {"patch": WRONG}),
        *(("leaks_fix", 1, {"image_name": f"{name}:1"}) for name in ("copy", "wheel", "clone")),
        ("setup_fails", 2, NO_IMAGE),
    ],
    "swe-rebench": [
        ("sound", 35, {}),
        ("passes_untouched", 2, {"FAIL_TO_PASS": [MUL]}),
        ("reference_fails", 2, MISSING),
        ("leaks_fix", 2, {"keep_history": True}),
        ("setup_fails", 1, NO_IMAGE),
    ],
    "swe-smith": [
        ("sound", 30, {}),
        ("passes_untouched", 2, {"FAIL_TO_PASS": [MUL]}),
        ("reference_fails", 2, MISSING),
        ("setup_fails", 2, NO_IMAGE),
    ],
    "r2e-gym": [
        ("sound", 30, {}),
        ("reference_fails", 2, {"expected_output_json": '{"test_add": "PASSED"}'}),
        ("setup_fails", 1, NO_IMAGE),
    ],
    "harbor": [
        ("sound", 25, {}),
        ("passes_untouched", 2, {"test": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"}),
        ("leaks_fix", 2, {"image": "solution:1"}),
        ("setup_fails", 2, {"test": "#!/usr/bin/ruby\n"}),
        ("forgeable", 10, {"test": BY_PYTEST, "solve": FIX, "tests/test_calc.py": R2E_TEST}),
        ("all_skipped", 4, {"test": BY_PYTEST.replace("&&", ";true &&"), **SKIPPING}),
        (
            "too_slow",
            4,
            {"test": "#!/bin/sh\nexec sleep 60\n", "more": "[verifier]\ntimeout_sec = 1\n"},
        ),
    ],
    "plain": [
        ("sound", 20, {}),
        ("sound", 10, {"solution": None, "solution_command": "sed -i 's/a - b/a + b/' calc.py"}),
        ("passes_untouched", 2, {"check": "true"}),
        ("reference_fails", 2, {"solution": {"calc.py": "pass\n"}}),
        ("leaks_fix", 2, {"prompt": "It must read\ndef add(a, b):\n    return a + b\n"}),
        ("setup_fails", 2, {"setup": "exit 3"}),
        ("too_slow", 6, {"check": {"command": "sleep 60", "timeout_s": 0.5}}),
        (
            "all_skipped",
            6,
            {
                "check": {
                    "command": "python3 -m unittest check/t_x.py",
                    "files": {"check/t_x.py": SKIPPED},
                }
            },
        ),
    ],
    "coins": [("sound", 5, {}), ("flaky", 10, {"check": COIN})],
    "answers": [
        ("sound", 5, {}),
        ("leaks_fix", 1, {"prompt": "What is six times seven? The answer is 42."}),
    ],
}

KILLS = {"swe-bench": 10, "answers": 0}
"""How often an audit is killed; others twice."""


def plant_rows(kind: str, directory: Path, images: Images) -> tuple[dict[str, str], dict[str, Any]]:
    """Write the rows of a kind; the verdict of each, and the options of the audit."""
    expected = {}
    rows = []
    for part, (verdict, count, changes) in enumerate(SETS[kind]):
        for n in range(count):
            id_ = f"{verdict}-{part}-{n}"
            expected[id_] = verdict
            match kind:
                case "harbor":
                    harbor_task(directory / "tasks", id_, **changes)
                case "plain" | "coins":
                    rows.append(plain_row(id_, **changes))
                case "answers":
                    asked = {"id": id_, "prompt": "What is six times seven?", "expected": "42"}
                    rows.append(asked | changes)
                case _:
                    rows.append(swe_row(kind, id_, images, **changes))
    write_rows(directory / "p.jsonl", *rows)
    options: dict[str, Any] = {"batch_size": 4, "repeats": 10 if kind == "coins" else 2}
    if kind == "harbor":
        options["dataset_file"] = "tasks"
    if kind == "answers":
        (directory / "answers.yaml").write_text("check_expected: true\n")
        options["config"] = "answers.yaml"
    elif kind not in ("plain", "coins"):
        options |= {"rows": kind, "images": images.directory}
    return expected, options


def test_eight_defects_are_planted_ten_times_each() -> None:
    totals: Counter[str] = Counter()
    for parts in SETS.values():
        for verdict, count, _ in parts:
            totals[verdict] += count
    assert totals.pop("sound") == 200
    assert len(totals) == 8
    assert set(totals.values()) == {10}


@pytest.mark.parametrize("kind", SETS)
def test_each_planted_defect_is_found_and_none_else(
    tmp_path: Path, task_images: Images, kind: str
) -> None:
    expected, options = plant_rows(kind, tmp_path, task_images)
    code, said = audit_with_kills(tmp_path, KILLS.get(kind, 2), count=len(expected), **options)
    assert code == 1, said
    own = {id_.removesuffix(f"-{task_images.fix}"): line for id_, line in found(tmp_path).items()}
    assert own.keys() == expected.keys()
    assert not {
        id_: (line["verdict"], line["why"])
        for id_, line in own.items()
        if line["verdict"] != expected[id_]
    }


@pytest.mark.parametrize("kind", ["swe-bench", "swe-rebench", "swe-smith", "r2e-gym"])
def test_how_many_steps_a_minute(
    tmp_path: Path, task_images: Images, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "p.jsonl", *(swe_row(kind, f"r{n}", task_images) for n in range(10)))
    began = time.monotonic()
    code, said = audit(tmp_path, rows=kind, images=task_images.directory)
    took = time.monotonic() - began
    assert code == 0, said
    steps = len(lines(tmp_path / "trajectories" / "audit" / "records.jsonl"))
    with capsys.disabled():
        print(f"\n{kind}: {steps} steps in {took:.0f} s, {steps / took * 60:.0f} a minute")
