"""The state of a conversation, computed from its events."""
