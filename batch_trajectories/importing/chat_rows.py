"""Rows of messages, in the forms of OpenAI, ShareGPT and the trainers that read either.

A message has `role` and `content`, or `from` and `value`. Calls are objects, texts in tags, or
entries of their own; results, tools and arguments are JSON or text. Null and empty values count as
absent. An unknown key, role or part is refused with its place, because its content would be lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agent.messages.message import Message, ProviderBlocks, split_inline_reasoning
from agent.models.parsing import get_object
from agent.wires.reading import placeholder
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.text import clip
from batch_trajectories.importing.call_forms import (
    ForeignCall,
    json_text,
    parse_value,
    parse_values,
    read_call,
    read_calls,
)
from batch_trajectories.importing.conversation import (
    Dialogue,
    SourceConversation,
    Unreadable,
    facts_in_metadata,
    is_blank,
    read_messages,
    refuse_unknown,
)
from batch_trajectories.importing.row_columns import (
    MARKS,
    add_media,
    is_masked,
    is_masked_row,
    refuse_pairs,
    refuse_unknown_columns,
    short_columns,
    system_columns,
    tools_in,
    unite_tools,
    verdict_in,
)
from batch_trajectories.importing.tagged_text import (
    RESULT,
    TaggedResult,
    has_calls,
    read_function_call,
    read_reply,
    read_results,
    read_system,
    reads_as_failure,
)

_API = "openai_chat"

_ROLES: Mapping[str, str] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "chatgpt"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call", "function-call"), "calls"),
    **dict.fromkeys(("tool", "observation", "function", "tool_response"), "tool"),
    **dict.fromkeys(("tool_result", "function_response", "function-response", "ipython"), "tool"),
}
"""Kinds of entries by the roles of OpenAI, ShareGPT, LLaMA-Factory, ms-swift and Llama. The kind
`calls` is a reply that has calls only."""

_ROLE_KEYS = ("role", "from")
_CONTENT_KEYS = ("content", "value")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_NOTE_KEYS = frozenset(
    {
        "id",
        "uuid",
        "index",
        "turn",
        "timestamp",
        "created_at",
        "model",
        "extra",
        "metadata",
        "cache_control",
        "annotations",
        "usage",
        "finish_reason",
        "source",
        "agent",
        "message_type",
        "is_demo",  # of SWE-agent
        "tags",
        "internal",  # of inspect: ids of a provider
    }
)
"""Keys of messages that no model reads or writes."""
_REPLY_KEYS = frozenset(
    {
        "tool_calls",
        "function_call",
        "refusal",
        "reasoning_details",
        "thinking_blocks",
        *_REASONING_KEYS,
    }
)
_PROVIDER_KEYS = frozenset({"reasoning_details", "thinking_blocks"})
_RESULT_KEYS = frozenset({"name", "tool_name", "function", "is_error", "tool_call_ids"})
_RESULT_IDS = ("tool_call_id", "tool_use_id", "call_id")

_TEXT_KEYS = ("text", "value", "content")
_TEXT_PARTS = (None, "text", "input_text", "output_text")
_THOUGHTS = ("thinking", "reasoning")
_HIDDEN_THOUGHT_KEYS = ("type", *_THOUGHTS, "redacted", "signature", "summary")
"""Keys of thoughts that a provider hides."""
_MEDIA_PARTS = frozenset(
    {
        "image",
        "image_url",
        "input_image",
        "audio",
        "audio_url",
        "input_audio",
        "video",
        "video_url",
        "file",
        "input_file",
        "document",
    }
)
"""Types of parts that are no text; `export` refuses them by name."""

_EXCERPT_CHARS = 60


def read_row(row: Mapping[str, Any], column: str, api: str) -> SourceConversation:
    """Read the conversation in a column of a row; `api` is the dialect that its record names.

    Raises `Unreadable`.
    """
    entries = _read_entries(row, column)
    if entries[-1].get("role") == "exit" and str(row.get("trajectory_format")).startswith("mini-"):
        del entries[-1]  # mini-swe-agent's copy of the submission
    refuse_pairs(row)
    known = facts_in_metadata(metadata_in(row))
    reading = _RowReader(entries, column, is_plain=api != _API)
    reading.read()
    _add_system(reading, row)
    messages = reading.messages()
    add_media(row, messages, _API)
    verdict = verdict_in(row)
    refuse_unknown_columns(row, column, map(_plain_text, entries), messages)
    model = {} if api == _API else {"model": known.get("model_returned")}
    replies = [dict(model) for message in messages if message["role"] == "assistant"]
    no_loss = reading.no_loss
    if verdict is False or is_masked_row(row):
        no_loss = [*range(1, len(replies) + 1)]
    if verdict is not None and "check" not in known:
        known["check"] = {"passed": verdict, "reward": float(verdict)}
    tools = tools_in(row)
    if reading.tools:
        tools = unite_tools(tools or [], reading.tools, f"{column}: <tools>")
    return SourceConversation(
        Dialogue(messages, replies, no_loss=no_loss),
        api,
        id=row_id(row),
        tools=reading.tools if tools is None else tools,
        columns=short_columns(row),
        facts=known,
    )


def _read_entries(row: Mapping[str, Any], column: str) -> list[dict[str, Any]]:
    given = row.get(column)
    if isinstance(given, str):
        given = parse_value(given, column)
    if isinstance(given, list):
        given = [
            parse_value(one, f"{column}[{n}]") if isinstance(one, str) else one
            for n, one in enumerate(given)
        ]
    if not isinstance(given, list) or not given or not all(isinstance(one, dict) for one in given):
        raise Unreadable(f"{column}: it must be a list of objects")
    return given


def row_id(row: Mapping[str, Any]) -> str | None:
    """Return the id of a row; None without one."""
    id = row.get("id")
    return str(id) if isinstance(id, str | int) and str(id) else None


def metadata_in(row: Mapping[str, Any]) -> Any:
    """Return the column `metadata`, parsed if it is JSON text; None for other text."""
    metadata = row.get("metadata")
    if not isinstance(metadata, str):
        return metadata
    try:
        return exact_json.loads(metadata)
    except exact_json.JSONDecodeError:
        return None  # a text of other programs


def _add_system(reading: _RowReader, row: Mapping[str, Any]) -> None:
    """Put the system prompt of a row's column before its messages. Raises `Unreadable`."""
    for name, prompt in system_columns(row):
        if isinstance(prompt, dict):
            prompt = [prompt]
        if not isinstance(prompt, str | list):
            raise Unreadable(f"{name}: it must be text or a list of parts")
        content = reading.take_system(prompt, name)
        inside = [one["content"] for one in reading.read_so_far if one["role"] == "system"]
        if content not in inside and inside:
            raise Unreadable(f"{name}: the conversation has another system message")
        if content and not inside:
            reading.read_so_far.insert(0, {"role": "system", "content": content})


class _RowReader:
    """Reads the entries of a row, one after the other, as messages of OpenAI's chat API."""

    def __init__(
        self, entries: Sequence[Mapping[str, Any]], column: str, *, is_plain: bool
    ) -> None:
        self._entries = entries
        self._column = column
        self._is_plain = is_plain
        """Whether the messages hold no blocks of a provider."""
        self._is_tagged = self._holds_tags()
        self._open: dict[str, str] = {}
        """The names of tools by id, for the calls of the last reply that have no result."""
        self._ids: dict[str, str] = {}
        """The names of tools by id, for all calls."""
        self._is_in_order = False
        """Whether a result since the last reply did not name its call."""
        self._taken = {one for entry in entries for one in _ids_in(entry)}
        self._may_merge = False
        """Whether the next entry, if it has calls only, belongs to the last reply."""
        self._pictures: dict[int, list[dict[str, Any]]] = {}
        """The pictures of replies, by their numbers, from 1."""
        self._errors: set[int] = set()
        """Positions of results that say that they are errors."""
        self.read_so_far: list[dict[str, Any]] = []
        self.no_loss: list[int] = []
        """The numbers of the replies, from 1, that carry no loss."""
        self.tools: list[dict[str, Any]] | None = None
        """The tools that the system prompt offers; None without a list."""

    def read(self) -> None:
        """Read all entries. Raises `Unreadable`."""
        for n, entry in enumerate(self._entries):
            place = f"{self._column}[{n}]"
            kind, key, content = self._split_entry(entry, place)
            match kind:
                case "system":
                    self._read_system(entry, content, f"{place}.{key}")
                case "user":
                    self._read_user(entry, content, place, key)
                case "tool":
                    self._read_results(entry, content, place, key)
                case _:
                    self._read_reply(entry, content, place, key, is_all_calls=kind == "calls")

    def messages(self) -> list[Message]:
        """Return the messages that were read, as a gateway records them."""
        items = [
            (None, f"{self._column}: message {n}", one) for n, one in enumerate(self.read_so_far, 1)
        ]
        messages = [message for (message,) in read_messages(_API, items)]
        replies = 0
        for n, message in enumerate(messages):
            if message["role"] == "tool":
                message["is_error"] = self.read_so_far[n].get("is_error", False)
            elif message["role"] == "assistant":
                replies += 1
                self._keep_space(message, self.read_so_far[n])
                # Blocks of a provider stay; a `<think>` block needs no copy.
                if self._is_plain and _PROVIDER_KEYS.isdisjoint(self.read_so_far[n]):
                    message.pop("provider_blocks", None)
                if pictures := self._pictures.get(replies):
                    known = message.get("provider_blocks") or ProviderBlocks(api=_API, blocks=[])
                    message["provider_blocks"] = {**known, "blocks": [*known["blocks"], *pictures]}
        return messages

    def _keep_space(self, message: Message, given: Mapping[str, Any]) -> None:
        """Restore the white space around the reasoning of a reply, which dialects cut off."""
        known = message.get("reasoning")
        content = given["content"]
        inline = _thoughts_in(content) if isinstance(content, str) else None
        for exact in (given.get("reasoning_content"), given.get("reasoning"), inline):
            if isinstance(exact, str) and known is not None and exact.strip() == known:
                message["reasoning"] = exact
                return

    def take_system(self, content: Any, place: str) -> Any:
        """Return a system prompt without tools in tags; add these to `tools`.

        Raises `Unreadable`.
        """
        content = _parts(content, place)
        if not isinstance(content, str):
            is_text = all(part["type"] == "text" for part in content)
            text = "\n".join(part["text"] for part in content) if is_text else ""
            content = text or content
        if not isinstance(content, str) or "<tools>" not in content:
            return content
        if not (self._is_plain or self._is_tagged):
            return content
        own, tools = read_system(content, place)
        if tools is not None:
            self.tools = unite_tools(self.tools or [], tools, f"{place}: <tools>")
        return own

    def _holds_tags(self) -> bool:
        """Whether tags in the texts are calls and results."""
        # A reply may also speak of the tags. Without another sign of the dialect, or with calls as
        # objects, tags are text.
        kinds = [_ROLES.get(str(entry.get("role") or entry.get("from"))) for entry in self._entries]
        texts = [_plain_text(entry) for entry in self._entries]
        pairs = [*zip(kinds, texts, strict=True)]
        if any(
            not is_blank(one.get(k))
            for one in self._entries
            for k in ("tool_calls", "function_call")
        ):
            return False
        calls = any(kind == "assistant" and has_calls(text) for kind, text in pairs)
        signs = any(
            (kind in ("tool", "user") and RESULT in text)
            or (kind == "system" and "<tools>" in text)
            for kind, text in pairs
        )
        return (calls and (self._is_plain or signs)) or (
            self._is_plain and any(kind == "tool" for kind in kinds)
        )

    def _split_entry(self, entry: Mapping[str, Any], place: str) -> tuple[str, str, Any]:
        """Return the kind of an entry, the key of its content, and the content.

        Raises `Unreadable`.
        """
        role_keys = [key for key in _ROLE_KEYS if not is_blank(entry.get(key))]
        if not role_keys:
            raise Unreadable(f"{place}.{self._usual(_ROLE_KEYS)}: it is missing")
        if len(role_keys) > 1:
            raise Unreadable(
                f"{place}.{role_keys[1]}: the message has {role_keys[0]} as well; keep one"
            )
        kind = _ROLES.get(entry[role_keys[0]]) if isinstance(entry[role_keys[0]], str) else None
        if kind is None:
            known = ", ".join(_ROLES)
            raise Unreadable(f"{place}.{role_keys[0]}: {entry[role_keys[0]]!r} is none of {known}")
        keys = [key for key in _CONTENT_KEYS if entry.get(key) is not None]
        if len(keys) > 1:
            raise Unreadable(f"{place}.{keys[1]}: the message has {keys[0]} as well; keep one")
        self._refuse_unknown(entry, kind, place)
        key = keys[0] if keys else self._usual(_CONTENT_KEYS)
        if not keys and kind in ("system", "user", "calls"):
            raise Unreadable(f"{place}.{key}: it is missing")
        return kind, key, entry.get(key)

    def _usual(self, keys: Sequence[str]) -> str:
        return keys[1] if self._is_plain else keys[0]

    def _refuse_unknown(self, entry: Mapping[str, Any], kind: str, place: str) -> None:
        """Raise `Unreadable` for an unknown key with a value."""
        known = {*_ROLE_KEYS, *_CONTENT_KEYS, *MARKS, *_NOTE_KEYS}
        if kind in ("assistant", "calls"):
            known |= _REPLY_KEYS
            if entry.get("message_type") is not None:  # SWE-agent repeats the reply in parts
                known |= {"action", "tool_call_ids"}
                if _holds_lines(entry, entry.get("thought")):
                    known.add("thought")
        elif kind == "tool":
            known |= {*_RESULT_KEYS, *_RESULT_IDS}
        for key, value in entry.items():
            if key == "provider_specific_fields" and isinstance(value, dict):  # LiteLLM's copies
                value = {name: one for name, one in value.items() if one != entry.get(name)}
                if kind == "assistant" and is_blank(
                    {one: entry.get(one) for one in _REASONING_KEYS}
                ):
                    value = {
                        name: one for name, one in value.items() if name not in _REASONING_KEYS
                    }
            is_kind = key == "type" and value in ("message", entry.get("role"), entry.get("from"))
            if key not in known and not is_blank(value) and not is_kind:
                shown = clip(repr(value), max_chars=_EXCERPT_CHARS)
                raise Unreadable(f"{place}.{key}: it is unknown in a message of this role: {shown}")

    def _read_system(self, entry: Mapping[str, Any], content: Any, place: str) -> None:
        del entry
        self._may_merge = False
        content = self.take_system(content, place)
        if content:  # empty if it had tools only
            self.read_so_far.append({"role": "system", "content": content})

    def _read_user(self, entry: Mapping[str, Any], content: Any, place: str, key: str) -> None:
        self._may_merge = False
        if isinstance(content, str):
            if self._is_tagged and self._open and _is_all_results(content):
                self._read_results(entry, content, place, key)
                return
            self._refuse_unanswered(place)
            self.read_so_far.append({"role": "user", "content": content})
            return
        said: list[Any] = []
        for n, part in enumerate(_require_list(content, f"{place}.{key}")):
            if isinstance(part, dict) and part.get("type") == "tool_result":
                self._add_user_message(said, f"{place}.{key}")
                said = []
                self._read_result_part(part, f"{place}.{key}[{n}]")
            else:
                said.append(part)
        self._add_user_message(said, f"{place}.{key}")

    def _add_user_message(self, parts: list[Any], place: str) -> None:
        if parts:
            self._refuse_unanswered(place)
            self.read_so_far.append({"role": "user", "content": _parts(parts, place)})

    def _read_reply(
        self,
        entry: Mapping[str, Any],
        content: Any,
        place: str,
        key: str,
        *,
        is_all_calls: bool,
    ) -> None:
        self._refuse_unanswered(place)
        where = f"{place}.{key}"
        made: dict[str, Any] = {"role": "assistant", "content": ""}
        calls: list[ForeignCall] = []
        pictures: list[dict[str, Any]] = []
        if is_all_calls and not isinstance(content, str):
            calls += read_calls(content, where)
        elif is_all_calls:
            thoughts, rest = split_inline_reasoning(content)
            text, calls = read_function_call(rest, where)
            made["content"] = (
                text if thoughts is None else content[: len(content) - len(rest)] + text
            )
        elif isinstance(content, str):
            text = content
            if self._is_tagged:
                text, calls = read_reply(content, where)
            made["content"] = text
        elif content is not None:
            calls, pictures = _read_parts_of_reply(content, made, where)
        if not is_blank(given := entry.get("tool_calls")):
            calls += read_calls(given, f"{place}.tool_calls")
        if not is_blank(given := entry.get("function_call")):
            calls.append(read_call(given, f"{place}.function_call"))
        self._add_reasoning(made, entry, place)
        _add_reasoning_of_response(made, entry, place)
        if (
            content is None
            and not calls
            and made.keys() == {"role", "content"}
            and not made["content"]
        ):
            raise Unreadable(f"{where}: it is missing")
        quiet = is_masked(entry, f"{place}.")
        if is_all_calls and self._may_merge and quiet == self._is_last_quiet():
            self._merge(made, calls)
            return
        self.read_so_far.append(made)
        number = sum(one["role"] == "assistant" for one in self.read_so_far)
        if quiet:
            self.no_loss.append(number)
        if pictures:
            self._pictures[number] = pictures
        self._open, self._is_in_order = {}, False
        self._add_calls(made, calls, number)
        self._may_merge = True

    def _merge(self, made: Mapping[str, Any], calls: Sequence[ForeignCall]) -> None:
        """Add calls in an entry of their own to the reply before them."""
        reply = self.read_so_far[-1]
        reply["content"] = "\n\n".join(filter(None, (reply["content"], made["content"])))
        if "reasoning_content" in made:
            thoughts = (reply.get("reasoning_content"), made["reasoning_content"])
            reply["reasoning_content"] = "\n\n".join(filter(None, thoughts))
        self._add_calls(reply, calls, sum(one["role"] == "assistant" for one in self.read_so_far))

    def _add_calls(self, reply: dict[str, Any], calls: Sequence[ForeignCall], number: int) -> None:
        known = reply.get("tool_calls", [])
        for n, call in enumerate(calls, start=len(known)):
            id = call.id or self._new_id(f"call_{number}_{n}")
            function = {"name": call.name, "arguments": call.arguments}
            known.append({"id": id, "type": "function", "function": function, **call.extra})
            self._open[id] = self._ids[id] = call.name
        if known:
            reply["tool_calls"] = known

    def _new_id(self, id: str) -> str:
        while id in self._taken:
            id += "_"
        self._taken.add(id)
        return id

    def _add_reasoning(self, made: dict[str, Any], entry: Mapping[str, Any], place: str) -> None:
        for key in ("reasoning_content", "reasoning"):
            if not is_blank(entry.get(key)):
                if made.get(key, entry[key]) != entry[key]:
                    raise Unreadable(
                        f"{place}.{key}: the message has other reasoning as well; keep one"
                    )
                made[key] = entry[key]
        if not is_blank(entry.get("thinking")):
            made.setdefault("reasoning_content", entry["thinking"])
            if made["reasoning_content"] != entry["thinking"]:
                raise Unreadable(
                    f"{place}.thinking: the message has other reasoning as well; keep one"
                )
        for key in ("reasoning_content", "reasoning"):
            if not isinstance(made.get(key, ""), str):
                raise Unreadable(f"{place}.{key}: it must be text")
        for key in ("reasoning_details", "thinking_blocks"):
            if not is_blank(entry.get(key)):
                made[key] = _require_list(entry[key], f"{place}.{key}")
        if not is_blank(refusal := entry.get("refusal")):
            if not isinstance(refusal, str) or made["content"]:
                raise Unreadable(f"{place}.refusal: it must be text, in place of the content")
            made["content"] = refusal

    def _refuse_unanswered(self, place: str) -> None:
        """Raise `Unreadable` if calls have no result and the results name no calls."""
        if self._is_in_order and self._open:
            raise Unreadable(
                f"{place}: the calls before it have fewer results, and none names its call"
            )

    def _is_last_quiet(self) -> bool:
        number = sum(one["role"] == "assistant" for one in self.read_so_far)
        return number in self.no_loss

    def _read_results(self, entry: Mapping[str, Any], content: Any, place: str, key: str) -> None:
        self._may_merge = False
        where = f"{place}.{key}"
        ids = [entry[name] for name in _RESULT_IDS if not is_blank(entry.get(name))]
        given = entry.get("tool_call_ids")
        if not ids and isinstance(given, list) and len(given) == 1:
            ids = given
        elif not ids and not is_blank(given):
            raise Unreadable(f"{place}.tool_call_ids: it must name one call")
        names = [entry[name] for name in ("name", "tool_name", "function") if entry.get(name)]
        is_error = _is_error(entry, place)
        if isinstance(content, list) and content and all(map(_is_result_part, content)):
            for n, part in enumerate(content):
                self._read_result_part(part, f"{where}[{n}]")
            return
        if ids or not isinstance(content, str):
            name = str(names[0]) if names else ""
            self._add_result(str(ids[0]) if ids else "", name, content, where, is_error=is_error)
            return
        name = str(names[0]) if names else ""
        for result in self._split_results(content, where):
            has_failed = is_error or (self._is_tagged and reads_as_failure(result.value))
            self._add_result(
                result.id, result.name or name, result.text, where, is_error=has_failed
            )

    def _split_results(self, text: str, place: str) -> list[TaggedResult]:
        """Split a text into results; LLaMA-Factory puts several into one."""
        if text.lstrip().startswith(RESULT) and (self._is_tagged or self._is_plain):
            return read_results(text, place)
        texts = text.split(_BETWEEN_RESULTS) if len(self._open) > 1 else [text]
        if len(texts) == 1 and len(self._open) > 1:
            values = _parse_list(text)
            if len(values) == len(self._open):
                texts = [one if isinstance(one, str) else json_text(one) for one in values]
        return [TaggedResult(id="", name="", text=one, value=one) for one in texts]

    def _read_result_part(self, part: Mapping[str, Any], place: str) -> None:
        known = {"type", "content", "is_error", *_RESULT_IDS, *_NOTE_KEYS}
        for key, value in part.items():
            if key not in known and not is_blank(value):
                raise Unreadable(f"{place}.{key}: it is unknown in a result")
        ids = [part[name] for name in _RESULT_IDS if not is_blank(part.get(name))]
        is_error = _is_error(part, place)
        id = str(ids[0]) if ids else ""
        self._add_result(id, "", part.get("content"), f"{place}.content", is_error=is_error)

    def _add_result(self, id: str, name: str, content: Any, place: str, *, is_error: bool) -> None:
        """Add a result to the call that it names, or else to the first call without a result."""
        self._may_merge = False
        self._is_in_order |= not id and not name
        if not id or (self._is_tagged and id not in self._open):
            fits = [key for key, called in self._open.items() if not name or called == name]
            if not fits:
                of = f" of {name!r}" if name else ""
                raise Unreadable(f"{place}: a result{of}, but the reply before it has no such call")
            if id and id not in self._taken and id not in self._ids:
                self._rename(fits[0], id)
            else:
                id = fits[0]
        if id not in self._ids:
            raise Unreadable(f"{place}: a result of {id!r}, but no call before it has this id")
        if name and name != self._ids[id]:
            raise Unreadable(f"{place}: name: {name!r}, but its call is of {self._ids[id]!r}")
        self._open.pop(id, None)
        result = {"role": "tool", "tool_call_id": id, "is_error": is_error}
        self.read_so_far.append({**result, "content": _result_content(content, place)})

    def _rename(self, old: str, new: str) -> None:
        """Give a call the id that its result has."""
        for message in reversed(self.read_so_far):
            for call in message.get("tool_calls", ()):
                if call["id"] == old:
                    call["id"] = new
                    self._open[new] = self._ids[new] = self._ids.pop(old)
                    self._open.pop(old, None)
                    self._taken.add(new)
                    return


_INLINE = re.compile(r"\s*<(think|thinking|reasoning|REASONING_SCRATCHPAD)>(.*?)</\1>", re.DOTALL)
"""A block of reasoning before a text."""
_BETWEEN_RESULTS = "\n</tool_response>\n<tool_response>\n"
"""The text between the results of one reply, as `export` writes it for LLaMA-Factory."""


def _plain_text(entry: Mapping[str, Any]) -> str:
    content = entry.get("content", entry.get("value"))
    return content if isinstance(content, str) else ""


def _ids_in(entry: Mapping[str, Any]) -> list[str]:
    """Return the ids of the calls that an entry has as objects."""
    ids = []
    for key in ("tool_calls", "content", "value"):
        parts = entry.get(key)
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and not is_blank(part.get("id")):
                ids.append(str(part["id"]))
    return ids


def _require_list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise Unreadable(f"{place}: it must be text or a list of parts")
    return value


def _parts(content: Any, place: str) -> Any:
    """Convert content to text, or to parts in the form of OpenAI's API. Raises `Unreadable`."""
    if isinstance(content, str):
        return content
    return [_part(one, f"{place}[{n}]") for n, one in enumerate(_require_list(content, place))]


def _part_type(part: Any) -> str | None:
    """Return the type of a part; None without one, "unknown" if the type is no text."""
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str | None) else "unknown"


def _part(part: Any, place: str) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise Unreadable(f"{place}: it must be text or an object")
    kind = _part_type(part)
    if kind in _MEDIA_PARTS:
        return {key: value for key, value in part.items() if value is not None}
    if kind not in _TEXT_PARTS:
        raise Unreadable(f"{place}.type: {kind!r} is no known part of this message")
    return {"type": "text", "text": _text_in(part, _TEXT_KEYS, place)}


def _text_in(part: Mapping[str, Any], keys: Sequence[str], place: str) -> str:
    """Return the text of a part, under one of these keys. Raises `Unreadable`."""
    found = [key for key in keys if part.get(key) is not None]
    if len(found) != 1 or not isinstance(part[found[0]], str):
        raise Unreadable(f"{place}.{found[-1] if found else keys[0]}: it must be text")
    known = {"type", "signature", found[0], *_NOTE_KEYS}
    for key, value in part.items():
        if key not in known and not is_blank(value):
            raise Unreadable(
                f"{place}.{key}: it is unknown in a part of the type {part.get('type')!r}"
            )
    return str(part[found[0]])


def _read_parts_of_reply(
    content: Any, made: dict[str, Any], place: str
) -> tuple[list[ForeignCall], list[dict[str, Any]]]:
    """Return the calls and pictures of a reply; add its text and thoughts to `made`."""
    texts: list[str] = []
    """The texts of the model, and a line for each picture."""
    thoughts: list[str] = []
    calls: list[ForeignCall] = []
    pictures: list[dict[str, Any]] = []
    for n, part in enumerate(_require_list(content, place)):
        where = f"{place}[{n}]"
        kind = _part_type(part)
        if kind in ("tool_use", "tool_call", "function_call"):
            calls.append(read_call(part, where))
        elif kind in _THOUGHTS and part.get("redacted") is True:  # as inspect has them
            refuse_unknown(part, (*_HIDDEN_THOUGHT_KEYS, *_NOTE_KEYS), where)
            hidden = {"type": "redacted_thinking", "data": str(part.get(kind))}
            made.setdefault("thinking_blocks", []).append(hidden)
            if not is_blank(summary := part.get("summary")):
                thoughts.append(_text_in({"summary": summary}, ("summary",), where))
        elif kind in _THOUGHTS:
            part = {key: part[key] for key in part if key != "redacted"}
            thoughts.append(_text_in(part, (*_THOUGHTS, "text"), where))
        elif kind == "redacted_thinking":
            made.setdefault("thinking_blocks", []).append(dict(part))
        elif kind in _MEDIA_PARTS and "image" in str(kind):
            pictures.append(dict(part))
            texts += ["\n" if texts else "", placeholder(part), "\n"]
        elif kind in _MEDIA_PARTS:
            raise Unreadable(f"{where}.type: {kind!r} is no known part of a reply")
        else:
            texts.append(_part(part, where)["text"])
    if texts and pictures and texts[-1] == "\n":
        del texts[-1]
    made["content"] = "".join(texts)
    if any(thoughts):
        made["reasoning_content"] = "\n\n".join(filter(None, thoughts))
    return calls, pictures


def _add_reasoning_of_response(made: dict[str, Any], entry: Mapping[str, Any], place: str) -> None:
    """Add reasoning that only LiteLLM's fields or a stored response have. Raises `Unreadable`."""
    # mini-swe-agent writes both.
    if not made.keys().isdisjoint(("reasoning_content", "reasoning", "reasoning_details")):
        return
    response = get_object(get_object(entry, "extra"), "response")
    choices = exact_json.objects_among(response.get("choices"))
    message = get_object(choices[0], "message") if choices else {}
    inside = "provider_specific_fields"  # LiteLLM's place for fields that it does not know
    of_response = f"{place}.extra.response.choices[0].message"
    for given, where in (
        (get_object(entry, inside), f"{place}.{inside}"),
        (message, of_response),
        (get_object(message, inside), f"{of_response}.{inside}"),
    ):
        for key in _REASONING_KEYS:
            if is_blank(given.get(key)):
                continue
            if not isinstance(given[key], str):
                raise Unreadable(f"{where}.{key}: it must be text")
            made["reasoning_content"] = given[key]
            return


def _holds_lines(entry: Mapping[str, Any], text: Any) -> bool:
    """Whether the content of a message has all lines of a text, plain or in JSON."""
    content = entry.get("content")
    if isinstance(content, list):
        content = "\n".join(
            str(part["text"]) for part in exact_json.objects_among(content) if "text" in part
        )
    if not isinstance(content, str) or not isinstance(text, str):
        return False
    lines = (line.strip() for line in text.splitlines())
    return all(line in content or json.dumps(line)[1:-1] in content for line in lines)


def _is_all_results(text: str) -> bool:
    """Whether the text of a user consists of results in tags, as some templates write them."""
    return text.lstrip().startswith(RESULT) and text.rstrip().endswith("</tool_response>")


def _thoughts_in(text: str) -> str | None:
    """Return the reasoning before a text, with the white space around it; None without any."""
    found, end = [], 0
    while match := _INLINE.match(text, end):
        found.append(match[2])
        end = match.end()
    thoughts = (one.removeprefix("\n").removesuffix("\n") for one in found)
    return "\n\n".join(one for one in thoughts if one.strip()) or None


def _is_error(result: Mapping[str, Any], place: str) -> bool:
    given = result.get("is_error")
    if not isinstance(given, bool) and not is_blank(given):
        shown = clip(repr(given), max_chars=_EXCERPT_CHARS)
        raise Unreadable(f"{place}.is_error: {shown} is none of false, true")
    return given is True


def _is_result_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "tool_result"


def _result_content(content: Any, place: str) -> Any:
    """Convert a result to text or parts; any other value to JSON. Raises `Unreadable`."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and content:
        kinds = [_part_type(part) for part in content]
        if all(kind in _MEDIA_PARTS or kind in _TEXT_PARTS[1:] for kind in kinds):
            return _parts(content, place)
    return json_text(content)


def _parse_list(text: str) -> list[Any]:
    """Return the elements of a text that is a JSON list; [] for any other text."""
    if not text.lstrip().startswith("["):
        return []
    try:
        values = parse_values(text, "")
    except Unreadable:
        return []
    return values[0] if len(values) == 1 and isinstance(values[0], list) else []
