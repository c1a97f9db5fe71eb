"""Streams of Gemini's generateContent: each part is a reply that holds what is new."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent.models.bodies.assembly import Growing, to_body
from agent.models.stream_events import StreamHandler
from batch_trajectories.basics.exact_json import objects_among

_TEXT_FIELDS = frozenset({"text", "thought", "thoughtSignature"})


class GeminiAssembly:
    """Puts one reply together from its parts; see `Assembly`."""

    def __init__(self, on_delta: StreamHandler) -> None:
        self._tell = on_delta
        self._reply: dict[str, Any] = {}
        self._candidates: dict[int, _Candidate] = {}
        self.has_reason = False
        self.is_over = False
        """Always false: nothing but the end of the connection says so."""

    def add(self, part: Mapping[str, Any]) -> None:
        """See `Assembly.add`. The counts of the last part are totals."""
        for key, value in part.items():
            if key == "usageMetadata" and isinstance(value, dict):
                self._reply[key] = {**self._reply.get(key, {}), **value}
            elif key != "candidates" and value is not None:
                self._reply[key] = value
        for candidate in objects_among(part.get("candidates")):
            index = candidate.get("index")
            place = index if isinstance(index, int) else 0
            self._candidates.setdefault(place, _Candidate()).add(candidate)
            self.has_reason = all(one.has_reason for one in self._candidates.values())
            if not place:
                self._tell_parts(candidate)

    def finish(self) -> bytes:
        """See `Assembly.finish`."""
        whole = [self._candidates[n].build() for n in sorted(self._candidates)]
        return to_body({**({"candidates": whole} if whole else {}), **self._reply})

    def _tell_parts(self, candidate: Mapping[str, Any]) -> None:
        content = candidate.get("content")
        for part in objects_among(content.get("parts")) if isinstance(content, dict) else ():
            if isinstance(text := part.get("text"), str) and text:
                kind = "thinking_delta" if part.get("thought") else "text_delta"
                self._tell({"type": kind, "text": text})  # type: ignore[typeddict-item] # of two


class _Candidate:
    """One candidate as far as it is known."""

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._content: dict[str, Any] = {}
        self._parts: list[Growing] = []

    @property
    def has_reason(self) -> bool:
        """Whether it is said why the candidate ended."""
        return bool(self._fields.get("finishReason"))

    def add(self, given: Mapping[str, Any]) -> None:
        for key, value in given.items():
            if key != "content" and value is not None:
                self._fields[key] = value
        content = given.get("content")
        if not isinstance(content, dict):
            return
        self._content |= {key: value for key, value in content.items() if key != "parts"}
        for part in objects_among(content.get("parts")):
            self._add_part(part)

    def _add_part(self, part: Mapping[str, Any]) -> None:
        """Texts that follow each other are one, up to a signature, which ends a text."""
        last = self._parts[-1].fields if self._parts else {}
        text = part.get("text")
        continues = (
            isinstance(text, str)
            and "text" in last
            and part.keys() | last.keys() <= _TEXT_FIELDS
            and bool(part.get("thought")) == bool(last.get("thought"))
            and "thoughtSignature" not in last
        )
        if not continues:
            self._parts.append(Growing(part))
            return
        self._parts[-1].append("text", str(text))
        if "thoughtSignature" in part:
            last["thoughtSignature"] = part["thoughtSignature"]

    def build(self) -> dict[str, Any]:
        content = dict(self._content)
        if self._parts:
            content["parts"] = [part.build() for part in self._parts]
        return {**({"content": content} if content else {}), **self._fields}
