"""The meaning of a row's columns beside the messages.

Every column is one of these: part of the conversation (system prompt, tools, pictures), a mark for
all of its replies, a verdict, a short value to filter by, a copy of a text of the conversation, or
metadata by its name. Any other column is refused by name, because it may be part of the
conversation. With `--metadata` a user declares that it is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from agent.messages.message import Message, ProviderBlocks
from batch_trajectories.basics.text import clip
from batch_trajectories.dataset.row_conversation import TOOL_COLUMNS
from batch_trajectories.importing.call_forms import parse_value, read_tool_schemas
from batch_trajectories.importing.conversation import Unreadable, is_blank

MARKS = ("weight", "loss", "loss_weight", "train", "training")
"""Keys of a message or of a row: 0 or false if the replies carry no loss."""

_SYSTEM = ("system", "system_prompt", "system_message", "system_instruction", "system_instructions")
_PAIRS = (
    "chosen",
    "rejected",
    "chosen_response",
    "rejected_response",
    "chosen_messages",
    "rejected_messages",
    "rejected_images",
    "preferred_output",
    "non_preferred_output",
)
_VERDICTS = ("label", "kto_tag")
"""KTO's marks: of ms-swift and TRL, and of LLaMA-Factory."""

METADATA = frozenset(
    {
        "metadata",
        "meta",
        "extra",
        "extra_info",
        "info",
        "stats",
        "usage",
        "costs",
        "tags",
        "timestamps",
        "annotations",
        "provenance",
        "license",
        "annotator",
        "config",
        # Results of a task: patches, logs and tests.
        "patch",
        "model_patch",
        "generated_patch",
        "gold_patch",
        "test_patch",
        "git_diff",
        "eval_logs",
        "eval_log",
        "eval_report",
        "report",
        "test_result",
        "test_results",
        "test_output",
        "tests",
        "test_cases",
        "FAIL_TO_PASS",
        "PASS_TO_PASS",
        "submission",
        "instance",
        "answer",
        "solution",
        "ground_truth",
        "target",
        "expected",
        "reward_model",
        # Judgements of texts and of their prompts, as Magpie, Toucan and OpenR1-Math have them.
        "question_quality_assessment",
        "response_quality_assessment",
        "gen_input_configs",
        "input_quality_explanation",
        "other_task_category",
        "is_reasoning_complete",
        "correctness_math_verify",
        "correctness_llama",
        "finish_reasons",
        # Of hermes-agent.
        "toolsets_used",
        "tool_stats",
        "tool_error_counts",
        # Settings of requests.
        "tool_choice",
        "stop",
        "stop_sequences",
        "stream_options",
        "logit_bias",
        "reasoning_effort",
        "parallel_tool_calls",
        # Of tables that pandas writes.
        "__index_level_0__",
    }
)
"""Columns that no model reads or writes: left out if they are lists, objects or long."""

_SWE_AGENT_COLUMNS = frozenset({"environment", "trajectory", "replay_config", "attempts", "review"})
"""Columns of SWE-agent beside `history`, which holds the messages."""

_PART_OF_PROMPT = frozenset(
    {
        "prompt",
        "user_prompt",
        "instruction",
        "instructions",
        "input",
        "context",
        "history",
        "document",
        "documents",
        "passage",
        "response",
        "output",
        "completion",
        "developer",
        "thinking",
        "thought",
        "thoughts",
        "reasoning_content",
        "rationale",
        "cot",
        "chain_of_thought",
        "mask",
        "masks",
        "loss_mask",
    }
)
"""Columns that are parts of a conversation, even if short, unless its messages repeat them."""

_RESERVED = frozenset({"id", "messages", "conversations", "metadata", "prompt"})

_MEDIA: Mapping[str, str] = {
    **dict.fromkeys(("image", "img", "picture", "pic", "photo", "screenshot", "frame"), "image"),
    **dict.fromkeys(("figure", "thumbnail", "jpg", "jpeg", "png", "webp", "gif"), "image"),
    **dict.fromkeys(("video", "clip", "mp4"), "video"),
    **dict.fromkeys(("audio", "sound", "speech", "wav", "mp3", "flac"), "audio"),
    **dict.fromkeys(("media", "pdf", "attachment"), "file"),
}
_MEDIA_NAME = re.compile(
    rf"(?:[a-z0-9]+_)*?({'|'.join(_MEDIA)})(?:e?s)?"
    r"(?:_?(?:path|url|uri|src|source|link|file|filename|bytes|b64|base64|data|list|content)s?)*"
    r"(?:_?\d+)?"
)
_NO_MEDIA = re.compile(r"(?:docker|container|sandbox|base|env|vm|oci|num|n|has|is|with)_|.*_count")
"""Names of columns with images of containers, or with counts and flags."""
_DATA_URL = re.compile(r"data:(?:image|video|audio)/")
_FILE_KEYS = frozenset({"bytes", "path", "url"})
"""The keys of pictures and sounds in tables that `datasets` writes."""

_MAX_SHORT_CHARS = 1000
_COPY_CHARS = 40
"""Minimum length of a text that counts as a copy if a message contains it."""
_MAX_VALUE_CHARS = 60


def media_kind(name: str) -> str | None:
    """Return the kind of media in a column, by its name: image, video, audio or file; else None."""
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().replace("-", "_")
    match = _MEDIA_NAME.fullmatch(plain)
    return None if match is None or _NO_MEDIA.match(plain) else _MEDIA[match[1]]


def is_short(value: Any) -> bool:
    """Whether a value can be filtered by: a number, true, false or a short text."""
    if isinstance(value, bool | int | float):
        return True
    return isinstance(value, str) and len(value) < _MAX_SHORT_CHARS


def short_columns(row: Mapping[str, Any], *, are_metadata: bool = False) -> dict[str, Any]:
    """Return the short columns of a row, to filter by.

    `are_metadata`: the user declared them as metadata, so their names have no other meaning.
    """
    apart = _RESERVED if are_metadata else {*_RESERVED, *_SYSTEM, *TOOL_COLUMNS}
    return {
        name: value
        for name, value in row.items()
        if name not in apart and is_short(value) and (are_metadata or not _holds_media(name, value))
    }


def refuse_pairs(row: Mapping[str, Any]) -> None:
    """Raise `Unreadable` for a row with a better and a worse answer."""
    if pair := next((name for name in _PAIRS if not is_blank(row.get(name))), None):
        raise Unreadable(
            f"{pair}: the row is a pair for preferences, which are not read: `import` takes rows "
            "with one conversation"
        )


def system_columns(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return the names and values of the columns with a system prompt."""
    return ((name, row[name]) for name in _SYSTEM if not is_blank(row.get(name)))


def tools_in(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools of a row; None without such a column. Raises `Unreadable`."""
    named = [name for name in TOOL_COLUMNS if row.get(name) is not None]
    tools: list[dict[str, Any]] = []
    for name in named:
        if not is_blank(row[name]):
            try:
                offered = read_tool_schemas(row[name], name)
            except Unreadable as error:
                raise Unreadable(f"{error}; {metadata_hint([name])}") from error
            tools = unite_tools(tools, offered, name)
    return tools if named else None


def unite_tools(
    known: Sequence[dict[str, Any]], added: Sequence[dict[str, Any]], place: str
) -> list[dict[str, Any]]:
    """Unite two lists of tools. Raises `Unreadable` if two tools of one name differ."""
    if not known:
        return [*added]
    tools = {tool["function"]["name"]: tool for tool in known}
    for tool in added:
        name = tool["function"]["name"]
        if name in tools:
            if (both := _merge_tool(tools[name], tool)) is None:
                raise Unreadable(f"{place}: it has another tool {name!r} than the rest of the row")
            tool = both
        tools[name] = tool
    return [*tools.values()]


def _merge_tool(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
    """Merge two descriptions of a tool; return None if they contradict each other."""
    function = dict(one["function"])
    for key, value in other["function"].items():
        if _says_nothing(value):
            continue
        if _says_nothing(function.get(key)):
            function[key] = value
        elif _remove_blanks(function[key]) != _remove_blanks(value):
            return None
    return {**one, "function": function}


def _says_nothing(value: Any) -> bool:
    """Whether a value is blank, or the schema that a tool without one has."""
    return is_blank(value) or value == {"type": "object", "properties": {}}


def _remove_blanks(value: Any) -> Any:
    """Return a value without blank members and without white space around texts."""
    if isinstance(value, dict):
        return {key: _remove_blanks(one) for key, one in value.items() if not is_blank(one)}
    if isinstance(value, list):
        return [_remove_blanks(one) for one in value]
    return value.strip() if isinstance(value, str) else value


def media_in(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Make a part for each picture, video and sound in the columns of a row."""
    parts = []
    for name, value in row.items():
        if not _holds_media(name, value):
            continue
        kind = media_kind(name) or "file"
        for media in value if isinstance(value, list) else [value]:
            if media is not None:
                parts.append({"type": kind, "source": _media_source(media)})
    return parts


def _media_source(value: Any) -> str:
    """Return the path or URL of a picture; "bytes" if its row has none."""
    if isinstance(value, dict):
        value = value.get("path") or value.get("url")
    return value if isinstance(value, str) else "bytes"


def _holds_media(name: str, value: Any) -> bool:
    if value is None or value in ("", []) or isinstance(value, bool | int | float):
        return False
    if media_kind(name) is not None or (isinstance(value, str) and _DATA_URL.match(value)):
        return True
    return any(
        isinstance(one, dict) and {"bytes", "path"} <= one.keys() <= _FILE_KEYS
        for one in (value if isinstance(value, list) else [value])
    )


def add_media(row: Mapping[str, Any], messages: Sequence[Message], api: str) -> None:
    """Add pictures, videos and sounds in columns of a row to its first message of a user."""
    if not (parts := media_in(row)):
        return
    first = next((message for message in messages if message["role"] == "user"), None)
    if first is None:
        raise Unreadable("no message of a user")
    known = first.get("provider_blocks") or ProviderBlocks(api=api, blocks=[])
    first["provider_blocks"] = {**known, "blocks": [*known["blocks"], *parts]}


def is_masked(marked: Mapping[str, Any], place: str, hint: str = "") -> bool:
    """Whether a message or a row carries no loss, by its `MARKS`.

    Raises `Unreadable` for weights other than 0 and 1, with `hint` after the reason.
    """
    found = {mark: marked[mark] for mark in MARKS if marked.get(mark) is not None}
    for mark, value in found.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            shown = clip(repr(value), max_chars=_MAX_VALUE_CHARS)
            raise Unreadable(f"{place}{mark}: {shown} is none of 0, 1, false, true{hint}")
    return any(value == 0 for value in found.values())


def is_masked_row(row: Mapping[str, Any]) -> bool:
    """Whether no reply of a row carries loss. Raises `Unreadable`."""
    for mark in MARKS:
        if row.get(mark) is not None:
            is_masked({mark: row[mark]}, "", f"; {metadata_hint([mark])}")
    return is_masked(row, "")


def verdict_in(row: Mapping[str, Any]) -> bool | None:
    """Return the verdict of a row for KTO, True for a good example; None without one.

    Raises `Unreadable`.
    """
    found: dict[str, bool] = {}
    for name in _VERDICTS:
        value = row.get(name)
        if is_blank(value):
            continue
        if isinstance(value, str) and value.strip().lower() in ("true", "false"):
            value = value.strip().lower() == "true"
        if isinstance(value, bool):
            found[name] = value
        elif name == "kto_tag" or not isinstance(value, str):
            shown = clip(repr(value), max_chars=_MAX_VALUE_CHARS)
            raise Unreadable(f"{name}: {shown} is neither true nor false; {metadata_hint([name])}")
    if len(set(found.values())) > 1:
        raise Unreadable("kto_tag: the row has another label")
    return next(iter(found.values()), None)


def metadata_hint(names: Sequence[str]) -> str:
    """Return the advice for columns that are no part of the conversation."""
    return f"if it is no part of the conversation, add --metadata={','.join(names)}"


def refuse_unknown_columns(
    row: Mapping[str, Any], column: str, raw: Iterable[str], messages: Sequence[Message]
) -> None:
    """Raise `Unreadable` for columns of unknown meaning.

    `column` holds the conversation, `raw` are its texts as they are there, and `messages` the
    messages that were read from it.
    """
    known = {column, "id", "messages", "conversations", *_SYSTEM, *TOOL_COLUMNS, *METADATA}
    if column == "history":
        known |= _SWE_AGENT_COLUMNS
    if isinstance(row.get("thinking"), dict):
        known.add("thinking")  # a setting of requests to Anthropic; as text it is reasoning
    texts = [text.strip() for text in raw]
    texts += [text for message in messages for text in _message_texts(message)]
    unknown = [
        name
        for name, value in row.items()
        if name not in known
        and not is_blank(value)
        and not _holds_media(name, value)
        and not (is_short(value) and name not in _PART_OF_PROMPT)
        and not _is_copy(value, texts)
    ]
    if unknown:
        name, more = unknown[0], unknown[1:]
        shown = clip(repr(row[name]), max_chars=_MAX_VALUE_CHARS)
        also = f"; so are {', '.join(more)}" if more else ""
        raise Unreadable(f"{name}: the column is unknown: {shown}{also}; {metadata_hint(unknown)}")


def _message_texts(message: Message) -> Iterator[str]:
    yield message["content"].strip()
    if reasoning := message.get("reasoning"):
        yield reasoning.strip()


def _is_copy(value: Any, texts: Sequence[str]) -> bool:
    """Whether the messages contain all texts of a column."""
    if isinstance(value, str):
        text = value.strip()
        if text in texts or (len(text) >= _COPY_CHARS and any(text in one for one in texts)):
            return True
        if not text.startswith("["):
            return False
        try:
            value = parse_value(text, "")
        except Unreadable:
            return False
    found = [*_texts_in(value)]
    return bool(found) and all(isinstance(one, str) and one.strip() in texts for one in found)


def _texts_in(value: Any) -> Iterator[Any]:
    """Yield the texts in pairs of texts or in messages, and any other value among them."""
    if isinstance(value, list):
        for one in value:
            yield from _texts_in(one)
    elif isinstance(value, dict) and value.keys() in ({"role", "content"}, {"from", "value"}):
        yield value.get("content", value.get("value"))
    else:
        yield value
