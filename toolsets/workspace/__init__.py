"""The directory a conversation works in."""
