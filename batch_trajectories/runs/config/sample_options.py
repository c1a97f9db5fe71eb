"""How many conversations a prompt gets, and from which models: a part of `RunConfig`."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BeforeValidator, model_validator

from agent.options import Int, PositiveFloat, PositiveInt, meaning, parse_json
from batch_trajectories.runs.config.option_types import Weight, running
from batch_trajectories.runs.config.sandbox_options import SandboxOptions


class SampleOptions(SandboxOptions):
    """The options about samples and their models, beside those of conversations and sandboxes."""

    models: Annotated[dict[str, Weight] | tuple[str, ...] | None, BeforeValidator(parse_json)] = (
        meaning(
            None,
            "Several models, {NAME: WEIGHT}, of which each conversation draws one; or the list of "
            "--escalate_after.",
            min_length=1,
        )
    )
    escalate_after: PositiveInt | None = meaning(
        None,
        "A prompt that failed so many times with one model of the list --models goes to the next "
        "(docs/stopping.md).",
    )
    model_budgets: Annotated[dict[str, PositiveFloat] | None, BeforeValidator(parse_json)] = (
        running(
            None,
            "Dollars by model of --escalate_after, {NAME: USD}: once its conversations have cost "
            "so much, no further one begins (docs/stopping.md).",
            min_length=1,
        )
    )
    num_samples: Int = running(1, "Conversations per prompt.", ge=1, le=1_000_000)
    until_passed: PositiveInt | None = running(
        None,
        "Samples of a prompt run until so many have passed, at most --num_samples; not for GRPO "
        "(docs/stopping.md).",
    )
    also_failed: Int = running(
        0, "With --until_passed: and until so many have not passed, for pairs.", ge=0
    )

    @model_validator(mode="after")
    def _stops_in_time(self) -> Self:
        """The options of samples that depend on others; a cascade gives them their defaults."""
        is_list = isinstance(self.models, tuple)
        if is_list != (self.escalate_after is not None):
            raise ValueError(
                "models: a list of models is a cascade, which needs escalate_after; to draw one "
                "for each conversation, give {NAME: WEIGHT}"
                if is_list
                else "escalate_after: needs models: [SMALL, ..., LARGE], a list in this order"
            )
        if self.models is not None and self.escalate_after is not None:
            if len(set(self.models)) != len(self.models):
                raise ValueError("models: a model of a cascade is named twice")
            samples = self.escalate_after * len(self.models)
            if "num_samples" not in self.model_fields_set:
                self.__dict__.update(num_samples=samples)
            if self.until_passed is None:
                self.__dict__.update(until_passed=1)
            if (reached := -(-self.num_samples // self.escalate_after)) < len(self.models):
                raise ValueError(
                    f"num_samples: {self.num_samples} samples reach only {reached} of "
                    f"{len(self.models)} models; with escalate_after: {self.escalate_after} give "
                    f"{samples} or more"
                )
        if strange := [
            name for name in self.model_budgets or () if name not in (self.models or ())
        ]:
            raise ValueError(f"model_budgets: {strange[0]!r} is no model of escalate_after")
        if self.model_budgets is not None and self.escalate_after is None:
            raise ValueError("model_budgets: needs escalate_after; see max_run_cost_usd")
        if self.also_failed and self.until_passed is None:
            raise ValueError("also_failed: needs until_passed")
        if (least := (self.until_passed or 0) + self.also_failed) > self.num_samples:
            raise ValueError(
                f"until_passed: --num_samples={self.num_samples} is the maximum per prompt; give "
                f"{least} or more"
            )
        return self
