"""Conversations as flat message lists, for callers who bring their own loop."""
