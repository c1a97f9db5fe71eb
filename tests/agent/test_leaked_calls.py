"""Tool calls that a server left in the text of a reply, in all formats of the table."""

# ruff: noqa: E501 - samples are easier to read in one line
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent.messages.leaked_calls import (
    FORMATS,
    find_leaked_call,
    has_stray_thought,
    may_leak,
    parser_remedy,
)
from agent.models.dialects.anthropic_messages import read_blocks
from tests.helpers.playing import Played, call, play, say

OFFERED = ("echo", "find_files")
AS_JSON = '{"name": "echo", "arguments": {"text": "x"}}'

SAMPLES = {
    "DeepSeek V4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="echo">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    "DeepSeek V3.2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="echo">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "DeepSeek V3 and R1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>echo\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "DeepSeek V3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>echo<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "Step-3": '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="echo"></steptml:invoke><｜tool_call_end｜>',
    "Kimi K2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.echo:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "Kimi K2, its special tokens taken out": 'functions.echo:0{"text": "x"}',
    "Kimi K3": '<|open|>tools<|sep|><|open|>call tool="echo" index="1"<|sep|><|close|>call<|sep|>',
    "Llama 3": '<|python_tag|>{"name": "echo", "parameters": {}}',
    "Llama 4": '<|python_start|>[echo(text="x")]<|python_end|>',
    "gpt-oss": "<|channel|>commentary to=functions.echo <|constrain|>json<|message|>{}<|call|>",
    "Mistral": f"[TOOL_CALLS][{AS_JSON}]",
    "MiniMax M3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="echo">]<]minimax[>[</invoke>',
    "MiniMax M2": '<minimax:tool_call>\n<invoke name="echo">\n</invoke>\n</minimax:tool_call>',
    "Seed-OSS": "<seed:tool_call>\n<function=echo>\n</function>\n</seed:tool_call>",
    "Llama 3 and Functionary": '<function=echo>{"text": "x"}</function>',
    "Qwen3-Coder": "<tool_call>\n<function=echo>\n<parameter=text>\nx\n</parameter>\n</function>\n</tool_call>",
    "MiniCPM5": '<function name="echo"><param name="text">x</param></function>',
    "Hunyuan 3": "<tool_calls>\n<tool_call>echo<tool_sep>\n<arg_key>text</arg_key>\n</tool_call>\n</tool_calls>",
    "GLM": "<tool_call>echo\n<arg_key>text</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
    "Granite and Phi-4": f"<|tool_call|>[{AS_JSON}]",
    "Granite and xLAM": f"<tool_call>[{AS_JSON}]",
    "Hermes and Qwen": f"<tool_call>\n{AS_JSON}\n</tool_call>",
    "Hunyuan (Jamba: jamba)": f"<tool_calls>\n[{AS_JSON}]\n</tool_calls>",
    "Claude": '<function_calls>\n<invoke name="echo">\n</invoke>\n</function_calls>',
    "Grok": '<xai:function_call name="echo">\n<parameter name="text">x</parameter>\n</xai:function_call>',
    "Qwen-Agent": '✿FUNCTION✿: echo\n✿ARGS✿: {"text": "x"}',
    "OLMo 3": '<function_calls>\necho(text="x")\n</function_calls>',
    "LongCat": f"<longcat_tool_call>\n{AS_JSON}\n</longcat_tool_call>",
    "Granite 20B": f"<function_call> {AS_JSON}",
    "InternLM": f"<|action_start|><|plugin|>\n{AS_JSON}<|action_end|>",
    "Phi-4 mini": f"functools[{AS_JSON}]",
    "Functionary": '>>>echo\n{"text": "x"}',
    "Functionary 2": "<|recipient|> echo\n<|content|> {}",
    "FunctionGemma": "<start_function_call>call:echo{text:<escape>x<escape>}<end_function_call>",
    "Gemma 4": '<|tool_call>call:echo{text:"x"}<tool_call|>',
    "LFM2": '<|tool_call_start|>[echo(text="x")]<|tool_call_end|>',
    "Command (Command 3: cohere_command3)": '<|START_ACTION|>[\n  {"tool_call_id": "0", "tool_name": "echo", "parameters": {}}\n]<|END_ACTION|>',
    "Apertus": '<|tools_prefix|>[{"echo": {"text": "x"}}]<|tools_suffix|>',
    "GigaChat 3": f"function call<|role_sep|>\n{AS_JSON}",
    "Nemotron": f"<TOOLCALL>[{AS_JSON}]</TOOLCALL>",
    "Llama 3 (a list of calls, xLAM: xlam)": '{"name": "echo", "parameters": {"text": "x"}}',
    "calls as Python": '[echo(text="x"), echo(text="y")]',
}
"""A reply as a model of the table writes it, by `models`."""


def found(text: str, *, reasoning: str | None = None, tools: Any = OFFERED, **more: Any) -> Any:
    leak = find_leaked_call(text, reasoning, has_calls=more.get("has_calls", False), tools=tools)
    return leak and (leak.format.models, leak.place)


def test_there_is_a_sample_of_every_format() -> None:
    assert list(SAMPLES) == [form.models for form in FORMATS]
    for form in FORMATS:
        assert form.source
        assert "--tool-call-parser" in parser_remedy(form)


@pytest.mark.parametrize("models", SAMPLES)
def test_a_call_is_found_where_a_model_makes_it(models: str) -> None:
    """After a text, alone, cut off, and in reasoning that leads to no call."""
    sample = SAMPLES[models]
    assert may_leak(sample)
    assert found(sample) == (models, "text")
    assert found(f"I look.\n\n{sample}\n") == (models, "text")
    assert found("", reasoning=f"I must look.\n{sample}") == (models, "reasoning")
    assert found("Fine.", reasoning=sample, has_calls=True) is None
    assert found(f"<think>Hm.\n{sample}</think>\n\n") == (models, "reasoning")
    assert found(sample, has_calls=True) == (models, "text"), "one of several was read"


@pytest.mark.parametrize("models", SAMPLES)
def test_an_answer_may_explain_a_format(models: str) -> None:
    sample = SAMPLES[models]
    assert found(sample, tools=()) is None, "a conversation without tools has no calls"
    assert found(f"It writes:\n\n```xml\n{sample}\n```\n\nThat is a call.") is None
    assert found(f"It writes:\n\n~~~\n{sample}\n~~~") is None
    indented = "\n".join(f"    {line}" for line in sample.splitlines())
    assert found(f"It writes:\n\n{indented.splitlines()[0]}") is None
    if "\n" not in sample:
        assert found(f"It writes `{sample}` then.") is None
        assert found(f"It writes `` {sample} ``.") is None


@pytest.mark.parametrize("models", SAMPLES)
def test_without_an_offered_name_only_what_ends_a_reply_is_a_call(models: str) -> None:
    """Models invent tools, and answers mention formats; these go on."""
    sample = SAMPLES[models].replace("echo", "get_weather")
    form = next(form for form in FORMATS if form.models == models)
    is_call = found(f"I look.\n{sample}") is not None
    assert is_call is not form.is_bare
    assert found(f"I look.\n{sample}\nSo it goes on, and ends.") is None
    assert found(f"It is {sample} in short.") is None
    assert found("Fine.", reasoning=sample) is None


@pytest.mark.parametrize(
    "text",
    [
        "I look.\n<tool_call>",
        'I look.\n<tool_call>\n{"name": "ec',
        'I look.\n<tool_call>\n{"name": "echo", "arguments": {"te',
        '<tool_call>\n{"arguments": {"text": "x"}, "name": "echo"}\n</tool_call>',
        "<function=echo",
        "<minimax:tool_call>\n<invoke",
        "[TOOL_CALLS]",
        '[TOOL_CALLS]echo{"text": "x"}',
        '[TOOL_CALLS]echo[ARGS]{"text": "x"}',
        "<tool_call>echo</tool_call>",
        "<tool_call>\necho",
        '<|tool_call_begin|>echo:3<|tool_call_argument_begin|>{"text": "x"}',
        "commentary to=functions.echo json{}",
        f"Let me see.\n{AS_JSON}\n</tool_call>",
        f'[{AS_JSON}, {{"name": "find_files", "arguments": {{}}}}]',
        '{"type": "function", "name": "echo", "parameters": {}}',
        '<invoke name="echo">\n<parameter name="text">x</parameter>\n</invoke>',
        "<function=ns.echo>\n</function>",
        "See `ls` first.\n<function=echo>\n<parameter=text>\n```\nx\n```\n</parameter>\n</function>",
    ],
)
def test_other_spellings_and_openers_without_an_end(text: str) -> None:
    assert found(text) is not None
    assert found(text, tools=()) is None


@pytest.mark.parametrize(
    "text",
    [
        "Models emit [TOOL_CALLS] before a call.",
        "The tag <tool_call> begins it (see the docs).",
        "std::function<void()> f = g; std::function<int(int)> h;",
        "def f(): return [echo(x) for x in y]\nThat is all.",
        '{"name": "Ada", "age": 36}',
        '{"name": "echo"}',
        "List: [1, 2](a)]",
        "Call functions.echo to do it; functions.find_files finds.",
        "ok >>> echo",
        "I used echo and find_files. Done.",
    ],
)
def test_texts_that_are_no_calls(text: str) -> None:
    assert found(text) is None


def test_the_text_within_a_call_of_messages_is_judged_too() -> None:
    message = read_blocks([{"type": "text", "text": SAMPLES["Claude"]}])
    assert found(message["content"]) == ("Claude", "text")


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("I think.\n</think>\n\nHello", True),
        ("<think>I think.</think>Hello", False),
        ("<think>a</think>b</think>c", True),
        ("[THINK]a[/THINK]b", True),
        ("a</mm:think>b", True),
        ("a</thinking>\nb", True),
        ("The tag `</think>` ends it.", False),
        ("```\n</think>\n```", False),
        ("Hello", False),
    ],
)
def test_a_thought_that_nobody_split_off(text: str, holds: bool) -> None:
    assert has_stray_thought(text) is holds


# In the loop


def read_outcome(played: Played) -> tuple[Any, int, list[str]]:
    return played.status, played.trajectory.turns, [r["content"] for r in played.results]


@pytest.mark.parametrize("models", ["Qwen3-Coder", "DeepSeek V3.2", "Mistral"])
def test_a_conversation_ends_at_such_a_reply(tmp_path: Path, models: str) -> None:
    sample = SAMPLES[models]
    played = play(tmp_path, [{"tool_calls": [call("echo", text="a")]}, say(sample)])
    assert (played.status, played.trajectory.turns) == ("leaked_call", 2)
    assert played.end.reason is not None
    assert models in played.end.reason
    for kept in range(len(played.events) + 1):
        again = play(
            tmp_path,
            [{"tool_calls": [call("echo", text="a")]}, say(sample)],
            past=played.events[:kept],
        )
        assert (again.status, again.messages) == (played.status, played.messages)


def test_calls_beside_it_do_not_run(tmp_path: Path) -> None:
    reply = {"content": SAMPLES["GLM"], "tool_calls": [call("echo", text="a")]}
    status, turns, results = read_outcome(play(tmp_path, [reply]))
    assert (status, turns) == ("leaked_call", 1)
    assert "not run" in results[0]


def test_a_call_in_reasoning_is_not_asked_for_again(tmp_path: Path) -> None:
    played = play(tmp_path, [say(" ", reasoning=f"Hm.\n{SAMPLES['Hermes and Qwen']}")])
    assert (played.status, played.trajectory.discarded) == ("leaked_call", [])
    blank = play(tmp_path, [say(" ", reasoning="Hm.")] * 3)
    assert blank.status == "errors"


def test_an_answer_that_explains_a_format_is_completed(tmp_path: Path) -> None:
    sample = SAMPLES["Hermes and Qwen"]
    assert play(tmp_path, [say(f"So:\n```\n{sample}\n```")]).status == "completed"
    assert play(tmp_path, [say(sample)], tools=()).status == "completed"
    assert play(tmp_path, [say(f"{sample} cut", finish_reason="length")]).status == "length"


def test_no_message_of_the_user_follows_it(tmp_path: Path) -> None:
    played = play(tmp_path, [say(SAMPLES["Kimi K2"]), say("Bye.")], user_turns=["And now?"])
    assert (played.status, played.roles) == ("leaked_call", ["user", "assistant"])


def test_a_call_of_llama_with_an_object_for_its_function_is_known() -> None:
    said = '{"type": "function", "function": {"name": "echo", "parameters": {"text": "x"}}}'
    assert find_leaked_call(said, None, has_calls=False, tools=OFFERED) is not None
    for text in (said, '{"name": "echo", "parameters": {"text": "x"}}'):
        told = f"{text}\nThat is how a call looks."
        assert find_leaked_call(told, None, has_calls=False, tools=OFFERED) is None
