"""Digests of messages and requests, without what changes from start to start."""

from __future__ import annotations
