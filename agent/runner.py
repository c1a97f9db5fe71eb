"""Assembles one conversation from model, views, tools and inner conversations, and runs it.

Workers, `AIAgent` and subagents all use it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from agent.loop.loop import run_agent
from agent.loop.resume import prepare_resume
from agent.loop.rules import ConversationSpec
from agent.loop.simulated_user import (
    UsersModel,
    seen_by_user,
    stored_opening,
)
from agent.loop.steps import Finish
from agent.loop.subagents import SubagentTool
from agent.loop.tools import AgentTools
from agent.messages.message import (
    PREPARATION,
    SIMULATED_USER,
    USER_TURN,
    Event,
    Message,
    OpeningEvent,
    SubEvent,
    user_key,
)
from agent.models.model import Model
from agent.models.stream_events import StreamHandler, guarded
from agent.options import AgentOptions, Subagent, inherited_from
from agent.setup import Home
from agent.state.trajectory import Journal, Trajectory
from agent.views import preparation, summary
from agent.views.react import ReActModel
from agent.views.views import compacted_from, with_views
from batch_trajectories.basics.option_names import FIXED
from toolsets.toolbox import Toolbox


@dataclass(frozen=True, kw_only=True)
class ConversationRunner:
    """Everything that one conversation needs; `run` runs it to its ending."""

    trajectory: Trajectory
    spec: ConversationSpec
    model: Model
    toolbox: Toolbox
    journal: Journal
    host: Home
    subagents: Sequence[Subagent] = ()
    """All subagents."""
    callable_names: Collection[str] | None = None
    """The subagents that this conversation may call; None: all."""
    on_event: StreamHandler | None = None
    approved: set[bytes] = field(default_factory=set)
    """Calls that need no further approval."""
    kept: bool = True
    """The workspace still has the files of earlier events."""
    depth: int = 0
    """Nesting of this conversation in others."""

    async def run(self, *, taken_up: bool = False) -> Finish:
        """Run the conversation to its ending; see `run_agent` for the exceptions.

        `taken_up`: resume it; its events so far come from a process that has died.
        """
        tools = self.tools()
        spec = replace(self.spec, tool_names=tuple(tools.names))
        if taken_up:
            prepare_resume(
                self.trajectory,
                tools=tools,
                spec=spec,
                journal=self.journal,
                kept=self.kept,
            )
        if spec.options.preparation and not self._is_prepared():
            end = await self._prepare(spec.options.preparation)
            if end is not None:
                return end
        return await run_agent(
            self.trajectory,
            model=self._model_with_views(),
            tools=tools,
            spec=spec,
            journal=self.journal,
            on_event=self.on_event and guarded(self.on_event),
            ask_user=self._ask_user,
        )

    async def run_inner(self) -> Finish:
        """Run an inner conversation to its ending, or resume it."""
        return await self.run(taken_up=self.trajectory.api_calls() > 0)

    def tools(self) -> AgentTools:
        """The tools and subagents that the model can call."""
        return AgentTools(
            self.toolbox,
            self.trajectory,
            self.spec.options,
            subagents={
                subagent.name: SubagentTool(subagent, self._run_subagent)
                for subagent in self.subagents
                if self.callable_names is None or subagent.name in self.callable_names
            },
            approve=self.host.setup.approve,
            approved=self.approved,
        )

    def _model_with_views(self) -> Model:
        options = self.spec.options
        writer = self.model
        if options.text_protocol == "react":
            writer = ReActModel(writer, max_turns=options.max_turns)
        model = with_views(writer, options)
        if options.summarize_over_tokens or options.summarize_over_messages:
            model = summary.SummarizingModel(
                model, writer, self.trajectory, options, self._record_inner
            )
        return model

    def _record_inner(self, key: str, name: str, event: Event) -> None:
        """Journal an event of an inner conversation and apply it."""
        sub = SubEvent(kind="sub", key=key, name=name, event=event)
        self.journal(sub)
        self.trajectory.apply(sub)

    def _inner(
        self, key: str, name: str, opening: Sequence[Message], options: AgentOptions
    ) -> ConversationRunner:
        """An inner conversation, new or to be resumed."""
        inner = self.trajectory.begin_inner(key, name)

        def journal(event: Event) -> None:
            # The inner loop applies its own events.
            self.journal(SubEvent(kind="sub", key=key, name=name, event=event))

        if not inner.messages:
            event = OpeningEvent(kind="opening", messages=list(opening))
            journal(event)
            inner.apply(event)
        return replace(
            self,
            trajectory=inner,
            spec=ConversationSpec(options),
            journal=journal,
            on_event=None,
            depth=self.depth + 1,
        )

    async def _run_subagent(
        self, subagent: Subagent, call_id: str, task: str
    ) -> tuple[Finish, Trajectory]:
        system = subagent.system_prompt
        opening = [Message(role="system", content=system)] if system else []
        opening.append(Message(role="user", content=task))
        options = inherited_from(self.spec.options, max_turns=subagent.max_turns)
        inner = self._inner(call_id, subagent.name, opening, options)
        deepest = options.max_subagent_depth
        inner = replace(
            inner,
            model=self.host.subagent_model(subagent, inner.trajectory) or self.model,
            toolbox=self.host.subagent_toolbox(subagent),
            callable_names=subagent.subagents if deepest is None or inner.depth < deepest else (),
        )
        return await inner.run_inner(), inner.trajectory

    async def _ask_user(self) -> Finish | None:
        """Have the simulated user write its next message; returns an ending if that failed."""
        user = self.spec.options.simulated_user
        assert user is not None
        key = user_key(self.trajectory.notes_of(USER_TURN) + 1)
        seen = seen_by_user(user, self.trajectory)
        opening = stored_opening(seen, self.trajectory)
        options = inherited_from(self.spec.options, max_turns=1)
        inner = self._inner(key, SIMULATED_USER, opening, options)
        model = self.host.user_model(user, self.trajectory) or self.model
        inner = replace(
            inner,
            model=UsersModel(model, seen),
            toolbox=self.host.toolbox(()),
            subagents=(),
        )
        end = await inner.run_inner()
        if end.status == "completed":
            return None
        if end.status in ("budget", "time_limit"):
            return end
        if end.status == "context_exceeded":
            return Finish("user_context_exceeded", f"the simulated user ended as {end.describe()}")
        return Finish("errors", f"the simulated user ended as {end.describe()}")

    def _is_prepared(self) -> bool:
        return self.trajectory.is_reopened or bool(self.trajectory.replies)

    async def _prepare(self, task: str) -> Finish | None:
        """Gather context and add it to the prompts; returns an ending if that failed."""
        prompt = self.trajectory.messages
        options = self.spec.options
        own = options.model_copy(update=_OFF_IN_PREPARATION)
        end = Finish("failed")
        for attempt in range(1, FIXED["preparation_attempts"] + 1):
            key = f"{PREPARATION}#{attempt}"
            opening = preparation.preparation_opening(task, prompt)
            inner = self._inner(key, PREPARATION, opening, own)
            inner = replace(inner, toolbox=self.host.toolbox(options.preparation_toolsets))
            end = await inner.run_inner()
            if end.status == "completed":
                findings = preparation.findings_in(inner.trajectory.final_text())
                event = OpeningEvent(
                    kind="opening", messages=preparation.with_findings(prompt, findings)
                )
                self.journal(event)
                self.trajectory.apply(event)
                return None
            if end.status in ("budget", "time_limit"):
                return end
        return Finish("errors", f"the preparation ended as {end.describe()}")


_OFF_IN_PREPARATION = {
    "preparation": None,
    "plan": False,
    "check_expected": False,
    "completion_tools": False,
    "awaiting_input": False,
    "final_summary": False,
    "simulated_user": None,
    "state_max_turns": False,
}


def was_compacted(trajectory: Trajectory, options: AgentOptions) -> bool:
    """Whether the model was shown any part of a conversation shortened or summarized."""
    summarized, _ = summary.latest_summary(trajectory)
    messages = trajectory.messages
    return bool(summarized) or compacted_from(messages, options.compact_after) < len(messages)
