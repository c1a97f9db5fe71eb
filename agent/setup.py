"""What the conversations of a run or an `AIAgent` have in common, checked before any call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent.models.model import Model, ModelSettings
from agent.models.names import SCRIPTED, open_model, read_key, resolve_sibling
from agent.models.patience import Gate
from agent.models.prices import is_known
from agent.models.scripted import ScriptedModel, parse_script
from agent.options import AgentOptions, Subagent
from agent.subagents import schema_of
from agent.tools import Approve, check_names, offered
from agent.trajectory import Trajectory
from toolsets.own import import_place
from toolsets.registry import TOOLSETS, Toolset, resolve_toolsets, tools_of
from toolsets.space import TaskSpace
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

    def unpriced(self) -> str | None:
        """The name of a model that may be asked and whose price is unknown, or None."""
        asked = [self.settings, *(agent.settings for agent in self.subagents.values())]
        return next((one.name for one in asked if one is not None and not is_known(one)), None)

    def names(self) -> list[str]:
        """The names of the toolsets of the conversations themselves."""
        return [toolset.name for toolset in self.toolsets]

    def only(self, names: Collection[str]) -> Setup:
        """This with those of its toolsets alone that are named."""
        toolsets = tuple(toolset for toolset in self.toolsets if toolset.name in names)
        return replace(self, toolsets=toolsets, tools=tools_of(toolsets))

    def sandboxed(self) -> list[str]:
        """The names of the toolsets in use that run commands."""
        used = [*self.toolsets]
        for subagent in self.subagents.values():
            used += subagent.toolsets
        return sorted({toolset.name for toolset in used if toolset.needs_sandbox})


def set_up(
    options: AgentOptions,
    settings: ModelSettings,
    *,
    enabled_toolsets: Sequence[str] | None,
    disabled_toolsets: Sequence[str],
    api_key: str | None = None,
    known: Mapping[str, Toolset] = TOOLSETS,
) -> Setup:
    """Check and resolve what options and toolsets name.

    `api_key` is that of the endpoint, None to take keys from the environment alone. `known` are
    all toolsets that can be named. Raises `ValueError` with a message for the user (among them
    `UnknownToolset`, `UnknownModel` and `MissingKey`).
    """
    toolsets = resolve_toolsets(enabled_toolsets, disabled_toolsets, known=known)
    tools = tools_of(toolsets)
    check_names([*(tool.name for tool in tools), *(agent.name for agent in options.subagents)])
    if words := options.not_on_offer([toolset.name for toolset in toolsets]):
        raise ValueError(f"preparation_toolsets: {words}")
    subagents = {
        agent.name: _set_up_subagent(agent, settings, api_key, disabled_toolsets, known)
        for agent in options.subagents
    }
    approve = None if options.approve is None else _load(options.approve)
    setup = Setup(settings, toolsets, tools, subagents, approve)
    if options.max_cost_usd is not None and (name := setup.unpriced()):
        msg = (
            f"max_cost_usd: the price of model {name!r} is unknown, so a budget in dollars cannot "
            "be kept; leave it out"
        )
        raise ValueError(msg)
    return setup


def _set_up_subagent(
    agent: Subagent,
    caller: ModelSettings,
    api_key: str | None,
    disabled: Sequence[str],
    known: Mapping[str, Toolset],
) -> SubagentSetup:
    settings = None
    if agent.model is not None:
        settings = resolve_sibling(agent.model, caller)
    elif agent.script is not None and caller.api == SCRIPTED:
        settings = caller
    if settings is not None:
        _key(settings, caller, api_key)
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


def _key(settings: ModelSettings, caller: ModelSettings, api_key: str | None) -> str:
    """The key of a subagent's endpoint: the caller's where that is the same, as it was given."""
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


class SubagentModels:
    """The models of the subagents, each opened once, in the running event loop."""

    def __init__(
        self,
        setup: Setup,
        on_retry: Callable[[str], None],
        *,
        gate: Callable[[Model], Model] = lambda model: model,
        attempt_gate: Gate | None = None,
        api_key: str | None = None,
    ) -> None:
        """`gate` is put around each model; see `PatientModel` for `on_retry`.

        `attempt_gate` is that of the callers' endpoint, for models that are asked there too.
        `api_key` is that of the callers' endpoint, None to take keys from the environment alone.
        """
        self._attempt_gate = attempt_gate
        self._api_key = api_key
        self._setup = setup
        self._on_retry = on_retry
        self._gate = gate
        self._open: dict[str, Model] = {}

    def model_of(self, agent: Subagent, conversation: Trajectory) -> Model | None:
        """The model that a subagent asks in `conversation`; None where it is its caller's."""
        settings = self._setup.subagents[agent.name].settings
        if settings is None:
            return None
        if settings.api == SCRIPTED:
            start = replies_played(conversation, self._setup)
            return self._gate(ScriptedModel(parse_script(agent.script), start=start))
        if agent.name not in self._open:
            key = _key(settings, self._setup.settings, self._api_key)
            is_same = settings.base_url == self._setup.settings.base_url
            model = open_model(
                settings,
                api_key=key,
                on_retry=self._on_retry,
                gate=self._attempt_gate if is_same else None,
            )
            self._open[agent.name] = self._gate(model)
        return self._open[agent.name]

    async def close(self) -> None:
        """Close the models."""
        for model in self._open.values():
            await model.close()


def schemas_for(setup: Setup, options: AgentOptions) -> list[Mapping[str, Any]]:
    """The schemas of all that the model of a conversation can call."""
    own = [schema_of(agent) for agent in options.subagents]
    return offered([*(tool.schema for tool in setup.tools), *own], options)


@dataclass(frozen=True, slots=True)
class Home:
    """Where one conversation and its subagents work; a `Host`."""

    setup: Setup
    space: TaskSpace
    models: SubagentModels
    call_timeout_s: float

    def toolbox(self, toolsets: Collection[str] | None = None) -> Toolbox:
        """See `Host`."""
        tools = self.setup.tools if toolsets is None else self.setup.only(toolsets).tools
        return Toolbox(tools, self.space, call_timeout_s=self.call_timeout_s)

    def subagent_toolbox(self, agent: Subagent) -> Toolbox:
        """See `Host`."""
        tools = self.setup.subagents[agent.name].tools
        return Toolbox(tools, self.space, call_timeout_s=self.call_timeout_s)

    def subagent_model(self, agent: Subagent, conversation: Trajectory) -> Model | None:
        """See `Host`."""
        return self.models.model_of(agent, conversation)


def replies_played(conversation: Trajectory, setup: Setup) -> int:
    """How many turns of its script a conversation has used up, with what it lent to others."""
    played = len(conversation.replies) + len(conversation.discarded)
    for inner in conversation.inner.values():
        subagent = setup.subagents.get(inner.name)
        if subagent is None or subagent.settings is None:
            played += replies_played(inner.trajectory, setup)
    return played
