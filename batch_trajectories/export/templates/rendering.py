"""Renders rows by a chat template and reports texts that the template drops.

A row is rendered twice: as it is, and with every text replaced by a mark. If a mark is missing, the
trainer would not see its text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from batch_trajectories.basics.errors import ConfigError

_THINK = re.compile(r"<think>\n(.*?)\n</think>\n*(.*)", re.DOTALL)


_TRAINED = ("\ufdd0", "\ufdd1")
"""Marks around text with loss while a row is rendered: noncharacters, which no text has."""

_MARK = re.compile("[\ufdd0\ufdd1]")


class Rendered(NamedTuple):
    """One rendered row."""

    text: str
    """The text that a trainer would tokenize; blank if the template refused the row."""
    trained: list[tuple[int, int]]
    """Begin and end of each part that carries loss by the template's `{% generation %}`."""
    dropped: list[str]
    """The places of texts that the template dropped, or why it refused the row."""


class Chat(Protocol):
    """A function that renders messages and tools by a chat template."""

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        *,
        is_prompt: bool = False,
    ) -> str:
        """Return the text, with the marks of text with loss; see `strip_marks`.

        `is_prompt`: add the generation prompt.
        """
        ...


EOS = "\ufdd2"
"""A stand-in for the end-of-text token, whose name only the tokenizer knows."""


def load_chat(path: Path) -> Chat:
    """Make a function that renders messages as trainers and inference do.

    `path` is a Jinja file or a tokenizer_config.json. Raises `ConfigError`.
    """
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag `{% generation %}`, by which templates mark text that carries loss."""

        tags = {"generation"}  # noqa: RUF012 - as the library declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (
                nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in _TRAINED
            )
            return nodes.Scope([begin, *body, end], lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
    try:
        template = environment.from_string(template_text(path))
    except (OSError, ValueError, KeyError, TypeError, TemplateError) as error:
        raise ConfigError(f"{path}: cannot read this chat template: {error}") from error

    def chat(messages: Any, tools: Any, *, is_prompt: bool = False) -> str:
        text: str = template.render(
            messages=messages,
            tools=tools or None,
            add_generation_prompt=is_prompt,
            bos_token="",
            eos_token=EOS,
        )
        return text

    return chat


def tools_in(row: Mapping[str, Any]) -> Any:
    """The tools of a row of `openai`, which holds them as text unless a recipe says otherwise."""
    return _parse_arguments(row["tools"]) if isinstance(row["tools"], str) else row["tools"]


@lru_cache(maxsize=8)
def _parse_arguments(tools: str) -> Any:
    return json.loads(tools)


def load_template(path: Path) -> Callable[[Mapping[str, Any]], Rendered]:
    """Make a function that renders rows of `openai.jsonl` as trainers do; see `load_chat`."""
    chat = load_chat(path)

    def render(row: Mapping[str, Any]) -> Rendered:
        tools = tools_in(row)
        try:
            text = chat(row["messages"], tools).replace(EOS, "")
            marks = _Marks()
            marked = chat(*marks.replace_texts(row["messages"], tools))
        except Exception as error:  # a template can raise anything
            why = str(error) or type(error).__name__
            return Rendered("", [], [f"the template refuses the row: {why}"])
        dropped = [place for mark, place in marks.places.items() if mark not in marked]
        return Rendered(*strip_marks(text), dropped)

    return render


def template_text(path: Path) -> str:
    """The text of a template; raises ValueError for a tokenizer file without one.

    A tokenizer file may hold one template, or several by name, of which the one for tools is used.
    Newer tokenizers have the template in a file beside it.
    """
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".json":
        return source
    tokenizer = json.loads(source)
    if not isinstance(tokenizer, dict):
        raise ValueError("not a tokenizer file: it must hold a JSON object")
    template = tokenizer.get("chat_template")
    if isinstance(template, list):
        by_name = {one["name"]: one["template"] for one in template}
        template = by_name.get("tool_use", by_name.get("default"))
    beside = path.with_name("chat_template.jinja")
    if template is None and beside.exists():
        template = beside.read_text(encoding="utf-8")
    if not isinstance(template, str):
        raise ValueError(f"it holds no chat_template, and there is no {beside.name} beside it")
    return template


def strip_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Remove the marks; returns the text, and begin and end of the parts between two marks."""
    pieces = _MARK.split(text)
    ends = list(accumulate(map(len, pieces)))
    return "".join(pieces), list(zip(ends[0::2], ends[1::2], strict=False))


class _Marks:
    """Replaces every text of a row by a mark."""

    def __init__(self) -> None:
        self.places: dict[str, str] = {}

    def replace_texts(self, messages: Any, tools: Any) -> tuple[list[dict[str, Any]], list[Any]]:
        marked = [
            self._message(message, f"message {number} ({message['role']})")
            for number, message in enumerate(messages, start=1)
        ]
        return marked, [self._tool(tool, f"tool {n}") for n, tool in enumerate(tools, start=1)]

    def _mark(self, place: str) -> str:
        # Letters and digits only, so no escaping changes it; no mark begins another.
        mark = f"mark{len(self.places)}x"
        self.places[mark] = place
        return mark

    def _message(self, message: Mapping[str, Any], where: str) -> dict[str, Any]:
        marked = dict(message)
        if (match := _THINK.fullmatch(message["content"])) and message["role"] == "assistant":
            thought = self._mark(f"{where}, reasoning")
            rest = self._mark(f"{where}, content") if match[2].strip() else ""
            marked["content"] = f"<think>\n{thought}\n</think>\n\n{rest}"
        elif message["content"].strip():
            marked["content"] = self._mark(f"{where}, content")
        if "reasoning_content" in message:
            marked["reasoning_content"] = self._mark(f"{where}, reasoning")
        if "tool_calls" in message:
            marked["tool_calls"] = [
                self._call(call, f"{where}, call {number}")
                for number, call in enumerate(message["tool_calls"], start=1)
            ]
        return marked

    def _call(self, call: Mapping[str, Any], where: str) -> dict[str, Any]:
        function = call["function"]
        given = function["arguments"]
        arguments: Any = {}
        if isinstance(given, str):
            arguments = self._mark(f"{where}, arguments")
        else:
            arguments = {name: self._mark(f"{where}, argument {name}") for name in given}
        name = self._mark(f"{where}, name")
        return {**call, "function": {**function, "name": name, "arguments": arguments}}

    def _tool(self, tool: Mapping[str, Any], where: str) -> dict[str, Any]:
        function = dict(tool["function"])
        function["name"] = self._mark(f"{where}, name")
        if function.get("description"):
            function["description"] = self._mark(f"{where}, description")
        return {**tool, "function": function}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` of chat templates, which has this order of options."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def openai_row_files(manifest: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The entries of a manifest for the JSON Lines files of the format openai."""
    for part in manifest["formats"]:
        if part["format"] == "openai":
            for file in part["files"]:
                if file["path"].endswith(".jsonl"):
                    yield file


def read_rows(directory: Path, manifest: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The written rows of the format openai. Raises `ConfigError` without any."""
    files = [file["path"] for file in openai_row_files(manifest)]
    if not files:
        raise ConfigError(
            "--render and --parity read rows of the format openai, and none were written"
        )
    for path in files:
        with (directory / path).open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)


# Lengths in tokens of the model that is trained.


class Tokens:
    """Counts the tokens of texts."""

    def __init__(self, tokenizer: Path) -> None:
        """`tokenizer` is a tokenizer.json. Raises `ConfigError`."""
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(
                f"{tokenizer}: lengths need the package tokenizers: pip install tokenizers"
            ) from error
        try:
            self._tokenizer = Tokenizer.from_file(str(tokenizer))
        except Exception as error:  # the library raises no narrower class
            raise ConfigError(f"{tokenizer}: cannot read this tokenizer: {error}") from error

    def count(self, text: str) -> int:
        """The number of tokens of a text."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)
