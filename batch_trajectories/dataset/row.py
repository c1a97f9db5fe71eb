"""Reads a row of the dataset: its conversation, its options, its workspace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
from pydantic import ValidationError

from agent.loop.rules import ConversationSpec, add_turn_limit
from agent.messages.message import Event, Message
from agent.models.scripted import parse_script
from agent.options import LIMITS, ROW_COLUMN, AgentOptions, row_options
from agent.state.trajectory import Trajectory
from batch_trajectories.basics.text import clip
from batch_trajectories.basics.validation import mistakes_in
from batch_trajectories.dataset.row_conversation import (
    FORK_COLUMN,
    REPLIES_COLUMN,
    TURNS_COLUMN,
    USER_COLUMN,
    add_row_user,
    chat_column,
    flatten_prompt,
    messages_before_user,
    opening_messages,
    read_expected,
    read_texts,
    read_user_turns,
    user_writes_first,
)
from batch_trajectories.records.checks import EXPECTED, expected_column

if TYPE_CHECKING:
    from agent.gateway.command_agent import CommandAgent
    from batch_trajectories.dataset.columns import RowLimits
    from batch_trajectories.dataset.row_fork import Fork
    from batch_trajectories.dataset.row_workspace import Check, CheckPlace, InsideColumns, RowSetup
    from toolsets.sandbox.base import ImageSpec

MODEL_COLUMN = "model"
"""The column with the model of the row's conversation, one of the models of the run."""

AGENT_COLUMN = "agent"
"""The column with settings of the row for the command that holds its conversation."""

MCP_COLUMN = "mcp_servers"
"""The column with MCP servers of a Harbor task, for agents that run as commands."""

ColumnUse = Literal["ignored", "allowed", "needed"]
"""Whether a run reads a column, and whether rows must have it."""


class RowTask(NamedTuple):
    """The first messages and the options of a row's conversation."""

    opening: list[Message]
    """The last one is the user's, unless a simulated user writes it."""
    spec: ConversationSpec
    image: ImageSpec | None
    """The container image for the commands of the row, if the run reads this column."""
    setup: RowSetup | None
    """The set-up of the workspace; None if the run does not let rows set it up."""
    fork: Fork | None = None
    """The conversation that this one branches from; None if it begins with its prompt."""
    limits: RowLimits | None = None
    """Limits of the row; None: as much as the run allows."""
    agent: CommandAgent | None = None
    """The command that holds the conversation; None for the loop of this program."""

    @property
    def check(self) -> Check | None:
        """The check of the workspace; None if nothing judges it."""
        return None if self.setup is None else self.setup.check

    @property
    def is_judged_afresh(self) -> bool:
        """Whether the check runs in a fresh copy of the workspace."""
        return self.check is not None and self.check.where == "fresh"

    def trajectory(self, events: Sequence[Event]) -> Trajectory:
        """The conversation after `events`, which follow those of the fork."""
        before = () if self.fork is None else self.fork.events
        return Trajectory(self.opening, (*before, *events))


class RowRules(msgspec.Struct, frozen=True):
    """The rules by which the rows of a run are read."""

    system_prompt: str | None = None
    """The system prompt of rows without one of their own; None: no prompt."""
    options: AgentOptions = msgspec.field(default_factory=AgentOptions)
    script: ColumnUse = "ignored"
    is_priced: bool = True
    """Whether the price of the model is known, so rows may have budgets in dollars."""
    toolsets: frozenset[str] | None = None
    """The toolsets of the run; None if unknown."""
    user_toolsets: frozenset[str] | None = None
    """The toolsets that the run has for simulated users; None if unknown."""
    models: frozenset[str] | None = None
    """The models of the run; a row may name one of them. None if the run has a single model."""
    with_setup: bool = False
    """Whether rows may set up and check their workspaces."""
    image: ColumnUse = "ignored"
    """Whether rows name the container image for their commands."""
    with_forks: bool = False
    """Whether rows hold the beginning of their conversations."""
    inside: bool = False
    """Whether the workspace is a directory of the row's image."""
    network: bool = False
    """Whether commands may reach the network."""
    check_network: bool = False
    """Whether checks may reach the network, if their rows ask for it."""
    check_in: CheckPlace = "same"
    """The place where checks run if their row does not name one."""
    variables: frozenset[str] = frozenset()
    """The variables of this machine that rows may name."""
    agent: CommandAgent | None = None
    """The command that holds the conversations; None for the loop of this program."""
    is_audit: bool = False
    """Whether tasks are only judged: simulated users have no part then, and need no model."""

    def read(self, columns: Mapping[str, Any]) -> RowTask:
        """Read a row. Raises `ValueError` with the reason if the row cannot be used."""
        # First, since a row that a rows file could not make has only the reason.
        by_user = user_writes_first(columns, self.options)
        if self.is_audit and "prompt" in columns:
            by_user = False  # a conversation that is judged again stands under any prompt
        opening = (messages_before_user if by_user else opening_messages)(
            columns, self.system_prompt
        )
        options = self._read_options(columns)
        self._check_model(columns)
        self._check_script(columns)
        spec = ConversationSpec(
            options,
            expected=read_expected(columns, options.expected_match)
            if options.check_expected
            else None,
            user_replies=read_texts(columns, REPLIES_COLUMN) if options.awaiting_input else (),
            user_turns=read_user_turns(columns, options),
        )
        inside = self._read_inside(columns) if self.inside else None
        setup = self._read_setup(columns, inside) if self.with_setup else None
        image = None if self.image == "ignored" else self._read_image(columns, inside)
        if options.state_max_turns:
            opening = add_turn_limit(opening, options)
        fork = None
        if self.with_forks:
            from batch_trajectories.dataset.row_fork import read_fork

            fork = read_fork(columns, opening)
        if self.agent is None and _servers(columns):
            raise ValueError(
                f"`{MCP_COLUMN}`: only agents that run as commands use the MCP servers of a task; "
                "give --agent=claude-code or codex, or another whose file has `mcp`"
            )
        agent = self.agent and _row_agent(self.agent, columns, opening)
        return RowTask(
            opening=opening,
            spec=spec,
            image=image,
            setup=setup,
            fork=fork,
            limits=None if inside is None else inside.limits,
            agent=agent,
        )

    def _read_options(self, columns: Mapping[str, Any]) -> AgentOptions:
        options = row_options(self.options, columns)
        if self.is_audit:
            options = options.model_copy(update={"simulated_user": None})
        elif options.simulated_user is not None or columns.get(USER_COLUMN) is not None:
            options = add_row_user(options, columns, toolsets=self.user_toolsets)
        if options.max_cost_usd is not None and not self.is_priced:
            raise ValueError("`max_cost_usd` needs a model whose price is known")
        if self.toolsets is not None:
            message = options.describe_missing_toolsets(self.toolsets)
            if message:
                raise ValueError(f"`preparation_toolsets`: {message}")
        return options

    def _check_model(self, columns: Mapping[str, Any]) -> None:
        model = columns.get(MODEL_COLUMN)
        if self.models is None or model is None or str(model) in self.models:
            return
        names = ", ".join(sorted(self.models))
        excerpt = clip(repr(model), max_chars=200)
        raise ValueError(f"`{MODEL_COLUMN}`: {excerpt} is not a model of this run ({names})")

    def _check_script(self, columns: Mapping[str, Any]) -> None:
        if self.script != "ignored" and "script" in columns:
            parse_script(columns["script"])
        elif self.script == "needed":
            raise ValueError(
                "no `script` field; the scripted model plays it (or give --script_file)"
            )

    def ignores_expected(self, columns: Mapping[str, Any]) -> bool:
        """Whether a row has the column `expected`, but answers are not compared with it.

        A row whose own options say so wants it, and does not count.
        """
        if columns.get(EXPECTED) is None:
            return False
        if "check_expected" in (columns.get(ROW_COLUMN) or {}):
            return False
        return not self.options.check_expected

    def rollout_columns(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The columns that affect the conversation."""
        names = ["prompt" if "prompt" in columns else chat_column(columns), ROW_COLUMN]
        if self.script != "ignored":
            names.append("script")
        options = row_options(self.options, columns)
        if options.check_expected:
            names.append(expected_column(columns))
        if options.awaiting_input:
            names.append(REPLIES_COLUMN)
        names.append(TURNS_COLUMN)
        if options.simulated_user is not None:
            names.append(USER_COLUMN)
        if self.models is not None:
            names.append(MODEL_COLUMN)
        if self.with_setup:
            from batch_trajectories.dataset.columns import column_names
            from batch_trajectories.dataset.row_workspace import SetupColumns

            names += column_names(SetupColumns)
        if self.image != "ignored":
            from batch_trajectories.dataset.row_workspace import image_columns

            names += image_columns(columns)
        if self.inside:
            from batch_trajectories.dataset.columns import column_names
            from batch_trajectories.dataset.row_workspace import InsideColumns

            names += column_names(InsideColumns)
        if self.with_forks:
            names.append(FORK_COLUMN)
        if self.agent is not None:
            names += [AGENT_COLUMN, MCP_COLUMN]
        columns = flatten_prompt(columns)
        return {name: columns[name] for name in names if name in columns}

    def _read_inside(self, columns: Mapping[str, Any]) -> InsideColumns:
        from batch_trajectories.dataset.columns import ValuePermissions, read_group
        from batch_trajectories.dataset.row_workspace import InsideColumns

        return read_group(InsideColumns, columns, ValuePermissions(variables=self.variables))

    def _read_setup(self, columns: Mapping[str, Any], inside: InsideColumns | None) -> RowSetup:
        from batch_trajectories.dataset.row_workspace import read_row_setup

        return read_row_setup(
            columns,
            inside,
            check_in=self.check_in,
            check_network=self.check_network,
            variables=self.variables,
        )

    def _read_image(
        self, columns: Mapping[str, Any], inside: InsideColumns | None
    ) -> ImageSpec | None:
        from batch_trajectories.dataset.row_workspace import IMAGE_COLUMNS, read_image

        image = read_image(columns, inside, network=self.network)
        if image is None and self.image == "needed":
            *names, last = (f"`{name}`" for name in IMAGE_COLUMNS)
            raise ValueError(f"no {', '.join(names)} or {last} field (or give --docker_image)")
        return image


def _row_agent(
    agent: CommandAgent, columns: Mapping[str, Any], opening: Sequence[Message]
) -> CommandAgent:
    """The agent of a row, with the settings in its column. Raises `ValueError`."""
    given = columns.get(ROW_COLUMN) or {}
    if other := sorted(given.keys() - set(LIMITS)):
        raise ValueError(
            f"`{ROW_COLUMN}.{other[0]}`: means nothing with an agent that runs as a command"
        )
    if not agent.continues and columns.get(TURNS_COLUMN):
        raise ValueError(f"`{TURNS_COLUMN}`: {agent.why_one_message}")
    if not opening or opening[-1]["role"] != "user":
        raise ValueError(
            f"`{USER_COLUMN}.writes_first`: an agent that runs as a command begins with the row's "
            "`prompt`"
        )
    if len(opening) > 1:
        roles = [message["role"] for message in opening]
        raise ValueError(
            f"an agent that runs as a command takes the text of one user message (got {roles})"
        )
    try:
        return agent.with_row(columns.get(AGENT_COLUMN), _servers(columns))
    except ValidationError as error:
        raise ValueError(mistakes_in(error)[0].describe(AGENT_COLUMN)) from error


def _servers(columns: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The MCP servers of a Harbor task; the reader of tasks has checked their details."""
    servers = columns.get(MCP_COLUMN) or []
    if not isinstance(servers, list) or not all(
        isinstance(server, dict) and server.keys() & {"command", "url"} for server in servers
    ):
        raise ValueError(f"`{MCP_COLUMN}` must be a list of servers with `command` or `url`")
    return servers
