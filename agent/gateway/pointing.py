"""Counts the tokens that a request of an agent only points at, or finds that they are unknown.

The bytes of a body bound its own tokens, but not those of a picture at a URL, of the reply that it
continues by an id, or of a tool that the provider runs. Pictures and recorded replies have bounds.
Under a budget, a request that points at anything else is refused; so is one whose cost does not
follow from its tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from agent.messages.message import NON_CHAT_CALLS, ExchangeEvent
from agent.models.dialects.openai_responses import API as RESPONSES
from agent.models.dialects.openai_responses import conversation_id_in
from agent.models.model import ModelSettings, PointedTokens, generation_config
from agent.wires.base import Wire
from agent.wires.wire import WireError
from batch_trajectories.basics.exact_json import objects_among

MAX_PICTURE_TOKENS = 16_384
"""Upper bound of the tokens of one picture for OpenAI (10,000 patches), Gemini and open servers."""

_MODEL_PICTURE_TOKENS = {
    # 2,833 tokens and 5,667 for each of at most 8 tiles.
    re.compile(r"4o-mini"): 50_000,
    # 4,784 at the highest resolution.
    re.compile(r"claude"): 5_000,
}
"""Bounds for models whose names match, from the providers' documentation."""

_LIKELY_PICTURE_TOKENS = 1_500

_TEXTS = frozenset(
    {
        "text",
        "input_text",
        "output_text",
        "summary_text",
        "reasoning_text",
        "refusal",
        "thinking",
        "redacted_thinking",
        "reasoning",
        "encrypted_content",
        "compaction",
        "tool_use",
        "server_tool_use",
        "mcp_tool_use",
        "tool_reference",
    }
)
"""Types of content parts whose tokens are in the body."""

_NO_TYPE = str(None)
"""The type of a part or an item that states none."""

_PICTURES = frozenset({"image", "image_url", "input_image", "output_image", "computer_screenshot"})

_ITEMS = frozenset(
    {
        "message",
        "function_call",
        "custom_tool_call",
        "computer_call",
        "local_shell_call",
        "shell_call",
        "apply_patch_call",
        "compaction",
        "compaction_summary",
        _NO_TYPE,
    }
)
"""Types of items of the Responses API whose tokens are in the body."""

_AGENT_TOOLS = ("function", "custom", "local_shell", "apply_patch", "computer")
"""Beginnings of the types of tools of the Responses API that the agent runs."""

_SEARCHES = re.compile(r"search-preview|search-api|deep-research|:online$|(^|/)(compound|sonar)")
"""Names of models that use tools of their own, which are priced by the call."""

_USUAL_TIERS = (None, "auto", "default", "flex", "scale", "standard", "standard_only")

_GEMINI_MEDIA_KEYS = ("inlineData", "inline_data", "fileData", "file_data")

_GEMINI_TEXT_KEYS = frozenset(
    {
        "text",
        "thought",
        "thoughtSignature",
        "thought_signature",
        "functionCall",
        "function_call",
        "executableCode",
        "codeExecutionResult",
    }
)
"""Keys of Gemini's parts whose tokens are in the body."""

_POINTERS = re.compile(
    r"(^|_)(image|picture|video|audio|file|document|attachment|url|uri)s?($|_)", re.I
)
"""Names of fields that some servers read pictures and files from."""

_CHECKED_MESSAGE_FIELDS = frozenset({"audio", "content"})
"""Fields of messages that have checks of their own."""

_OTHER_COSTS = {
    "prompt": "a prompt that the endpoint has stored",
    "data_sources": "data that the endpoint searches",
    "dataSources": "data that the endpoint searches",
    "connectors": "tools that the endpoint runs",
    "vector_store_ids": "data that the endpoint searches",
    "enable_search": "a search, which is priced by the call",
    "file_ids": "files that the endpoint has stored",
    "files": "files that the endpoint has stored",
    "attachments": "files that the endpoint has stored",
    "chat_template": "a template, which can make any prompt of a short text",
    "mm_processor_kwargs": "how many tokens a picture has",
    "inference_geo": "a place whose prices may be higher",
    "provider": "providers, whose prices may be higher",
    "cachedContent": "content that the endpoint has stored",
    "cached_content": "content that the endpoint has stored",
    "container": "files that the endpoint has stored",
    "plugins": "plugins, which are priced by the call",
    "search_parameters": "a search, which is priced by its sources",
    "prediction": "a prediction, whose rejected tokens are paid too",
    "models": "other models, whose prices may be higher",
    "audio": "audio, whose tokens cost more than those of text",
}
"""Fields of a body with a cost beyond its tokens, and the cause of that cost."""

Replies = Callable[[], Sequence[ExchangeEvent]]
"""Returns the recorded calls of the agent."""


def count_pointed(
    wire: Wire, body: Mapping[str, Any], settings: ModelSettings, replies: Replies
) -> PointedTokens:
    """Count the tokens that a body only points at, as far as they are known."""
    return _BodyScan(wire, body, settings, replies).sum()


def check_pointed(
    wire: Wire, body: Mapping[str, Any], settings: ModelSettings, replies: Replies
) -> None:
    """Raise `WireError` if a body points at something whose tokens or cost are unknown."""
    scan = _BodyScan(wire, body, settings, replies)
    if scan.unknown:
        place, what = scan.unknown[0]
        raise WireError(
            f"{place}: {what}: what this costs is not known beforehand, so the budget of the run "
            "cannot be kept; send it whole, as texts and pictures, or run without a budget"
        )


class _BodyScan:
    """The pictures, earlier replies and unknown costs in one body."""

    def __init__(
        self, wire: Wire, body: Mapping[str, Any], settings: ModelSettings, replies: Replies
    ) -> None:
        self._replies = replies
        self._max_picture_tokens = next(
            (most for name, most in _MODEL_PICTURE_TOKENS.items() if name.search(settings.name)),
            MAX_PICTURE_TOKENS,
        )
        self._picture_count = 0
        self._followed_tokens = 0
        self.unknown: list[tuple[str, str]] = []
        """The fields with an unknown cost, and the cause of each."""
        self._look_at_fields(wire.layout.api, body, settings)
        if id := wire.continued_id(body):
            self._follow(id)
        match wire.layout.api:
            case api if api in NON_CHAT_CALLS:
                return
            case "openai_responses":
                self._look_at_items(body)
            case "gemini":
                self._look_at_gemini(body)
            case _:
                self._look_at_content(body.get("system"), "system")
                for n, message in enumerate(objects_among(body.get("messages"))):
                    self._look_at_content(message.get("content"), f"messages[{n}].content")
                    for name in message.keys() - _CHECKED_MESSAGE_FIELDS:
                        if message[name] and _POINTERS.search(name):
                            self._add_unknown(
                                f"messages[{n}].{name}", "what the endpoint makes of it"
                            )
                    if message.get("audio"):
                        self._add_unknown(f"messages[{n}].audio", "audio that the endpoint has")

    def sum(self) -> PointedTokens:
        """Return the tokens of everything that was found."""
        return PointedTokens(
            self._followed_tokens + self._picture_count * self._max_picture_tokens,
            self._followed_tokens
            + self._picture_count * min(_LIKELY_PICTURE_TOKENS, self._max_picture_tokens),
        )

    def _add_unknown(self, place: str, what: str) -> None:
        self.unknown.append((place, what))

    def _look_at_fields(self, api: str, body: Mapping[str, Any], settings: ModelSettings) -> None:
        for name, what in _OTHER_COSTS.items():
            if body.get(name) and (name != "prompt" or api == RESPONSES):
                self._add_unknown(name, what)
        config = generation_config(body)
        edits = body.get("context_management")
        edits = edits.get("edits") if isinstance(edits, dict) else edits
        for n, edit in enumerate(objects_among(edits)):
            if str(edit.get("type")).startswith("compact"):
                self._add_unknown(f"context_management[{n}]", "another call, which is paid for")
        for place, given in (
            ("modalities", body.get("modalities")),
            ("generationConfig.responseModalities", config.get("responseModalities")),
        ):
            if isinstance(given, list) and any(str(one).lower() != "text" for one in given):
                self._add_unknown(place, "replies that are not text cost more")
        for name in ("service_tier", "serviceTier"):
            if (tier := body.get(name)) not in _USUAL_TIERS:
                self._add_unknown(name, f"the prices of {tier!r} are unknown")
        if body.get("speed") not in (None, "standard"):
            self._add_unknown("speed", f"the prices of {body['speed']!r} are unknown")
        if _SEARCHES.search(settings.name):
            self._add_unknown("model", f"{settings.name} uses tools that are priced by the call")
        if api == RESPONSES:
            self._look_at_tools(body.get("tools"), "tools")

    def _look_at_tools(self, tools: Any, place: str) -> None:
        for n, tool in enumerate(objects_among(tools)):
            kind, here = str(tool.get("type")), f"{place}[{n}]"
            if kind == "namespace":
                self._look_at_tools(tool.get("tools"), f"{here}.tools")
                continue
            environment = tool.get("environment")
            is_run_by_agent = kind.startswith(_AGENT_TOOLS) or (
                kind == "shell"
                and (not isinstance(environment, dict) or environment.get("type") == "local")
            )
            if not is_run_by_agent:
                self._add_unknown(here, f"a tool of type {kind!r} may be run by the provider")

    def _look_at_items(self, body: Mapping[str, Any]) -> None:
        self._look_at_content(body.get("instructions"), "instructions")
        for n, item in enumerate(objects_among(body.get("input"))):
            place, kind = f"input[{n}]", str(item.get("type"))
            # The type of a reference may be left out.
            is_bare = kind == _NO_TYPE and "content" not in item and item.get("id")
            if (
                kind == "item_reference"
                or is_bare
                or (kind == "reasoning" and item.get("id") and not item.get("encrypted_content"))
            ):
                self._follow_item(str(item.get("id")), place)
            elif kind == "image_generation_call":
                self._picture_count += 1
            elif kind.endswith("_output"):
                self._look_at_content(item.get("output"), f"{place}.output")
            elif kind in _ITEMS:
                self._look_at_content(item.get("content"), f"{place}.content")
            elif kind != "reasoning":
                self._add_unknown(place, f"an item of type {kind!r}")

    def _look_at_gemini(self, body: Mapping[str, Any]) -> None:
        system = body.get("systemInstruction") or body.get("system_instruction")
        if isinstance(system, dict):
            self._look_at_parts(system.get("parts"), "systemInstruction.parts")
        for n, content in enumerate(objects_among(body.get("contents"))):
            self._look_at_parts(content.get("parts"), f"contents[{n}].parts")

    def _look_at_parts(self, parts: Any, place: str) -> None:
        for n, part in enumerate(objects_among(parts)):
            here = f"{place}[{n}]"
            for key in _GEMINI_MEDIA_KEYS:
                data = part.get(key)
                if not isinstance(data, dict):
                    continue
                kind = str(data.get("mimeType") or data.get("mime_type") or "")
                if kind.startswith("image/"):
                    self._picture_count += 1
                elif not (kind.startswith("text/") and key.startswith("inline")):
                    self._add_unknown(f"{here}.{key}", f"content of type {kind or 'unknown'!r}")
                break
            else:
                result = part.get("functionResponse") or part.get("function_response")
                if isinstance(result, dict):
                    inner = result.get("parts")
                    inner = [inner] if isinstance(inner, dict) else inner
                    self._look_at_parts(inner, f"{here}.functionResponse.parts")
                elif part and _GEMINI_TEXT_KEYS.isdisjoint(part):
                    self._add_unknown(here, f"a part with {', '.join(part)}")

    def _look_at_content(self, content: Any, place: str) -> None:
        parts = [content] if isinstance(content, dict) else content
        if isinstance(parts, list) and any(isinstance(part, list) for part in parts):
            self._add_unknown(place, "a list in a list of parts")
        for n, part in enumerate(objects_among(parts)):
            here, kind = f"{place}[{n}]", str(part.get("type"))
            # A part without a type is what its fields say, at servers that take such.
            if kind == _NO_TYPE and any(_POINTERS.search(name) for name in part):
                kind = next(name for name in part if _POINTERS.search(name))
            source = part.get("source") if kind == "document" else None
            within = source.get("type") if isinstance(source, dict) else None
            if kind in _TEXTS or (kind == _NO_TYPE and isinstance(part.get("text"), str)):
                continue
            if kind in _PICTURES:
                self._picture_count += 1
            elif kind == "tool_result" or kind.endswith("_tool_result") or kind == "search_result":
                self._look_at_content(part.get("content"), f"{here}.content")
            elif isinstance(source, dict) and within == "content":
                self._look_at_content(source.get("content"), f"{here}.source.content")
            elif within != "text":
                self._add_unknown(here, f"a part of type {kind!r}")

    def _follow(self, id: str) -> None:
        """Add the tokens that the model read and wrote up to the reply with this id."""
        calls = [
            event
            for event in self._replies()
            if id in (event["body"].get("id"), conversation_id_in(event["body"]))
        ]
        place = "previous_response_id, conversation"
        if not calls:
            self._add_unknown(place, f"{id}: no reply to this agent, so what it holds")
            return
        usage = calls[-1]["reply"]["usage"]
        counts = [usage["input_tokens"], usage["output_tokens"]] if usage else [None]
        if None in counts:
            self._add_unknown(place, f"{id}: this reply came without its number of tokens")
        self._followed_tokens += sum(count or 0 for count in counts)

    def _follow_item(self, id: str, place: str) -> None:
        """Add the tokens that the model wrote in the reply that has this item."""
        for event in self._replies():
            usage = event["reply"]["usage"]
            if id in _ids_in(event["body"]) and usage and usage["output_tokens"] is not None:
                self._followed_tokens += usage["output_tokens"]
                return
        self._add_unknown(place, f"{id}: an item of no reply to this agent")


def _ids_in(body: Mapping[str, Any]) -> Iterator[str]:
    return (str(item.get("id")) for item in objects_among(body.get("output")))
