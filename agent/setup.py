"""The model, tools and hooks that all conversations of a run or an `AIAgent` share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import replace

from agent.loop.tools import Approve, add_completion_tools, check_names
from agent.messages.message import (
    PREPARATION,
    SIMULATED_USER,
    is_cost_only,
)
from agent.models.client.pool import ModelPool
from agent.models.model import Model, ModelSettings
from agent.models.resolve import SCRIPTED, Endpoint, read_key, resolve_sibling
from agent.models.scripted import ScriptedModel, ScriptedTurn, parse_script
from agent.options import AgentOptions, SimulatedUser, Subagent, inherit_options
from agent.state.trajectory import Trajectory, WaitUntilPersisted
from toolsets.catalog.registry import (
    ALL,
    NONE,
    TOOLSETS,
    Toolset,
    collect_tools,
    resolve_toolsets,
)
from toolsets.context import ToolContext
from toolsets.tool import Tool
from toolsets.toolbox import Toolbox

_ALL_NAMES = frozenset(ALL)


class SubagentSetup(msgspec.Struct, frozen=True):
    """The model and tools of one subagent."""

    settings: ModelSettings | None
    """The subagent's own model; None: the model of its caller."""
    toolsets: tuple[Toolset, ...]
    tools: tuple[Tool, ...]


class Setup(msgspec.Struct, frozen=True):
    """Model, tools, subagents and hooks of all conversations."""

    settings: ModelSettings
    toolsets: tuple[Toolset, ...]
    tools: tuple[Tool, ...]
    subagents: dict[str, SubagentSetup]
    approve: Approve | None
    aliases: Mapping[str, ModelSettings] = msgspec.field(default_factory=dict)
    """Further models that an agent which runs as a command may ask for; see `CommandAgent`."""
    user: ModelSettings | None = None
    """The model of the simulated user; None: the model of the conversations."""
    user_toolsets: tuple[Toolset, ...] = ()
    """The toolsets that simulated users can have; rows may select some of them."""

    def models(self) -> list[ModelSettings]:
        """The models of the conversations, of subagents, of aliases and of the simulated user."""
        agents = [agent.settings for agent in self.subagents.values()]
        found = [self.settings, *agents, *self.aliases.values(), self.user]
        return [settings for settings in found if settings is not None]

    def unpriced(self) -> str | None:
        """The name of a model whose price is unknown, or None."""
        called = [model for model in self.models() if model.api != SCRIPTED]
        if not called:
            return None
        from agent.models.prices import has_known_price

        return next((model.name for model in called if not has_known_price(model)), None)

    def toolset_names(self) -> list[str]:
        """The names of the conversations' own toolsets, without the toolsets of subagents."""
        return [toolset.name for toolset in self.toolsets]

    def select_toolsets(self, names: Collection[str]) -> Setup:
        """A copy with only the named toolsets."""
        toolsets = tuple(toolset for toolset in self.toolsets if toolset.name in names)
        return replace(self, toolsets=toolsets, tools=collect_tools(toolsets))

    def user_tools(self, names: Collection[str]) -> tuple[Tool, ...]:
        """The tools of a simulated user whose toolsets are `names`, also "all" and "none"."""
        everything = not _ALL_NAMES.isdisjoint(names)
        chosen = [one for one in self.user_toolsets if everything or one.name in names]
        return collect_tools(chosen)

    def leave_out_toolset(self, name: str) -> Setup:
        """A copy in which nobody has the toolset called `name`: no conversation, subagent, user."""
        subagents = {}
        for agent, own in self.subagents.items():
            rest = tuple(toolset for toolset in own.toolsets if toolset.name != name)
            subagents[agent] = replace(own, toolsets=rest, tools=collect_tools(rest))
        others = [other for other in self.toolset_names() if other != name]
        users = tuple(toolset for toolset in self.user_toolsets if toolset.name != name)
        return replace(self.select_toolsets(others), subagents=subagents, user_toolsets=users)

    def sandboxed_toolsets(self) -> list[str]:
        """The names of the toolsets that run commands, also of subagents and simulated users."""
        return sorted({toolset.name for toolset in self.all_toolsets() if toolset.needs_sandbox})

    def uses(self, name: str) -> bool:
        """Whether conversations, subagents or simulated users use the toolset called `name`."""
        return any(toolset.name == name for toolset in self.all_toolsets())

    def all_toolsets(self) -> list[Toolset]:
        """All toolsets, toolsets of subagents and of simulated users included."""
        return [*self.agent_toolsets(), *self.user_toolsets]

    def agent_toolsets(self) -> list[Toolset]:
        """The toolsets of conversations and of subagents."""
        subagents = (subagent.toolsets for subagent in self.subagents.values())
        return list(chain(self.toolsets, *subagents))


def set_up(
    options: AgentOptions,
    settings: ModelSettings,
    *,
    enabled_toolsets: Sequence[str] | None,
    disabled_toolsets: Sequence[str],
    api_key: str | None = None,
    endpoints: Mapping[str, Endpoint] = MappingProxyType({}),
    known: Mapping[str, Toolset] = TOOLSETS,
) -> Setup:
    """Check and resolve the toolsets, models and hooks that options name.

    `api_key` is the key of the endpoint; None: keys come from the environment. `endpoints` are
    further endpoints for models of subagents; `known` are the toolsets that can be named. Raises
    `ValueError` with a message for the user (also as `UnknownToolset`, `UnknownModel` or
    `MissingKey`).
    """
    toolsets = resolve_toolsets(enabled_toolsets, disabled_toolsets, known=known)
    tools = collect_tools(toolsets)
    check_names([*(tool.name for tool in tools), *(agent.name for agent in options.subagents)])
    if message := options.describe_missing_toolsets([toolset.name for toolset in toolsets]):
        raise ValueError(f"preparation_toolsets: {message}")
    subagents = {
        agent.name: _set_up_subagent(
            agent,
            settings,
            api_key=api_key,
            disabled=disabled_toolsets,
            endpoints=endpoints,
            known=known,
        )
        for agent in options.subagents
    }
    approve = None if options.approve is None else _load_hook(options.approve)
    user = None
    user_toolsets: tuple[Toolset, ...] = ()
    if options.simulated_user is not None:
        user_toolsets = _resolve_user_toolsets(
            options.simulated_user, disabled=disabled_toolsets, known=known
        )
        user = _own_model(
            SIMULATED_USER,
            options.simulated_user,
            settings,
            api_key=api_key,
            endpoints=endpoints,
        )
    setup = Setup(
        settings=settings,
        toolsets=toolsets,
        tools=tools,
        subagents=subagents,
        approve=approve,
        user=user,
        user_toolsets=user_toolsets,
    )
    if options.max_cost_usd is not None and (name := setup.unpriced()):
        raise ValueError(
            f"max_cost_usd: the price of model {name!r} is unknown, so a budget in dollars cannot "
            f"be enforced; set prices: {{{name}: {{input: ..., output: ...}}}} in the config of a "
            "run, or leave max_cost_usd out"
        )
    return setup


def _set_up_subagent(
    agent: Subagent,
    caller: ModelSettings,
    *,
    api_key: str | None,
    disabled: Sequence[str],
    endpoints: Mapping[str, Endpoint],
    known: Mapping[str, Toolset],
) -> SubagentSetup:
    name = f"subagent {agent.name!r}"
    settings = _own_model(name, agent, caller, api_key=api_key, endpoints=endpoints)
    # Disabled toolsets are disabled for subagents, too.
    toolsets = resolve_toolsets(agent.enabled_toolsets, disabled, known=known)
    tools = collect_tools(toolsets)
    check_names([*(tool.name for tool in tools), *agent.subagents])
    return SubagentSetup(settings, toolsets, tools)


def _resolve_user_toolsets(
    user: SimulatedUser, *, disabled: Sequence[str], known: Mapping[str, Toolset]
) -> tuple[Toolset, ...]:
    """The toolsets that simulated users can have. Raises `ValueError`."""
    option = f"{SIMULATED_USER}.enabled_toolsets"
    try:
        toolsets = resolve_toolsets(user.enabled_toolsets, disabled, known=known)
        check_names([tool.name for tool in collect_tools(toolsets)])
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error
    if not toolsets and set(user.enabled_toolsets) - {NONE}:
        raise ValueError(f"{option}: disabled_toolsets leaves none of its tools")
    return toolsets


def _own_model(
    name: str,
    agent: Subagent | SimulatedUser,
    caller: ModelSettings,
    *,
    api_key: str | None,
    endpoints: Mapping[str, Endpoint],
) -> ModelSettings | None:
    """The own model of a subagent or a simulated user; None: the caller's model.

    Raises `ValueError` if the model is unknown, or if its key or its script is missing.
    """
    settings = None
    if agent.model is not None:
        settings = resolve_sibling(agent.model, caller, endpoints)
    elif agent.script is not None and caller.api == SCRIPTED:
        settings = caller
    if settings is not None:
        find_key(settings, caller, api_key)
        # A simulated user's script may be given per row, so a missing one is no error here.
        if settings.api == SCRIPTED and (agent.script is not None or isinstance(agent, Subagent)):
            try:
                parse_script(agent.script)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
    return settings


def find_key(settings: ModelSettings, caller: ModelSettings, api_key: str | None) -> str:
    """The key of a model's endpoint.

    It is `api_key` at the caller's endpoint. At others, and if `api_key` is None, it comes from the
    environment. Raises `MissingKey`.
    """
    if api_key is not None and settings.base_url == caller.base_url:
        return api_key
    return read_key(settings)


def _load_hook(place: str) -> Approve:
    from toolsets.catalog.custom import import_function

    return import_function(place, "approve")


def list_schemas(setup: Setup, options: AgentOptions) -> list[Mapping[str, Any]]:
    """The schemas of everything that the model of a conversation can call."""
    schemas: list[Mapping[str, Any]] = [tool.schema for tool in setup.tools]
    if options.subagents:
        from agent.loop.subagents import subagent_schema

        schemas += [subagent_schema(agent) for agent in options.subagents]
    return add_completion_tools(schemas, options)


def inner_schemas(setup: Setup, options: AgentOptions, name: str) -> list[Mapping[str, Any]] | None:
    """The schemas offered to the inner conversation `name` of a subagent or a stage.

    Includes subagents, although conversations at the maximum depth cannot call them. For a
    simulated user: the schemas of its own tools, if it has any. None for any other name.
    """
    if name == SIMULATED_USER and options.simulated_user is not None:
        names = options.simulated_user.enabled_toolsets
        return [tool.schema for tool in setup.user_tools(names)] or None
    if name == PREPARATION:
        toolsets = options.preparation_toolsets
        inner = setup if toolsets is None else setup.select_toolsets(toolsets)
        return list_schemas(inner, options.model_copy(update={"completion_tools": False}))
    if name not in setup.subagents:
        return None
    called = next(agent.subagents for agent in options.subagents if agent.name == name)
    inner = replace(setup, tools=setup.subagents[name].tools)
    known = tuple(agent for agent in options.subagents if agent.name in called)
    inner_options = inherit_options(options, max_turns=1).model_copy(update={"subagents": known})
    return list_schemas(inner, inner_options)


class AgentServices(msgspec.Struct, frozen=True):
    """The models and tools of one conversation and its subagents."""

    setup: Setup
    context: ToolContext
    pool: ModelPool
    call_timeout_s: float
    wrap_model: Callable[[Model], Model] = lambda model: model
    """Wraps each model before its first request."""
    wait_until_persisted: WaitUntilPersisted = None
    """Awaited before each tool call, so that all events so far are on disk; None: no need."""

    def model(self, script: Sequence[ScriptedTurn], *, start: int) -> Model:
        """The model of the conversation; a scripted model plays `script` from turn `start` on."""
        if self.setup.settings.api == SCRIPTED:
            return self.wrap_model(ScriptedModel(script, start=start))
        return self.wrap_model(self.pool.get(self.setup.settings))

    def toolbox(self, toolsets: Collection[str] | None = None) -> Toolbox:
        """The tools of the conversation; with `toolsets`, only tools of these."""
        return self._make_toolbox(
            self.setup.tools if toolsets is None else self.setup.select_toolsets(toolsets).tools
        )

    def subagent_toolbox(self, agent: Subagent) -> Toolbox:
        """The tools of a subagent, in the workspace of the conversation."""
        return self._make_toolbox(self.setup.subagents[agent.name].tools)

    def user_toolbox(self, user: SimulatedUser) -> Toolbox:
        """The tools of a simulated user, in the workspace of the conversation."""
        return self._make_toolbox(self.setup.user_tools(user.enabled_toolsets))

    def _make_toolbox(self, tools: Sequence[Tool]) -> Toolbox:
        return Toolbox(
            tools,
            self.context,
            call_timeout_s=self.call_timeout_s,
            before_call=self.wait_until_persisted,
        )

    def subagent_model(self, agent: Subagent, conversation: Trajectory) -> Model | None:
        """The own model of a subagent in its conversation; None: the model of its caller."""
        settings = self.setup.subagents[agent.name].settings
        return self._own_model(settings, agent.script, replies_played(conversation, self.setup))

    def user_model(self, user: SimulatedUser, begun: Trajectory, replies: int) -> Model | None:
        """The model that plays the user; None: the model of the conversation.

        `begun` is the inner conversation in which it writes its next message, and `replies` is the
        number of replies in which it wrote those before.
        """
        start = replies + replies_played(begun, self.setup)
        return self._own_model(self.setup.user, user.script, start)

    def _own_model(self, settings: ModelSettings | None, script: Any, start: int) -> Model | None:
        if settings is None:
            return None
        if settings.api == SCRIPTED:
            return self.wrap_model(ScriptedModel(parse_script(script), start=start))
        return self.wrap_model(self.pool.get(settings))


def replies_played(conversation: Trajectory, setup: Setup) -> int:
    """The number of turns of the script that a conversation has used, with inner conversations."""
    played = len(conversation.replies)
    played += sum(not is_cost_only(reply) for reply in conversation.discarded)
    for inner in conversation.inner.values():
        if inner.name == SIMULATED_USER and setup.user is not None:
            continue
        subagent = setup.subagents.get(inner.name)
        if subagent is None or subagent.settings is None:
            played += replies_played(inner.trajectory, setup)
    return played
