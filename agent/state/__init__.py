"""The state of a conversation, which is a fold of its events."""
