"""Assembles one conversation from model, views, tools and inner conversations, and runs it.

Workers, `AIAgent` and subagents all use it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence

import msgspec
from msgspec.structs import replace

from agent.loop.loop import run_agent
from agent.loop.rules import (
    ConversationSpec,
    Finish,
    NextStep,
    ResumeTool,
    RunTools,
    count_runnable,
    next_step,
)
from agent.loop.tools import AgentTools, CallableAgent
from agent.messages.message import (
    PREPARATION,
    SIMULATED_USER,
    SUMMARY,
    USER_TURN,
    BeganEvent,
    Event,
    Message,
    OpeningEvent,
    Rebuild,
    ResumedEvent,
    SubEvent,
    ToolCall,
    user_key,
)
from agent.models.conversation_id import inner_conversation_id
from agent.models.model import Model, StreamHandler, guard_handler
from agent.options import (
    MAX_COUNT,
    AgentOptions,
    SimulatedUser,
    Subagent,
    inherit_options,
)
from agent.setup import AgentServices
from agent.state.events import Clock, continued_event, result_event
from agent.state.trajectory import SHARED_LIMITS, Journal, Trajectory
from batch_trajectories.basics.option_names import FIXED
from toolsets.tool import ToolResult
from toolsets.toolbox import Toolbox


class ConversationRunner(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one conversation needs; `run` runs it to its ending."""

    trajectory: Trajectory
    spec: ConversationSpec
    model: Model
    toolbox: Toolbox
    journal: Journal
    services: AgentServices
    subagents: Sequence[Subagent] = ()
    """All subagents, also those that only other subagents may call."""
    callable_names: Collection[str] | None = None
    """The names of the subagents that this conversation may call; None: all."""
    on_event: StreamHandler | None = None
    approved: set[bytes] = msgspec.field(default_factory=set)
    """Calls that need no further approval."""
    workspace_survived: bool = True
    """False if the workspace had to be made anew since the stored events."""
    records_starts: bool = False
    """Journal an event when a tool call starts.

    The journal must then persist an event before it returns, and allow calls from any thread.
    """
    has_start_events: bool = False
    """The stored events include a `BeganEvent` for every tool call that was started."""
    rebuild: Rebuild | None = None
    """The rebuild of the workspace to resume the conversation; None if none was tried."""
    depth: int = 0
    """The number of conversations around this one."""
    conversation: str = ""
    """The id that the requests carry; "" for none."""

    async def run(self, *, taken_up: bool = False) -> Finish:
        """Run the conversation to its ending; see `run_agent` for the exceptions.

        `taken_up`: resume a conversation whose events so far come from a process that has died.
        """
        tools = self.tools()
        spec = replace(self.spec, tool_names=tuple(tools.names))
        if taken_up:
            prepare_resume(
                self.trajectory,
                tools=tools,
                spec=spec,
                journal=self.journal,
                workspace_survived=self.workspace_survived,
                has_start_events=self.has_start_events,
                rebuild=self.rebuild,
            )
        user = spec.options.simulated_user
        if user is not None and user.writes_first and not self.trajectory.is_reopened:
            end = await self._begin_with_user(user)
            if end is not None:
                return end
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
            on_event=self.on_event and guard_handler(self.on_event),
            ask_user=self._ask_user,
            conversation=self.conversation,
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
            subagents=self._subagent_tools() if self.subagents else {},
            approve=self.services.setup.approve,
            approved=self.approved,
            note_begin=self._note_begin if self.records_starts else None,
        )

    def _note_begin(self, call_id: str) -> None:
        event = BeganEvent(kind="began", call_id=call_id)
        self.journal(event)
        self.trajectory.apply(event)

    def _subagent_tools(self) -> dict[str, CallableAgent]:
        from agent.loop.subagents import SubagentTool

        return {
            subagent.name: SubagentTool(subagent, self._run_subagent)
            for subagent in self.subagents
            if self.callable_names is None or subagent.name in self.callable_names
        }

    def _model_with_views(self) -> Model:
        options = self.spec.options
        model = writer = self.model
        if options.text_protocol == "react":
            from agent.views.react import ReActModel

            model = writer = ReActModel(writer, max_turns=options.max_turns)
        if options.ephemeral_system_prompt or options.prefill_messages or options.compact_after:
            from agent.views.views import add_views

            model = add_views(writer, options)
        if options.summarize_over_tokens or options.summarize_over_messages:
            from agent.views.summary import SummarizingModel

            model = SummarizingModel(
                model=model,
                writer=writer,
                trajectory=self.trajectory,
                options=options,
                record_inner=self._record_inner,
            )
        return model

    def _record_inner(self, key: str, name: str, event: Event) -> None:
        """Journal an event of an inner conversation and apply it."""
        sub = SubEvent(kind="sub", key=key, name=name, event=event)
        self.journal(sub)
        self.trajectory.apply(sub)

    def _open_inner(
        self, key: str, name: str, opening: Sequence[Message], options: AgentOptions
    ) -> ConversationRunner:
        """Open the inner conversation `key`, or begin it with `opening` if it is new."""
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
            # A simulated user sees what it has written before; all others start anew.
            conversation=inner_conversation_id(
                self.conversation, name if name == SIMULATED_USER else key
            ),
        )

    async def _run_subagent(
        self, subagent: Subagent, call_id: str, task: str
    ) -> tuple[Finish, Trajectory]:
        system = subagent.system_prompt
        opening = [Message(role="system", content=system)] if system else []
        opening.append(Message(role="user", content=task))
        options = inherit_options(self.spec.options, max_turns=subagent.max_turns)
        inner = self._open_inner(call_id, subagent.name, opening, options)
        deepest = options.max_subagent_depth
        inner = replace(
            inner,
            model=self.services.subagent_model(subagent, inner.trajectory) or self.model,
            toolbox=self.services.subagent_toolbox(subagent),
            callable_names=subagent.subagents if deepest is None or inner.depth < deepest else (),
        )
        return await inner.run_inner(), inner.trajectory

    async def _ask_user(self) -> Finish | None:
        from agent.loop.simulated_user import build_user_view

        user = self.spec.options.simulated_user
        assert user is not None
        written = self.trajectory.count_notes(USER_TURN)
        with_tools = bool(self.services.user_toolbox(user).schemas)
        seen = build_user_view(user, self.trajectory, with_tools=with_tools)
        before = range(0 if user.writes_first else 1, written + 1)
        return await self.ask_user(user_key(written + 1), seen, before)

    async def _begin_with_user(self, user: SimulatedUser) -> Finish | None:
        """Have the simulated user write the first message; returns an ending if it wrote none."""
        from agent.loop.simulated_user import opening_view, user_message

        with_tools = bool(self.services.user_toolbox(user).schemas)
        seen = opening_view(user, with_tools=with_tools)
        if end := await self.ask_user(user_key(0), seen, ()):
            return end
        text = user_message(self.trajectory, 0)
        if not text or user.stop in text:
            what = f"wrote {user.stop}" if text else "wrote nothing"
            return Finish("errors", f"the simulated user {what} in place of a first message")
        first = Message(role="user", content=text)
        event = OpeningEvent(kind="opening", messages=[*self.trajectory.messages, first])
        self.journal(event)
        self.trajectory.apply(event)
        return None

    async def ask_user(
        self, key: str, seen: Sequence[Message], before: Iterable[int]
    ) -> Finish | None:
        """Have the simulated user write a message as the inner conversation `key`.

        `seen` are the messages that it is shown, and `before` are the numbers of the messages that
        it has written before. Returns an ending if it wrote none.
        """
        from agent.loop.simulated_user import (
            SimulatedUserModel,
            count_replies,
            missing_instructions,
        )

        user = self.spec.options.simulated_user
        assert user is not None
        toolbox = self.services.user_toolbox(user)
        max_calls = user.max_calls if toolbox.schemas else 0
        opening = missing_instructions(seen, self.trajectory)
        options = inherit_options(self.spec.options, max_turns=min(max_calls + 1, MAX_COUNT))
        inner = self._open_inner(key, SIMULATED_USER, opening, options)
        replies = count_replies(self.trajectory, before)
        model = self.services.user_model(user, inner.trajectory, replies) or self.model
        # The requests hold earlier calls of the user, too, and ids must be unique in a request.
        inner.trajectory.call_ids.update(
            call["id"] for message in seen for call in message.get("tool_calls", ())
        )
        inner = replace(
            inner,
            model=SimulatedUserModel(model, seen, opening_length=inner.trajectory.opening_length),
            toolbox=toolbox,
            spec=replace(inner.spec, max_calls=max_calls or None),
            subagents=(),
        )
        end = await inner.run_inner()
        if end.status == "completed":
            return None
        if end.status in SHARED_LIMITS:
            return end
        if end.status == "context_exceeded":
            return Finish("user_context_exceeded", f"the simulated user ended as {end.describe()}")
        return Finish("errors", f"the simulated user ended as {end.describe()}")

    async def next_user_message(
        self, messages: Sequence[str], answers: Sequence[str]
    ) -> str | Finish | None:
        """The user's next message to an agent that runs as a command; None if there is none.

        `messages` are the user's messages so far, the task first, and `answers` the agent's answers
        to them. Returns an ending if a simulated user wrote no message.
        """
        written = len(messages) - 1
        user = self.spec.options.simulated_user
        if user is None:
            return next(iter(self.spec.user_turns[written:]), None)
        if written >= user.max_turns:
            return None
        from agent.loop.simulated_user import build_user_view_of_agent, message_in

        seen = build_user_view_of_agent(user, messages, answers)
        # The digest in the key: a later start with the same texts gets the message that is stored.
        texts = "\0".join(message["content"] for message in seen)
        digest = hashlib.sha256(texts.encode("utf-8", "replace")).hexdigest()[:12]
        key = f"{user_key(written + 1)}.{digest}"
        if end := await self.ask_user(key, seen, range(1, written + 1)):
            return end
        text = message_in(self.trajectory, key)
        return None if not text or user.stop in text else text

    def _is_prepared(self) -> bool:
        return self.trajectory.is_reopened or bool(self.trajectory.replies)

    async def _prepare(self, task: str) -> Finish | None:
        """Gather context and add it to the prompt; returns an ending if that failed."""
        from agent.views import views as preparation

        prompt = self.trajectory.messages
        options = self.spec.options
        inner_options = options.model_copy(update=_OFF_IN_PREPARATION)
        end = Finish("failed")
        for attempt in range(1, FIXED["preparation_attempts"] + 1):
            key = f"{PREPARATION}#{attempt}"
            opening = preparation.preparation_opening(task, prompt)
            inner = self._open_inner(key, PREPARATION, opening, inner_options)
            inner = replace(inner, toolbox=self.services.toolbox(options.preparation_toolsets))
            end = await inner.run_inner()
            if end.status == "completed":
                findings = preparation.findings_in(inner.trajectory.final_text())
                event = OpeningEvent(
                    kind="opening", messages=preparation.add_findings(prompt, findings)
                )
                self.journal(event)
                self.trajectory.apply(event)
                return None
            if end.status in SHARED_LIMITS:
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
    if any(inner.name == SUMMARY for inner in trajectory.inner.values()):
        from agent.views.summary import latest_summary

        if latest_summary(trajectory).upto:
            return True
    if not options.compact_after:
        return False
    from agent.views.views import first_compacted_reply

    messages = trajectory.messages
    return first_compacted_reply(messages, options.compact_after) < len(messages)


_INTERRUPTED = (
    "Error: this call was interrupted before its result was known. It may have run in part; "
    "check the state of things before you repeat it."
)


def prepare_resume(
    trajectory: Trajectory,
    *,
    tools: AgentTools,
    spec: ConversationSpec,
    journal: Journal,
    workspace_survived: bool,
    has_start_events: bool = False,
    rebuild: Rebuild | None = None,
) -> None:
    """Prepare a replayed trajectory to continue after a crash.

    A call without a result stays open and runs (again) if it certainly had not started, or if its
    tool is idempotent. Otherwise it gets a result that says that it was interrupted.
    `has_start_events`: the events include a `BeganEvent` for every call that was started.
    `rebuild`: how the workspace was rebuilt as of the last result, or why it was not; after a
    rebuild, all calls without a result stay open. None: no rebuild was tried.
    """

    def record(event: Event) -> None:
        journal(event)
        trajectory.apply(event)

    step = next_step(trajectory, spec)
    calls = _possibly_running(
        step,
        tools,
        parallel=spec.options.parallel_tools,
        runnable=count_runnable(trajectory, spec),
    )
    has_results = bool(trajectory.results or trajectory.last_results())
    for inner in trajectory.inner.values():
        if inner.name == SIMULATED_USER:
            has_results |= bool(inner.trajectory.results or inner.trajectory.last_results())
    interrupted: list[tuple[int, ToolCall]] = []
    repeated: list[tuple[int, ToolCall]] = []
    for n, call in calls:
        if tools.is_idempotent(call["function"]["name"]):
            repeated.append((n, call))
        elif not has_start_events or call["id"] in trajectory.started_calls:
            interrupted.append((n, call))
    is_rebuilt = rebuild is not None and "why" not in rebuild
    resumed = ResumedEvent(
        kind="resumed",
        turn=trajectory.turns,
        interrupted=[] if is_rebuilt else [call["id"] for _, call in interrupted],
        repeated=[call["id"] for _, call in repeated],
        # A workspace that no call has used yet is not lost, it was not made.
        workspace_kept=workspace_survived or not (has_results or interrupted),
    )
    if rebuild is not None:
        resumed["rebuild"] = rebuild
    if is_rebuilt:
        resumed["rebuilt"] = [call["id"] for _, call in interrupted]
        interrupted = []
    record(resumed)
    result = ToolResult(_INTERRUPTED, is_error=True, details={"failure": "interrupted"})
    for n, call in interrupted:
        if isinstance(step, ResumeTool):
            record(continued_event(step.result, step.reply, result, Clock()))
        else:
            record(result_event(trajectory.turns, n, call, result, Clock()))


def _possibly_running(
    step: NextStep, tools: AgentTools, *, parallel: bool, runnable: int
) -> list[tuple[int, ToolCall]]:
    """The calls that may have been running when the process died, with their numbers.

    `runnable`: the number of calls of the last reply that may run.
    """
    if isinstance(step, ResumeTool):
        return [(step.result["call"], step.call)] if step.is_for_tool else []
    if not isinstance(step, RunTools):
        return []
    calls = [(n, call) for n, call in step.calls if n < runnable]
    # Calls that run one after the other: only the first can have begun.
    return calls if parallel and not tools.need_order(step.calls) else calls[:1]
