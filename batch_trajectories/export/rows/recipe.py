"""The recipe of an export: formats, style, filters and splits.

A recipe is read from YAML, flags override it, and the manifest of the export repeats it. Filters
only leave records out of one export; another export can use other filters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from agent.options import MAX_COUNT, PositiveFloat, PositiveInt, Seed, split_commas
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.basics.validation import (
    UNKNOWN_KEY,
    Mistake,
    did_you_mean,
    mistakes_in,
    resolve_beside,
    resolve_function,
)
from batch_trajectories.config.loading import locate_key, read_mapping
from batch_trajectories.config.option_types import AcceptedRows
from batch_trajectories.export.conversation.style import (
    REASONING_KEY,
    Arguments,
    CallStyle,
    CallText,
    EmptyThink,
    ReasoningKey,
    ReasoningStyle,
    Style,
    SystemStyle,
    ToolsForm,
)
from batch_trajectories.export.conversation.tolerance import (
    NON_OBJECT_ARGUMENTS,
    Tolerance,
    parse_reasons,
)
from batch_trajectories.export.masking import DEFAULT_MASK, NOT_PASSED, Mask
from batch_trajectories.export.rows.filter_options import (
    AnswerCheck,
    Filters,
    Number,
    RecipePart,
)
from batch_trajectories.export.rows.format import Copies, Format, RowFormat, load_format, load_kind
from batch_trajectories.export.rows.format_names import OTHER_NAMES, format_names
from batch_trajectories.export.templates.fitting import Fit, Fitting
from batch_trajectories.records.checks import THRESHOLD

if TYPE_CHECKING:
    from batch_trajectories.export.masking import Masks


_TOKEN_FORMATS = frozenset(("rl", "rl_parquet"))
"""The formats whose rows are token ids."""

_MAX_TOP = 1_000
"""Maximum number of most likely tokens of a teacher."""


# Paths in the file of a recipe, which are relative to it.


def resolve_paths(loaded: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Resolve the paths of a recipe's file, which are relative to its `directory`.

    Functions and templates are looked for in the directory first, then in modules and packages.
    """
    made = dict(loaded)
    if isinstance(filters := loaded.get("filters"), dict):
        made["filters"] = _resolve_filter_paths(filters, directory)
    if isinstance(mask := loaded.get("mask"), dict) and "function" in mask:
        made["mask"] = {**mask, "function": resolve_function(mask["function"], directory)}
    if isinstance(fit := loaded.get("fit"), dict) and isinstance(fit.get("template"), str):
        made["fit"] = {**fit, "template": resolve_beside(fit["template"], directory)}
    return made


def _resolve_filter_paths(filters: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    made = dict(filters)
    if isinstance(tokenizer := filters.get("tokenizer"), str):
        made["tokenizer"] = str(directory / tokenizer)
    if isinstance(files := filters.get("evaluation_files"), list):
        made["evaluation_files"] = [
            str(file) if str(file).startswith("hf:") else str(directory / str(file))
            for file in files
        ]
    if isinstance(answer := filters.get("answer"), dict) and "function" in answer:
        made["answer"] = {**answer, "function": resolve_function(answer["function"], directory)}
    return made


def _format_name(name: str) -> str:
    name = OTHER_NAMES.get(name, name)
    if name not in format_names():
        raise ValueError("unknown format")
    return name


FormatName = Annotated[str, AfterValidator(_format_name)]


def _takes_all(name: object) -> bool:
    """Whether `name` is a format of all conversations, failed ones included."""
    return name in format_names() and load_kind(str(name)).takes_all


def _has_segments(one: Format | Copies) -> bool:
    return isinstance(one, Copies) or (isinstance(one, RowFormat) and one.has_segments)


Order = Literal["pass_rate", "-pass_rate", "length", "-length", "random"]

Megabytes = Annotated[float, Field(gt=0, le=MAX_COUNT)]


def parse_splits(value: object) -> object:
    """Read `train=0.9,test=0.1` as a mapping; any value but text is returned as it is."""
    if not isinstance(value, str):
        return value
    pairs = [part.partition("=") for part in value.split(",") if part.strip()]
    if not pairs or not all(sign for _, sign, _ in pairs):
        raise ValueError("must be NAME=SHARE,... such as train=0.9,test=0.1")
    shares: dict[str, str] = {}
    for name, _, share in pairs:
        if name.strip() in shares:
            raise ValueError(f"{name.strip()!r} is given twice")
        shares[name.strip()] = share.strip()
    return shares


class Preference(RecipePart):
    """Options that turn rewards into preferences."""

    min_margin: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """dpo: the rewards of a pair must differ by more than this."""
    by: Literal["reward", "label"] = "reward"
    """`label`: the labels of reviewers decide. dpo then has a row for each two samples of which one
    is preferred to the other; kto takes `keep` as good and `reject` as bad."""
    threshold: Number = THRESHOLD
    """kto and filters: rewards of at least this pass, unless a check judged the conversation."""


class Card(RecipePart):
    """Facts for the dataset card that only the user knows."""

    title: str | None = None
    """The title of the card; None: the name of the model."""
    license: str = "other"
    """The license of the dataset, named as on the hub."""
    language: str | None = None
    """The language of the prompts, as a code such as `en`."""
    prompt_source: str | None = None
    """The origin of the prompts, in words."""


class RunShare(RecipePart):
    """The share of one run in a mix, and facts on the run that only the user knows."""

    weight: PositiveFloat | None = None
    """The run's proportion of the conversations, relative to the weights of the other runs."""
    count: PositiveInt | None = None
    """The number of conversations to take from the run; all if it has fewer."""
    license: str | None = None
    """The license of this run's conversations; None: the card says that it is not stated."""
    prompt_source: str | None = None
    """The origin of this run's prompts, in words."""

    @model_validator(mode="after")
    def _has_one_amount(self) -> RunShare:
        if self.weight is not None and self.count is not None:
            raise ValueError("weight and count exclude each other; give one")
        return self


class Recipe(BaseModel):
    """The choices of one export."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    formats: Annotated[tuple[FormatName, ...], BeforeValidator(split_commas), Field(min_length=1)]
    """Formats of rows; docs/export.md says what each is for."""
    reasoning: ReasoningStyle | None = None
    """The place of reasoning: `inline` in the text, `field` in a key of its own, `last` only in
    the last turn, `none` nowhere. `since_user` is for rows of segments: reasoning after the last
    message of the user. None: the way of each format."""
    reasoning_key: ReasoningKey = REASONING_KEY
    """The key of reasoning in messages of openai, as the template reads it."""
    parallel_calls: CallStyle = "keep"
    """Whether a turn with several calls is kept, or split into one turn per call."""
    system: SystemStyle | None = None
    """Whether rows hold the system prompt that the model saw; None: the way of each format."""
    empty_think: EmptyThink = "keep"
    """Whether turns without reasoning begin with an empty think block in `hermes`; `text`: also in
    formats with messages."""
    call_text: CallText = "keep"
    """Whether text beside calls joins the reasoning in messages."""
    arguments: Arguments = "objects"
    """Whether messages hold the arguments of calls as objects, or as text."""
    max_tool_chars: PositiveInt | None = None
    """Maximum characters of a tool result; the middle of longer results is cut out."""
    tools: ToolsForm | None = None
    """Whether rows with messages hold their tools as JSON text or as a list; None: a list in `hf`,
    text elsewhere."""
    per_turn: bool = False
    """One row per turn of the model, each with its context, instead of one per conversation."""
    segments: bool = False
    """One row per view that the model had, if earlier messages were shortened or summarized."""
    subagents: bool = False
    """rl: rows for the conversations of subagents, too."""
    discarded: bool = False
    """rl: a row for each reply after which the model was asked again, too."""
    teacher: Annotated[str, Field(min_length=1)] | None = None
    """rl: columns with the log-probabilities that this model gave by `score --teacher`."""
    teacher_top: Annotated[int, Field(ge=0, le=_MAX_TOP)] = 0
    """rl: columns with so many most likely tokens at each place, too."""
    fit: Fit | None = None
    """openai: fit rows to a chat template and a maximum length."""
    mask: Mask | None = None
    """Which turns carry no loss; formats that cannot mark such turns are refused."""
    include: Annotated[tuple[Literal["not_passed"], ...], BeforeValidator(split_commas)] = ()
    """Conversations to add as masked rows: `not_passed` did not pass, or ended early."""
    accept_rows: AcceptedRows = ()
    """Flaws with which rows are kept, named as in rejects.jsonl."""
    splits: Annotated[dict[str, PositiveFloat], BeforeValidator(parse_splits)] = {"train": 1.0}
    """Splits with their shares, which sum to 1; all samples of a prompt go to one split."""
    split_seed: Seed = 0
    """The seed that draws the split of each prompt."""
    split_by: Annotated[tuple[str, ...], BeforeValidator(split_commas)] = ()
    """Columns or metadata of which no value may be in two splits; prompts never are."""
    seed: Seed = 0
    """The seed for choosing by `max_per`, `balance` and `runs`, and for the order `random`."""
    sort: Order | None = None
    """The order of rows: easiest prompts first, shortest conversations first, or random; `-`
    reverses the order. None: the order of the dataset, one run after the other."""
    runs: dict[str, RunShare] = {}
    """Shares of runs, by the name of the run; runs that are not named are taken completely."""
    shard_mb: Megabytes | None = None
    """Megabytes per file; None: one file per split."""
    reward_name: Annotated[str, Field(min_length=1)] | None = None
    """The reward that filters, `best_n`, dpo and kto use; None: `reward`, else the first."""
    filters: Filters = Filters()
    """Conditions that a conversation must meet to be in this export."""
    preference: Preference = Preference()
    """Options that turn rewards into preferences."""
    card: Card = Card()
    """Facts for the dataset card that only the user knows."""

    @model_validator(mode="before")
    @classmethod
    def _apply_common_defaults(cls, values: Any) -> Any:
        """Let formats of all conversations leave none out, unless the recipe has filters."""
        formats = values.get("formats") if isinstance(values, dict) else None
        filters = values.get("filters", {}) if isinstance(values, dict) else None
        chosen = split_commas(formats)
        if not isinstance(chosen, list | tuple) or not isinstance(filters, dict):
            return values
        if not chosen or not all(map(_takes_all, chosen)):
            return values
        return {**values, "filters": {"status": ["any"], "exact_duplicates": False, **filters}}

    @model_validator(mode="before")
    @classmethod
    def _masks_failures(cls, values: Any) -> Any:
        """Set the default mask if failures are included and the recipe has no mask."""
        if isinstance(values, dict) and values.get("include") and values.get("mask") is None:
            return {**values, "mask": DEFAULT_MASK}
        return values

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        self._check_splits()
        self._check_reasoning()
        self._check_cuts()
        if self.reasoning == "since_user" and not self.segments:
            raise ValueError("reasoning: since_user is for rows of segments; add --segments")
        if self.reasoning_key != REASONING_KEY and self.copies:
            raise ValueError(
                f"reasoning_key: the columns of {self.copies[0].name} are fixed; leave it out"
            )
        if not _TOKEN_FORMATS.intersection(self.formats):
            for option in ("subagents", "discarded"):
                if getattr(self, option):
                    raise ValueError(f"{option}: only rl has rows for them; add it to formats")
            if self.teacher is not None:
                raise ValueError("teacher: only rl has columns for it; add it to formats")
        if self.teacher_top and self.teacher is None:
            raise ValueError("teacher_top: add teacher, the name of the model")
        if self.filters.first_n and self.filters.best_n:
            raise ValueError("filters: first_n and best_n both choose samples; give one")
        if self.mask is not None:
            self._check_mask()
        if self.fit is not None:
            for one in self.row_formats:
                if one.shows_messages and one.name != "openai":
                    raise ValueError(f"fit: only rows of openai are fitted, not {one.name}")
        return self

    def _check_splits(self) -> None:
        if not math.isclose(sum(self.splits.values()), 1.0, abs_tol=1e-9):
            raise ValueError(f"splits: shares must sum to 1 (got {sum(self.splits.values()):g})")
        if bad := [name for name in self.splits if not name.isidentifier()]:
            raise ValueError(f"splits: {bad[0]!r}: a name is letters, digits and '_'")

    def _check_reasoning(self) -> None:
        for one in self._chosen_kinds:
            if isinstance(one, RowFormat):
                if self.reasoning == "field" and "field" not in one.reasoning:
                    raise ValueError(f"reasoning: {one.name} has no field for it, only inline")
                if self.reasoning == "inline" and "inline" not in one.reasoning:
                    raise ValueError(
                        f"reasoning: {one.name} has a field for it, so it is never inline"
                    )

    def _check_cuts(self) -> None:
        """Raise ValueError if a format has no rows for single turns or segments."""
        if self.per_turn and (whole := [x.name for x in self._chosen_kinds if not x.has_turns]):
            possible = [name for name in format_names() if load_kind(name).has_turns]
            raise ValueError(
                f"per_turn: {min(whole)} has no rows for single turns; "
                f"choose formats among {', '.join(possible)}"
            )
        if self.segments and (bad := [x.name for x in self._chosen_kinds if not _has_segments(x)]):
            possible = [name for name in format_names() if _has_segments(load_kind(name))]
            raise ValueError(
                f"segments: {min(bad)} has no rows for segments; "
                f"choose formats among {', '.join(possible)}"
            )

    def _check_mask(self) -> None:
        for one in self.row_formats:
            is_by_turn = self.segments or (self.per_turn and one.has_turns)
            if one.shows_messages and not one.marks_loss and not is_by_turn:
                how = "add per_turn" if one.has_turns else "choose openai, or another with marks"
                raise ValueError(f"mask: {one.name} cannot say which turns carry no loss; {how}")
        if self.include and self.filters.require_passed not in (False, "failed"):
            raise ValueError("include: not_passed and filters.require_passed exclude each other")

    @property
    def record_filters(self) -> Filters:
        """The filters, with the endings that `include` adds."""
        if NOT_PASSED in self.include and self.filters.status is None:
            return self.filters.model_copy(update={"status": ("any",)})
        return self.filters

    def open_masks(self) -> Masks | None:
        """Make the object that masks turns; None without a mask. Raises `ConfigError`."""
        if self.mask is None:
            return None
        from batch_trajectories.export.masking import Masks

        return Masks(self.mask, threshold=self.preference.threshold, reward_name=self.reward_name)

    def open_fit(self, format: str) -> Fitting | None:
        """Make the object that fits rows of a format; None if rows are not fitted.

        Raises `ConfigError`.
        """
        if self.fit is None or format != "openai":
            return None
        from batch_trajectories.export.templates.fitting import Fitting

        return Fitting(self.fit, self.reasoning_key)

    @property
    def style(self) -> Style:
        """The options for rendering conversations."""
        flaws: list[str] = [*self.accept_rows]
        # These options already limit or mask such calls, so rows that contain them are accepted.
        if self.filters.max_interrupted_calls or (self.mask and self.mask.interrupted_result):
            flaws.append("interrupted")
        if self.mask and self.mask.leak_suspected:
            flaws.append("leak_suspected")
        if self.mask and self.mask.bad_arguments:
            flaws += NON_OBJECT_ARGUMENTS
        return Style(
            reasoning=self.reasoning,
            parallel_calls=self.parallel_calls,
            system=self.system,
            empty_think=self.empty_think,
            max_tool_chars=self.max_tool_chars,
            tools=self.tools,
            reward_name=self.reward_name,
            tolerance=Tolerance(parse_reasons(flaws), self.filters.control_tokens),
            reasoning_key=self.reasoning_key,
            call_text=self.call_text,
            arguments=self.arguments,
        )

    @property
    def _chosen_kinds(self) -> list[Format | Copies]:
        return [load_kind(name) for name in dict.fromkeys(self.formats)]

    @property
    def copies(self) -> list[Copies]:
        """The kinds of files to which rows are copied, Parquet first."""
        copies = [one for one in self._chosen_kinds if isinstance(one, Copies)]
        return sorted(copies, key=lambda one: one.name, reverse=True)

    @property
    def row_formats(self) -> list[Format]:
        """The formats without copies; `openai` if only copies are asked for."""
        formats = self._chosen_kinds
        if not self.writes_lines:
            openai = load_format("openai")
            formats = [openai if isinstance(one, Copies) else one for one in formats]
        return [one for one in dict.fromkeys(formats) if isinstance(one, Format)]

    @property
    def writes_lines(self) -> bool:
        """Whether the recipe names a format that can be copied, not only copies."""
        return any(isinstance(one, Format) and one.columns for one in self._chosen_kinds)

    @property
    def copies_list_tools(self) -> bool:
        """Whether tools are a list in copies that can hold a list."""
        return self.tools != "text"

    @property
    def tolerances(self) -> list[Tolerance]:
        """The tolerance of each format with messages."""
        style = self.style
        return [one.limit(style).tolerance for one in self.row_formats if one.shows_messages]

    @property
    def needs_conversations(self) -> bool:
        """Whether any format shows messages."""
        return any(one.shows_messages for one in self.row_formats)

    @property
    def needs_groups(self) -> bool:
        """Whether the samples of a prompt must be read together."""
        chosen = self.filters.first_n or self.filters.best_n
        return bool(chosen) or self.per_turn or self.needs_rates or self.keeps_prompts

    @property
    def keeps_prompts(self) -> bool:
        """Whether a format makes a row from all samples of a prompt."""
        return any(one.by_prompt for one in self.row_formats)

    @property
    def needs_rates(self) -> bool:
        """Whether a filter or the order needs the pass rates of prompts."""
        return self.filters.pass_rate is not None or (self.sort or "").endswith("pass_rate")

    @property
    def chooses_among_all(self) -> bool:
        """Whether the choice of a conversation depends on all other conversations."""
        filters = self.filters
        by_values = filters.max_per or filters.balance
        return bool(by_values or self.runs or self.sort or self.split_by)

    @property
    def makes_comparisons(self) -> bool:
        """Whether any format is for preferences."""
        return any(one.compares_samples for one in self.row_formats)


def load_recipe(
    path: Path | None, flags: Mapping[str, Any], filters: Mapping[str, Any] | None = None
) -> Recipe:
    """Read a recipe from a file; `flags` override its keys, `filters` those of its filters.

    Paths in the file are relative to it. Raises `ConfigError`, which names file and key.
    """
    values = {} if path is None else resolve_paths(read_mapping(path, "recipe"), path.parent)
    values = {"formats": ("hermes",), **values, **flags}
    if filters and isinstance(given := values.get("filters", {}), dict):
        values["filters"] = {**given, **filters}
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        lines = [_explain(mistake, path, flags) for mistake in mistakes_in(error)]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from error


_SECTIONS: Mapping[str, type[BaseModel]] = {
    "filters": Filters,
    "answer": AnswerCheck,
    "mask": Mask,
    "preference": Preference,
    "card": Card,
    "runs": RunShare,
}


def _explain(mistake: Mistake, path: Path | None, flags: Mapping[str, Any]) -> str:
    if not mistake.keys:
        return f"{path}: {mistake.reason}" if path is not None else mistake.reason
    key, *inside = mistake.keys
    flag = f"--{'format' if key == 'formats' else key}"
    place = flag
    if key not in flags:
        place = mistake.key if path is None else f"{locate_key(path, mistake.keys)}: {mistake.key}"
    if key == "formats":
        hint = did_you_mean(str(mistake.value), format_names())
        known = f"known are {', '.join(format_names())}"
        return f"{place}: unknown format {mistake.value!r}; {f'{hint} {known}' if hint else known}"
    if mistake.keys == ("filters", "judge"):
        return (
            f"{place}: this key is gone; write `min_rewards: {{judge: 1}}` in its place, and run "
            f"`score RUN --judge=MODEL --recipe={path}` before the export; see docs/rewards.md"
        )
    if mistake.kind == UNKNOWN_KEY:
        part: type[BaseModel] = Recipe
        if inside:
            name = inside[-2] if len(inside) > 1 and key != "runs" else key
            part = _SECTIONS.get(name, Recipe)
        known = f"known are {', '.join(part.model_fields)}"
        hint = did_you_mean(mistake.keys[-1], part.model_fields)
        return f"{place}: unknown key; {f'{hint} {known}' if hint else known}"
    return f"{place}: {mistake.with_value()}"
