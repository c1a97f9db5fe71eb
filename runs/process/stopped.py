"""How a conversation learns that its run is being stopped."""

from __future__ import annotations


class Stopped(Exception):
    """The run is being stopped: the conversation rests where its journal ends."""
