"""The program on a machine between the service's stream and a command: no byte is lost or doubled.

The service passes on what a process prints, but drops what it prints while no client listens, and
input that was sent with an answer that was lost cannot be told from input that never came. So both
directions are numbered, kept until the other side has them, and sent again after a break.

Frames, on both streams: `d NUMBER LENGTH` and data; `a NUMBER`, all data up to there has come. To
the relay also: `r NUMBER TOKEN`, send again what came after NUMBER, behind the mark `m TOKEN`; and
`e`, close the command's input. From the relay also: `x CODE`, the command has ended.

It needs nothing but Python 3.8, and runs as source text: `python3 -c SOURCE COMMAND...`.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from typing import Dict, Iterator  # noqa: UP035 - for machines with Python 3.8

CHUNK_BYTES = 1 << 15
_MAX_PENDING_BYTES = 4 << 20
_LAST_ACK_S = 30.0
"""Seconds that the relay waits for a client to learn how the command ended."""


class Frames:
    """Reads frames from pieces of a stream: tuples of words, and data for `d`."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, piece: bytes) -> Iterator[tuple[list[str], bytes]]:
        """Add a piece; yield the frames that are complete."""
        self._buffer += piece
        while True:
            line, found, rest = self._buffer.partition(b"\n")
            if not found:
                return
            words = line.decode("ascii", "replace").split()
            data = b""
            if words and words[0] == "d":
                size = int(words[2])
                if len(rest) < size:
                    return
                data, rest = rest[:size], rest[size:]
            self._buffer = rest
            if words:
                yield words, data

    def skip_to(self, mark: bytes, piece: bytes) -> bytes | None:
        """Add a piece, and drop all up to a mark; return what follows it, None if not yet seen."""
        _, found, rest = (self._buffer + piece).partition(mark)
        if not found:
            self._buffer = (self._buffer + piece)[-len(mark) :]
            return None
        self._buffer = b""
        return rest


def data_frame(number: int, data: bytes) -> bytes:
    """Return the frame of numbered data."""
    return b"d %d %d\n" % (number, len(data)) + data


def mark(token: str) -> bytes:
    """Return what the relay prints before it sends again."""
    return b"\nm %s\n" % token.encode()


class Relay:
    """One command, its numbered output and its numbered input."""

    def __init__(self, argv: list[str]) -> None:
        self._child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._stdin, self._stdout = self._child.stdin, self._child.stdout.fileno()
        self._frames = Frames()
        self._accepted = self._sent = 0
        self._pending: Dict[int, bytes] = {}  # noqa: UP006 - see above
        self._end: bytes | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        self._selector.register(self._stdout, selectors.EVENT_READ)

    def run(self) -> int:
        """Pass everything on until the command has ended; return its exit code."""
        give_up = None
        while True:
            for key, _ in self._selector.select(1.0):
                if key.fd == 0:
                    self._read_input()
                else:
                    self._read_output()
            if self._end is not None:
                give_up = give_up or time.monotonic() + _LAST_ACK_S
                if not self._pending or time.monotonic() > give_up:
                    return max(0, self._child.returncode)

    def _read_input(self) -> None:
        piece = os.read(0, CHUNK_BYTES)
        if not piece:
            self._selector.unregister(0)
            self._close_stdin()
        for words, data in self._frames.feed(piece):
            if words[0] == "d":
                if int(words[1]) == self._accepted + 1:
                    self._accepted += 1
                    self._pass_on(data)
                _print(b"a %d\n" % self._accepted)
            elif words[0] == "a":
                self._forget(int(words[1]))
            elif words[0] == "r":
                self._forget(int(words[1]))
                _print(mark(words[2]) + b"a %d\n" % self._accepted)
                for number, again in self._pending.items():
                    _print(data_frame(number, again))
                if self._end is not None:
                    _print(self._end)
            elif words[0] == "e":
                self._close_stdin()

    def _read_output(self) -> None:
        data = os.read(self._stdout, CHUNK_BYTES)
        if data:
            self._sent += 1
            self._pending[self._sent] = data
            _print(data_frame(self._sent, data))
            if len(self._pending) * CHUNK_BYTES >= _MAX_PENDING_BYTES:
                self._selector.unregister(self._stdout)
            return
        self._selector.unregister(self._stdout)
        self._end = b"x %d\n" % self._child.wait()
        _print(self._end)

    def _pass_on(self, data: bytes) -> None:
        try:
            self._stdin.write(data)
            self._stdin.flush()
        except (OSError, ValueError):
            pass  # the command has closed its input, and its end says how it went on

    def _close_stdin(self) -> None:
        try:
            self._stdin.close()
        except OSError:
            pass

    def _forget(self, number: int) -> None:
        for known in [known for known in self._pending if known <= number]:
            del self._pending[known]
        if self._stdout not in self._selector.get_map() and self._end is None:
            self._selector.register(self._stdout, selectors.EVENT_READ)


def _print(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    sys.exit(Relay(sys.argv[1:]).run())
