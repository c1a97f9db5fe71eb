"""From a stored record to a conversation that every format can render."""
