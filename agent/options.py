"""The options of one conversation, each defined once with its default and help.

They are part of the config of a run. `AIAgent` takes them as keywords, and a row of the dataset can
set most of them in its column `agent_options`. All of them affect the data, so a run fixes them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from agent.messages.message import STAGES
from agent.state.final_answer import RESERVED_TOOLS
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.option_names import describe_unknown
from batch_trajectories.basics.validation import mistakes_in

MAX_COUNT = 10**9
"""Maximum of options that count something."""

Match = Literal["auto", "exact", "contains", "number", "boxed", "choice", "last_line"]
"""The ways to compare answers; `auto` depends on the expected one, see `agent.loop.answers`."""


def _refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


Int = Annotated[int, BeforeValidator(_refuse_bool)]
Float = Annotated[float, BeforeValidator(_refuse_bool)]
"""Numbers without true and false: pydantic alone would read `yes` in a YAML file as 1."""

PositiveInt = Annotated[Int, Field(gt=0, le=MAX_COUNT)]
NonNegativeInt = Annotated[Int, Field(ge=0, le=MAX_COUNT)]
PositiveFloat = Annotated[Float, Field(gt=0, allow_inf_nan=False)]
Seed = Annotated[Int, Field(ge=-(2**63), lt=2**63)]
"""Numbers whose limits make them representable in JSON and in every reader."""

ROW_COLUMN = "agent_options"
"""The column of a row with options for it."""

_NOT_PER_ROW = frozenset(
    {
        "approve",
        "subagents",
        "max_subagent_depth",
        "ephemeral_system_prompt",
        "simulated_user",  # a row has a column of that name
    }
)
"""Options that name code, other endpoints, or texts that must appear in no file."""


def parse_json(value: Any) -> Any:
    """Parse a flag's JSON text; other values do not change. A before-validator."""
    if isinstance(value, str):
        try:
            return exact_json.loads(value)
        except exact_json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error}") from error
    return value


def split_commas(value: Any) -> Any:
    """Split the names in a flag's text; other values do not change. A before-validator."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def meaning(
    default: Any,
    help: str,
    *,
    is_limit: bool = False,
    is_inherited: bool = False,
    is_rare: bool = False,
    **more: Any,
) -> Any:
    """Make the field of an option that affects the data, so that it cannot change within a run.

    `is_limit`: the option limits a conversation, also one of an agent that runs as a command.
    `is_inherited`: it applies to inner conversations, too (subagents, simulated user).
    `is_rare`: it is no flag of the command line; config files, rows and Python can set it.
    """
    marks = {"meaning": True, "limit": is_limit, "inherited": is_inherited, "rare": is_rare}
    extra: dict[str, Any] = {name: True for name, is_set in marks.items() if is_set}
    return Field(default, description=help, json_schema_extra=extra, **more)


class ChatMessage(BaseModel):
    """One message of `prefill_messages`."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    role: Literal["user", "assistant"]
    content: str = Field(min_length=1)


class Subagent(BaseModel):
    """An agent that another agent can call as a tool; it works in the same workspace."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")
    """The name of the tool."""
    description: str = Field(min_length=1)
    """The description for the calling model."""
    system_prompt: str | None = None
    model: str | None = None
    """The model, as in `--model`; without a prefix, at the caller's endpoint.

    None: the caller's model.
    """
    enabled_toolsets: tuple[str, ...] = ("none",)
    subagents: tuple[str, ...] = ()
    """The names of the subagents that this one can call."""
    max_turns: PositiveInt = 10
    script: list[Any] | None = None
    """The turns of model "scripted"."""


class SimulatedUser(BaseModel):
    """A model that plays the user, after the first message or from it on."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    model: str | None = None
    """The model, as in `--model`; without a prefix, at the agent's endpoint.

    None: the agent's model.
    """
    system_prompt: str = ""
    """A description of the user and of their goal."""
    stop: str = Field(default="###STOP###", min_length=1)
    """The text that the user writes to end the conversation."""
    max_turns: PositiveInt = 10
    """Maximum messages that the user writes."""
    writes_first: StrictBool = False
    """Whether the simulated user writes the first message, so that rows need no prompt."""
    enabled_toolsets: tuple[str, ...] = ("none",)
    """The toolsets of the user, who works in the agent's workspace.

    A row can only name toolsets that the config names.
    """
    max_calls: PositiveInt = 10
    """Maximum tool calls per message."""
    script: list[Any] | None = None
    """The turns of model "scripted"."""

    def instructions(self, *, with_tools: bool = False) -> str:
        """The system prompt, with the rules that say how to end the conversation.

        `with_tools`: also with the rules for calls of tools.
        """
        rules = _USER_RULES.format(stop=self.stop)
        if with_tools:
            rules += f"\n\n{_TOOL_RULES.format(max_calls=self.max_calls)}"
        return f"{self.system_prompt}\n\n{rules}"


_USER_RULES = (
    "You are this user, in a chat with an assistant. Write only the user's next message, short and "
    "in their own words; do not give away everything at once, and do not invent facts. When what "
    "you want has been done, or cannot be done, write {stop} and nothing else."
)

_TOOL_RULES = (
    "Your tools are what this user can do and look up without the assistant, such as on their own "
    "device. Call them before you write the message: if the assistant asks you to do or to check "
    "something, do it, and then say in the user's words what came of it. Report only what your "
    "tools returned. The assistant sees neither your calls nor their results. Make at most "
    "{max_calls} calls before each message."
)


class AgentOptions(BaseModel):
    """The options of a conversation."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    max_turns: PositiveInt = meaning(20, "Maximum model replies.", is_limit=True)
    max_errors: NonNegativeInt = meaning(
        5, "End a conversation after N failed tool calls. 0: no limit.", is_inherited=True
    )
    repeat_limit: NonNegativeInt = meaning(
        3,
        "End a conversation after N equal calls in a row with equal results. 0: no limit.",
        is_limit=True,
        is_inherited=True,
    )
    max_reasks: NonNegativeInt = meaning(
        2, "How many unusable replies in a row are requested again.", is_inherited=True
    )
    max_cost_usd: PositiveFloat | None = meaning(
        None, "Budget of a conversation in dollars.", is_limit=True, is_inherited=True
    )
    max_total_tokens: PositiveInt | None = meaning(
        None,
        "Budget of a conversation in tokens, input and output together.",
        is_limit=True,
        is_inherited=True,
    )
    max_conversation_s: PositiveFloat | None = meaning(
        None,
        "Time limit of a conversation, for its model and tool calls.",
        is_limit=True,
        is_inherited=True,
    )
    parallel_tools: bool = meaning(
        True,
        "Run the calls of a reply at the same time if their tools allow it.",
        is_inherited=True,
    )
    bad_arguments: Literal["feedback", "resample"] = meaning(
        "feedback",
        "Arguments that are no JSON object. feedback: tell the model; resample: request the reply "
        "again.",
        is_inherited=True,
    )
    repair_tool_names: bool = meaning(
        False,
        "Correct a misspelt tool name if exactly one tool has a similar name.",
        is_inherited=True,
    )
    continue_cut: NonNegativeInt = meaning(
        0, "Continue a text that the token limit cut, up to N times."
    )
    final_summary: bool = meaning(
        False,
        "At the turn limit, ask once more for an answer without tools.",
    )
    completion_tools: bool = meaning(
        False, "Offer final_answer and cannot_complete, which end the conversation."
    )
    check_expected: bool = meaning(
        False,
        "Compare answers with the row's column `expected`.",
    )
    expected_match: Match = meaning(
        "auto",
        "How to compare. auto: as a number, a letter, a formula or a text, as `expected` is; else "
        "one way for all rows (docs/conversations.md).",
    )
    expected_attempts: PositiveInt = meaning(
        1,
        "Answers that a conversation may give. After a wrong one, the model may try again.",
    )
    awaiting_input: bool = meaning(
        False,
        "Answer tools that ask the user with the row's `user_replies`.",
    )
    simulated_user: Annotated[SimulatedUser | None, BeforeValidator(parse_json)] = meaning(
        None, "A model that plays the user after each answer."
    )
    result_references: bool = meaning(
        False, "Name tool results, so that arguments can use them as $$NAME.", is_rare=True
    )
    observation_chars: PositiveInt | None = meaning(
        None, "Maximum characters of a tool result that the model sees.", is_inherited=True
    )
    state_max_turns: bool = meaning(False, "State the turn limit in the system prompt.")
    text_protocol: Literal["react"] | None = meaning(
        None,
        "For models without tool calling: read calls from Thought/Action lines.",
        is_inherited=True,
    )
    plan: bool = meaning(False, "Have the model write a plan first, then work through its steps.")
    preparation: str | None = meaning(
        None,
        "Task of a conversation that first gathers context.",
    )
    preparation_toolsets: Annotated[tuple[str, ...] | None, BeforeValidator(split_commas)] = (
        meaning(None, "Toolsets of the preparation. Default: all on offer.")
    )
    ephemeral_system_prompt: str | None = meaning(
        None, "System prompt that the model sees, but that is in no file."
    )
    prefill_messages: Annotated[tuple[ChatMessage, ...], BeforeValidator(parse_json)] = meaning(
        (),
        "Messages (JSON, or a file of it) that the model sees after the system prompt. They are "
        "not recorded.",
    )
    compact_after: NonNegativeInt = meaning(
        0,
        "After N replies with text, show older reasoning and arguments shortened. 0: never.",
        is_rare=True,
    )
    summarize_over_tokens: PositiveInt | None = meaning(
        None, "Show older messages as a summary if there are more tokens (characters / 4)."
    )
    summarize_over_messages: PositiveInt | None = meaning(
        None,
        "Show older messages as a summary if there are more messages.",
    )
    summarize_keep: PositiveInt = meaning(
        8, "How many of the latest messages are never summarized."
    )
    approve: str | None = meaning(
        None,
        "MODULE:FUNCTION that approves or denies each tool call.",
        pattern=r"^.+:[\w.]+$",
    )
    subagents: Annotated[tuple[Subagent, ...], BeforeValidator(parse_json)] = meaning(
        (), "Agents that the model can call as tools."
    )
    max_subagent_depth: PositiveInt | None = meaning(
        None, "Maximum nesting of subagents. Required if one can reach itself.", is_inherited=True
    )

    def given(self) -> dict[str, Any]:
        """The options that are not defaults, JSON-ready, without texts that no file may contain.

        Subagents are given by name: the config of the run has the rest.
        """
        given = self.model_dump(mode="json", exclude_defaults=True)
        if "ephemeral_system_prompt" in given:
            given["ephemeral_system_prompt"] = True
        if "prefill_messages" in given:
            given["prefill_messages"] = len(self.prefill_messages)
        if self.simulated_user is not None:
            given["simulated_user"].pop("script", None)
        if "subagents" in given:
            given["subagents"] = [subagent.name for subagent in self.subagents]
        return given

    def describe_missing_toolsets(self, toolsets: Collection[str]) -> str | None:
        """Describe toolsets of `preparation_toolsets` that are not enabled; None if all are."""
        unknown = sorted(set(self.preparation_toolsets or ()) - set(toolsets))
        if not unknown:
            return None
        known = ", ".join(sorted(toolsets)) or "none"
        return f"{', '.join(unknown)} not on offer; there are: {known}"

    @model_validator(mode="after")
    def _check_combinations(self) -> AgentOptions:
        if self.repeat_limit == 1:
            raise ValueError(
                "repeat_limit: 1 would end every conversation at its first call; 0 means no limit"
            )
        if self.continue_cut and (self.plan or self.text_protocol):
            raise ValueError("continue_cut does not go together with plan or text_protocol")
        if self.simulated_user is not None and (self.completion_tools or self.text_protocol):
            raise ValueError(
                "simulated_user does not go together with completion_tools or text_protocol"
            )
        if self.preparation and self.simulated_user and self.simulated_user.writes_first:
            raise ValueError(
                "simulated_user.writes_first does not go together with preparation, which reads "
                "the prompt before the conversation begins"
            )
        return self

    @model_validator(mode="after")
    def _check_subagents(self) -> AgentOptions:
        names = [subagent.name for subagent in self.subagents]
        for name in names:
            if name in RESERVED_TOOLS or name in STAGES:
                raise ValueError(f"subagent {name!r}: the name is reserved")
            if names.count(name) > 1:
                raise ValueError(f"two subagents are called {name!r}")
        for subagent in self.subagents:
            if unknown := set(subagent.subagents) - set(names):
                raise ValueError(
                    f"subagent {subagent.name!r} calls unknown subagents: "
                    f"{', '.join(sorted(unknown))} (known: {', '.join(sorted(names))})"
                )
        if self.max_subagent_depth is None and (recursive := _find_recursive(self.subagents)):
            raise ValueError(
                f"subagent {recursive!r} can reach itself without a limit; set max_subagent_depth"
            )
        return self


def is_marked(field: FieldInfo, mark: str) -> bool:
    """Whether a field has a mark of `meaning`."""
    return isinstance(field.json_schema_extra, dict) and mark in field.json_schema_extra


def _marked_names(mark: str) -> tuple[str, ...]:
    fields = AgentOptions.model_fields.items()
    return tuple(name for name, field in fields if is_marked(field, mark))


LIMITS = _marked_names("limit")
"""The options that limit a conversation; agents that run as commands have no others."""

_INHERITED = _marked_names("inherited")


def inherit_options(caller: AgentOptions, *, max_turns: int) -> AgentOptions:
    """The options of an inner conversation: the caller's, with a turn limit of its own."""
    return AgentOptions(max_turns=max_turns, **{name: getattr(caller, name) for name in _INHERITED})


def _find_recursive(subagents: Sequence[Subagent]) -> str | None:
    """Find a subagent that can call itself, directly or through others; None if none can."""
    calls = {subagent.name: set(subagent.subagents) for subagent in subagents}
    for name in calls:
        reached: set[str] = set()
        pending = list(calls[name])
        while pending:
            other = pending.pop()
            if other not in reached:
                reached.add(other)
                pending.extend(calls[other])
        if name in reached:
            return name
    return None


def row_options(options: AgentOptions, columns: Mapping[str, Any]) -> AgentOptions:
    """The options of one row: the run's options, changed by the row's column `agent_options`.

    Raises `ValueError` naming the wrong key, and the allowed ones if it is unknown.
    """
    own = columns.get(ROW_COLUMN)
    if own is None:
        return options
    if not isinstance(own, dict):
        msg = f"`{ROW_COLUMN}` must be an object of options"
        raise ValueError(msg)
    allowed = sorted(set(AgentOptions.model_fields) - _NOT_PER_ROW)
    for key in own:
        if key not in allowed:
            if key in _NOT_PER_ROW:
                raise ValueError(f"`{ROW_COLUMN}.{key}`: cannot be set per row")
            reason = describe_unknown(key, allowed, "docs/conversations.md lists the options")
            raise ValueError(f"`{ROW_COLUMN}.{key}`: {reason}")
    fields = {name: getattr(options, name) for name in AgentOptions.model_fields}
    try:
        return AgentOptions.model_validate({**fields, **own})
    except ValidationError as error:
        first = mistakes_in(error)[0]
        # Only values of the row are quoted, since some options of the run must appear in no file.
        if not first.keys or first.keys[0] not in own:
            raise ValueError(f"`{ROW_COLUMN}`: {first.reason}") from None
        raise ValueError(f"`{ROW_COLUMN}.{first.key}`: {first.with_value()}") from None
