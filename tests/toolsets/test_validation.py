"""The words for values that pydantic rejected."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from batch_trajectories.basics.validation import UNKNOWN_KEY, did_you_mean, mistakes_in
from batch_trajectories.config.option_types import plain_name


class _Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    count: Annotated[int, Field(ge=0)]


def _check_even(value: int) -> int:
    if value % 2:
        raise ValueError(f"{value} is odd")
    return value


class _Shape(BaseModel):
    inner: _Inner
    even: Annotated[int, AfterValidator(_check_even)]


def test_every_mistake_is_described_with_its_place() -> None:
    with pytest.raises(ValidationError) as caught:
        _Shape.model_validate({"inner": {"count": -1, "cuont": 2}, "even": 3})
    count, unknown, even = mistakes_in(caught.value)
    assert count.describe("script") == ("script.inner.count: must be at least 0")
    assert count.with_value().endswith("(got -1)")
    assert unknown.kind == UNKNOWN_KEY
    assert did_you_mean(unknown.keys[-1], _Inner.model_fields) == "did you mean 'count'?"
    assert did_you_mean("zzz", _Inner.model_fields) == ""
    assert even.describe() == "even: 3 is odd"


def test_no_words_of_pydantic_reach_the_user() -> None:
    """Neither in what is wrong, nor among the keys of a value that may have several types."""

    class Several(BaseModel):
        model_config = ConfigDict(extra="forbid")

        text: str = Field(min_length=2, max_length=3, pattern="^a")
        whole: int = Field(ge=1, lt=5)
        number: float = Field(gt=0.5, le=2)
        flag: bool
        choice: Literal["a", "b"]
        union: dict[str, Annotated[float, Field(ge=0)]] | tuple[str, ...]
        items: list[int] = Field(min_length=1, max_length=2)
        path: Path
        needed: str

    wrong: list[dict[str, Any]] = [
        {"text": "", "whole": 0, "number": 0, "flag": "perhaps", "choice": "c", "union": {"a": -1}},
        {"text": "abcd", "whole": 9, "number": 3, "items": [], "path": 5, "unknown": 1},
        {"text": "ba", "whole": "x", "number": "y", "items": [1, 2, 3], "union": 7},
        {"text": 5, "whole": 1.5, "number": float("inf"), "items": 8, "flag": None},
    ]
    said = []
    for values in wrong:
        with pytest.raises(ValidationError) as caught:
            Several.model_validate(values)
        said += [mistake.describe() for mistake in mistakes_in(caught.value)]
    for text in said:
        assert " should " not in text, text
        assert not re.search(r"[Ii]nput|valid |required|permitted|\[|\{", text), text
    assert "text: must have at most 3 characters" in said
    assert "union.a: must be at least 0" in said
    assert "needed: is missing" in said


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("a" * 121, "it has 121 characters"),
        ("\u6f22" * 67, "it has 201 bytes in UTF-8"),
        ("\u00fc" * 110, "it has 220 bytes in UTF-8"),
        ("a" * 120, None),
        ("\u6f22" * 66, None),
    ],
)
def test_the_length_of_a_name_counts_bytes(name: str, problem: str | None) -> None:
    """That of its files has a limit of 255."""
    if problem is None:
        assert plain_name(name) == name
        return
    with pytest.raises(ValueError, match=problem):
        plain_name(name)
