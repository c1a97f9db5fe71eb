"""A record read into a conversation that every format can render."""
