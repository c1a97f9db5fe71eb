"""docs/export.md names what there is, and its recipe works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from batch_trajectories.export.formats.registry import KNOWN
from batch_trajectories.export.recipe import (
    AnswerCheck,
    Card,
    Filters,
    Preference,
    Recipe,
    load_recipe,
)
from tests.running import ROOT

DOCS = (ROOT / "docs" / "export.md").read_text()


def test_every_format_is_named() -> None:
    for name in KNOWN:
        assert re.search(rf"^`{name}` \|", DOCS, re.MULTILINE), name


def test_the_recipe_is_one_and_names_every_key(tmp_path: Path) -> None:
    text = DOCS.split("```yaml\n")[1].split("```")[0]
    (tmp_path / "recipe.yaml").write_text(text)
    recipe = load_recipe(tmp_path / "recipe.yaml", {})
    assert recipe.filters.answer is not None
    for model in (Recipe, Filters, Preference, Card, AnswerCheck):
        for key in model.model_fields.keys() - {"first_n", "function"}:
            assert re.search(rf"^ *{key}:", text, re.MULTILINE), key


@pytest.mark.parametrize("key", ["first_n", "function"])
def test_keys_that_exclude_each_other_are_named_together(key: str) -> None:
    assert key in DOCS.split("```yaml\n")[1].split("```")[0]
