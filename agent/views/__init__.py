"""Models around a model: they change what it is shown."""
