"""The options of a conversation: what is put around its tools and its model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.loop.acceptance import repair_names
from agent.messages.message import Message
from agent.options import LIMITS, AgentOptions, inherit_options, row_options
from agent.setup import set_up
from agent.views.views import compact, first_compacted_reply
from batch_trajectories.basics.text import clip
from run_agent import AIAgent
from tests.helpers.answering import JSON, answering
from tests.helpers.builders import chat_reply
from tests.helpers.playing import SETTINGS, call, call_echo, calls, play, say

ANSWER = say("done")
SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER: Message = {"role": "user", "content": "go"}


class TestReferences:
    """Arguments can refer to earlier results by name."""

    def test_a_result_replaces_its_name(self, tmp_path: Path) -> None:
        script = [
            call_echo("a"),
            calls(call("count"), call("echo", text="<$$echo-res-1> $$ $5 $$VAR")),
            call_echo("$$echo-res-3"),
            ANSWER,
        ]
        played = play(tmp_path, script, result_references=True)
        texts = [result["content"].partition("\n[stored as")[0] for result in played.results]
        assert texts[0] == "a"
        assert texts[2:] == ["<a> $$ $5 $$VAR"] * 2
        assert "$$count-res-2" in played.results[1]["content"]

    def test_the_record_keeps_what_the_model_wrote(self, tmp_path: Path) -> None:
        played = play(
            tmp_path, [call_echo("a"), call_echo("$$echo-res-1"), ANSWER], result_references=True
        )
        arguments = played.messages[3]["tool_calls"][0]["function"]["arguments"]
        assert json.loads(arguments) == {"text": "$$echo-res-1"}

    @pytest.mark.parametrize("name", ["echo-res-7", "other-res-1", "fail-res-1"])
    def test_an_unknown_name_is_an_error_and_nothing_runs(self, tmp_path: Path, name: str) -> None:
        script = [calls(call("fail")), call_echo(f"$${name}"), ANSWER]
        played = play(tmp_path, script, result_references=True)
        assert played.results[1]["details"] == {"failure": "unknown_reference"}
        assert played.trajectory.tally.errors == 2

    def test_it_works_in_a_final_answer(self, tmp_path: Path) -> None:
        script = [call_echo("a"), calls(call("final_answer", answer="$$echo-res-1!"))]
        played = play(tmp_path, script, result_references=True, completion_tools=True)
        assert played.trajectory.final_text() == "a!"

    @pytest.mark.parametrize("name", ["echo-res-" + "9" * 5000, "count-res-1"])
    def test_a_name_that_cannot_be_is_a_result_too(self, tmp_path: Path, name: str) -> None:
        played = play(tmp_path, [call_echo(f"$${name}"), ANSWER], result_references=True)
        assert played.results[0]["details"] == {"failure": "unknown_reference"}

    def test_replaced_references_have_a_limit(self, tmp_path: Path) -> None:
        script = [call_echo("x" * 90_000), call_echo("$$echo-res-1 " * 3000), ANSWER]
        played = play(tmp_path, script, result_references=True)
        assert "longer than 1000000 characters" in played.results[1]["content"]

    def test_too_deep_arguments_are_left_to_their_check(self, tmp_path: Path) -> None:
        deep = '{"text": ' + "[" * 300 + '"$$echo-res-1"' + "]" * 300 + "}"
        script = [call_echo("a"), calls({"name": "echo", "arguments": deep}), ANSWER]
        played = play(tmp_path, script, result_references=True)
        assert played.results[1]["details"]["failure"] == "invalid_arguments"

    def test_other_rules_do_not_see_the_names(self, tmp_path: Path) -> None:
        """Equal results stay equal, and a question stays a question."""
        assert play(tmp_path, [call_echo()] * 4, result_references=True).status == "repeat"
        ask = calls(call("delete", name="x"))
        given: dict[str, Any] = {"result_references": True, "awaiting_input": True}
        assert play(tmp_path, [ask, ANSWER], **given).status == "awaiting_input"

    def test_after_a_reply_of_the_user_it_is_what_the_tool_said_last(self, tmp_path: Path) -> None:
        script = [calls(call("delete", name="x")), call_echo("$$delete-res-1"), ANSWER]
        played = play(
            tmp_path, script, result_references=True, awaiting_input=True, user_replies=["yes"]
        )
        assert played.results[1]["content"].startswith("deleted x: yes\n[stored as")

    def test_names_survive_a_crash(self, tmp_path: Path) -> None:
        script = [calls(call("echo", text="a"), call("echo", text="b")), call_echo("$$echo-res-2")]
        whole = play(tmp_path, [*script, ANSWER], result_references=True)
        for length in range(1, 5):
            past = whole.events[:length]
            again = play(tmp_path, [*script, ANSWER], past=past, result_references=True)
            assert again.messages == whole.messages


class TestApproval:
    """A hook decides before each call of a tool."""

    def test_a_denied_call_is_not_run_and_its_result_says_so(self, tmp_path: Path) -> None:
        played = play(tmp_path, [calls(call("count")), ANSWER], approve=lambda name, args: "deny")
        (result,) = played.results
        assert result["content"] == "Error: the call of count was not approved"
        assert result["details"] == {"failure": "denied"}

    @pytest.mark.parametrize(
        ("decision", "content"),
        [
            (("deny", " only inside src/ "), ": only inside src/"),
            (("deny", ""), ""),
            (("no", "ask me first"), ": ask me first"),
            (("deny", "x" * 9_000), ": " + clip("x" * 9_000, max_chars=2_000)),
            (("deny", None), ""),
        ],
    )
    def test_the_model_gets_the_reason(self, tmp_path: Path, decision: Any, content: str) -> None:
        played = play(tmp_path, [call_echo(), ANSWER], approve=lambda name, args: decision)
        (result,) = played.results
        assert result["content"] == f"Error: the call of echo was not approved{content}"
        assert result["details"] == {"failure": "denied"}

    def test_a_pair_approves_too(self, tmp_path: Path) -> None:
        played = play(
            tmp_path, [call_echo(), ANSWER], approve=lambda name, args: ("approve", "fine")
        )
        assert not played.results[0]["is_error"]

    def test_always_holds_for_these_arguments_in_any_order(self, tmp_path: Path) -> None:
        questions: list[tuple[str, Mapping[str, Any]]] = []

        def approve(name: str, arguments: Mapping[str, Any]) -> str:
            questions.append((name, arguments))
            return "always"

        again = calls({"name": "delete", "arguments": ' {"name":"x"}'})
        script = [calls(call("delete", name="x")), again, calls(call("delete", name="y")), ANSWER]
        play(tmp_path, script, approve=approve)
        assert questions == [("delete", {"name": "x"}), ("delete", {"name": "y"})]

    @pytest.mark.parametrize("arguments", ["", "  ", '{"text": ' + "[" * 300 + "]" * 300 + "}"])
    def test_no_arguments_go_past_the_hook(self, tmp_path: Path, arguments: str) -> None:
        """Blank ones are none, and the tool would run with them."""
        script = [calls({"name": "echo", "arguments": arguments}), ANSWER]
        played = play(tmp_path, script, approve=lambda name, args: "deny")
        assert played.results[0]["details"] == {"failure": "denied"}

    @pytest.mark.parametrize("decision", ["", "yes", None])
    def test_anything_but_a_decision_denies(self, tmp_path: Path, decision: Any) -> None:
        played = play(tmp_path, [call_echo(), ANSWER], approve=lambda name, args: decision)
        assert played.results[0]["is_error"]

    def test_anything_that_a_hook_does_is_a_decision(self, tmp_path: Path) -> None:
        class Odd:
            def __eq__(self, other: object) -> bool:
                raise RuntimeError("odd")

        def leave(name: str, arguments: Mapping[str, Any]) -> str:
            raise SystemExit(3)

        async def call_off(name: str, arguments: Mapping[str, Any]) -> str:
            raise asyncio.CancelledError

        hooks: list[Any] = [leave, call_off, lambda name, arguments: Odd()]
        for hook in hooks:
            played = play(tmp_path, [call_echo(), ANSWER], approve=hook)
            assert (played.status, played.results[0]["is_error"]) == ("completed", True)

    def test_a_hook_may_be_async_and_one_that_fails_denies(self, tmp_path: Path) -> None:
        async def approve(name: str, arguments: Mapping[str, Any]) -> str:
            return "approve"

        def broken(name: str, arguments: Mapping[str, Any]) -> str:
            raise RuntimeError("hook")

        assert not play(tmp_path, [call_echo(), ANSWER], approve=approve).results[0]["is_error"]
        assert play(tmp_path, [call_echo(), ANSWER], approve=broken).results[0]["is_error"]

    @pytest.mark.parametrize(
        ("place", "message"),
        [("no.such:hook", "cannot import"), ("tests.helpers.playing:OPENING", "not callable")],
    )
    def test_a_hook_is_named_by_its_place(self, place: str, message: str) -> None:
        """For the batch runner: MODULE:FUNCTION."""
        options = AgentOptions(approve=place)
        with pytest.raises(ValueError, match=message):
            set_up(options, SETTINGS, enabled_toolsets=["none"], disabled_toolsets=())


def test_long_results_are_cut_and_the_whole_is_kept(tmp_path: Path) -> None:
    """A mark shows the size of the cut, and the record has the whole result."""
    played = play(tmp_path, [call_echo("x" * 50), ANSWER], observation_chars=10)
    (result,) = played.results
    assert result["content"] == "xxxxx\n[... 40 characters cut ...]\nxxxxx"
    assert result["details"]["whole_content"] == "x" * 50


class TestNameRepair:
    """Repair is off by default, and a repaired name says so."""

    @pytest.mark.parametrize("written", ["Echo", "echos", "e_cho", "ECHO"])
    def test_a_near_miss_is_repaired_with_a_mark(self, tmp_path: Path, written: str) -> None:
        played = play(tmp_path, [calls(call(written)), ANSWER], repair_tool_names=True)
        message = played.messages[1]
        assert message["tool_calls"][0]["function"]["name"] == "echo"
        assert message["repairs"] == [{"call": "call_1_0", "name": written}]

    def test_a_far_miss_and_a_known_name_are_left(self, tmp_path: Path) -> None:
        played = play(
            tmp_path, [calls(call("write"), call("echo")), ANSWER], repair_tool_names=True
        )
        assert "repairs" not in played.messages[1]
        assert played.results[0]["is_error"]

    @pytest.mark.parametrize(
        ("written", "found"),
        [
            ("ReadFile", None),
            ("readfiles", None),
            ("readFile", "readFile"),
            ("WriteFile", "write_file"),
        ],
    )
    def test_of_names_that_are_equally_similar_none_is_taken(
        self, written: str, found: str | None
    ) -> None:
        """Those that differ only in case and dashes are equally similar to all that is written."""
        message = Message(
            role="assistant",
            content="",
            tool_calls=[
                {"id": "a", "type": "function", "function": {"name": written, "arguments": "{}"}}
            ],
        )
        repair_names(message, ["read_file", "readFile", "write_file"])
        assert message["tool_calls"][0]["function"]["name"] == (found or written)

    def test_off_by_default(self, tmp_path: Path) -> None:
        assert play(tmp_path, [calls(call("Echo")), ANSWER]).results[0]["is_error"]


class TestViews:
    """What the model is shown and the record does not hold, and the other way round."""

    def test_ephemeral_prompt_and_prefill_are_seen_and_not_recorded(self, tmp_path: Path) -> None:
        prefill = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
        played = play(
            tmp_path, [ANSWER], ephemeral_system_prompt="secret", prefill_messages=prefill
        )
        roles = [message["role"] for message in played.requests[0].messages]
        assert roles == ["system", "user", "assistant", "user"]
        assert "secret" in played.seen()
        assert played.roles == ["user", "assistant"]
        assert "secret" not in json.dumps(played.trajectory.to_record())

    def test_a_system_message_of_its_own_wins(self, tmp_path: Path) -> None:
        played = play(tmp_path, [ANSWER], opening=[SYSTEM, USER], ephemeral_system_prompt="secret")
        assert "secret" not in played.seen()

    def test_compaction_is_a_view(self, tmp_path: Path) -> None:
        """Long reasoning and arguments are shortened to exactly 120 characters."""
        script = [
            call_echo("A" * 300, reasoning="R" * 300, content="one"),
            call_echo("B" * 109, reasoning="S" * 120, content="two"),
            call_echo("C" * 300, content="three"),
            ANSWER,
        ]
        played = play(tmp_path, script, compact_after=2)
        plain = play(tmp_path, script)
        assert played.messages == plain.messages, "the record does not know of the view"
        shown = [m for m in played.requests[-1].messages if m["role"] == "assistant"]
        assert shown[0]["reasoning"] == "R" * 120 + "..."
        arguments = json.loads(shown[0]["tool_calls"][0]["function"]["arguments"])
        assert list(arguments) == ["_compacted"]
        assert shown[1:] == [m for m in plain.requests[-1].messages if m["role"] == "assistant"][1:]
        assert [m["content"] for m in shown] == ["one", "two", "three"]

    def test_a_conversation_of_calls_alone_is_never_compacted(self, tmp_path: Path) -> None:
        """Only replies with text count."""
        script = [call_echo(f"{n}" * 300) for n in range(4)]
        played = play(tmp_path, [*script, ANSWER], compact_after=1)
        assert "_compacted" not in played.seen()

    def test_signed_blocks_are_left_out_whole(self, tmp_path: Path) -> None:
        signed: Message = {
            "role": "assistant",
            "content": "one",
            "reasoning": "R" * 300,
            "provider_blocks": {"api": "x", "blocks": [{"signature": "s"}]},
        }
        later: Message = {"role": "assistant", "content": "two"}
        messages = [USER, signed, USER, later, USER, later]
        assert "provider_blocks" not in compact(messages, 1)[1]
        assert "provider_blocks" in signed
        assert first_compacted_reply(messages, 1) == 5
        assert first_compacted_reply(messages[:4], 1) == 4, "the last reply did not see it"
        assert first_compacted_reply(messages, 0) == 6


class TestSummary:
    """A summary replaces older messages in the view alone."""

    SCRIPT = (call_echo("a"), call_echo("b"), call_echo("c"), say("THE SUMMARY"), ANSWER)

    def test_older_messages_are_shown_as_a_summary(self, tmp_path: Path) -> None:
        played = play(tmp_path, self.SCRIPT, summarize_over_messages=6, summarize_keep=2)
        assert played.status == "completed"
        assert len(played.messages) == 8, "the record is whole"
        shown = played.requests[-1].messages
        assert [m["role"] for m in shown] == ["user", "assistant", "tool"]
        assert shown[0]["content"] == ("go\n\n[Summary of the conversation so far]\nTHE SUMMARY")
        record = played.trajectory.to_record()
        assert record["inner"][0]["name"] == "summary"
        assert record["api_calls"] == 5

    def test_the_task_is_never_summarized_away(self, tmp_path: Path) -> None:
        """Of a prompt with a history it is the last message of the user."""
        opening: list[Message] = [
            {"role": "user", "content": "old"},
            {"role": "assistant", "content": "old answer"},
            {"role": "user", "content": "the real task"},
        ]
        played = play(
            tmp_path, self.SCRIPT, opening=opening, summarize_over_messages=8, summarize_keep=2
        )
        shown = played.requests[-1].messages
        assert [m["role"] for m in shown] == ["user", "assistant", "tool"]
        assert shown[0]["content"].startswith("the real task\n\n[Summary of")

    def test_a_summary_survives_a_crash(self, tmp_path: Path) -> None:
        given: dict[str, Any] = {"summarize_over_messages": 6, "summarize_keep": 2}
        whole = play(tmp_path, self.SCRIPT, **given)
        resumed = play(tmp_path, self.SCRIPT, past=whole.events[:-1], **given)
        assert len(resumed.requests) == 1, "it is not paid for again"
        assert resumed.requests[0].messages == whole.requests[-1].messages

    def test_it_is_triggered_by_size_too(self, tmp_path: Path) -> None:
        script = [call_echo("a" * 900), call_echo("b" * 900), say("SUM"), ANSWER]
        played = play(tmp_path, script, summarize_over_tokens=400, summarize_keep=1)
        assert "SUM" in played.seen()

    def test_summaries_are_few(self, tmp_path: Path) -> None:
        """Each replaces as many messages as are kept, at any threshold."""
        script = [call_echo(f"{n}") for n in range(60)]
        played = play(tmp_path, script, max_turns=20, summarize_over_messages=5)
        # These replies are no summaries: those that fail are not tried again at once either.
        written = [inner.name for inner in played.trajectory.inner.values()]
        assert played.status == "max_turns"
        assert 0 < len(written) <= 20 * 2 / 8

    def test_summaries_that_fail_are_asked_for_ever_more_rarely(self, tmp_path: Path) -> None:
        """Each was paid for."""
        given: dict[str, Any] = {"summarize_over_messages": 4, "summarize_keep": 1}
        given["max_turns"] = 40
        script = [call_echo(f"{n}") for n in range(80)]  # none of them is a summary
        whole = play(tmp_path / "a", script, **given)
        assert whole.status == "max_turns"
        assert 3 <= len(whole.trajectory.inner) <= 7
        for length in range(1, len(whole.events), 7):
            past = whole.events[:length]
            resumed = play(tmp_path / f"{length}", script, past=past, **given)
            assert list(resumed.trajectory.inner) == list(whole.trajectory.inner)

    def test_summaries_that_the_endpoint_refuses_are_asked_for_ever_more_rarely(self) -> None:
        def answer(path: str, body: JSON) -> tuple[int, JSON]:
            if body["messages"][0]["role"] == "system":
                return 400, {"error": {"message": "no summaries here"}}
            n = len(body["messages"])
            function = {"name": "list_files", "arguments": json.dumps({"path": f"{n}"})}
            call = {"id": f"c{n}", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
            return 200, chat_reply(message)

        with answering(answer) as (url, requests):
            given: dict[str, Any] = {"summarize_over_messages": 4, "summarize_keep": 1}
            agent = AIAgent("m", "key", url, enabled_toolsets=["file"], max_turns=40, **given)
            with agent.start_session() as session:
                session.new_prompt("go")
        refused = [body for body in requests if body["messages"][0]["role"] == "system"]
        assert session.end.status == "max_turns"
        assert 3 <= len(refused) <= 7
        (first, *_) = session.trajectory.to_record()["inner"]
        assert first["notes"][0]["reason"] == "no_summary"
        assert "no summaries here" in first["notes"][0]["text"]

    def test_a_summary_that_uses_up_the_budget_ends_it_there(self, tmp_path: Path) -> None:
        given: dict[str, Any] = {"summarize_over_messages": 6, "summarize_keep": 2}
        played = play(tmp_path, self.SCRIPT, max_cost_usd=3.5, cost_usd=1.0, **given)
        assert (played.status, played.trajectory.cost_usd()) == ("budget", 4.0)

    def test_a_blank_summary_is_done_without(self, tmp_path: Path) -> None:
        script = [*self.SCRIPT[:3], say(" "), ANSWER]
        played = play(tmp_path, script, summarize_over_messages=6, summarize_keep=2)
        assert played.status == "completed"
        assert len(played.requests[-1].messages) == 7
        assert played.trajectory.api_calls() == 5, "it was paid for"


class TestPreparation:
    """Context is gathered before the task, in a conversation of its own."""

    FOUND = say('@city := "Lima"\n@temp: 19 "or so"\nnothing else')

    def test_the_findings_of_the_preparation_are_added_to_the_prompts(self, tmp_path: Path) -> None:
        played = play(
            tmp_path,
            [call_echo("look"), self.FOUND, ANSWER],
            opening=[SYSTEM, USER],
            preparation="Find the city.",
        )
        pieces = '@context-piece-1 := "Lima"\n@context-piece-2 := "19 \\"or so\\""'
        assert played.messages[0]["content"] == f"Be brief.\n\n{pieces}"
        assert played.messages[1]["content"] == f"go\n\n{pieces}"
        assert played.trajectory.turns == 1
        assert played.trajectory.to_record()["inner"][0]["name"] == "preparation"
        assert "Do not do the request itself" in played.seen(0)

    def test_it_may_have_fewer_tools(self, tmp_path: Path) -> None:
        script = [call_echo("look"), self.FOUND, call_echo("now"), ANSWER]
        given: dict[str, Any] = {"preparation": "Find it.", "preparation_toolsets": ()}
        played = play(tmp_path, script, **given)
        inner = played.trajectory.to_record()["inner"][0]
        assert inner["messages"][3]["details"] == {"failure": "unknown_tool"}
        assert played.results[0]["content"] == "now"
        with pytest.raises(ValueError, match="preparation_toolsets: web not on offer"):
            play(tmp_path, script, preparation="x", preparation_toolsets="web")

    def test_its_attempts_are_within_the_budget(self, tmp_path: Path) -> None:
        cut = say("", finish_reason="length")
        played = play(
            tmp_path,
            [call_echo("a"), cut, call_echo("b"), cut],
            preparation="Find it.",
            max_cost_usd=1.0,
            cost_usd=0.6,
        )
        assert (played.status, played.trajectory.cost_usd()) == ("budget", 1.2)

    def test_nothing_found_changes_nothing(self, tmp_path: Path) -> None:
        played = play(tmp_path, [say("no idea"), ANSWER], preparation="Find it.")
        assert played.messages[0] == USER

    def test_it_is_tried_again_and_then_fails_the_conversation(self, tmp_path: Path) -> None:
        cut = say("", finish_reason="length")
        played = play(tmp_path, [cut, self.FOUND, ANSWER], preparation="Find it.")
        assert played.status == "completed"
        played = play(tmp_path, [cut, cut], preparation="Find it.")
        assert (played.status, played.roles) == ("errors", ["user"])
        assert played.end.reason == "the preparation ended as length"

    @pytest.mark.parametrize("length", range(1, 8))
    def test_it_survives_a_crash(self, tmp_path: Path, length: int) -> None:
        script = [call_echo("look"), self.FOUND, ANSWER]
        whole = play(tmp_path, script, preparation="Find the city.")
        past = whole.events[:length]
        resumed = play(tmp_path, script, past=past, preparation="Find the city.")
        assert resumed.messages == whole.messages
        replies = sum('"reply"' in json.dumps(event) for event in past)
        assert len(resumed.requests) == 3 - replies


class TestSubagents:
    """An agent can be a tool of another agent."""

    HELPER: Mapping[str, Any] = {
        "name": "helper",
        "description": "Helps.",
        "system_prompt": "You help.",
        "script": [say("helped")],
    }

    def test_the_caller_sees_one_result_and_the_record_all(self, tmp_path: Path) -> None:
        ask = calls(call("helper", task="please"))
        played = play(tmp_path, [ask, ANSWER], subagents=[self.HELPER])
        assert played.status == "completed"
        assert played.results[0]["content"] == "helped"
        (inner,) = played.trajectory.to_record()["inner"]
        assert [m["role"] for m in inner["messages"]] == ["system", "user", "assistant"]
        assert inner["messages"][1]["content"] == "please"
        assert inner["key"] == "call_1_0"
        assert played.trajectory.api_calls() == 3

    def test_several_run_at_the_same_time(self, tmp_path: Path) -> None:
        twice = calls(call("helper", task="1"), call("helper", task="2"))
        played = play(tmp_path, [twice, ANSWER], subagents=[self.HELPER])
        assert [result["content"] for result in played.results] == ["helped", "helped"]

    def test_its_own_tools_and_limits(self, tmp_path: Path) -> None:
        worker = {
            **self.HELPER,
            "enabled_toolsets": ["file"],
            "max_turns": 2,
            "script": [
                calls(call("write_file", path="a", content="A")),
                calls(call("echo", text="not its tool")),
            ],
        }
        ask = calls(call("helper", task="x"))
        played = play(tmp_path / "w", [ask, ANSWER], subagents=[worker])
        assert (tmp_path / "w" / "a").read_text() == "A", "the workspace is shared"
        (result,) = played.results
        assert result["is_error"]
        assert "ended as max_turns" in result["content"]
        inner = played.trajectory.to_record()["inner"][0]
        assert inner["messages"][-1]["details"] == {"failure": "unknown_tool"}

    def test_one_without_a_model_asks_its_callers(self, tmp_path: Path) -> None:
        bare = {"name": "helper", "description": "Helps."}
        ask = calls(call("helper", task="please"))
        played = play(tmp_path, [ask, say("from the same script"), ANSWER], subagents=[bare])
        assert played.results[0]["content"] == "from the same script"

    def test_their_cost_counts_against_the_caller_s_budget(self, tmp_path: Path) -> None:
        ask = calls(call("helper", task="please"))
        given: dict[str, Any] = {"subagents": [self.HELPER], "cost_usd": 1.0}
        assert play(tmp_path, [ask, ANSWER], **given).trajectory.cost_usd() == 3.0
        played = play(tmp_path, [ask, ANSWER], max_cost_usd=1.5, **given)
        assert played.status == "budget"
        assert "ended as budget" in played.results[0]["content"]

    @pytest.mark.parametrize("length", range(1, 9))
    def test_it_resumes_inside_a_subagent_after_a_crash(self, tmp_path: Path, length: int) -> None:
        helper = {
            **self.HELPER,
            "enabled_toolsets": ["file"],
            "script": [calls(call("write_file", path="a", content="A")), say("helped")],
        }
        script = [calls(call("helper", task="x")), ANSWER]
        whole = play(tmp_path / "w", script, subagents=[helper])
        past = whole.events[:length]
        resumed = play(tmp_path / "w", script, past=past, subagents=[helper])
        assert resumed.status == "completed"
        assert resumed.results[0]["content"] == "helped"
        replies = sum('"reply"' in json.dumps(event) for event in past)
        assert len(resumed.requests) == 4 - replies, "nothing is paid for twice"

    def test_bad_arguments_are_a_result(self, tmp_path: Path) -> None:
        played = play(tmp_path, [calls(call("helper")), ANSWER], subagents=[self.HELPER])
        assert played.results[0]["details"] == {"failure": "invalid_arguments"}

    def test_subagents_that_call_each_other_have_a_depth_limit(self, tmp_path: Path) -> None:
        loop = {
            **self.HELPER,
            "subagents": ["helper"],
            "script": [calls(call("helper", task="deeper")), say("up")],
        }
        ask = calls(call("helper", task="x"))
        played = play(tmp_path, [ask, ANSWER], subagents=[loop], max_subagent_depth=2)
        outer = played.trajectory.to_record()["inner"][0]
        deepest = outer["inner"][0]
        assert deepest["messages"][-2]["details"] == {"failure": "unknown_tool"}

    @pytest.mark.parametrize(
        ("subagents", "message"),
        [
            ([{**HELPER, "subagents": ["helper"]}], "reach itself without a limit"),
            ([{**HELPER, "subagents": ["other"]}], "calls unknown subagents: other"),
            ([HELPER, HELPER], "two subagents are called 'helper'"),
            ([{**HELPER, "name": "final_answer"}], "the name is reserved"),
            ([{**HELPER, "name": "summary"}], "the name is reserved"),
            ([{**HELPER, "name": "a b"}], "pattern"),
        ],
    )
    def test_wrong_ones_are_refused(self, subagents: list[Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            AgentOptions.model_validate({"subagents": subagents})

    def test_one_with_the_name_of_a_tool_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="two tools have the name 'read_file'"):
            play(
                tmp_path,
                [ANSWER],
                toolset="file",
                subagents=[{**self.HELPER, "name": "read_file"}],
            )

    def test_in_parallel_they_overshoot_at_most_by_the_replies_in_flight(
        self, tmp_path: Path
    ) -> None:
        helper = {**self.HELPER, "script": [calls(call("nope"))] * 9, "max_turns": 9}
        six = calls(*(call("helper", task=f"{n}") for n in range(6)))
        played = play(tmp_path, [six, ANSWER], subagents=[helper], max_cost_usd=1.0, cost_usd=0.15)
        assert played.status == "budget"
        cost = played.trajectory.cost_usd()
        assert cost is not None
        assert cost <= 1.0 + 6 * 0.15

    def test_they_have_the_callers_budget_of_tokens(self, tmp_path: Path) -> None:
        turns = [calls(call("write_file", path=f"{n}", content="x")) for n in range(9)]
        helper = {**self.HELPER, "script": turns, "enabled_toolsets": ["file"]}
        script = [calls(call("helper", task="x")), ANSWER]
        given: dict[str, Any] = {"max_total_tokens": 350, "reply_tokens": 100}
        played = play(tmp_path, script, subagents=[helper], **given)
        assert played.status == "budget"
        assert played.trajectory.spent_tokens == 400, "the reply that went beyond was the last"

    def test_every_limit_holds_for_inner_conversations(self) -> None:
        inherited = inherit_options(AgentOptions(max_turns=7), max_turns=1).model_fields_set
        assert set(LIMITS) <= inherited


class TestBudget:
    """A conversation has a budget in dollars."""

    def test_the_reply_that_goes_beyond_ends_it_before_its_tools(self, tmp_path: Path) -> None:
        played = play(tmp_path, [calls(call("count"))] * 4, max_cost_usd=0.25, cost_usd=0.1)
        assert (played.status, played.trajectory.turns) == ("budget", 3)
        assert played.end.reason == ("$0.300000 is over the budget of $0.250000 after turn 3")
        assert played.results[-1]["details"] == {"failure": "not_run"}

    def test_exactly_the_budget_is_within_it(self, tmp_path: Path) -> None:
        played = play(tmp_path, [call_echo(), ANSWER], max_cost_usd=0.5, cost_usd=0.25)
        assert played.status == "completed"

    def test_sums_of_cents_are_not_beyond_it_by_rounding(self, tmp_path: Path) -> None:
        played = play(
            tmp_path, [call_echo("1"), call_echo("2"), ANSWER], max_cost_usd=0.3, cost_usd=0.1
        )
        assert played.status == "completed"

    def test_discarded_replies_are_paid_for_too(self, tmp_path: Path) -> None:
        played = play(tmp_path, [say(""), say(""), ANSWER], max_cost_usd=0.15, cost_usd=0.1)
        assert (played.status, played.trajectory.turns) == ("budget", 0)

    def test_an_unknown_cost_cannot_be_within_a_budget(self, tmp_path: Path) -> None:
        played = play(tmp_path, [call_echo(), ANSWER], max_cost_usd=1, cost_usd=None)
        assert played.status == "budget"
        assert "unknown" in str(played.end.reason)

    def test_tokens_are_a_budget_too(self, tmp_path: Path) -> None:
        many = [calls(call("count"))] * 4
        played = play(tmp_path, many, max_total_tokens=250, reply_tokens=100)
        assert (played.status, played.trajectory.turns) == ("budget", 3)
        assert played.end.reason == "300 tokens are over the budget of 250 after turn 3"
        within = play(tmp_path / "b", [call_echo(), ANSWER], max_total_tokens=200, reply_tokens=100)
        assert within.status == "completed"

    def test_an_unknown_count_cannot_be_within_a_budget(self, tmp_path: Path) -> None:
        played = play(tmp_path, [call_echo(), ANSWER], max_total_tokens=1000, reply_tokens=None)
        assert played.status == "budget"
        assert "unknown" in str(played.end.reason)


class TestRowOptions:
    """Each row can set most options for itself."""

    def test_a_row_sets_its_own(self) -> None:
        run = AgentOptions(max_turns=5, plan=True)
        own = row_options(run, {"agent_options": {"max_turns": 2}})
        assert (own.max_turns, own.plan) == (2, True)
        assert row_options(run, {}) is run

    @pytest.mark.parametrize(
        ("own", "message"),
        [
            ({"max_turn": 3}, "`agent_options.max_turn`: unknown option; did you mean"),
            ({"max_turns": 0}, "`agent_options.max_turns`: must be above 0"),
            ({"max_turns": "9" * 20}, "`agent_options.max_turns`: must be at most"),
            (
                {"max_cost_usd": float("inf")},
                "`agent_options.max_cost_usd`: must be a finite number",
            ),
            ({"repeat_limit": 1}, "^`agent_options`: repeat_limit: 1 would end"),
            ({"approve": "os:system"}, "`agent_options.approve`: cannot be set per row"),
            ({"subagents": []}, "`agent_options.subagents`: cannot be set per row"),
            ([], "`agent_options` must be an object"),
        ],
    )
    def test_a_wrong_one_is_named(self, own: Any, message: str) -> None:
        run = AgentOptions(ephemeral_system_prompt="canary")
        with pytest.raises(ValueError, match=message) as refused:
            row_options(run, {"agent_options": own})
        assert "canary" not in str(refused.value), "what the run says may be for no file"
