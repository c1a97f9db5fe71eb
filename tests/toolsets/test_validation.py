"""The words for values that pydantic rejected."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from batch_trajectories.basics.validation import UNKNOWN_KEY, did_you_mean, mistakes_in


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
    assert count.describe("script") == (
        "script.inner.count: Input should be greater than or equal to 0"
    )
    assert count.with_value().endswith("(got -1)")
    assert unknown.kind == UNKNOWN_KEY
    assert did_you_mean(unknown.keys[-1], _Inner.model_fields) == "did you mean 'count'?"
    assert did_you_mean("zzz", _Inner.model_fields) == ""
    assert even.describe() == "even: 3 is odd"
