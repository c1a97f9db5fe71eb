"""Starts a program in a Python that has just been started, from a frame in a descriptor."""

from __future__ import annotations

import struct

LENGTH = struct.Struct(">I")

BOOT = """\
import os, sys
fd = int(sys.argv[1])
def take(size):
    taken = b""
    while len(taken) < size: taken += os.read(fd, size - len(taken)) or sys.exit(1)
    return taken
exec(take(int.from_bytes(take(4), "big")))
"""
"""Reads a frame from the descriptor that is its first argument, and runs it."""


def make_frame(text: str) -> bytes:
    """Return text as a frame: four bytes of length, then UTF-8."""
    raw = text.encode()
    return LENGTH.pack(len(raw)) + raw
