"""Tool calls that a server left in the text of a reply: its parser for them is off or failed.

`FORMATS` is the table of what models write: to add one, add a line with the source of its form. The
loop, the exports and the warnings of a run all judge by `leaked_call`.

A text holds such a call if a format begins in it, outside of code, and names a tool that the
conversation offers. Where no offered tool is named, the call must begin a line and end the text, as
calls do: an answer that mentions a format goes on. Code is what Markdown shows as code, where
answers explain a format. Conversations without tools hold no calls.
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
    """How a family of models writes a call."""

    models: str
    """For the user: whose calls look like this."""
    sign: str
    """A text without it holds no such call; cheap to look for."""
    opening: str
    """The pattern of its beginning, with the group `name` as far as that goes."""
    vllm: str
    """The value of --tool-call-parser for vLLM, "" if it has none."""
    sglang: str
    """The same for SGLang."""
    source: str
    """Where the form is described: a parser of vLLM or SGLang, or a chat template."""
    is_bare: bool = False
    """It has no mark of its own, and counts only if it names an offered tool and ends the text."""


FORMATS = (
    CallFormat(
        "DeepSeek V4",
        "DSML",
        rf"<{_BAR}\s?DSML\s?{_BAR}\s?tool_calls>\s*(?:<{_BAR}\s?DSML\s?{_BAR}\s?invoke name=\"{_NAME})?",
        "deepseek_v4",
        "deepseekv4",
        "vllm/tool_parsers/deepseekv4_tool_parser.py",
    ),
    CallFormat(
        "DeepSeek V3.2",
        "DSML",
        rf"<{_BAR}\s?DSML\s?{_BAR}\s?(?:function_calls>\s*(?:<{_BAR}\s?DSML\s?{_BAR}\s?)?)?(?:invoke name=\"{_NAME})?",
        "deepseek_v32",
        "deepseekv32",
        "vllm/tool_parsers/deepseekv32_tool_parser.py",
    ),
    CallFormat(
        "DeepSeek V3 and R1",
        "tool▁",
        rf"<{_BAR}tool▁calls?▁begin{_BAR}>\s*(?:<{_BAR}tool▁call▁begin{_BAR}>\s*)?function<{_BAR}tool▁sep{_BAR}>\s*{_NAME}",
        "deepseek_v3",
        "deepseekv3",
        "vllm/tool_parsers/deepseekv3_tool_parser.py",
    ),
    CallFormat(
        "DeepSeek V3.1",
        "tool▁",
        rf"<{_BAR}tool▁calls?▁begin{_BAR}>\s*(?:<{_BAR}tool▁call▁begin{_BAR}>\s*)?(?:{_NAME})?",
        "deepseek_v31",
        "deepseekv31",
        "vllm/tool_parsers/deepseekv31_tool_parser.py",
    ),
    CallFormat(
        "Step-3",
        "<｜tool_call",
        r"<｜tool_calls?_begin｜>\s*(?:<｜tool_call_begin｜>\s*)?(?:function<｜tool_sep｜>\s*)?(?:<steptml:invoke name=\""
        + _NAME
        + ")?",
        "step3",
        "step3",
        "vllm/tool_parsers/step3_tool_parser.py",
    ),
    CallFormat(
        "Kimi K2",
        "<|tool_call",
        r"<\|tool_calls?_(?:section_)?begin\|>\s*(?:<\|tool_call_begin\|>\s*)?(?:(?:functions\.)?(?P<name>[\w.\-]{1,128}?):[0-9]+)?",
        "kimi_k2",
        "kimi_k2",
        "vllm/tool_parsers/kimi_k2_tool_parser.py",
    ),
    CallFormat(
        "Kimi K2, its special tokens taken out",
        "functions.",
        r"(?<![\w.=])functions\.(?P<name>[\w.\-]{1,128}?):[0-9]+\s*(?=\{|\Z)",
        "kimi_k2",
        "kimi_k2",
        "vllm/tool_parsers/kimi_k2_tool_parser.py",
    ),
    CallFormat(
        "Kimi K3",
        "<|open|>",
        r"<\|open\|>(?:tools<\|sep\|>\s*)?(?:<\|open\|>)?(?:call\b[^<\n]{0,40}?(?:\"|=)(?:functions\.)?"
        + _NAME
        + r")?",
        "kimi_k3",
        "kimi_k3",
        "sglang/srt/function_call/kimik3_format.py",
    ),
    CallFormat(
        "Llama 3",
        "<|python_tag|>",
        rf"<\|python_tag\|>\s*(?:(?=[\[{{]){_JSON}|)",
        "llama3_json",
        "llama3",
        "vllm/tool_parsers/llama_tool_parser.py",
    ),
    CallFormat(
        "Llama 4",
        "<|python_start|>",
        rf"<\|python_start\|>\s*\[?\s*(?:{_NAME}\()?",
        "llama4_pythonic",
        "pythonic",
        "vllm/tool_parsers/llama4_pythonic_tool_parser.py",
    ),
    CallFormat(
        "gpt-oss",
        "to=functions.",
        rf"(?:<\|(?:start|channel)\|>)?(?:assistant)?(?:<\|channel\|>)?(?:commentary|analysis)?\s*\bto=functions\.{_NAME}",
        "openai",
        "gpt-oss",
        "sglang/srt/function_call/gpt_oss_detector.py",
    ),
    CallFormat(
        "Mistral",
        "[TOOL_CALLS]",
        rf"\[TOOL_CALLS\]\s*(?:(?=[\[{{]){_JSON}|(?P<bare>[A-Za-z_][\w.\-]{{0,127}})\s*(?=\[|\{{)|)",
        "mistral",
        "mistral",
        "vllm/tool_parsers/mistral_tool_parser.py",
    ),
    CallFormat(
        "MiniMax M3",
        "minimax[",
        rf"\]<\]minimax\[>\[\s*(?:<tool_call>\s*(?:\]<\]minimax\[>\[)?\s*)?(?:<invoke name=\"{_NAME})?",
        "minimax_m3",
        "minimax-m3",
        "sglang/srt/function_call/minimax_m3.py",
    ),
    CallFormat(
        "MiniMax M2",
        "<minimax:tool_call>",
        rf"<minimax:tool_call>\s*(?:<invoke name=\"?{_NAME})?",
        "minimax_m2",
        "minimax-m2",
        "vllm/tool_parsers/minimax_m2_tool_parser.py",
    ),
    CallFormat(
        "Seed-OSS",
        "<seed:tool_call>",
        rf"<seed:tool_call>\s*(?:<function=\"?{_NAME})?",
        "seed_oss",
        "",
        "vllm/tool_parsers/seed_oss_tool_parser.py",
    ),
    CallFormat(
        "Llama 3 and Functionary",
        "<function=",
        rf"<function=\"?{_NAME}\"?>\s*(?=\{{)",
        "",
        "",
        "Llama 3.1's prompt format for user-defined tools",
    ),
    CallFormat(
        "Qwen3-Coder",
        "<function",
        rf"(?:<tool_call>\s*)?<function\s?=\s?\"?{_NAME}",
        "qwen3_coder",
        "qwen3_coder",
        "vllm/tool_parsers/qwen3coder_tool_parser.py",
    ),
    CallFormat(
        "MiniCPM5",
        "<function name=",
        rf"<function name=\"{_NAME}",
        "minicpm5",
        "minicpm5",
        "sglang/srt/function_call/minicpm5_detector.py",
    ),
    CallFormat(
        "Hunyuan 3",
        "<tool_sep",
        rf"<tool_calls?(?::\w+)?>\s*(?:<tool_call(?::\w+)?>\s*)?{_NAME}\s*<tool_sep",
        "hy_v3",
        "",
        "vllm/tool_parsers/hy_v3_tool_parser.py",
    ),
    CallFormat(
        "GLM",
        "<tool_call>",
        rf"<tool_call>\s*{_NAME}\s*(?:<arg_key>|</tool_call>|\Z)",
        "glm45",
        "glm45",
        "vllm/tool_parsers/glm4_moe_tool_parser.py",
    ),
    CallFormat(
        "Granite and Phi-4",
        "<|tool_call|>",
        rf"<\|tool_call\|>\s*{_JSON}",
        "granite",
        "",
        "vllm/tool_parsers/granite_tool_parser.py",
    ),
    CallFormat(
        "Granite and xLAM",
        "<tool_call>",
        rf"<tool_call>\s*(?=\[){_JSON}",
        "granite",
        "",
        "vllm/tool_parsers/granite_tool_parser.py, xlam_tool_parser.py",
    ),
    CallFormat(
        "Hermes and Qwen",
        "<tool_call>",
        rf"<tool_call>\s*{_JSON}",
        "hermes",
        "qwen",
        "vllm/tool_parsers/hermes_tool_parser.py",
    ),
    CallFormat(
        "Hunyuan (Jamba: jamba)",
        "<tool_calls>",
        rf"<tool_calls>\s*{_JSON}",
        "hunyuan_a13b",
        "hunyuan",
        "vllm/tool_parsers/hunyuan_a13b_tool_parser.py, jamba_tool_parser.py",
    ),
    CallFormat(
        "Claude",
        "invoke name=",
        rf"(?:<(?:antml:)?function_calls>\s*)?<(?:antml:)?invoke name=[\"']?{_NAME}",
        "",
        "",
        "Anthropic's prompt format of tools, which other models imitate",
    ),
    CallFormat(
        "OLMo 3",
        "<function_calls>",
        rf"<function_calls>\s*(?:{_NAME}\()?",
        "olmo3",
        "",
        "vllm/tool_parsers/olmo3_tool_parser.py",
    ),
    CallFormat(
        "LongCat",
        "<longcat_tool_call>",
        rf"<longcat_tool_call>\s*{_JSON}",
        "longcat",
        "",
        "vllm/tool_parsers/longcat_tool_parser.py",
    ),
    CallFormat(
        "Granite 20B",
        "<function_call>",
        rf"<function_call>\s*{_JSON}",
        "granite-20b-fc",
        "",
        "vllm/tool_parsers/granite_20b_fc_tool_parser.py",
    ),
    CallFormat(
        "InternLM",
        "<|plugin|>",
        rf"(?:<\|action_start\|>\s*)?<\|plugin\|>\s*{_JSON}",
        "internlm",
        "interns1",
        "vllm/tool_parsers/internlm2_tool_parser.py",
    ),
    CallFormat(
        "Phi-4 mini",
        "functools[",
        rf"functools(?=\[){_JSON}",
        "phi4_mini_json",
        "",
        "vllm/tool_parsers/phi4mini_tool_parser.py",
    ),
    CallFormat(
        "Functionary",
        ">>>",
        rf"^>>>{_NAME}\n",
        "",
        "",
        "the chat template of functionary v3.2",
    ),
    CallFormat(
        "Functionary 2",
        "<|recipient|>",
        rf"<\|recipient\|>\s*{_NAME}\n",
        "",
        "",
        "the chat template of functionary v2",
    ),
    CallFormat(
        "FunctionGemma",
        "<start_function_call>",
        rf"<start_function_call>\s*(?:call:{_NAME})?",
        "functiongemma",
        "",
        "vllm/tool_parsers/functiongemma_tool_parser.py",
    ),
    CallFormat(
        "Gemma 4",
        "<|tool_call>",
        rf"<\|tool_call>\s*(?:call:{_NAME})?",
        "gemma4",
        "gemma4",
        "vllm/tool_parsers/gemma4_tool_parser.py",
    ),
    CallFormat(
        "LFM2",
        "<|tool_call_start|>",
        rf"<\|tool_call_start\|>\s*\[?\s*(?:{_NAME}\()?",
        "lfm2",
        "lfm2",
        "vllm/tool_parsers/lfm2_tool_parser.py",
    ),
    CallFormat(
        "Command (Command 3: cohere_command3)",
        "<|START_ACTION|>",
        rf"<\|START_ACTION\|>\s*{_JSON}",
        "cohere_command4",
        "cohere_command4",
        "sglang/srt/function_call/cohere_command4_detector.py",
    ),
    CallFormat(
        "Apertus",
        "<|tools_prefix|>",
        rf"<\|tools_prefix\|>\s*\[?\s*(?:\{{\s*\"{_NAME}\")?",
        "apertus",
        "apertus2509",
        "vllm/tool_parsers/apertus_tool_parser.py",
    ),
    CallFormat(
        "GigaChat 3",
        "<|role_sep|>",
        rf"function call<\|role_sep\|>\s*{_JSON}",
        "gigachat3",
        "gigachat3",
        "vllm/tool_parsers/gigachat3_tool_parser.py",
    ),
    CallFormat(
        "Nemotron",
        "<TOOLCALL>",
        rf"<TOOLCALL>\s*{_JSON}",
        "",
        "",
        "the chat template of Llama-3.1-Nemotron-Nano",
    ),
    CallFormat(
        "Llama 3 (a list of calls, xLAM: xlam)",
        '"name"',
        r'^[ \t]*\[?\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[^"\n]{1,128})"\s*,\s*"(?:arguments|parameters)"\s*:\s*[{"]',
        "llama3_json",
        "llama3",
        "vllm/tool_parsers/llama_tool_parser.py, xlam_tool_parser.py",
        is_bare=True,
    ),
    CallFormat(
        "calls as Python",
        ")]",
        rf"^[ \t]*\[\s*{_NAME}\(",
        "pythonic",
        "pythonic",
        "vllm/tool_parsers/pythonic_tool_parser.py",
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
    "<start_function_call>",
    "<TOOLCALL>",
)
_SIGNS_IN_BRACKETS = ("[TOOL_CALLS]", "functools[", ")]")
"""What the signs have in common: most texts are told by a few searches."""

_LATER_NAME = re.compile(r'"name"\s*:\s*"([^"\n]{1,128})"')
"""Some models write the arguments of a call first."""
_LATER_CHARS = 20_000

_CODE = re.compile(
    r"^[ \t]*(?P<fence>`{3,}|~{3,})[^\n]*\n.*?(?:^[ \t]*(?P=fence)[`~]*[ \t]*$|\Z)"
    r"|(?P<ticks>`+)(?!`)(?:(?!\n[ \t]*\n).)*?(?<!`)(?P=ticks)(?!`)",
    re.DOTALL | re.MULTILINE,
)
"""What Markdown shows as code; an open fence reaches to the end."""
_CODE_INDENT = 4

_CLOSES = re.compile(rf"</|\[/|<{_BAR}|{_BAR}>")
"""What ends a call in one of the formats; a call without it was cut off."""

_SHOWN_CHARS = 60
_MOST_LOOKED_AT = 200
"""Beginnings of one format in one text: a text of nothing else must not take seconds."""


class LeakedCall(NamedTuple):
    """A call in a text."""

    format: CallFormat
    text: str
    """How it begins."""
    place: Literal["text", "reasoning"]

    def describe(self) -> str:
        """For a person: where it is, and how it begins."""
        return f"a tool call of {self.format.models} in the {self.place}: {self.text!r}"


def leaked_call(
    content: str, reasoning: str | None, *, has_calls: bool, tools: Collection[str]
) -> LeakedCall | None:
    """The first call that the parser left in a reply, None without one; `tools` are on offer.

    Models also write a call while they still think, and then stop: in reasoning it counts in a
    reply without calls, if it names an offered tool.
    """
    if not tools:
        return None
    text = content
    if "<" in content:
        inline, text = split_inline_reasoning(content)
        reasoning = inline or reasoning
    if (found := _find(text, tools)) is not None:
        return LeakedCall(*found, "text")
    if has_calls or not reasoning or (found := _find(reasoning, tools, by_name=True)) is None:
        return None
    return LeakedCall(*found, "reasoning")


def may_leak(text: str) -> bool:
    """Whether a text must be looked at closely; takes microseconds."""
    holds = text.__contains__
    if "<" in text and any(map(holds, _SIGNS_IN_ANGLES)):
        return True
    if "[" in text and any(map(holds, _SIGNS_IN_BRACKETS)):
        return True
    if "{" in text and '"name"' in text:
        return True
    return "functions." in text or (">" in text and ">>>" in text)


def _find(
    text: str, tools: Collection[str], *, by_name: bool = False
) -> tuple[CallFormat, str] | None:
    """The format of a call in `text`, and its beginning; `by_name`: only of an offered tool."""
    if not may_leak(text):
        return None
    code = _Code(text)
    for form in FORMATS:
        if form.sign not in text:
            continue
        for match in islice(_pattern(form.opening).finditer(text), _MOST_LOOKED_AT):
            start = match.end() - len(match[0].lstrip())
            names = _names(match, text)
            is_offered = any(name in tools for name in names)
            ends = _ends_with_it(text, match.end())
            if form.is_bare:
                counts = is_offered and ends
            else:
                counts = is_offered or (ends and not by_name and _begins_line(text, start))
            if counts and not code.holds(start):
                return form, text[start : start + _SHOWN_CHARS]
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


def _ends_with_it(text: str, end: int) -> bool:
    """Whether the text ends with the call whose beginning ends at `end`, or within it."""
    rest = text[end:].strip()
    if not rest or rest.endswith((">", "]", "}", ")")):
        return True
    if not rest.startswith(("{", "[", "<", '"')) or _CLOSES.search(rest):
        return False
    opened, closed = (sum(map(rest.count, ends)) for ends in ("{[", "}]"))
    return opened > closed or not opened


class _Code:
    """The parts of a text that Markdown shows as code."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._spans: list[tuple[int, int]] | None = None

    def holds(self, at: int) -> bool:
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
    """What turns on the parser of a self-hosted server."""
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


def holds_thought(content: str) -> bool:
    """Whether a text has a thought that nobody split off: its end without its beginning.

    The templates of reasoning models put the beginning into the prompt.
    """
    for tag in _CLOSING_TAGS:
        if tag in content:
            text = split_inline_reasoning(content).rest
            at = text.find(tag)
            begins = tag not in _NEVER_READ and tag.replace("/", "", 1) in text[: max(at, 0)]
            if at >= 0 and not begins and not _Code(text).holds(at):
                return True
    return False


REASONING_REMEDY = (
    "vLLM and SGLang: --reasoning-parser NAME (Qwen3: qwen3; DeepSeek R1: deepseek_r1, in SGLang "
    "deepseek-r1; GLM: glm45; Kimi K2: kimi_k2; MiniMax: minimax_m2, in SGLang minimax; Mistral: "
    "mistral)"
)
