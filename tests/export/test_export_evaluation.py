"""Benchmarks that conversations must not contain: their sources, words and columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.export.dataset.checking import find_problems
from batch_trajectories.export.dataset.runs import Source
from batch_trajectories.export.filters.contamination import _RunTable
from batch_trajectories.export.filters.filters import RecordFilters
from batch_trajectories.export.rows.filter_options import Filters
from batch_trajectories.export.rows.recipe import Recipe, load_recipe
from tests.fakes.fake_hub import REPOSITORY, REVISION, fake_hub
from tests.helpers.builders import assistant, call, record_of, result, user
from tests.helpers.exporting import export_to_dataset, make_run
from tests.helpers.running import lines, run, write_rows

WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi".split()  # noqa: SIM905
QUESTION = " ".join(WORDS)


def record_with_prompt(text: str, *, shown: str = "r", **row: Any) -> dict[str, Any]:
    return record_of(user(text), assistant("", call()), result(shown), assistant("Done."), row=row)


def left_out(source: Source, **filters: Any) -> dict[str, str]:
    directory, _ = export_to_dataset(
        source, formats="raw", filters={**filters, "exact_duplicates": False}
    )
    return {line["id"]: line["detail"] for line in lines(directory / "rejects.jsonl")}


def row_of(kind: str, folder: Path) -> str:
    """A set of one question in a file of this kind."""
    path = folder / f"set.{kind}"
    match kind:
        case "jsonl":
            path.write_text(json.dumps({"q": QUESTION}))
        case "json":
            path.write_text(json.dumps([{"q": ["x", {"y": QUESTION}]}]))
        case "csv":
            path.write_text(f'id,q\n7,"{QUESTION}"\n')
        case "txt":
            path.write_text(f"Hm.\n{QUESTION}\n")
        case "parquet":
            parquet = pytest.importorskip("pyarrow.parquet")
            import pyarrow as pa

            parquet.write_table(pa.Table.from_pylist([{"id": 7, "q": QUESTION}]), path)
        case "harbor":
            for name in ("one", "two"):  # the second could not run here
                task = path / name
                task.mkdir(parents=True)
                (task / "task.toml").write_text("[environment]\ngpus = 8\n")
                (task / "instruction.md").write_text(f"{QUESTION}\n" if name == "two" else "Do.")
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "txt", "parquet", "harbor"])
def test_questions_come_from_every_kind_of_file(tmp_path: Path, kind: str) -> None:
    source = make_run(
        tmp_path, record_with_prompt(f"Say {QUESTION}"), record_with_prompt("Say nothing of it")
    )
    found = left_out(source, evaluation_files=[row_of(kind, tmp_path)])
    place = {"txt": 2, "harbor": 2}.get(kind, 1)
    assert found == {"t0": f"message 1 (user): 13 words of set.{kind}:{place}"}


@pytest.mark.slow
def test_questions_come_from_the_hub_and_the_manifest_names_the_commit(tmp_path: Path) -> None:
    source = make_run(tmp_path, record_with_prompt(QUESTION), record_with_prompt("No."))
    name = f"hf:{REPOSITORY}:train"
    (tmp_path / "recipe.yaml").write_text(
        f"formats: [openai]\nfilters: {{evaluation_files: ['{name}']}}\n"
    )
    questions = b"".join(json.dumps({"q": text}).encode() + b"\n" for text in (QUESTION, "x"))
    with fake_hub({"data/train.jsonl": questions}) as (environment, _):
        home = {"HF_HOME": str(tmp_path / "home")}
        done = run(
            tmp_path, "export", source.run_dir, recipe="recipe.yaml", env={**home, **environment}
        )
    assert done.returncode == 0, done.stderr
    dataset = source.run_dir / "exports" / "dataset"
    manifest = json.loads((dataset / "manifest.json").read_text())
    counts = {"questions": 1, "left_out": {"words": 1}}
    assert manifest["evaluation"] == [{"name": name, "revision": REVISION, **counts}]
    card = (dataset / "README.md").read_text()
    assert f"- compared with benchmarks: 13 words in a row, in all texts\n  - `{name}`, " in card
    assert f"revision {REVISION}: 1 question; left out: 1 by words" in card
    gone = run(
        tmp_path, "export", source.run_dir, recipe="recipe.yaml", env={**home, **environment}
    )
    assert gone.returncode == 4
    assert "cannot reach the hub" in gone.stderr


@pytest.mark.parametrize(("words", "is_found"), [(13, True), (14, False)])
def test_the_length_of_a_run_is_a_choice(tmp_path: Path, words: int, is_found: bool) -> None:
    source = make_run(tmp_path, record_with_prompt(" ".join(WORDS[1:])))
    found = left_out(source, evaluation_files=[row_of("txt", tmp_path)], evaluation_words=words)
    assert bool(found) is is_found


def test_a_search_can_leave_out_what_the_model_and_its_tools_said(tmp_path: Path) -> None:
    said = record_of(user(), assistant(QUESTION))
    source = make_run(
        tmp_path, record_with_prompt(QUESTION), record_with_prompt("No.", shown=QUESTION), said
    )
    files = {"evaluation_files": [row_of("txt", tmp_path)]}
    places = {
        "all": {"t0", "t1", "t2"},
        "prompts": {"t0"},
        "tool_results": {"t1"},
        "prompts,tool_results": {"t0", "t1"},
    }
    for search, ids in places.items():
        assert left_out(source, **files, evaluation_search=search).keys() == ids
    assert left_out(source, **files, evaluation_search="prompts")["t0"].startswith("user: 13")


def test_rows_of_a_benchmarks_repositories_and_commits_are_left_out(tmp_path: Path) -> None:
    bench = write_rows(
        tmp_path / "bench.jsonl",
        {"instance_id": "a__b-1", "repo": "a/b", "base_commit": "ABC123", "problem": "x"},
        {"instance_id": "c__d-2", "repo": "c/d", "base_commit": None, "problem": QUESTION},
    )
    prompts = [
        {"repo": "https://github.com/A/b.git"},
        {"repo": "swesmith/a__b.0f1e2d3c"},
        {"repo_name": "c/d"},
        {"repo": "a/c", "base_commit": "abc123"},
        {"instance_id": "C__D-2"},
        {"repo": "b/a", "base_commit": "abc1234", "instance_id": "a__b-10"},
        {},
    ]
    source = make_run(tmp_path, *[record_with_prompt("No.")] * len(prompts), prompts=prompts)
    columns = ["instance_id", "repo", "base_commit"]
    choice = {"evaluation_files": [str(bench)], "evaluation_columns": columns}
    assert left_out(source, **choice, evaluation_search=[]) == {
        "t0": "repo 'a/b' is in bench.jsonl",
        "t1": "repo 'a/b' is in bench.jsonl",
        "t2": "repo 'c/d' is in bench.jsonl",
        "t3": "base_commit 'abc123' is in bench.jsonl",
        "t4": "instance_id 'c__d-2' is in bench.jsonl",
    }
    directory, manifest = export_to_dataset(source, formats="openai", filters=choice)
    assert manifest["rejected_by_reason"]["evaluation_columns"] == 5
    assert manifest["evaluation"] == [
        {
            "name": "bench.jsonl",
            "revision": None,
            "questions": 1,
            "left_out": {"base_commit": 1, "instance_id": 1, "repo": 3},
        }
    ]
    card = (directory / "README.md").read_text()
    assert "in all texts; columns `instance_id`, `repo`, `base_commit`" in card
    assert "left out: 1 by base_commit, 1 by instance_id, 3 by repo" in card
    assert list(find_problems(source, directory)) == []


def test_only_some_columns_of_a_benchmark_hold_questions(tmp_path: Path) -> None:
    bench = write_rows(
        tmp_path / "b.jsonl",
        {"text": "Why?", "patch": QUESTION},
        {"text": " ".join(reversed(WORDS)), "patch": ""},
    )
    source = make_run(
        tmp_path, record_with_prompt(QUESTION), record_with_prompt(" ".join(reversed(WORDS)))
    )
    files = {"evaluation_files": [str(bench)]}
    assert left_out(source, **files).keys() == {"t0", "t1"}
    assert left_out(source, **files, evaluation_text="text").keys() == {"t1"}


def test_each_set_counts_what_was_left_out_by_it(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("How many moons has Mars?\n")
    files = [row_of("txt", tmp_path), str(tmp_path / "short.txt")]
    source = make_run(
        tmp_path,
        record_with_prompt("Tell how many moons has Mars."),
        record_with_prompt(QUESTION),
        record_with_prompt(QUESTION + " moons"),
    )
    _, manifest = export_to_dataset(source, formats="openai", filters={"evaluation_files": files})
    assert [(one["name"], one["left_out"]) for one in manifest["evaluation"]] == [
        ("set.txt", {"words": 2}),
        ("short.txt", {"words": 1}),
    ]


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        (
            "evaluation_files: [q.txt], evaluation_search: [answers]",
            "filters.evaluation_search.0: must be 'all', 'prompts' or 'tool_results'",
        ),
        ("evaluation_files: [q.txt], evaluation_words: 15", "filters.evaluation_words: "),
    ],
)
def test_a_recipe_that_compares_nothing_is_refused(
    tmp_path: Path, filters: str, words: str
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(f"filters: {{{filters}}}")
    with pytest.raises(ConfigError, match=r"r\.yaml:1: ") as caught:
        load_recipe(path, {})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        ({"evaluation_files": ["hf:nothing"]}, "filters.evaluation_files: hf:nothing: not a"),
        ({"evaluation_files": ["gone.jsonl"]}, "filters.evaluation_files: gone.jsonl: cannot read"),
        ({"evaluation_files": ["gone.txt"]}, "filters.evaluation_files: gone.txt: cannot read"),
        (
            {"evaluation_files": ["set.txt"], "evaluation_columns": ["repo"]},
            "filters.evaluation_columns: no set of evaluation_files has a column 'repo'",
        ),
        ({"evaluation_files": ["set.txt"], "evaluation_text": ["q"]}, "no question of 5 words"),
        (
            {"evaluation_files": ["set.txt"], "evaluation_search": []},
            "filters.evaluation_search: is empty; then set evaluation_columns",
        ),
        ({"evaluation_columns": ["repo"]}, "filters.evaluation_columns: needs evaluation_files"),
        ({"evaluation_text": ["q"]}, "filters.evaluation_text: needs evaluation_files"),
    ],
)
def test_a_set_that_cannot_be_compared_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filters: dict[str, Any], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    row_of("txt", tmp_path)
    with pytest.raises(ConfigError) as caught:
        RecordFilters(Filters.model_validate(filters), threshold=0.5)
    assert words in str(caught.value)


def test_paths_are_relative_to_the_recipe_and_names_of_the_hub_are_not(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("filters: {evaluation_files: [q.txt, 'hf:org/set']}")
    found = load_recipe(path, {}).filters.evaluation_files
    assert found == (str(tmp_path / "q.txt"), "hf:org/set")


def test_an_export_without_benchmarks_says_nothing_of_them(tmp_path: Path) -> None:
    directory, manifest = export_to_dataset(
        make_run(tmp_path, record_with_prompt("No.")), formats="openai"
    )
    assert "evaluation" not in manifest
    assert "- compared with benchmarks: no\n" in (directory / "README.md").read_text()
    assert Recipe(formats=("openai",)).filters.evaluation_search == ("all",)


def test_runs_are_found_in_a_table_that_has_grown() -> None:
    """Also those whose slots collide: the low bits of these are the same."""
    runs = _RunTable()
    hashes = [n << 24 | 1 for n in range(1, 500)] + [-n for n in range(1, 50_000)]
    for question, one in enumerate(hashes):
        runs.add(one, question)
        runs.add(one, 9)
    assert len(runs) == len(hashes)
    assert [runs.find([1 << 60, one]) for one in hashes[:600]] == list(range(600))
    assert runs.find([5, 1 << 50, 0]) is None
