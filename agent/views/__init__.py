"""Models that wrap a model: they change the messages that it is shown, never the record."""
