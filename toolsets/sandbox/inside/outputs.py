"""Keeps the head and the tail of an output stream."""

from __future__ import annotations


class HeadTail:
    """The head and the tail of a byte stream of any length, in limited memory."""

    def __init__(self, max_bytes: int) -> None:
        self._head_bytes = max_bytes // 2
        self._tail_bytes = max_bytes - self._head_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0
        """The number of bytes so far, with those that were dropped."""

    def feed(self, chunk: bytes) -> None:
        """Add the next piece of the stream."""
        self.total += len(chunk)
        room = self._head_bytes - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        self._tail += chunk[-self._tail_bytes :] if self._tail_bytes else b""
        # Trimming at twice the size moves each byte once on average.
        if len(self._tail) > 2 * self._tail_bytes:
            self._trim()

    def head_and_tail(self) -> tuple[bytes, bytes]:
        """Return the head, and the tail; the tail is empty if the head holds all."""
        self._trim()
        return bytes(self._head), bytes(self._tail)

    def _trim(self) -> None:
        if len(self._tail) > self._tail_bytes:
            del self._tail[: len(self._tail) - self._tail_bytes]
