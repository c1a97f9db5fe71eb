"""280 rows of all kinds: 10 of each of eight defects, and 200 sound ones."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.runs.audit.steps import samples_of
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
    found,
    harbor_task,
    plain_row,
    swe_row,
)
from tests.running import kill_session, lines, started, wait_until, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.long]

SOUND = {"swe-bench": 45, "swe-rebench": 40, "swe-smith": 30, "r2e-gym": 30, "harbor": 20, None: 35}


def planted(kind: str | None, images: Images) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The rows of a kind, and the verdict of each."""
    rows: list[dict[str, Any]] = []
    expected: dict[str, str] = {}

    def add(verdict: str, count: int, **changes: Any) -> None:
        for n in range(count):
            id_ = f"{verdict}-{n}"
            expected[id_] = verdict
            rows.append(
                plain_row(id_, **changes) if kind is None else swe_row(kind, id_, images, **changes)
            )

    add("sound", SOUND[kind])
    match kind:
        case "swe-bench":
            add("passes_untouched", 4, FAIL_TO_PASS=[MUL])
            add("reference_fails", 4, patch=WRONG)
            for image in ("copy", "wheel", "clone"):
                expected |= {f"leaks_fix-{image}": "leaks_fix"}
                row = swe_row(kind, f"leaks_fix-{image}", images, image_name=f"{image}:1")
                rows.append(row)
            add("setup_fails", 4, image_name="missing:1")
        case "swe-rebench":
            add("leaks_fix", 4, keep_history=True)
            add("reference_fails", 3, FAIL_TO_PASS=[ADD, "tests/test_calc.py::test_missing"])
        case None:
            add("passes_untouched", 4, check="true")
            add("reference_fails", 3, solution={"calc.py": "pass\n"})
            add("setup_fails", 4, setup="exit 3")
            add("too_slow", 6, check={"command": "sleep 60", "timeout_s": 0.5})
            add("flaky", 10, check=COIN)
            test = {"check/t_x.py": SKIPPED}
            add("all_skipped", 6, check={"command": "python3 -m unittest check/t_x.py",
                                         "files": test})  # fmt: skip
            add("leaks_fix", 3, prompt="It must read\ndef add(a, b):\n    return a + b\n")
    return rows, expected


def tasks_of_harbor(directory: Path) -> dict[str, str]:
    """Write the Harbor tasks; the verdict of each."""
    fix = "#!/bin/sh\nsed -i 's/first - second/first + second/' pkg/calc.py\n"
    skipped = {"tests/test_calc.py": "import pytest\npytest.skip(allow_module_level=True)\n"}
    kinds: dict[str, tuple[int, dict[str, Any]]] = {
        "sound": (20, {}),
        "passes_untouched": (2, {"test": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"}),
        "setup_fails": (2, {"test": "#!/usr/bin/ruby\n"}),
        "forgeable": (10, {"test": BY_PYTEST, "solve": fix, "tests/test_calc.py": R2E_TEST}),
        "all_skipped": (4, {"test": BY_PYTEST.replace("&&", ";true &&"), **skipped}),
        "too_slow": (4, {"test": "#!/bin/sh\nexec sleep 60\n",
                         "more": "[verifier]\ntimeout_sec = 1\n"}),
    }  # fmt: skip
    expected = {}
    for verdict, (count, changes) in kinds.items():
        for n in range(count):
            harbor_task(directory, f"{verdict}-{n}", **changes)
            expected[f"{verdict}-{n}"] = verdict
    return expected


def test_eight_defects_are_planted_ten_times_each(tmp_path: Path) -> None:
    images = Images(tmp_path, "base", "fix")
    totals = Counter(tasks_of_harbor(tmp_path).values())
    for kind in SOUND.keys() - {"harbor"}:
        totals += Counter(planted(kind, images)[1].values())
    assert totals.pop("sound") == 200
    assert len(totals) == 8
    assert set(totals.values()) == {10}


@pytest.mark.parametrize("kind", SOUND)
def test_each_planted_defect_is_found_and_none_else(
    tmp_path: Path, task_images: Images, kind: str | None
) -> None:
    options: dict[str, Any] = {}
    if kind is not None:
        options = {"rows": kind, "images": task_images.directory}
    if kind == "harbor":
        expected = tasks_of_harbor(tmp_path / "tasks")
        options["dataset_file"] = "tasks"
    else:
        rows, expected = planted(kind, task_images)
        write_rows(tmp_path / "p.jsonl", *rows)
    # With 12 repetitions a coin is not taken for sound.
    code, said = audit(tmp_path, **options, repeats=12 if kind is None else 2)
    assert code == int(set(expected.values()) != {"sound"}), said
    own = {id_.removesuffix(f"-{task_images.fix}"): line for id_, line in found(tmp_path).items()}
    assert own.keys() == expected.keys()
    assert not {
        id_: (line["verdict"], line["why"])
        for id_, line in own.items()
        if line["verdict"] != expected[id_]
    }


def test_ten_kills_repeat_no_finished_step(tmp_path: Path, task_images: Images) -> None:
    write_rows(
        tmp_path / "p.jsonl",
        *(swe_row("swe-bench", f"row{n}", task_images) for n in range(12)),
    )
    options: dict[str, Any] = {
        "dataset_file": "p.jsonl", "run_name": "audit", "num_workers": 2, "batch_size": 4,
        "rows": "swe-bench", "images": task_images.directory,
    }  # fmt: skip
    records = tmp_path / "trajectories" / "audit" / "records.jsonl"
    finished = b""

    def has_grown() -> bool:
        return records.exists() and len(records.read_bytes()) > len(finished)

    for _ in range(10):
        with started(tmp_path, "check_tasks", **options) as process:
            wait_until(lambda running=process: has_grown() or running.poll() is not None)
            assert process.poll() is None, "it ended before it was killed"
            kill_session(process.pid)
        now = records.read_bytes()
        assert now.startswith(finished)
        finished = now[: now.rfind(b"\n") + 1]
    code, said = audit(tmp_path, **options)
    assert code == 0, said
    assert records.read_bytes().startswith(finished)
    keys = [(line["prompt_id"], line["sample"]) for line in lines(records)]
    assert len(keys) == len({*keys}) == 12 * samples_of(3)
