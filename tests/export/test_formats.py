"""Every module of `export/formats/` is a format, and nothing else has to know it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from batch_runner import main
from batch_trajectories.export.rows.format import Format, load_format, load_kind
from batch_trajectories.export.rows.format_names import OTHER_NAMES, format_names, format_summaries
from tests.helpers.exporting import export_to_dataset, judged_record, make_run
from tests.helpers.running import ROOT, lines

FORMATS = [one for one in map(load_kind, format_names()) if isinstance(one, Format)]

LOADED = """
import sys
from pathlib import Path
from {module} import {function} as make
{call}
prefix = "batch_trajectories.export.formats."
print(*sorted(name.removeprefix(prefix) for name in sys.modules if name.startswith(prefix)))
"""


@pytest.mark.parametrize("name", format_names())
def test_a_module_holds_the_format_of_its_name(name: str) -> None:
    assert load_kind(name).name == name
    assert OTHER_NAMES.keys().isdisjoint([name])


def test_the_help_of_export_says_what_each_format_is() -> None:
    done = CliRunner().invoke(main, ["export", "--help"], terminal_width=100)
    told = " ".join(done.output.partition("\nFormats:\n")[2].split())
    for name, summary in format_summaries().items():
        assert len(summary) <= 81
        assert summary.endswith(".")
        assert f"{name} {summary}" in told


def test_no_format_is_imported_for_its_name_or_help() -> None:
    call = "make(['export', '--help'], standalone_mode=False)"
    code = LOADED.format(module="batch_runner", function="main", call=call)
    assert _last_line(code) == ""


def test_an_export_imports_the_formats_that_it_writes(tmp_path: Path) -> None:
    """With those that its rejects name, and no others."""
    source = make_run(tmp_path, judged_record(1.0, "A"))
    run, dataset = source.run_dir, tmp_path / "p.jsonl"
    call = f"""
from batch_trajectories.dataset.scan import scan
make(Path({str(run)!r}), scan(Path({str(dataset)!r}), max_samples=None), num_samples=1)
"""
    module = "batch_trajectories.export.training_files"
    assert _last_line(LOADED.format(module=module, function="export_run", call=call)) == "hermes"
    call = "make(None, {'formats': 'llamafactory,dpo'})"
    module = "batch_trajectories.export.rows.recipe"
    code = LOADED.format(module=module, function="load_recipe", call=call)
    assert _last_line(code) == "dpo llamafactory"


def _last_line(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.split("\n")[-2]


@pytest.mark.parametrize("name", [one.name for one in FORMATS if one.columns])
def test_rows_have_the_columns_of_their_format(tmp_path: Path, name: str) -> None:
    source = make_run(tmp_path, judged_record(1.0, "A"), judged_record(0.0, "B"), samples=2)
    directory, _ = export_to_dataset(source, formats=name)
    columns = list(load_format(name).columns)
    assert (columns[0], columns[-1]) == ("id", "metadata")
    entries = lines(directory / name / "train.jsonl")
    assert entries
    assert all(list(row) == columns for row in entries)


def test_sharegpt_is_another_name_of_hermes(tmp_path: Path) -> None:
    source = make_run(tmp_path, judged_record(1.0, "A"))
    directory, manifest = export_to_dataset(source, formats="sharegpt,hermes")
    assert [part["format"] for part in manifest["formats"]] == ["hermes"]
    (row,) = lines(directory / "hermes" / "train.jsonl")
    speakers = {turn["from"] for turn in row["conversations"]}
    assert speakers == {"system", "human", "gpt", "tool"}


def test_the_card_says_how_to_read_each_format(tmp_path: Path) -> None:
    source = make_run(tmp_path, judged_record(1.0, "A"), judged_record(0.0, "B"), samples=2)
    directory, _ = export_to_dataset(source, formats=[one.name for one in FORMATS])
    card = (directory / "README.md").read_text()
    for one in FORMATS:
        assert f"- **{one.name}**: {one.card}" in card
