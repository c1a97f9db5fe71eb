"""What holds for every conversation, with any replies and any options."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import orjson
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from agent.loop.rules import ConversationSpec, Finish, next_step
from agent.loop.tools import Approve
from agent.messages.message import (
    SIMULATED_USER,
    Event,
    FinishReason,
    ReplyEvent,
    opens_reasoning,
    split_inline_reasoning,
)
from agent.models.dialects import anthropic_messages, openai_chat, openai_responses
from agent.models.errors import ModelError
from agent.models.model import ModelSettings, Request
from agent.options import AgentOptions
from agent.runner import ConversationRunner
from agent.session import AgentSession
from agent.setup import set_up
from agent.state.history import check_history
from agent.state.trajectory import Journal, Status, Trajectory
from batch_trajectories.basics import exact_json
from batch_trajectories.dataset.row_conversation import read_user_turns
from batch_trajectories.engine.record import Provenance, as_stored, make_record
from batch_trajectories.export.conversation.row_json import dumps_row
from batch_trajectories.export.conversation.validity import Reason, Rejected
from batch_trajectories.records.journal import usable_prefix
from batch_trajectories.records.record_types import decode_record
from batch_trajectories.records.tasks import Task
from run_agent import AIAgent
from tests.helpers import playing
from tests.helpers.playing import OPENING, SETTINGS, TOOLS, Played, call, calls, play, say
from tests.helpers.stored import to_row
from toolsets.tool import Tool

CALM = settings(deadline=None, derandomize=True, database=None)
FEW = CALM.max_examples
MANY = 3 * FEW
"""More with `--hypothesis-profile=full` or `long`."""

# Calls of `count` at the same time would give other numbers each time.
IN_ORDER = tuple(replace(tool, sequential=tool.name == "count") for tool in TOOLS)
ECHO = tuple(tool for tool in TOOLS if tool.name == "echo")
"""Tools that may be called again after a crash: the only one, the others are then unknown."""

NOT_AGAIN = {tool.name for tool in TOOLS} - {"echo"}

MOST_EVENTS = 500
"""More than any of these scripts can make of itself."""


# What a model says


def nested_json(depth: int, more: str = "") -> str:
    return f'{{"text": {"[" * depth}{"]" * depth}{more}}}'


WORDS = st.sampled_from(
    [
        "done",
        "41",
        "Grüße 🎉",
        "1. look\n2) tell",
        "- only\n* this",
        "w" * 300,
        "<think>hm</think>done",
        "<think>never closed",
        "<tool_call>{}</tool_call>",
        "</think>",
        '@city := "Lima"',
        "a\x00b\u2028c",
        "",
        " \n",
    ]
) | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)

REACT_WORDS = st.sampled_from(
    [
        'Thought: hm\nAction: echo\nAction Input: {"text": "x"}',
        "Action: echo\nAction Input: plain words",
        "Action: count\nAction Input: {}\nObservation: 7\nFinal Answer: 7",
        "Thought: hm\nAction: nope",
        "Action: echo\nAction Input: {broken",
        "Action: helper\nAction Input: please",
        "Thought: I know.\nFinal Answer: done",
        "Final Answer:",
    ]
)

ARGUMENTS = st.sampled_from(
    [
        {},
        {"text": "x"},
        {"name": "x"},
        {"answer": "done"},
        {"answer": " "},
        {"reason": "no"},
        {"task": "please"},
        {"wrong": 1},
        {"text": {"deep": [None, 1.5]}},
        {"text": "z" * 300},
        "",
        " \n",
        "{broken",
        "[1]",
        "null",
        '"text"',
        "NaN",
        '{"text": 1e999}',
        "$$",
        "[$$]",
        '{"text": "\\ud800"}',
        '{"text": "a", "text": "b"}',
        ' {"text" : "x"}',
        '{"text": 1}',
        '{"text": 123456789012345678901234567890}',
        '{"text": "</tool_response>"}',
        *(nested_json(depth) for depth in (100, 300, 600, 2000)),
    ]
)
REFERRING = st.sampled_from(
    [
        {"text": "$$echo-res-1"},
        {"text": "<$$echo-res-2> $$"},
        {"answer": "$$echo-res-1!"},
        {"text": "$$count-res-2 $$nope"},
        '{"text": "x", "wrong": "$$"}',
        '{"text": "$$',
        *(nested_json(depth, ', "wrong": "$$"') for depth in (100, 300, 600, 2000)),
    ]
)

NAMES = st.sampled_from(
    [
        "echo",
        "echo",
        "echo",
        "count",
        "delete",
        "fail",
        "report_failure",
        "helper",
        "bare",
        "final_answer",
        "cannot_complete",
        "Echo",
        "echos",
        "counts",
        "final answer",
        "nope",
        "",
    ]
)

FINISH_REASONS = st.sampled_from(get_args(FinishReason))

GOOD_CALLS = st.sampled_from(
    [
        call("echo", text="x"),
        call("echo", text="x"),
        call("echo", text="y"),
        call("count"),
        call("delete", name="x"),
        call("fail"),
        call("report_failure"),
    ]
)


def calls_with(arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda name, given: {"name": name, "arguments": given}, NAMES, arguments)


def weighted(*choices: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """One of them, where what stands there twice comes twice as often; `one_of` forgets that."""
    return st.integers(0, len(choices) - 1).flatmap(lambda n: choices[n])


def scripts(options: Mapping[str, Any]) -> st.SearchStrategy[list[Any]]:
    """Scripts of a model that does, among others, what these options are about."""
    made = [GOOD_CALLS, GOOD_CALLS, calls_with(ARGUMENTS)]
    words = [WORDS]
    if "result_references" in options:
        made += [calls_with(REFERRING), st.just(call("echo", text="$$echo-res-1"))]
    if "completion_tools" in options:
        ends = (call("final_answer", answer="done"), call("cannot_complete", reason="no"))
        made += [st.sampled_from([*ends, call("final_answer")])] * 2
    if "awaiting_input" in options:
        asks = '{"requiresInput": true, "message": "which?"}'
        made += [st.sampled_from([call("delete", name="x"), call("echo", text=asks)])] * 2
    if "subagents" in options:
        made += [st.sampled_from([call(name, task="x") for name in ("helper", "bare")])] * 3
    if "repair_tool_names" in options:
        made += [st.sampled_from([call(name) for name in ("Echo", "echos", "e_cho", "counts")])] * 2
    if "text_protocol" in options:
        words += [REACT_WORDS, REACT_WORDS]
    good = st.lists(weighted(*made), min_size=1, max_size=3).map(lambda some: calls(*some))
    said = st.one_of(words).map(say)
    likely = [good] * 8 + [said]
    if "continue_cut" in options:
        likely += [st.just(say("one,", finish_reason="length"))] * 2
    if "final_summary" in options:
        likely += [st.just(say("wait", finish_reason="pause"))] * 2
    if "preparation" in options:
        likely += [st.just(say('@city := "Lima"'))] * 2
    cut = st.builds(
        lambda text, why: say(text, finish_reason=why), st.one_of(words), FINISH_REASONS
    )
    anything = st.fixed_dictionaries(
        {},
        optional={
            "content": st.one_of(words),
            "reasoning": st.sampled_from(["", "why", "R" * 300, "<think>"]),
            "tool_calls": st.lists(st.one_of(made), max_size=4),
            "finish_reason": FINISH_REASONS,
        },
    )
    turns = st.lists(weighted(*likely, cut, anything), min_size=1, max_size=7)
    last = weighted(st.just([say("done")]), said.map(lambda turn: [turn]), st.just([]))
    return st.tuples(turns, last).map(lambda parts: [*parts[0], *parts[1]])


# What a user decides


HELPER = {"name": "helper", "description": "Helps.", "system_prompt": "You help.", "max_turns": 3}
USER = {"system_prompt": "You are Ann.", "stop": "STOP", "max_turns": 2}
BARE = {"name": "bare", "description": "Asks its caller's model.", "max_turns": 2}


def some(name: str, *values: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.sampled_from(values).map(lambda value: {name: value})


def combine(*given: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(*given).map(merge)


def merge(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


def always_decide(decision: str) -> Approve:
    return lambda name, arguments: decision


FEATURES = (
    some("max_errors", 0, 1, 3),
    some("repeat_limit", 0, 2, 3),
    some("max_reasks", 0, 1),
    combine(some("max_cost_usd", 0.5, 1.0), some("cost_usd", 0.25, 0.5, None)),
    some("parallel_tools", False),
    some("bad_arguments", "resample"),
    some("repair_tool_names", True),
    some("continue_cut", 1, 2),
    some("final_summary", True),
    some("completion_tools", True),
    combine(
        some("check_expected", True),
        some("expected", "done", "41"),
        some("expected_attempts", 1, 2, 3),
    ),
    combine(
        some("awaiting_input", True),
        some("user_replies", (), ("yes",), ("which?", "no"), ("list all", "yes"), ("use echo",)),
    ),
    some("user_turns", ["And then?"], ["Go on.", "Go on."]),
    scripts({}).map(lambda script: {"simulated_user": {**USER, "script": script}}),
    some("simulated_user", {**USER, "script": [say("More?"), say("That is all. STOP")]}),
    some("result_references", True),
    some("observation_chars", 1, 10, 60),
    some("text_protocol", "react"),
    some("plan", True),
    some("preparation", "Find the city."),
    some("prefill_messages", [{"role": role, "content": "Hi"} for role in ("user", "assistant")]),
    some("ephemeral_system_prompt", "secret"),
    some("compact_after", 1, 2),
    combine(some("summarize_over_messages", 2, 4), some("summarize_keep", 1, 2)),
    combine(some("summarize_over_tokens", 100), some("summarize_keep", 1, 2)),
    scripts({}).map(lambda script: {"subagents": [{**HELPER, "script": script}, BARE]}),
    some("approve", *map(always_decide, ("approve", "always", "deny"))),
    some(
        "opening",
        [{"role": "system", "content": "Be brief."}, *OPENING],
        [*OPENING, {"role": "assistant", "content": "What?"}, {"role": "user", "content": "it"}],
    ),
)


class Scene(NamedTuple):
    """What is played, with what; see `play`."""

    script: list[Any]
    options: dict[str, Any]


ECHOED = calls(call("echo", text="x"))
DELETED = calls(call("delete", name="x"))
HELPED = calls(call("helper", task="x"))
SUMMARIES = {"summarize_over_messages": 4, "summarize_keep": 1}
SHORT_OF_MONEY = {"max_cost_usd": 0.5, "cost_usd": 0.25}
ONE_WORKING = {"subagents": [{**HELPER, "script": [ECHOED, say("x")]}]}
ONE_FAILING = {"subagents": [{**HELPER, "script": [say("")]}]}


def deep(more: str = "") -> dict[str, Any]:
    return calls({"name": "echo", "arguments": nested_json(300, more)})


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    bound = draw(st.sampled_from([{}, {}, *({"max_turns": turns} for turns in (1, 2, 3))]))
    options = merge([bound, *draw(st.lists(weighted(*FEATURES), max_size=7))])
    assume(go_together(options))
    return Scene(draw(scripts(options)), options)


def go_together(options: Mapping[str, Any]) -> bool:
    try:
        read_user_turns(options, own_options(options))
    except ValueError:
        return False
    return True


# Playing it


def limit_events(count: int, journal: Journal) -> Journal:
    left = itertools.count(count, -1)

    def bounded(event: Event) -> None:
        assert next(left), "the conversation does not end"
        journal(event)

    return bounded


class Enduring(ConversationRunner, frozen=True, kw_only=True):
    """A conversation as a batch runs it: one whose script is played out ends as `failed`."""

    async def run(self, **how: Any) -> Finish:
        if self.depth:
            return await super().run(**how)
        bounded = {
            **msgspec.structs.asdict(self),
            "journal": limit_events(MOST_EVENTS, self.journal),
        }
        try:
            return await ConversationRunner(**bounded).run(**how)
        except ModelError as error:
            return Finish("failed", f"{error.kind}: {error}")


class Unwatched(Enduring, frozen=True, kw_only=True):
    """Without anyone who receives events."""

    async def run(self, **how: Any) -> Finish:
        return await Enduring(**{**msgspec.structs.asdict(self), "on_event": None}).run(**how)


class Stage:
    """Where scripts are played, each in a workspace of its own."""

    def __init__(self, root: Path) -> None:
        self._roots = (root / str(n) for n in itertools.count())

    def play(
        self,
        scene: Scene,
        *,
        tools: Sequence[Tool] = IN_ORDER,
        past: Sequence[Event] = (),
        kind: type[ConversationRunner] = Enduring,
    ) -> Played:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(playing, "ConversationRunner", kind)
            taken_up = list(past) or None
            root = next(self._roots)
            return play(root, scene.script, tools=tools, past=taken_up, **scene.options)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage(tmp_path_factory.mktemp("stage"))


def own_options(options: Mapping[str, Any]) -> AgentOptions:
    """The options of the agent among all that a conversation is played with."""
    known = AgentOptions.model_fields.keys() - {"approve"}
    return AgentOptions(**{key: options[key] for key in known & options.keys()})


def terms_of(options: Mapping[str, Any]) -> ConversationSpec:
    return ConversationSpec(
        own_options(options),
        expected=options.get("expected"),
        user_replies=tuple(options.get("user_replies", ())),
        user_turns=tuple(options.get("user_turns", ())),
        tool_names=tuple(tool.name for tool in TOOLS),
    )


def conversations(trajectory: Trajectory) -> Iterator[Trajectory]:
    """A conversation and all those inside it."""
    yield trajectory
    for inner in trajectory.inner.values():
        yield from conversations(inner.trajectory)


def users_of(trajectory: Trajectory) -> list[Trajectory]:
    """The conversations of a simulated user, which store its words only."""
    return [one.trajectory for one in trajectory.inner.values() if one.name == SIMULATED_USER]


def check_pairing(played: Played) -> None:
    """Each call has one result, right behind its message and in call order.

    Calls at the end may be open where the endpoint failed, and within a subagent whose caller
    was ended by that.
    """
    for trajectory in conversations(played.trajectory):
        messages = trajectory.messages
        ids = [c["id"] for message in messages for c in message.get("tool_calls", ())]
        assert all(ids)
        assert len(set(ids)) == len(ids)
        waiting: list[tuple[str, str]] = []
        for message in messages:
            if message["role"] == "tool":
                assert (message["tool_call_id"], message["name"]) == waiting.pop(0)
            else:
                assert not waiting
            if message["role"] == "assistant":
                made = message.get("tool_calls", ())
                waiting = [(made["id"], made["function"]["name"]) for made in made]
        if waiting:
            assert played.status == "failed"
            assert messages[-1]["role"] == "assistant", "results of one turn come together"


# 1


@settings(CALM, max_examples=MANY)
@given(scene=scenes())
@example(scene=Scene([say(""), ECHOED, say("Action: echo")], {"text_protocol": "react"}))
@example(scene=Scene([deep(', "wrong": "$$"')], {"result_references": True}))
@example(scene=Scene([deep()], {"approve": always_decide("approve")}))
def test_every_call_has_an_id_of_its_own_and_one_result(stage: Stage, scene: Scene) -> None:
    check_pairing(stage.play(scene))


# 2


ANTHROPIC = ModelSettings(name="m", api="anthropic_messages", base_url=None, key_env=None)
OPENAI = ModelSettings(name="m", api="openai_chat", base_url=None, key_env=None)


def check_anthropic(request: Request, *, may_be_open: bool) -> None:
    body = anthropic_messages.request_body(ANTHROPIC, request)
    exact_json.dumps(body)
    sent = body["messages"]
    assert [m["role"] for m in sent] == (["user", "assistant"] * len(sent))[: len(sent)]
    called: list[str] = []
    for message in sent:
        content = message["content"]
        assert content
        blocks = content if isinstance(content, list) else []
        results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        assert results == called
        assert all(block["type"] == "tool_result" for block in blocks[: len(results)])
        called = [block["id"] for block in blocks if block["type"] == "tool_use"]
    assert may_be_open or not called


def check_openai(request: Request, *, may_be_open: bool) -> None:
    body = openai_chat.request_body(OPENAI, request)
    exact_json.dumps(body)
    sent = [message for message in body["messages"] if message["role"] != "system"]
    assert sent[0]["role"] == "user"
    called: list[str] = []
    for earlier, later in pairwise([{"role": "system"}, *sent]):
        assert later["role"] == "tool" or later["role"] != earlier["role"]
        if later["role"] == "tool":
            assert later["tool_call_id"] == called.pop(0)
        else:
            assert not called
            called = [made["id"] for made in later.get("tool_calls", ())]
    assert may_be_open or not called


@settings(CALM, max_examples=MANY)
@given(scene=scenes())
@example(scene=Scene([deep()], {}))
def test_both_apis_take_what_was_recorded_and_what_was_sent(stage: Stage, scene: Scene) -> None:
    played = stage.play(scene)
    for request in played.requests:
        check_anthropic(request, may_be_open=False)
        check_openai(request, may_be_open=False)
    failed = played.status == "failed"
    for trajectory in conversations(played.trajectory):
        # A subagent without a budget never began. A simulated user's own words are no request.
        if trajectory.messages and trajectory not in users_of(played.trajectory):
            check_anthropic(Request(trajectory.messages), may_be_open=failed)
            check_openai(Request(trajectory.messages), may_be_open=failed)


def mark(value: Any) -> str:
    return f"<|{exact_json.dumps(value, option=orjson.OPT_SORT_KEYS).decode()}|>"


def request_texts(body: Mapping[str, Any]) -> tuple[bytes, str]:
    """What a request says before its messages, and then all these in one text.

    The words of a message come last in it, so that words which are added to it only lengthen the
    text. Cache marks are no part of what is said.
    """
    text, system = "", body.get("system") or body.get("instructions")
    if isinstance(system, list):
        system = system[0]["text"]
    for message in body.get("messages") or body["input"]:
        blocks = message.get("content") or []
        blocks = [{"type": "text", "text": blocks}] if isinstance(blocks, str) else blocks
        rest = {key: message[key] for key in message.keys() - {"content", "tool_calls"}}
        text += mark(rest)
        for block in [*blocks, *message.get("tool_calls", ())]:
            block = {key: block[key] for key in block if key != "cache_control"}
            text += block["text"] if block.get("type") == "text" else mark(block)
    tools = [{**tool, "cache_control": None} for tool in body.get("tools", ())]
    return exact_json.dumps([system, tools]), text


CHAT_OPTIONS: Sequence[dict[str, Any]] = (
    {},
    {"blank_reasoning": True},
    {"reasoning_field": None},
    {"token_ids": True},
    {"reasoning_effort": "low", "provider": "openrouter"},
)
RESPONSES = ModelSettings(name="m", api="openai_responses", base_url=None, key_env=None)
BODIES = (
    *((openai_chat, replace(OPENAI, **more)) for more in CHAT_OPTIONS),
    (anthropic_messages, ANTHROPIC),
    (anthropic_messages, replace(ANTHROPIC, prompt_caching=False)),
    (openai_responses, RESPONSES),
)
REWRITING = ("compact_after", "summarize_over_messages", "summarize_over_tokens")
"""Options that shorten what was said before, as they are asked to."""


@settings(CALM, max_examples=MANY)
@given(scene=scenes(), body=st.sampled_from(BODIES))
@example(scene=Scene([ECHOED, say("x")], {"text_protocol": "react", "plan": True}), body=BODIES[0])
@example(scene=Scene([ECHOED] * 3 + [say("x")], {"preparation": "Find it."}), body=BODIES[0])
@example(
    scene=Scene([DELETED, say("x")], {"awaiting_input": True, "user_replies": ["yes"]}),
    body=BODIES[0],
)
@example(scene=Scene([say("a", finish_reason="pause")] * 3, {}), body=BODIES[0])
def test_each_request_begins_with_all_that_the_one_before_said(
    stage: Stage, scene: Scene, body: tuple[Any, ModelSettings]
) -> None:
    """What an endpoint has cached of a conversation holds for all of its later requests."""
    assume(not scene.options.keys() & {*REWRITING})
    before: dict[str, tuple[bytes, str]] = {}
    for request in stage.play(scene).requests:
        assert request.conversation
        dialect, asked = body
        head, text = request_texts(dialect.request_body(asked, request))
        if request.conversation in before:
            earlier = before[request.conversation]
            assert head == earlier[0]
            assert text.startswith(earlier[1])
        before[request.conversation] = head, text


# 3


def state(trajectory: Trajectory) -> dict[str, Any]:
    """All that a conversation remembers, and in the same way what is inside it."""
    own = {k: v for k, v in vars(trajectory).items() if not isinstance(v, Trajectory)}
    inner = {k: (one.name, state(one.trajectory)) for k, one in trajectory.inner.items()}
    return {**own, "inner": inner, "tally": vars(trajectory.tally)}


@settings(CALM, max_examples=MANY)
@given(scene=scenes())
@example(scene=Scene([HELPED], {**ONE_FAILING, "max_cost_usd": 0.5, "cost_usd": 0.5}))
@example(
    scene=Scene([DELETED, say("done")], {"awaiting_input": True, "user_replies": ["yes"]}),
)
def test_record_and_journal_give_the_conversation_back(stage: Stage, scene: Scene) -> None:
    played = stage.play(scene)
    record = played.trajectory.to_record()
    assert exact_json.loads(exact_json.dumps(record)) == record
    journaled = exact_json.loads(exact_json.dumps(played.events))
    assert journaled == played.events
    replayed = Trajectory(scene.options.get("opening", OPENING), usable_prefix(journaled))
    assert replayed.to_record() == record
    assert list(replayed.inner) == list(played.trajectory.inner)
    assert state(replayed) == state(played.trajectory)
    assert next_step(replayed, terms_of(scene.options)) == next_step(
        played.trajectory, terms_of(scene.options)
    )


# 4


def replies_in(events: Sequence[Event], name: str = "") -> Iterator[tuple[str, ReplyEvent]]:
    """All replies with the name of the conversation that they belong to, inner ones included."""
    for event in events:
        if event["kind"] == "sub":
            yield from replies_in([event["event"]], event["name"])
        elif event["kind"] == "reply":
            yield name, event


def check_numbered(events: Sequence[Event]) -> None:
    """Every turn was taken once."""
    turns = [e["turn"] for e in events if e["kind"] == "reply" and "discarded" not in e]
    assert turns == list(range(1, len(turns) + 1))


@settings(CALM, max_examples=FEW)
@given(scene=scenes(), later=st.integers(1, 4))
@example(
    scene=Scene([ECHOED, ECHOED, say(""), say("a"), say("b")], SUMMARIES),
    later=1,
)
@example(scene=Scene([ECHOED, ECHOED, say("x")], SUMMARIES), later=1)
@example(scene=Scene([ECHOED, ECHOED, say("x")], {**SUMMARIES, **SHORT_OF_MONEY}), later=3)
@example(scene=Scene([HELPED, say("x")], {**ONE_WORKING, **SHORT_OF_MONEY}), later=1)
def test_a_conversation_resumed_after_any_event_ends_the_same(
    stage: Stage, scene: Scene, later: int
) -> None:
    """With tools that may be called again; killed once more `later` events after that."""
    whole = stage.play(scene, tools=ECHO)
    count = len(whole.requests)
    for length in range(1, len(whole.events)):
        past = exact_json.loads(exact_json.dumps(whole.events[:length]))
        assert usable_prefix(past) == past
        resumed = stage.play(scene, tools=ECHO, past=past)
        again = stage.play(scene, tools=ECHO, past=resumed.events[: length + later])
        for one, known in ((resumed, past), (again, resumed.events[: length + later])):
            assert one.end == whole.end
            assert one.messages == whole.messages
            assert one.trajectory.cost_usd() == whole.trajectory.cost_usd()
            assert len(one.requests) == count - len(list(replies_in(known)))
            check_pairing(one)


@settings(CALM, max_examples=FEW)
@given(scene=scenes(), later=st.integers(1, 4))
def test_a_conversation_resumed_after_any_event_repeats_no_paid_call(
    stage: Stage, scene: Scene, later: int
) -> None:
    """With tools that must not be called again too."""
    whole = stage.play(scene)
    for length in range(1, len(whole.events)):
        past = whole.events[:length]
        for _ in range(2):
            assert usable_prefix(past) == past
            resumed = stage.play(scene, past=past)
            assert resumed.events[: len(past)] == past
            check_pairing(resumed)
            check_numbered(resumed.events)
            check_not_again(resumed, past, scene)
            check_replies(resumed.events, scene)
            past = resumed.events[: length + later]


def check_not_again(resumed: Played, past: Sequence[Event], scene: Scene) -> None:
    """What may have been running when the process died was run again only where that is safe."""
    messages = resumed.trajectory.messages
    names = {c["id"]: c["function"]["name"] for m in messages for c in m.get("tool_calls", ())}
    for resume in resumed.trajectory.resumes:
        assert not {names[id] for id in resume["repeated"]} & NOT_AGAIN
        assert {names[id] for id in resume["interrupted"]} <= NOT_AGAIN
    failures = {
        event["message"]["tool_call_id"]: event["message"].get("details", {}).get("failure")
        for event in resumed.events
        if event["kind"] == "result"
    }
    killed = Trajectory(scene.options.get("opening", OPENING), past)
    ids = [made["id"] for _, made in killed.open_calls()]
    in_order = "parallel_tools" in scene.options or "count" in map(names.get, ids)
    for id in ids[:1] if in_order else ids:
        if names[id] in NOT_AGAIN:
            assert failures[id] in ("interrupted", "not_run")


# 5


def arguments_of(scripted: Mapping[str, Any]) -> str:
    arguments = scripted.get("arguments", {})
    return arguments if isinstance(arguments, str) else exact_json.dumps(arguments).decode()


def check_reply(reply: ReplyEvent, turn: Mapping[str, Any]) -> None:
    """The reply is a turn of the script, but for repairs that are marked."""
    message = reply["message"]
    assert message["content"] == turn.get("content", "")
    assert message.get("reasoning", "") == turn.get("reasoning", "")
    named = {repair["call"]: repair["name"] for repair in message.get("repairs", ())}
    made = [(made["id"], made["function"]) for made in message.get("tool_calls", ())]
    scripted = turn.get("tool_calls", ())
    assert [(named.get(id, function["name"]), function["arguments"]) for id, function in made] == [
        (one["name"], arguments_of(one)) for one in scripted
    ]
    implied = "tool_calls" if scripted else "stop"
    assert reply["finish_reason"] == (turn.get("finish_reason") or implied)


def check_step(reply: ReplyEvent, turn: Mapping[str, Any]) -> None:
    """What was read out of a text stands in it."""
    message = reply["message"]
    text = turn.get("content", "")
    assert message["content"] in text
    for function in (made["function"] for made in message.get("tool_calls", ())):
        assert function["name"] in text or "repairs" in message
        given = function["arguments"]
        # An input that is no object is the value of the only parameter.
        assert given in text or all(value in text for value in exact_json.loads(given).values())


def check_replies(events: Sequence[Event], scene: Scene) -> None:
    """The replies of all conversations that ask the main model are its script, in order."""
    others = (HELPER["name"], SIMULATED_USER)
    replies = [reply for name, reply in replies_in(events) if name not in others]
    assert len(replies) <= len(scene.script)
    for reply, turn in zip(replies, scene.script, strict=False):
        is_text = "text_protocol" in scene.options and not turn.get("tool_calls")
        (check_step if is_text else check_reply)(reply, turn)


@settings(CALM, max_examples=MANY)
@given(scene=scenes())
@example(scene=Scene([say("<think>hm</think>done")], {}))
def test_a_record_holds_only_what_the_model_said(stage: Stage, scene: Scene) -> None:
    played = stage.play(scene)
    check_replies(played.events, scene)
    given_before = len(scene.options.get("opening", OPENING))
    said = [m for m in played.messages[given_before:] if m["role"] == "assistant"]
    replies = [event for event in played.events if event["kind"] == "reply"]
    assert said == [reply["message"] for reply in replies if "discarded" not in reply]
    for reply in played.trajectory.discarded:
        _, rest = split_inline_reasoning(reply["message"]["content"])
        assert reply["discarded"] != "blank" or not rest.strip()
        assert reply["discarded"] != "unclosed_reasoning" or opens_reasoning(rest)
    if not scene.options.get("repair_tool_names"):
        names = [r for m in said for r in m.get("repairs", ()) if "name" in r]
        assert not names


# 6


@settings(CALM, max_examples=MANY)
@given(scene=scenes())
@example(
    scene=Scene([say("a", finish_reason="length"), say("b")], {"max_turns": 1, "continue_cut": 1})
)
@example(
    scene=Scene(
        [DELETED, say("done")], {"max_turns": 1, "awaiting_input": True, "user_replies": ["yes"]}
    )
)
@example(
    scene=Scene(
        [ECHOED, say("a", finish_reason="pause"), say("b")], {"max_turns": 1, "final_summary": True}
    )
)
@example(
    scene=Scene(
        [calls(call("final_answer", answer="a"), call("delete", name="x"))],
        {"completion_tools": True, "awaiting_input": True},
    )
)
@example(scene=Scene([say("")], {"max_reasks": 0, "max_cost_usd": 0.5, "cost_usd": 1.0}))
@example(
    scene=Scene(
        [say("a", finish_reason="length")] * 2,
        {"preparation": "p", "max_cost_usd": 0.5, "cost_usd": 0.5},
    )
)
def test_every_conversation_ends_with_a_known_status_and_a_reason(
    stage: Stage, scene: Scene
) -> None:
    """That there is an ending at all is watched by `Enduring`."""
    played = stage.play(scene)
    assert played.status in get_args(Status)
    if played.status in ("errors", "repeat", "budget", "awaiting_input"):
        assert played.end.reason
        assert played.end.reason.strip()
    conversation, checked = played.trajectory, own_options(scene.options)
    assert conversation.turns <= checked.max_turns + checked.final_summary
    # The order of the rules: budget, ..., completed, awaiting_input, ..., errors.
    if (budget := checked.max_cost_usd) is not None:
        is_over = conversation.unpriced > 0 or conversation.spent_usd > budget
        assert not is_over or played.status in ("budget", "failed")
        assert played.status != "budget" or is_over or conversation.spent_usd == budget
    assert played.status != "awaiting_input" or conversation.final_call() is None


# 7


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        timed = ("started_at", "duration_s", "at")
        return {k: without_times(v) for k, v in value.items() if k not in timed}
    return [without_times(item) for item in value] if isinstance(value, list) else value


@settings(CALM, max_examples=4 * FEW)
@given(scene=scenes())
@pytest.mark.slow
def test_events_change_nothing(stage: Stage, scene: Scene) -> None:
    watched, unwatched = (stage.play(scene, kind=kind) for kind in (Enduring, Unwatched))
    assert not unwatched.told
    assert watched.end == unwatched.end
    records = (played.trajectory.to_record() for played in (watched, unwatched))
    one, other = map(without_times, records)
    assert one == other


# 8


PROMPTS = st.lists(st.tuples(st.booleans(), st.sampled_from(["go", "yes", "more"])), max_size=5)


@settings(CALM, max_examples=3 * FEW // 2)
@given(scene=scenes(), first=st.sampled_from(["go", "list all"]), prompts=PROMPTS)
@example(scene=Scene([say("", finish_reason="length")], {}), first="go", prompts=[])
@pytest.mark.slow
def test_a_session_and_its_fork_never_change_each_other(
    scene: Scene, first: str, prompts: list[tuple[bool, str]]
) -> None:
    with new_session(scene) as session:
        session.new_prompt(first)
        check_history(session.messages)
        with session.fork() as fork:
            assert fork.messages == session.messages
            for is_forks, text in prompts:
                one, other = (fork, session) if is_forks else (session, fork)
                before = exact_json.dumps([other.messages, other.trajectory.to_record()])
                one.new_prompt(text)
                assert exact_json.dumps([other.messages, other.trajectory.to_record()]) == before
            before = exact_json.dumps([session.messages, session.trajectory.to_record()])
            scribble(fork.messages)
            assert exact_json.dumps([session.messages, session.trajectory.to_record()]) == before


@settings(CALM, max_examples=3 * FEW // 2)
@given(scene=scenes(), prompts=st.lists(st.sampled_from(["go", "yes", "more"]), max_size=4))
@example(scene=Scene([say("", finish_reason="length")], {}), prompts=["go"])
@example(scene=Scene([HELPED], ONE_FAILING), prompts=["go"])
@example(
    scene=Scene([say("Action: echo"), say("Final Answer: x")] * 2, {"text_protocol": "react"}),
    prompts=["go", "go"],
)
def test_another_prompt_can_follow_any_ending(scene: Scene, prompts: list[str]) -> None:
    with new_session(scene) as session:
        for text in prompts:
            session.new_prompt(text)
            check_history(session.messages)
            ids = [made["id"] for m in session.messages for made in m.get("tool_calls", ())]
            assert len(set(ids)) == len(ids)
            check_anthropic(Request(session.messages), may_be_open=False)
            check_openai(Request(session.messages), may_be_open=False)


def new_session(scene: Scene) -> AgentSession:
    options = own_options(scene.options).model_dump(mode="json", exclude_defaults=True)
    agent = AIAgent("scripted", script=scene.script, enabled_toolsets=["none"], **options)
    common = msgspec.structs.replace(agent._setup.common, tools=IN_ORDER)
    history = scene.options.get("opening", OPENING)[:-1]
    journal = limit_events(10 * MOST_EVENTS, lambda event: None)
    setup = msgspec.structs.replace(agent._setup, common=common, journal=journal)
    return AgentSession(setup, history=history)


def scribble(value: Any) -> None:
    """Change everything in a value that can be changed."""
    for item in list(value.values() if isinstance(value, dict) else value):
        if isinstance(item, dict | list):
            scribble(item)
    if isinstance(value, dict):
        value |= dict.fromkeys(value, "scribbled")
    value.clear()


# 9


PROVENANCE = Provenance(
    sandbox=None,
    seed=0,
    config_digest="c",
    versions={},
)
IN_TURN = re.compile(r"system human(?: gpt(?: tool gpt)* human)*(?: gpt(?: tool gpt)*(?: tool)?)?")


@pytest.mark.slow
@settings(CALM, max_examples=8 * FEW)
@given(scene=scenes())
@example(
    scene=Scene(
        [ECHOED, calls(call("final_answer", answer="$$echo-res-1!"))],
        {"result_references": True, "completion_tools": True},
    )
)
@example(scene=Scene([{"content": "0\r"}, {"content": "done"}], {}))
@example(
    scene=Scene(
        [ECHOED, {"content": "done"}],
        {
            "simulated_user": {
                "system_prompt": "You are Ann.",
                "stop": "STOP",
                "max_turns": 2,
                "script": [{"content": "done", "finish_reason": "tool_calls"}, {"content": "done"}],
            }
        },
    )
)
def test_a_record_is_rejected_or_becomes_a_row_with_alternating_roles(
    stage: Stage, scene: Scene
) -> None:
    played = stage.play(scene)
    record = decode_record(record_of(played, scene))
    try:
        row = to_row(record)
    except Rejected as rejected:
        if rejected.reason in NEVER:
            raise
        return
    assert exact_json.loads(dumps_row(row)).keys() == row.keys()
    entries = row["conversations"]
    said = (split_inline_reasoning(entry["value"]).rest for entry in entries)
    assert all(text.strip() for text in said), "a turn of thoughts alone says nothing"
    assert IN_TURN.fullmatch(" ".join(entry["from"] for entry in entries))
    for earlier, later in pairwise(entries):
        made, answered = earlier["value"].count("<tool_call>\n"), blocks_in(later)
        assert earlier["from"] != "gpt" or later["from"] != "tool" or made == answered
    assert row["completed"] == (played.status == "completed")
    if row["completed"]:
        assert entries[-1]["from"] == "gpt"
        # A text that was cut and continued is one answer in two turns, one after a pause not.
        answer = split_inline_reasoning(played.trajectory.final_text()).rest.strip()
        told = split_inline_reasoning(entries[-1]["value"]).rest.strip()
        assert told.endswith(answer) or answer.endswith(told)


NEVER = (
    Reason.ROLES_OUT_OF_ORDER,
    Reason.REPEATED_CALL_ID,
    Reason.UNANSWERED_CALL,
    Reason.STRAY_RESULT,
    Reason.UNFINISHED,
    Reason.NOT_TEXT,
)
"""What the runtime, and not the model, would have to answer for."""


def blocks_in(entry: Mapping[str, str]) -> int:
    return entry["value"].count("<tool_response>\n")


def record_of(played: Played, scene: Scene) -> bytes:
    """What a batch writes of it."""
    columns = {"prompt": "go", "script": scene.script}
    options = own_options(scene.options)
    setup = set_up(options, SETTINGS, enabled_toolsets=["none"], disabled_toolsets=())
    record = make_record(
        Task(id="p/0", prompt_id="p", sample=0, input_digest="d", columns=columns),
        played.trajectory,
        end=played.end,
        spec=terms_of(scene.options),
        setup=msgspec.structs.replace(setup, tools=IN_ORDER),
        failure=None,
        attempt=1,
        provenance=PROVENANCE,
    )
    return as_stored(record).line
