"""The state of a conversation: a fold of its events."""
