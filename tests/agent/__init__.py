"""Tests of agent/: one conversation, in one process."""
