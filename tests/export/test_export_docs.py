"""docs/export.md names what there is, and its recipe works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from batch_trajectories.config.option_types import RowFlaw
from batch_trajectories.export.conversation.style import Style
from batch_trajectories.export.conversation.tolerance import Tolerance
from batch_trajectories.export.conversation.validity import Reason
from batch_trajectories.export.masking import Mask
from batch_trajectories.export.rows.format import Format, load_kind
from batch_trajectories.export.rows.format_names import format_names
from batch_trajectories.export.rows.recipe import load_recipe
from tests.helpers.running import ROOT

DOCS = (ROOT / "docs" / "export.md").read_text()
RECIPE = DOCS.partition("## Recipe")[2].split("```")[1].removeprefix("yaml\n")


def test_every_format_is_named() -> None:
    for name in format_names():
        assert re.search(rf"^`{name}`(, `\w+`)* \|", DOCS, re.MULTILINE), name


@pytest.mark.parametrize("reason", get_args(RowFlaw))
def test_the_formats_that_keep_a_flaw_are_named(reason: str) -> None:
    line = re.search(rf"^[^|\n]*`{reason}`.*\| (.*)$", DOCS, re.MULTILINE)
    assert line is not None
    formats = [one for one in map(load_kind, format_names()) if isinstance(one, Format)]
    keeping = {one.name for one in formats if reason in one.holds - one.accepts}
    if line[1] == "all":
        assert all(reason in one.holds for one in formats if one.shows_messages)
        return
    told = Style(tolerance=Tolerance(frozenset({Reason(reason)})), arguments="text")
    as_text = {
        one.name for one in formats if reason in one.limit(told).tolerance.accepts - one.accepts
    }
    always, _, with_text = line[1].partition("with `--arguments text`:")
    assert set(re.findall(r"`(\w+)`", always)) == keeping
    assert set(re.findall(r"`(\w+)`", with_text)) == as_text - keeping


def test_recipes_on_the_page_are_some_and_every_mask_is_named(tmp_path: Path) -> None:
    mask = DOCS.partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "recipe.yaml").write_text(mask)
    assert load_recipe(tmp_path / "recipe.yaml", {}).include
    for key in Mask.model_fields:
        assert re.search(rf"^  {key}:", mask, re.MULTILINE), key
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "recipe.yaml", {})
    assert recipe.filters.answer is not None
    assert "\nruns:\n" in DOCS, "only a mix has it"
