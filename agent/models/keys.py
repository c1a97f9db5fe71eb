"""Removes API keys from replies of endpoints, before they are read, shortened or stored."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from urllib.parse import quote

from batch_trajectories.basics import exact_json

MARK = "[API key]"
"""Replaces a key."""

_MIN_KEY_CHARS = 8

_PLACEHOLDERS = frozenset({"dummy-key", "fake-key", "lm-studio", "no-key-required", "not-needed"})
"""Keys that people give to servers that need none; replies may well contain such words."""


_WIDE = ("utf-16-le", "utf-16-be")


class Key:
    """The secrets of one endpoint, in all forms in which it may send them back."""

    def __init__(self, *keys: str) -> None:
        """Take the secrets of an endpoint; a short key or a single word is only a placeholder."""
        secrets = dict.fromkeys(key for key in keys if _is_secret(key))
        self._keys = tuple(secrets)
        self._forms = tuple(dict.fromkeys(form for key in secrets for form in _forms(key)))
        self._texts = tuple(form.decode() for form in self._forms)
        self._wide = tuple(key.encode(code) for key in secrets for code in _WIDE)

    def remove_from(self, body: bytes) -> bytes:
        """Remove the key from a body; returns the same object if the key is not in it."""
        for form in self._forms:
            if form in body:
                return self._cut(body)
        if self._forms and (b"\\u00" in body or b"\0" in body) and self._has_escaped_key(body):
            return self._cut(body)
        return body

    def remove_from_text(self, text: str) -> str:
        """Remove the key from a text, in its plain form and in base64."""
        for form in self._texts:
            if form in text:
                text = text.replace(form, MARK)
        return text

    def _has_escaped_key(self, body: bytes) -> bool:
        """Whether the key occurs with needless JSON escapes, or in UTF-16."""
        if any(form in body for form in self._wide):
            return True
        try:
            plain = exact_json.dumps(exact_json.loads(body))
        except (ValueError, TypeError):
            return False
        return any(form in plain for form in self._forms)

    def _cut(self, body: bytes) -> bytes:
        for form in (*self._forms, *self._wide):
            body = body.replace(form, MARK.encode())
        for key in self._keys:
            letters = (
                rb"(?:%b|\\+u00%02x)" % (re.escape(letter), letter[0])
                for letter in (bytes([code]) for code in key.encode())
            )
            body = re.sub(b"(?i:%b)" % b"".join(letters), MARK.encode(), body)
        return body


def _is_secret(key: str) -> bool:
    return len(key) >= _MIN_KEY_CHARS and not key.isalpha() and key not in _PLACEHOLDERS


def _forms(key: str) -> Iterator[bytes]:
    """The forms of a key: plain, in JSON, in URLs, and in base64 at each offset."""
    yield key.encode()
    escaped = json.dumps(key)[1:-1]
    yield from (text.encode() for text in (escaped, escaped.replace("/", "\\/")))
    yield quote(key, safe="").encode()
    for before in range(3):
        # Letters at its edges also hold bits of the bytes around it, so they are left out.
        coded = base64.b64encode(bytes(before) + key.encode()).rstrip(b"=")
        inner = coded[(0, 2, 3)[before] : len(coded) - ((before + len(key)) % 3 > 0)]
        yield from (inner, inner.translate(bytes.maketrans(b"+/", b"-_")))
