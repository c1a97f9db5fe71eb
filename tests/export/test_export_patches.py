"""Diffs of conversations in exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers.exporting import (
    call_record,
    export_to_dataset,
    judged_record,
    make_run,
    rejects,
    rows,
)
from tests.helpers.running import lines

PATCH = "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-\tü\r\n+\u2028 \ufffd\x7f\n"


def with_diff(answer: str = "A", **diff: Any) -> dict[str, Any]:
    return call_record(answer, diff={"patch": PATCH, "truncated": False, **diff})


CUT: dict[str, Any] = {"truncated": True}
FAILED: dict[str, Any] = {"patch": "", "error": "at most 64 MiB can be carried"}
BINARY: dict[str, Any] = {"base64": "/w=="}


def test_predictions_hold_the_diffs_of_records(tmp_path: Path) -> None:
    prompts = [{"prompt": "a", "instance_id": "o__r-1"}, {"prompt": "b", "id": "t1"}]
    source = make_run(
        tmp_path, with_diff(), {**with_diff(patch=""), "status": "max_turns"}, prompts=prompts
    )
    directory, manifest = export_to_dataset(source, formats="predictions")
    entries = lines(directory / "predictions" / "train.jsonl")
    model = call_record()["model"]
    assert entries == [
        {"instance_id": "o__r-1", "model_name_or_path": model, "model_patch": PATCH},
        {"instance_id": "t1", "model_name_or_path": model, "model_patch": ""},
    ]
    assert manifest["formats"][0]["rows"] == 2


def test_records_without_a_whole_diff_are_rejected_by_name(tmp_path: Path) -> None:
    source = make_run(
        tmp_path, call_record("A"), with_diff(**CUT), with_diff(**FAILED), with_diff(**BINARY)
    )
    directory, _ = export_to_dataset(source, formats="predictions")
    entries = lines(directory / "rejects.jsonl")
    assert [line["reason"] for line in entries] == [
        "no_patch",
        "patch_truncated",
        "no_patch",
        "no_patch",
    ]
    assert "at most 64 MiB" in entries[2]["detail"]


def test_a_row_has_one_prediction(tmp_path: Path) -> None:
    diffs = [
        {**judged_record(n / 2, f"{n}"), "diff": {"patch": f"{n}", "truncated": False}}
        for n in (1, 2)
    ]
    source = make_run(tmp_path, *diffs, samples=2)
    assert [row["model_patch"] for row in rows(source, "predictions")] == ["1"]
    assert rejects(source, formats="predictions") == {"t0#s1": "other_sample"}
    best: Any = {"filters": {"best_n": 1}}
    assert [row["model_patch"] for row in rows(source, "predictions", **best)] == ["2"]


def test_rows_hold_the_diff_in_their_metadata(tmp_path: Path) -> None:
    source = make_run(tmp_path, with_diff("A"), with_diff("B", **CUT), call_record("C"))
    for name in ("hermes", "openai"):
        parsed = [json.loads(row["metadata"]) for row in rows(source, name)]
        assert [row.get("patch") for row in parsed] == [PATCH, None, None]
