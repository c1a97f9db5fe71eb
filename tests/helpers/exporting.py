"""Runs made of given records, for the tests of exports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.scan import Scan, scan, tasks
from batch_trajectories.export.dataset.directory import export_dataset
from batch_trajectories.export.dataset.runs import Source
from batch_trajectories.export.rows.recipe import Recipe
from batch_trajectories.records.tasks import SCHEMA_VERSION
from tests.helpers.builders import assistant, call, record_of, result, user
from tests.helpers.running import lines, write_rows
from tests.helpers.stored import complete


def bare(id: str, **fields: Any) -> dict[str, Any]:
    """A record of a conversation of one turn, without messages."""
    turn = {"finish_reason": "stop", "started_at": 1.0, "duration_s": 0.5, "usage": None}
    given = {"row": {}, "input_digest": "d", "usage": None, "tools": [], "turns": [turn], **fields}
    return complete(record_of(id=id, **given))


def call_record(answer: str = "Done.", **changes: Any) -> dict[str, Any]:
    """A record of one call with its result, and an answer."""
    messages = (
        {"role": "system", "content": "Be brief."},
        user(),
        assistant("Looking.", call('{"city": "Oslo", "n": 1.5}'), reasoning="Which city?"),
        result('{"c": 9}'),
        assistant(answer, reasoning="Now I know."),
    )
    return record_of(*messages, **changes)


def judged_record(reward: float | None, answer: str) -> dict[str, Any]:
    """A record with a reward."""
    check = None if reward is None else {"passed": reward > 0.5, "reward": reward}
    return call_record(answer, check=check)


def make_run(
    folder: Path,
    *records: Mapping[str, Any],
    samples: int = 1,
    prompts: list[Any] | None = None,
    pending: int = 0,
    more: str = "",
    name: str = "r",
) -> Source:
    """A run directory `name` in `folder` with `records`, side by side the samples of a prompt.

    `prompts` are columns of rows, or texts; `pending` rows have no record, `more` is text at the
    end of the dataset.
    """
    count = -(-len(records) // samples) + pending
    rows = [{"id": f"t{n}", "prompt": f"Question {n}"} for n in range(count)]
    for row, given in zip(rows, prompts or [], strict=False):
        row.update(given if isinstance(given, Mapping) else {"prompt": given})
    dataset = write_rows(
        folder / f"{name}_prompts.jsonl" if name != "r" else folder / "p.jsonl", *rows
    )
    with dataset.open("a") as file:
        file.write(more)
    scanned = scan(dataset, max_samples=None, num_samples=samples)
    run_dir = folder / name
    run_dir.mkdir(exist_ok=True)
    config = RunConfig(dataset_file=dataset, run_name=name, output_dir=folder, num_samples=samples)
    identity = {
        "schema_version": SCHEMA_VERSION,
        "api": "openai_chat",
        "created": 1.5,
        "digest": "0123456789abcdef",
        "meaning": {},
        "config": config.to_json(),
        "dataset": {
            "path": str(dataset),
            "sha256": scanned.sha256,
            "rows": scanned.rows,
            "bad_rows": len(scanned.bad_rows),
        },
        "history": [],
        "versions": {},
    }
    (run_dir / "run.json").write_text(json.dumps(identity))
    write_rows(run_dir / "records.jsonl", *_stored(scanned, records))
    (run_dir / "records.idx").unlink(missing_ok=True)
    return Source(run_dir, scanned, samples)


def _stored(found: Scan, records: Any) -> list[dict[str, Any]]:
    of_task = {"id", "prompt_id", "sample", "input_digest", "row"}
    return [
        {
            **{key: value for key, value in complete(record).items() if key not in of_task},
            "id": task.id,
            "prompt_id": task.prompt_id,
            "sample": task.sample,
            "input_digest": task.input_digest,
            "row": task.columns,
        }
        for task, record in zip(tasks(found), records, strict=False)
    ]


def export_to_dataset(
    source: Source, *, replace: bool = True, **recipe: Any
) -> tuple[Path, dict[str, Any]]:
    """Export a run by a recipe; gives the directory of the dataset and its manifest."""
    directory = source.run_dir.parent / "out"
    recipe.setdefault("filters", {"exact_duplicates": False})
    return directory, export_dataset(
        source, Recipe.model_validate(recipe), directory, replace=replace
    )


def rows(source: Source, name: str, **recipe: Any) -> list[dict[str, Any]]:
    """The rows of one format of a run."""
    directory, _ = export_to_dataset(source, formats=name, **recipe)
    path = directory / name / "train.jsonl"
    return lines(path) if path.exists() else []


def rejects(source: Source, **recipe: Any) -> dict[str, str]:
    """The reasons by id why records of a run are in no format, or not in the only one."""
    directory, manifest = export_to_dataset(source, **recipe)
    left_out = {line["id"]: line["reason"] for line in lines(directory / "rejects.jsonl")}
    assert len(left_out) == manifest["rejects"]["rows"]
    return left_out


def why(source: Source, **recipe: Any) -> dict[tuple[str, str | None], str]:
    """Reason and detail of each reject, by id and format."""
    directory, _ = export_to_dataset(source, **recipe)
    return {
        (line["id"], line["format"]): f"{line['reason']}: {line['detail']}"
        for line in lines(directory / "rejects.jsonl")
    }
