"""What the conversations of a run or an `AIAgent` have in common, checked before any call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from agent.loop.subagents import schema_of
from agent.loop.tools import Approve, check_names, offered
from agent.messages import is_paid_alone
from agent.models.client.pool import ModelPool
from agent.models.model import Model, ModelSettings
from agent.models.prices import is_known
from agent.models.resolve import SCRIPTED, Endpoint, read_key, resolve_sibling
from agent.models.scripted import ScriptedModel, ScriptedTurn, parse_script
from agent.options import AgentOptions, Subagent
from agent.state.trajectory import Trajectory
from toolsets.catalog.custom import import_place
from toolsets.catalog.registry import TOOLSETS, Toolset, resolve_toolsets, tools_of
from toolsets.context import ToolContext
from toolsets.tool import Tool
from toolsets.toolbox import Toolbox


@dataclass(frozen=True, slots=True)
class SubagentSetup:
    """What one subagent works with."""

    settings: ModelSettings | None
    """None where it asks its caller's model."""
    toolsets: tuple[Toolset, ...]
    tools: tuple[Tool, ...]


@dataclass(frozen=True, slots=True)
class Setup:
    """Model, tools, subagents and hooks of all conversations."""

    settings: ModelSettings
    toolsets: tuple[Toolset, ...]
    tools: tuple[Tool, ...]
    subagents: dict[str, SubagentSetup]
    approve: Approve | None

    def asked(self) -> list[ModelSettings]:
        """The models that may be asked: that of the conversations, then those of subagents."""
        own = [agent.settings for agent in self.subagents.values() if agent.settings is not None]
        return [self.settings, *own]

    def unpriced(self) -> str | None:
        """The name of a model that may be asked and whose price is unknown, or None."""
        return next((one.name for one in self.asked() if not is_known(one)), None)

    def names(self) -> list[str]:
        """The names of the toolsets of the conversations themselves."""
        return [toolset.name for toolset in self.toolsets]

    def only(self, names: Collection[str]) -> Setup:
        """This with those of its toolsets alone that are named."""
        toolsets = tuple(toolset for toolset in self.toolsets if toolset.name in names)
        return replace(self, toolsets=toolsets, tools=tools_of(toolsets))

    def sandboxed(self) -> list[str]:
        """The names of the toolsets in use that run commands."""
        return sorted({toolset.name for toolset in self._used() if toolset.needs_sandbox})

    def uses(self, name: str) -> bool:
        """Whether the toolset called `name` is in use, by conversations or by subagents."""
        return any(toolset.name == name for toolset in self._used())

    def _used(self) -> list[Toolset]:
        used = [*self.toolsets]
        for subagent in self.subagents.values():
            used += subagent.toolsets
        return used


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
    """Check and resolve what options and toolsets name.

    `api_key` is that of the endpoint, None to take keys from the environment alone. `endpoints`
    are those that models of subagents can name beside the known ones, `known` all toolsets that
    can be named. Raises `ValueError` with a message for the user (among them `UnknownToolset`,
    `UnknownModel` and `MissingKey`).
    """
    toolsets = resolve_toolsets(enabled_toolsets, disabled_toolsets, known=known)
    tools = tools_of(toolsets)
    check_names([*(tool.name for tool in tools), *(agent.name for agent in options.subagents)])
    if words := options.not_on_offer([toolset.name for toolset in toolsets]):
        raise ValueError(f"preparation_toolsets: {words}")
    subagents = {
        agent.name: _set_up_subagent(agent, settings, api_key, disabled_toolsets, endpoints, known)
        for agent in options.subagents
    }
    approve = None if options.approve is None else _load(options.approve)
    setup = Setup(settings, toolsets, tools, subagents, approve)
    if options.max_cost_usd is not None and (name := setup.unpriced()):
        msg = (
            f"max_cost_usd: the price of model {name!r} is unknown, so a budget in dollars cannot "
            f"be kept; give it as prices: {{{name}: {{input: ..., output: ...}}}} in the "
            "config of a run, or leave max_cost_usd out"
        )
        raise ValueError(msg)
    return setup


def _set_up_subagent(
    agent: Subagent,
    caller: ModelSettings,
    api_key: str | None,
    disabled: Sequence[str],
    endpoints: Mapping[str, Endpoint],
    known: Mapping[str, Toolset],
) -> SubagentSetup:
    settings = None
    if agent.model is not None:
        settings = resolve_sibling(agent.model, caller, endpoints)
    elif agent.script is not None and caller.api == SCRIPTED:
        settings = caller
    if settings is not None:
        key_for(settings, caller, api_key)
        if settings.api == SCRIPTED:
            try:
                parse_script(agent.script)
            except ValueError as error:
                msg = f"subagent {agent.name!r}: {error}"
                raise ValueError(msg) from error
    # What is never to be offered is not offered to subagents either.
    toolsets = resolve_toolsets(agent.enabled_toolsets, disabled, known=known)
    tools = tools_of(toolsets)
    check_names([*(tool.name for tool in tools), *agent.subagents])
    return SubagentSetup(settings, toolsets, tools)


def key_for(settings: ModelSettings, caller: ModelSettings, api_key: str | None) -> str:
    """The key of a model's endpoint: the caller's where that is the same, as it was given.

    `api_key` None takes it from the environment. Raises `MissingKey`.
    """
    if api_key is not None and settings.base_url == caller.base_url:
        return api_key
    return read_key(settings)


def _load(place: str) -> Approve:
    hook = import_place(place, "approve")
    if not callable(hook):
        msg = f"approve: {place!r} is not callable"
        raise ValueError(msg)
    approve: Approve = hook
    return approve


def schemas_for(setup: Setup, options: AgentOptions) -> list[Mapping[str, Any]]:
    """The schemas of all that the model of a conversation can call."""
    own = [schema_of(agent) for agent in options.subagents]
    return offered([*(tool.schema for tool in setup.tools), *own], options)


@dataclass(frozen=True, slots=True)
class Home:
    """Where one conversation and its subagents work; a `Host`."""

    setup: Setup
    context: ToolContext
    pool: ModelPool
    call_timeout_s: float
    gate: Callable[[Model], Model] = lambda model: model
    """Is put around each model."""

    def model(self, script: Sequence[ScriptedTurn], *, start: int) -> Model:
        """The model of the conversation itself; "scripted" plays `script` from turn `start` on."""
        if self.setup.settings.api == SCRIPTED:
            return self.gate(ScriptedModel(script, start=start))
        return self.gate(self.pool.get(self.setup.settings))

    def toolbox(self, toolsets: Collection[str] | None = None) -> Toolbox:
        """See `Host`."""
        tools = self.setup.tools if toolsets is None else self.setup.only(toolsets).tools
        return Toolbox(tools, self.context, call_timeout_s=self.call_timeout_s)

    def subagent_toolbox(self, agent: Subagent) -> Toolbox:
        """See `Host`."""
        tools = self.setup.subagents[agent.name].tools
        return Toolbox(tools, self.context, call_timeout_s=self.call_timeout_s)

    def subagent_model(self, agent: Subagent, conversation: Trajectory) -> Model | None:
        """See `Host`."""
        settings = self.setup.subagents[agent.name].settings
        if settings is None:
            return None
        if settings.api == SCRIPTED:
            start = replies_played(conversation, self.setup)
            return self.gate(ScriptedModel(parse_script(agent.script), start=start))
        return self.gate(self.pool.get(settings))


def replies_played(conversation: Trajectory, setup: Setup) -> int:
    """How many turns of its script a conversation has used up, with what it lent to others."""
    played = len(conversation.replies)
    played += sum(not is_paid_alone(reply) for reply in conversation.discarded)
    for inner in conversation.inner.values():
        subagent = setup.subagents.get(inner.name)
        if subagent is None or subagent.settings is None:
            played += replies_played(inner.trajectory, setup)
    return played
