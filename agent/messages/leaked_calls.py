"""Tool calls that a server left in the text of a reply: its parser for them is off or failed.

`FORMATS` is the table of the forms that models write. To add one, add an entry with its source. The
loop, the exports and the warnings of a run all use `find_leaked_call`.

A text holds such a call if a call in one of the formats begins in it and names a tool on offer. If
it names none, it must begin a line and end the text: an answer that mentions a format goes on after
it. Markdown's code does not count, since answers explain formats there. Conversations without tools
hold no calls.
"""
# ruff: noqa: E501 - a row of the table is easier to compare in one line

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterator
from functools import lru_cache
from itertools import islice
from typing import Literal, NamedTuple

from agent.messages.message import split_inline_reasoning

_NAME = r"(?P<name>[A-Za-z_][\w.\-]{0,127})"
_JSON = (
    r'(?:\[?\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?:"(?:id|tool_call_id)"\s*:\s*"[^"\n]*"\s*,\s*)?'
    r'"(?:name|tool_name|function)"\s*:\s*"(?P<name>[^"\n]{1,128})")?'
)
"""A call, or a list of calls, as JSON."""
_BAR = "[|｜]"


class CallFormat(NamedTuple):
    """The form in which a family of models writes a call."""

    models: str
    """The models whose calls look like this, for the user."""
    sign: str
    """A text that every such call contains; cheap to look for."""
    opening: str
    """The pattern of a call's beginning; the group `name`, if matched, is the tool's name."""
    vllm: str
    """The value of --tool-call-parser for vLLM; "" if vLLM has no parser."""
    sglang: str
    """The value of --tool-call-parser for SGLang; "" if SGLang has no parser."""
    source: str
    """The description of the format: a parser of vLLM or SGLang, or a chat template."""
    is_bare: bool = False
    """Whether the format has no mark of its own; a call counts only at the end and with a known tool."""


FORMATS = (
    CallFormat(
        models="DeepSeek V4",
        sign="DSML",
        opening=rf"<{_BAR}\s?DSML\s?{_BAR}\s?tool_calls>\s*(?:<{_BAR}\s?DSML\s?{_BAR}\s?invoke name=\"{_NAME})?",
        vllm="deepseek_v4",
        sglang="deepseekv4",
        source="vllm/tool_parsers/deepseekv4_tool_parser.py",
    ),
    CallFormat(
        models="DeepSeek V3.2",
        sign="DSML",
        opening=rf"<{_BAR}\s?DSML\s?{_BAR}\s?(?:function_calls>\s*(?:<{_BAR}\s?DSML\s?{_BAR}\s?)?)?(?:invoke name=\"{_NAME})?",
        vllm="deepseek_v32",
        sglang="deepseekv32",
        source="vllm/tool_parsers/deepseekv32_tool_parser.py",
    ),
    CallFormat(
        models="DeepSeek V3 and R1",
        sign="tool▁",
        opening=rf"<{_BAR}tool▁calls?▁begin{_BAR}>\s*(?:<{_BAR}tool▁call▁begin{_BAR}>\s*)?function<{_BAR}tool▁sep{_BAR}>\s*{_NAME}",
        vllm="deepseek_v3",
        sglang="deepseekv3",
        source="vllm/tool_parsers/deepseekv3_tool_parser.py",
    ),
    CallFormat(
        models="DeepSeek V3.1",
        sign="tool▁",
        opening=rf"<{_BAR}tool▁calls?▁begin{_BAR}>\s*(?:<{_BAR}tool▁call▁begin{_BAR}>\s*)?(?:{_NAME})?",
        vllm="deepseek_v31",
        sglang="deepseekv31",
        source="vllm/tool_parsers/deepseekv31_tool_parser.py",
    ),
    CallFormat(
        models="Step-3",
        sign="<｜tool_call",
        opening=r"<｜tool_calls?_begin｜>\s*(?:<｜tool_call_begin｜>\s*)?(?:function<｜tool_sep｜>\s*)?(?:<steptml:invoke name=\""
        + _NAME
        + ")?",
        vllm="step3",
        sglang="step3",
        source="vllm/tool_parsers/step3_tool_parser.py",
    ),
    CallFormat(
        models="Kimi K2",
        sign="<|tool_call",
        opening=r"<\|tool_calls?_(?:section_)?begin\|>\s*(?:<\|tool_call_begin\|>\s*)?(?:(?:functions\.)?(?P<name>[\w.\-]{1,128}?):[0-9]+)?",
        vllm="kimi_k2",
        sglang="kimi_k2",
        source="vllm/tool_parsers/kimi_k2_tool_parser.py",
    ),
    CallFormat(
        models="Kimi K2, its special tokens taken out",
        sign="functions.",
        opening=r"(?<![\w.=])functions\.(?P<name>[\w.\-]{1,128}?):[0-9]+\s*(?=\{|\Z)",
        vllm="kimi_k2",
        sglang="kimi_k2",
        source="vllm/tool_parsers/kimi_k2_tool_parser.py",
    ),
    CallFormat(
        models="Kimi K3",
        sign="<|open|>",
        opening=r"<\|open\|>(?:tools<\|sep\|>\s*)?(?:<\|open\|>)?(?:call\b[^<\n]{0,40}?(?:\"|=)(?:functions\.)?"
        + _NAME
        + r")?",
        vllm="kimi_k3",
        sglang="kimi_k3",
        source="sglang/srt/function_call/kimik3_format.py",
    ),
    CallFormat(
        models="Llama 3",
        sign="<|python_tag|>",
        opening=rf"<\|python_tag\|>\s*(?:(?=[\[{{]){_JSON}|)",
        vllm="llama3_json",
        sglang="llama3",
        source="vllm/tool_parsers/llama_tool_parser.py",
    ),
    CallFormat(
        models="Llama 4",
        sign="<|python_start|>",
        opening=rf"<\|python_start\|>\s*\[?\s*(?:{_NAME}\()?",
        vllm="llama4_pythonic",
        sglang="pythonic",
        source="vllm/tool_parsers/llama4_pythonic_tool_parser.py",
    ),
    CallFormat(
        models="gpt-oss",
        sign="to=functions.",
        opening=rf"(?:<\|(?:start|channel)\|>)?(?:assistant)?(?:<\|channel\|>)?(?:commentary|analysis)?\s*\bto=functions\.{_NAME}",
        vllm="openai",
        sglang="gpt-oss",
        source="sglang/srt/function_call/gpt_oss_detector.py",
    ),
    CallFormat(
        models="Mistral",
        sign="[TOOL_CALLS]",
        opening=rf"\[TOOL_CALLS\]\s*(?:(?=[\[{{]){_JSON}|(?P<bare>[A-Za-z_][\w.\-]{{0,127}})\s*(?=\[|\{{)|)",
        vllm="mistral",
        sglang="mistral",
        source="vllm/tool_parsers/mistral_tool_parser.py",
    ),
    CallFormat(
        models="MiniMax M3",
        sign="minimax[",
        opening=rf"\]<\]minimax\[>\[\s*(?:<tool_call>\s*(?:\]<\]minimax\[>\[)?\s*)?(?:<invoke name=\"{_NAME})?",
        vllm="minimax_m3",
        sglang="minimax-m3",
        source="sglang/srt/function_call/minimax_m3.py",
    ),
    CallFormat(
        models="MiniMax M2",
        sign="<minimax:tool_call>",
        opening=rf"<minimax:tool_call>\s*(?:<invoke name=\"?{_NAME})?",
        vllm="minimax_m2",
        sglang="minimax-m2",
        source="vllm/tool_parsers/minimax_m2_tool_parser.py",
    ),
    CallFormat(
        models="Seed-OSS",
        sign="<seed:tool_call>",
        opening=rf"<seed:tool_call>\s*(?:<function=\"?{_NAME})?",
        vllm="seed_oss",
        sglang="",
        source="vllm/tool_parsers/seed_oss_tool_parser.py",
    ),
    CallFormat(
        models="Llama 3 and Functionary",
        sign="<function=",
        opening=rf"<function=\"?{_NAME}\"?>\s*(?=\{{)",
        vllm="",
        sglang="",
        source="Llama 3.1's prompt format for user-defined tools",
    ),
    CallFormat(
        models="Qwen3-Coder",
        sign="<function",
        opening=rf"(?:<tool_call>\s*)?<function\s?=\s?\"?{_NAME}",
        vllm="qwen3_coder",
        sglang="qwen3_coder",
        source="vllm/tool_parsers/qwen3coder_tool_parser.py",
    ),
    CallFormat(
        models="MiniCPM5",
        sign="<function name=",
        opening=rf"<function name=\"{_NAME}",
        vllm="minicpm5",
        sglang="minicpm5",
        source="sglang/srt/function_call/minicpm5_detector.py",
    ),
    CallFormat(
        models="Hunyuan 3",
        sign="<tool_sep",
        opening=rf"<tool_calls?(?::\w+)?>\s*(?:<tool_call(?::\w+)?>\s*)?{_NAME}\s*<tool_sep",
        vllm="hy_v3",
        sglang="",
        source="vllm/tool_parsers/hy_v3_tool_parser.py",
    ),
    CallFormat(
        models="GLM",
        sign="<tool_call>",
        opening=rf"<tool_call>\s*{_NAME}\s*(?:<arg_key>|</tool_call>|\Z)",
        vllm="glm45",
        sglang="glm45",
        source="vllm/tool_parsers/glm4_moe_tool_parser.py",
    ),
    CallFormat(
        models="Granite and Phi-4",
        sign="<|tool_call|>",
        opening=rf"<\|tool_call\|>\s*{_JSON}",
        vllm="granite",
        sglang="",
        source="vllm/tool_parsers/granite_tool_parser.py",
    ),
    CallFormat(
        models="Granite and xLAM",
        sign="<tool_call>",
        opening=rf"<tool_call>\s*(?=\[){_JSON}",
        vllm="granite",
        sglang="",
        source="vllm/tool_parsers/granite_tool_parser.py, xlam_tool_parser.py",
    ),
    CallFormat(
        models="Hermes and Qwen",
        sign="<tool_call>",
        opening=rf"<tool_call>\s*{_JSON}",
        vllm="hermes",
        sglang="qwen",
        source="vllm/tool_parsers/hermes_tool_parser.py",
    ),
    CallFormat(
        models="Hunyuan (Jamba: jamba)",
        sign="<tool_calls>",
        opening=rf"<tool_calls>\s*{_JSON}",
        vllm="hunyuan_a13b",
        sglang="hunyuan",
        source="vllm/tool_parsers/hunyuan_a13b_tool_parser.py, jamba_tool_parser.py",
    ),
    CallFormat(
        models="Claude",
        sign="invoke name=",
        opening=rf"(?:<(?:antml:)?function_calls>\s*)?<(?:antml:)?invoke name=[\"']?{_NAME}",
        vllm="",
        sglang="",
        source="Anthropic's prompt format of tools, which other models imitate",
    ),
    CallFormat(
        models="Grok",
        sign="<xai:function_call",
        opening=rf"<xai:function_call(?:\s+name=[\"']?{_NAME})?",
        vllm="",
        sglang="",
        source="the system prompt of Grok",
    ),
    CallFormat(
        models="Qwen-Agent",
        sign="✿FUNCTION✿",
        opening=rf"✿FUNCTION✿\s*:\s*{_NAME}",
        vllm="",
        sglang="",
        source="qwen_agent/llm/fncall_prompts/qwen_fncall_prompt.py",
    ),
    CallFormat(
        models="OLMo 3",
        sign="<function_calls>",
        opening=rf"<function_calls>\s*(?:{_NAME}\()?",
        vllm="olmo3",
        sglang="",
        source="vllm/tool_parsers/olmo3_tool_parser.py",
    ),
    CallFormat(
        models="LongCat",
        sign="<longcat_tool_call>",
        opening=rf"<longcat_tool_call>\s*{_JSON}",
        vllm="longcat",
        sglang="",
        source="vllm/tool_parsers/longcat_tool_parser.py",
    ),
    CallFormat(
        models="Granite 20B",
        sign="<function_call>",
        opening=rf"<function_call>\s*{_JSON}",
        vllm="granite-20b-fc",
        sglang="",
        source="vllm/tool_parsers/granite_20b_fc_tool_parser.py",
    ),
    CallFormat(
        models="InternLM",
        sign="<|plugin|>",
        opening=rf"(?:<\|action_start\|>\s*)?<\|plugin\|>\s*{_JSON}",
        vllm="internlm",
        sglang="interns1",
        source="vllm/tool_parsers/internlm2_tool_parser.py",
    ),
    CallFormat(
        models="Phi-4 mini",
        sign="functools[",
        opening=rf"functools(?=\[){_JSON}",
        vllm="phi4_mini_json",
        sglang="",
        source="vllm/tool_parsers/phi4mini_tool_parser.py",
    ),
    CallFormat(
        models="Functionary",
        sign=">>>",
        opening=rf"^>>>{_NAME}\n",
        vllm="",
        sglang="",
        source="the chat template of functionary v3.2",
    ),
    CallFormat(
        models="Functionary 2",
        sign="<|recipient|>",
        opening=rf"<\|recipient\|>\s*{_NAME}\n",
        vllm="",
        sglang="",
        source="the chat template of functionary v2",
    ),
    CallFormat(
        models="FunctionGemma",
        sign="<start_function_call>",
        opening=rf"<start_function_call>\s*(?:call:{_NAME})?",
        vllm="functiongemma",
        sglang="",
        source="vllm/tool_parsers/functiongemma_tool_parser.py",
    ),
    CallFormat(
        models="Gemma 4",
        sign="<|tool_call>",
        opening=rf"<\|tool_call>\s*(?:call:{_NAME})?",
        vllm="gemma4",
        sglang="gemma4",
        source="vllm/tool_parsers/gemma4_tool_parser.py",
    ),
    CallFormat(
        models="LFM2",
        sign="<|tool_call_start|>",
        opening=rf"<\|tool_call_start\|>\s*\[?\s*(?:{_NAME}\()?",
        vllm="lfm2",
        sglang="lfm2",
        source="vllm/tool_parsers/lfm2_tool_parser.py",
    ),
    CallFormat(
        models="Command (Command 3: cohere_command3)",
        sign="<|START_ACTION|>",
        opening=rf"<\|START_ACTION\|>\s*{_JSON}",
        vllm="cohere_command4",
        sglang="cohere_command4",
        source="sglang/srt/function_call/cohere_command4_detector.py",
    ),
    CallFormat(
        models="Apertus",
        sign="<|tools_prefix|>",
        opening=rf"<\|tools_prefix\|>\s*\[?\s*(?:\{{\s*\"{_NAME}\")?",
        vllm="apertus",
        sglang="apertus2509",
        source="vllm/tool_parsers/apertus_tool_parser.py",
    ),
    CallFormat(
        models="GigaChat 3",
        sign="<|role_sep|>",
        opening=rf"function call<\|role_sep\|>\s*{_JSON}",
        vllm="gigachat3",
        sglang="gigachat3",
        source="vllm/tool_parsers/gigachat3_tool_parser.py",
    ),
    CallFormat(
        models="Nemotron",
        sign="<TOOLCALL>",
        opening=rf"<TOOLCALL>\s*{_JSON}",
        vllm="",
        sglang="",
        source="the chat template of Llama-3.1-Nemotron-Nano",
    ),
    CallFormat(
        models="Llama 3 (a list of calls, xLAM: xlam)",
        sign='"name"',
        opening=r'^[ \t]*\[?\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?:"function"\s*:\s*\{\s*)?"name"\s*:\s*"(?P<name>[^"\n]{1,128})"\s*,\s*"(?:arguments|parameters)"\s*:\s*[{"]',
        vllm="llama3_json",
        sglang="llama3",
        source="vllm/tool_parsers/llama_tool_parser.py, xlam_tool_parser.py",
        is_bare=True,
    ),
    CallFormat(
        models="calls as Python",
        sign=")]",
        opening=rf"^[ \t]*\[\s*{_NAME}\(",
        vllm="pythonic",
        sglang="pythonic",
        source="vllm/tool_parsers/pythonic_tool_parser.py",
        is_bare=True,
    ),
)

_SIGNS_IN_ANGLES = (
    "<|",
    "<｜",
    "<function",
    "<tool_",
    "invoke name=",
    "<minimax:",
    "<seed:",
    "<longcat_",
    "<xai:function_call",
    "<start_function_call>",
    "<TOOLCALL>",
)
_SIGNS_IN_BRACKETS = ("[TOOL_CALLS]", "functools[", ")]")
"""Texts that the signs have in common, so that a few searches decide for most texts."""

_LATER_NAME = re.compile(r'"name"\s*:\s*"([^"\n]{1,128})"')
"""The name of a call whose arguments come first, as some models write them."""
_LATER_CHARS = 20_000

_CODE = re.compile(
    r"^[ \t]*(?P<fence>`{3,}|~{3,})[^\n]*\n.*?(?:^[ \t]*(?P=fence)[`~]*[ \t]*$|\Z)"
    r"|(?P<ticks>`+)(?!`)(?:(?!\n[ \t]*\n).)*?(?<!`)(?P=ticks)(?!`)",
    re.DOTALL | re.MULTILINE,
)
"""Code in Markdown; a fence that is not closed reaches to the end."""
_CODE_INDENT = 4

_CLOSES = re.compile(rf"</|\[/|<{_BAR}|{_BAR}>")
"""The end of a call in one of the formats; a call without an end was cut off."""

_EXCERPT_CHARS = 60
_MAX_BEGINNINGS = 200
"""Maximum beginnings of one format that are looked at in one text, so that none takes seconds."""


class LeakedCall(NamedTuple):
    """A call in a text."""

    format: CallFormat
    text: str
    """The beginning of the call."""
    place: Literal["text", "reasoning"]

    def describe(self) -> str:
        """A description for people: the place of the call, and its beginning."""
        return f"a tool call of {self.format.models} in the {self.place}: {self.text!r}"


def find_leaked_call(
    content: str, reasoning: str | None, *, has_calls: bool, tools: Collection[str]
) -> LeakedCall | None:
    """Find the first call that the server's parser left in a reply; None if there is none.

    `tools` are the tools on offer. A call in the reasoning counts only if it names one of them and
    the reply has no other calls: models also write a call while they think, and then stop.
    """
    if not tools:
        return None
    text = content
    if "<" in content:
        inline, text = split_inline_reasoning(content)
        reasoning = inline or reasoning
    if (leaked := _find(text, tools, "text")) is not None:
        return leaked
    if has_calls or not reasoning:
        return None
    return _find(reasoning, tools, "reasoning")


def may_leak(text: str) -> bool:
    """Whether a text may hold a call, so that it has to be searched; takes microseconds."""
    # `map` with a bound method takes half the time of a generator; every reply passes here.
    contains = text.__contains__
    if "<" in text and any(map(contains, _SIGNS_IN_ANGLES)):
        return True
    if "[" in text and any(map(contains, _SIGNS_IN_BRACKETS)):
        return True
    if "{" in text and '"name"' in text:
        return True
    return "functions." in text or "✿FUNCTION✿" in text or (">" in text and ">>>" in text)


def _find(
    text: str, tools: Collection[str], place: Literal["text", "reasoning"]
) -> LeakedCall | None:
    """Find the first call in `text`; in reasoning, a call must name an offered tool."""
    if not may_leak(text):
        return None
    code = _Code(text)
    for form in FORMATS:
        if form.sign not in text:
            continue
        for match in islice(_pattern(form.opening).finditer(text), _MAX_BEGINNINGS):
            start = match.end() - len(match[0].lstrip())
            is_offered = any(name in tools for name in _names(match, text))
            is_last = _ends_with_call(text, match.end())
            if form.is_bare:
                is_call = is_offered and is_last
            elif place == "reasoning":
                is_call = is_offered
            else:
                is_call = is_offered or (is_last and _begins_line(text, start))
            if is_call and not code.covers(start):
                return LeakedCall(form, text[start : start + _EXCERPT_CHARS], place)
    return None


@lru_cache(maxsize=len(FORMATS))
def _pattern(opening: str) -> re.Pattern[str]:
    return re.compile(opening, re.MULTILINE)


def _names(match: re.Match[str], text: str) -> Iterator[str]:
    named = match.groupdict()
    if name := named.get("name") or named.get("bare"):
        yield name
        yield name.rpartition(".")[2]  # some put a namespace before it
        return
    later = _LATER_NAME.search(text, match.end(), match.end() + _LATER_CHARS)
    if later is not None:
        yield later[1]


def _begins_line(text: str, at: int) -> bool:
    return not text[text.rfind("\n", 0, at) + 1 : at].strip()


def _ends_with_call(text: str, end: int) -> bool:
    """Whether the text ends with, or within, the call whose beginning ends at `end`."""
    rest = text[end:].strip()
    if not rest or rest.endswith((">", "]", "}", ")")):
        return True
    if not rest.startswith(("{", "[", "<", '"')) or _CLOSES.search(rest):
        return False
    opened = rest.count("{") + rest.count("[")
    closed = rest.count("}") + rest.count("]")
    return opened > closed or opened == closed == 0


class _Code:
    """The parts of a text that Markdown shows as code."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._spans: list[tuple[int, int]] | None = None

    def covers(self, at: int) -> bool:
        """Whether a position is in code."""
        text = self._text
        before = text[text.rfind("\n", 0, at) + 1 : at]
        if not before.strip() and len(before.expandtabs()) >= _CODE_INDENT:
            return True
        if self._spans is None:
            has_code = "`" in text or "~~~" in text
            self._spans = [span.span() for span in _CODE.finditer(text)] if has_code else []
        place = bisect_right(self._spans, (at, len(text) + 1))
        return place > 0 and at < self._spans[place - 1][1]


def parser_remedy(form: CallFormat) -> str:
    """The options that turn on the parser of a self-hosted server, as a text for the user."""
    if not form.vllm and not form.sglang:
        return (
            "neither vLLM nor SGLang has a parser for this format: check the chat template, which "
            "may not be that of the model, and the server's --tool-call-parser"
        )
    parts = []
    if form.vllm:
        parts.append(f"vLLM: --enable-auto-tool-choice --tool-call-parser {form.vllm}")
    if form.sglang:
        parts.append(f"SGLang: --tool-call-parser {form.sglang}")
    return "; ".join(parts)


_CLOSING_TAGS = ("</think>", "</thinking>", "</mm:think>", "[/THINK]")
_NEVER_READ = ("</mm:think>", "[/THINK]")
"""Tags that only a server's parser reads; the others are also read at the beginning of a text."""


def has_stray_thought(content: str) -> bool:
    """Whether a text has the end of a thought without its beginning: nobody split the thought off."""
    # Templates of reasoning models put the beginning of the thought into the prompt.
    for tag in _CLOSING_TAGS:
        if tag in content:
            text = split_inline_reasoning(content).rest
            at = text.find(tag)
            begins = tag not in _NEVER_READ and tag.replace("/", "", 1) in text[: max(at, 0)]
            if at >= 0 and not begins and not _Code(text).covers(at):
                return True
    return False


REASONING_REMEDY = (
    "vLLM and SGLang: --reasoning-parser NAME (Qwen3: qwen3; DeepSeek R1: deepseek_r1, in SGLang "
    "deepseek-r1; GLM: glm45; Kimi K2: kimi_k2; MiniMax: minimax_m2, in SGLang minimax; Mistral: "
    "mistral)"
)
