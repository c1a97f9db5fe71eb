"""The filters of a recipe, as its file names them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from agent.loop.answers import TOLERANCE
from agent.options import Match, NonNegativeInt, PositiveInt, split_commas
from agent.state.trajectory import Status
from batch_trajectories.export.conversation.tolerance import Tokens
from batch_trajectories.records.checks import EXPECTED

Share = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class RecipePart(BaseModel):
    """A part of a recipe; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class AnswerCheck(RecipePart):
    """A comparison of the final answer with a column of the dataset."""

    column: str = EXPECTED
    """The column with the right answer; `expected` also stands for `target` if a row has only
    that."""
    match: Match | Literal["numeric", "regex", "python"] = "exact"
    """The comparison, as in `--expected_match`. numeric: the same as number; regex: the column is a
    pattern; python: `function` decides."""
    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = TOLERANCE
    """Largest relative difference of numbers, if one of them is no whole number."""
    function: Annotated[str, Field(pattern=r"^.+:[\w.]+$")] | None = None
    """MODULE:FUNCTION, called with answer and record; returns whether the answer is right."""

    @model_validator(mode="after")
    def _names_a_function(self) -> AnswerCheck:
        if (self.match == "python") != (self.function is not None):
            raise ValueError("`function` belongs to match: python, and that needs one")
        return self


class Filters(RecipePart):
    """The filters of a recipe. A filter that is absent leaves out no record."""

    status: (
        Annotated[
            tuple[Literal[Status, "any"], ...], BeforeValidator(split_commas), Field(min_length=1)
        ]
        | None
    ) = None
    """Endings to keep; `any` keeps all but `failed`. None: `completed`, in dpo and kto also
    conversations that ended because their answer was not the expected one."""
    min_reasoning: Share | None = None
    """Minimum share of the model's turns with readable reasoning."""
    hidden_reasoning: Literal["keep", "reject"] = "keep"
    """`reject` leaves out conversations with hidden reasoning: many templates render such turns
    with an empty think block, whatever the row holds."""
    shortened_views: Literal["keep", "reject"] = "keep"
    """`reject` leaves out conversations of which the model saw parts shortened or summarized: rows
    hold these parts in full."""
    leak_suspected: Literal["keep", "reject"] = "keep"
    """`reject` leaves out conversations of checked tasks whose calls looked for the solution."""
    max_interrupted_calls: NonNegativeInt | None = None
    """Maximum number of tool calls that a crash interrupted."""
    max_tool_errors: NonNegativeInt | None = None
    """Maximum number of failed tool calls."""
    max_tool_error_share: Share | None = None
    """Maximum share of failed calls among those with a result."""
    invented_tools: Literal["keep", "reject"] = "keep"
    """`reject` leaves out conversations that call tools that were not offered. It matters for `raw`
    and `atif`; other formats refuse such rows unless `accept_rows` keeps them."""
    control_tokens: Tokens = "template"
    """Tokens for which rows are refused: `all` adds those of Llama 2, Mistral and Gemma, which are
    HTML or plain words to other tokenizers."""
    min_turns: PositiveInt | None = None
    """Minimum number of the model's turns."""
    max_turns: PositiveInt | None = None
    """Maximum number of the model's turns."""
    min_tool_calls: NonNegativeInt | None = None
    """Minimum number of tool calls."""
    max_tool_calls: NonNegativeInt | None = None
    """Maximum number of tool calls."""
    max_input_tokens: PositiveInt | None = None
    """Maximum input tokens of all calls; an unknown number counts as too many."""
    max_output_tokens: PositiveInt | None = None
    """Maximum output tokens of all calls; an unknown number counts as too many."""
    max_tokens: PositiveInt | None = None
    """Input and output of all calls; an unknown number counts as too many."""
    min_reward: Number | None = None
    """Minimum of the reward that `reward_name` names."""
    max_reward: Number | None = None
    """Maximum of the reward that `reward_name` names."""
    min_rewards: dict[str, Number] = {}
    """Minimums for several rewards, by the name of the reward."""
    max_rewards: dict[str, Number] = {}
    """Maximums for several rewards, by the name of the reward."""
    label: Literal["keep", "not_rejected"] | None = None
    """`keep` keeps records if all reviewers with a verdict say keep, at least one; `not_rejected`
    leaves out records that a reviewer rejects. Has no effect on dpo and kto, which
    compare good samples with bad ones."""
    require_passed: bool | Literal["judged", "failed"] = False
    """Leave out records that did not pass; records that are neither checked nor scored stay. Has no
    effect on dpo and kto, which compare good samples with bad ones. `judged` also leaves out
    records without a judgement; `failed` keeps only records that did not pass. These two have an
    effect on all formats."""
    answer: AnswerCheck | None = None
    """A comparison of the final answer with a column; others are left out."""
    evaluation_files: tuple[str, ...] = ()
    """Benchmarks: anything that can be a dataset (also `hf:`), or text files with a question per
    line."""
    evaluation_words: Annotated[int, Field(ge=8, le=14)] = 13
    """Consecutive words that count as an overlap with a question."""
    evaluation_text: Annotated[tuple[str, ...], BeforeValidator(split_commas)] | None = None
    """Columns of the benchmarks that hold questions; None: all."""
    evaluation_search: Annotated[
        tuple[Literal["all", "prompts", "tool_results"], ...], BeforeValidator(split_commas)
    ] = ("all",)
    """The texts in which questions are looked for; none if empty."""
    evaluation_columns: Annotated[tuple[str, ...], BeforeValidator(split_commas)] = ()
    """Columns, such as `repo`, whose value must not occur in a benchmark."""
    secrets: Literal["off", "patterns", "all"] = "off"
    """Leave out records with secrets. `patterns`: keys of known providers; `all`: also by
    detect-secrets."""
    pass_rate: tuple[Share, Share] | None = None
    """Lowest and highest share of a prompt's judged samples that passed; prompts without a judged
    sample are left out."""
    min_length: PositiveInt | None = None
    """Minimum tokens of the whole conversation, as the template of `tokenizer` renders it."""
    max_length: PositiveInt | None = None
    """Maximum tokens of the whole conversation."""
    tokenizer: Annotated[str, Field(min_length=1)] | None = None
    """The directory of the tokenizer of the model that is trained, with `tokenizer.json` and the
    chat template."""
    max_per: dict[str, PositiveInt] = {}
    """Number of conversations to keep for each value of a column or of metadata; conversations
    without a value stay."""
    balance: Annotated[str, Field(min_length=1)] | None = None
    """A column or metadata. Of each value, as many conversations are kept as of the rarest
    value."""
    first_n: PositiveInt | None = None
    """Keep the first samples of each prompt."""
    best_n: PositiveInt | None = None
    """Keep the samples of each prompt with the highest rewards."""
    exact_duplicates: bool = True
    """Leave out exact copies of earlier conversations."""
    near_duplicates: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Leave out conversations at least this similar to an earlier one (Jaccard, word triples);
    takes 1 KB of memory per row."""

    @model_validator(mode="after")
    def _bounds_fit(self) -> Filters:
        if self.pass_rate is not None and self.pass_rate[0] > self.pass_rate[1]:
            raise ValueError("pass_rate: must be [LOWEST, HIGHEST], such as [0.1, 0.9]")
        return self

    @model_validator(mode="before")
    @classmethod
    def _rename_old_keys(cls, values: Any) -> Any:
        """Read keys of earlier versions: `passed`, `max_per_toolsets`, and `judge` with null."""
        if not isinstance(values, dict):
            return values
        read = {key: value for key, value in values.items() if (key, value) != ("judge", None)}
        if (passed := read.pop("passed", None)) is not None:
            read["require_passed"] = "judged" if passed else "failed"
        if (limit := read.pop("max_per_toolsets", None)) is not None:
            read["max_per"] = {**(read.get("max_per") or {}), "toolsets": limit}
        return read
