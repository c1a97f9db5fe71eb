"""The key `fit` of a recipe: rows of `openai` as the student's chat template shows them.

Turns whose context in training differs from inference lose their loss. Rows above a length are left
out, or cut after a turn. The template is the user's: it is rendered in a sandbox, but without
limits of time and memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agent.options import PositiveInt
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.export.conversation.validity import Reason, Rejected

_MAX_IDS = 1000
"""Maximum number of ids of cut rows in the manifest."""


class Fit(BaseModel):
    """A chat template and the limits that rows are fitted to: the key `fit` of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    template: Annotated[str, Field(min_length=1)]
    """A name, a file or the directory of a tokenizer, as in `--parity`."""
    other_context: Literal["keep", "mask"] = "keep"
    """`mask`: turns whose context in training differs from inference carry no loss."""
    max_length: PositiveInt | None = None
    """Maximum tokens of a row."""
    too_long: Literal["leave_out", "cut"] = "leave_out"
    """The treatment of longer rows; `cut` ends a row with the last turn that fits."""

    @model_validator(mode="after")
    def _does_something(self) -> Fit:
        if self.other_context == "keep" and self.max_length is None:
            raise ValueError("does nothing; set other_context: mask, max_length, or both")
        return self


class Fitting:
    """Fits rows, and counts masked turns, cut rows and rows left out."""

    def __init__(self, fit: Fit, reasoning_key: str) -> None:
        """`reasoning_key` is the key of reasoning in messages. Raises `ConfigError`."""
        from batch_trajectories.export.templates.rendering import load_chat
        from batch_trajectories.export.templates.template_names import find_templates

        found = find_templates(fit.template)
        if len(found) != 1:
            raise ConfigError(
                f"fit.template: {fit.template} means {len(found)} templates; name one"
            )
        (self._template,) = found
        self._fit, self._key = fit, reasoning_key
        self._chat = load_chat(self._template.path)
        self._tokens = None
        if fit.max_length is not None:
            if self._template.tokenizer is None:
                raise ConfigError(
                    f"fit.max_length counts tokens: {self._template.path} has no tokenizer.json "
                    "beside it; give the directory of a tokenizer"
                )
            from batch_trajectories.export.templates.rendering import Tokens

            self._tokens = Tokens(self._template.tokenizer)
        self._turns = self._masked = self._left_out = 0
        self._cut: list[str] = []
        self._refused: Counter[str] = Counter()

    def fit_row(self, row: dict[str, Any]) -> dict[str, Any]:
        """Mask turns of a row, or cut it. A row that the template refuses stays as it is.

        Raises Rejected for a row that is too long, or that has no turn left to learn.
        """
        from batch_trajectories.export.templates.contexts import find_difference, read_trainer_row
        from batch_trajectories.export.templates.rendering import strip_marks, tools_in

        tools = tools_in(row)
        try:
            text, _ = strip_marks(self._chat(row["messages"], tools))
        except Exception as error:  # a template can raise anything
            self._refused[(str(error) or type(error).__name__)[:200]] += 1
            return row
        shown = read_trainer_row(row, tools, self._key)
        if self._is_long(text):
            row, text = self._shorten(row, tools, [turn.at for turn in shown.turns])
            shown = read_trainer_row(row, tools, self._key)
        self._turns += len(shown.turns)
        if self._fit.other_context == "keep":
            return row
        messages = [*row["messages"]]
        for turn in shown.turns:
            if find_difference(self._chat, turn, tools, text) is not None:
                messages[turn.at] = {**messages[turn.at], "weight": 0, "loss": False}
        masked = sum(now is not was for now, was in zip(messages, row["messages"], strict=True))
        self._masked += masked
        if masked == len(shown.turns):
            raise Rejected(
                Reason.ALL_MASKED, f"{self._template.name} shows none of its turns as inference did"
            )
        return {**row, "messages": messages} if masked else row

    def _is_long(self, text: str) -> bool:
        from batch_trajectories.export.templates.rendering import EOS

        if self._tokens is None or self._fit.max_length is None:
            return False
        return self._tokens.count(text.replace(EOS, "")) > self._fit.max_length

    def _shorten(
        self, row: dict[str, Any], tools: Sequence[Any], turns: Sequence[int]
    ) -> tuple[dict[str, Any], str]:
        from batch_trajectories.export.templates.rendering import strip_marks

        if self._fit.too_long == "cut":
            for at in reversed(turns):
                messages = row["messages"][: at + 1]
                text, _ = strip_marks(self._chat(messages, tools))
                if not self._is_long(text):
                    self._cut.append(row["id"])
                    return {**row, "messages": messages}, text
        self._left_out += 1
        raise Rejected(Reason.TOO_LONG, f"{row['id']}: more than {self._fit.max_length} tokens")

    def to_json(self) -> dict[str, Any]:
        """The counts, for the manifest."""
        return {
            "template": self._template.name,
            "turns": self._turns,
            "masked_turns": self._masked,
            "left_out": self._left_out,
            "cut": len(self._cut),
            "rows_cut": self._cut[:_MAX_IDS],
            "refused": dict(sorted(self._refused.items())),
        }
