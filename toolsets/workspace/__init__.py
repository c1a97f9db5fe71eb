"""The directory that a conversation works in."""
