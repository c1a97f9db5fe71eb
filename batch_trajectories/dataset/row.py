"""What a row of the dataset asks for: the first messages of its conversation, and its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import ValidationError

from agent.loop.rules import ConversationSpec, with_turn_limit
from agent.messages.message import Event, Message
from agent.models.scripted import parse_script
from agent.options import LIMITS, ROW_COLUMN, AgentOptions, of_row
from agent.state.trajectory import Trajectory
from batch_trajectories.basics.text import clip
from batch_trajectories.basics.validation import mistakes_in
from batch_trajectories.dataset.column_names import (
    AGENT_COLUMN,
    CHAT_COLUMNS,
    ERROR_COLUMN,
    FORK_COLUMN,
    IMAGE_COLUMNS,
    INSIDE_COLUMNS,
    MCP_COLUMN,
    MODEL_COLUMN,
    SETUP_COLUMNS,
    TURNS_COLUMN,
    USER_COLUMN,
)
from batch_trajectories.records.checks import EXPECTED, expected_column, expected_text

if TYPE_CHECKING:
    from agent.gateway.command_agent import CommandAgent
    from batch_trajectories.dataset.row_check import Check, CheckPlace
    from batch_trajectories.dataset.row_fork import Fork
    from batch_trajectories.dataset.row_image import RowLimits
    from batch_trajectories.dataset.row_setup import RowSetup
    from toolsets.sandbox.base import ImageSpec

ColumnUse = Literal["ignored", "allowed", "needed"]
"""Whether a run reads a column, and whether rows must have it."""

USUAL_PROMPTS = (
    "question",
    "instruction",
    "problem_statement",
    "problem",
    "text",
    "query",
    "task",
    "input",
    "goal",
    "user_prompt",
)
"""What datasets call the column with the prompt, the likeliest first."""

USUAL_BESIDE = frozenset(
    {
        "input",
        "context",
        "choices",
        "options",
        "passage",
        "document",
        "article",
        "table",
        "hint",
        "hints",
        "constraints",
        "code",
        "background",
    }
)
"""What datasets call further columns that a model is to see with the prompt."""

_ROLES = {"human": "user", "user": "user", "system": "system"}


class RowTask(NamedTuple):
    """The first messages and the options of a row's conversation."""

    opening: list[Message]
    spec: ConversationSpec
    image: ImageSpec | None
    """The container image for its commands, if the run reads this column."""
    setup: RowSetup | None
    """None if the run does not let rows set up their workspaces."""
    fork: Fork | None = None
    """What the conversation branches from; None if it begins with its prompt."""
    limits: RowLimits | None = None
    """None: as much as the run allows."""
    agent: CommandAgent | None = None
    """The command that holds the conversation; None for the loop of this program."""

    @property
    def check(self) -> Check | None:
        """How its workspace is judged; None if nothing judges it."""
        return None if self.setup is None else self.setup.check

    @property
    def is_judged_afresh(self) -> bool:
        """Its check runs in a fresh copy of the workspace."""
        return self.check is not None and self.check.where == "fresh"

    def trajectory(self, events: Sequence[Event]) -> Trajectory:
        """The conversation after `events`, which follow those of the fork."""
        before = () if self.fork is None else self.fork.events
        return Trajectory(self.opening, (*before, *events))


@dataclass(frozen=True, slots=True)
class RowRules:
    """How the rows of a run are read."""

    system_prompt: str | None = None
    """For rows without a system message of their own."""
    options: AgentOptions = field(default_factory=AgentOptions)
    script: ColumnUse = "ignored"
    is_priced: bool = True
    """The price of the model is known, so rows may have budgets in dollars."""
    toolsets: frozenset[str] | None = None
    """The toolsets of the run; None if unknown."""
    models: frozenset[str] | None = None
    """The models of the run; a row may name one of them. None if the run has a single model."""
    with_setup: bool = False
    """Rows may set up and check their workspaces."""
    image: ColumnUse = "ignored"
    """Whether rows name the container image for their commands."""
    with_forks: bool = False
    """Rows hold the beginning of their conversations."""
    inside: bool = False
    """The workspace is a directory of the row's image."""
    network: bool = False
    """Commands may reach the network."""
    check_network: bool = False
    """Checks may reach the network, if their rows ask for it."""
    check_in: CheckPlace = "same"
    """Where checks run if their row does not say."""
    variables: frozenset[str] = frozenset()
    """The variables of this machine that rows may name."""
    agent: CommandAgent | None = None
    """The command that holds the conversations; None for the loop of this program."""

    def read(self, columns: Mapping[str, Any]) -> RowTask:
        """Read a row. Raises `ValueError` with the reason if the row cannot be used."""
        options = of_row(self.options, columns)
        if options.simulated_user is not None or columns.get(USER_COLUMN) is not None:
            from batch_trajectories.dataset.row_user import with_user

            options = with_user(options, columns)
        if options.max_cost_usd is not None and not self.is_priced:
            raise ValueError("`max_cost_usd` needs a model whose price is known")
        if self.toolsets is not None and (message := options.not_on_offer(self.toolsets)):
            raise ValueError(f"`preparation_toolsets`: {message}")
        own = columns.get(MODEL_COLUMN)
        if self.models is not None and own is not None and str(own) not in self.models:
            names = ", ".join(sorted(self.models))
            shown = clip(repr(own), max_chars=200)
            raise ValueError(f"`{MODEL_COLUMN}`: {shown} is not a model of this run ({names})")
        opening = opening_messages(columns, self.system_prompt)
        if self.script != "ignored" and "script" in columns:
            parse_script(columns["script"])
        elif self.script == "needed":
            raise ValueError(
                "no `script` field; the scripted model plays it (or give --script_file)"
            )
        spec = ConversationSpec(
            options,
            expected=_expected(columns) if options.check_expected else None,
            user_replies=_replies(columns) if options.awaiting_input else (),
            user_turns=_user_turns(columns, options),
        )
        setup = self._setup(columns)
        image = self._image(columns)
        if options.state_max_turns:
            opening = with_turn_limit(opening, options)
        fork = None
        if self.with_forks:
            from batch_trajectories.dataset.row_fork import read_fork

            fork = read_fork(columns, opening)
        limits = None
        if self.inside:
            from batch_trajectories.dataset.row_image import read_limits

            limits = read_limits(columns.get("limits"))
        if self.agent is None and _servers(columns):
            raise ValueError(
                f"`{MCP_COLUMN}`: only agents that run as commands use the MCP servers of a task; "
                "give --agent=claude-code or codex, or another whose file has `mcp`"
            )
        agent = self.agent and _agent_of(self.agent, columns, opening)
        return RowTask(
            opening=opening,
            spec=spec,
            image=image,
            setup=setup,
            fork=fork,
            limits=limits,
            agent=agent,
        )

    def ignores_expected(self, columns: Mapping[str, Any]) -> bool:
        """Whether a row has the column `expected`, and its answer is not compared with it."""
        if columns.get(EXPECTED) is None:
            return False
        return not of_row(self.options, columns).check_expected

    def rollout_columns(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The columns that affect the conversation."""
        names = ["prompt" if "prompt" in columns else _chat_column(columns), ROW_COLUMN]
        if self.script != "ignored":
            names.append("script")
        options = of_row(self.options, columns)
        if options.check_expected:
            names.append(expected_column(columns))
        if options.awaiting_input:
            names.append("user_replies")
        names.append(TURNS_COLUMN)
        if options.simulated_user is not None:
            names.append(USER_COLUMN)
        if self.models is not None:
            names.append(MODEL_COLUMN)
        if self.with_setup:
            names += SETUP_COLUMNS
        if self.image != "ignored":
            from batch_trajectories.dataset.row_image import image_columns

            names += image_columns(columns)
        if self.inside:
            names += INSIDE_COLUMNS
        if self.with_forks:
            names.append(FORK_COLUMN)
        if self.agent is not None:
            names += [AGENT_COLUMN, MCP_COLUMN]
        columns = with_plain_prompt(columns)
        return {name: columns[name] for name in names if name in columns}

    def _setup(self, columns: Mapping[str, Any]) -> RowSetup | None:
        if not self.with_setup:
            return None
        from batch_trajectories.dataset.row_setup import read_row_setup

        return read_row_setup(
            columns,
            inside=self.inside,
            check_in=self.check_in,
            check_network=self.check_network,
            variables=self.variables,
        )

    def _image(self, columns: Mapping[str, Any]) -> ImageSpec | None:
        if self.image == "ignored":
            return None
        from batch_trajectories.dataset.row_image import read_image

        image = read_image(
            columns, inside=self.inside, network=self.network, variables=self.variables
        )
        if image is None and self.image == "needed":
            *names, last = (f"`{name}`" for name in IMAGE_COLUMNS)
            raise ValueError(f"no {', '.join(names)} or {last} field (or give --docker_image)")
        return image


def opening_messages(columns: Mapping[str, Any], system_prompt: str | None) -> list[Message]:
    """The first messages of a row's conversation.

    If the row has `messages` or `conversations` instead of a `prompt`, these are its system
    message and its first user message; the run generates the rest. A system message of the row
    replaces `system_prompt`. Raises `ValueError` with the reason if the row has neither text nor
    a list of chat messages that ends in a user message.
    """
    if "prompt" in columns:
        messages = _prompt_messages(columns["prompt"])
    elif any(isinstance(columns.get(name), list) for name in CHAT_COLUMNS):
        messages = _first_messages(_chat_column(columns), columns)
    else:
        if isinstance(error := columns.get(ERROR_COLUMN), str):
            raise ValueError(error)
        names = ", ".join(sorted(columns)[:8]) or "none"
        msg = f"no `prompt` field (fields: {names})"
        if usual := usual_prompt(columns):
            msg += f"; to take `{usual}` give --columns prompt={usual}"
        raise ValueError(msg)
    _check_chat(messages)
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, Message(role="system", content=system_prompt))
    return messages


def usual_prompt(columns: Mapping[str, Any]) -> str | None:
    """The column that is likely to hold the prompt, by its name; None where there is none."""
    return next((name for name in USUAL_PROMPTS if _may_be_prompt(columns.get(name))), None)


def _may_be_prompt(value: Any) -> bool:
    """Whether a value is text, or a list of chat messages."""
    if isinstance(value, str):
        return True
    return isinstance(value, list) and bool(value) and all(map(_role, value))


def columns_beside(columns: Mapping[str, Any], prompt: str) -> list[str]:
    """The columns that may belong to the prompt, too, by their names; `prompt` is its column."""
    return [
        name
        for name, value in columns.items()
        if name in USUAL_BESIDE
        and name != prompt
        and value
        and isinstance(value, str | list | dict)
    ]


def unused_turns(columns: Mapping[str, Any]) -> int | None:
    """How many user turns of a row are not sent; None if no message follows the one that is.

    The row must be one that `opening_messages` accepts.
    """
    if "prompt" in columns:
        return None
    roles = [_role(item) for item in columns[_chat_column(columns)]]
    unused = roles[roles.index("user") + 1 :]
    return unused.count("user") if unused else None


def with_plain_prompt(columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """The columns with the messages of the prompt as plain text (see `plain_message`).

    Text and a list of text parts then give the same prompt.
    """
    name = "prompt" if "prompt" in columns else _chat_column(columns)
    given = columns.get(name)
    if not isinstance(given, list):
        return columns
    messages = _plain(given, to_first_user=name != "prompt")
    return columns if messages == given else {**columns, name: messages}


def _plain(messages: list[Any], *, to_first_user: bool) -> list[Any]:
    """The messages as plain text, optionally only up to the first one of the user."""
    from agent.state.history import plain_message  # most prompts are texts

    plain = []
    for n, item in enumerate(messages):
        plain.append(plain_message(item) if isinstance(item, dict) else item)
        if to_first_user and _role(plain[-1]) == "user":
            return plain + messages[n + 1 :]
    return plain


def _role(item: Any) -> str | None:
    role = item.get("role", item.get("from")) if isinstance(item, dict) else None
    return _ROLES.get(role) if isinstance(role, str) else None


def kind_of(value: Any) -> str:
    """The type of a JSON value, for a message."""
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list():
            return "an array"
        case _:
            return "an object"


def _chat_column(columns: Mapping[str, Any]) -> str:
    return next((name for name in CHAT_COLUMNS if isinstance(columns.get(name), list)), "prompt")


def _prompt_messages(prompt: Any) -> list[Message]:
    if isinstance(prompt, str):
        return [Message(role="user", content=prompt)]
    if isinstance(prompt, list):
        plain = _plain(prompt, to_first_user=False)
        return [_chat_message(n, item) for n, item in enumerate(plain)]
    raise ValueError(f"`prompt` is {kind_of(prompt)}; it must be text or a list of chat messages")


def _first_messages(column: str, columns: Mapping[str, Any]) -> list[Message]:
    messages: list[Message] = []
    for n, item in enumerate(_plain(columns[column], to_first_user=True)):
        role = _role(item)
        item = item if isinstance(item, dict) else {}
        content = item.get("content", item.get("value"))
        if role is None or not isinstance(content, str):
            raise ValueError(
                f"{column}[{n}] must be a system or user message: no user message comes before it"
            )
        messages.append(Message(role="user" if role == "user" else "system", content=content))
        if role == "user":
            return messages
    raise ValueError(f"`{column}` has no user message")


def _chat_message(n: int, item: Any) -> Message:
    role = item.get("role") if isinstance(item, dict) else None
    content = item.get("content") if isinstance(item, dict) else None
    match role:
        case "system" | "user" | "assistant" if isinstance(content, str):
            return Message(role=role, content=content)
        case "system" | "user" | "assistant" if isinstance(content, list):
            kinds = (part.get("type") if isinstance(part, dict) else part for part in content)
            other = next((kind for kind in kinds if kind != "text"), None)
            what = f"a part of type {clip(repr(other), max_chars=50)}" if content else "no parts"
            raise ValueError(f"prompt[{n}].content must be text, or a list of text parts ({what})")
    raise ValueError(
        f"prompt[{n}] must be an object with `role` (system, developer, user or assistant) "
        "and `content` (text)"
    )


def _check_chat(messages: list[Message]) -> None:
    if any(not message["content"].strip() for message in messages):
        raise ValueError(
            "`prompt` is empty" if len(messages) == 1 else "`prompt` has an empty message"
        )
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if not turns or turns[-1] != "user":
        raise ValueError("`prompt` must end in a user message")
    expected = ["user", "assistant"] * (len(turns) // 2) + ["user"]
    if turns != expected:
        raise ValueError(
            f"the roles of `prompt` must alternate user, assistant, …, user (got {roles})"
        )


def _agent_of(
    agent: CommandAgent, columns: Mapping[str, Any], opening: Sequence[Message]
) -> CommandAgent:
    """The agent of a row, with what its column sets. Raises `ValueError`."""
    given = columns.get(ROW_COLUMN) or {}
    if other := sorted(given.keys() - set(LIMITS)):
        raise ValueError(
            f"`{ROW_COLUMN}.{other[0]}`: means nothing with an agent that runs as a command"
        )
    if not agent.continues and columns.get(TURNS_COLUMN):
        raise ValueError(f"`{TURNS_COLUMN}`: {agent.why_one_message}")
    if len(opening) > 1:
        roles = [message["role"] for message in opening]
        raise ValueError(
            f"an agent that runs as a command takes the text of one user message (got {roles})"
        )
    try:
        return agent.of_row(columns.get(AGENT_COLUMN), _servers(columns))
    except ValidationError as error:
        raise ValueError(mistakes_in(error)[0].describe(AGENT_COLUMN)) from error


def _servers(columns: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The MCP servers of a Harbor task, which the reader of tasks has checked."""
    servers = columns.get(MCP_COLUMN) or []
    if not isinstance(servers, list) or not all(
        isinstance(server, dict) and server.keys() & {"command", "url"} for server in servers
    ):
        raise ValueError(f"`{MCP_COLUMN}` must be a list of servers with `command` or `url`")
    return servers


def _replies(columns: Mapping[str, Any]) -> tuple[str, ...]:
    from batch_trajectories.dataset.row_user import read_texts

    return read_texts(columns, "user_replies")


def _user_turns(columns: Mapping[str, Any], options: AgentOptions) -> tuple[str, ...]:
    if columns.get(TURNS_COLUMN) is None:
        return ()
    from batch_trajectories.dataset.row_user import read_user_turns

    return read_user_turns(columns, options)


def _expected(columns: Mapping[str, Any]) -> str:
    expected = expected_text(columns)
    if expected is None:
        column = expected_column(columns)
        got = kind_of(columns.get(column))
        raise ValueError(f"`{column}` must be text or a number, for check_expected (got {got})")
    return expected
