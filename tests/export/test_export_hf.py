"""Directories of `datasets`: `load_from_disk` gives the rows of the JSON lines."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.export.conversation.row_json import dumps_row
from batch_trajectories.export.dataset.checking import find_problems
from batch_trajectories.export.dataset.directory import export_dataset
from batch_trajectories.export.dataset.runs import Source
from batch_trajectories.export.rows.files import LateKeys
from batch_trajectories.export.rows.recipe import FormatName, Recipe
from tests.helpers.builders import assistant, call, record_of, result, user
from tests.helpers.exporting import call_record, judged_record, make_run
from tests.helpers.running import lines, run

pytestmark = pytest.mark.skipif(find_spec("datasets") is None, reason="needs `datasets`")

FORMATS: tuple[FormatName, ...] = ("hermes", "llamafactory", "openai", "dpo", "kto")


def library() -> Any:
    """`datasets`, whose import takes seconds: not where tests are only collected."""
    import datasets

    return datasets


def load(directory: Path, name: str) -> dict[str, list[Any]]:
    """The rows of each split, as a user of the library sees them."""
    splits = library().load_from_disk(directory / f"{name}_hf")
    return {split: list(rows) for split, rows in splits.items()}


def written(directory: Path, name: str) -> dict[str, list[Any]]:
    """The same of the JSON lines, with tools of formats with messages as a list."""
    collected = {}
    for path in sorted((directory / name).glob("*.jsonl")):
        rows = lines(path)
        if name in ("openai", "dpo", "kto"):
            rows = [{**row, "tools": json.loads(row["tools"])} for row in rows]
        collected[path.stem] = rows
    return collected


@pytest.fixture
def source(tmp_path: Path) -> Source:
    records = [
        judged_record(reward, f"Answer {reward}, {n}.") for n in range(20) for reward in (0.0, 1.0)
    ]
    return make_run(tmp_path, *records, samples=2)


def test_holds_the_rows_of_the_json_lines_in_every_format(source: Source, tmp_path: Path) -> None:
    recipe = Recipe(formats=(*FORMATS, "hf"), splits={"train": 0.5, "test": 0.5})
    export_dataset(source, recipe, tmp_path / "d")
    for name in FORMATS:
        rows = load(tmp_path / "d", name)
        assert rows == written(tmp_path / "d", name)
        assert rows["train"]
        assert rows["test"]
    assert list(find_problems(source, tmp_path / "d")) == []


def test_alone_it_holds_rows_of_openai_in_shards(source: Source, tmp_path: Path) -> None:
    export_dataset(source, Recipe(formats=("openai",)), tmp_path / "lines")
    export_dataset(source, Recipe(formats=("hf",), shard_mb=0.005), tmp_path / "d")
    assert len(list((tmp_path / "d" / "openai_hf" / "train").glob("*.arrow"))) > 2
    assert not (tmp_path / "d" / "openai").exists()
    assert load(tmp_path / "d", "openai") == written(tmp_path / "lines", "openai")
    by_card = library().load_dataset(str(tmp_path / "d"), cache_dir=str(tmp_path / "cache"))
    assert list(by_card["train"]) == load(tmp_path / "d", "openai")["train"]


def test_another_content_has_another_fingerprint(tmp_path: Path) -> None:
    """By the fingerprint `datasets` finds what it cached: two contents must not share one."""
    collected = []
    for answer in ("Yes.", "No."):
        source = make_run(tmp_path, call_record(answer))
        export_dataset(source, Recipe(formats=("hf",)), tmp_path / "d")
        collected.append(
            library().load_from_disk(tmp_path / "d" / "openai_hf")["train"]._fingerprint
        )
    assert collected[0] != collected[1]


@pytest.mark.parametrize("form", ["text", "list"])
def test_tools_are_text_or_a_list_as_asked_for(source: Source, tmp_path: Path, form: Any) -> None:
    recipe = Recipe(formats=("openai", "dpo", "kto", "llamafactory", "parquet", "hf"), tools=form)
    export_dataset(source, recipe, tmp_path / "d")
    kind: Any = {"text": str, "list": list}[form]
    for name in ("openai", "dpo", "kto"):
        (line, *_) = lines(tmp_path / "d" / name / "train.jsonl")
        (row, *_) = load(tmp_path / "d", name)["train"]
        assert isinstance(line["tools"], kind)
        assert row["tools"] == line["tools"]
    (line, *_) = lines(tmp_path / "d" / "llamafactory" / "train.jsonl")
    assert isinstance(line["tools"], str)
    by_card = library().load_dataset(
        str(tmp_path / "d"), "openai", cache_dir=str(tmp_path / "cache"), split="train"
    )
    assert json.loads(by_card[0]["tools"])[0]["type"] == "function"


def test_a_list_of_tools_in_json_lines_loads_by_the_card(source: Source, tmp_path: Path) -> None:
    export_dataset(source, Recipe(formats=("openai",), tools="list"), tmp_path / "d")
    by_card = library().load_dataset(str(tmp_path / "d"), cache_dir=str(tmp_path / "cache"))
    assert list(by_card["train"]) == lines(tmp_path / "d" / "openai" / "train.jsonl")


CALLS = record_of(user(), assistant("", call('{"a": 1}')), result("r"), assistant("Done."))
SMALL = [record_of(user(f"{n} " * 1000), assistant(f"It is {n}.")) for n in range(3)]
LARGE = [record_of(user(f"{n} " * (1 << 19)), assistant(f"It is {n}.")) for n in range(11)]


@pytest.mark.parametrize(
    ("records", "shard_mb", "is_late"),
    [
        ([*LARGE, CALLS], None, True),
        ([*SMALL, CALLS], 0.003, True),
        ([CALLS, *LARGE], None, False),
        ([*SMALL, CALLS], None, False),
        (SMALL, None, False),
    ],
    ids=["late", "in a later shard", "at first", "soon", "never"],
)
def test_lines_whose_messages_get_further_keys_late_are_named(
    tmp_path: Path, records: list[dict[str, Any]], shard_mb: float | None, is_late: bool
) -> None:
    """The library fixes the columns by the first 10 MB, unless the card names them."""
    recipe = Recipe(formats=("openai",), shard_mb=shard_mb)
    manifest = export_dataset(make_run(tmp_path, *records), recipe, tmp_path / "d")
    named = manifest["formats"][0].get("splits_with_late_keys", [])
    assert named == ["train"] * is_late
    cache = str(tmp_path / "cache")
    files = sorted(map(str, (tmp_path / "d").glob("openai/**/*.jsonl")))
    if is_late:
        with pytest.raises(library().exceptions.DatasetGenerationError):
            library().load_dataset("json", data_files=files, cache_dir=cache)
    else:
        assert len(library().load_dataset("json", data_files=files, cache_dir=cache)["train"])
    by_card = library().load_dataset(str(tmp_path / "d"), split="train", cache_dir=cache)
    told = sorted((message["role"], message["content"]) for message in by_card[-1]["messages"])
    last = json.loads(Path(files[-1]).read_text().splitlines()[-1])["messages"]
    assert told == sorted((message["role"], message["content"]) for message in last)


def test_readers_are_told_of_lines_that_the_library_refuses(tmp_path: Path) -> None:
    source = make_run(tmp_path, *SMALL, CALLS)
    options: dict[str, Any] = {"format": "openai", "shard_mb": 0.003}
    done = run(tmp_path, "export", str(source.run_dir), **options)
    assert "datasets refuses the JSON lines of train" in done.stdout
    card = source.run_dir / "exports" / "dataset" / "README.md"
    assert "- `datasets` refuses the JSON lines of `openai` (train)" in card.read_text()
    done = run(tmp_path, "export", str(source.run_dir), **{**options, "format": "hf"})
    assert "refuses" not in done.stdout


def test_columns_of_messages_are_watched_one_by_one() -> None:
    """Prompts of preferences can be plain until one brings turns along."""
    plain = [{"role": "user", "content": "q"}]
    calls = [*plain, {"role": "assistant", "content": "", "tool_calls": []}]
    watched = LateKeys({"id": "string", "prompt": "messages", "chosen": "messages"}, shard_bytes=9)
    for split, prompt in (("train", plain), ("train", plain), ("test", plain), ("train", calls)):
        watched.add(split, dumps_row({"id": "p", "prompt": prompt, "chosen": calls}))
    assert watched.splits() == ["train"]
