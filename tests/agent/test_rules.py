"""The rules by which a conversation continues and ends, each with real tools and a script."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent.messages.message import Message
from agent.options import AgentOptions
from batch_trajectories.dataset.row import RowRules
from tests.helpers.playing import TOOLS, call, call_echo, calls, play, say
from toolsets.context import ToolContext
from toolsets.tool import tool

ANSWER = say("done")


class TestErrors:
    """A conversation has a budget of errors."""

    FAILING: tuple[dict[str, Any], ...] = (
        calls(call("fail")),
        calls(call("nope")),
        calls({"name": "echo", "arguments": "{broken"}),
        calls(call("echo", wrong=1)),
    )

    def test_max_errors_end_the_conversation(self, tmp_path: Path) -> None:
        script = [*self.FAILING[:2], call_echo(), *self.FAILING[2:], self.FAILING[0], ANSWER]
        played = play(tmp_path, script)
        assert (played.status, played.end.reason) == ("errors", "5 errors")
        assert played.trajectory.turns == 6

    def test_every_error_reaches_the_model(self, tmp_path: Path) -> None:
        played = play(tmp_path, [*self.FAILING, ANSWER], max_errors=9)
        texts = [result["content"] for result in played.results]
        assert texts[0] == "Error executing fail: out of order"
        assert texts[1].startswith("Error: Tool 'nope' not found. Available: count, delete, echo")
        assert "invalid arguments for echo: not valid JSON" in texts[2]
        assert "wrong: unknown argument" in texts[3]

    def test_three_malformed_turns_in_a_row_end_it_sooner(self, tmp_path: Path) -> None:
        played = play(tmp_path, [calls(call(f"no{n}")) for n in range(4)])
        assert (played.status, played.trajectory.turns) == ("errors", 3)
        mixed = [calls(call("no1")), calls(call("no2")), call_echo(), calls(call("no3")), ANSWER]
        assert play(tmp_path, mixed).status == "completed"

    def test_a_tool_that_reports_a_failure_is_not_an_error(self, tmp_path: Path) -> None:
        """Only calls that never ran or that raised count; every dialect gets the flag as text."""
        played = play(tmp_path, [calls(call("report_failure"))] * 2 + [ANSWER], max_errors=1)
        assert played.status == "completed"
        assert played.results[0]["content"] == "Tool error: no such thing"

    def test_the_budget_can_be_switched_off(self, tmp_path: Path) -> None:
        script = [calls(call("fail", n=n)) for n in range(9)]
        assert play(tmp_path, [*script, ANSWER], max_errors=0).status == "completed"


class TestRepeats:
    """The same call with the same result again and again ends a conversation."""

    def test_the_second_gets_a_note_and_the_third_ends_it(self, tmp_path: Path) -> None:
        played = play(tmp_path, [call_echo()] * 4)
        assert (played.status, played.trajectory.turns) == ("repeat", 3)
        first, second, third = (result["content"] for result in played.results)
        assert (first, third) == ("x", "x")
        assert second.startswith("x\n\nNote: this very call was made before")
        assert played.results[1]["notes"] == ["repeat"]

    def test_the_model_saw_the_note(self, tmp_path: Path) -> None:
        played = play(tmp_path, [call_echo(), call_echo(), ANSWER])
        assert played.status == "completed"
        assert "this very call was made before" in played.seen()

    def test_the_order_of_keys_makes_no_other_call(self, tmp_path: Path) -> None:
        spelled = ['{"text": "x"}', '{"text":"x"}', ' {"text" : "x"}']
        script = [calls({"name": "echo", "arguments": text}) for text in spelled]
        assert play(tmp_path, script).status == "repeat"

    def test_another_call_or_another_result_resets_the_count(self, tmp_path: Path) -> None:
        assert play(
            tmp_path, [call_echo(), call_echo(), call_echo("y"), call_echo(), call_echo(), ANSWER]
        ).status == ("completed")
        polling = [calls(call("count"))] * 5
        assert play(tmp_path, [*polling, ANSWER]).status == "completed"

    def test_equal_calls_of_a_reply_count_once(self, tmp_path: Path) -> None:
        """None of them saw another's result; the note comes before the end all the same."""
        thrice = calls(*[call("echo", text="x")] * 3)
        played = play(tmp_path, [thrice, thrice, ANSWER])
        assert played.status == "completed"
        assert played.results[-1]["notes"] == ["repeat"]

    def test_a_denied_call_resets_the_count(self, tmp_path: Path) -> None:
        script = [call_echo(), call_echo(), calls(call("count")), call_echo(), ANSWER]
        played = play(
            tmp_path, script, approve=lambda name, _: "deny" if name == "count" else "approve"
        )
        assert played.status == "completed"
        assert [note["reason"] for note in played.trajectory.notes] == ["repeat"]

    def test_a_limit_of_one_makes_no_sense(self) -> None:
        with pytest.raises(ValueError, match="repeat_limit: 1 would end"):
            AgentOptions(repeat_limit=1)

    def test_off_means_off_and_no_call_is_ever_removed(self, tmp_path: Path) -> None:
        played = play(tmp_path, [call_echo()] * 6 + [ANSWER], repeat_limit=0)
        assert (played.status, len(played.results)) == ("completed", 6)
        assert not any("notes" in message for message in played.messages)


class TestReasks:
    """Replies that contain nothing usable are asked for again, so many times."""

    @pytest.mark.parametrize(
        ("unusable", "why"),
        [
            (say(" \n"), "blank"),
            (say("", reasoning="only thoughts"), "blank"),
            (say("<think>never closed"), "unclosed_reasoning"),
            (calls(call("echo"), content="<think>hm"), "unclosed_reasoning"),
        ],
    )
    def test_an_unusable_reply_is_asked_for_again(
        self, tmp_path: Path, unusable: dict[str, Any], why: str
    ) -> None:
        played = play(tmp_path, [call_echo(), unusable, ANSWER])
        assert (played.status, played.trajectory.turns) == ("completed", 2)
        (discarded,) = played.trajectory.discarded
        assert discarded["discarded"] == why
        assert played.requests[1].messages == played.requests[2].messages, "asked the same again"

    def test_the_third_in_a_row_ends_the_conversation_and_keeps_earlier_turns(
        self, tmp_path: Path
    ) -> None:
        """An older system dropped a good turn here."""
        played = play(tmp_path, [call_echo(), say(""), say(""), say("")])
        assert played.status == "errors"
        assert played.roles == ["user", "assistant", "tool"]
        assert played.trajectory.api_calls() == 4

    def test_reasks_are_counted_in_a_row_and_are_not_turns(self, tmp_path: Path) -> None:
        script = [say(""), say(""), call_echo("1"), say(""), say(""), call_echo("2"), ANSWER]
        assert play(tmp_path, script, max_turns=3).status == "completed"

    def test_bad_arguments_can_be_resampled(self, tmp_path: Path) -> None:
        bad = calls({"name": "echo", "arguments": "not json"})
        played = play(tmp_path, [bad, bad, call_echo(), ANSWER], bad_arguments="resample")
        assert played.status == "completed"
        assert not any(result["is_error"] for result in played.results)
        assert play(tmp_path, [bad] * 3, bad_arguments="resample").status == "errors"

    def test_a_cut_reply_is_never_asked_for_again(self, tmp_path: Path) -> None:
        """Asking again would give the same; the text is kept."""
        played = play(tmp_path, [say("<think>half a tho", finish_reason="length")])
        assert (played.status, played.trajectory.api_calls()) == ("length", 1)
        assert played.trajectory.final_text() == "<think>half a tho"

    def test_blank_arguments_count_as_none(self, tmp_path: Path) -> None:
        played = play(tmp_path, [calls({"name": "echo", "arguments": "  "}), ANSWER])
        assert not played.results[0]["is_error"]


class TestEndings:
    def test_a_cut_text_can_be_continued(self, tmp_path: Path) -> None:
        """Continuing is opt-in and for text alone; the note that asks for it is the user's."""
        cut = say("one, two", finish_reason="length")
        played = play(tmp_path, [cut, say(", three")], continue_cut=1)
        assert played.status == "completed"
        assert played.roles == ["user", "assistant", "user", "assistant"]
        assert played.messages[2]["notes"] == ["continue_cut"]
        assert played.trajectory.final_text() == "one, two, three"
        assert play(tmp_path, [cut, cut], continue_cut=1).status == "length"
        with_call = calls(call("echo"), finish_reason="length")
        assert play(tmp_path, [with_call], continue_cut=1).status == "length"

    def test_a_final_summary_is_asked_for_without_tools(self, tmp_path: Path) -> None:
        """The call is real and recorded, and the conversation is still not completed."""
        played = play(tmp_path, [call_echo(), say("so far: x")], max_turns=1, final_summary=True)
        assert played.status == "max_turns"
        assert played.trajectory.final_text() == "so far: x"
        assert played.requests[-1].tool_choice == "none"
        assert played.results[0]["notes"] == ["final_summary"]

    def test_tools_called_in_the_final_summary_are_asked_for_again(self, tmp_path: Path) -> None:
        script = [call_echo(), call_echo("a"), call_echo("b"), call_echo("c"), ANSWER]
        played = play(tmp_path, script, max_turns=1, final_summary=True)
        assert (played.status, played.trajectory.turns) == ("max_turns", 1)
        why = [reply["discarded"] for reply in played.trajectory.discarded]
        assert why == ["calls_not_allowed"] * 3

    @pytest.mark.parametrize(
        "last", [say(""), say("cut", finish_reason="length"), say("..", finish_reason="pause")]
    )
    def test_any_summary_ends_the_conversation(self, tmp_path: Path, last: dict[str, Any]) -> None:
        """One note at most: a pause must not be paid for ever."""
        played = play(tmp_path, [call_echo(), *[last] * 9], max_turns=1, final_summary=True)
        assert played.status == "max_turns"
        assert played.trajectory.api_calls() <= 4
        assert len(played.trajectory.notes) == 1

    @pytest.mark.parametrize(
        "options", [{"continue_cut": 4}, {"awaiting_input": True, "user_replies": ["which?"] * 3}]
    )
    def test_there_is_no_note_beyond_max_turns(
        self, tmp_path: Path, options: dict[str, Any]
    ) -> None:
        cut = say("x", finish_reason="length")
        ask = calls(call("delete", name="x"))
        script = [cut] * 5 if "continue_cut" in options else [ask] * 5
        played = play(tmp_path, script, max_turns=1, **options)
        assert played.trajectory.turns == 1

    def test_max_turns_can_be_stated(self, tmp_path: Path) -> None:
        """The note only tells the model; `max_turns` ends the conversation without it."""
        rules = RowRules("Be brief.", AgentOptions(max_turns=7, state_max_turns=True))
        opening = rules.read({"prompt": "x"}).opening
        assert opening[0]["content"] == "Be brief.\n\nYou have at most 7 replies for this task."
        bare = RowRules(None, AgentOptions(state_max_turns=True)).read({"prompt": "x"}).opening
        assert bare[0]["role"] == "system"

    def test_calls_can_be_run_one_after_the_other(self, tmp_path: Path) -> None:
        """Calls run in parallel by default; the record has them in call order either way."""
        order: list[str] = []

        @tool()
        async def nap(context: ToolContext, name: str, turns: int) -> str:
            """Let others go first."""
            for _ in range(turns):
                await asyncio.sleep(0)
            order.append(name)
            return name

        script = [calls(call("nap", name="a", turns=9), call("nap", name="b", turns=0)), ANSWER]
        parallel = play(tmp_path, script, tools=[nap])
        assert order == ["b", "a"]
        assert [result["content"] for result in parallel.results] == ["a", "b"]
        order.clear()
        play(tmp_path, script, tools=[nap], parallel_tools=False)
        assert order == ["a", "b"]


class TestCompletionTools:
    FINAL = call("final_answer", answer="42")

    def test_the_answer_of_the_call_is_the_final_text(self, tmp_path: Path) -> None:
        played = play(tmp_path, [calls(self.FINAL)], completion_tools=True)
        assert (played.status, played.trajectory.final_text()) == ("completed", "42")
        names = [schema["function"]["name"] for schema in played.requests[0].tools]
        assert names[-2:] == ["final_answer", "cannot_complete"]

    def test_other_calls_of_the_reply_are_answered_first(self, tmp_path: Path) -> None:
        played = play(tmp_path, [calls(self.FINAL, call("echo", text="x"))], completion_tools=True)
        assert played.status == "completed"
        assert [result["content"] for result in played.results] == ["Answer received.", "x"]

    def test_cannot_complete_ends_a_conversation_with_an_expected_answer(
        self, tmp_path: Path
    ) -> None:
        script = [calls(call("cannot_complete", reason="no network"))]
        played = play(tmp_path, script, completion_tools=True, check_expected=True, expected="42")
        assert (played.status, played.end.reason) == ("cannot_complete", "no network")

    def test_an_answer_without_text_is_a_bad_argument(self, tmp_path: Path) -> None:
        played = play(tmp_path, [calls(call("final_answer")), ANSWER], completion_tools=True)
        assert played.status == "completed"
        assert played.results[0]["details"] == {"failure": "invalid_arguments"}

    def test_the_names_are_reserved_and_unknown_where_not_offered(self, tmp_path: Path) -> None:
        @tool(name="final_answer")
        def mine(context: ToolContext) -> str:
            """Mine."""
            return ""

        with pytest.raises(ValueError, match="'final_answer' is reserved"):
            play(tmp_path, [ANSWER], tools=[*TOOLS, mine])
        played = play(tmp_path, [calls(self.FINAL), ANSWER])
        assert played.results[0]["details"] == {"failure": "unknown_tool"}
        assert played.trajectory.final_text() == "done"


class TestExpected:
    """The answer is checked, and the model never sees the right one."""

    def test_after_a_wrong_answer_the_model_gets_another_attempt(self, tmp_path: Path) -> None:
        played = play(
            tmp_path,
            [say("41"), say(" Forty-Two ")],
            check_expected=True,
            expected="forty-two",
            expected_attempts=3,
        )
        assert played.status == "completed"
        assert played.messages[2]["notes"] == ["expected"]
        assert not any("forty-two" in played.seen(n) for n in range(2))

    def test_attempts_are_answers_in_all(self, tmp_path: Path) -> None:
        wrong = [say("1"), say("2"), say("3"), say("4")]
        played = play(tmp_path, wrong, check_expected=True, expected="5", expected_attempts=3)
        assert (played.status, played.trajectory.turns) == ("wrong_answer", 3)
        assert played.trajectory.final_text() == "3"

    def test_by_default_there_is_one_attempt(self, tmp_path: Path) -> None:
        played = play(tmp_path, [say("4"), say("5")], check_expected=True, expected="5")
        assert (played.status, played.trajectory.turns) == ("wrong_answer", 1)
        assert "notes" not in played.messages[0]

    def test_an_answer_in_a_sentence_passes(self, tmp_path: Path) -> None:
        script = [say("There are 168 primes below 1000.")]
        given: dict[str, Any] = {"check_expected": True, "expected": "168"}
        asked = [Message(role="user", content="How many primes are there below 1000?")]
        assert play(tmp_path, script, opening=asked, **given).status == "completed"

    def test_it_works_on_final_answer_calls(self, tmp_path: Path) -> None:
        script = [calls(call("final_answer", answer=answer)) for answer in ("1", "2")]
        given: dict[str, Any] = {
            "check_expected": True,
            "expected": "2",
            "expected_attempts": 2,
        }
        played = play(tmp_path, script, completion_tools=True, **given)
        assert played.status == "completed"
        assert played.roles == ["user", "assistant", "tool", "assistant", "tool"]
        assert played.results[0]["notes"] == ["expected"]


class TestPlan:
    """A plan and a bounded loop per step are one conversation."""

    PLAN = say("1. look\n2) tell")

    def test_each_step_begins_with_a_note(self, tmp_path: Path) -> None:
        played = play(
            tmp_path, [self.PLAN, call_echo(), say("looked"), say("told"), ANSWER], plan=True
        )
        assert played.status == "completed"
        assert played.roles == [
            "user",
            "assistant",
            "user",
            "assistant",
            "tool",
            "assistant",
            "user",
            "assistant",
            "user",
            "assistant",
        ]
        notes = [note["reason"] for note in played.trajectory.notes]
        assert notes == ["plan", "plan_step", "plan_step", "plan_answer"]
        assert "Step 2 of 2: tell" in played.messages[6]["content"]
        assert played.requests[0].tool_choice == "none"
        assert played.requests[1].tool_choice == "auto"

    def test_tools_called_instead_of_a_plan_are_not_run(self, tmp_path: Path) -> None:
        played = play(tmp_path, [call_echo(), self.PLAN, say("a"), say("b"), ANSWER], plan=True)
        assert played.status == "completed"
        assert not played.results

    def test_a_call_written_instead_of_a_plan_says_nothing_of_the_parser(
        self, tmp_path: Path
    ) -> None:
        """vLLM parses no calls if none are allowed."""
        leak = say('<tool_call>\n{"name": "echo", "arguments": {}}\n</tool_call>')
        played = play(tmp_path, [leak, self.PLAN, say("a"), say("b"), ANSWER], plan=True)
        assert played.status == "completed"
        assert [one["discarded"] for one in played.trajectory.discarded] == ["calls_not_allowed"]
        assert play(tmp_path, [leak]).status == "leaked_call"

    def test_a_final_answer_ends_it_in_any_step(self, tmp_path: Path) -> None:
        final = calls(call("final_answer", answer="42"))
        given: dict[str, Any] = {"plan": True, "completion_tools": True}
        played = play(tmp_path, [self.PLAN, final], **given)
        assert (played.status, played.trajectory.final_text()) == ("completed", "42")

    def test_a_step_has_a_limit(self, tmp_path: Path) -> None:
        script = [self.PLAN, *(call_echo(str(n)) for n in range(5)), say("told"), ANSWER]
        played = play(tmp_path, script, plan=True)
        assert played.status == "completed"
        assert "Step 2 of 2" in played.results[4]["content"]
        assert "Step 2 of 2" not in played.results[3]["content"]

    def test_a_plan_without_a_list_is_one_step(self, tmp_path: Path) -> None:
        played = play(tmp_path, [say("Just do it."), say("did"), ANSWER], plan=True)
        assert [note["reason"] for note in played.trajectory.notes] == [
            "plan",
            "plan_step",
            "plan_answer",
        ]


class TestAwaitingInput:
    """A tool asks the user, the row answers."""

    ASK = calls(call("delete", name="x"))

    def test_a_reply_goes_to_the_tool_that_asked_once(self, tmp_path: Path) -> None:
        played = play(tmp_path, [self.ASK, ANSWER], awaiting_input=True, user_replies=["yes"])
        assert played.status == "completed"
        assert played.results[0]["content"].endswith("User: yes\n\ndeleted x: yes")
        assert played.trajectory.replies_used == 1

    def test_the_reply_is_in_the_result_of_the_tool_that_asked(self, tmp_path: Path) -> None:
        both = calls(call("delete", name="x"), call("echo", text="hello"))
        played = play(tmp_path, [both, ANSWER], awaiting_input=True, user_replies=["yes"])
        result, said = played.results
        assert result["content"].endswith("User: yes\n\ndeleted x: yes")
        assert said["content"] == "hello"

    def test_how_the_continued_call_went_is_recorded(self, tmp_path: Path) -> None:
        played = play(
            tmp_path,
            [self.ASK, ANSWER],
            awaiting_input=True,
            user_replies=["break"],
            observation_chars=8,
        )
        (result,) = played.results
        assert result["is_error"]
        assert result["details"]["failure"] == "exception"
        assert played.trajectory.tally.errors == 1
        assert [event["type"] for event in played.told].count("tool_result") == 2

    def test_completed_goes_before_awaiting(self, tmp_path: Path) -> None:
        both = calls(call("delete", name="x"), call("final_answer", answer="42"))
        played = play(tmp_path, [both], awaiting_input=True, completion_tools=True)
        assert played.status == "completed"

    def test_text_that_looks_like_a_question_is_none(self, tmp_path: Path) -> None:
        """A file that was read, say: only the object that a tool returns asks."""
        fake = calls(call("echo", text='{"requiresInput": true}'))
        assert play(tmp_path, [fake, ANSWER], awaiting_input=True).status == "completed"

    def test_a_tool_may_ask_again(self, tmp_path: Path) -> None:
        played = play(
            tmp_path, [self.ASK, ANSWER], awaiting_input=True, user_replies=["which?", "no"]
        )
        assert played.results[0]["content"].endswith("User: no\n\ndeleted x: no")
        assert played.results[0]["content"].count("User: ") == 2

    def test_without_a_reply_it_ends_with_the_question(self, tmp_path: Path) -> None:
        played = play(tmp_path, [self.ASK, ANSWER], awaiting_input=True)
        assert (played.status, played.end.reason) == ("awaiting_input", "Delete x?")

    @pytest.mark.parametrize("other", ["list everything", "use echo instead"])
    def test_a_fresh_instruction_goes_to_the_model(self, tmp_path: Path, other: str) -> None:
        played = play(tmp_path, [self.ASK, ANSWER], awaiting_input=True, user_replies=[other])
        assert played.results[0]["content"].endswith(f"User: {other}")
        assert "deleted" not in played.results[0]["content"]

    def test_anything_else_goes_to_the_tool(self, tmp_path: Path) -> None:
        played = play(tmp_path, [self.ASK, ANSWER], awaiting_input=True, user_replies=["hm, fine"])
        assert "deleted x: hm, fine" in played.results[0]["content"]

    def test_it_is_off_by_default(self, tmp_path: Path) -> None:
        assert play(tmp_path, [self.ASK, ANSWER], user_replies=["yes"]).status == "completed"

    def test_a_continued_call_that_was_cut_off_is_not_run_again(self, tmp_path: Path) -> None:
        given: dict[str, Any] = {"awaiting_input": True, "user_replies": ["yes"]}
        played = play(tmp_path, [self.ASK, ANSWER], **given)
        resumed = play(tmp_path, [self.ASK, ANSWER], past=played.events[:2], **given)
        assert resumed.status == "completed"
        assert "was interrupted" in resumed.results[0]["content"]
