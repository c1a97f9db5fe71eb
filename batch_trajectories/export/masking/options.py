"""The key `mask` of a recipe: which turns carry no loss."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from agent.options import Float
from batch_trajectories.runs.store.checks import MAIN

NOT_PASSED = "not_passed"
"""Conversations that did not pass, or ended early."""


def _by_name(value: Any) -> Any:
    """A number alone is the bound of `reward`."""
    return {MAIN: value} if isinstance(value, int | float) else value


Bound = Annotated[Float, Field(allow_inf_nan=False)]


class Mask(BaseModel):
    """Why a turn carries no loss; the keys are the names of the reasons."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    turn_reward: Annotated[dict[str, Bound], BeforeValidator(_by_name)] = {}
    """A turn reward below its bound, by name; a number alone is for `reward`."""
    failed_call: bool = False
    """A call failed."""
    repeated_call: bool = False
    """A call, its arguments and its result are those of the turn before."""
    bad_arguments: bool = False
    """A call that its tool refused unread, or that had to be repaired."""
    interrupted_result: bool = False
    """A stop of the run interrupted a call."""
    leak_suspected: bool = False
    """A call that looks for the solution; see `export.conversation.leaks`."""
    label: bool = False
    """A turn that a reviewer marked to carry no loss."""
    wrong_answer: bool = False
    """The answer of a conversation that did not pass."""
    model: Literal["own_model"] | None = None
    """`own_model`: the reply is of another model that an agent called."""
    function: Annotated[str, Field(pattern=r"^.+:[\w.]+$")] | None = None
    """MODULE:FUNCTION, called with the record; returns a list with an item for each turn of this
    run's model: true or a text (the reason) for a turn without loss."""

    @model_validator(mode="after")
    def _names_a_reason(self) -> Mask:
        if self == Mask.model_construct():
            raise ValueError(f"masks nothing; set one of {', '.join(Mask.model_fields)}")
        return self


WITHOUT_BOUNDS: dict[str, Any] = {
    **{name: True for name, field in Mask.model_fields.items() if field.annotation is bool},
    "model": "own_model",
}
"""All reasons that need no number and no function: the mask of failures, if none is given."""
